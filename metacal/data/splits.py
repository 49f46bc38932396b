"""A split of the data, the transform from stored values to inputs, stratified draws and folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from metacal.errors import InputError, require
from metacal.folds import dealt
from metacal.inputs import Inputs

__all__ = [
    "Folds",
    "Split",
    "Transform",
    "by_shard",
    "channel_statistics",
    "resolve_size",
    "stratified_draw",
    "stratified_folds",
]


@dataclass(frozen=True)
class Transform:
    """Stored values to inputs: `x = (scale · stored - mean) / std`, mean and std per channel (dimension 1).

    Inputs are of type `dtype`, or float64 where they are stored as that.

    Stored images are uint8 and `scale` takes them to [0, 1]. `crop_padding` and `flip` are the augmentation
    of training batches: a crop at a random offset of the image padded by reflection, and a left-right mirror
    image with probability 1/2.
    """

    scale: float
    mean: Tensor  # (C,)
    std: Tensor  # (C,)
    crop_padding: int = 0
    flip: bool = False
    dtype: torch.dtype = torch.float32

    def __call__(self, stored: Tensor) -> Tensor:
        """`stored (N, C, ...)` of any type, normalised."""
        shape = (-1,) + (1,) * (stored.ndim - 2)
        dtype = torch.float64 if stored.dtype == torch.float64 else self.dtype
        gain = (self.scale / self.std).to(stored.device, dtype).view(shape)
        shift = (self.mean / self.std).to(stored.device, dtype).view(shape)
        # A fresh copy in any case, so that working in place is safe and storage is never handed out.
        return stored.to(dtype, copy=True).mul_(gain).sub_(shift)


@dataclass(frozen=True, eq=False)
class Split:
    """One part of the data.

    `storage` is a tensor of all stored inputs `(n, ...)` on the device (or `Inputs`), or a map-style dataset that a
    DataLoader streams: `dataset[i]` is the stored input (a tensor), or with `yields_labels` a pair of it and
    the label. `labels` (n,) are int64 on the device. `transform` is None for inputs that are used as they
    are. `class_names` are those of the classes 0, 1, ..., where the data name them. `order` puts ascending positions
    into a random order in which they are quickly read, such as `by_shard`; None: one order is as quick as another.
    `soft` (n, K) are probabilities of the classes to train on; `labels` are then the most probable ones.
    """

    name: str
    storage: Any
    labels: Tensor
    transform: Transform | None = None
    workers: int = 0
    yields_labels: bool = False
    class_names: Sequence[str] | None = None
    order: Callable[[Tensor, torch.Generator], Tensor] | None = None
    soft: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.labels.device

    @property
    def in_memory(self) -> bool:
        return isinstance(self.storage, (Tensor, Inputs))

    def at(self, positions: Tensor, name: str) -> Split:
        """The samples at `positions` (on the CPU), in that order."""
        rows = positions.to(self.device)
        storage = self.storage[rows] if self.in_memory else Subset(self.storage, positions.tolist())
        soft = None if self.soft is None else self.soft[rows]
        return replace(self, name=name, storage=storage, labels=self.labels[rows], soft=soft)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        first = self.storage[0]
        return tuple((first[0] if self.yields_labels else first).shape)


def by_shard(shard: Tensor, buffer: int, positions: Tensor, generator: torch.Generator) -> Tensor:
    """Ascending positions in a random order that reads one shard after another.

    The shards come in a random order, and each sample, once these are laid end to end, is moved by fewer than `buffer`
    places: no more of them than that lie between two reads, and a sample's neighbours in its shard are not its
    neighbours in training. shard: the number of that of every sample, (n,).
    """
    turn = torch.randperm(int(shard.max()) + 1, generator=generator)
    in_turn = positions[turn[shard[positions]].argsort(stable=True)]
    places = torch.arange(len(positions)) + buffer * torch.rand(
        len(positions), dtype=torch.float64, generator=generator
    )
    return in_turn[places.argsort()]


@dataclass(frozen=True, eq=False)
class Folds:
    """A partition of the positions 0..n-1 of a split into K folds, one of which is held out at each epoch.

    At epoch e (from 0) `held_out(e)` are the positions of fold e mod K and `others(e)` all the others, ascending.
    """

    number: Tensor  # (n,) int64 on the CPU: the fold of each position
    count: int  # K

    def held_out(self, epoch: int) -> Tensor:
        return torch.nonzero(self.number == epoch % self.count).flatten()

    def others(self, epoch: int) -> Tensor:
        return torch.nonzero(self.number != epoch % self.count).flatten()

    @property
    def least(self) -> int:
        """How many samples the smallest fold has."""
        return int(torch.bincount(self.number, minlength=self.count).min())


def stratified_folds(labels: np.ndarray, count: int, rng: np.random.Generator, key: str) -> Folds:
    """`count` folds of the positions 0..n-1, drawn at random (`dealt`); `key` names the setting in messages."""
    require(2 <= count <= len(labels), f"{key} must be in [2, {len(labels)}], the training samples, got {count}")
    return Folds(torch.from_numpy(dealt(labels, count, rng)), count)


def resolve_size(key: str, value: Any, total: int) -> int:
    """The count that `value` means of `total`: a float in (0, 1) is a fraction, an int >= 1 a count below `total`."""
    if isinstance(value, np.generic):
        value = value.item()
    wrong = f"{key} must be a fraction in (0, 1) or a count >= 1, got {value!r}"
    require(isinstance(value, (int, float)) and not isinstance(value, bool), wrong)
    if isinstance(value, int):
        require(value >= 1, wrong)
        require(value < total, f"{key} must be below the {total} samples that it is taken from, got {value}")
        return value
    require(0.0 < value < 1.0, wrong)
    return round(value * total)


def stratified_draw(
    labels: np.ndarray, count: int, rng: np.random.Generator, class_names: Sequence[str], key: str
) -> tuple[np.ndarray, np.ndarray]:
    """Split the positions 0..n-1 at random into `count` drawn ones and the rest, with the classes' shares in both.

    Every class gives count · (its share), rounded so that the sum is exactly `count` (largest remainders first), and
    keeps and gives at least one sample. Both parts come back in ascending order. `key` names the setting in messages.

    Raises:
        InputError: where that cannot be done, naming the class.
    """
    n_classes = len(class_names)
    have = np.bincount(labels, minlength=n_classes)
    low, high = n_classes, len(labels) - n_classes
    require(
        count >= low,
        f"{key} gives {count} samples, fewer than the {n_classes} classes, so that some class is left empty; "
        f"it must give {low} or more",
    )
    if have.min() < 2:
        k = int(have.argmin())
        raise InputError(
            f"{key} leaves class {class_names[k]!r} empty on one side: it has {have[k]} sample(s) to divide; "
            "add samples or leave the class out"
        )
    require(
        count <= high,
        f"{key} takes {count} of {len(labels)} samples, so that some class of the rest is left empty; "
        f"it must take {high} or fewer",
    )
    quota = have * (count / len(labels))
    take = np.clip(np.floor(quota).astype(np.int64), 1, have - 1)
    tie_break = rng.random(n_classes)
    while (missing := count - int(take.sum())) != 0:
        up = missing > 0
        movable = take < have - 1 if up else take > 1
        gap = np.where(movable, quota - take if up else take - quota, -np.inf)
        order = np.lexsort((tie_break, -gap))[: min(abs(missing), int(movable.sum()))]
        take[order] += 1 if up else -1
    chosen = np.zeros(len(labels), dtype=bool)
    by_class = np.argsort(labels, kind="stable")
    for members, count in zip(np.split(by_class, np.cumsum(have)[:-1]), take, strict=True):
        chosen[rng.permutation(members)[:count]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)


def channel_statistics(chunks: Callable[[], Any], scale: float, count_values: bool) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel (dimension 1) over tensors `(n, C, ...)`, in float64.

    With `count_values` (uint8) from exact counts of the 256 values, so the result does not depend on the
    chunks; else from two passes. A constant channel gets standard deviation 1.
    """
    if count_values:
        counts: Tensor | int = 0
        for x in chunks():
            flat = x.movedim(1, 0).flatten(1).cpu()
            counts = counts + torch.stack([torch.bincount(c, minlength=256) for c in flat])
        counts = counts.double()  # type: ignore[union-attr]
        values = torch.arange(256, dtype=torch.float64) * scale
        mean = counts @ values / counts.sum(1)
        var = (counts * (values - mean[:, None]).square()).sum(1) / counts.sum(1)
    else:

        def average(f: Callable[[Tensor], Tensor]) -> Tensor:
            total: Tensor | float = 0.0
            n = 0
            for x in chunks():
                x = f(x.movedim(1, 0).flatten(1).double().cpu() * scale)
                total, n = total + x.sum(1), n + x.shape[1]
            return total / n  # type: ignore[return-value]

        mean = average(lambda x: x)
        var = average(lambda x: (x - mean[:, None]).square())
    std = var.sqrt()
    return mean, torch.where(std > 1e-12 * (1 + mean.abs()), std, torch.ones_like(std))
