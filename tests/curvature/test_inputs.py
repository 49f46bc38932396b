"""Bad input is one clear line; dropout, tuples, half precision, compiled and wrapped networks each have an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from autodiff.nets import K, build
from reference import curvature as dense
from torch import Tensor, nn

from metacal.curvature import (
    Curvature,
    ggn_product,
    gn_sharpness,
    gn_trace,
    hessian_product,
    hessian_sharpness,
    hessian_trace,
    top_eigenpairs,
)
from metacal.errors import InputError


def with_v(product: Callable[..., Any]) -> Callable[..., Any]:
    def call(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return product(model, x, y, [torch.ones_like(p) for p in model.parameters() if p.requires_grad])

    return call


ALL = [with_v(ggn_product), with_v(hessian_product), gn_sharpness, hessian_sharpness, gn_trace, hessian_trace]


class Returns(nn.Module):
    """A network with another kind of output."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.change = build("mlp tanh")[0], change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.net(x))


@pytest.mark.parametrize("measure", ALL)
def test_wrong_outputs_and_labels(measure: Callable[..., Any]) -> None:
    model, x, y = build("mlp tanh")
    for change, message in [
        (lambda z: (z, z), "returned a tuple of 2: return the logits alone, or wrap the network in metacal.Backbone"),
        (lambda z: {"logits": z}, "returned a dict"),
        (lambda z: z[:, :, None], r"returned shape \(\d, 4, 1\)"),
        (lambda z: z[:, :1], r"labels must lie in 0..1"),  # one logit stands for two classes
        (lambda z: z.sum(0, keepdim=True), r"returned shape \(1, 4\)"),
        (lambda z: z.detach(), "logits do not depend on any trainable parameter"),
        (lambda z: z / 0, "logits must be finite, row 0"),
    ]:
        with pytest.raises(InputError, match=message):
            measure(Returns(change), x, y)
    with pytest.raises(InputError, match=r"labels must lie in 0..3, y\[2\] is 4"):
        measure(model, x, torch.tensor([0, 1, 4, 0, 0, 0]))
    with pytest.raises(InputError, match=r"y\[0\] is -1"):
        measure(model, x, y * 0 - 1)
    with pytest.raises(InputError, match=r"y must have shape \(6,\)"):
        measure(model, x, y[:3])
    with pytest.raises(InputError, match="integer labels"):
        measure(model, x, y.double())
    with pytest.raises(InputError, match="at least one example"):
        measure(model, x[:0], y[:0])
    with pytest.raises(InputError, match="no trainable parameter"):
        measure(build("mlp tanh")[0].requires_grad_(False), x, y)
    with pytest.raises(InputError, match="float32 or all float64"):
        measure(build("mlp tanh")[0].bfloat16(), x.bfloat16(), y)
    with pytest.raises(InputError, match=r"must be a torch.nn.Module, got function"):
        measure(lambda x: x, x, y) if measure in ALL[2:] else ggn_product(lambda x: x, x, y, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("measure", ALL)
def test_inputs_and_parameters_that_are_no_real_numbers(measure: Callable[..., Any]) -> None:
    for model, x, y in (build("mlp tanh"), build("cnn groupnorm")):
        with pytest.raises(InputError, match="logits must be finite, row 0 holds"):
            measure(model, x * torch.nan, y)
    with pytest.raises(InputError, match="float32 or all float64, got"):
        measure(nn.Linear(6, K, dtype=torch.complex128), torch.randn(6, 6, dtype=torch.complex128), y)


def test_options() -> None:
    model, x, y = build("mlp tanh")
    v = [torch.ones_like(p) for p in model.parameters()]
    for tol in (0, -1e-2, 1, float("nan")):
        with pytest.raises(InputError, match="tol must lie in"):
            gn_sharpness(model, x, y, tol=tol)
    for call, message in [
        (lambda: gn_sharpness(model, x, y, loss="nll"), "loss must be one of cross_entropy, mse, got 'nll'"),
        (lambda: gn_sharpness(model, x, y, max_products=0), "max_products"),
        (lambda: hessian_sharpness(model, x, y, which="top"), "which must be magnitude, algebraic or smallest"),
        (lambda: top_eigenpairs(model, x, y, 0), "k must be at least 1"),
        (lambda: top_eigenpairs(model, x, y, 10**6), "k must not exceed the 113 trainable"),
        (lambda: top_eigenpairs(model, x, y, 2, matrix="fisher"), "matrix must be gn or hessian"),
        (lambda: gn_sharpness(model, x, y, start=[t * 0 for t in v]), "start must be finite and not zero"),
        (lambda: gn_sharpness(model, x, y, start=v[:2]), "start must hold 6 tensors"),
        (lambda: ggn_product(model, x, y, v[::-1]), r"v\[0\] must have the parameter's shape"),
        (lambda: ggn_product(model, x, y, torch.ones(113)), "v must be a list of tensors"),
        (lambda: ggn_product(model, x, y, v, chunk_size=0), "chunk_size must be at least 1"),
        (lambda: gn_trace(model, x, y, chunk_size=0), "chunk_size must be at least 1"),
        (lambda: hessian_trace(model, x, y, chunk_size=-1), "chunk_size must be at least 1"),
        (lambda: ggn_product(model, x, y, v, route="magic"), "route must be one of"),
        (lambda: ggn_product(model, x, y, v, randomness="maybe"), "randomness must be"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, K)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.nn.functional.dropout(torch.tanh(self.a(x)), 0.5, self.training))


@pytest.mark.parametrize("measure", ALL)
def test_dropout_in_training_mode_is_refused(measure: Callable[..., Any]) -> None:
    _, x, y = build("mlp tanh")
    model = Dropping().train()
    state = torch.get_rng_state()
    with pytest.raises(InputError, match="model draws random numbers"):
        measure(model, x, y)
    assert torch.equal(torch.get_rng_state(), state)
    measure(model.eval(), x, y)


def test_frozen_dropout_is_one_mask_by_every_route() -> None:
    _, x, y = build("mlp tanh")
    model = Dropping().train()
    v = [
        torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for p in model.parameters()
    ]

    class Masked(nn.Module):
        """The same network with the mask of seed 7 written out."""

        def __init__(self) -> None:
            super().__init__()
            self.net = model
            with torch.random.fork_rng():
                torch.manual_seed(7)
                self.mask = torch.nn.functional.dropout(torch.ones(6, 8, dtype=torch.float64), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.net.b(torch.tanh(self.net.a(x)) * self.mask)

    g, h = dense.ggn(Masked(), x), dense.hessian(Masked(), x, y)
    state = torch.get_rng_state()
    for route in ("tape", "reverse"):
        got = ggn_product(model, x, y, v, randomness="freeze", seed=7, route=route)
        assert torch.allclose(dense.flat(got), g @ dense.flat(v), atol=1e-12)
    got = hessian_product(model, x, y, v, randomness="freeze", seed=7)
    assert torch.allclose(dense.flat(got), h @ dense.flat(v), atol=1e-12)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(InputError, match="one mask a chunk"):
        ggn_product(model, x, y, v, randomness="freeze", chunk_size=2)


def test_traces_under_frozen_dropout() -> None:
    _, x, y = build("mlp tanh")
    e = gn_trace(Dropping().train(), x, y, randomness="freeze", exact=True, seed=7)
    assert e.value > 0


def test_a_backbone_gives_its_logits() -> None:
    Backbone = pytest.importorskip("metacal.models.backbone").Backbone
    model, x, y = build("mlp tanh")
    wrapped = Backbone(model)
    assert gn_sharpness(wrapped, x, y).value == pytest.approx(gn_sharpness(model, x, y).value, rel=1e-10)
    assert hessian_trace(wrapped, x, y, exact=True) == hessian_trace(model, x, y, exact=True)


def test_one_example_and_two_classes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x, y = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    g, h = dense.ggn(model, x), dense.hessian(model, x, y)
    assert gn_sharpness(model, x, y, tol=1e-6).value == pytest.approx(float(torch.linalg.eigvalsh(g)[-1]), rel=1e-6)
    assert gn_trace(model, x, y, exact=True).value == pytest.approx(float(g.trace()), rel=1e-9)
    assert hessian_trace(model, x, y, exact=True).value == pytest.approx(float(h.trace()), rel=1e-9)
    assert gn_trace(model, x, y).stderr >= 0


def test_attention_modules_are_measured_right_in_evaluation_mode() -> None:
    """The encoder's fused fast path in evaluation mode has no derivatives at all."""
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True)
            self.head = nn.Linear(4, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).mean(1))

    model, x, y = Encoder().eval(), torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
    v = [torch.randn_like(p) for p in model.parameters()]
    g, h = dense.ggn(model, x), dense.hessian(model, x, y)
    for route in ("tape", "reverse"):
        assert torch.allclose(dense.flat(ggn_product(model, x, y, v, route=route)), g @ dense.flat(v), atol=1e-10)
    assert torch.allclose(dense.flat(hessian_product(model, x, y, v)), h @ dense.flat(v), atol=1e-10)
    assert gn_trace(model, x, y, exact=True).value == pytest.approx(float(g.trace()), rel=1e-9)


def test_release_frees_and_the_next_product_records_anew() -> None:
    model, x, y = build("mlp tanh")
    v = [torch.ones_like(p) for p in model.parameters()]
    c = Curvature(model, x, y)
    first = dense.flat(c.gn(v))
    c.release()
    assert not c._kept
    assert torch.equal(dense.flat(c.gn(v)), first)


def test_a_compiled_network_is_measured_uncompiled() -> None:
    """Compiled code has no double backward; wrapping compiles nothing yet, and the measures call what is inside."""
    model, x, y = build("mlp tanh")
    compiled = torch.compile(model)
    assert hessian_sharpness(compiled, x, y).value == hessian_sharpness(model, x, y).value
    assert gn_trace(compiled, x, y) == gn_trace(model, x, y)
