"""Where data come from: each reader returns a `Source`, its labelled pool and, where there is one, its test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metacal.data.arrays import read_arrays
from metacal.data.stores import IMAGE_SUFFIXES, ArrayStore, FileStore
from metacal.errors import InputError, require, require_choice

__all__ = ["SOURCES", "Source", "read_source"]

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
        image_size is None or name == "folder",
        f"data.image_size works with data=folder only, got {image_size}",
    )
    if name == "digits":
        return _digits()
    if name in ("npz", "folder"):
        require(path is not None, f"data.path is missing: data={name} needs data.path=...")
    place = Path(path or "data").expanduser()  # shells leave the ~ of data.path=~/x alone
    if name == "npz":
        return _npz(place)
    if name == "folder":
        return _folder(place, image_size)
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
    """`y` as int64 `(n,)`, checked to be integers in 0..n_classes-1 (from 0 on, if that is None)."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    require(y.ndim == 1, f"{what} must hold one class index a sample, shape (n,), got shape {y.shape}")
    require(len(y) == n, f"{what} must have as many entries as there are inputs, {n}, got {len(y)}")
    require(y.dtype.kind in "biuf", f"{what} must hold integers 0..K-1, got {y.dtype}")
    with np.errstate(invalid="ignore"):
        whole = y.astype(np.int64)
    top = n_classes - 1 if n_classes is not None else np.iinfo(np.int64).max
    bad = (whole != y) | (whole < 0) | (whole > top)
    if bad.any():
        i = int(bad.argmax())
        limit = "K-1" if n_classes is None else str(top)
        raise InputError(f"{what} must hold integers in 0..{limit}, got {y[i]} at index {i}")
    return whole


def _folder(root: Path, image_size: int | None) -> Source:
    """Class folders below root, or below root/train with test or val beside it; Tiny-ImageNet's layout too.

    The test set is `test/` if that has class folders, else `val/`. With both, `val/` joins the labelled pool.
    """
    require(image_size is None or image_size >= 1, f"data.image_size must be >= 1, got {image_size}")
    require(root.is_dir(), f"data.path = {root} is not a folder")
    train_dir = root / "train" if (root / "train").is_dir() else root
    names = sorted(d.name for d in train_dir.iterdir() if d.is_dir() and not d.name.startswith("."))
    require(
        len(names) > 0,
        f"{train_dir} has no class folders; data=folder expects {train_dir}/<class>/<image files>",
    )
    class_of = {name: k for k, name in enumerate(names)}
    files, labels = _class_files(root, train_dir, class_of)
    for name, k in class_of.items():
        require(k in set(labels), f"class folder {train_dir / name} has no image files")
    parts = {}
    if train_dir != root:
        for part in ("test", "val"):
            found = _class_files(root, root / part, class_of) if (root / part).is_dir() else ([], [])
            if found[0]:
                parts[part] = found
    test = parts.pop("test", None) or parts.pop("val", None)
    if "val" in parts:
        files, labels = files + parts["val"][0], labels + parts["val"][1]
    pool = FileStore(root, files, image_size)
    source = Source(pool, np.asarray(labels, dtype=np.int64), names)
    if test:
        source.test_inputs = FileStore(root, test[0], image_size)
        source.test_labels = np.asarray(test[1], dtype=np.int64)
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
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "mnist",
    "svhn",
)
