"""The streaming accumulator: equal to all samples at once, whatever the batches, the ranks or the input's type."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metacal.calibration import MEASURES, CalibrationAccumulator, reliability_bins
from metacal.errors import InputError
from metacal.predictions import Predictions


def sample(n=97, k=7, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(n, k, generator=generator, dtype=dtype), torch.randint(k, (n,), generator=generator)


def close(values, p, n_bins=15):
    binned = ("ece", "mce", "debiased_ece", "overconfidence", "underconfidence", "classwise_ece")
    for name, value in values.items():
        expected = MEASURES[name](p, n_bins=n_bins) if name in binned else MEASURES[name](p)
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-12), name


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([1, 3, 15]), st.integers(0, 99))
def test_any_batches_give_the_value_of_all_at_once(sizes, n_bins, seed):
    logits, labels = sample(sum(sizes), seed=seed)
    total = CalibrationAccumulator(7, n_bins=n_bins)
    for z, y in zip(logits.split(sizes), labels.split(sizes), strict=True):
        total.update(z, y)
    assert len(total) == len(labels)
    close(total.compute(), Predictions.from_logits(logits, labels), n_bins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types(dtype):
    logits, labels = sample(dtype=torch.float32)
    total = CalibrationAccumulator(7)
    for z, y in zip(logits.to(dtype).split(10), labels.split(10), strict=True):
        total.update(z, y)
    close(total.compute(), Predictions.from_logits(logits.to(dtype), labels))


def test_probabilities_by_keyword():
    logits, labels = sample()
    probs = torch.softmax(logits, 1)
    total = CalibrationAccumulator(7)
    total.update(probs=probs.numpy(), labels=labels.numpy())
    close(total.compute(), Predictions.from_probabilities(probs, labels))


def test_ranks_add_up_to_the_union():
    logits, labels = sample()
    ranks = []
    for rank in range(3):
        ranks.append(CalibrationAccumulator(7))
        ranks[-1].update(logits[rank::3], labels[rank::3])
    expected = Predictions.from_logits(logits, labels)
    close((ranks[0] + ranks[1] + ranks[2]).compute(), expected)
    # What an all-reduce does: every entry of the state is a sum.
    states = [r.state_dict() for r in ranks]
    union = CalibrationAccumulator(7)
    union.load_state_dict({name: sum(s[name] for s in states) for name in states[0]})
    close(union.compute(), expected)
    close(ranks[0].compute(), Predictions.from_logits(logits[::3], labels[::3]))  # adding changed no operand


def test_counts_do_not_saturate_like_float32():
    """A true error of 0.8 over 4·10^7 samples, which float32 counters report as 0.762."""
    total = CalibrationAccumulator(2)
    total.update(
        torch.tensor([[math.log(4.0), 0.0]], dtype=torch.float64).expand(10_000, 2), torch.ones(10_000, dtype=int)
    )
    for _ in range(12):
        total = total + total
    values = total.compute()
    assert len(total) == 40_960_000
    assert values["ece"] == pytest.approx(0.8, abs=1e-10)
    assert values["classwise_ece"] == pytest.approx(0.8, abs=1e-10)


def test_the_state_does_not_grow_and_holds_integers_and_float64():
    total = CalibrationAccumulator(7)
    sizes = {name: t.numel() for name, t in total.state_dict().items()}
    for seed in range(5):
        total.update(*sample(seed=seed))
    state = total.state_dict()
    assert {name: t.numel() for name, t in state.items()} == sizes
    assert sum(sizes.values()) == 3 * 15 + 2 * 15 * 7 + 2
    assert {t.dtype for t in state.values()} == {torch.int64, torch.float64}
    assert state["count"].dtype == torch.int64


def test_chosen_measures_keep_what_they_need_and_need_no_number_of_classes():
    total = CalibrationAccumulator(None, measures=("nll", "ece"))
    assert set(total.state_dict()) == {"count", "correct", "confidence_sum", "nll_sum"}
    total.update(*sample())
    assert list(total.compute()) == ["nll", "ece"]
    close(total.compute(), Predictions.from_logits(*sample()))
    with pytest.raises(InputError, match="n_classes must be given to keep class_mass, class_hits"):
        CalibrationAccumulator(None)
    with pytest.raises(InputError, match=r"measures must be one of accuracy, .* got 'kce'"):
        CalibrationAccumulator(7, measures=("kce",))


def test_in_whole_units_the_sums_have_the_same_bits_in_any_order():
    p = Predictions.from_logits(*sample(500)).in_units(2.0**-30)
    orders = [
        torch.randperm(500, generator=torch.Generator().manual_seed(seed)).split(1 + 60 * seed) for seed in range(3)
    ]
    totals = [CalibrationAccumulator(7, measures=("nll", "ece", "confidence")) for _ in orders]
    for total, batches in zip(totals, orders):
        for rows in batches:
            total.add(p[rows])
    assert totals[0].compute() == totals[1].compute() == totals[2].compute()
    assert totals[0].compute()["nll"] == pytest.approx(MEASURES["nll"](Predictions.from_logits(*sample(500))), abs=1e-9)
    certain = Predictions.from_probabilities([[1.0, 0.0]], [1]).in_units(2.0**-30)
    assert certain.log_likelihood.tolist() == [-1e6] and certain.confidence.tolist() == [1.0]


def test_without_classwise():
    total = CalibrationAccumulator(7, classwise=False)
    total.update(*sample())
    assert "classwise_ece" not in total.compute()
    assert sum(t.numel() for t in total.state_dict().values()) == 3 * 15 + 2
    close(total.compute(), Predictions.from_logits(*sample()))


def test_bins_are_those_of_all_samples():
    total = CalibrationAccumulator(7, n_bins=10)
    total.update(*sample())
    total.update(*sample(seed=1))
    pairs = [sample(), sample(seed=1)]
    p = Predictions.from_logits(torch.cat([z for z, _ in pairs]), torch.cat([y for _, y in pairs]))
    bins, expected = total.bins(), reliability_bins(p, 10)
    for name in ("lower", "upper", "count", "correct", "confidence_sum"):
        torch.testing.assert_close(getattr(bins, name), getattr(expected, name))


def test_misuse_is_refused():
    total = CalibrationAccumulator(7)
    with pytest.raises(InputError, match="no predictions to compute from"):
        total.compute()
    with pytest.raises(InputError, match="n_classes = 7 columns, got 3"):
        total.update(*sample(k=3))
    with pytest.raises(InputError, match="exactly one of logits and probs"):
        total.update(labels=[0])
    with pytest.raises(InputError, match="labels must be given"):
        total.update(sample()[0])
    with pytest.raises(InputError, match="got NaN in row 0"):
        total.update(torch.full((1, 7), math.nan), [0])
    assert len(total) == 0  # a refused batch leaves no trace
    with pytest.raises(InputError, match="equal settings"):
        total + CalibrationAccumulator(7, n_bins=10)
    with pytest.raises(TypeError):
        total + 1
    with pytest.raises(InputError, match="n_classes must be an integer >= 2, got 1"):
        CalibrationAccumulator(1)
    with pytest.raises(InputError, match="n_bins must be an integer"):
        CalibrationAccumulator(7, n_bins=0)
    state = total.state_dict()
    with pytest.raises(InputError, match="these differ: count"):
        total.load_state_dict({k: v for k, v in state.items() if k != "count"})
    with pytest.raises(InputError, match=r"state\['count'\] must have shape \(15,\), got \(3,\)"):
        total.load_state_dict({**state, "count": torch.zeros(3)})
