"""Calibration and margins on fixed samples of train and val."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from metacal.calibration import kce
from metacal.margins import predicted_margin, robust_margin, true_margin
from metacal.monitors.calibration import calibration_values
from metacal.monitors.margin import certificate_values
from metacal.monitors.watch import Charts, Monitor, MonitorOptions, State, Watched
from metacal.options import option
from metacal.predict import predict

__all__ = ["SubsetMonitor", "SubsetOptions"]

_BOTH = "(train_subset|val_subset)/"


@dataclass
class SubsetOptions(MonitorOptions):
    """Two `SubsetMonitor`s, on train and on val."""

    robust_eps: float | None = option(
        None, "L-infinity radius of the robust margins on the subsets, in normalised units; null: none", above=0
    )

    charts: ClassVar[Charts] = {
        "calibration on fixed subsets": {
            "ECE": [f"{_BOTH}ece$"],
            "NLL": [f"{_BOTH}nll$"],
            "accuracy": [f"{_BOTH}accuracy$"],
        },
        "margins": {
            "quantiles of the true margin": [f"{_BOTH}margin_q(05|50|95)$"],
            "margin moment Q": [f"{_BOTH}certificate_q$"],
            "certificate ratios": [f"{_BOTH}certificate_ratio_.*$"],
        },
    }

    def build(self, watched: Watched) -> Sequence[Monitor]:
        every, n_bins = watched.keys.every, watched.keys.n_bins
        return [
            SubsetMonitor(f"{split}_subset", *watched.subset(split), every, n_bins, self.robust_eps)
            for split in (("train", "val") if every else ())
        ]


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
