"""Batches: order, augmentation, resumption, and that streaming gives what memory gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.config.compose import compose
from metacal.data import Batches, Split, Transform
from metacal.data.batches import _crop_and_mirror, derived_seed, global_rng
from metacal.data.prefetch import one_ahead, prefetched
from metacal.data.stores import ArrayStore
from metacal.errors import InputError
from metacal.inputs import Inputs, at_a_time
from metacal.training.setup import meta_batch_size

RESUMPTIONS = [("memory", 0), ("memory", 1), ("memory", 4), ("stream", 0), ("stream", 3), ("workers", 2)]


def images(n: int = 23, channels: int = 3, side: int = 6, storage: str = "memory", **augment: object) -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, channels, side, side + 1), dtype=torch.uint8, generator=generator)
    y = torch.arange(n) % 4
    mean = torch.full((channels,), 0.4, dtype=torch.float64)
    transform = Transform(1 / 255, mean, mean / 2, **augment)  # type: ignore[arg-type]
    store = x if storage == "memory" else ArrayStore(x.numpy())
    return Split("train", store, y, transform, workers=2 if storage == "workers" else 0)


def equal(a: list[tuple[Tensor, ...]], b: list[tuple[Tensor, ...]]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for p, q in zip(a, b) for s, t in zip(p, q))


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_an_epoch_visits_every_sample_once(storage: str) -> None:
    split = images(storage=storage)
    batches = Batches(split, 5, drop_last=False, with_index=True)
    seen = list(batches.epoch(0))
    assert [len(x) for x, _, _ in seen] == [5, 5, 5, 5, 3] and len(batches) == 5
    index = torch.cat([i for _, _, i in seen])
    assert sorted(index.tolist()) == list(range(23))
    assert index.tolist() != list(range(23))
    for x, y, i in seen:
        assert torch.equal(y, split.labels[i])
        raw = torch.stack([split.storage[int(k)] for k in i])
        torch.testing.assert_close(x, (raw / 255 - 0.4) / 0.2)


def test_training_drops_the_incomplete_batch_but_never_the_only_one() -> None:
    assert [len(x) for x, _ in Batches(images(23), 5).epoch(0)] == [5, 5, 5, 5]
    assert [len(x) for x, _ in Batches(images(4), 5).epoch(0)] == [4]
    assert [len(x) for x, _ in Batches(images(23), 5, shuffle=False).epoch(0)] == [5, 5, 5, 5, 3]


def test_evaluation_is_in_order_and_not_augmented() -> None:
    split = images(crop_padding=2, flip=True)
    x = torch.cat([x for x, _ in Batches(split, 5, shuffle=False, augment=False).epoch(3)])
    assert split.transform is not None
    assert torch.equal(x, split.transform(split.storage))


def test_order_and_augmentation_depend_on_seed_stream_and_epoch() -> None:
    split = images(crop_padding=2, flip=True)
    first = list(Batches(split, 5, seed=1, stream="train").epoch(0))
    assert equal(first, list(Batches(split, 5, seed=1, stream="train").epoch(0)))
    for other in (
        Batches(split, 5, seed=2, stream="train").epoch(0),
        Batches(split, 5, seed=1, stream="meta").epoch(0),
        Batches(split, 5, seed=1, stream="train").epoch(1),
    ):
        assert not equal(first, list(other))


@pytest.mark.parametrize(("storage", "start"), RESUMPTIONS)
def test_epoch_goes_on_at_any_batch(storage: str, start: int) -> None:
    batches = Batches(images(storage=storage, crop_padding=2, flip=True), 5, seed=1)
    assert equal(list(batches.epoch(2, start)), list(batches.epoch(2))[start:])


@pytest.mark.parametrize(("storage", "start"), [*RESUMPTIONS, ("memory", 9)])
def test_forever_is_the_epochs_one_after_the_other(storage: str, start: int) -> None:
    batches = Batches(images(storage=storage, crop_padding=2, flip=True), 5, seed=1)
    epochs = [batch for e in range(4) for batch in batches.epoch(e)]
    assert equal(list(itertools.islice(batches.forever(start), 6)), epochs[start : start + 6])


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_an_epoch_of_more_steps_goes_on_into_the_next_pass(storage: str) -> None:
    split = images(storage=storage, crop_padding=2, flip=True)
    plain = Batches(split, 5, seed=1, with_index=True)
    longer = Batches(split, 5, seed=1, with_index=True, steps=11)  # 55 of 23: two passes and nine samples
    seen = list(longer.epoch(2))
    assert len(longer) == 11 and [len(y) for _, y, _ in seen] == [5] * 11 and longer.smallest_batch() == 5
    assert equal(seen[:4], list(plain.epoch(2))), "the first pass is that of an epoch without more steps"
    assert equal(seen[7:], list(longer.epoch(2, 7)))
    order = torch.cat([i for _, _, i in seen])
    assert sorted(order[:23].tolist()) == sorted(order[23:46].tolist()) == list(range(23))
    assert order[:23].tolist() != order[23:46].tolist() and len(set(order[46:].tolist())) == 9
    assert equal(list(Batches(split, 5, seed=1, with_index=True, steps=4).epoch(2)), seen[:4])


def test_an_epoch_visits_some_samples_and_can_go_over_them_again() -> None:
    visits = {0: torch.tensor([1, 4, 7, 9, 20]), 1: torch.tensor([0, 2, 3, 5, 6, 8])}
    batches = Batches(images(crop_padding=2), 2, with_index=True, steps=2, visits=lambda epoch: visits[epoch])
    assert equal(list(itertools.islice(batches.again(1, 3), 4)), list(itertools.islice(batches.again(1), 7))[3:])
    assert equal(list(itertools.islice(batches.again(1), 2)), list(batches.epoch(1)))
    for epoch, samples in visits.items():
        first, second = (torch.cat([i for _, _, i in itertools.islice(batches.again(epoch, k), 2)]) for k in (0, 2))
        assert set(first.tolist()) <= set(samples.tolist()) and len(set(first.tolist())) == 4
        assert first.tolist() != second.tolist() and set(second.tolist()) <= set(samples.tolist())
    once = Batches(images(), 4, shuffle=False, visits=lambda epoch: visits[epoch], with_index=True)
    assert torch.cat([i for _, _, i in once.epoch(1)]).tolist() == visits[1].tolist()


def test_a_whole_split_as_one_batch_is_augmented_anew_each_pass() -> None:
    batches = Batches(images(crop_padding=2), 23, stream="meta", with_index=True)
    (x0, _, i0), (x1, _, i1) = itertools.islice(batches.forever(), 2)
    assert not torch.equal(x0[i0.argsort()], x1[i1.argsort()])


@pytest.mark.parametrize("workers", ["stream", "workers"])
@pytest.mark.parametrize("augment", [{}, {"crop_padding": 2, "flip": True}], ids=["plain", "augmented"])
def test_streaming_equals_memory(workers: str, augment: dict[str, object]) -> None:
    memory = list(Batches(images(**augment), 5, with_index=True).epoch(1))  # type: ignore[arg-type]
    streamed = list(Batches(images(storage=workers, **augment), 5, with_index=True).epoch(1))  # type: ignore[arg-type]
    assert equal(memory, streamed)


@pytest.mark.parametrize("storage", ["memory", "stream", "workers"])
def test_global_generators_are_neither_read_nor_changed(storage: str) -> None:
    batches = Batches(images(storage=storage, crop_padding=2, flip=True), 5)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    a = list(batches.epoch(0))
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert equal(a, list(batches.epoch(0)))


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_equals_padding_by_reflection_and_slicing(padding: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (9, 2, 7, 5), dtype=torch.uint8)
    index = torch.tensor([3, 3, 0, 8, 5, 1])
    offsets = torch.randint(-padding, padding + 1, (6, 2))
    mirrored = torch.tensor([0, 1, 0, 1, 1, 0])
    got = _crop_and_mirror(x, index, torch.cat([offsets, mirrored[:, None]], 1))
    padded = F.pad(x.float(), (padding,) * 4, mode="reflect").to(torch.uint8)
    for out, i, (dy, dx), m in zip(got, index, offsets.tolist(), mirrored):
        expected = padded[i, :, padding + dy : padding + dy + 7, padding + dx : padding + dx + 5]
        assert torch.equal(out, expected.flip(-1) if m else expected)


def test_offsets_and_mirrorings_are_uniform() -> None:
    """A bright pixel in the middle of blank images shows where each crop lies."""
    x = torch.zeros(4000, 1, 7, 7, dtype=torch.uint8)
    x[:, 0, 3, 3] = 255
    one = torch.ones(1, dtype=torch.float64)
    split = Split("t", x, torch.zeros(4000, dtype=torch.int64), Transform(1 / 255, 0 * one, one, crop_padding=2))
    (batch, _) = next(Batches(split, 4000).epoch(0))
    share = batch.mean((0, 1))
    torch.testing.assert_close(share[1:6, 1:6], torch.full((5, 5), 0.04), rtol=0, atol=0.015)
    assert share.sum() == pytest.approx(1.0, abs=1e-5)
    x[:] = 0
    x[:, 0, 3, 0] = 255
    split = Split("t", x, split.labels, Transform(1 / 255, 0 * one, one, flip=True))
    (batch, _) = next(Batches(split, 4000).epoch(0))
    assert float(batch[:, 0, 3, 0].mean()) == pytest.approx(0.5, abs=0.04)
    assert float(batch[:, 0, 3, 6].mean()) == pytest.approx(0.5, abs=0.04)


def test_derived_seeds_are_fixed_numbers_and_differ() -> None:
    assert derived_seed(0, "train", 0) == 4219113913667441461  # must never change: runs would not resume
    keys = [(s, n, e) for s in range(3) for n in ("train", "meta") for e in range(5)]
    assert len({derived_seed(*k) for k in keys}) == len(keys)
    assert all(0 <= derived_seed(*k) < 2**63 for k in keys)


def test_global_rng_restores_after_an_error() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with pytest.raises(KeyError), global_rng(5):
        torch.rand(3)
        raise KeyError
    assert torch.rand(1) == expected


@pytest.mark.parametrize("size", [0, -3, 2.0, "8"])
def test_wrong_batch_size(size: object) -> None:
    with pytest.raises(InputError, match="batch_size must be an int >= 1"):
        Batches(images(), size)  # type: ignore[arg-type]


def test_a_batch_is_handed_out_when_the_next_one_is_on_its_way() -> None:
    made: list[int] = []

    def batches() -> Iterator[int]:
        for i in range(4):
            made.append(i)
            yield i

    assert [(i, len(made)) for i in one_ahead(batches())] == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert list(one_ahead(range(1))) == [0] and list(one_ahead(range(0))) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_gpu_are_those_on_the_host() -> None:
    gpu = torch.device("cuda")
    batches = [(torch.full((1 << 20,), i).pin_memory(), None if i % 2 else torch.tensor([i])) for i in range(50)]
    for i, (x, y) in enumerate(prefetched(batches, gpu)):
        assert (x * 2).unique().tolist() == [2 * i] and (y is None) == bool(i % 2)
        del x  # so that its memory is used again


def test_large_inputs_are_evaluated_fewer_at_a_time() -> None:
    def batch(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(1, *shape, dtype=dtype).expand(2000, *shape)

    sizes = {(3, 32, 32): 1024, (3, 224, 224): 55, (3, 4000, 4000): 1, (): 1024}
    assert {shape: at_a_time(batch(*shape)) for shape in sizes} == sizes
    tokens = Inputs({"ids": batch(128, dtype=torch.int64), "mask": batch(128, dtype=torch.bool)})
    assert at_a_time(tokens) == 2**23 // (128 * 256 + 128)
    split = Split("val", batch(3, 224, 224), torch.zeros(2000, dtype=torch.int64))
    streamed = replace(split, storage=ArrayStore(split.storage.numpy()))
    assert {Batches(s, None, shuffle=False).batch_size for s in (split, streamed)} == {55}
    for words, size in (("", 128), ("data.batch_size=16", 55), ("data.meta_batch_size=300", 300)):
        assert meta_batch_size(compose(words.split()), split) == size
