"""The inner problem: per-sample loss + gamma source + penalties = what the backbone minimises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from metacal import losses
from metacal.errors import require

__all__ = ["TAKES_GAMMA", "Loss", "Penalty", "Term", "build_loss", "build_penalties"]

Loss = Callable[..., Tensor]
"""`(logits (N, K), labels (N,)[, gamma]) -> (N,)`."""

Penalty = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""`(model, x, y, logits, features) -> scalar`: of the backbone's parameters, never of the gamma source's.

One with an attribute `step` draws at random: it is told the number of the step, and draws from that alone. One with an
attribute `offset` is told which sample of the batch is its first, where a batch is taken in parts.
One with a true attribute `batchwise` is no mean over samples, and so not the sum of its values on parts of a batch.
"""


TAKES_GAMMA = ("adafocal", "dual_focal", "focal", "inverse_focal", "label_smoothing")
"""Losses by name that take what a gamma source gives; for label_smoothing that is the smoothing."""


@dataclass(frozen=True)
class Term:
    """A penalty in the inner objective.

    weight: of the penalty, averaged over steps. Every so many-th step it enters with `every` times that, so that
    `every` changes what the penalty costs and not how strong it is. ramp_epochs: over these the weight grows linearly
    from 0.
    """

    penalty: Penalty
    weight: float
    every: int = 1
    ramp_epochs: float = 0.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.weight) and self.weight >= 0,
            f"a penalty's weight must be >= 0 and finite, got {self.weight}",
        )
        require(self.every >= 1, f"a penalty's every must be >= 1 step, got {self.every}")
        require(self.ramp_epochs >= 0, f"a penalty's ramp_epochs must be >= 0, got {self.ramp_epochs}")

    def weight_at(self, step: int, epoch: float) -> float:
        """The factor on the penalty at a step, counted from 0, and (fractional) epoch; 0 where it is left out."""
        if step % self.every != 0:
            return 0.0
        ramp = min(1.0, epoch / self.ramp_epochs) if self.ramp_epochs > 0 else 1.0
        return self.weight * self.every * ramp


def build_loss(spec: str | Loss, with_gamma: bool) -> Loss:
    """The per-sample loss for a name of `metacal.losses.LOSSES` or a callable, and whether a gamma goes into it."""
    if not isinstance(spec, str):
        return spec
    require(
        spec in losses.LOSSES, f"loss must be a callable or one of {', '.join(sorted(losses.LOSSES))}, got {spec!r}"
    )
    require(
        not with_gamma or spec in TAKES_GAMMA,
        f"gamma_net must be None with loss={spec!r}: a gamma goes into {', '.join(TAKES_GAMMA)} only",
    )
    return losses.LOSSES[spec]


def build_penalties(spec: Mapping[str, float | tuple[Penalty, float] | Term] | None) -> dict[str, Term]:
    """`{name: weight, (callable, weight) or Term}` -> `{name: Term}`.

    A bare weight needs a name in `metacal.penalties.PENALTIES`. Penalties of weight 0 are left out: they would be
    computed for nothing.
    """
    terms: dict[str, Term] = {}
    for name, entry in (spec or {}).items():
        if isinstance(entry, Term):
            term = entry
        elif isinstance(entry, tuple):
            term = _term(name, *entry)
        else:
            from metacal.penalties import build_penalty  # with the networks' curvature behind it, not needed else

            term = _term(name, build_penalty(name), float(entry))
        if term.weight > 0:
            terms[name] = term
    return terms


def _term(name: str, penalty: Penalty, weight: float) -> Term:
    require(
        math.isfinite(weight) and weight >= 0,
        f"penalties[{name!r}] must have a weight >= 0 and finite, got {weight}",
    )
    return Term(penalty, float(weight))
