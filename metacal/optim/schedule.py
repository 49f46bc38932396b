"""The learning rate over training, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from metacal.errors import require_choice

__all__ = ["learning_rate_factor"]


def learning_rate_factor(
    step: int,
    total_steps: int,
    *,
    name: str = "cosine",
    warmup_steps: int = 0,
    milestones: Sequence[float] = (0.5, 0.75),
    factor: float = 0.1,
    final: float = 0.0,
) -> float:
    """The factor on the learning rate at `step` (counted from 0) of `total_steps`.

    Warm-up is linear: (step + 1) / (warmup_steps + 1) during the first `warmup_steps` steps; the schedule runs over
    the rest. With t the fraction of the rest that has passed,

    - constant: 1
    - step: factor ** (number of milestones <= t)
    - cosine: final + (1 - final) (1 + cos(pi t)) / 2
    """
    require_choice("schedule.name", name, ("constant", "step", "cosine"))
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    t = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if name == "constant":
        return 1.0
    if name == "step":
        return factor ** sum(t >= m for m in milestones)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * t))
