"""Other people's arrays as tensors: inputs and labels in whatever they come, checked once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metacal.errors import InputError, require
from metacal.files import UNREADABLE, arrays_in
from metacal.inputs import Inputs, named_tensors

__all__ = [
    "as_inputs",
    "as_labels",
    "as_tensor",
    "check_labels",
    "image_tensor",
    "is_image",
    "labelled",
    "probabilities_in",
    "read_arrays",
    "several_tensors",
    "stacked",
]

IGNORED = -100
"""What torch's cross-entropy leaves out by default, and so what many datasets mark samples with."""


def as_tensor(values: Any, what: str) -> Tensor:
    """`values` as a detached tensor of numbers.

    Takes tensors, arrays of any byte order, strides and precision, data frames, nested lists, PIL images (as uint8
    `(C, H, W)`), and lists of tensors or images, which are stacked. Integers other than uint8 become int64.

    Raises:
        InputError: for anything that is no array of real numbers of one shape.
    """
    if isinstance(values, Tensor):
        require(values.layout == torch.strided, f"{what} must be a dense tensor, got {values.layout}; use x.to_dense()")
        tensor = values.detach()
    elif is_image(values):
        tensor = image_tensor(values, what)
    elif isinstance(values, (list, tuple)) and len(values) and (isinstance(values[0], Tensor) or is_image(values[0])):
        tensor = stacked([as_tensor(value, what) for value in values], what)
    else:
        tensor = _of_array(values, what)
    require(not tensor.is_complex(), f"{what} must be real numbers, got {tensor.dtype}")
    if tensor.is_floating_point() or tensor.dtype in (torch.uint8, torch.bool):
        return tensor
    return tensor.to(torch.int64)


def as_inputs(values: Any, what: str, by_place: bool = False) -> Tensor | Inputs:
    """A batch as a tensor of numbers, or as `Inputs` where it is a dictionary of several arrays.

    A dictionary of one array is that array. by_place: so are a tuple or list of several, which else are samples.

    Raises:
        InputError: as `as_tensor`, and for arrays that hold different numbers of samples.
    """
    if isinstance(values, Mapping) and len(values) == 1:
        values = next(iter(values.values()))
    tensors = several_tensors(values, what) if by_place or isinstance(values, (Mapping, Inputs)) else None
    return as_tensor(values, what) if tensors is None else Inputs(tensors)


def several_tensors(values: Any, what: str) -> dict[str | int, Tensor] | None:
    """The tensors of a dictionary, or of a tuple or list of arrays; None for anything else. Bytes are integers here."""
    several = named_tensors(values)
    if several is None:
        return None
    tensors = {key: as_tensor(value, f"{what} {key!r}") for key, value in several.items()}
    return {key: t.to(torch.int64) if t.dtype == torch.uint8 else t for key, t in tensors.items()}


def stacked(tensors: Sequence[Any], what: str) -> Any:
    """The tensors as one, `(n, ...)`; dictionaries of tensors as `Inputs`. Raises `InputError` for different shapes."""
    if isinstance(tensors[0], dict):
        return Inputs({key: stacked([t[key] for t in tensors], f"{what} {key!r}") for key in tensors[0]})
    other = next((t.shape for t in tensors if t.shape != tensors[0].shape), None)
    if other is not None:
        raise InputError(
            f"{what} must have one shape, got {tuple(tensors[0].shape)} and {tuple(other)}: resize, crop or pad them"
        )
    return torch.stack(list(tensors))


def _of_array(values: Any, what: str) -> Tensor:
    require(values is not None, f"{what} must be numbers of one shape, got None")
    try:
        array = np.asarray(values)
        if array.dtype == object:  # columns of nullable types, say, whose entries are numbers all the same
            array = np.array(array.tolist())
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} must be numbers of one shape, got {type(values).__name__}: {error}") from None
    require(
        array.dtype.kind in "biuf",
        f"{what} must be numbers of one shape, got {type(values).__name__} of {_described(array)}",
    )
    if array.dtype.kind == "f":
        array = array.astype(np.dtype(f"f{min(array.itemsize, 8)}"), copy=False)  # native byte order, no long doubles
    elif array.dtype.kind in "iu" and array.dtype != np.uint8:
        require(
            array.dtype != np.uint64 or array.size == 0 or int(array.max()) < 2**63,
            f"{what} must be below 2^63, got {array.max() if array.size else 0}",
        )
        array = array.astype(np.int64, copy=False)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch takes neither
    return torch.from_numpy(array)


def _described(array: np.ndarray) -> str:
    if array.dtype.kind in "US" or (array.dtype == object and any(isinstance(v, str) for v in array.flat)):
        return "text"
    return "objects, such as rows of different lengths" if array.dtype == object else str(array.dtype)


def is_image(value: Any) -> bool:
    """Whether `value` is a PIL image; PIL is not imported for it."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def image_tensor(image: Any, what: str, channels: int | None = None) -> Tensor:
    """A PIL image as uint8 `(C, H, W)`: grey images have one channel, all others are turned into RGB.

    channels: 1 or 3, to have it in, whatever it is in.

    Raises:
        InputError: for an image with more than 8 bits a channel.
    """
    require(
        not image.mode.startswith(("I", "F")),
        f"{what} must be images with 8 bits a channel, got mode {image.mode!r}; scale them to that, or give floats",
    )
    grey = image.mode in ("1", "L") if channels is None else channels == 1
    pixels = np.array(image.convert("L" if grey else "RGB"))
    return torch.from_numpy(pixels[None] if grey else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


Place = Callable[[int], str]
"""Where the label of a number is, for messages."""


def _at_index(i: int) -> str:
    return f"at index {i}"


def as_labels(
    values: Any,
    name: str,
    n: int,
    n_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    place: Place = _at_index,
    number_names: bool = False,
    ignore: int | None = None,
) -> tuple[Tensor, Sequence[str] | None]:
    """`values` as class indices, int64 `(n,)`, and the classes' names, None where labels are numbers without names.

    Takes integers `(n,)` or `(n, 1)`; floats 0 and 1, as binary cross-entropy has them, for two classes or where K is
    not known; one-hot rows `(n, K)`; rows of probabilities, which become the most probable class; and names, one a
    sample: indices into `class_names`.

    Args:
        name: of the split, for messages.
        n_classes: K, if known: labels must lie below it.
        place: says where a bad one is.
        number_names: where `class_names` is None, give names the numbers of their order in the alphabet.
        ignore: a number that labels may be beside those of the classes.

    Raises:
        InputError: for labels that are none of these, naming the first bad one.
    """
    names = _texts(values, name)
    if names is not None:
        if class_names is None:
            hint = "the classes they stand for are not known: give class indices"
            require(number_names, f"{name} labels are names such as {names[0]!r}, and {hint}")
            class_names = sorted(set(names))
        labels = _of_names(names, name, n_classes, class_names, place)
    else:
        labels = _indices(as_tensor(values, f"{name} labels"), name, n_classes, place)
    check_labels(labels, name, n, n_classes, place, ignore)
    return labels, class_names


def labelled(labels: Tensor, ignore: int | None) -> Tensor | None:
    """The positions of labels that are not to be ignored; None where all are such."""
    taken = torch.ones_like(labels, dtype=torch.bool) if ignore is None else labels != ignore
    return None if bool(taken.all()) else taken.nonzero().squeeze(1)


def probabilities_in(values: Any, name: str, place: Place = _at_index) -> Tensor | None:
    """Labels that are rows of probabilities `(n, K)`, not all of them one-hot; None for other labels.

    Raises:
        InputError: for rows of floating point numbers that are no probabilities, naming the first.
    """
    try:
        y = as_tensor(values, f"{name} labels")
    except InputError:  # names, say
        return None
    if y.ndim != 2 or y.shape[1] < 2 or not y.is_floating_point() or _one_hot(y):
        return None
    bad = ~((y >= 0).all(1) & ((y.sum(1) - 1).abs() <= 1e-2))
    if bool(bad.any()):
        at = int(bad.int().argmax())
        raise InputError(
            f"{name} labels of shape {tuple(y.shape)} must be one-hot, or probabilities that are >= 0 and sum to 1; "
            f"they sum to {float(y[at].sum()):.6g} {place(at)}, the least is {float(y[at].min()):.6g}"
        )
    return y


def _one_hot(y: Tensor) -> bool:
    hot = y != 0
    return bool((hot.sum(1) == 1).all()) and bool((y[hot] == 1).all())


def _texts(values: Any, name: str) -> list[str] | None:
    """The entries of a one-dimensional collection of text; None for anything else."""
    if isinstance(values, Tensor):
        return None
    if not isinstance(values, (list, tuple)):
        values = np.asarray(values)
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.dtype.kind not in "USO" or values.ndim != 1:
            return None
    entries = list(values)
    return [str(v) for v in entries] if entries and all(isinstance(v, str) for v in entries) else None


def _of_names(
    names: Sequence[str], name: str, n_classes: int | None, class_names: Sequence[str], place: Place
) -> Tensor:
    index = {class_name: k for k, class_name in enumerate(class_names)}
    shown = ", ".join(list(class_names)[:10]) + (", …" if len(class_names) > 10 else "")
    unknown = next((i for i, v in enumerate(names) if v not in index), None)
    if unknown is not None:
        raise InputError(f"{name} label {names[unknown]!r} {place(unknown)} is none of the classes: {shown}")
    require(
        n_classes is None or len(class_names) <= n_classes,
        f"{name} labels name {len(class_names)} classes ({shown}), and the model has {n_classes} outputs",
    )
    return torch.tensor([index[v] for v in names])


def _indices(y: Tensor, name: str, n_classes: int | None, place: Place) -> Tensor:
    """Class indices of integers, of one-hot rows, or of rows of probabilities."""
    if y.ndim == 2 and y.shape[1] > 1:
        if _one_hot(y):
            return (y != 0).int().argmax(1)
        require(
            y.is_floating_point(),
            f"{name} labels must be one class a sample: class indices (N,), one-hot rows or probabilities, got rows of "
            f"shape {tuple(y.shape)}, {y.dtype}, that are not one-hot; several labels a sample cannot be trained on",
        )
        probabilities_in(y, name, place)
        require(
            n_classes is None or y.shape[1] == n_classes,
            f"{name} labels are probabilities of {y.shape[1]} classes, and the model has {n_classes} outputs",
        )
        return y.argmax(1)
    y = y.squeeze(1) if y.ndim == 2 else y
    require(y.ndim == 1, f"{name} labels must hold one class index a sample, shape (N,), got {tuple(y.shape)}")
    if y.is_floating_point():
        if n_classes in (None, 2) and bool(((y == 0) | (y == 1)).all()):
            return y.long()
        whole = y == y.round()
        at = int((~whole).int().argmax())
        hint = "; for class indices use y.long()" if bool(whole.all()) else f", {float(y[at]):.6g} {place(at)}"
        raise InputError(f"{name} labels must be integers, got {y.dtype}{hint}")
    require(y.dtype != torch.bool, f"{name} labels must be integers, got {y.dtype}; for classes 0 and 1 use y.long()")
    return y.to(torch.int64)


def check_labels(
    labels: Tensor,
    name: str,
    n: int,
    n_classes: int | None = None,
    place: Place = _at_index,
    ignore: int | None = None,
) -> None:
    """Raise `InputError` unless there are `n` labels, each in 0..K−1 (from 0 on, if K is not known) or `ignore`."""
    require(len(labels) == n, f"{name} inputs and labels must be equally many, got {n} and {len(labels)}")
    bad = labels < 0 if n_classes is None else (labels < 0) | (labels >= n_classes)
    if ignore is not None:
        bad &= labels != ignore
    if not bool(bad.any()):
        return
    at = int(bad.int().argmax())
    value = int(labels[at])
    hint = ""
    if value == IGNORED:
        hint = f"; {IGNORED}, with which torch marks samples to ignore, is no class: give ignore_index={IGNORED}"
    elif value == n_classes and int(labels.min()) == 1:
        hint = "; labels start at 0: subtract 1"
    limits = ">= 0" if n_classes is None else f"in 0..{n_classes - 1} (the model's outputs)"
    raise InputError(f"{name} labels must be {limits}, got {value} {place(at)}{hint}")


def read_arrays(path: Path, what: str, wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by their names; the array of an .npy file by the name "".

    Args:
        what: the file, in messages.
        wanted: names of the arrays to read; others are empty ones, so that they can be named. None: all.

    Raises:
        InputError: for a file that is not there, damaged, or holds objects, which only unpickling would read.
    """
    try:
        return arrays_in(path, wanted)
    except FileNotFoundError as error:
        raise InputError(f"{what} does not exist") from error
    except ValueError as error:
        raise InputError(
            f"{path} cannot be read without unpickling: it holds objects, e.g. images of different shapes; "
            "save plain arrays of one shape"
        ) from error
    except UNREADABLE as error:
        raise InputError(f"{what} is not a readable {path.suffix or '.npz'} file: {error}") from error
