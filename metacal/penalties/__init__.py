"""Penalties R_j(θ) of the inner objective, each a differentiable scalar, for a loop of one's own or by name.

    loss = losses.cross_entropy(model(x), y).mean()
    total = loss + 0.5 * robust_kl(model, x, y) + 0.01 * margin_smoothness(model, x, y)

`PENALTIES` maps a name to a builder: `PENALTIES["margin_tail"](temperature=2.0)` checks its options and returns a
callable `(model, x, y, logits, features) -> scalar`, as `metacal.MetaStep` takes it, which makes use of the logits and
features that the training forward has computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from metacal.errors import InputError, did_you_mean, require, require_choice
from metacal.objective import Penalty
from metacal.penalties import batch
from metacal.penalties.adversarial import check_attack, perturbed, robust_kl
from metacal.penalties.evaluate import check_number, logits_of
from metacal.penalties.margin import (
    NORMS,
    check_tail,
    margin_smoothness,
    margin_tail,
    mbls,
    robust_margin_tail,
)
from metacal.penalties.pixels import Pixels, check_pixels
from metacal.penalties.trace import check_trace, gn_trace, hessian_trace, trace_and_route

__all__ = [
    "PENALTIES",
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
class TracePenalty:
    """`hessian_trace` or `gn_trace` as a penalty. Signs depend on (seed, step) alone: nothing else to resume.

    Attributes: `step`, the number of the training step, and `offset`, the place of the first sample in its batch, both
    set by the loop; `route`, that of the last call.
    """

    which: str
    probes: int = 1
    batch: int | None = None
    seed: int = 0
    loss: str = "cross_entropy"
    step: int = field(default=0, compare=False)
    offset: int = field(default=0, compare=False)
    route: str | None = field(default=None, compare=False)

    @property
    def batchwise(self) -> bool:
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


def _robust_kl(
    *,
    eps: float = 8 / 255,
    alpha: float = 2 / 255,
    steps: int = 3,
    norm: str = "linf",
    pixels: Pixels | None = None,
) -> Penalty:
    check_attack(eps, alpha, steps, norm, pixels)

    def penalty(
        model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        return robust_kl(model, x, y, eps, alpha, steps, norm, pixels, logits=logits)

    return penalty


def _margin_smoothness() -> Penalty:
    def penalty(
        model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        return margin_smoothness(model, x, y)

    return penalty


def _margin_tail(
    *,
    temperature: float = 1.0,
    clip: float = 5.0,
    robust: bool = False,
    eps: float = 8 / 255,
    norm: str = "linf",
    pixels: Pixels | None = None,
) -> Penalty:
    check_tail(temperature, clip)
    require(isinstance(robust, bool), f"robust must be true or false, got {robust!r}")
    check_number("eps", eps, 0)
    require_choice("norm", norm, NORMS)
    check_pixels(pixels)

    def penalty(
        model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        if robust:
            return robust_margin_tail(model, x, y, eps, temperature, norm, pixels, clip=clip)
        return margin_tail(_given(logits, model, x), y, temperature, clip=clip)

    return penalty


def _mbls(*, margin: float = 10.0) -> Penalty:
    check_number("margin", margin, 0)

    def penalty(
        model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        return mbls(_given(logits, model, x), y, margin)

    return penalty


def _hessian_trace(
    *, probes: int = 1, batch: int | None = None, seed: int = 0, loss: str = "cross_entropy"
) -> TracePenalty:
    return TracePenalty("hessian", probes, batch, seed, loss)


def _gn_trace(*, probes: int = 1, batch: int | None = None, seed: int = 0, loss: str = "cross_entropy") -> TracePenalty:
    return TracePenalty("gn", probes, batch, seed, loss)


def _given(logits: Tensor | None, model: nn.Module, x: Tensor) -> Tensor:
    return logits_of(model, x) if logits is None else logits


PENALTIES: dict[str, Callable[..., Penalty]] = {
    "robust_kl": _robust_kl,
    "margin_smoothness": _margin_smoothness,
    "margin_tail": _margin_tail,
    "hessian_trace": _hessian_trace,
    "gn_trace": _gn_trace,
    "mbls": _mbls,
    **batch.builders(),
}


def build_penalty(name: str, options: Mapping[str, Any] | None = None) -> Penalty:
    """`PENALTIES[name](**options)`. Raises `InputError` for an unknown name or option, or a bad value."""
    require_choice("penalty", name, PENALTIES)
    builder = PENALTIES[name]
    known = list(inspect.signature(builder).parameters)
    for key in options or {}:
        if key not in known:
            raise InputError(
                f"penalty {name} has no option {key!r}{did_you_mean(key, known)}; it has {', '.join(known) or 'none'}"
            )
    return builder(**(options or {}))
