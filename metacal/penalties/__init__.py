"""Penalties R_j(θ) of the inner objective, each a differentiable scalar, for a loop of one's own or by name.

    loss = losses.cross_entropy(model(x), y).mean()
    total = loss + 0.5 * robust_kl(model, x, y) + 0.01 * margin_smoothness(model, x, y)

`PENALTIES` maps a name to a class: `PENALTIES["margin_tail"](temperature=2.0)` checks its options and returns a
callable `(model, x, y, logits, features) -> scalar`, as `metacal.MetaStep` takes it, which makes use of the logits and
features that the training forward has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from metacal.errors import require_choice
from metacal.options import built
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
from metacal.penalties.trace import TracePenalty, gn_trace, hessian_trace
from metacal.pixels import Pixels

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
