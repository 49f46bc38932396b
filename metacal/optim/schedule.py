"""The learning rate over training, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metacal.errors import require_choice
from metacal.options import built, option

__all__ = ["SCHEDULES", "Constant", "Cosine", "Step", "Warmup", "fractions_increase", "learning_rate_factor"]


def fractions_increase(milestones: Sequence[float]) -> bool:
    """Whether all are in (0, 1), and none is below the one before."""
    return all(0 < m < 1 for m in milestones) and sorted(milestones) == list(milestones)


@dataclass
class Warmup:
    """What every schedule begins with."""

    warmup_epochs: float = option(0.0, "epochs over which the learning rate grows from 0", low=0)


@dataclass
class Constant:
    """1."""

    def __call__(self, t: float) -> float:
        return 1.0


@dataclass
class Step:
    """factor ** (number of milestones <= t)."""

    milestones: list[float] = option(
        factory=lambda: [0.5, 0.75],
        help="fractions of the training at which the rate falls",
        valid=fractions_increase,
        must="increasing fractions in (0, 1)",
    )
    factor: float = option(0.1, "by which it falls", low=0)

    def __call__(self, t: float) -> float:
        return self.factor ** sum(t >= m for m in self.milestones)


@dataclass
class Cosine:
    """final + (1 - final) (1 + cos(pi t)) / 2."""

    final: float = option(0.0, "the factor at the end", low=0)

    def __call__(self, t: float) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * t))


SCHEDULES: dict[str, Callable[..., Callable[[float], float]]] = {"constant": Constant, "step": Step, "cosine": Cosine}
"""By the name that a configuration gives: dataclasses, of which an instance gives the factor on the learning rate at
the fraction t of the training that has passed, in [0, 1]."""


def learning_rate_factor(
    step: int, total_steps: int, *, name: str = "cosine", warmup_steps: int = 0, **options: Any
) -> float:
    """The factor on the learning rate at `step` (counted from 0) of `total_steps`.

    Warm-up is linear: (step + 1) / (warmup_steps + 1) during the first `warmup_steps` steps; the schedule `name` of
    `SCHEDULES`, with its `options`, runs over the rest, t being the fraction of the rest that has passed.
    """
    require_choice("schedule.name", name, SCHEDULES)
    return factor_at(step, total_steps, warmup_steps, built(f"schedule {name}", SCHEDULES[name], options))


def factor_at(step: int, total_steps: int, warmup_steps: int, schedule: Callable[[float], float]) -> float:
    """`learning_rate_factor` for a schedule that is made."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return schedule(min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
