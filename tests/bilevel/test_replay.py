"""Forward mode that takes its values from the training pass: when it may, and that it computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from bilevel_problems import NETS
from torch import Tensor, nn
from torch.autograd import forward_ad

from metacal.bilevel.engines import Forward
from metacal.bilevel.tangents import FastTangents


def engine(net: nn.Module) -> Forward:
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    return Forward(net, net, [name for name, _ in named], [p for _, p in named])


def product(net: nn.Module, reuse: bool) -> tuple[Tensor, int]:
    """J v after the parameters have been overwritten, and the number of operations whose values were reused."""
    torch.manual_seed(4)
    forward = engine(net)
    forward.reuse = reuse
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    v = [torch.randn_like(p) for p in forward.params]
    start = {name: t.clone() for name, t in net.state_dict().items()}
    logits, _ = forward.forward(x)
    forward.backward(logits.square().sum(), logits)
    forward.keep()
    with torch.no_grad():
        for p in forward.params:
            p.mul_(0.5)
    result = forward.product(v)
    net.load_state_dict(start)
    return result, forward.reused


@pytest.mark.parametrize("net", NETS)
def test_same_tangents_as_a_plain_pass(net: str) -> None:
    module = NETS[net]().double()
    reused, hits = product(module, True)
    plain, none = product(module, False)
    torch.testing.assert_close(reused, plain, rtol=1e-12, atol=1e-12)
    assert hits > 0 and none == 0


class Overwrites(nn.Module):
    """Reads a value that it overwrites later, in a way that tangents can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        early = h * self.last.weight.sum()  # its tangent reads h
        with torch.no_grad():
            h.detach().add_(1.0)
        return self.last(torch.tanh(early.clone()))


class Multiplies(nn.Module):
    """An in-place operation whose tangent reads what it overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(48, 5), nn.Parameter(torch.rand(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x.flatten(1))) + 0.1
        h.mul_(self.scale)
        return self.last(h)


class Draws(nn.Module):
    """Noise of a kind that is not replayed from memory when its input is new, added twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.flatten(1)))
        h = h + torch.randn_like(h) + torch.randn(5, dtype=h.dtype)
        return self.last(F.dropout(F.dropout(h, 0.2), 0.3))


def test_an_in_place_operation_that_needs_its_input_is_not_replayed() -> None:
    module = Multiplies().double()
    reused, hits = product(module, True)
    assert hits == 0
    torch.testing.assert_close(reused, product(module, False)[0])


def test_overwritten_values_are_found_out() -> None:
    forward = engine(Overwrites().double())
    forward.model.train()
    with torch.no_grad():
        forward.forward(torch.randn(6, 48, dtype=torch.float64))
    assert forward.recorder is not None and not forward.recorder.usable


def test_random_draws_are_those_of_the_training_pass() -> None:
    module = Draws().double()
    torch.testing.assert_close(product(module, True)[0], product(module, False)[0])


def test_recording_does_not_change_the_pass() -> None:
    module = NETS["residual"]()
    x = torch.randn(6, 3, 4, 4)
    plain = module(x)
    assert torch.equal(engine(module).forward(x)[0], plain)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2), (2, 3, 2, 2, 2)])
def test_tangent_of_batch_norm(shape: tuple[int, ...], training: bool, affine: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x, dx = draw(*shape) * 3 + 2, draw(*shape)
    w, dw, b, db = (draw(3) for _ in range(4))
    mean, var = draw(3), draw(3).square()

    def tangent() -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            weight = forward_ad.make_dual(w, dw) if affine else None
            bias = forward_ad.make_dual(b, db) if affine else None
            y = F.batch_norm(forward_ad.make_dual(x, dx), mean.clone(), var.clone(), weight, bias, training)
            return forward_ad.unpack_dual(y).tangent.clone()

    plain = tangent()
    with FastTangents():
        torch.testing.assert_close(tangent(), plain)


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(3, 2, 2), nn.Conv2d(3, 2, 2, stride=2, padding=1)])
@pytest.mark.parametrize("bias", [True, False])
def test_tangent_of_a_first_layer(layer: nn.Module, bias: bool) -> None:
    layer = layer.double()
    shape = {"Linear": (5, 4), "Conv1d": (5, 3, 4), "Conv2d": (5, 3, 4, 4)}[type(layer).__name__]
    x = torch.randn(*shape, dtype=torch.float64)
    values = {"weight": layer.weight.detach(), "bias": layer.bias.detach()}
    tangents = {name: torch.randn_like(value) for name, value in values.items()}

    def tangent() -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(v, tangents[n]) for n, v in values.items() if bias or n == "weight"}
            return forward_ad.unpack_dual(torch.func.functional_call(layer, duals, (x,))).tangent.clone()

    plain = tangent()
    with FastTangents():
        torch.testing.assert_close(tangent(), plain)
