"""One part of every kind, as somebody writes them beside the package: a definition and an entry by name each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from metacal.calibration.surrogates import SURROGATES
from metacal.gamma import SOURCES, Around, SourceOptions
from metacal.losses import LOSSES, focal
from metacal.monitors import MONITORS, Charts, Monitor, MonitorOptions, State, Watched
from metacal.optim import OPTIMIZERS, SCHEDULES, TRANSPOSES, OptimizerOptions
from metacal.optim.basic import Parameters, rate
from metacal.optim.transpose import GroupTranspose, by_groups
from metacal.options import Option, option
from metacal.penalties import PENALTIES, PenaltyPart


def tempered_focal(
    logits: Tensor,
    labels: Tensor,
    gamma: float | Tensor = 1.0,
    temperature: Annotated[float, Option("of the softmax", above=0)] = 2.0,
) -> Tensor:
    """The focal loss of logits / temperature."""
    return focal(logits / temperature, labels, gamma)


LOSSES["tempered_focal"] = tempered_focal


@dataclass
class LogitNorm(PenaltyPart):
    """mean ‖z‖₂^power."""

    power: float = option(2.0, "of the norm", above=0)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        assert logits is not None
        return logits.norm(dim=1).pow(self.power).mean()


PENALTIES["logit_norm"] = LogitNorm


def squared_gap(
    logits: Tensor, labels: Tensor, scale: Annotated[float, Option("factor on the gap", above=0)] = 10.0
) -> Tensor:
    """(scale · mean (c − a))²."""
    confidence, predicted = logits.softmax(1).max(1)
    return (scale * (confidence - (predicted == labels).to(logits.dtype)).mean()).square()


SURROGATES["squared_gap"] = squared_gap


class NormalisedGD(torch.optim.Optimizer):
    """θ' = θ − lr · g / (‖g‖ + eps), tensor by tensor."""

    def __init__(self, params: Parameters, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + group["eps"]), alpha=group["lr"])


@dataclass
class NormalisedGDOptions(OptimizerOptions):
    """`NormalisedGD`."""

    lr: float = rate(0.02)
    floor: float = option(1e-3, "added to the norm", above=0)

    def over(self, parameters: Parameters) -> NormalisedGD:
        return NormalisedGD(parameters, self.lr, self.floor)


def _normalised_group(optimizer: NormalisedGD, group: dict[str, Any], params: list[Tensor]) -> GroupTranspose:
    """v = −lr · (u − ⟨ĝ, u⟩ ‖g‖ / (‖g‖ + eps) ĝ) / (‖g‖ + eps), ĝ = g / ‖g‖: the derivative is symmetric."""
    grads = [p.grad for p in params]

    def multiply(which: list[int], tensors: list[Tensor]) -> None:
        for i, u in zip(which, tensors):
            norm = grads[i].norm()
            unit = grads[i] / norm
            u.sub_(unit * (unit * u).sum() * norm / (norm + group["eps"])).div_(norm + group["eps"])

    return GroupTranspose([-group["lr"]] * len(params), multiply)


OPTIMIZERS["normalised_gd"] = NormalisedGDOptions
TRANSPOSES[NormalisedGD] = partial(by_groups, _normalised_group)


@dataclass
class Linear:
    """1 + t (end − 1)."""

    end: float = option(0.1, "the factor at the end", low=0)

    def __call__(self, t: float) -> float:
        return 1 + t * (self.end - 1)


SCHEDULES["linear"] = Linear


class Opposite(nn.Module):
    """A gamma that is large where the sample is right."""

    def __init__(self, top: float) -> None:
        super().__init__()
        self.top = top

    def forward(self, features: Any = None, *, logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        return self.top * logits.detach().softmax(1).gather(1, labels[:, None]).squeeze(1)


@dataclass
class OppositeOptions(SourceOptions):
    """`Opposite`."""

    top: float = option(4.0, "gamma at p = 1", low=0)

    def build(self, around: Around) -> nn.Module:
        return Opposite(self.top)


SOURCES["opposite"] = OppositeOptions


class WeightMonitor:
    """The norm of all weights, every so many steps."""

    name = "weights"

    def __init__(self, every: int) -> None:
        self.every = every

    def measure(self, state: State) -> dict[str, float]:
        norms = [p.detach().norm() for p in state.backbone.parameters()]
        return {"weights/norm": float(torch.stack(norms).norm())}


@dataclass
class WeightOptions(MonitorOptions):
    """`WeightMonitor`."""

    weights_every: int = option(0, "steps between norms of the weights; 0: never", low=0)

    charts: ClassVar[Charts] = {"weights": {"norm": ["weights/norm$"]}}

    def build(self, watched: Watched) -> Sequence[Monitor]:
        return [WeightMonitor(self.weights_every)] if self.weights_every else []


MONITORS["weights"] = WeightOptions
