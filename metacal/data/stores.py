"""Stored inputs before they are split: an array, or image files that are decoded when they are needed."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from metacal.errors import InputError

__all__ = [
    "CHUNK",
    "IMAGE_SUFFIXES",
    "ArrayStore",
    "FileStore",
    "FolderFiles",
    "ImageFiles",
    "errors_in_one_line",
    "leave_interrupts",
    "resized",
    "tensor_chunks",
]

CHUNK = 512  # inputs loaded at a time
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ArrayStore:
    """Inputs `(n, C, ...)` in one array, uint8 or float32."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, i: int) -> Tensor:
        return torch.from_numpy(self.array[i])

    def take(self, index: np.ndarray) -> ArrayStore:
        """The inputs at `index`."""
        return ArrayStore(self.array[index])

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def check_sizes(self) -> None:
        """Nothing to check: all inputs of an array have one shape."""

    def load(self, workers: int) -> Tensor:
        """All inputs as one tensor."""
        return torch.from_numpy(np.ascontiguousarray(self.array))

    def digest(self) -> bytes:
        """A hash of the content."""
        h = hashlib.blake2b(f"{self.array.shape}{self.array.dtype}".encode(), digest_size=16)
        h.update(np.ascontiguousarray(self.array).data)
        return h.digest()


class ImageFiles(Protocol):
    """Where image files lie. `identity` names one and its size, without its path; `name` is for messages."""

    def __len__(self) -> int: ...
    def take(self, index: np.ndarray) -> ImageFiles: ...
    def name(self, i: int) -> str: ...
    def identity(self, i: int) -> str: ...
    def open(self, i: int) -> BinaryIO: ...


class FolderFiles:
    """Files below `root`, by their names relative to it."""

    def __init__(self, root: Path, names: Sequence[str] | np.ndarray) -> None:
        self.root = root
        # bytes: an array of strings takes four times as much, and there may be millions
        self.names = names if isinstance(names, np.ndarray) else np.array([os.fsencode(name) for name in names])

    def __len__(self) -> int:
        return len(self.names)

    def take(self, index: np.ndarray) -> FolderFiles:
        return FolderFiles(self.root, self.names[index])

    def name(self, i: int) -> str:
        return str(self.root / os.fsdecode(bytes(self.names[i])))

    def identity(self, i: int) -> str:
        return f"{os.fsdecode(bytes(self.names[i]))}\0{os.stat(self.name(i)).st_size}"

    def open(self, i: int) -> BinaryIO:
        return open(self.name(i), "rb")


class FileStore:
    """Image files, decoded to uint8 `(C, H, W)` when asked for: RGB, or grey where `channels` is 1.

    With `image_size` s the shorter side is resized to s (bilinear, antialiased) and the middle s x s is cut
    out; without it all images must have the size of the first.
    """

    def __init__(self, files: ImageFiles, image_size: int | None, channels: int = 3) -> None:
        self.channels = channels
        self.files = files
        self.image_size = image_size
        if image_size is not None:
            self.sides = (image_size, image_size)
        else:
            with self._open(0) as first:
                self.sides = (first.height, first.width)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Tensor:
        with self._open(i) as file:
            image = file.convert("L" if self.channels == 1 else "RGB")
        if self.image_size is not None:
            image = resized(image, self.image_size)
        self._check_size(i, image)
        pixels = np.asarray(image).reshape(*self.sides, self.channels)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    def check_sizes(self) -> None:
        """Raise for the first file of another size, reading headers only; nothing to do with an `image_size`."""
        if self.image_size is None:
            self.check_readable()

    def check_readable(self) -> None:
        """Raise for the first file that is no image, or whose size does not fit, reading headers only."""
        for i in range(len(self)):
            with self._open(i) as image:
                if self.image_size is None:
                    self._check_size(i, image)

    def take(self, index: np.ndarray) -> FileStore:
        """The files at `index`."""
        new = object.__new__(FileStore)
        vars(new).update(vars(self) | {"files": self.files.take(index)})
        return new

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.channels, *self.sides)

    @property
    def nbytes(self) -> int:
        return len(self) * self.channels * self.sides[0] * self.sides[1]

    def load(self, workers: int) -> Tensor:
        """All images as one tensor `(n, C, H, W)`."""
        out = torch.empty((len(self), *self.input_shape), dtype=torch.uint8)
        at = 0
        for x in tensor_chunks(self, workers):
            out[at : at + len(x)] = x
            at += len(x)
        return out

    def digest(self) -> bytes:
        """A hash of names, file sizes and image size, which does not decode every image."""
        h = hashlib.blake2b(f"{self.sides}{self.image_size}".encode(), digest_size=16)
        for i in range(len(self)):
            h.update(f"{self.files.identity(i)}\0".encode(errors="surrogateescape"))
        return h.digest()

    @contextmanager
    def _open(self, i: int) -> Iterator[Any]:
        from PIL import Image

        try:
            with self.files.open(i) as file, Image.open(file) as image:
                yield image
        except InputError:
            raise
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"image {self.files.name(i)} cannot be decoded: {error}") from error

    def _check_size(self, i: int, image: Any) -> None:
        if (image.height, image.width) != self.sides:
            raise InputError(
                f"images have different sizes: {self.files.name(i)} is {image.height}x{image.width}, the first "
                f"{self.sides[0]}x{self.sides[1]} (height x width); set data.image_size to resize them"
            )


def resized(image: Any, side: int) -> Any:
    """A PIL image with its shorter side resized to `side` (bilinear, antialiased), and the middle square of it."""
    from PIL import Image

    width, height = image.size
    if (width, height) == (side, side):
        return image
    scale = side / min(width, height)
    width, height = max(side, round(width * scale)), max(side, round(height * scale))
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


def tensor_chunks(store: Any, workers: int) -> Iterator[Tensor]:
    """The inputs of a store in order, `CHUNK` at a time, loaded by `workers` processes."""
    loader = DataLoader(
        store,
        batch_size=CHUNK,
        num_workers=workers,
        collate_fn=torch.stack,
        worker_init_fn=leave_interrupts,
        generator=torch.Generator(),  # else it would draw from the global one
    )
    yield from errors_in_one_line(loader)


def errors_in_one_line(loader: DataLoader) -> Iterator[Any]:
    """What the loader gives; an error of a loading process comes without that process's traceback."""
    try:
        yield from loader
    except InputError as error:
        last = str(error).strip().splitlines()[-1]
        raise InputError(last.removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")) from None


def leave_interrupts(_worker: int) -> None:
    """Ctrl-C is for the main process, which saves and then ends its loading processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
