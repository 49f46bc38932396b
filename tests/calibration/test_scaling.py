"""Post-hoc scaling: known optima, never worse on its own split, and the faults that others ran into."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metacal.calibration import (
    HistogramBinning,
    IsotonicScaling,
    MatrixScaling,
    TemperatureScaling,
    VectorScaling,
    accuracy,
    classwise_ece,
    ece,
    nll,
)
from metacal.errors import InputError
from metacal.predictions import Predictions

ALL = [TemperatureScaling, VectorScaling, MatrixScaling, HistogramBinning, IsotonicScaling]


def split(n=2000, k=5, seed=0, temperature=0.4, dtype=torch.float64):
    """Logits that are right at `1 / temperature`: labels are drawn from softmax(temperature · z)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(temperature * logits, 1), 1, generator=generator).squeeze(1)
    return Predictions.from_logits(logits.to(dtype), labels)


@pytest.mark.parametrize("true", [0.05, 0.4, 1.5, 20.0])
def test_temperature_is_found(true):
    fitted = TemperatureScaling().fit(split(20_000, temperature=1 / true))
    assert fitted.temperature == pytest.approx(true, rel=0.1)


def test_temperature_is_the_minimum():
    p = split()
    t = TemperatureScaling().fit(p).temperature

    def at(value):
        return nll(Predictions.from_logits(p.logits / value, p.labels))

    assert at(t) < min(at(t * 1.001), at(t / 1.001))
    # The slope of the NLL in 1/T vanishes: E_p[z] = z_y on average.
    probs = torch.softmax(p.logits / t, 1)
    slope = (probs * p.logits).sum(1).mean() - p.logits.gather(1, p.labels[:, None]).mean()
    assert abs(float(slope)) < 1e-9


def test_temperature_keeps_the_predictions_and_reports():
    p, test = split(), split(seed=1)
    scaling = TemperatureScaling().fit(p)
    scaled = scaling.apply(test)
    assert torch.equal(scaled.predicted, test.predicted) and accuracy(scaled) == accuracy(test)
    assert ece(scaled) < 0.3 * ece(test)
    report = scaling.report
    assert report is not None
    assert report.n == len(p)
    assert (report.nll_before, report.ece_before) == (nll(p), ece(p))
    after = scaling.apply(p)
    assert (report.nll_after, report.ece_after) == (nll(after), ece(after))
    assert report.nll_after < report.nll_before


def test_temperature_of_an_errorless_split_stops_at_its_bound():
    logits = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    scaling = TemperatureScaling().fit(Predictions.from_logits(logits, [0, 1]))
    assert scaling.temperature == pytest.approx(0.01)
    assert scaling.apply(Predictions.from_logits(logits, [0, 1])).confidence.tolist() == [1.0, 1.0]


def test_temperature_of_a_hopeless_split_stops_at_its_bound():
    logits = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    assert TemperatureScaling().fit(Predictions.from_logits(logits, [1, 0])).temperature == pytest.approx(100.0)


def test_temperature_one_is_kept_when_nothing_is_gained():
    same = Predictions.from_logits(torch.zeros(10, 3), torch.arange(10) % 3)
    scaling = TemperatureScaling().fit(same)
    assert scaling.temperature == 1.0 and scaling.apply(same) is same


@given(st.integers(1, 20), st.integers(2, 6), st.floats(0.01, 1e4), st.integers(0, 999))
def test_temperature_never_raises_the_nll_and_stays_in_bounds(n, k, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, k, generator=generator)
    p = Predictions.from_logits(logits, torch.randint(k, (n,), generator=generator))
    scaling = TemperatureScaling().fit(p)
    assert 0.01 <= scaling.temperature <= 100
    assert nll(scaling.apply(p)) <= nll(p) * (1 + 1e-6)


def test_temperature_of_probabilities_equals_that_of_logits():
    p = split()
    q = Predictions.from_probabilities(p.probs, p.labels)
    assert TemperatureScaling().fit(q).temperature == pytest.approx(TemperatureScaling().fit(p).temperature, rel=1e-9)


def test_temperature_ignores_a_constant_added_to_a_row():
    p = split()
    shifted = Predictions.from_logits(p.logits + 1e3 * torch.arange(len(p))[:, None] / len(p), p.labels)
    assert TemperatureScaling().fit(shifted).temperature == pytest.approx(
        TemperatureScaling().fit(p).temperature, rel=1e-8
    )


def test_ruled_out_classes_and_zeros_do_not_spoil_the_fit():
    p = split(500)
    logits = p.logits.clone()
    rows = torch.arange(len(p))
    logits[rows, (p.labels + 1) % 5] = -math.inf
    with_zeros = Predictions.from_probabilities(torch.softmax(logits, 1), p.labels)
    for q in (Predictions.from_logits(logits, p.labels), with_zeros):
        for make in ALL:
            out = make().fit(q).apply(q)
            assert bool(out.probs.isfinite().all())
            if make not in (HistogramBinning, IsotonicScaling):
                assert nll(out) <= nll(q) + 1e-9


@pytest.mark.parametrize("make", ALL)
def test_every_scaling_lowers_the_error_on_new_data(make):
    scaling = make().fit(split(4000, dtype=torch.float32))
    test = split(4000, seed=1, dtype=torch.float32)
    scaled = scaling.apply(test)
    assert torch.equal(scaled.labels, test.labels)
    assert ece(scaled) < 0.5 * ece(test)
    assert classwise_ece(scaled) < 0.7 * classwise_ece(test)
    assert accuracy(scaled) > accuracy(test) - 0.03
    assert scaling.report is not None and scaling.report.ece_after < scaling.report.ece_before


@pytest.mark.parametrize("make", [VectorScaling, MatrixScaling])
def test_vector_and_matrix_undo_a_bias_that_temperature_cannot(make):
    p = split(4000, temperature=1.0)
    biased = Predictions.from_logits(p.logits * torch.tensor([1.0, 2, 1, 0.5, 1]) + torch.arange(5.0), p.labels)
    by_temperature = nll(TemperatureScaling().fit(biased).apply(biased))
    scaled = make().fit(biased).apply(biased)
    assert nll(scaled) < by_temperature - 0.05
    if make is VectorScaling:  # the truth is within its reach
        assert nll(scaled) == pytest.approx(nll(p), abs=0.01)


def test_vector_and_matrix_start_from_the_identity_and_never_raise_the_nll():
    p = split(300, temperature=1.0, seed=3)
    for scaling in (VectorScaling(penalty=1e9), MatrixScaling(off_diagonal=1e9, intercept=1e9)):
        scaling.fit(p)
        assert scaling.report is not None and scaling.report.nll_after <= scaling.report.nll_before
    vector = VectorScaling(penalty=1e9).fit(p)
    torch.testing.assert_close(vector.weight, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(vector.bias, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_regularisation_shrinks_what_it_says():
    p = split(300)
    loose, tight = MatrixScaling(1e-6, 1e-6).fit(p), MatrixScaling(1e3, 1e-6).fit(p)
    off = 1 - torch.eye(5, dtype=torch.float64)
    assert (tight.weight * off).abs().max() < 0.01 * (loose.weight * off).abs().max()
    assert nll(loose.apply(p)) < nll(tight.apply(p))
    flat = MatrixScaling(1e-6, 1e6).fit(p)
    assert flat.bias.abs().max() < 1e-3


def test_histogram_binning_gives_the_shares_of_the_bins():
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    p = Predictions.from_probabilities(probs, [0, 0, 1, 1])
    scaled = HistogramBinning(n_bins=10).fit(p).apply(p)
    expected = torch.tensor([[2 / 3, 1 / 3]] * 3 + [[0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(scaled.probs, expected)
    # 0.55 and 0.45 lie in bins that the fit never saw.
    torch.testing.assert_close(
        HistogramBinning(n_bins=10).fit(p).apply(Predictions.from_probabilities([[0.55, 0.45]], [0])).probs,
        torch.tensor([[0.55, 0.45]], dtype=torch.float64),
    )


def test_a_row_of_which_nothing_is_left_keeps_its_probabilities():
    # Class 2 alone occurs: the rows' classes 0 and 1 map to 0, and so does a p_2 below those that the fit saw.
    probs = [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]
    fit = Predictions.from_probabilities([[0.1, 0.1, 0.8], [0.45, 0.45, 0.1], [0.45, 0.45, 0.1]], [2, 0, 1])
    for make in (HistogramBinning, IsotonicScaling):
        out = make().fit(fit).apply(Predictions.from_probabilities(probs, [2, 0])).probs
        torch.testing.assert_close(out.sum(1), torch.ones(2, dtype=torch.float64))
    only = Predictions.from_probabilities([[0.6, 0.2, 0.2]], [2])
    for make in (HistogramBinning, IsotonicScaling):
        scaling = make().fit(only)
        assert scaling.apply(only).probs[0].tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_isotonic_is_increasing_in_each_class_for_two_classes():
    p = split(2000, k=2)
    scaled = IsotonicScaling().fit(p).apply(p)
    order = p.probs[:, 0].argsort()
    assert bool((scaled.probs[order, 0].diff() >= -1e-12).all())
    # Pooled adjacent violators: within a level the share of the class is the level itself.
    levels = scaled.probs[:, 0]
    level = levels.unique()[1]
    members = (levels - level).abs() < 1e-12
    assert float((p.labels[members] == 0).double().mean()) == pytest.approx(float(level), abs=0.02)


@pytest.mark.parametrize("make", ALL)
def test_refitting_starts_afresh_and_is_deterministic(make):
    p, q = split(400), split(400, temperature=2.0, seed=5)
    scaling = make().fit(q).fit(p)
    torch.testing.assert_close(scaling.apply(q).probs, make().fit(p).apply(q).probs, rtol=0, atol=0)


@pytest.mark.parametrize("make", ALL)
def test_misuse_is_refused(make):
    p = split(50)
    with pytest.raises(InputError, match=f"{make.__name__} must be fitted before it is applied"):
        make().apply(p)
    with pytest.raises(InputError, match="p must have the 5 classes of the fit, got 3"):
        make().fit(p).apply(split(50, k=3))


def test_bad_settings_are_refused():
    with pytest.raises(InputError, match="penalty must be >= 0, got -1"):
        VectorScaling(penalty=-1)
    with pytest.raises(InputError, match="off_diagonal must be >= 0"):
        MatrixScaling(off_diagonal=-0.1)
    with pytest.raises(InputError, match="n_bins must be an integer"):
        HistogramBinning(n_bins=0)


def test_fit_works_inside_no_grad():
    p = split(200)
    with torch.no_grad():
        scaling = VectorScaling().fit(p)
    np.testing.assert_allclose(scaling.weight, VectorScaling().fit(p).weight)
