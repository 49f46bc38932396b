"""Logits of any size, and classes ruled out by -inf: predictions, measures, losses, surrogates and margins keep to
their formulas, and no value and no gradient is NaN.
"""

from __future__ import annotations

import math

import pytest
import torch

from metacal import losses, margins
from metacal.calibration import (
    MEASURES,
    HistogramBinning,
    IsotonicScaling,
    MatrixScaling,
    TemperatureScaling,
    VectorScaling,
    nll,
)
from metacal.calibration.surrogates import SURROGATES
from metacal.predictions import Predictions

INF = math.inf
LOGITS = {
    "a tie at 1e17": [[1e17, 1e17, 0.0], [1.0, 2.0, 3.0]],
    "a tie at the largest float32": [[3.4e38, 3.4e38, -3.4e38], [1.0, 2.0, 3.0]],
    "a tie at the largest float64": [[1.7e308, 1.7e308, -1.7e308], [1.0, 2.0, 3.0]],
    "far below zero": [[-1e17, -1e17, -1e17], [-1e4, -1e5, -INF]],
    "denormal": [[5e-324, 0.0, 0.0], [0.0, 0.0, 1e-310]],
    "a class ruled out": [[0.0, 1.0, -INF], [2.0, -INF, 1.0]],
    "one class left": [[0.0, -INF, -INF], [1.0, 2.0, -INF]],
}
CASES = [
    pytest.param(torch.tensor(z, dtype=torch.float64).to(dtype), torch.tensor(y), id=f"{name}, {y}, {dtype}")
    for name, z in LOGITS.items()
    for y in ([0, 0], [1, 2], [2, 1])
    for dtype in (torch.float64, torch.float32)
    if dtype == torch.float64 or "float64" not in name
]


@pytest.mark.parametrize("size", [1.0, 1e9, 1e12, 1e17, 1e300])
def test_a_tie_has_confidence_one_half_at_any_size(size):
    for sign in (1, -1):
        p = Predictions.from_logits(torch.tensor([[sign * size, sign * size]], dtype=torch.float64), [1])
        assert p.confidence.tolist() == [0.5] and p.log_likelihood.tolist() == [-math.log(2)]
        assert p.probs.tolist() == [[0.5, 0.5]] and nll(p) == math.log(2)


def test_a_gap_counts_whatever_it_is_added_to():
    gap = 1024.0  # a multiple of what 1e17 is rounded to
    p = Predictions.from_logits(torch.tensor([[1e17, 1e17 - gap]], dtype=torch.float64), [1])
    assert p.log_likelihood.tolist() == [-gap]


@pytest.mark.parametrize(("z", "y"), CASES)
def test_no_value_and_no_gradient_is_nan(z, y):
    ruled_out = bool((z.gather(1, y[:, None]) == -INF).any())
    functions = {**losses.LOSSES, **{f"surrogate {k}": f for k, f in SURROGATES.items()}, "m": margins.true_margin}
    for name, function in functions.items():
        at = z.clone().requires_grad_()
        value = function(at, y)
        (slope,) = torch.autograd.grad(value.sum(), at)
        assert not value.isnan().any() and not slope.isnan().any(), name
        if ruled_out and name in losses.LOSSES and name not in ("brier", "mse"):
            assert value.max() == INF and slope.isfinite().all(), name  # a label that cannot be
    for name in ("margin_moment", "log_margin_moment", "gamma_min"):
        assert not math.isnan(getattr(margins, name)(z, y)), name
    assert not margins.predicted_margin(z).isnan().any()


@pytest.mark.parametrize(("z", "y"), CASES)
@pytest.mark.filterwarnings("ignore:.*the scaling rests on")
def test_no_measure_and_no_scaling_is_nan(z, y):
    p = Predictions.from_logits(z, y)
    assert not any(math.isnan(measure(p)) for measure in MEASURES.values())
    certificate = margins.ece_certificate(p)
    assert not certificate.violated and not any(math.isnan(v) for v in vars(certificate).values())
    for make in (TemperatureScaling, VectorScaling, MatrixScaling, HistogramBinning, IsotonicScaling):
        for shrink in (True, False):
            assert not make(shrink=shrink).fit(p).apply(p).probs.isnan().any(), make


def test_a_class_ruled_out_is_as_one_that_is_not_there():
    z = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with_it = torch.cat([z, z.new_full((20, 1), -INF)], 1)
    y = torch.arange(20) % 3
    for name, loss in losses.LOSSES.items():
        if name in ("label_smoothing", "mse"):  # both ask for something of every class
            continue
        same, ours = z.clone().requires_grad_(), with_it.clone().requires_grad_()
        expected, value = loss(same, y), loss(ours, y)
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)
        expected.sum().backward(), value.sum().backward()
        torch.testing.assert_close(ours.grad[:, :3], same.grad, rtol=1e-12, atol=1e-15)
        assert (ours.grad[:, 3] == 0).all()
    torch.testing.assert_close(losses.label_smoothing(with_it, y, 0.0), losses.cross_entropy(z, y))
    weights = torch.zeros(20, dtype=torch.float64, requires_grad=True)
    assert losses.label_smoothing(with_it, y, weights).isfinite().all()
    assert (losses.label_smoothing(with_it, y, 0.1) == INF).all()


@pytest.mark.parametrize("gamma", [100.0, 1e4, 1e30])
@pytest.mark.parametrize("name", ["focal", "dual_focal", "inverse_focal", "adafocal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_focal_family_is_finite_at_any_gamma(gamma, name, dtype):
    gaps = torch.tensor([0.0, 1e-3, 1.0, 20.0, 90.0, 1e4, -1e-3, -1.0, -20.0, -1e4], dtype=dtype)
    y = torch.zeros(len(gaps), dtype=torch.int64)
    for sign in (1, -1) if name == "adafocal" else (1,):
        z = torch.stack([gaps, torch.zeros_like(gaps)], 1).requires_grad_()
        third = torch.full((len(gaps),), sign * gamma, dtype=dtype, requires_grad=True)
        value = losses.LOSSES[name](z, y, third)
        (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
        (mixed,) = torch.autograd.grad((slope * torch.tensor([1.0, -2.0], dtype=dtype)).sum(), third)
        assert value.isfinite().all() and slope.isfinite().all() and mixed.isfinite().all()
        torch.testing.assert_close(losses.LOSSES[name](z, y, sign * gamma), value)


def test_inverse_focal_is_its_formula_below_the_ceiling():
    log_p = torch.tensor([-3.0, -0.5, -1e-3, -1e-9], dtype=torch.float64)
    z = torch.stack([log_p, torch.log(-torch.expm1(log_p))], 1)
    y = torch.zeros(4, dtype=torch.int64)
    for gamma in (0.0, 1.0, 30.0, 115.0):  # 2^115 is just below e^80
        torch.testing.assert_close(losses.inverse_focal(z, y, gamma), -((1 + log_p.exp()) ** gamma) * log_p)
    assert losses.inverse_focal(z, y, 1e6)[-1] == pytest.approx(math.exp(80) * 1e-9)
