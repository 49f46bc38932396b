"""Transposes of the steps of Muon, SAM and BulkSGD, against the whole Jacobian of their real steps by differences."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from metacal.errors import InputError
from metacal.optim.bulk_sgd import BulkSGD
from metacal.optim.muon import Muon
from metacal.optim.sam import SAM
from metacal.optim.transpose import check_supported, kept_gradients, transposed_update

SHAPES = [(3, 5), (5, 3), (2, 2, 2, 1), (4,), (2, 3)]
"""Wide, tall, a kernel; the last two are not Muon's."""


def draw(generator: torch.Generator, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([p.numel() for p in like])
    return [part.clone().view(p.shape) for part, p in zip(parts, like)]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def jacobian_transpose(optimizer: Optimizer, params: list[nn.Parameter], grad: Tensor, cotangent: Tensor) -> Tensor:
    """(∂U/∂g)ᵀ cotangent, column by column, by central differences of real steps of copies."""

    def after(g: Tensor) -> Tensor:
        ps, opt = copy.deepcopy((params, optimizer))
        for p, part in zip(ps, split(g, ps)):
            p.grad = part
        opt.step()
        return flat(ps)

    h, columns = 1e-5, []
    for i in range(len(grad)):
        e = torch.zeros_like(grad)
        e[i] = h
        # of fourth order: Newton–Schulz bends a lot
        near, far = after(grad + e) - after(grad - e), after(grad + 2 * e) - after(grad - 2 * e)
        columns.append((8 * near - far) / (12 * h))
    return torch.stack(columns) @ cotangent


def transposed(optimizer: Optimizer, params: list[nn.Parameter], grad: Tensor, cotangent: Tensor) -> Tensor:
    for p, part in zip(params, split(grad, params)):
        p.grad = part
    apply = transposed_update(optimizer, params)
    optimizer.step()
    found, factor = apply(list(split(cotangent, params)))
    return flat([torch.zeros_like(p) if f is None else f * factor for f, p in zip(found, params)])


def check(make: Callable[[list[nn.Parameter]], Optimizer], steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    params = [nn.Parameter(t) for t in draw(generator, SHAPES)]
    optimizer = make(params)
    for _ in range(steps):
        for p, g in zip(params, draw(generator, SHAPES)):
            p.grad = g
        optimizer.step()
    grad, cotangent = flat(draw(generator, SHAPES)), flat(draw(generator, SHAPES))
    expected = jacobian_transpose(optimizer, params, grad, cotangent)
    found = transposed(optimizer, params, grad, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def groups(params: list[nn.Parameter], rest: dict, **muon: object) -> list[dict]:
    return [{"params": params[:3], **muon}, {"params": params[3:], **rest}]


ADAMW = {"kind": "adamw", "lr": 0.1, "eps": 1e-2}
NESTEROV = {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: Muon(groups(p, ADAMW), lr=0.1),
        lambda p: Muon(groups(p, NESTEROV), lr=0.1, nesterov=False, weight_decay=0.0),
        lambda p: Muon(groups(p, NESTEROV, momentum=0.5), lr=torch.tensor(0.1), adjust_lr_fn="match_rms_adamw"),
        lambda p: Muon(groups(p, {**ADAMW, "amsgrad": True, "weight_decay": 0.3}), lr=0.1, ns_steps=3, momentum=0.0),
        lambda p: Muon(
            groups(p, {"kind": "sgd", "dampening": 0.4, "momentum": 0.9}), adjust_lr_fn="spectral_unclamped"
        ),
        lambda p: Muon(
            [{"params": p[:1]}, {"params": [*p[1:3], p[4]], "lr": 0.3}, {"params": p[3:4], **ADAMW}], lr=0.1
        ),
        lambda p: SAM(SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True)),
        lambda p: SAM(Muon(groups(p, ADAMW), lr=0.1)),
    ],
)
def test_transposed_update(make: Callable[[list[nn.Parameter]], Optimizer], steps: int) -> None:
    check(make, steps)


def test_newton_schulz_below_float32_is_differentiated_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    start, grad, cotangent = (draw(generator, [(4, 6)])[0].float() for _ in range(3))
    found = []
    for ns_dtype in (None, "bfloat16"):
        p = nn.Parameter(start.clone())
        found.append(transposed(Muon([p], lr=0.1, ns_dtype=ns_dtype), [p], grad.flatten(), cotangent.flatten()))
    assert torch.equal(*found)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "keys", [{}, {"momentum": 0.9, "nesterov": True, "foreach": True}, {"weight_decay": 0.1, "maximize": True}]
)
def test_bulk_sgd(keys: dict, k: int, steps: int) -> None:
    """With rates that differ between groups, so that the order of rate and projection matters."""
    model = net()
    params = list(model.parameters())
    split_groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]
    optimizer = BulkSGD(split_groups, lr=0.1, model=model, k=k, matrix="gauss_newton", **keys)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 3, generator=generator, dtype=torch.float64), torch.arange(8) % 2
    shapes = [tuple(p.shape) for p in params]
    for _ in range(steps):
        optimizer.prepare(x, y)
        for p, g in zip(params, draw(generator, shapes)):
            p.grad = g
        optimizer.step()
    optimizer.prepare(x, y)
    grad, cotangent = flat(draw(generator, shapes)), flat(draw(generator, shapes))
    expected = jacobian_transpose(optimizer, params, grad, cotangent)
    found = transposed(optimizer, params, grad, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_bulk_sgd_moves_parameters_that_the_outer_loss_does_not_read() -> None:
    """The projection couples: a cotangent of None is zero, but its part of the result is not; a missing g is."""
    model = net()
    params = list(model.parameters())
    optimizer = BulkSGD(params, lr=0.1, model=model, k=2, matrix="gauss_newton")
    generator = torch.Generator().manual_seed(1)
    optimizer.prepare(torch.randn(8, 3, generator=generator, dtype=torch.float64), torch.arange(8) % 2)
    for p in params[1:]:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    cotangents = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]
    results = []
    for third in (None, torch.zeros_like(params[2])):
        given = [cotangents[0].clone(), cotangents[1].clone(), third, cotangents[3].clone()]
        apply = transposed_update(optimizer, params)
        found, factor = apply(given)
        assert found[0] is None and factor == -0.1
        results.append(found[1:])
    for a, b in zip(*results):
        assert torch.equal(a, b)
    assert results[0][1].abs().max() > 1e-6


@pytest.mark.parametrize("kind", ["muon", "sam", "bulk_sgd"])
def test_kept_gradients_are_those_before_the_step(kind: str) -> None:
    """Also where the SGD inside uses `.grad` as scratch memory."""
    model = net()
    params = list(model.parameters())
    if kind == "muon":
        rest = [params[1], params[3]]
        optimizer: Optimizer = Muon([{"params": [params[0], params[2]]}, {"params": rest, **NESTEROV}], weight_decay=0)
    else:
        keys = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}
        optimizer = SAM(SGD(params, **keys)) if kind == "sam" else BulkSGD(params, model=model, **keys)
        if kind == "bulk_sgd":
            optimizer.prepare(torch.ones(4, 3, dtype=torch.float64), torch.arange(4) % 2)
    grads = [torch.full_like(p, 0.5) for p in params]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    kept = kept_gradients(optimizer, params)
    optimizer.step()
    assert all(torch.equal(k, g) for k, g in zip(kept, grads, strict=True))
    untouched = [torch.equal(p.grad, g) for p, g in zip(params, grads)]
    assert not all(untouched)
    assert untouched == [k is p.grad for k, p in zip(kept, params)]


def test_what_is_supported_is_known_exactly() -> None:
    """A subclass that steps in another way is no SGD."""

    class Slow(SGD):
        pass

    params = [nn.Parameter(torch.ones(2, 2))]
    check_supported(SAM(AdamW(params)))
    check_supported(Muon(params))
    for optimizer, name in ((Slow(params), "Slow"), (SAM(Slow(params)), "Slow"), (torch.optim.Rprop(params), "Rprop")):
        with pytest.raises(InputError, match=f"one of Adam, AdamW, BulkSGD, Muon, SAM, SGD .* got {name}"):
            check_supported(optimizer)
