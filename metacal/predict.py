"""From a model and data to predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from metacal.errors import InputError, require
from metacal.modes import evaluation_mode
from metacal.network import logits_in
from metacal.predictions import Predictions

__all__ = ["Data", "predict"]

Data = Iterable[Any] | tuple[Tensor, Tensor]
"""Batches (x, y), or a pair of tensors."""


def predict(
    model: Callable[[Tensor], Any],
    data: Data,
    device: torch.device | str | None = None,
    batch_size: int = 512,
) -> Predictions:
    """The model's logits for all of `data`, with the labels, as `Predictions` on the CPU.

    The model is run in evaluation mode without gradients, and gets its modes back. Floats are given to it in the type
    of its parameters.

    Args:
        model: x -> logits (N, K), an object with `logits`, or (logits, features) as `metacal.Backbone` gives.
        data: a DataLoader or another iterable of (x, y), or a pair of tensors (x, y), which is cut into batches of
            `batch_size`.
        device: where to send the batches; None: where the model's parameters are. The model is not moved.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    if device is None and tensors:
        device = tensors[0].device
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), None)
    logits, labels = [], []
    with torch.no_grad(), evaluation_mode(model):
        for x, y in _batches(data, batch_size):
            out = logits_in(model(x.to(device, dtype if x.is_floating_point() else None)))
            z = out[0] if isinstance(out, tuple) else out
            logits.append(z.detach().cpu())
            labels.append(torch.as_tensor(y).cpu())
    require(len(logits) > 0, "data must give at least one batch (x, y), got none")
    return Predictions.from_logits(torch.cat(logits), torch.cat(labels))


def _batches(data: Data, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(t, Tensor) for t in data):
        x, y = data
        require(len(x) == len(y), f"data must be x and y of equal length, got {len(x)} and {len(y)}")
        require(batch_size >= 1, f"batch_size must be >= 1, got {batch_size}")
        yield from zip(x.split(batch_size), y.split(batch_size))
        return
    for batch in data:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InputError(f"data must give batches (x, y), got {type(batch).__name__}")
        yield batch[0], batch[1]
