"""Other people's map-style datasets: their items as (tensor, class index), and what a look at them tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from metacal.data.arrays import as_labels, as_tensor, image_tensor, is_image, stacked
from metacal.data.batches import global_rng
from metacal.data.kind import InputKind, Task
from metacal.errors import InputError

__all__ = ["Pairs", "evenly_spaced", "labels_of_items", "shown_types"]

LOOK = 512
"""Samples that are looked at where reading all of them would take too long."""


def evenly_spaced(n: int, count: int) -> list[int]:
    """Up to `count` of the positions 0..n-1, the first and the last among them."""
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)).tolist()


class Pairs(Dataset):
    """A map-style dataset of pairs (input, label), its items as (tensor, int).

    Inputs that are PIL images become uint8 `(C, H, W)`, all with the channels of the first; arrays become tensors.
    Labels are class indices, one-hot vectors, or names.

    Args:
        name: of the split, for messages, which name the sample.
        kind: of the inputs that a model was trained on, if these are for that model.
    """

    def __init__(self, dataset: Any, name: str, task: Task, kind: InputKind | None = None) -> None:
        self.dataset, self.name, self.task, self.kind = dataset, name, task, kind
        with global_rng(0):
            first = dataset[0]
        if not isinstance(first, (tuple, list)) or len(first) < 2 or isinstance(first[0], str):
            raise InputError(f"{name} dataset must give pairs (tensor, label), got {shown_types(first)}")
        self.channels: int | None = None
        if is_image(first[0]):
            grey = image_tensor(first[0], f"{name} inputs").shape[0] == 1
            self.channels = (1 if grey else 3) if kind is None else kind.shape[0]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, y, *_ = self.dataset[i]
        what = f"{self.name} sample {i}"
        x = image_tensor(x, what, self.channels) if is_image(x) else as_tensor(x, what)
        if self.kind is not None:
            x = self.kind.accept(x[None], what)[0]
        elif x.dtype == torch.uint8 and x.ndim == 2:
            x = x[None]  # a grey image
        if x.is_floating_point() and self.task.dtype is not None:
            x = x.to(self.task.dtype)
        return x, self._index(y, i)

    def _index(self, label: Any, i: int) -> int:
        task = self.task
        if type(label) is int and (task.n_classes is None or 0 <= label < task.n_classes):
            return label
        place = f"in sample {i}"
        labels, _ = as_labels([_scalar(label)], self.name, 1, task.n_classes, task.class_names, lambda _: place)
        return int(labels)

    def inputs(self, index: Sequence[int]) -> Iterator[Tensor]:
        """The inputs at `index`, in batches."""
        with global_rng(0):
            for at in range(0, len(index), LOOK):
                yield stacked([self[i][0] for i in index[at : at + LOOK]], f"{self.name} inputs")


def labels_of_items(dataset: Any, index: Sequence[int]) -> list[Any]:
    """The labels at `index` as the dataset gives them, read item by item."""
    with global_rng(0):
        return [_scalar(dataset[i][1]) for i in index]


def _scalar(label: Any) -> Any:
    """A label that is an array or a list of one number as that number."""
    if isinstance(label, (list, tuple)) and len(label) == 1:
        return label[0]
    if isinstance(label, (Tensor, np.ndarray)) and np.prod(label.shape) == 1:
        return label.reshape(()).item()
    return label


def shown_types(value: Any) -> str:
    """The type of `value`, or of its entries if it is a tuple or list, for messages."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(v).__name__ for v in value)})"
    return type(value).__name__
