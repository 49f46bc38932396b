"""Other people's data as splits and batches: tensors, a Dataset, or a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from metacal.data.batches import Batches, derived_seed, global_rng
from metacal.data.splits import Split, Transform, channel_statistics
from metacal.errors import InputError, require

__all__ = ["LoaderBatches", "as_batches", "as_split"]

_KINDS = "a pair of tensors (x, y), a torch Dataset, a Split, or a DataLoader"


def as_split(
    data: Any,
    name: str = "train",
    device: str | torch.device = "cpu",
    like: Split | None = None,
    workers: int = 0,
) -> Split:
    """`data` as a Split.

    - `(x, y)` tensors or arrays, or a `TensorDataset` of the two: float inputs are used as they are; uint8
      images `(N, C, H, W)` or grey `(N, H, W)` are scaled to [0, 1] and normalised per channel, by the
      statistics of `like` (the training split, for val and test) or else by their own.
    - any other map-style Dataset of pairs (input, label): read afresh at each pass, its random transforms
      seeded by (seed, stream, epoch, batch). Labels come from its `targets` or `labels`; lacking those it is
      read through once.
    - a Split stays what it is.

    Raises `InputError` for lengths that differ, labels that are not integers >= 0, and inputs with NaN.
    """
    device = torch.device(device)
    if isinstance(data, Split):
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = torch.as_tensor(data[0]), torch.as_tensor(data[1])
        require(x.ndim >= 1 and len(x) > 0, f"{name} data are empty (x has shape {tuple(x.shape)})")
        labels = _check_labels(y, name, len(x))
        transform = None
        if x.dtype == torch.uint8:
            x = x[:, None] if x.ndim == 3 else x
            require(x.ndim == 4, f"{name} uint8 inputs must be images (N, C, H, W), got shape {tuple(x.shape)}")
            require(
                not (x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)),
                f"{name} images must be (N, C, H, W), got shape {tuple(x.shape)}; use x.permute(0, 3, 1, 2)",
            )
            transform = like.transform if like is not None and like.transform is not None else None
            if transform is None:
                mean, std = channel_statistics(lambda: x.split(4096), 1 / 255, count_values=True)
                transform = Transform(1 / 255, mean.to(device), std.to(device))
            else:
                transform = Transform(transform.scale, transform.mean, transform.std)
        else:
            require(x.is_floating_point(), f"{name} inputs must be floating point, or uint8 images, got {x.dtype}")
            bad = ~torch.isfinite(x.flatten(1) if x.ndim > 1 else x[:, None]).all(1)
            require(
                not bool(bad.any()),
                f"{name} inputs have NaN or infinite values in {int(bad.sum())} samples, the first at index "
                f"{int(bad.int().argmax())}",
            )
        return Split(name, x.contiguous().to(device), labels.to(device), transform)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        n = len(data)  # type: ignore[arg-type]
        require(n > 0, f"{name} dataset is empty")
        first = data[0]
        require(
            isinstance(first, (tuple, list)) and len(first) >= 2 and isinstance(first[0], Tensor),
            f"{name} dataset must give pairs (tensor, label), got {_shown(first)}",
        )
        known = next((v for a in ("targets", "labels") if (v := getattr(data, a, None)) is not None), None)
        if known is None or len(known) != n:
            with global_rng(0):
                known = [int(data[i][1]) for i in range(n)]
        labels = _check_labels(torch.as_tensor(known), name, n)
        return Split(name, data, labels.to(device), workers=workers, yields_labels=True)
    raise InputError(f"{name} data must be {_KINDS}, got {type(data).__name__}")


def as_batches(
    data: Any,
    batch_size: int = 128,
    seed: int = 0,
    stream: str = "train",
    shuffle: bool = True,
    augment: bool = True,
    device: str | torch.device = "cpu",
    like: Split | None = None,
) -> Batches | LoaderBatches:
    """`data` as batches: a DataLoader keeps its own batches and order; anything else goes through `as_split`.

    `batch_size`, `shuffle` and `augment` do not touch a DataLoader.
    """
    if isinstance(data, (Batches, LoaderBatches)):
        return data
    if isinstance(data, DataLoader):
        return LoaderBatches(data, seed, stream, device)
    split = as_split(data, name=stream, device=device, like=like)
    return Batches(split, batch_size, seed, stream, shuffle=shuffle, augment=augment)


class LoaderBatches:
    """A DataLoader as batches `(x, y)`: iterated anew at each epoch, so it shuffles and augments anew.

    While it works, the global generators are seeded from (seed, stream, epoch, batch), so a pass is
    repeatable and `start` is reached by reading past the batches before it. A loader that was given a
    generator of its own keeps its order to itself: it is not repeatable.
    """

    def __init__(
        self, loader: DataLoader, seed: int = 0, stream: str = "train", device: str | torch.device = "cpu"
    ) -> None:
        try:
            self._length = len(loader)
        except TypeError:
            raise InputError(f"the {stream} DataLoader must have a length; its dataset defines none") from None
        require(self._length > 0, f"the {stream} DataLoader is empty")
        self.loader = loader
        self.seed = seed
        self.stream = stream
        self.device = torch.device(device)

    def __len__(self) -> int:
        """Batches an epoch."""
        return self._length

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches `start`, `start + 1`, ... of one epoch."""
        with global_rng(derived_seed(self.seed, self.stream, epoch)):
            batches = iter(self.loader)
        for i in range(len(self)):
            with global_rng(derived_seed(self.seed, self.stream, epoch, i)):
                batch = next(batches, None)
            if batch is None:
                return
            if i >= start:
                yield self._checked(batch)

    def forever(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Epoch after epoch, from the batch with global number `start`."""
        epoch, first = divmod(start, len(self))
        while True:
            yield from self.epoch(epoch, first)
            epoch, first = epoch + 1, 0

    def _checked(self, batch: Any) -> tuple[Tensor, Tensor]:
        pair = isinstance(batch, (tuple, list)) and len(batch) >= 2
        require(
            pair and isinstance(batch[0], Tensor) and isinstance(batch[1], Tensor),
            f"the {self.stream} DataLoader must give batches (inputs, labels) of tensors, got {_shown(batch)}",
        )
        x, y = batch[0], batch[1]
        y = _check_labels(y, self.stream, len(x))
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


def _check_labels(y: Tensor, name: str, n: int) -> Tensor:
    require(y.ndim == 1, f"{name} labels must hold one class index a sample, shape (N,), got {tuple(y.shape)}")
    require(len(y) == n, f"{name} inputs and labels must be equally many, got {n} and {len(y)}")
    require(
        not y.is_floating_point() and not y.is_complex() and y.dtype != torch.bool,
        f"{name} labels must be integers, got {y.dtype}",
    )
    y = y.to(torch.int64)
    negative = y < 0
    require(
        not bool(negative.any()),
        f"{name} labels must be >= 0, got {int(y[int(negative.int().argmax())])} at index "
        f"{int(negative.int().argmax())}",
    )
    return y


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(v).__name__ for v in value)})"
    return type(value).__name__
