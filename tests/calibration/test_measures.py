"""The hard measures: against the definitions written out, known values, and properties that hold for any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import measures as reference

import metacal.calibration as calibration
from metacal.calibration import MEASURES, reliability_bins
from metacal.calibration.binning import bin_edges, bin_index
from metacal.errors import InputError
from metacal.predictions import Predictions

RANGES = {
    "brier": (0.0, 2.0),
    "nll": (0.0, math.inf),
    "skce": (-1.0, 1.0),
}


def binary(confidences, correct):
    """Two-class predictions of class 0 with these confidences (at least 1/2) and correctness."""
    c = torch.as_tensor(confidences, dtype=torch.float64)
    return Predictions.from_probabilities(torch.stack([c, 1 - c], 1), 1 - torch.as_tensor(correct).long())


def random_predictions(n, k, seed, decimals=None, scale=2.0):
    """Overconfident predictions; with `decimals`, of few distinct confidences, exact ties among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(0.6 * logits, 1), 1, generator=generator).squeeze(1)
    if decimals is None:
        return Predictions.from_logits(logits, labels)
    counts = (torch.softmax(logits, 1) * 10**decimals).round()
    counts[:, 0] += 10**decimals - counts.sum(1)
    counts = counts.clamp(min=0)
    return Predictions.from_probabilities(counts / counts.sum(1, keepdim=True), labels)


CASES = {
    "few samples": random_predictions(40, 3, 0),
    "many classes": random_predictions(60, 80, 1),
    "many ties": random_predictions(120, 4, 2, decimals=1),
    "on edges": random_predictions(120, 2, 3, decimals=2),
    "one sample": random_predictions(1, 3, 4),
    "two samples": random_predictions(2, 3, 5),
    "all correct": binary([0.6, 0.9, 0.9, 1.0], [1, 1, 1, 1]),
    "all wrong": binary([0.6, 0.9, 0.9, 1.0], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "smooth_ece"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(name, case):
    p = CASES[case]
    expected = getattr(reference, name)(p.probs.tolist(), p.labels.tolist())
    assert MEASURES[name](p) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("case", ["few samples", "two samples", "all wrong"])
def test_smooth_ece_is_the_integral_when_the_mesh_is_fine(case):
    p = CASES[case]
    expected = reference.smooth_ece(p.probs.tolist(), p.labels.tolist(), points=400)
    assert calibration.smooth_ece(p, mesh=20_000) == pytest.approx(expected, abs=1e-4)
    assert calibration.smooth_ece(p) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("name", ["ece", "adaptive_ece", "mce", "classwise_ece", "debiased_ece", "overconfidence"])
@pytest.mark.parametrize("n_bins", [1, 2, 7, 10, 100, 1000])
def test_any_number_of_bins(name, n_bins):
    for p in (CASES["few samples"], CASES["on edges"]):
        expected = getattr(reference, name)(p.probs.tolist(), p.labels.tolist(), n_bins=n_bins)
        assert MEASURES[name](p, n_bins=n_bins) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", ["ece", "adaptive_ece", "sece"])
def test_l2_norm(name):
    p = CASES["many ties"]
    expected = getattr(reference, name)(p.probs.tolist(), p.labels.tolist(), norm="l2")
    assert MEASURES[name](p, norm="l2") == pytest.approx(expected, rel=1e-10)


# ------------------------------------------------------------------------------------------------- known values


def test_confidence_one_lies_in_the_last_bin():
    assert calibration.ece(binary([0.95, 1.0], [1, 0]), n_bins=10) == pytest.approx(0.475, abs=1e-15)


def test_zero_and_one_and_edges():
    values = torch.tensor(
        [0.0, 0.1, math.nextafter(0.1, 1), 0.3, math.nextafter(0.3, 1), 0.7, 1.0, 1 + 1e-6], dtype=torch.float64
    )
    assert bin_index(values, 10).tolist() == [0, 0, 1, 2, 3, 6, 9, 9]
    # 0.3 as float32 lies above the float64 edge 3/10, 0.7 below 7/10.
    assert bin_index(torch.tensor([0.3, 0.7], dtype=torch.float32), 10).tolist() == [3, 6]


@given(st.one_of(st.integers(1, 3000), st.integers(1, 1_000_000)), st.data())
def test_an_edge_belongs_to_the_bin_below_it(n_bins, data):
    m = data.draw(st.integers(1, n_bins))
    edge = m / n_bins
    around = torch.tensor([edge, math.nextafter(edge, 0), min(1.0, math.nextafter(edge, 2))], dtype=torch.float64)
    expected = [m - 1, m - 1, min(m, n_bins - 1)]
    assert bin_index(around, n_bins).tolist() == expected
    assert bin_edges(n_bins)[m] == edge


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50), st.integers(1, 40))
def test_bin_index_is_exact_for_float32(values, n_bins):
    expected = [reference.equal_width(v, n_bins) for v in values]
    assert bin_index(torch.tensor(values, dtype=torch.float32), n_bins).tolist() == expected


@pytest.mark.parametrize("n", [2, 10, 1000])
@pytest.mark.parametrize("order", ["correct first", "wrong first", "alternating"])
def test_adaptive_ece_of_equal_confidences_is_their_gap(n, order):
    correct = {
        "correct first": [1] * (n // 2) + [0] * (n // 2),
        "wrong first": [0] * (n // 2) + [1] * (n // 2),
        "alternating": [0, 1] * (n // 2),
    }[order]
    assert calibration.adaptive_ece(binary([0.787] * n, correct)) == pytest.approx(0.287, abs=1e-12)


def test_adaptive_ece_of_identical_wrong_predictions():
    assert calibration.adaptive_ece(binary([0.965] * 1000, [0] * 1000)) == pytest.approx(0.965, abs=1e-12)


def test_adaptive_ece_counts_the_last_sample():
    assert calibration.adaptive_ece(binary([0.6, 0.7, 1.0], [1, 1, 0])) == pytest.approx((0.4 + 0.3 + 1.0) / 3)


def test_classwise_ece_counts_classes_that_never_occur():
    probs = torch.tensor([[0.6, 0.0, 0.4], [0.6, 0.0, 0.4]], dtype=torch.float64)
    p = Predictions.from_probabilities(probs, [0, 0])  # classes 1 and 2 are absent
    assert calibration.classwise_ece(p) == pytest.approx((0.4 + 0.0 + 0.4) / 3)


def test_binary_problems_use_the_top_label():
    # The second column says 0.1, the top label 0.9 and it is right: a gap of 0.1, not of 0.9.
    p = Predictions.from_probabilities([[0.9, 0.1]], [0])
    assert calibration.ece(p) == pytest.approx(0.1)


def test_sums_are_not_float32():
    # Summed in float32 the confidences of one bin are off by 1e-3 of their sum here.
    n = 400_000
    p = Predictions.from_logits(torch.tensor([[math.log(4.0), 0.0]]).expand(n, 2), torch.ones(n, dtype=torch.long))
    exact = float(p.confidence[0])
    for name in ("ece", "mce", "overconfidence", "classwise_ece", "adaptive_ece"):
        assert MEASURES[name](p) == pytest.approx(exact, abs=1e-10)


def test_one_sample():
    p = binary([0.75], [1])
    values = {name: f(p) for name, f in MEASURES.items()}
    assert values["skce"] == 0.0 and values["auroc"] == 0.5 and values["aurc"] == 0.0
    assert values["kce"] == pytest.approx(0.25)
    assert all(math.isfinite(v) for v in values.values())


def test_results_are_plain_floats():
    assert all(type(f(CASES["few samples"])) is float for f in MEASURES.values())


# ------------------------------------------------------------------------------------------------- properties


@st.composite
def predictions(draw, min_size=1):
    n, k, seed = draw(st.integers(min_size, 60)), draw(st.integers(2, 12)), draw(st.integers(0, 10**6))
    decimals = draw(st.sampled_from([None, 1, 2]))
    return random_predictions(n, k, seed, decimals, scale=draw(st.sampled_from([0.5, 2.0, 8.0])))


@given(predictions())
def test_values_lie_in_their_range(p):
    for name, f in MEASURES.items():
        low, high = RANGES.get(name, (0.0, 1.0))
        assert low - 1e-12 <= f(p) <= high + 1e-12, name


@given(predictions(), st.integers(0, 1000))
def test_permuting_the_samples_changes_nothing(p, seed):
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(seed))
    for name, f in MEASURES.items():
        if math.isfinite(f(p)):
            assert f(p[order]) == pytest.approx(f(p), rel=1e-9, abs=1e-9), name


@settings(max_examples=25)
@given(predictions(), st.integers(0, 1000))
def test_renaming_the_classes_changes_nothing(p, seed):
    if len(p.confidence) and bool((p.probs == p.confidence[:, None]).sum(1).gt(1).any()):
        return  # a tie for the top label is settled by the names
    new = torch.randperm(p.n_classes, generator=torch.Generator().manual_seed(seed))
    renamed = Predictions.from_probabilities(p.probs[:, new.argsort()], new[p.labels])
    original = Predictions.from_probabilities(p.probs, p.labels)
    for name, f in MEASURES.items():
        if math.isfinite(f(original)):
            assert f(renamed) == pytest.approx(f(original), rel=1e-9, abs=1e-9), name


@given(predictions(min_size=20))
def test_float32_probabilities_change_little(p):
    q = Predictions.from_probabilities(p.probs.float(), p.labels)
    smooth = ("kce", "skce", "sece", "smooth_ece", "brier", "accuracy")  # no bins for a value to jump between
    for name in smooth:
        if torch.equal(p.predicted, q.predicted):
            assert MEASURES[name](q) == pytest.approx(MEASURES[name](p), abs=1e-4), name


@given(predictions(min_size=20))
def test_bfloat16_logits_equal_the_same_numbers_in_float64(p):
    rounded = p.probs.clamp(min=1e-6).log().bfloat16()
    narrow = Predictions.from_logits(rounded, p.labels)
    wide = Predictions.from_logits(rounded.double(), p.labels)
    for name, f in MEASURES.items():
        assert f(narrow) == pytest.approx(f(wide), rel=1e-12, abs=1e-12), name


@given(st.integers(1, 50), st.integers(2, 9), st.integers(0, 99))
def test_a_perfect_one_hot_predictor_scores_zero(n, k, seed):
    labels = torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed))
    p = Predictions.from_probabilities(torch.eye(k)[labels], labels)
    for name, f in MEASURES.items():
        if name not in ("accuracy", "auroc", "confidence"):
            assert abs(f(p)) < 1e-12, name
    assert calibration.accuracy(p) == calibration.confidence(p) == 1.0


@given(predictions())
def test_over_and_underconfidence_add_up_to_ece(p):
    both = calibration.overconfidence(p) + calibration.underconfidence(p)
    assert both == pytest.approx(calibration.ece(p), abs=1e-12)


@given(predictions())
def test_orders_among_measures(p):
    assert calibration.ece(p) <= calibration.mce(p) + 1e-12
    assert calibration.ece(p) <= calibration.ece(p, norm="l2") + 1e-12
    assert calibration.debiased_ece(p) <= calibration.ece(p, norm="l2") + 1e-12
    assert calibration.debiased_ece(p) ** 2 == pytest.approx(max(0, calibration.debiased_ece(p, squared=True)))
    # The mean gap is the coarsest ECE.
    gap = abs(float(p.confidence.mean()) - calibration.accuracy(p))
    assert calibration.ece(p, n_bins=1) == pytest.approx(gap, abs=1e-12)
    assert gap <= calibration.ece(p) + 1e-12


def test_skce_is_unbiased_and_kce_is_not():
    """On calibrated data the mean over draws is 0 for skce, and E mean((c-a)²)/N for the square of kce."""
    generator = torch.Generator().manual_seed(0)
    skce, square, expected = [], [], []
    for _ in range(400):
        c = 0.5 + 0.5 * torch.rand(32, generator=generator, dtype=torch.float64)
        p = binary(c, torch.rand(32, generator=generator, dtype=torch.float64) < c)
        skce.append(calibration.skce(p))
        square.append(calibration.kce(p) ** 2)
        expected.append(float((c * (1 - c)).mean()) / 32)
    skce, square = torch.tensor(skce), torch.tensor(square)
    assert abs(skce.mean()) < 3 * skce.std() / 20
    assert abs(square.mean() - sum(expected) / 400) < 3 * square.std() / 20
    assert square.mean() > 10 * square.std() / 20


# ------------------------------------------------------------------------------------------------- large N


@pytest.mark.parametrize("self_term", [True, False])
@pytest.mark.parametrize("bandwidth", [0.002, 0.01, 0.3])
def test_sece_on_the_grid_equals_the_sum(self_term, bandwidth):
    p = random_predictions(6000, 5, 0)
    c, order = p.confidence.sort()
    a = p.correct[order].double()
    total = 0.0
    for rows in torch.arange(6000).split(500):
        weights = (-((c[rows, None] - c) / bandwidth).square() / 2).exp()
        if not self_term:
            weights[torch.arange(len(rows)), rows] = 0
        total += float((weights @ a / weights.sum(1) - c[rows]).abs().sum())
    assert calibration.sece(p, bandwidth, self_term) == pytest.approx(total / 6000, abs=1e-5)


def test_sece_without_self_term_finds_the_neighbour_of_a_lonely_sample():
    n = 5000
    c = torch.cat([torch.tensor([0.5, 0.7], dtype=torch.float64), torch.full((n - 2,), 0.99, dtype=torch.float64)])
    a = torch.ones(n)
    a[0] = 0
    # 0.5 takes the correctness of 0.7, 0.7 that of 0.5 (the nearest), the others are right with 0.99.
    expected = (abs(1 - 0.5) + abs(0 - 0.7) + (n - 2) * 0.01) / n
    assert calibration.sece(binary(c, a), self_term=False) == pytest.approx(expected, abs=1e-9)


def test_sece_of_a_tiny_bandwidth_tends_to_the_mean_absolute_residual():
    p = random_predictions(5000, 5, 0)
    expected = float((p.correct.double() - p.confidence).abs().mean())
    assert calibration.sece(p, bandwidth=1e-9) == pytest.approx(expected, abs=1e-3)


def test_chunked_and_unchunked_class_sums_agree():
    p = random_predictions(9000, 80, 0)
    exact = sum(
        abs(float(((p.labels == k).double() - p.probs[:, k])[bin_index(p.probs[:, k], 15) == m].sum()))
        for k in range(80)
        for m in range(15)
    )
    assert calibration.classwise_ece(p) == pytest.approx(exact / (9000 * 80), rel=1e-12)


# ------------------------------------------------------------------------------------------------- bins, errors


@given(predictions(), st.integers(1, 20), st.booleans())
def test_reliability_bins_account_for_every_sample(p, n_bins, adaptive):
    bins = reliability_bins(p, n_bins, adaptive)
    assert int(bins.count.sum()) == len(p)
    assert int(bins.correct.sum()) == int(p.correct.sum())
    assert float(bins.confidence_sum.sum()) == pytest.approx(float(p.confidence.sum()))
    full = bins.count > 0
    assert bool((bins.lower <= bins.upper).all())
    assert bool((bins.lower < bins.confidence + 1e-12)[full].all())
    assert bool((bins.confidence <= bins.upper + 1e-12)[full].all())
    assert bool(bins.accuracy[~full].isnan().all())


def test_equal_mass_bins_of_distinct_confidences_have_equal_counts():
    p = random_predictions(600, 5, 0)
    assert reliability_bins(p, 15, adaptive=True).count.tolist() == [40] * 15


def test_many_equal_mass_bins_take_the_sorting_path():
    p = random_predictions(300, 5, 0)
    assert reliability_bins(p, 100, adaptive=True).count.tolist() == [3] * 100


@pytest.mark.parametrize("n_bins", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("name", ["ece", "mce", "adaptive_ece", "classwise_ece", "debiased_ece"])
def test_bad_bins_are_refused(name, n_bins):
    with pytest.raises(InputError, match="n_bins must be an integer"):
        MEASURES[name](CASES["few samples"], n_bins=n_bins)


@pytest.mark.parametrize("name", ["ece", "adaptive_ece", "sece"])
def test_bad_norms_are_refused(name):
    with pytest.raises(InputError, match="norm must be 'l1' or 'l2', got 'max'"):
        MEASURES[name](CASES["few samples"], norm="max")


def test_bad_bandwidths_and_meshes_are_refused():
    for bandwidth in (0.0, -0.1, math.nan, math.inf):
        with pytest.raises(InputError, match="bandwidth must be > 0"):
            calibration.sece(CASES["few samples"], bandwidth=bandwidth)
    with pytest.raises(InputError, match="mesh must be an integer >= 2"):
        calibration.smooth_ece(CASES["few samples"], mesh=1)


def test_every_public_name_exists():
    for name in calibration.__all__:
        assert getattr(calibration, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'eec'"):
        calibration.eec  # noqa: B018


# ------------------------------------------------------------------------------------------------- devices


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("k", [10, 100])
def test_cuda_equals_cpu_also_in_deterministic_mode(k):
    p = random_predictions(3000, k, 0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for q in (
            Predictions.from_logits(p.logits.cuda(), p.labels),  # labels are brought to the logits
            Predictions.from_probabilities(p.probs.cuda(), p.labels.cuda()),
            p.to("cuda"),
        ):
            assert q.confidence.is_cuda and q.device.type == "cuda"
            total = calibration.CalibrationAccumulator(k)
            total.add(q[:1000])
            total.add(q[1000:])
            for name, f in MEASURES.items():
                assert f(q) == pytest.approx(f(p), rel=1e-9, abs=1e-10), name
                assert total.compute().get(name, f(p)) == pytest.approx(f(p), rel=1e-9, abs=1e-10), name
            assert calibration.bootstrap("ece", q, n=20) == pytest.approx(calibration.bootstrap("ece", p, n=20))
            assert calibration.bootstrap(lambda s: calibration.ece(s), q, n=5).low > 0
            for scaling in (
                "TemperatureScaling",
                "VectorScaling",
                "MatrixScaling",
                "HistogramBinning",
                "IsotonicScaling",
            ):
                scaled = getattr(calibration, scaling)().fit(q).apply(q)
                assert scaled.device.type == "cuda" and calibration.ece(scaled) < calibration.ece(p)
    finally:
        torch.use_deterministic_algorithms(before)
