"""Per-sample losses against their formulas, and the focal loss at its edges."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metacal import losses
from metacal.errors import InputError

GAMMAS = [0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 50.0]
GAPS = [0.0, 1e-3, 1.0, 10.0, 17.0, 20.0, 50.0, 89.0, 1e3, 1e4]


def batch(n: int = 6, k: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(n, k, generator=generator, dtype=torch.float64) * 3,
        torch.randint(k, (n,), generator=generator),
    )


def test_formulas() -> None:
    z, y = batch()
    p = torch.exp(z) / torch.exp(z).sum(1, keepdim=True)
    onehot = torch.eye(4, dtype=torch.float64)[y]
    p_y = (p * onehot).sum(1)
    close = torch.testing.assert_close
    close(losses.cross_entropy(z, y), -torch.log(p_y))
    close(losses.focal(z, y, 2.5), -((1 - p_y) ** 2.5) * torch.log(p_y))
    gamma = torch.linspace(0, 5, len(y), dtype=torch.float64)
    close(losses.focal(z, y, gamma), -((1 - p_y) ** gamma) * torch.log(p_y))
    target = 0.7 * onehot + 0.3 / 4
    close(losses.label_smoothing(z, y, 0.3), -(target * torch.log(p)).sum(1))
    close(losses.brier(z, y), ((p - onehot) ** 2).sum(1))
    close(losses.mse(z, y), ((z - onehot) ** 2).sum(1) / 4)


def test_label_smoothing_is_that_of_torch() -> None:
    z, y = batch()
    torch.testing.assert_close(
        losses.label_smoothing(z, y, 0.1), F.cross_entropy(z, y, label_smoothing=0.1, reduction="none")
    )


@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradients(name: str) -> None:
    z, y = batch()
    assert torch.autograd.gradcheck(lambda z: losses.LOSSES[name](z, y), z.requires_grad_())


def test_focal_mixed_derivative_by_differences() -> None:
    z, y = batch()
    gamma = torch.linspace(0.3, 6, len(y), dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda z, g: losses.focal(z, y, g), (z.requires_grad_(), gamma.requires_grad_())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_focal_is_finite_everywhere(gamma: float, dtype: torch.dtype) -> None:
    """Value, gradient and mixed derivative at every logit gap, on the right and on the wrong side."""
    gaps = torch.tensor(GAPS + [-g for g in GAPS])
    z = torch.stack([gaps, torch.zeros_like(gaps), -gaps.abs()], 1).to(dtype).requires_grad_()
    y = torch.zeros(len(gaps), dtype=torch.int64)
    for g in (gamma, torch.full((len(gaps),), gamma)):
        assert torch.isfinite(losses.focal(z, y, g)).all()
    g = torch.full((len(gaps),), gamma, requires_grad=True)
    value = losses.focal(z, y, g)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    assert torch.isfinite(slope).all()
    for direction in (torch.ones_like(slope), torch.randn_like(slope)):
        (mixed,) = torch.autograd.grad((slope * direction).sum(), g, retain_graph=True)
        assert torch.isfinite(mixed).all()
        (second,) = torch.autograd.grad((slope * direction).sum(), z, retain_graph=True)
        assert torch.isfinite(second).all()


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=5), st.floats(0, 50, width=32))
def test_focal_is_finite_for_any_logits(row: list[float], gamma: float) -> None:
    z = torch.tensor([row], requires_grad=True)
    g = torch.tensor([gamma], requires_grad=True)
    value = losses.focal(z, torch.tensor([0]), g)
    (slope,) = torch.autograd.grad(value, z, create_graph=True)
    (mixed,) = torch.autograd.grad(slope[0, 0], g)
    assert math.isfinite(value.item()) and value.item() >= 0
    assert torch.isfinite(slope).all() and torch.isfinite(mixed).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_gamma_zero_is_cross_entropy_exactly(as_tensor: bool) -> None:
    z = torch.cat([batch()[0].float(), torch.tensor([[30.0, 0, 0, 0], [1e4, 0, 0, 0], [-1e4, 0, 0, 0]])])
    y = torch.cat([batch()[1], torch.zeros(3, dtype=torch.int64)])
    z.requires_grad_()
    gamma = torch.zeros(len(y)) if as_tensor else 0.0
    a, b = losses.focal(z, y, gamma), losses.cross_entropy(z, y)
    assert torch.equal(a, b)
    assert torch.equal(torch.autograd.grad(a.sum(), z)[0], torch.autograd.grad(b.sum(), z)[0])


def test_focal_keeps_its_digits_near_certainty() -> None:
    z = torch.tensor([[12.0, 0.0]])
    p = torch.sigmoid(torch.tensor(12.0, dtype=torch.float64))
    truth = -((1 - p) ** 2) * torch.log(p)
    assert losses.focal(z, torch.tensor([0]), 2.0).item() == pytest.approx(truth.item(), rel=1e-5)


def test_focal_falls_in_gamma() -> None:
    z, y = batch()
    values = torch.stack([losses.focal(z, y, g) for g in GAMMAS])
    assert (values.diff(dim=0) <= 0).all()


def test_bad_input() -> None:
    z, y = batch()
    for call, match in [
        (lambda: losses.focal(z, y, -1.0), "gamma must be >= 0, got -1.0"),
        (lambda: losses.focal(z, y, torch.ones(3)), r"gamma must be a number or have one value per sample \(6,\)"),
        (lambda: losses.cross_entropy(z[0], y), r"logits must have shape \(N, K\), got \(4,\)"),
        (lambda: losses.brier(z, y[:-1]), r"labels must have shape \(6,\)"),
        (lambda: losses.mse(z, y.float()), "int64"),
        (lambda: losses.label_smoothing(z, y, 1.5), r"smoothing must be in \[0, 1\], got 1.5"),
    ]:
        with pytest.raises(InputError, match=match):
            call()
