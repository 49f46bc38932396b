"""Other people's data as splits and batches: arrays, a Dataset, or a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from metacal.data.arrays import as_inputs, as_labels, as_tensor, check_labels, labelled, probabilities_in, stacked
from metacal.data.batches import Batches
from metacal.data.kind import AnyKind, Task, kind_of, require_finite, trained_on
from metacal.data.loaders import LoaderBatches
from metacal.data.pairs import LOOK, Pairs, evenly_spaced, labels_of_items
from metacal.data.splits import Split, Transform, channel_statistics
from metacal.errors import InputError, require
from metacal.inputs import Inputs, at_a_time, pair_in, placed

__all__ = ["as_batches", "as_split", "for_model", "input_kind", "loader_batches"]

_KINDS = "a pair of tensors (x, y), a torch Dataset, a Split, or a DataLoader"
STATISTICS = 10_000  # images of a Dataset or a DataLoader from which its normalisation is computed


def as_split(
    data: Any,
    name: str = "train",
    device: str | torch.device = "cpu",
    like: Split | AnyKind | None = None,
    workers: int = 0,
    task: Task | None = None,
) -> Split:
    """`data` as a Split.

    - `(x, y)`, two tensors, arrays, data frames or lists (see `as_tensor` and `as_labels`), or a `TensorDataset` of
      the two: float inputs are used as they are; uint8 images `(N, C, H, W)` or grey `(N, H, W)` are scaled to [0, 1]
      and normalised per channel by their own statistics. x may be a dictionary of several arrays, which are the
      arguments of the model by name and are used as they are.
    - any other map-style Dataset of pairs (input, label), as `Pairs` takes them: read afresh at each pass, its random
      transforms seeded by (seed, stream, epoch, batch). Images that it gives as uint8 or PIL are normalised likewise.
      Labels come from its `targets` or `labels`; lacking those, or where `task` is given and they are not what a look
      at the items finds, it is read through once.
    - a Split stays what it is.

    Args:
        like: the training split, or the kind of its inputs, for data that its model is to be given: they go through
            the same transform, or are refused (see `InputKind`).
        task: of a model that is to be given these data. Inputs may then be integers (tokens) too. Samples whose label
            is its `ignore_index` are left out.

    Raises:
        InputError: for lengths that differ, labels that are no class indices, inputs with NaN, inputs of another kind.
    """
    device = torch.device(device)
    kind = input_kind(like) if isinstance(like, Split) else like
    if isinstance(data, Split):
        check_labels(data.labels, name, len(data), task.n_classes if task is not None else None)
        return data
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = data
        return _split_of_arrays(x, y, name, device, kind, task)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _split_of_dataset(data, name, device, kind, task, workers)
    raise InputError(f"{name} data must be {_KINDS}, got {type(data).__name__}")


def as_batches(
    data: Any,
    batch_size: int | None = 128,
    seed: int = 0,
    stream: str = "train",
    shuffle: bool = True,
    augment: bool = True,
    device: str | torch.device = "cpu",
    like: Split | AnyKind | None = None,
    task: Task | None = None,
) -> Batches | LoaderBatches:
    """`data` as batches: a DataLoader keeps its own batches and order; anything else goes through `as_split`.

    `batch_size`, `shuffle` and `augment` do not touch a DataLoader. `batch_size` None: as `Batches` has it.
    """
    if isinstance(data, (Batches, LoaderBatches)):
        return data
    kind = input_kind(like) if isinstance(like, Split) else like
    if isinstance(data, DataLoader):
        return LoaderBatches(data, seed, stream, device, None if kind is None else kind.prepare, task)
    split = as_split(data, stream, device, kind, task=task)
    return Batches(split, batch_size, seed, stream, shuffle=shuffle, augment=augment)


def for_model(model: Any, data: Any, name: str, ignore_index: int | None = None) -> Any:
    """`data` in batches `(x, y)` as a model that `metacal.fit` trained takes them; for any other model as they are.

    What is neither arrays, a Dataset nor a DataLoader is iterated.

    Args:
        ignore_index: the label of samples to leave out; None: that of the training, if it had one.

    Raises:
        InputError: for data of another kind than those that the model was trained on.
    """
    if isinstance(data, (Batches, LoaderBatches)):
        return data
    trained = trained_on(model)
    pair = isinstance(data, (tuple, list)) and len(data) == 2 and not (_is_batch(data[0]) and _is_batch(data[1]))
    if trained is None:
        if pair:
            x = as_inputs(data[0], f"{name} inputs", _by_place(*data))
            y, _ = as_labels(data[1], name, len(x), ignore=ignore_index)
            size = at_a_time(x)
            data = list(zip(x.split(size), y.split(size)))
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset) and not _is_batch(data[0]):
            data = DataLoader(data, 64)  # of any size: none of them has been read
        return _labelled(data, name, Task(ignore_index=ignore_index), lambda x, _: x)
    kind, task = trained
    if ignore_index is not None:
        task = replace(task, ignore_index=ignore_index)
    if pair or isinstance(data, (Dataset, DataLoader, Split)):
        return as_batches(data, None, stream=name, shuffle=False, augment=False, like=kind, task=task).epoch(0)
    return _labelled(data, name, task, lambda x, i: kind.prepare(x, f"{name} batch {i}:"))


def _labelled(
    batches: Iterable[Any], name: str, task: Task, prepare: Callable[[Any, int], Any]
) -> Iterator[tuple[Any, Tensor]]:
    """Batches with their labels as class indices, without samples to ignore; `prepare` gets a batch's number."""
    for i, batch in enumerate(batches):
        pair = pair_in(batch)
        if pair is None:
            raise InputError(f"{name} must give batches (x, y), got {type(batch).__name__}")
        x, values = pair
        x = as_inputs(x, f"{name} inputs", by_place=True)

        def place(j: int, i: int = i) -> str:
            return f"for sample {j} of batch {i}"

        y, _ = as_labels(values, name, len(x), task.n_classes, task.class_names, place, ignore=task.ignore_index)
        if (rows := labelled(y, task.ignore_index)) is not None:
            x, y = x[rows], y[rows]
        if len(x):
            yield prepare(x, i), y


def _by_place(x: Any, y: Any) -> bool:
    """Whether x is a tuple of several arguments of a model, and not of the samples of one."""
    return isinstance(x, tuple) and len(x) != len(y)


def _is_batch(value: Any) -> bool:
    """Whether `value` is a batch (x, y) of a list of batches: two tensors, of which the second has a dimension."""
    return isinstance(value, (tuple, list)) and len(value) > 1 and getattr(value[1], "ndim", 0) > 0


def input_kind(split: Split) -> AnyKind:
    """The kind of a training split's inputs; of a Dataset by a look at some of them."""
    if split.in_memory:
        return kind_of(split.storage.split(4096), split.transform)
    index = evenly_spaced(len(split), LOOK)
    items = (split.storage[i] for i in index)
    x = stacked([item[0] if split.yields_labels else item for item in items], f"{split.name} inputs")
    return kind_of([x], split.transform)


def loader_batches(
    loader: DataLoader, seed: int, device: str | torch.device, task: Task
) -> tuple[LoaderBatches, AnyKind]:
    """A DataLoader's batches to train on, and the kind of their inputs by a look at its first ones.

    uint8 images are normalised, by the statistics of up to 10,000 of them.
    """
    batches = LoaderBatches(loader, seed, "train", device, task=task)
    transform = None
    first, _ = next(batches.epoch(0))
    if first.dtype == torch.uint8:
        as_images(first, "train")
        transform = image_transform(lambda: _inputs(batches, STATISTICS), task.dtype)
    kind = kind_of(_inputs(batches, LOOK), transform)
    batches.prepare = partial(kind.prepare, ranged=False)
    return batches, kind


def _inputs(batches: LoaderBatches, count: int) -> Iterator[Tensor]:
    """The inputs of the first batches, until there are `count`."""
    for x, _ in batches.epoch(0):
        yield as_images(x, "train") if x.dtype == torch.uint8 else x
        count -= len(x)
        if count <= 0:
            return


def image_transform(batches: Callable[[], Iterable[Tensor]], dtype: torch.dtype | None) -> Transform:
    """What scales uint8 images to [0, 1] and normalises them per channel, by the statistics of batches of them."""
    mean, std = channel_statistics(batches, 1 / 255, count_values=True)
    return Transform(1 / 255, mean, std, dtype=dtype or torch.float32)


def _split_of_arrays(x: Any, y: Any, name: str, device: torch.device, kind: AnyKind | None, task: Task | None) -> Split:
    values, x = y, as_inputs(x, f"{name} inputs", _by_place(x, y))
    require(x.ndim >= 1 and len(x) > 0, f"{name} data are empty (x has shape {tuple(x.shape)})")
    wanted = task or Task()
    ignore, known = wanted.ignore_index, (wanted.n_classes, wanted.class_names)
    labels, class_names = as_labels(values, name, len(x), *known, number_names=kind is None, ignore=ignore)
    soft = probabilities_in(values, name) if wanted.soft else None
    if (rows := labelled(labels, ignore)) is not None:
        require(len(rows) > 0, f"{name} labels are all {ignore}, which is to be ignored")
        x, labels = x[rows.to(x.device)], labels[rows]
    if isinstance(x, Inputs) and kind is None:
        transform = None
        for key, t in x.tensors.items():
            if t.is_floating_point():
                require_finite(t, f"{name} {key!r}")
    elif kind is not None:
        x = kind.accept(x, name)
        transform = kind.transform_of(x)
    elif x.dtype == torch.uint8:
        x = as_images(x, name)
        transform = image_transform(lambda: x.split(4096), wanted.dtype)
    else:
        transform = None
        require(
            x.is_floating_point() or (x.dtype == torch.int64 and task is not None),
            f"{name} inputs must be floating point, or uint8 images, got {x.dtype}",
        )
        if x.is_floating_point():
            require_finite(x, name)
    if transform is None:
        x = placed(x, x.device, wanted.dtype)
    soft = None if soft is None else placed(soft, device, wanted.dtype)
    x, labels, transform = x.contiguous().to(device), labels.to(device), _on(transform, device)
    return Split(name, x, labels, transform, class_names=class_names, soft=soft)


def _split_of_dataset(
    data: Any, name: str, device: torch.device, kind: AnyKind | None, task: Task | None, workers: int
) -> Split:
    n = len(data)
    require(n > 0, f"{name} dataset is empty")
    pairs, wanted = Pairs(data, name, task or Task(), kind), task or Task()
    labels, class_names, soft = _labels_of_dataset(data, name, n, task, number_names=kind is None)
    if (rows := labelled(labels, wanted.ignore_index)) is not None:
        require(len(rows) > 0, f"{name} labels are all {wanted.ignore_index}, which is to be ignored")
        data, labels, n = Subset(data, rows.tolist()), labels[rows], len(rows)
        pairs = Pairs(data, name, wanted, kind)
    pairs.task = replace(pairs.task, class_names=class_names)
    index = evenly_spaced(n, LOOK)
    transform = None
    if kind is not None:
        for x in pairs.inputs(index):
            transform = kind.transform_of(kind.accept(x, name))  # type: ignore[arg-type]  # what it accepts is its own
    elif (first := next(pairs.inputs([0]))).dtype == torch.uint8:
        as_images(first, name)
        images = cast("Callable[[], Iterator[Tensor]]", lambda: pairs.inputs(evenly_spaced(n, STATISTICS)))
        transform = image_transform(images, pairs.task.dtype)
    soft = None if soft is None else placed(soft, device, wanted.dtype)
    return Split(name, pairs, labels.to(device), _on(transform, device), workers, True, class_names, soft=soft)


def _labels_of_dataset(
    data: Any, name: str, n: int, task: Task | None, number_names: bool
) -> tuple[Tensor, Sequence[str] | None, Tensor | None]:
    """Class indices (n,), the classes' names, and probabilities (n, K) where labels are such and wanted.

    They come from an attribute of the dataset if that is true, else by reading.
    """
    wanted = task or Task()
    names = wanted.class_names if wanted.class_names is not None else _class_names(data, wanted.n_classes)
    declared = _declared_labels(data, n)
    if declared is not None and (task is None or _agrees(declared, data, n, names, wanted.ignore_index)):
        check_labels(declared, name, n, wanted.n_classes, ignore=wanted.ignore_index)
        return declared, names, None
    items = labels_of_items(data, range(n))
    labels, names = as_labels(
        items, name, n, wanted.n_classes, names, number_names=number_names, ignore=wanted.ignore_index
    )
    return labels, names, probabilities_in(items, name) if wanted.soft else None


def _declared_labels(data: Any, n: int) -> Tensor | None:
    """The numbers that a dataset holds as its `targets` or `labels`; None where it holds none for each item."""
    values = next((v for a in ("targets", "labels") if (v := getattr(data, a, None)) is not None), None)
    try:
        labels = None if values is None else as_tensor(values, "labels")
    except InputError:
        return None
    integers = labels is not None and labels.dtype in (torch.int64, torch.uint8) and labels.shape == (n,)
    return labels.long() if labels is not None and integers else None


def _agrees(declared: Tensor, data: Any, n: int, class_names: Sequence[str] | None, ignore: int | None) -> bool:
    """Whether the items give the labels that the dataset declares, by a look at some of them."""
    index = evenly_spaced(n, LOOK)
    try:
        labels, _ = as_labels(labels_of_items(data, index), "", len(index), None, class_names, ignore=ignore)
    except InputError:
        return False
    return torch.equal(labels, declared[index])


def _class_names(data: Any, n_classes: int | None) -> Sequence[str] | None:
    """The names that a dataset gives its classes, one for each of the model's outputs."""
    names = getattr(data, "classes", None)
    if not isinstance(names, (list, tuple)) or len(names) != n_classes:
        return None
    return list(names) if all(isinstance(name, str) for name in names) else None


def as_images(x: Tensor, name: str) -> Tensor:
    """uint8 images as `(N, C, H, W)`: grey ones get their channel. Raises `InputError` for another layout."""
    x = x[:, None] if x.ndim == 3 else x
    require(
        x.ndim == 4,
        f"{name} uint8 inputs must be images (N, C, H, W), got shape {tuple(x.shape)}; use x.float() for features",
    )
    require(
        not (x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)),
        f"{name} images must be (N, C, H, W), got shape {tuple(x.shape)}; use x.permute(0, 3, 1, 2)",
    )
    return x


def _on(transform: Transform | None, device: torch.device) -> Transform | None:
    if transform is None:
        return None
    moved = (transform.mean.to(device), transform.std.to(device))
    return Transform(transform.scale, *moved, dtype=transform.dtype)  # without the augmentation of training
