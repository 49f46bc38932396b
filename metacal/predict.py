"""From a model and data to predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from metacal import ranks
from metacal.errors import InputError, require
from metacal.inputs import LABEL_KEYS, Inputs, at_a_time, call, logits_in, named_tensors, pair_in, placed
from metacal.modes import evaluation_mode
from metacal.predictions import Predictions

__all__ = ["Data", "Epochs", "predict", "predict_epoch"]

Data = Iterable[Any] | tuple[Tensor, Tensor]
"""Batches (x, y), or a pair of tensors."""


def predict(
    model: Callable[[Tensor], Any],
    data: Data,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
) -> Predictions:
    """The model's logits for all of `data`, with the labels, as `Predictions` on the CPU.

    The model is run in evaluation mode without gradients, and gets its modes back. Floats are given to it in the type
    of its parameters.

    Args:
        model: x -> logits (N, K), an object with `logits`, or (logits, features) as `metacal.Backbone` gives. One logit
            z a sample stands for the two of (0, z).
        data: a DataLoader or another iterable of (x, y), or of dictionaries that hold the labels beside the arguments
            of the model; or a pair of tensors (x, y), which is cut into batches of `batch_size`; None: of up to
            1,024 samples, of large ones fewer.
        device: where to send the batches; None: where the model's parameters are. The model is not moved.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    if device is None and tensors:
        device = tensors[0].device
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), None)
    logits, labels = [], []
    with torch.no_grad(), evaluation_mode(model):
        for x, y in _batches(data, batch_size):
            out = logits_in(call(model, placed(x, device, dtype)))
            z = logits_in(out[0]) if isinstance(out, tuple) else out
            logits.append(z.detach().cpu())
            labels.append(torch.as_tensor(y).cpu())
    require(len(logits) > 0, "data must give at least one batch (x, y), got none")
    return Predictions.from_logits(torch.cat(logits), torch.cat(labels))


class Epochs(Protocol):
    """Batches (x, y) of one epoch after another, of which some can be made without the others."""

    def epoch(self, epoch: int, start: int = 0, stride: int = 1) -> Iterator[tuple[Any, ...]]: ...


def predict_epoch(model: Callable[[Tensor], Any], batches: Epochs, epoch: int = 0) -> Predictions:
    """`predict` of all batches of an epoch, which R ranks share: rank r runs the model on batches r, r + R, ….

    Every rank gets the predictions of all. A batch is run as a whole, as one process would run it, so that they are the
    same to the last bit for every R; none is padded or run twice.
    """
    if ranks.size() == 1:
        return predict(model, batches.epoch(epoch))
    sizes: list[int] = []

    def counted() -> Iterator[tuple[Any, ...]]:
        for batch in batches.epoch(epoch, ranks.rank(), ranks.size()):
            sizes.append(len(batch[1]))
            yield batch

    here = counted()
    first = next(here, None)  # a rank may have none
    p = None if first is None else predict(model, chain([first], here))
    logits, labels = (None, None) if p is None else (p.logits, p.labels)
    told = ranks.gather_objects((sizes, [None if t is None else (t.shape[1:], t.dtype) for t in (logits, labels)]))
    counts = [sum(of_rank) for of_rank, _ in told]
    require(sum(counts) > 0, "data must give at least one batch (x, y), got none")
    kinds = next(of_rank for n, (_, of_rank) in zip(counts, told) if n)
    places = [(i, r) for r, (of_rank, _) in enumerate(told) for i in range(len(of_rank))]
    order = sorted(range(len(places)), key=places.__getitem__)

    def gathered(t: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        rows = ranks.gather_rows(torch.empty(0, *shape, dtype=dtype) if t is None else t, counts)
        pieces = rows.split([n for of_rank, _ in told for n in of_rank])
        return torch.cat([pieces[i] for i in order])

    return Predictions.from_logits(*(gathered(t, *kind) for t, kind in zip((logits, labels), kinds) if kind))


def _batches(data: Data, batch_size: int | None) -> Iterator[tuple[Tensor | Inputs, Tensor]]:
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(t, Tensor) for t in data):
        x, y = data
        require(len(x) == len(y), f"data must be x and y of equal length, got {len(x)} and {len(y)}")
        require(batch_size is None or batch_size >= 1, f"batch_size must be >= 1, got {batch_size}")
        size = batch_size or at_a_time(x)
        yield from zip(x.split(size), y.split(size))
        return
    for batch in data:
        pair = pair_in(batch)
        if pair is None:
            raise InputError(
                f"data must give batches (x, y) or dictionaries with one of {', '.join(LABEL_KEYS)}, got "
                f"{type(batch).__name__}"
            )
        x, y = pair
        several = named_tensors(x)
        yield x if several is None else Inputs(several), y
