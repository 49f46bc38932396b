"""Where data come from: each reader returns a `Source`, its labelled pool and, where there is one, its test set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metacal.data.arrays import read_arrays
from metacal.data.shards import TarFiles, class_indices, index_shards
from metacal.data.stores import IMAGE_SUFFIXES, ArrayStore, FileStore, FolderFiles, ImageFiles
from metacal.errors import InputError, require, require_choice

__all__ = ["IMAGE_FILES", "SOURCES", "Source", "read_source"]

IMAGE_FILES = ("folder", "shards")  # sources whose images are decoded, and can be resized, when they are read

_MEAN_STD = {
    "cifar10": ((0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)),
    "cifar100": ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
}


@dataclass
class Source:
    """Stored inputs with labels (int64, 0..K-1).

    `scale` takes stored values to [0, 1]; it is None for float features.
    """

    inputs: Any
    labels: np.ndarray
    class_names: list[str]
    test_inputs: Any = None
    test_labels: np.ndarray | None = None
    scale: float | None = 1 / 255
    mean_std: tuple[Sequence[float], Sequence[float]] | None = None


def read_source(name: str, path: str | None, download: bool, image_size: int | None) -> Source:
    """The source called `name`, read from `path`. Raises `InputError` for anything that cannot be used."""
    require_choice("data.name", name, SOURCES)
    require(
        image_size is None or name in IMAGE_FILES,
        f"data.image_size works with data={' and '.join(IMAGE_FILES)} only, got {image_size}",
    )
    if name == "digits":
        return _digits()
    if name in ("npz", *IMAGE_FILES):
        require(path is not None, f"data.path is missing: data={name} needs data.path=...")
    place = Path(path or "data").expanduser()  # shells leave the ~ of data.path=~/x alone
    if name == "npz":
        return _npz(place)
    if name == "folder":
        return _folder(place, image_size)
    if name == "shards":
        return _shards(place, image_size)
    return _torchvision(name, place, download)


def _digits() -> Source:
    """scikit-learn's 1,797 handwritten digits, 8x8 grey, values 0..16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]
    names = [str(k) for k in range(10)]
    return Source(ArrayStore(images), digits.target.astype(np.int64), names, scale=1 / 16)


def _npz(path: Path) -> Source:
    arrays = _load_npz(path)
    for key in ("x_train", "y_train"):
        require(key in arrays, f"{path} lacks the array {key}; it has {', '.join(sorted(arrays)) or 'none'}")
    require(
        ("x_test" in arrays) == ("y_test" in arrays),
        f"{path} must have both of x_test and y_test or neither; it has {', '.join(sorted(arrays))}",
    )
    names = [str(c) for c in arrays["class_names"].ravel()] if "class_names" in arrays else None
    x, scale = _inputs(arrays["x_train"], f"x_train of {path}")
    y = _labels(arrays["y_train"], f"y_train of {path}", len(x), len(names) if names else None)
    n_classes = len(names) if names else int(y.max()) + 1
    source = Source(ArrayStore(x), y, names or [str(k) for k in range(n_classes)], scale=scale)
    if "x_test" in arrays:
        x_test, test_scale = _inputs(arrays["x_test"], f"x_test of {path}")
        require(
            x_test.shape[1:] == x.shape[1:] and test_scale == scale,
            f"x_train and x_test of {path} must have the same shape and kind, got {arrays['x_train'].shape} "
            f"{arrays['x_train'].dtype} and {arrays['x_test'].shape} {arrays['x_test'].dtype}",
        )
        source.test_inputs = ArrayStore(x_test)
        source.test_labels = _labels(arrays["y_test"], f"y_test of {path}", len(x_test), n_classes)
    return source


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    wanted = ("x_train", "y_train", "x_test", "y_test", "class_names")
    arrays = read_arrays(path, f"data.path = {path}", wanted)
    require("" not in arrays, f"{path} holds a single array; data.path must be an .npz with x_train and y_train")
    return arrays


def _inputs(x: np.ndarray, what: str) -> tuple[np.ndarray, float | None]:
    """Images as uint8 `(n, C, H, W)` with scale 1/255, or float32 features as they are with None."""
    require(x.ndim >= 1 and len(x) > 0, f"{what} is empty (shape {x.shape})")
    require(x.dtype.kind in "biuf", f"{what} must hold numbers, got {x.dtype}")
    if x.dtype == np.uint8 and x.ndim == 3:
        return np.ascontiguousarray(x[:, None]), 1 / 255
    if x.dtype == np.uint8 and x.ndim == 4:
        require(
            not (x.shape[1] in (1, 3) and x.shape[3] not in (1, 3, 4)),
            f"{what} must be NHWC (channels last), got shape {x.shape}",
        )
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), 1 / 255
    require(
        not (x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)),
        f"{what} has shape {x.shape} and type {x.dtype}: images must be uint8 NHWC, or floats NCHW",
    )
    with np.errstate(over="ignore"):  # what overflows float32 is found below
        values = np.ascontiguousarray(x.reshape(len(x), -1) if x.ndim == 1 else x, dtype=np.float32)
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
    require(
        not bad.any(),
        f"{what} has NaN or infinite values in {bad.sum()} samples, the first at index {int(bad.argmax())}",
    )
    return values, None


def _labels(y: np.ndarray, what: str, n: int, n_classes: int | None) -> np.ndarray:
    """`y` as int64 `(n,)`, checked to be integers in 0..n_classes-1; with None, of which n samples can have all."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    require(y.ndim == 1, f"{what} must hold one class index a sample, shape (n,), got shape {y.shape}")
    require(len(y) == n, f"{what} must have as many entries as there are inputs, {n}, got {len(y)}")
    require(y.dtype.kind in "biuf", f"{what} must hold integers 0..K-1, got {y.dtype}")
    with np.errstate(invalid="ignore"):
        whole = y.astype(np.int64)
    top = (n if n_classes is None else n_classes) - 1
    bad = (whole != y) | (whole < 0) | (whole > top)
    if bad.any():
        i = int(bad.argmax())
        limit = "K-1" if n_classes is None else str(top)
        more = f": {n} samples have fewer classes than that" if n_classes is None and whole[i] > top else ""
        raise InputError(f"{what} must hold integers in 0..{limit}, got {y[i]} at index {i}{more}")
    return whole


def _folder(root: Path, image_size: int | None) -> Source:
    """Class folders below root, or below root/train with test or val beside it; Tiny-ImageNet's layout too.

    The test set is `test/` if that has class folders, else `val/`. With both, `val/` joins the labelled pool.
    """
    train = _training_folder(root, image_size)
    names = sorted(d.name for d in train.iterdir() if d.is_dir() and not d.name.startswith("."))
    require(len(names) > 0, f"{train} has no class folders; data=folder expects {train}/<class>/<image files>")
    class_of = {name: k for k, name in enumerate(names)}

    def read(part: Path) -> tuple[np.ndarray, np.ndarray]:
        files, labels = _class_files(root, part, class_of)
        if part == train:
            empty = sorted(set(class_of.values()) - set(labels))
            require(not empty, f"class folder {train / names[empty[0]] if empty else ''} has no image files")
        return np.array([os.fsencode(file) for file in files]), np.asarray(labels, dtype=np.int64)

    return _image_source(root, train, image_size, names, read, partial(FolderFiles, root))


def _shards(root: Path, image_size: int | None) -> Source:
    """Tar files in root, or in root/train with test or val beside it, as with folders; see `metacal.data.shards`."""
    train = _training_folder(root, image_size)
    paths: list[Path] = []
    names: list[str] | None = None

    def read(part: Path) -> tuple[np.ndarray, np.ndarray]:
        nonlocal names
        shards = sorted(part.glob("*.tar"))
        require(part != train or len(shards) > 0, f"{part} has no .tar files, which data=shards expects there")
        if not shards:
            return np.empty((0, 3), np.int64), np.empty(0, np.int64)
        rows, texts = index_shards(shards, len(paths))
        require(len(rows) > 0, f"the .tar files of {part} hold no images with labels")
        labels, names = class_indices(texts, names, str(part))
        paths.extend(shards)
        return rows, labels

    rows_and_labels = read(train)
    assert names is not None
    return _image_source(
        root,
        train,
        image_size,
        names,
        lambda part: rows_and_labels if part == train else read(part),
        lambda rows: TarFiles(paths, rows),
    )


def _training_folder(root: Path, image_size: int | None) -> Path:
    require(image_size is None or image_size >= 1, f"data.image_size must be >= 1, got {image_size}")
    require(root.is_dir(), f"data.path = {root} is not a folder")
    return root / "train" if (root / "train").is_dir() else root


def _image_source(
    root: Path,
    train: Path,
    image_size: int | None,
    names: list[str],
    read: Callable[[Path], tuple[np.ndarray, np.ndarray]],
    files: Callable[[np.ndarray], ImageFiles],
) -> Source:
    """The pool and the test set of image files below root. read: entries of a folder and their labels, the training
    folder first; files: what reads such entries.

    The test set is `test/` if that has images with labels, else `val/`. With both, `val/` joins the labelled pool.
    """
    entries, labels = read(train)
    parts: dict[str, tuple[Any, Any]] = {}
    if train != root:
        for name in ("test", "val"):
            if (root / name).is_dir():
                part = read(root / name)
                parts |= {name: part} if len(part[0]) else {}
    test = parts.pop("test", None) or parts.pop("val", None)
    if "val" in parts:
        entries, labels = (np.concatenate(both) for both in zip((entries, labels), parts["val"], strict=True))
    pool = FileStore(files(entries), image_size)
    source = Source(pool, labels, names)
    if test:
        source.test_inputs, source.test_labels = FileStore(files(test[0]), image_size), test[1]
        require(
            source.test_inputs.sides == pool.sides,
            f"images have different sizes: test {source.test_inputs.sides}, train {pool.sides} (height, width); "
            "set data.image_size to resize them",
        )
    return source


def _class_files(root: Path, part: Path, class_of: dict[str, int]) -> tuple[list[str], list[int]]:
    """Paths relative to `root`, sorted, with labels; by an annotations file (Tiny-ImageNet's) or by class folder."""
    pairs: list[tuple[str, int]] = []
    annotations = part / f"{part.name}_annotations.txt"
    if annotations.is_file():
        for number, line in enumerate(annotations.read_text().splitlines(), 1):
            fields = line.split()
            require(len(fields) >= 2, f"line {number} of {annotations} must be <file> <class> ..., got {line!r}")
            file, name = fields[0], fields[1]
            require(name in class_of, f"line {number} of {annotations} names class {name!r}, unknown in train")
            pairs.append((str((part / "images" / file).relative_to(root)), class_of[name]))
        return [p for p, _ in sorted(pairs)], [k for _, k in sorted(pairs)]
    folders = sorted(d for d in part.iterdir() if d.is_dir() and not d.name.startswith("."))
    known = [d for d in folders if d.name in class_of]
    if not known:
        return [], []  # e.g. Tiny-ImageNet's unlabelled test/images
    for d in folders:
        require(d.name in class_of, f"{d} is no class of the training folder, which has {len(class_of)} classes")
        for f in sorted(d.rglob("*")):
            if f.suffix.lower() in IMAGE_SUFFIXES and f.is_file():
                pairs.append((str(f.relative_to(root)), class_of[d.name]))
    return [p for p, _ in pairs], [k for _, k in pairs]


def _torchvision(name: str, path: Path, download: bool) -> Source:
    """CIFAR-10, CIFAR-100, MNIST, FashionMNIST or SVHN as torchvision reads them from `path`."""
    import torchvision.datasets as sets

    kinds: dict[str, Any] = {
        "cifar10": sets.CIFAR10,
        "cifar100": sets.CIFAR100,
        "mnist": sets.MNIST,
        "fashion_mnist": sets.FashionMNIST,
        "svhn": sets.SVHN,
    }
    try:
        if name == "svhn":
            parts = [sets.SVHN(path, split=s, download=download) for s in ("train", "test")]
        else:
            parts = [kinds[name](path, train=t, download=download) for t in (True, False)]
    except (RuntimeError, OSError) as error:
        if download:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"{name} cannot be downloaded to data.path = {path}: {reason}") from error
        raise InputError(
            f"{name} is not in data.path = {path}; get it with data.download=true, or give the folder that has it"
        ) from error
    images, labels = [], []
    for part in parts:
        x = np.asarray(part.data)
        if name.startswith("cifar"):
            x = x.transpose(0, 3, 1, 2)
        elif name != "svhn":
            x = x[:, None]
        images.append(ArrayStore(np.ascontiguousarray(x)))
        labels.append(np.asarray(part.labels if name == "svhn" else part.targets, dtype=np.int64))
    n_classes = int(labels[0].max()) + 1
    names = [str(c) for c in getattr(parts[0], "classes", range(n_classes))]
    return Source(images[0], labels[0], names, images[1], labels[1], mean_std=_MEAN_STD.get(name))


SOURCES: tuple[str, ...] = (
    "digits",
    "npz",
    "folder",
    "shards",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "mnist",
    "svhn",
)
