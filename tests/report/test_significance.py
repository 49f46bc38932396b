"""The tests between methods: against brute force and textbook tests, and their error rates on simulated runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.error_rates import NULLS, alike, many_nulls, rejections
from scipy import stats

from metacal.calibration import MEASURES
from metacal.errors import InputError
from metacal.predictions import Predictions
from metacal.report.significance import (
    Sampled,
    difference,
    draw_counts,
    holm,
    moderated,
    sample,
    sample_one,
    stack,
)


def predictions(n: int = 40, k: int = 3, seed: int = 0) -> Predictions:
    g = torch.Generator().manual_seed(seed)
    return Predictions.from_logits(
        torch.randn(n, k, generator=g, dtype=torch.float64) * 2, torch.randint(k, (n,), generator=g)
    )


# ------------------------------------------------------------------------------------------------ resamples


@pytest.mark.parametrize("n", [1, 7, 300])
def test_counts_hold_n_draws_each_and_depend_on_the_seed_only(n):
    counts = draw_counts(n, 20, seed=3)
    assert counts.shape == (n, 20) and (counts.sum(0) == n).all()
    assert torch.equal(counts, draw_counts(n, 20, seed=3))
    assert n == 1 or not torch.equal(counts, draw_counts(n, 20, seed=4))


def test_counts_are_multinomial():
    counts = draw_counts(50, 4000).double()
    assert counts.mean() == 1
    assert counts.var(1).mean() == pytest.approx(1 - 1 / 50, rel=0.02)


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_resampled_values_are_those_of_the_resampled_predictions(name):
    p, counts = predictions(), draw_counts(40, 6)
    found = sample_one([name], p, counts)[name]
    assert found.values.tolist() == [MEASURES[name](p)]
    for i in range(6):
        rows = torch.arange(40).repeat_interleave(counts[:, i].long())
        # A grid stands in for sece's sums, to 1e-4.
        assert found.resampled[0, i] == pytest.approx(MEASURES[name](p[rows]), abs=2e-4 if name == "sece" else 1e-12)


def test_options_reach_the_measure_and_chunks_do_not_matter(monkeypatch):
    p, counts = predictions(600), draw_counts(600, 8)
    few = sample_one({"ece": {"n_bins": 3}}, p, counts)["ece"]
    assert few.values[0] == MEASURES["ece"](p, n_bins=3)
    both = sample(["ece"], [p, predictions(600, seed=1)], counts)["ece"]
    assert both.values.shape == (2,) and both.resampled.shape == (2, 8)
    one = stack([sample_one(["ece"], q, counts[:, :5])["ece"] for q in (p, predictions(600, seed=1))])
    np.testing.assert_allclose(both.resampled[:, :5], one.resampled, rtol=1e-12)


def test_bad_input_is_named():
    p, counts = predictions(), draw_counts(40, 4)
    with pytest.raises(InputError, match=r"measures must be one of .* got 'ecce'"):
        sample_one(["ecce"], p, counts)
    with pytest.raises(InputError, match="every run must have the 40 samples of the resamples, got 30"):
        sample_one(["ece"], predictions(30), counts)
    with pytest.raises(InputError, match="at least one run"):
        sample(["ece"], [], counts)
    with pytest.raises(InputError, match="n must be >= 2, got 1"):
        draw_counts(5, 1)
    a, b = sampled([1.0, 2.0]), sampled([1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="paired runs must be equally many, got 2 and 3"):
        difference(a, b)
    with pytest.raises(InputError, match="level must lie in"):
        difference(a, a, level=1.0)
    with pytest.raises(InputError, match="second must have the 100 resamples of first, got 7"):
        difference(a, Sampled(a.values, a.resampled[:, :7]))


# ------------------------------------------------------------------------------------------------ one test


def sampled(values, noise=0.0, shared=0.0, seed=0, r=100) -> Sampled:
    """Runs with the given values whose resamples scatter on their own and all alike."""
    g = np.random.default_rng(seed)
    v = np.array(values, dtype=float)
    own, alike = g.normal(size=(len(v), r)) * noise, g.normal(size=r) * shared
    return Sampled(v, v[:, None] + own + alike)


def test_where_samples_do_not_matter_it_is_the_paired_t_test():
    a, b = [0.11, 0.14, 0.10, 0.13], [0.09, 0.10, 0.11, 0.08]
    found = difference(sampled(a), sampled(b))
    want = stats.ttest_rel(a, b)
    assert found.p_value == pytest.approx(want.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(want.confidence_interval(0.95), rel=1e-9)
    assert found.seed_share == 1


def test_where_seeds_agree_it_is_the_paired_bootstrap_of_the_samples():
    a, b = sampled([0.3, 0.3, 0.3], shared=0.02, seed=1), sampled([0.25, 0.25, 0.25], shared=0.02, seed=2)
    found = difference(a, b)
    change = a.resampled[0] - b.resampled[0]
    assert found.seed_share == 0
    assert found.p_value == pytest.approx(2 * stats.t.sf(0.05 / change.std(ddof=1), 99), rel=1e-6)


def test_a_single_run_leaves_the_test_samples_alone():
    a, b = sampled([0.3], shared=0.02, seed=1), sampled([0.2, 0.3, 0.4], shared=0.02, seed=2)
    found = difference(a, b, paired=False)
    change = a.resampled.mean(0) - b.resampled.mean(0)
    assert found.difference == pytest.approx(0) and found.p_value == 1
    assert math.isnan(found.seed_share)
    assert found.high == pytest.approx(stats.t.ppf(0.975, 99) * change.std(ddof=1))


def test_variance_is_that_over_seeds_plus_the_covariance_between_seeds():
    """Against the same written out with numpy.cov, for paired and for independent seeds."""
    a, b = sampled([0.3, 0.2, 0.35], 0.02, 0.03, 1), sampled([0.1, 0.15, 0.12], 0.03, 0.02, 2)

    def off_diagonal(x, y):
        c = np.cov(np.vstack([x, y]))[: len(x), len(x) :]
        return c[~np.eye(len(c), dtype=bool)].mean()

    d, change = a.values - b.values, a.resampled - b.resampled
    seeds, shared = d.var(ddof=1) / 3, off_diagonal(change, change)
    assert shared > 0
    found = difference(a, b)
    t = (seeds * stats.t.ppf(0.975, 2) + shared * stats.t.ppf(0.975, 99)) / (seeds + shared)
    assert found.seed_share == pytest.approx(seeds / (seeds + shared))
    assert found.high - found.difference == pytest.approx(t * math.sqrt(seeds + shared), rel=1e-9)

    found = difference(a, b, paired=False)
    seeds = a.values.var(ddof=1) / 3 + b.values.var(ddof=1) / 3
    across = np.cov(np.vstack([a.resampled, b.resampled]))[:3, 3:].mean()
    shared = off_diagonal(a.resampled, a.resampled) + off_diagonal(b.resampled, b.resampled) - 2 * across
    t = (seeds * stats.t.ppf(0.975, 2) + shared * stats.t.ppf(0.975, 99)) / (seeds + shared)
    assert found.high - found.difference == pytest.approx(t * math.sqrt(seeds + shared), rel=1e-9)


@given(
    st.lists(st.floats(0, 1), min_size=4, max_size=10).filter(lambda v: len(v) % 2 == 0),
    st.floats(0, 0.3),
    st.floats(0, 0.3),
    st.booleans(),
    st.integers(0, 1000),
)
def test_p_value_interval_and_sign_agree(values, noise, shared, paired, seed):
    half = len(values) // 2
    a = sampled(values[:half], noise, shared, seed)
    b = sampled(values[half:], noise, shared, seed + 1)
    found, turned = difference(a, b, paired), difference(b, a, paired)
    assert (found.difference, found.low, found.high) == pytest.approx(
        (-turned.difference, -turned.high, -turned.low), abs=1e-12
    )
    assert found.p_value == pytest.approx(turned.p_value, rel=1e-6) and 0 <= found.p_value <= 1
    if abs(found.p_value - 0.05) > 1e-6:
        assert (found.p_value < 0.05) == (found.low > 0 or found.high < 0)
    scaled = difference(Sampled(a.values * 7, a.resampled * 7), Sampled(b.values * 7, b.resampled * 7), paired)
    assert scaled.p_value == pytest.approx(found.p_value, rel=1e-6)


def test_values_that_are_not_finite_have_no_test():
    found = difference(sampled([math.inf, 1.0]), sampled([1.0, 2.0]))
    assert math.isnan(found.p_value) and math.isnan(found.low)


def test_holm():
    # p 0.01 of four: times 4; 0.02: times 3; 0.03 times 2 stays at what precedes it; 0.6 as it is.
    assert holm([0.6, 0.01, 0.03, 0.02]) == pytest.approx([0.6, 0.04, 0.06, 0.06])
    assert holm([]) == [] and holm([0.7, 0.8]) == [1.0, 1.0]
    first, second = holm([math.nan, 0.02])
    assert math.isnan(first) and second == 0.02


# ------------------------------------------------------------------------------------------------ many methods


def test_moderated_variances_lie_between_a_method_s_own_and_that_of_all():
    """Against the residuals of the layout by least squares, and Smyth's formulas with scipy's distributions."""
    g = np.random.default_rng(3)
    y = g.normal(size=(12, 3)) * np.exp(0.5 * g.normal(size=(12, 1))) + g.normal(size=3) * 5
    design = np.hstack([np.kron(np.eye(12), np.ones((3, 1))), np.kron(np.ones((12, 1)), np.eye(3))])
    residuals = (y.ravel() - design @ np.linalg.lstsq(design, y.ravel(), rcond=None)[0]).reshape(12, 3)
    own = (residuals**2).sum(1) / 2 * 12 / 11
    assert own.mean() == pytest.approx((residuals**2).sum() / (2 * 11))  # of all, with its (S - 1)(G - 1)
    found = moderated(y)
    assert found.df == pytest.approx(found.prior_df + 2)
    prior = (found.variances * (found.prior_df + 2) - 2 * own) / found.prior_df
    np.testing.assert_allclose(prior, prior[0])
    # The logarithm of s_g² / s0² is distributed as that of an F with S - 1 and d0 degrees of freedom.
    log_f = np.log(stats.f(2, found.prior_df).rvs(400_000, random_state=0)).mean()
    assert np.log(own).mean() - math.log(prior[0]) == pytest.approx(log_f, abs=0.01)
    shifted = moderated(y * 3 + np.arange(12)[:, None] + np.array([5.0, -1.0, 2.0]))
    np.testing.assert_allclose(shifted.variances, 9 * found.variances)
    assert shifted.df == pytest.approx(found.df)


def test_the_more_alike_the_variances_the_more_degrees_of_freedom():
    g = np.random.default_rng(0)
    df = [moderated(g.normal(size=(200, 3)) * np.exp(s * g.normal(size=(200, 1)))).df for s in (0.0, 0.5, 2.0)]
    assert df[0] > 9 and df[0] > df[1] > df[2] and 2 < df[2] < 4
    same = moderated(np.tile([1.0, 2.0, 3.0], (9, 1)))
    assert (same.variances == 0).all() and same.df == 16
    still = moderated(np.vstack([g.normal(size=(9, 3)), np.ones((1, 3))]))
    assert np.isfinite(still.variances).all() and still.variances[-1] > 0
    for bad, message in ((np.zeros((2, 3)), "at least 3 methods"), (np.full((4, 3), np.nan), "must be finite")):
        with pytest.raises(InputError, match=message):
            moderated(bad)


@pytest.mark.parametrize(("g", "s"), [(8, 3), (31, 3)])
def test_many_equal_methods_are_rarely_told_apart(g, s):
    """100 experiments: with a rate of 5 %, more than 12 have a probability of 0.001."""
    rates = many_nulls(100, g, s)
    assert rates["family"] <= 0.12 and rates["single"] <= 0.07 and rates["lost"] <= 0.12, rates


@pytest.mark.slow
@pytest.mark.parametrize(("g", "s"), [(8, 3), (31, 3)])
@pytest.mark.parametrize(("spread", "first"), [(0.0, 1.0), (0.35, 1.0), (0.7, 1.0), (0.0, 3.0)])
def test_family_error_of_many_methods(g, s, spread, first):
    """1,000 experiments; a first method with three times the others' deviation makes single tests bold, not families
    by much.
    """
    rates = many_nulls(1000, g, s, spread, first)
    print(g, s, spread, first, rates)
    assert rates["family"] <= (0.072 if first == 1 else 0.11), rates
    assert rates["single"] <= (0.075 if first == 1 else 0.2), rates


def test_many_methods_lend_power():
    """A difference of four standard errors over three seeds, one of 31: lost with two degrees of freedom."""
    r = np.random.default_rng(0)
    found = {"own": 0, "moderated": 0}
    none = np.zeros((3, 2))
    for _ in range(50):
        values = r.normal(size=(31, 3))
        values[1] += 6 * math.sqrt(2 / 3)
        m = moderated(values)
        a, b = Sampled(values[1], none), Sampled(values[0], none)
        found["own"] += difference(a, b).p_value < 0.05 / 30
        found["moderated"] += difference(a, b, seed_variance=(m.variances[1], m.variances[0], m.df)).p_value < 0.05 / 30
    assert found["moderated"] > 25 > 3 * found["own"], found


# ------------------------------------------------------------------------------------------------ error rates


@pytest.mark.parametrize("null", NULLS)
def test_false_positives_are_rare(null):
    """120 experiments each: with a rate of 5 %, more than 14 rejections have a probability of 0.001."""
    rates = rejections(["ece", "nll"], 120, 200, **NULLS[null])
    assert max(rates.values()) <= 14 / 120, rates


@pytest.mark.slow
@pytest.mark.parametrize("null", NULLS)
def test_false_positive_rate_is_the_level(null):
    """1,000 experiments each. Binomial: 5 % ± 2.2 % has a probability of 0.999; mixtures of seeds and samples
    and measures with a kink may be cautious, none may be bold.
    """
    rates = rejections(["nll", "ece", "adaptive_ece", "kce"], 1000, 500, **NULLS[null])
    assert max(rates.values()) <= 0.072, rates
    assert min(rates.values()) >= (0.01 if null == "both" else 0.02), rates


@pytest.mark.parametrize(("a", "i", "b"), [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0.3), (4, 1, 0.3), (0, 1, 1)])
def test_false_positive_rate_of_normal_values(a, i, b):
    """1,000 experiments on normal values: variance a over seeds, i of each run's samples, b of what all share.

    Where only one of the two parts is there, the rate is the level; mixtures are cautious.
    """
    assert (0.03 if (a + i) * b == 0 else 0.01) <= alike(1000, 3, a, i, b) <= 0.072


@pytest.mark.parametrize(("seeds", "shared"), [(1, 0), (0, 1)])
def test_the_truly_best_keeps_its_mark(seeds, shared):
    """Four equal methods, 300 experiments: any given one falls behind the best of the data in less than 5 % of them."""
    g = np.random.default_rng(0)
    lost = 0
    for _ in range(300):
        methods = []
        for _ in range(4):
            values = g.normal(size=3) * seeds + g.normal() * shared
            methods.append(Sampled(values, values[:, None] + g.normal(size=(1, 64)) * shared))
        best = min(range(4), key=lambda i: methods[i].mean)
        others = [i for i in range(4) if i != best]
        adjusted = holm([difference(methods[i], methods[best]).p_value for i in others])
        lost += sum(p < 0.05 for i, p in zip(others, adjusted) if i == 0)
    assert lost / 300 <= 0.05


def test_power_grows_with_the_test_set():
    power = [rejections(["ece"], 40, n, 3, of_method=0.5, gap=0.25)["ece"] for n in (100, 400, 1600)]
    assert power[0] < power[1] < power[2] and power[2] > 0.8, power
