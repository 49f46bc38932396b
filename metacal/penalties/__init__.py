"""Penalties R_j(θ) of the inner objective, each a differentiable scalar, for a loop of one's own or by name.

    loss = losses.cross_entropy(model(x), y).mean()
    total = loss + 0.5 * robust_kl(model, x, y) + 0.01 * margin_smoothness(model, x, y)

`PENALTIES` maps a name to a class: `PENALTIES["margin_tail"](temperature=2.0)` checks its options and returns a
callable `(model, x, y, logits, features) -> scalar`, as `metacal.MetaStep` takes it, which makes use of the logits and
features that the training forward has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from metacal.errors import require_choice
from metacal.options import built, option
from metacal.penalties.adversarial import RobustKL, perturbed, robust_kl
from metacal.penalties.batch import batch_penalties
from metacal.penalties.margin import (
    MarginSmoothness,
    MarginTail,
    MbLS,
    margin_smoothness,
    margin_tail,
    mbls,
    robust_margin_tail,
)
from metacal.penalties.part import Penalty, PenaltyPart
from metacal.penalties.pixels import Pixels
from metacal.penalties.trace import check_trace, gn_trace, hessian_trace, trace_and_route

__all__ = [
    "PENALTIES",
    "PenaltyPart",
    "Pixels",
    "TracePenalty",
    "build_penalty",
    "gn_trace",
    "hessian_trace",
    "margin_smoothness",
    "margin_tail",
    "mbls",
    "perturbed",
    "robust_kl",
    "robust_margin_tail",
]


@dataclass
class TracePenalty(PenaltyPart):
    """`hessian_trace` or `gn_trace` as a penalty. Signs depend on (seed, step) alone: nothing else to resume.

    Attributes: `step`, the number of the training step, and `offset`, the place of the first sample in its batch, both
    set by the loop; `route`, that of the last call.
    """

    which: str
    probes: int = option(1, "vectors of random signs in one estimate", low=1)
    batch: int | None = option(None, "of the first so many samples of a batch; null: all", low=1)
    seed: int = 0
    loss: str = "cross_entropy"
    step: int = field(default=0, compare=False)
    offset: int = field(default=0, compare=False)
    route: str | None = field(default=None, compare=False)

    @property
    def batchwise(self) -> bool:  # type: ignore[override]
        """With `batch` it is the mean over some samples of a batch, not over all."""
        return self.batch is not None

    def __post_init__(self) -> None:
        check_trace(self.probes, self.seed, self.loss, self.batch, self.step)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        value, self.route = trace_and_route(
            self.which,
            model,
            x,
            y,
            self.probes,
            self.seed,
            self.loss,
            batch=self.batch,
            step=self.step,
            logits=logits,
            offset=self.offset,
        )
        return value


PENALTIES: dict[str, Callable[..., Penalty]] = {
    "robust_kl": RobustKL,
    "margin_smoothness": MarginSmoothness,
    "margin_tail": MarginTail,
    "hessian_trace": partial(TracePenalty, "hessian"),
    "gn_trace": partial(TracePenalty, "gn"),
    "mbls": MbLS,
    **batch_penalties(),
}
"""By the name that a configuration gives: dataclasses like `PenaltyPart`, of which an instance is the penalty."""


def build_penalty(name: str, options: Mapping[str, Any] | None = None) -> Penalty:
    """`PENALTIES[name](**options)`. Raises `InputError` for an unknown name or option, or a bad value."""
    require_choice("penalty", name, PENALTIES)
    return built(f"penalty {name}", PENALTIES[name], options or {})
