"""Predictions: what is accepted, what is refused and how, and the fields."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from metacal.errors import InputError
from metacal.predictions import Predictions

LOGITS = [[2.0, 1.0, 0.0], [0.0, 0.0, -1.0], [-1.0, 0.0, 3.0]]


def softmax(rows):
    out = []
    for row in rows:
        e = [math.exp(v - max(row)) for v in row]
        out.append([v / sum(e) for v in e])
    return out


def test_fields_of_logits_are_softmax_argmax_and_log_softmax():
    p = Predictions.from_logits(LOGITS, [0, 1, 0])
    expected = torch.tensor(softmax(LOGITS), dtype=torch.float64)
    torch.testing.assert_close(p.probs, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(p.confidence, expected.amax(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(p.log_likelihood, expected.log()[range(3), [0, 1, 0]], rtol=1e-14, atol=0)
    assert p.predicted.tolist() == [0, 0, 2]  # the tie of row 1 goes to the lowest index
    assert p.correct.tolist() == [True, False, False]
    assert (len(p), p.n_classes, p.confidence.dtype) == (3, 3, torch.float64)


def test_probabilities_are_used_as_given_and_keep_no_logits():
    probs = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    p = Predictions.from_probabilities(probs, torch.tensor([1, 1]))
    assert p.logits is None
    assert p.probs.data_ptr() == probs.data_ptr()
    assert p.confidence.tolist() == [0.75, 0.5]
    assert p.correct.tolist() == [True, False]
    assert p.log_likelihood.tolist() == [math.log(0.75), math.log(0.5)]


@pytest.mark.parametrize("k", [2, 7, 64, 65, 300])
@pytest.mark.parametrize("make", [Predictions.from_logits, Predictions.from_probabilities])
def test_ties_go_to_the_lowest_index_for_every_width(k, make):
    generator = torch.Generator().manual_seed(k)
    counts = torch.randint(1, 4, (500, k), generator=generator).double()  # few values: every row has ties
    scores = counts if make == Predictions.from_logits else counts / counts.sum(1, keepdim=True)
    labels = torch.randint(k, (500,), generator=generator)
    labels[::2] = scores.argmax(1)[::2]
    p = make(scores, labels)
    lowest = torch.tensor([row.index(max(row)) for row in scores.tolist()])
    assert torch.equal(p.predicted, lowest)
    assert torch.equal(p.correct, lowest == labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [3, 65])
def test_a_zero_with_a_sign_is_a_zero_and_a_negative_entry_is_found_wherever_it_is(k, dtype):
    probs = torch.rand(50, k, dtype=dtype).softmax(1)
    signed = probs.clone()
    signed[7] = torch.tensor([-0.0, 0.25, 0.75] + [-0.0] * (k - 3))
    p = Predictions.from_probabilities(signed, torch.full((50,), 2))
    assert p.confidence[7] == 0.75 and p.correct[7]
    assert torch.equal(p.confidence, signed.double().amax(1)) and torch.equal(p.correct, signed.argmax(1) == 2)
    for row, wrong in ((7, -1e-30), (31, -0.5), (49, math.nan), (0, math.inf)):
        bad = signed.clone()
        bad[row, k - 1] = wrong
        with pytest.raises(InputError, match=f"in row {row};"):
            Predictions.from_probabilities(bad, torch.full((50,), 2))


@pytest.mark.parametrize("convert", [np.asarray, list, tuple, torch.tensor])
def test_arrays_lists_and_tensors_give_the_same(convert):
    p = Predictions.from_logits(convert(LOGITS), convert([0, 1, 2]))
    assert p.correct.tolist() == [True, False, True]
    assert p.confidence.tolist() == pytest.approx([max(r) for r in softmax(LOGITS)], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_wide_types(dtype):
    logits = torch.randn(200, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.arange(200) % 10
    p = Predictions.from_logits(logits, labels)
    exact = torch.softmax(logits.double(), 1)
    torch.testing.assert_close(p.confidence, exact.amax(1), rtol=1e-14, atol=0)
    assert p.logits is not None and p.logits.dtype == torch.float32
    # A softmax rounded to half precision has rows that sum to 1 only within that precision.
    q = Predictions.from_probabilities(torch.softmax(logits, 1), labels)
    assert q.confidence.dtype == torch.float64
    assert q.probs.dtype == torch.float32


def test_half_precision_arrays_of_numpy_get_the_tolerance_of_half():
    probs = (
        torch.softmax(torch.randn(50, 100, generator=torch.Generator().manual_seed(0)), 1).numpy().astype(np.float16)
    )
    assert len(Predictions.from_probabilities(probs, np.zeros(50, int))) == 50
    with pytest.raises(InputError, match="a sum of"):
        Predictions.from_probabilities(probs.astype(np.float64), np.zeros(50, int))


def test_large_logits_do_not_overflow_and_ruled_out_classes_are_allowed():
    p = Predictions.from_logits([[1e4, -1e4, -math.inf], [0.0, -math.inf, -math.inf]], [1, 0])
    assert p.confidence.tolist() == [1.0, 1.0]
    assert p.log_likelihood.tolist() == [-2e4, 0.0]
    assert p.probs.isfinite().all()


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[0.0, 1.0], [math.nan, 0.0]], [0, 0], "logits must be finite .* got NaN in row 1"),
        ([[0.0, math.inf], [math.nan, 0.0]], [0, 0], r"got \+inf in row 0"),
        ([[0.0, 1.0], [-math.inf, -math.inf]], [0, 0], "got only -inf in row 1"),
        ([[0.0, 1.0]], [2], r"labels must be in 0..1, got 2 in row 0"),
        ([[0.0, 1.0], [0.0, 1.0]], [0, -1], r"labels must be in 0..1, got -1 in row 1"),
        ([[0.0, 1.0]], [0.0], r"labels must be integers in 0..1, got torch.float64"),
        ([[0.0, 1.0]], [True], r"labels must be integers"),
        ([[0.0, 1.0]], [0, 1], r"labels must have shape \(1,\), got \(2,\)"),
        ([[0.0, 1.0]], [[0, 1]], r"class indices, not one-hot rows"),
        ([0.2, 0.8], [0, 1], r"logits must have shape \(N, K\) with K >= 2, got \(2,\); .* both columns"),
        ([[0.2], [0.8]], [0, 1], r"both columns"),
        (np.zeros((0, 3)), np.zeros(0, int), r"logits must have at least 1 row"),
        ([[1 + 2j, 0]], [0], "logits must be real numbers"),
        ([["a", "b"]], [0], r"logits must be a numeric array"),
        ([[0.0, 1.0], [0.0]], [0, 0], r"logits must be a numeric array"),
        ([[0.0, 1.0]], ["x"], r"labels must be an integer array"),
    ],
)
def test_bad_logits_and_labels_are_refused(logits, labels, message):
    with pytest.raises(InputError, match=message):
        Predictions.from_logits(logits, labels)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0.5, 0.5], [1.0, 1.0]], r"a sum of 2 in row 1; logits go to from_logits"),
        ([[0.5, 0.5], [1.5, -0.5]], r"the negative entry -0.5 in row 1"),
        ([[math.nan, 0.5], [1.5, -0.5]], r"got NaN in row 0"),
        ([[0.5, 0.5], [math.inf, 0.0]], r"a sum of inf in row 1"),
        ([[0.5, 0.49]], r"a sum of 0.99 in row 0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_no_probabilities_are_refused(rows, message, dtype):
    with pytest.raises(InputError, match=message):
        Predictions.from_probabilities(torch.tensor(rows, dtype=dtype), [0] * len(rows))


def test_the_first_bad_row_is_named_beyond_the_first_chunk():
    logits = torch.zeros(300_000, 2)
    logits[290_000, 1] = math.nan
    logits[295_000, 1] = math.nan
    with pytest.raises(InputError, match="row 290000"):
        Predictions.from_logits(logits, torch.zeros(300_000, dtype=torch.long))


def test_chunks_cover_the_probabilities_and_need_not_exceed_the_rows():
    logits = torch.randn(3000, 300, generator=torch.Generator().manual_seed(0))
    p = Predictions.from_logits(logits, torch.zeros(3000, dtype=torch.long))
    parts = list(p.chunks())
    assert len(parts) > 1
    torch.testing.assert_close(torch.cat([part for _, part in parts]), torch.softmax(logits.double(), 1))
    assert [rows.start for rows, _ in parts] == [0, *(rows.stop for rows, _ in parts[:-1])]


def test_predictions_are_frozen_and_can_be_indexed():
    p = Predictions.from_logits(LOGITS, [0, 1, 2])
    with pytest.raises(AttributeError):
        p.labels = p.labels  # type: ignore[misc]
    q = p[torch.tensor([2, 2, 0])]
    assert q.labels.tolist() == [2, 2, 0]
    assert torch.equal(q.probs, p.probs[[2, 2, 0]])
    assert torch.equal(q.log_likelihood, p.log_likelihood[[2, 2, 0]])
    assert p[1:].predicted.tolist() == p.predicted[1:].tolist()
    assert len(p[p.correct]) == int(p.correct.sum())
    with pytest.raises(InputError, match="leaves no predictions"):
        p[3:]
    with pytest.raises(InputError, match="index must be a slice or a tensor"):
        p[0]  # type: ignore[index]


def test_gradients_are_not_kept():
    logits = torch.tensor(LOGITS, requires_grad=True)
    p = Predictions.from_logits(logits, [0, 1, 2])
    assert not p.confidence.requires_grad and not p.probs.requires_grad


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_files_round_trip(tmp_path, kind):
    if kind == "logits":
        p = Predictions.from_logits(torch.tensor(LOGITS), [0, 1, 2])
    else:
        p = Predictions.from_probabilities(softmax(LOGITS), [0, 1, 2])
    path = tmp_path / "deep" / "p.npz"
    p.save(path)
    assert [f.name for f in path.parent.iterdir()] == ["p.npz"]
    q = Predictions.load(path)
    assert torch.equal(q.confidence, p.confidence) and torch.equal(q.labels, p.labels)
    assert (q.logits is None) == (kind == "probs")


def test_unreadable_files_are_refused_with_their_name(tmp_path):
    with pytest.raises(InputError, match=r"not found: .*none\.npz"):
        Predictions.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match=r"text\.npz must be an npz file"):
        Predictions.load(tmp_path / "text.npz")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(InputError, match=r"empty\.npz must be an npz file"):
        Predictions.load(tmp_path / "empty.npz")
    np.savez_compressed(tmp_path / "cut.npz", logits=np.random.default_rng(0).normal(size=(99, 9)), labels=[0] * 99)
    whole = (tmp_path / "cut.npz").read_bytes()
    for part in (whole[:-100], whole[:200] + bytes(500) + whole[700:]):
        (tmp_path / "cut.npz").write_bytes(part)
        with pytest.raises(InputError, match=r"cut\.npz must be an npz file"):
            Predictions.load(tmp_path / "cut.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"one\.npy must be an npz file"):
        Predictions.load(tmp_path / "one.npy")
    np.savez(tmp_path / "both.npz", logits=np.zeros((1, 2)), probs=np.ones((1, 2)) / 2, labels=[0])
    with pytest.raises(InputError, match="exactly one of logits and probs; its arrays are: logits, probs, labels"):
        Predictions.load(tmp_path / "both.npz")
    np.savez(tmp_path / "nolabels.npz", logits=np.zeros((1, 2)))
    with pytest.raises(InputError, match="must hold labels"):
        Predictions.load(tmp_path / "nolabels.npz")
    np.savez(tmp_path / "bad.npz", probs=np.ones((1, 2)), labels=[0])
    with pytest.raises(InputError, match=r"bad\.npz: probs must have rows"):
        Predictions.load(tmp_path / "bad.npz")
    np.savez(tmp_path / "objects.npz", probs=np.array([{}], dtype=object), labels=[0])
    with pytest.raises(InputError, match=r"objects\.npz must be an npz file"):
        Predictions.load(tmp_path / "objects.npz")
