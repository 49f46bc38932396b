"""Calibration and margins on fixed samples of train and val."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metacal.calibration import kce
from metacal.margins import moment, predicted_margin, robust_margin, true_margin
from metacal.monitors.calibration import calibration_values
from metacal.monitors.margin import certificate_values
from metacal.monitors.watch import Charts, Monitor, MonitorOptions, State, Watched
from metacal.options import option
from metacal.pixels import UNITS, Pixels, require_known
from metacal.predict import predict

__all__ = ["SubsetMonitor", "SubsetOptions"]

_BOTH = "(train_subset|val_subset)/"


@dataclass
class SubsetOptions(MonitorOptions):
    """Two `SubsetMonitor`s, on train and on val."""

    robust_eps: float | None = option(
        None, "L-infinity radius of the robust margins and their moment Q_eps on the subsets; null: none", above=0
    )
    robust_units: str = option("pixels", "of robust_eps: pixels in [0, 1], or the inputs as they are", choices=UNITS)

    charts: ClassVar[Charts] = {
        "calibration on fixed subsets": {
            "ECE": [f"{_BOTH}ece$"],
            "NLL": [f"{_BOTH}nll$"],
            "accuracy": [f"{_BOTH}accuracy$"],
        },
        "margins": {
            "quantiles of the true margin": [f"{_BOTH}margin_q(05|50|95)$"],
            "margin moment Q": [f"{_BOTH}certificate_q$"],
            "robust margin moment Q_eps": [f"{_BOTH}robust_q$"],
            "certificate ratios": [f"{_BOTH}certificate_ratio_.*$"],
        },
    }

    def build(self, watched: Watched) -> Sequence[Monitor]:
        every, n_bins = watched.keys.every, watched.keys.n_bins
        pixels = None if self.robust_units == "inputs" else watched.pixels
        if self.robust_eps is not None and self.robust_units == "pixels":
            require_known("monitor.robust_eps", "monitor.robust_units", pixels)
        return [
            SubsetMonitor(f"{split}_subset", *watched.subset(split), every, n_bins, self.robust_eps, pixels)
            for split in (("train", "val") if every else ())
        ]


class SubsetMonitor:
    """Calibration and margins on a fixed subset, every `every` steps, in evaluation mode.

    Logged as ``<name>/ece``, …, with quantiles of the true and the predicted margin, ``<name>/margin_q05``, ….
    ``<name>/certificate_…`` are both sides of the margin bounds on ECE. With `robust_eps`, an L∞ radius in pixels if
    `pixels` says how inputs are made of these, else in the inputs as they are, also

    - robust_margin, robust_margin_first_order: the mean robust margin, from above (PGD) and to first order
    - robust_q, robust_q_first_order: the robust moment Q_ε = 1/N Σ_i exp(−m_ε,i) of these, the first from below
    """

    budgeted = True

    def __init__(
        self,
        name: str,
        x: Tensor,
        y: Tensor,
        every: int,
        n_bins: int = 15,
        robust_eps: float | None = None,
        pixels: Pixels | None = None,
    ) -> None:
        self.name, self.x, self.y, self.every, self.n_bins = name, x, y, every, n_bins
        self.robust_eps, self.pixels = robust_eps, pixels

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
            limits = None if self.pixels is None else (0.0, 1.0)
            estimates = robust_margin(state.backbone, self.x, self.y, self.robust_eps, clip=limits, pixels=self.pixels)
            for end, margin in zip(("", "_first_order"), estimates):
                values |= {f"robust_margin{end}": float(margin.mean()), f"robust_q{end}": moment(margin)}
        return {f"{self.name}/{k}": v for k, v in values.items()}
