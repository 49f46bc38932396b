"""Other people's DataLoaders as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from metacal.data.arrays import as_inputs, as_labels, labelled, probabilities_in
from metacal.data.batches import derived_seed, global_rng
from metacal.data.kind import Task
from metacal.data.pairs import shown_types
from metacal.data.prefetch import prefetched
from metacal.errors import InputError, require
from metacal.inputs import LABEL_KEYS, pair_in, placed

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
        prepare: Callable[..., Any] | None = None,
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
            self._classes(labels, len(labels))

    def __len__(self) -> int:
        """Batches an epoch."""
        return self._length

    def epoch(self, epoch: int, start: int = 0, stride: int = 1) -> Iterator[tuple[Any, ...]]:
        """The batches `start`, `start + stride`, ... of one epoch."""
        return prefetched(self._on_host(epoch, start, stride), self.device)

    def _on_host(self, epoch: int, start: int, stride: int) -> Iterator[tuple[Any, Tensor]]:
        with global_rng(derived_seed(self.seed, self.stream, epoch)):
            batches = iter(self.loader)
        some = False
        for i in range(len(self)):
            with global_rng(derived_seed(self.seed, self.stream, epoch, i)):
                batch = next(batches, None)
            if batch is None:
                return
            if i < start or (i - start) % stride != 0:
                continue
            checked = self._checked(batch, i)
            if checked is not None:
                some = True
                yield checked
        require(some or start > 0, f"no sample of the {self.stream} DataLoader has a label that is not ignored")

    def forever(self, start: int = 0) -> Iterator[tuple[Any, ...]]:
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
        unknown = size is None or isinstance(self.loader.dataset, torch.utils.data.IterableDataset)
        if size is None or unknown or self.task.ignore_index is not None:
            return None
        return size if self.loader.drop_last or n % size == 0 else n % size

    def _known_labels(self) -> Tensor | None:
        """The labels of all samples, where they can be seen without reading these; else None."""
        data: Any = self.loader.dataset
        index = None
        if isinstance(data, Subset):
            data, index = data.dataset, list(data.indices)
        as_they_are = self.loader.collate_fn is default_collate and isinstance(data, TensorDataset)
        if not as_they_are or len(data.tensors) < 2:
            return None
        labels = data.tensors[1]
        return labels if index is None else labels[index]

    def _classes(self, values: Any, n: int, place: Callable[[int], str] | None = None) -> Tensor:
        """Class indices (n,) of labels as they come."""
        task = self.task
        more: dict[str, Any] = {} if place is None else {"place": place}
        labels, _ = as_labels(
            values, self.stream, n, task.n_classes, task.class_names, ignore=task.ignore_index, **more
        )
        return labels

    def _checked(self, batch: Any, number: int) -> tuple[Any, Tensor] | None:
        """A batch as the model takes it; None where all its labels are to be ignored."""

        def place(i: int) -> str:
            return f"for sample {i} of batch {number}"

        pair = pair_in(batch)
        if pair is None:
            raise InputError(
                f"the {self.stream} DataLoader must give batches (inputs, labels), or dictionaries with one of "
                f"{', '.join(LABEL_KEYS)} beside the inputs, got {shown_types(batch)}"
            )
        x: Any = as_inputs(pair[0], f"{self.stream} inputs", by_place=True)
        y = self._classes(pair[1], len(x), place)
        soft = probabilities_in(pair[1], self.stream, place) if self.task.soft else None
        if (rows := labelled(y, self.task.ignore_index)) is not None:
            x, y = x[rows], y[rows]
        if len(x) == 0:
            return None
        require(
            len(x) >= self.least,
            f"batch {number} of the {self.stream} DataLoader has {len(x)} sample, and the model needs {self.least} for "
            "its batch statistics: give the loader drop_last=True or another batch_size",
        )
        if self.prepare is not None:
            x = self.prepare(x, f"{self.stream} batch {number}:")
        x, y = placed(x, x.device, self.task.dtype), y if soft is None else placed(soft, soft.device, self.task.dtype)
        return x, y
