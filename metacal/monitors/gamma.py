"""The gammas that training works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from metacal.monitors.watch import Charts, Monitor, MonitorOptions, State, Watched

__all__ = ["GammaMonitor", "GammaOptions"]


@dataclass
class GammaOptions(MonitorOptions):
    """`GammaMonitor`, where there is a source of gammas."""

    charts: ClassVar[Charts] = {
        "gammas": {
            "gamma": ["gamma/(mean|q05|q50|q95)$"],
            "correlation with confidence": ["gamma/confidence_correlation$"],
        }
    }

    def build(self, watched: Watched) -> Sequence[Monitor]:
        return [GammaMonitor(min(watched.keys.log_every, watched.per_epoch))] if watched.has_gamma else []


class GammaMonitor:
    """The gammas of the last training batch: moments, quantiles, and their correlation with the confidence."""

    name = "gamma"

    def __init__(self, every: int) -> None:
        self.every = every

    def measure(self, state: State) -> dict[str, float]:
        if state.gamma is None or state.logits is None:
            return {}
        gamma = state.gamma.detach().float().flatten().cpu()  # a few numbers: one wait for a GPU instead of ten
        if gamma.numel() == 1:
            return {"gamma/mean": float(gamma)}
        confidence = state.logits.float().softmax(1).amax(1).cpu()
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
