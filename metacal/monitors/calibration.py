"""Calibration of the predictions on val."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from metacal.calibration import MEASURES
from metacal.calibration.measures import values_of
from metacal.monitors.watch import Charts, Monitor, MonitorOptions, State, Watched
from metacal.predictions import Predictions

__all__ = ["CalibrationMonitor", "CalibrationOptions", "calibration_values"]


@dataclass
class CalibrationOptions(MonitorOptions):
    """`CalibrationMonitor`, which is always there: it selects the epoch."""

    charts: ClassVar[Charts] = {
        "calibration": {
            "accuracy": ["(train|val)/accuracy$"],
            "NLL": ["(train|val)/nll$"],
            "ECE": ["(train|val)/ece$"],
            "accuracy and mean confidence on val": ["val/(accuracy|confidence)$"],
            "over- and underconfidence on val": ["val/(overconfidence|underconfidence)$"],
            "ECE of equal mass and by class on val": ["val/(adaptive_ece|classwise_ece)$"],
        }
    }

    def build(self, watched: Watched) -> Sequence[Monitor]:
        return [CalibrationMonitor(watched.keys.n_bins)]


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
