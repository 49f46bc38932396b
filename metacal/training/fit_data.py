"""The data that somebody gives to `metacal.fit`: training, meta and validation batches, checked before training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import ConcatDataset, DataLoader

from metacal.config import Config
from metacal.config.parts import needs_meta
from metacal.data import LoaderBatches, Split, Task, as_batches, as_split
from metacal.data.kind import AnyKind
from metacal.data.splits import stratified_draw, stratified_folds
from metacal.data.wrap import input_kind, loader_batches
from metacal.errors import InputError, require
from metacal.inputs import Inputs, call, cat
from metacal.losses import SOFT
from metacal.models import Backbone
from metacal.modes import evaluation_mode
from metacal.network import Network, Streams
from metacal.training.setup import AnyBatches, meta_batch_size, meta_batches, train_batches

__all__ = ["FitData", "evaluation_data", "prepare_fit"]


@dataclass(frozen=True)
class FitData:
    """Batches for a training, and what has to be known of its inputs and labels afterwards."""

    train: AnyBatches
    meta: AnyBatches | None  # None for methods that need none
    val: AnyBatches
    kind: AnyKind
    task: Task
    soft: bool = False  # whether training labels are probabilities of the classes


def prepare_fit(
    config: Config, backbone: Backbone, train: Any, meta: Any, val: Any, ignore_index: int | None = None
) -> FitData:
    """The batches of `metacal.fit`, whose docstring says what the data may be, on the backbone's device.

    Raises:
        InputError: for data that the model cannot be trained on, as far as that can be known without training.
    """
    first = next(backbone.parameters())
    task = Task(backbone.n_classes, first.dtype, ignore_index=ignore_index)
    batches = _batches(config, train, meta, val, first.device, task)
    soft = _check(backbone, batches.train, read_all=False).ndim == 2
    for b in (batches.meta, batches.val):
        if b is not None:
            _check(backbone, b, read_all=True)
    require(
        not soft or config.loss.name in SOFT,
        f"train labels are probabilities of the classes, which loss {config.loss.name!r} does not take: give class "
        f"indices, or use one of {', '.join(SOFT)}",
    )
    return replace(batches, soft=soft)


def evaluation_data(data: Any, name: str, device: torch.device, kind: AnyKind, task: Task) -> AnyBatches:
    """All samples of `data` once, in order, as a model that was trained on `kind` takes them."""
    return as_batches(data, None, stream=name, shuffle=False, augment=False, device=device, like=kind, task=task)


def _batches(config: Config, train: Any, meta: Any, val: Any, device: torch.device, task: Task) -> FitData:
    learns, seed, folds = needs_meta(config), config.seed, None
    meta_from = config.data.meta_from if learns and meta is None else None
    if isinstance(train, DataLoader):
        lacking = (("meta", meta_from in ("train", "folds")), ("val", val is None))
        missing = [name for name, lacks in lacking if lacks]
        require(
            not missing,
            f"{' and '.join(missing)} must be given when train is a DataLoader: nothing can be set aside from it",
        )
        batches: AnyBatches
        batches, kind = loader_batches(train, seed, device, replace(task, soft=True))
    else:
        split = as_split(train, "train", device, task=replace(task, soft=True))
        task = replace(task, class_names=split.class_names)
        kind = input_kind(split)
        if val is None:
            val, split = _set_aside(split, "val", seed)
        if meta is not None and not isinstance(meta, DataLoader):
            meta = as_split(meta, "meta", device, kind, task=replace(task, soft=not learns))
        if meta_from == "train":
            meta, split = _set_aside(split, "meta", seed)
        elif meta_from == "folds":
            rng = np.random.default_rng([seed, len("folds")])
            folds = stratified_folds(split.labels.cpu().numpy(), config.data.meta_folds, rng, "data.meta_folds")
        elif not learns and isinstance(meta, Split):
            split = _joined(split, meta)
        batches = train_batches(config, split, len(meta) if learns and isinstance(meta, Split) else 0, folds)
    outer: AnyBatches | None = None
    if folds is not None:
        outer = meta_batches(config, replace(split, soft=None), folds)
    elif learns:
        meta, size = val if meta_from == "val" else meta, None
        if not isinstance(meta, DataLoader):
            meta = as_split(meta, "meta", device, kind, task=task)
            size = meta_batch_size(config, meta)
        outer = as_batches(meta, size, seed, "meta", device=device, like=kind, task=task)
    return FitData(batches, outer, evaluation_data(val, "val", device, kind, task), kind, task)


def _set_aside(split: Split, name: str, seed: int) -> tuple[Split, Split]:
    """A stratified tenth of `split` and the rest, which keeps classes of one sample to itself."""
    classes, index, counts = np.unique(split.labels.cpu().numpy(), return_inverse=True, return_counts=True)
    divided = counts > 1
    candidates = np.flatnonzero(divided[index])
    require(len(candidates) > 0, f"nothing can be set aside as {name}: no class of train has two samples")
    names = [str(k) if split.class_names is None else split.class_names[k] for k in classes[divided]]
    labels = (np.cumsum(divided) - 1)[index[candidates]]  # 0, 1, ... for the classes that occur more than once
    rng = np.random.default_rng([seed, len(name)])
    drawn, _ = stratified_draw(labels, max(len(names), len(index) // 10), rng, names, f"{name} (a tenth of train)")
    drawn = candidates[drawn]
    others = np.setdiff1d(np.arange(len(index)), drawn)
    held_out = replace(split.at(torch.from_numpy(drawn), name), soft=None)
    return held_out, split.at(torch.from_numpy(others), split.name)


def _joined(a: Split, b: Split) -> Split:
    """The samples of both, as `a` takes them."""
    if a.in_memory != b.in_memory or a.yields_labels != b.yields_labels:
        raise InputError("train and meta must be of one kind (both tensors, or both Datasets) to be joined")
    storage: Any = cat([a.storage, b.storage]) if a.in_memory else ConcatDataset([a.storage, b.storage])
    soft = None
    if a.soft is not None or b.soft is not None:
        k = next(s.soft.shape[1] for s in (a, b) if s.soft is not None)
        soft = torch.cat([one_hot(s.labels, k).float() if s.soft is None else s.soft for s in (a, b)])
    return replace(a, storage=storage, labels=torch.cat([a.labels, b.labels]), soft=soft)


def _check(backbone: Backbone, batches: AnyBatches, read_all: bool) -> Tensor:
    """Labels below K, inputs that the model takes, and batches that are large enough for it. Returns some labels.

    read_all: go through all of a DataLoader for its labels, and not to its first batch only.
    """
    whole = read_all and isinstance(batches, LoaderBatches)
    for number, (x, labels) in enumerate(batches.epoch(0)):
        if number == 0:
            y = labels
            _check_inputs(backbone, x, batches.stream)
            if batches.stream != "val":
                _check_sizes(backbone, x, batches)
        if not whole:
            break
    return y


@torch.no_grad()
def _check_inputs(backbone: Backbone, x: Tensor | Inputs, name: str) -> None:
    try:
        with evaluation_mode(backbone):
            logits, _ = call(backbone, x[:2])
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if isinstance(x, Inputs):
            raise InputError(f"the model cannot take {name} inputs {x}: {error}") from None
        if isinstance(error, TypeError):
            raise
        shape = ", ".join(["N", *map(str, x.shape[1:])])
        kind = str(x.dtype).removeprefix("torch.")
        typed = isinstance(error, RuntimeError) and not x.is_floating_point()
        hint = "; give x.float() for features, and uint8 for images" if typed else ""
        raise InputError(f"the model cannot take {name} inputs of shape ({shape}), {kind}: {error}{hint}") from None
    require(
        logits.shape == (len(x[:2]), backbone.n_classes),
        f"the model must return logits (N, {backbone.n_classes}), it returns shape {tuple(logits.shape)} for "
        f"{len(x[:2])} {name} inputs of shape {tuple(x.shape[1:])}",
    )


@torch.no_grad()
def _check_sizes(backbone: Backbone, x: Tensor, batches: AnyBatches) -> None:
    """A batch of one sample is none to a BatchNorm: refuse what makes one, or have the loader refuse it."""
    size = batches.smallest_batch()
    if size is not None and size > 1:
        return
    try:
        with Streams.aside(x.device):
            Network(backbone).aside(x[:1])
        return
    except InputError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
    if size is None and isinstance(batches, LoaderBatches):
        batches.least = 2
        return
    loader = isinstance(batches, LoaderBatches)
    raise InputError(
        f"a {batches.stream} batch has one sample, which the model cannot be trained on ({reason}): give "
        + ("the DataLoader drop_last=True or another batch_size" if loader else "a larger batch_size, or more samples")
    )
