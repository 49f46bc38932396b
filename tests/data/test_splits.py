"""Stratified draws, sizes, statistics and the transform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metacal.data.splits import (
    Split,
    Transform,
    channel_statistics,
    resolve_size,
    stratified_draw,
    stratified_folds,
)
from metacal.errors import InputError


def names(k: int) -> list[str]:
    return [f"c{i}" for i in range(k)]


@given(
    counts=st.lists(st.integers(2, 30), min_size=2, max_size=6),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 10),
)
def test_draw_is_a_stratified_partition(counts: list[int], share: float, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    k, n = len(counts), len(labels)
    count = min(max(round(share * n), k), n - k)
    drawn, rest = stratified_draw(labels, count, np.random.default_rng(seed), names(k), "size")
    assert len(drawn) == count
    assert sorted([*drawn, *rest]) == list(range(n))
    taken = np.bincount(labels[drawn], minlength=k)
    assert (taken >= 1).all() and (taken <= np.array(counts) - 1).all()
    # Each class is within one of its share, but for what the others could not give or had to be left.
    quota = np.array(counts) * count / n
    forced = np.abs(np.clip(quota, 1, np.array(counts) - 1) - quota).sum()
    assert (np.abs(taken - quota) <= 1 + forced).all()


@given(counts=st.lists(st.integers(1, 30), min_size=2, max_size=6), k=st.integers(2, 12), seed=st.integers(0, 10))
def test_folds_are_a_stratified_partition_that_is_gone_through_in_turn(counts: list[int], k: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    n = len(labels)
    if k > n:
        with pytest.raises(InputError, match=rf"folds must be in \[2, {n}\], the training samples, got {k}"):
            stratified_folds(labels, k, np.random.default_rng(seed), "folds")
        return
    folds = stratified_folds(labels, k, np.random.default_rng(seed), "folds")
    turns = [folds.held_out(e).numpy() for e in range(k)]
    assert sorted(np.concatenate(turns)) == list(range(n))
    assert min(map(len, turns)) == folds.least and max(map(len, turns)) - folds.least <= 1
    of_class = np.array([np.bincount(labels[turn], minlength=len(counts)) for turn in turns])
    assert (of_class.max(0) - of_class.min(0) <= 1).all()
    for e in range(k + 2):
        assert (folds.held_out(e).numpy() == turns[e % k]).all()
        assert sorted([*folds.held_out(e), *folds.others(e)]) == list(range(n))


def test_draw_of_equal_classes_is_equal_and_depends_on_the_seed() -> None:
    labels = np.tile(np.arange(5), 20)
    first, _ = stratified_draw(labels, 25, np.random.default_rng(0), names(5), "size")
    again, _ = stratified_draw(labels, 25, np.random.default_rng(0), names(5), "size")
    other, _ = stratified_draw(labels, 25, np.random.default_rng(1), names(5), "size")
    assert (np.bincount(labels[first]) == 5).all()
    assert (first == again).all() and (np.sort(first) == first).all()
    assert (first != other).any()


def test_every_member_of_a_class_is_equally_likely() -> None:
    labels = np.repeat([0, 1], [4, 6])
    hits = np.zeros(10)
    for seed in range(2000):
        drawn, _ = stratified_draw(labels, 5, np.random.default_rng(seed), names(2), "size")
        hits[drawn] += 1
    np.testing.assert_allclose(hits / 2000, 0.5, atol=0.05)


@pytest.mark.parametrize(
    ("counts", "count", "message"),
    [
        ([5, 1, 5], 4, r"val_size leaves class 'c1' empty on one side: it has 1 sample\(s\)"),
        ([5, 0, 5], 4, r"val_size leaves class 'c1' empty on one side: it has 0 sample\(s\)"),
        ([5, 5, 5], 2, "val_size gives 2 samples, fewer than the 3 classes.*it must give 3 or more"),
        ([5, 5, 5], 13, "val_size takes 13 of 15 samples.*it must take 12 or fewer"),
    ],
)
def test_draw_refuses_to_leave_a_class_empty(counts: list[int], count: int, message: str) -> None:
    labels = np.repeat(np.arange(3), counts)
    with pytest.raises(InputError, match=message):
        stratified_draw(labels, count, np.random.default_rng(0), names(3), "val_size")


def test_sizes() -> None:
    assert resolve_size("s", 0.1, 1797) == 180
    assert resolve_size("s", 7, 100) == 7


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.0, 1.5, -0.2, True, "0.1", None, float("nan"), [1]])
def test_wrong_sizes(value: object) -> None:
    with pytest.raises(InputError, match=r"s must be a fraction in \(0, 1\) or a count >= 1, got"):
        resolve_size("s", value, 100)


def test_size_beyond_the_total() -> None:
    with pytest.raises(InputError, match="s must be below the 100 samples that it is taken from, got 100"):
        resolve_size("s", 100, 100)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_statistics_are_those_of_all_values_of_a_channel(dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (20, 3, 5, 4), dtype=torch.uint8).to(dtype)
    mean, std = channel_statistics(lambda: x.split(7), 1 / 255, count_values=dtype == torch.uint8)
    values = x.double() / 255
    torch.testing.assert_close(mean, values.mean((0, 2, 3)))
    torch.testing.assert_close(std, values.std((0, 2, 3), correction=0))


def test_constant_channel_is_not_divided_by_zero() -> None:
    x = torch.full((4, 2, 3), 7.3)
    mean, std = channel_statistics(lambda: [x], 1.0, count_values=False)
    torch.testing.assert_close(mean, torch.full((2,), 7.3, dtype=torch.float64))
    assert std.tolist() == [1.0, 1.0]


def test_transform_formula_and_that_it_copies() -> None:
    mean, std = torch.tensor([0.4, 0.5]).double(), torch.tensor([0.2, 0.3]).double()
    x = torch.randint(0, 256, (3, 2, 4, 4), dtype=torch.uint8)
    expected = (x.double() / 255 - mean.view(2, 1, 1)) / std.view(2, 1, 1)
    torch.testing.assert_close(Transform(1 / 255, mean, std)(x), expected.float())
    values = torch.zeros(3, 2)
    Transform(1.0, mean, std)(values)
    assert values.abs().sum() == 0


def test_split_properties() -> None:
    split = Split("val", torch.zeros(4, 1, 2, 3), torch.zeros(4, dtype=torch.int64))
    assert len(split) == 4 and split.in_memory and split.input_shape == (1, 2, 3)
    assert split.device == torch.device("cpu")
