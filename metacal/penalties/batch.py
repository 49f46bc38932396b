"""Calibration errors of the training batch as penalties: surrogates of `metacal.calibration`, of the logits at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from metacal.calibration.surrogates import BATCH_PENALTIES

__all__ = ["BatchPenalty", "builders"]


class BatchPenalty:
    """`(model, x, y, logits, features) -> surrogate(logits, y)`; no mean over samples, as `batchwise` says."""

    batchwise = True

    def __init__(self, surrogate: Callable[..., Tensor], **keys: Any) -> None:
        self.surrogate = partial(surrogate, **keys)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor, features: Tensor | None) -> Tensor:
        return self.surrogate(logits, y)


def builders() -> dict[str, Callable[..., BatchPenalty]]:
    """`{name: builder}` of them all; a builder takes the surrogate's own keys."""
    return {name: partial(BatchPenalty, surrogate) for name, surrogate in BATCH_PENALTIES.items()}
