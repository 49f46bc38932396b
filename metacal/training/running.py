"""Measures of the training batches themselves, from the logits that the steps compute anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metacal.calibration import CalibrationAccumulator
from metacal.names import MeasureName
from metacal.predictions import Predictions

__all__ = ["RunningMeasures"]

MEASURED: tuple[MeasureName, ...] = ("accuracy", "nll", "ece", "confidence")

_TOGETHER = 20  # batches that are binned at once: one wait for the device, one pass of small operations
_RECENT = 1000  # samples that histograms and figures of gamma show
_UNIT = 2.0**-30  # sums of its multiples are exact in any order, so that a resumed run logs the same digits


class RunningMeasures:
    """Accuracy, NLL, ECE and mean confidence of the training samples since the last `values()`.

    They are what the backbone saw: each batch before its step, in training mode, augmented. So they belong to all the
    parameters that an epoch passes through, and pair with a validation only roughly; what they cost is next to nothing.

    Args:
        n_bins: equal-width bins on [0, 1], as those of val.
    """

    def __init__(self, n_bins: int = 15) -> None:
        self.n_bins = n_bins
        self._pending: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._recent: tuple[Tensor, ...] = ()  # gamma, confidence and correctness of the last samples
        self._total = self._empty()

    def _empty(self) -> CalibrationAccumulator:
        return CalibrationAccumulator(None, self.n_bins, measures=MEASURED)

    def add(self, logits: Tensor, labels: Tensor, gamma: Tensor | None = None) -> None:
        """A batch: logits (n, K) and labels (n,), both detached, and the gammas (n,) if every sample has its own."""
        each_its_own = gamma is not None and gamma.numel() == len(labels) > 1
        self._pending.append((logits, labels, gamma if each_its_own else None))
        if len(self._pending) == _TOGETHER:
            self._fold()

    def _fold(self) -> None:
        if not self._pending:
            return
        logits, labels, gammas = zip(*self._pending)
        self._pending = []
        p = Predictions.from_logits(torch.cat(logits).cpu(), torch.cat(labels).cpu())
        self._total.add(p.in_units(_UNIT))
        # Batch by batch, so that when they are folded, as a checkpoint does, changes nothing.
        sizes = [len(batch) for batch in labels]
        for gamma, *of_samples in zip(gammas, p.confidence.split(sizes), p.correct.split(sizes)):
            if gamma is not None:
                batch = (gamma.float().flatten().cpu(), *of_samples)
                joined = [torch.cat(pair) for pair in zip(self._recent, batch)] if self._recent else batch
                self._recent = tuple(values[-_RECENT:] for values in joined)

    def values(self) -> dict[str, float]:
        """``train/accuracy``, ``train/nll`` (nats), ``train/ece``, ``train/confidence``; the next ones start anew."""
        self._fold()
        if len(self._total) == 0:
            return {}
        values = {f"train/{name}": value for name, value in self._total.compute().items()}
        self._total = self._empty()
        return values

    def gammas(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Gamma, confidence and correctness (n,) of the last thousand samples; None if they share one gamma."""
        self._fold()
        if not self._recent:
            return None
        gamma, confidence, correct = self._recent
        return gamma, confidence, correct

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        self._fold()
        return {
            "sums": {name: value.tolist() for name, value in self._total.state_dict().items()},
            "recent": [values.tolist() for values in self._recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "sums" in state:  # older checkpoints have others: what they measured is then of the batches to come
            sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in state["sums"].items()}
            self._total.load_state_dict(sums)
        dtypes = (torch.float32, torch.float64, torch.bool)
        self._recent = tuple(torch.tensor(v, dtype=dtype) for v, dtype in zip(state.get("recent", ()), dtypes))
