"""Transposes of the optimizers' steps and of clipping, against the whole Jacobian by differences."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from metacal.optim.transpose import kept_gradients, total_norm, transposed_clip, transposed_update

SIZES = (3, 1)


def jacobian_transpose(optimizer: Optimizer, params: list[nn.Parameter], grad: Tensor, cotangent: Tensor) -> Tensor:
    """(∂U/∂g)ᵀ cotangent, column by column, by real steps of copies."""

    def after(g: Tensor) -> Tensor:
        ps, opt = copy.deepcopy((params, optimizer))
        for p, part in zip(ps, g.split(SIZES)):
            p.grad = part.clone()
        opt.step()
        return torch.cat([p.detach() for p in ps])

    columns = []
    for i in range(len(grad)):
        e = torch.zeros_like(grad)
        e[i] = 1e-5
        columns.append((after(grad + e) - after(grad - e)) / 2e-5)
    return torch.stack(columns) @ cotangent


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.1),
        lambda p: SGD([{"params": p[:1], "momentum": 0.5, "nesterov": True}, {"params": p[1:]}], lr=0.1),
        lambda p: SGD(p, lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.9, maximize=True, foreach=True),
        lambda p: Adam(p, lr=0.1, eps=1e-2),
        lambda p: Adam(p, lr=0.1, eps=1e-2, weight_decay=0.3, amsgrad=True, maximize=True),
        lambda p: Adam(p, lr=0.1, eps=1e-2, decoupled_weight_decay=True, weight_decay=0.3),
        lambda p: AdamW(p, lr=0.1, eps=1e-2, betas=(0.5, 0.7), weight_decay=0.3, amsgrad=True, foreach=True),
        lambda p: AdamW([{"params": p[:1], "lr": 0.3}, {"params": p[1:], "maximize": True}], lr=0.1, eps=1e-2),
    ],
)
def test_transposed_update(make: Callable[[list[nn.Parameter]], Optimizer], steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)

    def draw(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    params = [nn.Parameter(draw(n)) for n in SIZES]
    optimizer = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = draw(len(p))
        optimizer.step()
    grad, cotangent = draw(sum(SIZES)), draw(sum(SIZES))
    expected = jacobian_transpose(optimizer, params, grad, cotangent)
    for p, part in zip(params, grad.split(SIZES)):
        p.grad = part.clone()
    apply = transposed_update(optimizer, params)
    optimizer.step()
    found, factor = apply([part.clone() for part in cotangent.split(SIZES)])
    torch.testing.assert_close(torch.cat([f for f in found if f is not None]) * factor, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kernel", ["single", "foreach", "fused"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["nesterov", "momentum", "adam", "adamw", "amsgrad"])
def test_kept_gradients_are_those_before_the_step(kind: str, decay: float, maximize: bool, kernel: str) -> None:
    """Whatever torch's step does to `.grad`; without a copy unless it does something."""
    params = [nn.Parameter(torch.full((n,), 0.5, dtype=torch.float64)) for n in SIZES]
    keys = {"lr": 0.1, "weight_decay": decay, "maximize": maximize, "foreach": kernel == "foreach"}
    keys["fused"] = kernel == "fused"
    if kind in ("nesterov", "momentum"):
        optimizer: Optimizer = SGD(params, momentum=0.9, nesterov=kind == "nesterov", **keys)
    elif kind == "adamw":
        optimizer = AdamW(params, **keys)
    else:
        optimizer = Adam(params, amsgrad=kind == "amsgrad", **keys)
    for step in range(2):
        grads = [torch.full((n,), 1.0 + step, dtype=torch.float64) for n in SIZES]
        for p, g in zip(params, grads):
            p.grad = g.clone()
        kept = kept_gradients(optimizer, params)
        optimizer.step()
        assert all(torch.equal(k, g) for k, g in zip(kept, grads, strict=True))
        untouched = all(torch.equal(p.grad, g) for p, g in zip(params, grads))
        assert untouched == all(k is p.grad for k, p in zip(kept, params))


def test_adamw_is_decoupled_by_its_class() -> None:
    """Older releases of torch have no `decoupled_weight_decay` in its groups."""
    found = []
    for marked in (True, False):
        p = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimizer = AdamW([p], lr=0.1, eps=1e-2, weight_decay=0.3)
        p.grad = torch.tensor([0.3, 0.1], dtype=torch.float64)
        (group,) = optimizer.param_groups
        mark = None if marked else group.pop("decoupled_weight_decay", None)
        apply = transposed_update(optimizer, [p])
        if mark is not None:
            group["decoupled_weight_decay"] = mark
        optimizer.step()
        found.append(apply([torch.ones(2, dtype=torch.float64)])[0][0])
    assert torch.equal(found[0], found[1])


def test_total_norm() -> None:
    tensors = [torch.tensor([[3.0, 0.0]]), torch.tensor(4.0), torch.tensor([12.0], dtype=torch.float64), torch.ones(0)]
    assert float(total_norm(tensors)) == 13.0
    assert float(total_norm([])) == 0.0


def test_parameters_that_the_step_does_not_move() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = SGD(params[:2], lr=0.5)
    params[0].grad = torch.ones(2)
    apply = transposed_update(optimizer, params)
    optimizer.step()
    found, factor = apply([torch.ones(2), torch.ones(2), torch.ones(2)])
    assert found[1] is None and found[2] is None and factor == -0.5
    assert apply([None, None, None])[0] == [None, None, None]


def test_parameters_that_joined_later_have_their_own_step() -> None:
    """Momentum's and Adam's counts are each parameter's own."""
    for make in (lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5), lambda p: Adam(p, lr=0.1, eps=1e-2)):
        params = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in SIZES]
        optimizer = make(params)
        params[0].grad = torch.ones(SIZES[0], dtype=torch.float64)
        optimizer.step()
        grad = torch.tensor([0.3, -0.2, 0.5, 0.7], dtype=torch.float64)
        cotangent = torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=torch.float64)
        expected = jacobian_transpose(optimizer, params, grad, cotangent)
        for p, part in zip(params, grad.split(SIZES)):
            p.grad = part.clone()
        apply = transposed_update(optimizer, params)
        optimizer.step()
        found, factor = apply([part.clone() for part in cotangent.split(SIZES)])
        result = torch.cat([f for f in found if f is not None]) * factor
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)


def test_adam_with_dead_entries_is_finite() -> None:
    """g = 0 throughout: the step does not move, and its slope is that of α/ε."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = Adam([p], lr=0.1)
    p.grad = torch.zeros(2)
    apply = transposed_update(optimizer, [p])
    optimizer.step()
    (found,), factor = apply([torch.ones(2)])
    assert found is not None and torch.isfinite(found * factor).all()


@given(st.floats(0.01, 20), st.integers(0, 5))
def test_transposed_clip(max_norm: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    u = torch.randn(4, generator=generator, dtype=torch.float64)
    total = g.norm()
    clipped = g * torch.clamp(max_norm / (total + 1e-6), max=1.0)
    (expected,) = torch.autograd.grad(clipped, g, u)
    cotangents = list(u.clone().split(SIZES))
    factor = transposed_clip(list(clipped.detach().split(SIZES)), total.item(), max_norm, cotangents)
    torch.testing.assert_close(torch.cat(cotangents) * factor, expected, rtol=1e-8, atol=1e-10)


def test_clipping_couples_a_parameter_on_which_the_outer_loss_does_not_depend() -> None:
    """Its gradient makes the norm larger and so the others shorter: zero cotangents and none are the same."""
    g, u = torch.tensor([3.0, 1.0, -2.0, 0.5]).double(), torch.tensor([1.0, 2.0, 0.0, 0.0]).double()
    clipped = list((g / (g.norm() + 1e-6)).split(SIZES))
    zero, none = list(u.clone().split(SIZES)), [u[: SIZES[0]].clone(), *[None] * (len(SIZES) - 1)]
    assert not any(t.any() for t in zero[1:])
    factors = [transposed_clip(clipped, g.norm().item(), 1.0, cotangents) for cotangents in (zero, none)]
    assert factors[0] == factors[1]
    assert all(torch.equal(a, b) for a, b in zip(zero, none, strict=True)) and zero[-1].any()
