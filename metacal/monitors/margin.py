"""Margins of the predictions on val, and what they bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from metacal.margins import ece_certificate
from metacal.monitors.watch import Charts, Monitor, MonitorOptions, State, Watched
from metacal.predictions import Predictions

__all__ = ["MarginMonitor", "MarginOptions", "certificate_values"]


@dataclass
class MarginOptions(MonitorOptions):
    """`MarginMonitor`."""

    charts: ClassVar[Charts] = {
        "margins": {"margin moment Q": ["margin/q$"], "certificate ratios": ["margin/ratio_.*$"]}
    }

    def build(self, watched: Watched) -> Sequence[Monitor]:
        return [MarginMonitor(watched.keys.n_bins)]


class MarginMonitor:
    """Margins on the validation split, and the certificates of `metacal.margins.ece_certificate` with both sides."""

    name, every = "margin", 0

    def __init__(self, n_bins: int = 15) -> None:
        self.n_bins = n_bins

    def measure(self, state: State) -> dict[str, float]:
        assert state.val is not None
        return {f"margin/{k}": v for k, v in certificate_values(state.val, self.n_bins).items()}


def certificate_values(p: Predictions, n_bins: int) -> dict[str, float]:
    """`ece_certificate` as numbers to log; `gamma_min` as `least_margin`, since it is no gamma of the focal loss."""
    values = {k: float(v) for k, v in vars(ece_certificate(p, n_bins=n_bins)).items() if v is not None}
    return {"least_margin" if k == "gamma_min" else k: v for k, v in values.items()}
