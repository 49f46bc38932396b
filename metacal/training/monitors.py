"""What is watched while a model trains.

A monitor is anything with a `name`, a cadence `every` and `measure(state) -> {"split/measure": value}`. With
`every = k > 0` it measures after every k-th training step; with `every = 0` at each validation, when `state.val` holds
the predictions on the validation split. Monitors never change the training: no parameter, buffer, gradient or global
generator. What each costs is logged as ``time/monitor_<name>_ms``; a `Watch` runs them and makes dear ones wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from metacal.calibration import MEASURES, kce
from metacal.calibration.measures import values_of
from metacal.margins import ece_certificate, predicted_margin, robust_margin, true_margin
from metacal.models.backbone import Backbone
from metacal.predictions import Predictions
from metacal.report.report import predict

__all__ = [
    "CalibrationMonitor",
    "GammaMonitor",
    "MarginMonitor",
    "Monitor",
    "State",
    "SubsetMonitor",
    "Watch",
]


@dataclass
class State:
    """What a monitor may look at."""

    backbone: Backbone
    step: int = 0
    epoch: int = 0
    optimizer: torch.optim.Optimizer | None = None
    logits: Tensor | None = None  # of the last training batch, before its step, detached
    gamma: Tensor | None = None  # one for each of its samples
    val: Predictions | None = None  # set at each validation


class Monitor(Protocol):
    """See the module's docstring."""

    name: str
    every: int

    def measure(self, state: State) -> Mapping[str, float]: ...


@dataclass
class Watch:
    """The monitors of a run, and the budget of the dear ones.

    Monitors with `budgeted = True` that are due at a step are measured together, so that their values pair, or wait
    together while measuring them, at the cost of their last time, would lift the share of all monitors in the run's
    time above `max_share`. The first measurement is always taken, since its cost is not known before.
    """

    monitors: Sequence[Monitor] = ()
    max_share: float | None = None
    spent: float = 0.0  # seconds on monitors
    waited: int = 0  # times that they waited
    costs: dict[str, float] = field(default_factory=dict)  # name -> seconds of its last measurement
    began: float = field(default_factory=time.perf_counter)

    def measure(self, state: State, validation: bool) -> dict[str, float]:
        """The values of every monitor that is due now, and the time that each took."""
        due = [m for m in self.monitors if (m.every == 0 if validation else m.every > 0 and state.step % m.every == 0)]
        budgeted = [m for m in due if getattr(m, "budgeted", False)]
        if budgeted and not self._allows([m.name for m in budgeted]):
            self.waited += 1
            due = [m for m in due if m not in budgeted]
        values: dict[str, float] = {}
        for monitor in due:
            start = time.perf_counter()
            values.update(monitor.measure(state))
            seconds = time.perf_counter() - start
            values[f"time/monitor_{monitor.name}_ms"] = 1e3 * seconds
            self.spent += seconds
            if monitor in budgeted:
                self.costs[monitor.name] = seconds
        return values

    def _allows(self, names: Sequence[str]) -> bool:
        if self.max_share is None or not all(name in self.costs for name in names):
            return True
        cost = sum(self.costs[name] for name in names)
        return self.spent + cost <= self.max_share * (time.perf_counter() - self.began + cost)

    def scalars(self) -> dict[str, float]:
        """What monitors have cost so far; nothing when none of them is budgeted."""
        if not self.costs:
            return {}
        share = self.spent / max(time.perf_counter() - self.began, 1e-9)
        return {"time/monitor_share": share, "time/monitor_waited": float(self.waited)}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python; what a resumed run needs to go on measuring as if it had never stopped."""
        return {
            "elapsed": time.perf_counter() - self.began,
            "spent": self.spent,
            "waited": self.waited,
            "costs": dict(self.costs),
            "monitors": {m.name: m.state_dict() for m in self.monitors if hasattr(m, "state_dict")},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.began = time.perf_counter() - state["elapsed"]
        self.spent, self.waited, self.costs = state["spent"], state["waited"], dict(state["costs"])
        for monitor in self.monitors:
            if monitor.name in state["monitors"]:
                monitor.load_state_dict(state["monitors"][monitor.name])  # type: ignore[attr-defined]


def calibration_values(p: Predictions, n_bins: int) -> dict[str, float]:
    """The measures that every validation logs: all that are `watched`."""
    return values_of(p, [name for name, record in MEASURES.items() if record.watched], n_bins)


class CalibrationMonitor:
    """Calibration on the validation split, at each validation."""

    name, every = "calibration", 0

    def __init__(self, n_bins: int = 15) -> None:
        self.n_bins = n_bins

    def measure(self, state: State) -> dict[str, float]:
        assert state.val is not None
        return {f"val/{k}": v for k, v in calibration_values(state.val, self.n_bins).items()}


class MarginMonitor:
    """Margins on the validation split, and the certificates of `metacal.margins.ece_certificate` with both sides."""

    name, every = "margin", 0

    def __init__(self, n_bins: int = 15) -> None:
        self.n_bins = n_bins

    def measure(self, state: State) -> dict[str, float]:
        assert state.val is not None
        return {f"margin/{k}": v for k, v in certificate_values(state.val, self.n_bins).items()}


def certificate_values(p: Predictions, n_bins: int) -> dict[str, float]:
    """`ece_certificate` as numbers to log."""
    return {k: float(v) for k, v in vars(ece_certificate(p, n_bins=n_bins)).items() if v is not None}


class SubsetMonitor:
    """Calibration and margins on a fixed subset, every `every` steps, in evaluation mode.

    Logged as ``<name>/ece``, …, with quantiles of the true and the predicted margin, ``<name>/margin_q05``, ….
    With `robust_eps`, an L∞ radius in the inputs' own (normalised) units, also the mean robust margin from above (PGD)
    and to first order; ``<name>/certificate_…`` are both sides of the margin bounds on ECE.
    """

    budgeted = True

    def __init__(
        self, name: str, x: Tensor, y: Tensor, every: int, n_bins: int = 15, robust_eps: float | None = None
    ) -> None:
        self.name, self.x, self.y, self.every, self.n_bins = name, x, y, every, n_bins
        self.robust_eps = robust_eps

    def measure(self, state: State) -> dict[str, float]:
        p = predict(state.backbone, (self.x, self.y))
        values = calibration_values(p, self.n_bins) | {"kce": float(kce(p))}
        assert p.logits is not None
        quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64, device=p.logits.device)
        for name, margin in (
            ("margin", true_margin(p.logits, p.labels)),
            ("predicted_margin", predicted_margin(p.logits)),
        ):
            found = torch.quantile(margin.double(), quantiles).tolist()
            values |= {f"{name}_{q}": value for q, value in zip(("q05", "q50", "q95"), found)}
        values |= {f"certificate_{k}": v for k, v in certificate_values(p, self.n_bins).items()}
        if self.robust_eps is not None:
            upper, first_order = robust_margin(state.backbone, self.x, self.y, self.robust_eps)
            values |= {"robust_margin": float(upper.mean()), "robust_margin_first_order": float(first_order.mean())}
        return {f"{self.name}/{k}": v for k, v in values.items()}


class GammaMonitor:
    """The gammas of the last training batch: moments, quantiles, and their correlation with the confidence."""

    name = "gamma"

    def __init__(self, every: int) -> None:
        self.every = every

    def measure(self, state: State) -> dict[str, float]:
        if state.gamma is None or state.logits is None:
            return {}
        gamma = state.gamma.detach().float().flatten()
        if gamma.numel() == 1:
            return {"gamma/mean": float(gamma)}
        confidence = state.logits.float().softmax(1).amax(1)
        q05, q50, q95 = torch.quantile(gamma, gamma.new_tensor([0.05, 0.5, 0.95])).tolist()
        values = {
            "gamma/mean": float(gamma.mean()),
            "gamma/std": float(gamma.std()),
            "gamma/min": float(gamma.min()),
            "gamma/max": float(gamma.max()),
            "gamma/q05": q05,
            "gamma/q50": q50,
            "gamma/q95": q95,
        }
        centred = torch.stack([gamma - gamma.mean(), confidence - confidence.mean()])
        norms = centred.norm(dim=1)
        if float(norms.min()) > 1e-6:  # one gamma for all has no correlation
            values["gamma/confidence_correlation"] = float(centred[0] @ centred[1] / norms.prod())
        return values
