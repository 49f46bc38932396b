"""Images in tar files: where each one lies in its shard, so that any of them can be read without those before it.

A sample is an image and its label under one name, as `0001.jpg` with `0001.cls` (a class index, or a class name) or
`0001.json` (an object whose "label" is that). The files are plain tar, since nothing can be found in a compressed one
without reading all that is before it.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from metacal.data.stores import IMAGE_SUFFIXES
from metacal.errors import InputError, require

__all__ = ["TarFiles", "class_indices", "index_shards"]

_LABELS = (".cls", ".json")


class TarFiles:
    """Image files within shards; `rows` (n, 3) int64 are each one's shard among `paths`, its offset and its size."""

    def __init__(self, paths: list[Path], rows: np.ndarray) -> None:
        self.paths, self.rows = paths, rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: np.ndarray) -> TarFiles:
        return TarFiles(self.paths, self.rows[index])

    @property
    def shard(self) -> np.ndarray:
        """The number of each file's shard, (n,)."""
        return self.rows[:, 0]

    def name(self, i: int) -> str:
        shard, offset, _ = self.rows[i]
        return f"{self.paths[shard]} at byte {offset}"

    def identity(self, i: int) -> str:
        shard, offset, size = self.rows[i]
        return f"{self.paths[shard].name}@{offset}\0{size}"

    def open(self, i: int) -> BinaryIO:
        shard, offset, size = (int(number) for number in self.rows[i])
        with open(self.paths[shard], "rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(size))


def index_shards(paths: list[Path], first: int) -> tuple[np.ndarray, list[str]]:
    """`rows` of `TarFiles` for the samples of shards, numbered from `first`, and the label of each as it is written.

    Reads the headers of the members, and the labels. Raises `InputError` for damaged or compressed files, for an image
    without a label or with two of them, for a label without an image, and for links, as tar has them of files that are
    one on the disk, naming the shard and the sample.
    """
    rows: list[np.ndarray] = []
    labels: list[str] = []
    for number, path in enumerate(paths, first):
        try:
            with tarfile.open(path, "r:") as tar:
                images, texts = _members(path, tar)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise InputError(f"shard {path} must be a plain (uncompressed) tar file: {error}") from error
        lone = sorted(images.keys() ^ texts.keys())
        if lone:
            lacks = "label (.cls or .json)" if lone[0] in images else "image"
            raise InputError(f"sample {lone[0]} of shard {path} has no {lacks}")
        size = path.stat().st_size
        for key, (offset, length) in images.items():
            require(offset + length <= size, f"shard {path} ends within the image of sample {key}")
            labels.append(texts[key])
        places = np.array(list(images.values()), dtype=np.int64).reshape(-1, 2)
        rows.append(np.insert(places, 0, number, axis=1))
    return np.concatenate(rows), labels


def _members(path: Path, tar: tarfile.TarFile) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Offset and size of the image, and the label as it is written, of every sample of a shard."""
    images: dict[str, tuple[int, int]] = {}
    texts: dict[str, str] = {}
    for member in tar:
        folder, _, name = member.name.rpartition("/")
        stem, dot, suffix = name.partition(".")
        suffix = (dot + suffix).lower()
        key = f"{folder}/{stem}" if folder else stem
        if member.isdir() or suffix not in (*IMAGE_SUFFIXES, *_LABELS):
            continue
        require(
            member.isfile() and not member.issparse(),
            f"{member.name} of shard {path} must be a whole file, it is a link or sparse: pack it without --sparse, "
            "with --dereference --hard-dereference",
        )
        table: dict = images if suffix in IMAGE_SUFFIXES else texts
        what = "images" if suffix in IMAGE_SUFFIXES else "labels"
        require(key not in table, f"sample {key} of shard {path} has two {what}")
        if suffix in IMAGE_SUFFIXES:
            images[key] = (member.offset_data, member.size)
        else:
            file = tar.extractfile(member)
            assert file is not None
            texts[key] = _label(file.read(), suffix, f"{member.name} of shard {path}")
    return images, texts


def _label(content: bytes, suffix: str, what: str) -> str:
    try:
        text = content.decode()
        value = json.loads(text)["label"] if suffix == ".json" else text.strip()
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{what} must be UTF-8 text{_OBJECT if suffix == '.json' else ''}: {error!r}") from error
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole or (isinstance(value, str) and value != ""), f"{what} must hold a class index or name, got {value!r}")
    return str(value)


_OBJECT = ' of a JSON object with a "label"'


def class_indices(labels: list[str], names: list[str] | None, what: str) -> tuple[np.ndarray, list[str]]:
    """Labels as int64 (n,), and the names of the classes.

    Without `names`, those of the training set: labels that are all whole numbers, written without zeros before them,
    are indices, 0..K-1, and others names, in the order of the alphabet. Raises `InputError` for a label that is none of
    the classes, and for an index so high that some class can have no sample.
    """
    if names is None:
        if all(re.fullmatch("0|[1-9][0-9]{0,17}", label) for label in labels):
            most = max(map(int, labels))
            require(most < len(labels), f"{what} has the label {most}, and {len(labels)} samples for 0..{most}")
            names = [str(k) for k in range(most + 1)]
        else:
            names = sorted(set(labels))
    index = {name: k for k, name in enumerate(names)}
    unknown = next((label for label in labels if label not in index), None)
    require(unknown is None, f"{what} has the label {unknown!r}, unknown in train, which has {len(names)} classes")
    return np.array([index[label] for label in labels], dtype=np.int64), names
