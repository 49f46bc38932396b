"""New inputs for a trained model, from files: a folder of images, or arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metacal.data.arrays import as_labels, as_tensor, read_arrays
from metacal.data.kind import AnyKind, InputKind, InputKinds, Task
from metacal.data.stores import IMAGE_SUFFIXES, FileStore, FolderFiles, tensor_chunks
from metacal.errors import InputError, require

__all__ = ["Inputs", "read_inputs"]

_NAMED = {"x": ("y", "labels"), "x_test": ("y_test",)}  # inputs in an .npz file, and what their labels are called


@dataclass(frozen=True)
class Inputs:
    """Inputs in their order.

    Attributes:
        count: N.
        batches: gives them, `(n, ...)` at a time, of the kind that the model was trained on.
        names: of the image files, relative to their folder; None for arrays.
        labels: class indices (N,), where the file has labels.
    """

    count: int
    batches: Callable[[], Iterator[Tensor]]
    names: list[str] | None = None
    labels: Tensor | None = None


def read_inputs(
    path: Path,
    kind: AnyKind,
    task: Task,
    image_size: int | None = None,
    batch_size: int | None = None,
    workers: int = 0,
) -> Inputs:
    """The inputs at `path` for a model that was trained on inputs of `kind`.

    - a folder: its image files and those of the folders in it, by name, as `data=folder` reads them. Their headers are
      read at once, their pixels batch by batch, by `workers` processes.
    - an .npz file: the array `x` with labels `y` or `labels`, where it has them, or `x_test` with `y_test`, or its
      only array. uint8 images are NHWC, as `data=npz` reads them, or NCHW.
    - an .npy file: its array.

    Args:
        image_size: side to which images of files are resized and cropped, as in training; None: they are not.

    Raises:
        InputError: for a path without inputs, damaged files, inputs or labels of another kind than in training, and
            models of several inputs.
    """
    require(path.exists(), f"{path} does not exist")
    if isinstance(kind, InputKinds):
        raise InputError(
            f"the model takes {', '.join(map(repr, kind.kinds))} together, which no file holds: load it, and call its "
            "predict_proba"
        )
    if path.is_dir():
        return _of_folder(path, kind, image_size, workers)
    require(path.suffix in (".npz", ".npy"), f"inputs must be a folder of images, an .npz or an .npy file, got {path}")
    arrays = read_arrays(path, str(path))
    name, labels = _named(arrays, path)
    x = kind.accept(_like(as_tensor(arrays[name], f"{path} inputs"), kind), str(path))
    known = None
    if labels is not None:
        known, _ = as_labels(arrays[labels], str(path), len(x), task.n_classes, task.class_names)
    return Inputs(len(x), partial(iter, x.split(batch_size or 256)), labels=known)


def _named(arrays: Mapping[str, np.ndarray], path: Path) -> tuple[str, str | None]:
    """The names of the array of inputs and of that of their labels, None where there is none."""
    for name, labels in _NAMED.items():
        if name in arrays:
            return name, next((known for known in labels if known in arrays), None)
    if len(arrays) == 1:
        return next(iter(arrays)), None
    raise InputError(
        f"{path} must hold the inputs as x (and labels, if known, as y), as x_test (and y_test), or as its only array; "
        f"its arrays are: {', '.join(arrays) or 'none'}"
    )


def _like(x: Tensor, kind: InputKind) -> Tensor:
    """Arrays of bytes in the layout and type in which training takes them; others as they are."""
    if x.dtype == torch.uint8 and kind.dtype == torch.uint8 and x.ndim == 4 and x.shape[3] == kind.shape[0]:
        return x.permute(0, 3, 1, 2)  # channels last, as data=npz reads images
    if x.dtype == torch.uint8 and kind.dtype.is_floating_point and x.ndim == 2:
        return x.to(torch.get_default_dtype())  # features that happen to be bytes
    return x


def _of_folder(root: Path, kind: InputKind, image_size: int | None, workers: int) -> Inputs:
    images = kind.dtype == torch.uint8 and len(kind.shape) == 3
    require(
        images,
        f"{root} is a folder of images, and the model was trained on {str(kind.dtype).removeprefix('torch.')} inputs "
        f"of shape ({', '.join(map(str, ('N', *kind.shape)))}): give an .npz or .npy file of such",
    )
    files = sorted(f for f in root.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES and f.is_file())
    require(len(files) > 0, f"{root} has no image files ({', '.join(IMAGE_SUFFIXES)})")
    names = [str(f.relative_to(root)) for f in files]
    store = FileStore(FolderFiles(root, names), image_size, channels=kind.shape[0])
    store.check_readable()
    return Inputs(len(store), lambda: tensor_chunks(store, workers), names)
