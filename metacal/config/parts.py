"""The parts that a config names, made with their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from metacal.calibration.surrogates import ProperTerm
from metacal.config.schema import Config
from metacal.gamma import SOURCES, SmoothingOptions, SourceOptions
from metacal.losses import LOSSES, takes
from metacal.objective import Penalty
from metacal.optim import OPTIMIZERS, SCHEDULES, OptimizerOptions
from metacal.options import made
from metacal.penalties import PENALTIES

__all__ = [
    "learns",
    "loss_of",
    "needs_meta",
    "optimizer_of",
    "outer_terms",
    "penalty_of",
    "schedule_of",
    "smoothing_of",
    "source_of",
]


def optimizer_of(config: Config) -> OptimizerOptions:
    """Whose `build` makes the backbone's optimizer."""
    return made(OPTIMIZERS[config.optimizer.name], config.optimizer)


def source_of(config: Config) -> SourceOptions | None:
    """Whose `build` makes the source of gammas; None for a loss without gamma."""
    if takes(LOSSES[config.loss.name]) != "gamma":
        return None
    return made(SOURCES[config.gamma.source], config.gamma)


def smoothing_of(config: Config) -> SmoothingOptions | None:
    """Whose `build` makes the source of a learned smoothing; None where it is not learned."""
    return None if config.loss.learn_smoothing == "no" else made(SmoothingOptions, config.loss)


def learns(config: Config) -> bool:
    """Whether the run has an outer problem: a source with parameters of its own."""
    source = source_of(config)
    return smoothing_of(config) is not None or (source is not None and source.learned)


def needs_meta(config: Config) -> bool:
    """Whether the method needs meta images: for an outer problem, or to follow its calibration error."""
    source = source_of(config)
    return learns(config) or (source is not None and source.follows)


def loss_of(config: Config) -> Callable[..., Tensor]:
    """The per-sample loss, with its options but for what a source gives."""
    loss = LOSSES[config.loss.name]
    return loss if smoothing_of(config) is not None else made(loss, config.loss)


def outer_terms(config: Config) -> dict[str, Any]:
    """The weights of the outer objective by the names of its terms, the proper one among them."""
    objective = config.meta.objective
    return made(ProperTerm, config.meta).added(objective if isinstance(objective, dict) else {objective: 1.0})


def penalty_of(config: Config, name: str, **context: Any) -> Penalty:
    """A penalty with its options; context: what it works on beside them, such as `pixels` and `seed`."""
    return made(PENALTIES[name], getattr(config.penalties, name), **context)


def schedule_of(config: Config) -> Callable[[float], float]:
    """The factor on the learning rate at a fraction of the training."""
    return made(SCHEDULES[config.schedule.name], config.schedule)
