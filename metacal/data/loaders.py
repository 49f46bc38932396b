"""Other people's DataLoaders as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from metacal.data.arrays import as_labels, as_tensor
from metacal.data.batches import derived_seed, global_rng
from metacal.data.kind import Task
from metacal.data.pairs import shown_types
from metacal.errors import InputError, require

__all__ = ["LoaderBatches"]


class LoaderBatches:
    """A DataLoader as batches `(x, y)`: iterated anew at each epoch, so it shuffles and augments anew.

    While it works, the global generators are seeded from (seed, stream, epoch, batch), so a pass is
    repeatable and `start` is reached by reading past the batches before it. A loader that was given a
    generator of its own keeps its order to itself: it is not repeatable.

    Args:
        prepare: from the inputs of a batch, and a name for messages, to what the model takes; None: they are that.
        task: what the model needs: labels below K, and a floating type. Labels are looked at in each batch, and at
            once where they can be seen without reading: in a `TensorDataset`.
        least: how many samples a batch must have, for models that cannot take fewer.
    """

    def __init__(
        self,
        loader: DataLoader,
        seed: int = 0,
        stream: str = "train",
        device: str | torch.device = "cpu",
        prepare: Callable[[Any, str], Tensor] | None = None,
        task: Task | None = None,
        least: int = 1,
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
        self.prepare = prepare
        self.task = task or Task()
        self.least = least
        if (labels := self._known_labels()) is not None:
            as_labels(labels, stream, len(labels), self.task.n_classes, self.task.class_names)

    def __len__(self) -> int:
        """Batches an epoch."""
        return self._length

    def epoch(self, epoch: int, start: int = 0, stride: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches `start`, `start + stride`, ... of one epoch."""
        with global_rng(derived_seed(self.seed, self.stream, epoch)):
            batches = iter(self.loader)
        for i in range(len(self)):
            with global_rng(derived_seed(self.seed, self.stream, epoch, i)):
                batch = next(batches, None)
            if batch is None:
                return
            if i >= start and (i - start) % stride == 0:
                yield self._checked(batch, i)

    def forever(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Epoch after epoch, from the batch with global number `start`."""
        epoch, first = divmod(start, len(self))
        while True:
            yield from self.epoch(epoch, first)
            epoch, first = epoch + 1, 0

    def smallest_batch(self) -> int | None:
        """How many samples the smallest batch has; None where only reading tells."""
        size = self.loader.batch_size
        try:
            n = len(self.loader.sampler)  # type: ignore[arg-type]
        except TypeError:
            return None
        if size is None or isinstance(self.loader.dataset, torch.utils.data.IterableDataset):
            return None
        return size if self.loader.drop_last or n % size == 0 else n % size

    def _known_labels(self) -> Tensor | None:
        """The labels of all samples, where they can be seen without reading these; else None."""
        data, index = self.loader.dataset, None
        if isinstance(data, Subset):
            data, index = data.dataset, list(data.indices)
        as_they_are = self.loader.collate_fn is default_collate and isinstance(data, TensorDataset)
        if not as_they_are or len(data.tensors) < 2:
            return None
        labels = data.tensors[1]
        return labels if index is None else labels[index]

    def _checked(self, batch: Any, number: int) -> tuple[Tensor, Tensor]:
        pair = isinstance(batch, (tuple, list)) and len(batch) >= 2
        require(
            pair and isinstance(batch[0], (Tensor, np.ndarray)),
            f"the {self.stream} DataLoader must give batches (inputs, labels) of tensors, got {shown_types(batch)}",
        )
        x = as_tensor(batch[0], f"{self.stream} inputs")
        y, _ = as_labels(
            batch[1],
            self.stream,
            len(x),
            self.task.n_classes,
            self.task.class_names,
            lambda i: f"for sample {i} of batch {number}",
        )
        require(
            len(x) >= self.least,
            f"batch {number} of the {self.stream} DataLoader has {len(x)} sample, and the model needs {self.least} for "
            "its batch statistics: give the loader drop_last=True or another batch_size",
        )
        if self.prepare is not None:
            x = self.prepare(x, f"{self.stream} batch {number}:")
        if x.is_floating_point() and self.task.dtype is not None:
            x = x.to(self.task.dtype)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
