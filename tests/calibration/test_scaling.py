"""Post-hoc scaling: known optima, never worse on its own split, and the faults that others ran into."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metacal.calibration import (
    FewErrorsWarning,
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
from metacal.calibration.scaling import scale_by
from metacal.errors import InputError
from metacal.predictions import Predictions

pytestmark = pytest.mark.filterwarnings("ignore:.*the scaling rests on")  # most splits here are small on purpose

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
    t = TemperatureScaling(shrink=False).fit(p).temperature

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
    scaling = TemperatureScaling(shrink=False).fit(Predictions.from_logits(logits, [0, 1]))
    assert scaling.temperature == pytest.approx(0.01)
    assert scaling.apply(Predictions.from_logits(logits, [0, 1])).confidence.tolist() == [1.0, 1.0]


def test_temperature_of_a_hopeless_split_stops_at_its_bound():
    logits = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    scaling = TemperatureScaling(shrink=False).fit(Predictions.from_logits(logits, [1, 0]))
    assert scaling.temperature == pytest.approx(100.0)


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
    loose, tight = (MatrixScaling(weight, 1e-6, shrink=False).fit(p) for weight in (1e-6, 1e3))
    off = 1 - torch.eye(5, dtype=torch.float64)
    assert (tight.weight * off).abs().max() < 0.01 * (loose.weight * off).abs().max()
    assert nll(loose.apply(p)) < nll(tight.apply(p))
    flat = MatrixScaling(1e-6, 1e6).fit(p)
    assert flat.bias.abs().max() < 1e-3


def test_histogram_binning_gives_the_shares_of_the_bins():
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    p = Predictions.from_probabilities(probs, [0, 0, 1, 1])
    scaled = HistogramBinning(n_bins=10, shrink=False).fit(p).apply(p)
    expected = torch.tensor([[2 / 3, 1 / 3]] * 3 + [[0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(scaled.probs, expected)
    # 0.55 and 0.45 lie in bins that the fit never saw.
    torch.testing.assert_close(
        HistogramBinning(n_bins=10, shrink=False)
        .fit(p)
        .apply(Predictions.from_probabilities([[0.55, 0.45]], [0]))
        .probs,
        torch.tensor([[0.55, 0.45]], dtype=torch.float64),
    )


def test_a_row_of_which_nothing_is_left_keeps_its_probabilities():
    # Class 2 alone occurs: the rows' classes 0 and 1 map to 0, and so does a p_2 below those that the fit saw.
    probs = [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]
    fit = Predictions.from_probabilities([[0.1, 0.1, 0.8], [0.45, 0.45, 0.1], [0.45, 0.45, 0.1]], [2, 0, 1])
    for make in (HistogramBinning, IsotonicScaling):
        out = make(shrink=False).fit(fit).apply(Predictions.from_probabilities(probs, [2, 0])).probs
        torch.testing.assert_close(out.sum(1), torch.ones(2, dtype=torch.float64))
    only = Predictions.from_probabilities([[0.6, 0.2, 0.2]], [2])
    for make in (HistogramBinning, IsotonicScaling):
        scaling = make(shrink=False).fit(only)
        assert scaling.apply(only).probs[0].tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_isotonic_is_increasing_in_each_class_for_two_classes():
    p = split(2000, k=2)
    drawn = IsotonicScaling().fit(p).apply(p).probs[p.probs[:, 0].argsort(), 0]
    assert bool((drawn.diff() >= 0).all())
    scaled = IsotonicScaling(shrink=False).fit(p).apply(p)
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


# ------------------------------------------------------------------------------------------------ small splits


def penalised(p, temperature):
    """N · NLL(T) - log prior(log T), from the formula."""
    n_nll = -torch.log_softmax(p.logits.double() / temperature, 1).gather(1, p.labels[:, None]).sum()
    return float(n_nll) + 2 * math.log1p(math.log(temperature) ** 2 / (3 * 0.2**2))


def without_errors(n, scale, seed, k=3):
    """A separable split: every label is the predicted class, though the model says that some would be wrong."""
    z = scale * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Predictions.from_logits(z, z.argmax(1))


@pytest.mark.parametrize(
    "p",
    [
        split(13),
        split(40, temperature=3.0, seed=4),
        split(400, temperature=1.0),
        without_errors(13, 3.0, 0),
        # Logits thirty times too small: one minimum near 1 by the prior, and the least one by the evidence.
        Predictions.from_logits(split(50, temperature=1.0).logits / 30, split(50, temperature=1.0).labels),
    ],
    ids=["13", "40", "400", "without errors", "two minima"],
)
def test_the_temperature_and_its_interval_are_those_of_a_fine_grid(p):
    scaling = TemperatureScaling().fit(p)
    logs = np.linspace(-math.log(100), math.log(100), 4001)
    values = np.array([penalised(p, math.exp(x)) for x in logs])
    assert penalised(p, scaling.temperature) <= values.min() + 1e-9
    assert math.log(scaling.temperature) == pytest.approx(logs[values.argmin()], abs=logs[1] - logs[0])
    for end in scaling.interval:
        assert penalised(p, end) == pytest.approx(penalised(p, scaling.temperature) + 1.9207, abs=1e-6)
    assert scaling.interval[0] < scaling.temperature < scaling.interval[1]


@pytest.mark.parametrize("true", [0.2, 0.7, 1.0, 1.6, 4.0])
def test_on_a_large_split_the_prior_moves_nothing(true):
    """Beside the temperature's sampling error its shift from maximum likelihood is small, and falls as 1/N."""
    p = split(5000, temperature=1 / true)
    shrunk, free = TemperatureScaling().fit(p), TemperatureScaling(shrink=False).fit(p)
    error = math.log(shrunk.interval[1] / shrunk.interval[0]) / (2 * 1.96)
    shift = abs(math.log(shrunk.temperature / free.temperature))
    assert shift < 0.25 * error
    assert abs(nll(shrunk.apply(p)) - nll(free.apply(p))) < 1e-5
    assert abs(math.log(free.temperature / true)) < 4 * error  # and the interval's width is that of the error


@pytest.mark.parametrize("make", ALL)
def test_maps_of_large_splits_are_the_textbooks(make):
    p, test = split(20_000, k=3), split(20_000, k=3, seed=1)
    ours, textbook = make().fit(p).apply(test), make(shrink=False).fit(p).apply(test)
    if make not in (HistogramBinning, IsotonicScaling):  # whose steps are others once they start from scaled ones
        assert (ours.probs - textbook.probs).abs().mean() < 0.005
    assert nll(ours) < nll(textbook) + 1e-4


@pytest.mark.parametrize("make", ALL)
def test_a_small_split_that_has_no_errors_by_luck_costs_little(make):
    """The model is right that one of five predictions will be wrong, and the textbook's maps believe the split."""
    losses, textbook = [], []
    for seed in range(8):
        p, test = without_errors(13, 4.0, seed), split(1000, k=3, seed=seed, temperature=1.0)
        losses.append(nll(make().fit(p).apply(test)) - nll(test))
        textbook.append(nll(make(shrink=False).fit(p).apply(test)) - nll(test))
    assert max(losses) < 0.02
    assert np.mean(textbook) > 0.5


@settings(max_examples=20)
@given(st.integers(1, 12), st.integers(2, 4), st.floats(0.1, 30), st.integers(0, 999))
def test_no_map_gives_a_label_probability_zero(n, k, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(2 * n, k, generator=generator)
    p = Predictions.from_logits(z, torch.randint(k, (2 * n,), generator=generator))
    for make in ALL:
        assert math.isfinite(nll(make().fit(p[:n]).apply(p[n:])))


def test_a_fit_warns_of_few_errors_and_reports_them():
    p = split(200)
    wrong = (~p.correct).nonzero().squeeze(1)
    right = p.correct.nonzero().squeeze(1)
    with pytest.warns(FewErrorsWarning, match="^TemperatureScaling: the scaling rests on 9 wrong predictions among 40"):
        few = TemperatureScaling().fit(p[torch.cat([wrong[:9], right[:31]])])
    assert few.report.wrong == 9 and few.report.caution.count(".") == 0
    with pytest.warns(FewErrorsWarning, match="IsotonicScaling: the scaling rests on no wrong predictions among 3:"):
        IsotonicScaling().fit(p[right[:3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TemperatureScaling().fit(p[torch.cat([wrong[:10], right[:30]])]).report.caution == ""


@pytest.mark.parametrize("temperature", [0.01, 3.0, 100.0])
def test_scaling_keeps_classes_that_differ_by_one_rounding(temperature):
    one = torch.tensor(1.0)
    z = torch.stack([one, torch.nextafter(one, 2 * one), torch.nextafter(one, 0 * one)])[None]
    p = Predictions.from_logits(z, [1])
    assert scale_by(p, temperature).predicted.tolist() == [1]
    for most in (3e38, 1e30, 1e17):  # and none overflows
        q = Predictions.from_logits(torch.tensor([[most, most, -most]]), [0])
        assert scale_by(q, temperature).confidence.tolist() == [0.5]
    with pytest.raises(InputError, match="temperature must be > 0, got 0"):
        scale_by(p, 0)
