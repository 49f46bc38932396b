"""What monitors look at and are made for, and what runs them within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from metacal.curvature.loss import LogitLoss
from metacal.models.backbone import Backbone
from metacal.pixels import Pixels
from metacal.predictions import Predictions

__all__ = ["Charts", "Monitor", "MonitorOptions", "State", "Watch", "Watched", "WatchedLoss"]

Charts = dict[str, dict[str, list[str]]]
"""Category -> chart -> the tags in it, as regular expressions that match from the start."""


WatchedLoss = str | Callable[[Tensor, Tensor, float], LogitLoss]
"""Whose curvature is measured: by its name, or a function `(x, y, epoch)` of examples in evaluation mode."""


class Watched(NamedTuple):
    """The run that monitors are made for.

    Attributes:
        keys: its `monitor` keys, among them the options of the monitor and what they share: `every`, `n_bins`, ….
        subset: "train" or "val" -> the fixed samples (x, y) of it to measure on.
        loss: whose curvature is measured, "cross_entropy" or "mse".
        has_gamma: whether there is a source of gammas. per_epoch: steps of an epoch.
        trained: the loss that is trained, as a function of examples and epoch.
        pixels: how inputs are made of pixels in [0, 1]; None where that is not known.
    """

    keys: Any
    subset: Callable[[str], tuple[Tensor, Tensor]]
    loss: str
    has_gamma: bool
    per_epoch: int
    batch_size: int
    seed: int
    pixels: Pixels | None = None
    trained: Callable[[Tensor, Tensor, float], LogitLoss] | None = None


@dataclass
class MonitorOptions:
    """The options of a monitor.

    Attributes:
        charts: what its numbers are shown in, in TensorBoard's custom-scalars tab. Categories and charts of one name
            are one.
        needs: category -> start of a tag, without which the category is left out.
    """

    charts: ClassVar[Charts] = {}
    needs: ClassVar[Mapping[str, str]] = {}

    def build(self, watched: Watched) -> Sequence[Monitor]:
        """The monitors; none where the options do not ask for any."""
        raise NotImplementedError


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
