"""Batches as functions of (seed, stream, epoch, index): any batch can be made again without those before it."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from metacal import ranks
from metacal.data.arrays import stacked
from metacal.data.prefetch import prefetched
from metacal.data.splits import Split
from metacal.data.stores import errors_in_one_line, leave_interrupts
from metacal.devices import sent
from metacal.errors import require
from metacal.inputs import at_a_time

__all__ = ["Batches", "derived_seed", "global_rng", "samples_at_a_time"]


def derived_seed(*key: int | str) -> int:
    """A 63-bit seed that depends on every part of `key`, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def global_rng(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of torch, numpy and random inside the block, and put them back after it.

    For other people's transforms, which draw from these.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    _seed_all(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _seed_all(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def samples_at_a_time(split: Split, most: int = 1024) -> int:
    """How many of its samples to run a network on at a time, by the size of the first (`inputs.at_a_time`)."""
    if split.in_memory:
        return at_a_time(split.storage, most)
    with global_rng(0):  # a Dataset may draw
        item = split.storage[0]
    return at_a_time(stacked([item[0] if split.yields_labels else item], f"{split.name} inputs"), most)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is in one batch: which samples, and for augmented images their offsets and mirrorings."""

    index: Tensor  # (B,) on the split's device
    positions: Tensor  # the same on the CPU
    draws: Tensor | None  # (B, 3) on the split's device: row offset, column offset, mirrored
    seed: int  # of the batch
    first: int  # the place in the batch of the first of these samples: not 0 for a rank that makes a later part of it


class Batches:
    """Batches `(x, y)` of a split, or `(x, y, index)` with `with_index`, `index` being positions in the split.

    Epoch e visits the samples in an order that depends on (seed, stream, e) alone, and sample i is augmented
    by draws that depend on (seed, stream, e) and its place, so `epoch(e, start=k)` goes on at batch k as if
    it had made the first k. No global generator is read.

    `batch_size` None: as many as `samples_at_a_time` says, for passes without gradients.
    `drop_last` (default: as `shuffle`) leaves out an incomplete last batch, but never the only one.
    Augmentation as the split's transform says, if `augment`; only images can be augmented.

    `visits` says which positions of the split an epoch visits (all if None). `steps` is the number of batches of every
    epoch, in place of those that one pass gives: where a pass has fewer, the epoch goes on into a further pass in a new
    order, and the batches are full; the one that holds the seam may then hold a sample twice. `shared`: where several
    ranks work together each makes its rows of every batch (`ranks.share`), which are those that one process makes
    there. Each of these arguments says one thing about the batches, and any two of them go together.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int | None,
        seed: int = 0,
        stream: str = "train",
        shuffle: bool = True,
        augment: bool = True,
        drop_last: bool | None = None,
        with_index: bool = False,
        steps: int | None = None,
        visits: Callable[[int], Tensor] | None = None,
        shared: bool = False,
    ) -> None:
        require(len(split) > 0, f"split {split.name!r} is empty")
        batch_size = samples_at_a_time(split) if batch_size is None else batch_size
        require(
            isinstance(batch_size, (int, np.integer)) and batch_size >= 1,
            f"batch_size must be an int >= 1, got {batch_size!r}",
        )
        batch_size = int(batch_size)
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.stream = stream
        self.shuffle = shuffle
        t = split.transform
        self.augment = augment and t is not None and (t.crop_padding > 0 or t.flip)
        self.with_index = with_index
        self.drop_last = shuffle if drop_last is None else drop_last
        self.steps = steps
        self.visits = visits
        self.shared = shared

    def __len__(self) -> int:
        """Batches an epoch; where epochs visit different numbers of samples, that of the first."""
        return self.steps or self._in_a_pass(len(self._visited(0)))

    def _visited(self, epoch: int) -> Tensor:
        """The positions that an epoch visits, on the CPU."""
        return torch.arange(len(self.split)) if self.visits is None else self.visits(epoch)

    def _in_a_pass(self, n: int) -> int:
        """Batches that one pass over n samples gives."""
        return max(1, n // self.batch_size) if self.drop_last else -(-n // self.batch_size)

    def smallest_batch(self) -> int:
        """How many samples the smallest batch has, on all ranks together; of the first epoch where these differ."""
        n = len(self._visited(0))
        several = len(self) > self._in_a_pass(n)
        return self.batch_size if several else min(self.batch_size, n - (len(self) - 1) * self.batch_size)

    def epoch(self, epoch: int, start: int = 0, stride: int = 1) -> Iterator[tuple[Tensor, ...]]:
        """The batches `start`, `start + stride`, ... of one epoch."""
        return self._make(self._plans(epoch, start, stride=stride))

    def forever(self, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Epoch after epoch, from the batch with global number `start`; every epoch in a new order, newly augmented."""

        def plans() -> Iterator[_Plan]:
            epoch, first = divmod(start, len(self))
            while True:
                yield from self._plans(epoch, first)
                epoch, first = epoch + 1, 0

        return self._make(plans())

    def again(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The samples of one epoch over and over, from batch `start`: as `epoch`, then each time in a new order."""

        def plans() -> Iterator[_Plan]:
            number, first = divmod(start, len(self))
            while True:
                yield from self._plans(epoch, first, number)
                number, first = number + 1, 0

        return self._make(plans())

    def _plans(self, epoch: int, start: int, repetition: int = 0, stride: int = 1) -> Iterator[_Plan]:
        key = (self.seed, self.stream, epoch, *(("again", repetition) if repetition else ()))
        generator = torch.Generator().manual_seed(derived_seed(*key))
        samples = self._visited(epoch)
        in_a_pass = self._in_a_pass(len(samples))
        count = self.steps or in_a_pass
        passes = 1 if count <= in_a_pass else -(-count * self.batch_size // len(samples))
        drawn = [self._pass(samples, generator) for _ in range(passes)]
        positions = torch.cat([p for p, _ in drawn])
        order = sent(positions, self.split.device)
        draws = sent(torch.cat([d for _, d in drawn]), self.split.device) if self.augment else None
        for i in range(start, count, stride):
            first, end = i * self.batch_size, min((i + 1) * self.batch_size, len(order))
            rows = ranks.share(end - first) if self.shared else slice(0, end - first)
            here = slice(first + rows.start, first + rows.stop)
            drawn_here = None if draws is None else draws[here]
            yield _Plan(order[here], positions[here], drawn_here, derived_seed(*key, i), rows.start)

    def _pass(self, samples: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """All of `samples` in an order, and the draws of their augmentation (empty without one)."""
        n = len(samples)
        order = samples
        if self.shuffle:
            put = self.split.order
            order = samples[torch.randperm(n, generator=generator)] if put is None else put(samples, generator)
        if not self.augment:
            return order, torch.empty(0)
        t = self.split.transform
        assert t is not None
        offsets = torch.randint(2 * t.crop_padding + 1, (n, 2), generator=generator) - t.crop_padding
        mirrored = torch.randint(2, (n, 1), generator=generator) * int(t.flip)
        return order, torch.cat([offsets, mirrored], 1)

    def _make(self, plans: Iterator[_Plan]) -> Iterator[tuple[Tensor, ...]]:
        split = self.split
        for plan, stored, labels in self._stored(plans):
            if plan.draws is not None and not split.in_memory:
                rows = torch.arange(len(stored), device=stored.device)
                stored = _crop_and_mirror(stored, rows, plan.draws)
            x = stored if split.transform is None else split.transform(stored)
            y = split.labels[plan.index] if labels is None else labels
            y = y if split.soft is None else split.soft[plan.index]
            yield (x, y, plan.index) if self.with_index else (x, y)

    def _stored(self, plans: Iterator[_Plan]) -> Iterator[tuple[_Plan, Tensor, Tensor | None]]:
        """Stored inputs of each plan, from the tensor (already cropped there) or from the loading processes."""
        split = self.split
        if split.in_memory:
            for plan in plans:
                if plan.draws is not None:
                    yield plan, _crop_and_mirror(split.storage, plan.index, plan.draws), None
                else:
                    yield plan, split.storage.index_select(0, plan.index), None
            return
        pending: deque[_Plan] = deque()

        def keys() -> Iterator[list[int]]:
            for plan in plans:
                pending.append(plan)
                yield [plan.seed, plan.first, *plan.positions.tolist()]

        loader: DataLoader = DataLoader(
            _Fetch(split.storage, draws=split.yields_labels),  # type: ignore[arg-type]
            batch_sampler=keys(),
            num_workers=split.workers,
            collate_fn=_as_is,
            worker_init_fn=leave_interrupts,
            pin_memory=split.device.type == "cuda",
            generator=torch.Generator().manual_seed(self.seed),  # else it would draw from the global one
        )
        for stored, labels in prefetched(errors_in_one_line(loader), split.device):
            yield pending.popleft(), stored, labels


class _Fetch:
    """Samples of a map-style dataset from a key `[seed, first, *indices]`, the first of them at that place of a batch.

    Where it `draws`, a sample's random transforms are seeded by the seed of the batch and the sample's place in it, so
    that parts of a batch are what they are in the whole.
    """

    def __init__(self, dataset: Any, draws: bool) -> None:
        self.dataset, self.draws = dataset, draws

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: list[int]) -> tuple[Tensor, Tensor | None]:
        seed, first, *indices = key
        items = []
        with global_rng(seed):
            for place, i in enumerate(indices, first):
                if self.draws:
                    _seed_all(derived_seed(seed, place))
                items.append(self.dataset[i])
        if isinstance(items[0], Tensor):
            return stacked(items, "inputs"), None
        inputs = [x if isinstance(x, dict) else torch.as_tensor(x) for x, *_ in items]
        return stacked(inputs, "inputs"), torch.tensor([int(y) for _, y, *_ in items])


def _as_is(batch: Any) -> Any:
    return batch


def _crop_and_mirror(images: Tensor, index: Tensor, draws: Tensor) -> Tensor:
    """`images[index]` `(B, C, H, W)`, shifted by (dy, dx) with the border reflected, and mirrored where asked.

    Equals padding by reflection and cropping, without the padded copy: rows are picked as wholes, then
    columns.
    """
    n, channels, height, width = images.shape
    dy, dx, mirrored = draws.unbind(1)
    rows = _reflected(torch.arange(height, device=images.device) + dy[:, None], height)
    columns = _reflected(torch.arange(width, device=images.device) + dx[:, None], width)
    columns = torch.where(mirrored[:, None] > 0, columns.flip(1), columns)
    lines = (index[:, None] * channels + torch.arange(channels, device=images.device)) * height
    lines = (lines[:, :, None] + rows[:, None, :]).reshape(-1)
    picked = images.view(n * channels * height, width).index_select(0, lines)
    picked = picked.view(len(index), channels, height, width)
    return picked.gather(3, columns[:, None, None, :].expand_as(picked))


def _reflected(i: Tensor, n: int) -> Tensor:
    """Coordinates outside 0..n-1 (by at most n - 1) reflected at the first and the last one."""
    return (n - 1) - ((n - 1) - i.abs()).abs()
