"""From a `DataConfig` to four disjoint, stratified splits that are ready to be batched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metacal.data.options import DataConfig
from metacal.data.shards import TarFiles
from metacal.data.sources import Source, read_source
from metacal.data.splits import (
    Folds,
    Split,
    Transform,
    by_shard,
    channel_statistics,
    resolve_size,
    stratified_draw,
    stratified_folds,
)
from metacal.data.stores import CHUNK, FileStore, tensor_chunks
from metacal.errors import require, require_choice
from metacal.options import check_options

__all__ = ["Data", "build_data"]

_DRAWS = ("test_size", "val_size", "train_size", "meta_size", "meta_folds")  # each has a random stream of its own
_STATISTICS = 1 << 14  # image files that the mean and the standard deviation are taken of
_MEMORY_LIMIT = 2 * 2**30  # bytes of stored inputs up to which `storage: auto` keeps them in memory


@dataclass(frozen=True, eq=False)
class Data:
    """The splits and what belongs to them.

    `meta` is the split that `data.meta_from` asks for: a part that was set aside from `train`, or the images of `val`.
    It is None where the method needs none, and for `folds`, where these say which part of `train` is meta when.
    """

    name: str
    train: Split
    meta: Split | None
    val: Split
    test: Split
    class_names: list[str]
    normalization: tuple[Tensor, Tensor]  # mean and std per channel, of values in [0, 1] for images
    pixel_range: tuple[Tensor, Tensor] | None  # what 0 and 1 become, per channel; None for float features
    fingerprint: str  # of the test split's content
    fingerprints: Mapping[str, str]  # of the others: train, meta (if set aside), train_and_meta, val
    meta_from: str | None = None  # as the option says; None where there are no meta images
    folds: Folds | None = None  # of train, for meta_from=folds

    @property
    def n_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def set_aside(self) -> int:
        """How many labelled images are lost to training because they are meta images."""
        return len(self.meta) if self.meta is not None and self.meta_from == "train" else 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, e.g. (C, H, W)."""
        return self.train.input_shape


def build_data(cfg: DataConfig, seed: int = 0, device: str | torch.device = "cpu", needs_meta: bool = True) -> Data:
    """Read the source, split it, and put it where batches are made from it.

    The *labelled pool* is the source's training set. Where the source has no test set, `test_size` of everything is
    carved off first. From the pool comes `val_size`, then of the rest `train_size` are kept, and of these `meta_size`
    become the meta split, the others the training split; with `meta_from` val or folds all of them are trained on. All
    draws are stratified and depend on `split_seed` (`seed` where that is None): by default runs with different seeds
    have the same splits and differ in initialisation, order and augmentation.

    `fold_meta_into_train`: `auto` gives the meta split back to the training split when the method does not need one
    (`needs_meta` false), so that all methods see the same labelled images.

    Normalisation statistics are those of the training and meta splits together, the same whether or not they are
    folded; for torchvision's CIFAR sets the known ones of the whole training set.

    Fingerprints are hashes of inputs and labels in their order; of image files they take names and sizes, and decode
    nothing. `train_and_meta` is that of both splits together, so it is the same whether or not they are folded.

    Raises:
        InputError: for data that cannot be read or used, and for a split or a class left empty, naming it.
    """
    device = torch.device(device)
    _check(cfg)
    fold = str(cfg.fold_meta_into_train).lower()
    apart = cfg.meta_from == "train" and fold != "true" and (needs_meta or fold == "false")
    require(
        apart or not needs_meta or cfg.meta_from != "train",
        "data.fold_meta_into_train=true leaves no meta split, which this method needs; set it to auto",
    )
    source = read_source(cfg.name, cfg.path, cfg.download, cfg.image_size)
    _check_source(cfg, source)
    index = _partition(cfg, source, seed, apart)
    parts = {name: (source.inputs.take(i), source.labels[i]) for name, i in index.items()}
    if source.test_labels is not None:
        parts["test"] = source.test_inputs, source.test_labels

    total = sum(inputs.nbytes for inputs, _ in parts.values())
    stream = cfg.storage == "stream" or (cfg.storage == "auto" and total > _MEMORY_LIMIT)
    if stream:
        for inputs, _ in parts.values():
            inputs.check_sizes()
    stored = {name: inputs if stream else inputs.load(cfg.workers).to(device) for name, (inputs, _) in parts.items()}
    training = [index[name] for name in ("train", "meta") if name in index]
    mean, std = _normalization(cfg, source, training, [stored[name] for name in ("train", "meta") if name in stored])
    mean, std = mean.to(device), std.to(device)
    plain = Transform(1.0 if source.scale is None else source.scale, mean, std)
    augmented = replace(plain, crop_padding=cfg.crop_padding, flip=cfg.flip)
    transforms = {"train": augmented, "meta": augmented if cfg.meta_augment else plain}
    splits = {
        name: Split(
            name,
            stored[name],
            torch.from_numpy(labels).to(device),
            transforms.get(name, plain),
            workers=cfg.workers if stream else 0,
            order=_order(inputs, cfg) if stream else None,
        )
        for name, (inputs, labels) in parts.items()
    }
    if needs_meta and cfg.meta_from == "val":
        splits["meta"] = replace(splits["val"], name="meta", transform=transforms["meta"])
    test_inputs, test_labels = parts["test"]
    content = hashlib.blake2b(test_inputs.digest() + test_labels.tobytes(), digest_size=8)
    return Data(
        name=cfg.name,
        train=splits["train"],
        meta=splits.get("meta"),
        val=splits["val"],
        test=splits["test"],
        class_names=source.class_names,
        normalization=(mean.float(), std.float()),
        pixel_range=None if source.scale is None else ((-mean / std).float(), ((1 - mean) / std).float()),
        fingerprint=content.hexdigest(),
        fingerprints=_fingerprints(source, index),
        meta_from=cfg.meta_from if needs_meta or apart else None,
        folds=_folds(cfg, parts["train"][1], seed) if needs_meta and cfg.meta_from == "folds" else None,
    )


def _order(inputs: Any, cfg: DataConfig) -> Callable[[Tensor, torch.Generator], Tensor] | None:
    """In which inputs that stream are quickly read."""
    if not isinstance(inputs, FileStore) or not isinstance(inputs.files, TarFiles):
        return None
    return partial(by_shard, torch.from_numpy(inputs.files.shard), cfg.shuffle_buffer)


def _generator(cfg: DataConfig, seed: int, key: str) -> np.random.Generator:
    """Of the draw that a key says."""
    return np.random.default_rng([seed if cfg.split_seed is None else cfg.split_seed, _DRAWS.index(key)])


def _folds(cfg: DataConfig, labels: np.ndarray, seed: int) -> Folds:
    """Of the training split."""
    return stratified_folds(labels, cfg.meta_folds, _generator(cfg, seed, "meta_folds"), "data.meta_folds")


def _partition(cfg: DataConfig, source: Source, seed: int, apart: bool) -> dict[str, np.ndarray]:
    """The disjoint splits, name -> ascending indices into the source's training set.

    Without `test` where the source has a test set, and without `meta` unless it is set apart.
    """

    def draw(key: str, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = resolve_size(f"data.{key}", getattr(cfg, key), len(index))
        rng = _generator(cfg, seed, key)
        drawn, rest = stratified_draw(source.labels[index], count, rng, source.class_names, f"data.{key}")
        return index[drawn], index[rest]

    index = {}
    rest = np.arange(len(source.labels))
    if source.test_labels is None:
        index["test"], rest = draw("test_size", rest)
    index["val"], rest = draw("val_size", rest)
    if cfg.train_size is not None and cfg.train_size != len(rest):
        rest, _ = draw("train_size", rest)
    index["train"] = rest
    if apart:
        index["meta"], index["train"] = draw("meta_size", rest)
    return index


def _fingerprints(source: Source, index: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Of the content of every split but test, and of train and meta together."""
    own_of = {name: index[name] for name in ("train", "meta", "val") if name in index}
    if "meta" in index:
        own_of["train_and_meta"] = np.sort(np.concatenate([index["train"], index["meta"]]))
    found = {}
    for name, own in own_of.items():
        h = hashlib.blake2b(digest_size=8)
        for at in range(0, len(own), CHUNK):  # a copy of a few inputs at a time
            h.update(source.inputs.take(own[at : at + CHUNK]).digest())
        h.update(source.labels[own].tobytes())
        found[name] = h.hexdigest()
    return {"train_and_meta": found["train"], **found}


def _normalization(
    cfg: DataConfig, source: Source, index: list[np.ndarray], training: list[Any]
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, float64, of the inputs at `index`, which are stored as `training`.

    Of image files no more than `_STATISTICS` are decoded for it, evenly spaced.
    """
    channels = source.inputs.input_shape[0]
    if cfg.mean is not None:
        mean, std = torch.tensor(cfg.mean, dtype=torch.float64), torch.tensor(cfg.std, dtype=torch.float64)
        for key, value in (("mean", mean), ("std", std)):
            require(
                len(value) == channels,
                f"data.{key} must have one number per channel, {channels}, got {len(value)}",
            )
        return mean, std
    if cfg.normalize == "none":
        return torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64)
    if source.mean_std is not None:
        return torch.tensor(source.mean_std[0], dtype=torch.float64), torch.tensor(
            source.mean_std[1], dtype=torch.float64
        )
    together = np.sort(np.concatenate(index))
    if isinstance(source.inputs, FileStore) and len(together) > _STATISTICS:
        training = [source.inputs.take(together[np.arange(_STATISTICS) * len(together) // _STATISTICS])]

    def chunks() -> Iterator[Tensor]:
        for part in training:  # the same chunks either way, so that the sums are the same to the last bit
            yield from part.split(CHUNK) if isinstance(part, Tensor) else tensor_chunks(part, cfg.workers)

    scale = 1.0 if source.scale is None else source.scale
    return channel_statistics(chunks, scale, count_values=source.scale is not None)


def _check(cfg: DataConfig) -> None:
    """What can be checked before anything is read."""
    for key in ("train_size", "meta_size", "val_size", "test_size"):
        value = getattr(cfg, key)
        if key != "train_size" or value is not None:
            resolve_size(f"data.{key}", value, 2**62)
    check_options(cfg, "data.")
    fold = str(cfg.fold_meta_into_train).lower()
    require_choice("data.fold_meta_into_train", fold, ("auto", "true", "false"))
    require(
        fold != "false" or cfg.meta_from == "train",
        f"data.fold_meta_into_train=false sets images aside from train, which data.meta_from={cfg.meta_from} does not "
        "do; leave it out",
    )
    require(
        (cfg.mean is None) == (cfg.std is None),
        f"data.mean and data.std must be given together, got mean={cfg.mean} and std={cfg.std}",
    )
    if cfg.std is not None:
        require(all(s > 0 for s in cfg.std), f"data.std must be > 0, got {list(cfg.std)}")


def _check_source(cfg: DataConfig, source: Source) -> None:
    """What depends on the data: classes, and whether the inputs can be augmented."""
    n_classes = len(source.class_names)
    require(n_classes >= 2, f"data={cfg.name} has {n_classes} class; at least 2 are needed")
    empty = np.flatnonzero(np.bincount(source.labels, minlength=n_classes) == 0)
    require(
        len(empty) == 0,
        f"class {source.class_names[empty[0]] if len(empty) else ''!r} has no training samples; labels must use "
        f"every one of 0..{n_classes - 1}",
    )
    shape = source.inputs.input_shape
    require(
        len(shape) == 3 or not (cfg.crop_padding or cfg.flip),
        f"data.crop_padding and data.flip need images (C, H, W), got inputs of shape {tuple(shape)}",
    )
    if len(shape) == 3:
        require(
            cfg.crop_padding < min(shape[1:]),
            f"data.crop_padding must be below the image's sides {shape[1]}x{shape[2]}, got {cfg.crop_padding}",
        )
