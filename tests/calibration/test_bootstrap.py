"""The bootstrap: vectorised forms against resampling one by one, determinism, coverage, and paired comparisons."""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from metacal.calibration import (
    MEASURES,
    Comparison,
    Interval,
    accuracy,
    bootstrap,
    bootstrap_all,
    compare,
    ece,
    skce,
)
from metacal.calibration.bootstrap import _counts, _draws
from metacal.errors import InputError
from metacal.predictions import Predictions


def model(n=150, k=4, seed=0, temperature=1.0, rounded=True):
    """Overconfident predictions, with `rounded` logits many exact ties among the confidences."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(0.5 * logits, 1), 1, generator=generator).squeeze(1)
    logits = (2 * logits).round() / 2 if rounded else logits
    return Predictions.from_logits(logits / temperature, labels)


@pytest.mark.parametrize("name", list(MEASURES))
@pytest.mark.parametrize(("n", "k", "rounded"), [(150, 4, True), (60, 80, False), (1, 3, False), (3, 2, True)], ids=str)
def test_all_resamples_at_once_equal_them_one_by_one(name, n, k, rounded):
    p = model(n, k, rounded=rounded)
    drawn = next(_draws(n, 12, seed=3))
    form = MEASURES[name].weighted(p)
    assert form is not None
    expected = torch.tensor([MEASURES[name](p[rows]) for rows in drawn], dtype=torch.float64)
    tolerance = 1e-9 if name == "sece" else 1e-11  # sece goes through its grid
    torch.testing.assert_close(form(_counts(drawn)), expected, rtol=0, atol=tolerance)
    whole = form(torch.ones(n, 1, dtype=torch.float64))
    torch.testing.assert_close(whole, whole.new_tensor([MEASURES[name](p)]), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ece", {"n_bins": 7, "norm": "l2"}),
        ("adaptive_ece", {"n_bins": 7, "norm": "l2"}),
        ("classwise_ece", {"n_bins": 3}),
        ("debiased_ece", {"squared": True}),
        ("smooth_ece", {"mesh": 500}),
        ("sece", {"bandwidth": 0.1, "norm": "l2"}),
        ("sece", {"self_term": False}),
    ],
)
def test_options_reach_the_measure(name, options):
    p = model(80)
    generic = bootstrap(lambda q: MEASURES[name](q, **options), p, n=40, seed=5)
    assert bootstrap(name, p, n=40, seed=5, **options) == pytest.approx(generic, abs=1e-5)
    assert bootstrap(functools.partial(MEASURES[name], **options), p, n=40, seed=5) == pytest.approx(generic, abs=1e-5)


def test_counts_are_the_resamples():
    drawn = torch.tensor([[0, 2, 2], [1, 1, 1]])
    assert _counts(drawn).tolist() == [[1, 0], [0, 3], [2, 0]]


def test_same_seed_same_interval_whatever_the_global_generator():
    p = model()
    torch.manual_seed(1)
    first = bootstrap("ece", p, n=200, seed=7)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert bootstrap(ece, p, n=200, seed=7) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert bootstrap("ece", p, n=200, seed=8) != first


def test_interval_of_the_accuracy_is_the_binomial_one():
    p = model(2000, seed=1)
    interval = bootstrap(accuracy, p, n=2000)
    assert isinstance(interval, Interval)
    half = 1.96 * math.sqrt(interval.value * (1 - interval.value) / 2000)
    assert interval.low == pytest.approx(interval.value - half, abs=0.1 * half)
    assert interval.high == pytest.approx(interval.value + half, abs=0.1 * half)


def test_interval_covers_the_truth_as_often_as_it_says():
    """80 % intervals of the mean confidence's measure `brier`, over 200 test sets from one known source."""
    truth = float(
        torch.tensor([MEASURES["brier"](model(20_000, seed=1000 + s, rounded=False)) for s in range(5)]).mean()
    )
    covered = 0
    for seed in range(200):
        interval = bootstrap("brier", model(200, seed=seed, rounded=False), n=200, seed=seed, level=0.8)
        covered += interval.low <= truth <= interval.high
    assert 0.7 <= covered / 200 <= 0.9


def test_level_widens_the_interval():
    p = model()
    wide, narrow = bootstrap("nll", p, n=500, level=0.99), bootstrap("nll", p, n=500, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert wide.value == narrow.value


def test_infinite_values_do_not_become_nan():
    p = Predictions.from_probabilities([[1.0, 0.0]] * 5, [0, 0, 0, 0, 1])
    interval = bootstrap("nll", p, n=100)
    assert interval == Interval(0.0, math.inf, math.inf)


def test_comparison_is_paired():
    """Two models that differ by a little on the same samples: paired, the difference is seen; apart, it is not."""
    worse, better = model(1500, rounded=False), model(1500, rounded=False, temperature=1.1)
    paired = compare(worse, better, "nll", n=500)
    assert isinstance(paired, Comparison)
    assert paired.difference == pytest.approx(MEASURES["nll"](worse) - MEASURES["nll"](better))
    assert 0 < paired.low < paired.difference < paired.high
    assert paired.p_value < 0.01
    alone = bootstrap("nll", worse, n=500)
    assert paired.high - paired.low < 0.3 * (alone.high - alone.low)


def test_comparison_is_antisymmetric_and_of_equals_is_nothing():
    p1, p2 = model(temperature=1.0), model(temperature=3.0)
    forward, back = compare(p1, p2, "ece", n=300), compare(p2, p1, ece, n=300)
    assert forward.difference == -back.difference
    assert forward.low == pytest.approx(-back.high, abs=1e-12)
    assert forward.p_value == back.p_value
    assert compare(p1, p1, "ece", n=300) == Comparison(0.0, 0.0, 0.0, 1.0)


def test_p_value_is_never_zero():
    p1, p2 = model(1500, temperature=1.0), model(1500, temperature=2.0)
    assert compare(p1, p2, "nll", n=99).p_value == pytest.approx(0.02)


def test_p_value_is_uniform_enough_under_no_difference():
    """Two equally good models on independent noise: about a tenth of the p-values lie below 0.1."""
    low = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(200, 3, generator=generator, dtype=torch.float64)
        labels = torch.multinomial(torch.softmax(logits, 1), 1, generator=generator).squeeze(1)
        noisy = [logits + torch.randn(200, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
        p1, p2 = (Predictions.from_logits(z, labels) for z in noisy)
        low += compare(p1, p2, "brier", n=200, seed=seed).p_value < 0.1
    assert 0.04 <= low / 200 <= 0.18


def test_any_function_can_be_bootstrapped():
    def third(p):
        return float(p.confidence.max())

    p = model(50)
    interval = bootstrap(third, p, n=50)
    assert interval.low <= interval.high <= interval.value == float(p.confidence.max())
    assert bootstrap(skce, p, n=50) == bootstrap("skce", p, n=50)


def test_all_measures_together_equal_each_alone():
    p = model()
    together = bootstrap_all(list(MEASURES), p, n=60, seed=4)
    assert together == {name: bootstrap(name, p, n=60, seed=4) for name in MEASURES}
    options = {"ece": {"n_bins": 5}, "sece": {"self_term": False}, "nll": {}}
    together = bootstrap_all(options, p, n=30, seed=4)
    assert together == {name: bootstrap(name, p, n=30, seed=4, **keys) for name, keys in options.items()}
    assert bootstrap_all([], p) == {}


def test_the_number_of_threads_changes_nothing():
    p = model()
    measures = ["accuracy", "ece", "smooth_ece", "kce", "aurc"]

    def fails(resample):
        return 1 / int(torch.equal(resample.labels, p.labels))

    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def needs_no_grad(resample):
        return float((weight * resample.confidence[:3]).sum().numpy())

    expected, before = bootstrap_all(measures, p, n=500), torch.get_num_threads()  # four blocks of resamples
    torch.set_num_threads(3)
    try:
        assert bootstrap_all(measures, p, n=500) == expected
        with pytest.raises(ZeroDivisionError):
            bootstrap(fails, p)
        with torch.no_grad():  # the modes of this thread are those of a function of one's own
            bootstrap(needs_no_grad, p, n=10)
        with ThreadPoolExecutor(2) as several:
            at_once = several.map(lambda name: bootstrap(name, p, n=500), ["ece", "kce"])
            assert list(at_once) == [expected["ece"], expected["kce"]]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_misuse_is_refused():
    p = model()
    with pytest.raises(InputError, match=r"measure must be one of .*, ece, .* got 'eec'"):
        bootstrap("eec", p)
    with pytest.raises(InputError, match=r"got 'eec'"):
        bootstrap_all(["ece", "eec"], p)
    with pytest.raises(InputError, match="measure must be a name or a function, got int"):
        bootstrap(3, p)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n must be an integer >= 1, got 0"):
        bootstrap("ece", p, n=0)
    with pytest.raises(InputError, match=r"level must be in \(0, 1\), got 95"):
        bootstrap("ece", p, level=95)
    with pytest.raises(InputError, match="p2 must have the samples of p1, got 40 for 150"):
        compare(p, model(40), "ece")
    with pytest.raises(InputError, match="p2 must have the labels of p1, they differ in row"):
        compare(p, model(seed=1), "ece")
