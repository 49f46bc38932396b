"""Calibration errors of the training batch as penalties: surrogates of `metacal.calibration`, of the logits at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from metacal.calibration.surrogates import BATCH_PENALTIES, FIRST_ORDER
from metacal.options import options_of
from metacal.penalties.part import PenaltyPart

__all__ = ["BatchPenalty", "batch_penalties"]


@dataclass
class BatchPenalty(PenaltyPart):
    """`surrogate(logits, y)` with the surrogate's own options as fields; no mean over samples."""

    batchwise: ClassVar[bool] = True
    of_logits: ClassVar[bool] = True
    surrogate: ClassVar[Callable[..., Tensor]]

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        return self.surrogate(logits, y, **vars(self))


def batch_penalties() -> dict[str, type[BatchPenalty]]:
    """One class for each of `metacal.calibration.surrogates.BATCH_PENALTIES`, by its name."""
    return {name: _penalty_of(name, surrogate) for name, surrogate in BATCH_PENALTIES.items()}


def _penalty_of(name: str, surrogate: Callable[..., Tensor]) -> type[BatchPenalty]:
    function = surrogate.func if isinstance(surrogate, partial) else surrogate
    options: list[Any] = [
        (key, described.type, field(default=described.default, metadata={"option": described.option}))
        for key, described in options_of(surrogate).items()
    ]
    own = {"surrogate": staticmethod(surrogate), "first_order": function in FIRST_ORDER, "__doc__": function.__doc__}
    return make_dataclass(name, options, bases=(BatchPenalty,), namespace=own)
