"""Other people's map-style datasets: their items as (tensor, class index), and what a look at them tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from metacal.data.arrays import as_labels, as_tensor, image_tensor, is_image, several_tensors, stacked
from metacal.data.batches import global_rng
from metacal.data.kind import AnyKind, InputKind, Task
from metacal.errors import InputError
from metacal.inputs import Inputs, pair_in, placed

__all__ = ["Pairs", "evenly_spaced", "labels_of_items", "shown_types"]

LOOK = 512
"""Samples that are looked at where reading all of them would take too long."""


def evenly_spaced(n: int, count: int) -> list[int]:
    """Up to `count` of the positions 0..n-1, the first and the last among them."""
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)).tolist()


class Pairs(Dataset):
    """A map-style dataset of pairs (input, label), its items as (tensor, int).

    Inputs that are PIL images become uint8 `(C, H, W)`, all with the channels of the first; arrays become tensors, and
    dictionaries of several arrays dictionaries of tensors. Labels are class indices, one-hot vectors, probabilities, or
    names. An item may be a dictionary too (see `metacal.inputs.pair_in`).

    Args:
        name: of the split, for messages, which name the sample.
        kind: of the inputs that a model was trained on, if these are for that model.
    """

    def __init__(self, dataset: Any, name: str, task: Task, kind: AnyKind | None = None) -> None:
        self.dataset, self.name, self.task, self.kind = dataset, name, task, kind
        with global_rng(0):
            first = pair_in(dataset[0])
        if first is None or isinstance(first[0], str):
            raise InputError(f"{name} dataset must give pairs (tensor, label), got {shown_types(dataset[0])}")
        self.channels: int | None = None
        if is_image(first[0]):
            grey = image_tensor(first[0], f"{name} inputs").shape[0] == 1
            self.channels = kind.shape[0] if isinstance(kind, InputKind) else 1 if grey else 3

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        x, y = _pair(self.dataset[i])
        what = f"{self.name} sample {i}"
        if (several := None if is_image(x) else several_tensors(x, what)) is not None:
            one = stacked([several], what)
            if self.kind is not None:
                one = self.kind.accept(one, what)
            tensors = placed(one, one.device, self.task.dtype).tensors
            return {key: t[0] for key, t in tensors.items()}, self._index(y, i)
        x = image_tensor(x, what, self.channels) if is_image(x) else as_tensor(x, what)
        if self.kind is not None:
            x = self.kind.accept(x[None], what)[0]
        elif x.dtype == torch.uint8 and x.ndim == 2:
            x = x[None]  # a grey image
        return placed(x, x.device, self.task.dtype), self._index(y, i)

    def _index(self, label: Any, i: int) -> int:
        task = self.task
        if type(label) is int and (task.n_classes is None or 0 <= label < task.n_classes):
            return label
        place = f"in sample {i}"
        labels, _ = as_labels([_scalar(label)], self.name, 1, task.n_classes, task.class_names, lambda _: place)
        return int(labels)

    def inputs(self, index: Sequence[int]) -> Iterator[Tensor | Inputs]:
        """The inputs at `index`, in batches."""
        with global_rng(0):
            for at in range(0, len(index), LOOK):
                yield stacked([self[i][0] for i in index[at : at + LOOK]], f"{self.name} inputs")


def labels_of_items(dataset: Any, index: Sequence[int]) -> list[Any]:
    """The labels at `index` as the dataset gives them, read item by item."""
    with global_rng(0):
        return [_scalar(_pair(dataset[i])[1]) for i in index]


def _pair(item: Any) -> tuple[Any, Any]:
    pair = pair_in(item)
    if pair is None:
        raise InputError(f"the dataset must give pairs (tensor, label), got {shown_types(item)}")
    return pair


def _scalar(label: Any) -> Any:
    """A label that is an array or a list of one number as that number."""
    if isinstance(label, (list, tuple)) and len(label) == 1:
        return label[0]
    if isinstance(label, (Tensor, np.ndarray)) and np.prod(label.shape) == 1:
        return label.reshape(()).item()
    return label


def shown_types(value: Any) -> str:
    """The type of `value`, or of its entries if it is a tuple, list or dictionary, for messages."""
    if isinstance(value, Mapping):
        return f"a dictionary of {', '.join(map(repr, value))}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(v).__name__ for v in value)})"
    return type(value).__name__
