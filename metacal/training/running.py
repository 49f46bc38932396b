"""Measures of the training batches themselves, from the logits that the steps compute anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metacal.calibration.binning import bin_index
from metacal.predictions import Predictions

__all__ = ["RunningMeasures"]

_TOGETHER = 20  # batches that are binned at once: one wait for the device, one pass of small operations
_RECENT = 1000  # samples that histograms and figures of gamma show
# Sums are whole numbers of 2^-30: exact in any order, so that a resumed run logs the same digits.
_UNIT = 2.0**30
_WORST = 1e6  # nats; a label of probability 0 counts as this


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
        self._clear()

    def _clear(self) -> None:
        self._count = torch.zeros(self.n_bins, dtype=torch.int64)
        self._correct = torch.zeros_like(self._count)
        self._confidence = torch.zeros_like(self._count)  # in units
        self._nll = 0  # in units

    def add(self, logits: Tensor, labels: Tensor, gamma: Tensor | None = None) -> None:
        """A batch: logits (n, K) and labels (n,), both detached, and the gammas (n,) if every sample has its own."""
        own = gamma is not None and gamma.numel() == len(labels) > 1
        self._pending.append((logits, labels, gamma if own else None))
        if len(self._pending) == _TOGETHER:
            self._fold()

    def _fold(self) -> None:
        if not self._pending:
            return
        logits, labels, gammas = zip(*self._pending)
        self._pending = []
        p = Predictions.from_logits(torch.cat(logits).cpu(), torch.cat(labels).cpu())
        index = bin_index(p.confidence, self.n_bins)
        self._count += torch.bincount(index, minlength=self.n_bins)
        self._correct += torch.bincount(index[p.correct], minlength=self.n_bins)
        self._confidence.index_add_(0, index, (p.confidence * _UNIT).round().long())
        self._nll += int((p.log_likelihood.clamp(min=-_WORST) * -_UNIT).round().long().sum())
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
        n = int(self._count.sum())
        if n == 0:
            return {}
        gap = (self._correct.double() - self._confidence.double() / _UNIT).abs().sum()
        found = {
            "train/accuracy": int(self._correct.sum()) / n,
            "train/nll": self._nll / _UNIT / n,
            "train/ece": float(gap) / n,
            "train/confidence": int(self._confidence.sum()) / _UNIT / n,
        }
        self._clear()
        return found

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
            "count": self._count.tolist(),
            "correct": self._correct.tolist(),
            "confidence": self._confidence.tolist(),
            "nll": self._nll,
            "recent": [values.tolist() for values in self._recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = torch.tensor(state["count"])
        self._correct = torch.tensor(state["correct"])
        self._confidence = torch.tensor(state["confidence"])
        self._nll = int(state["nll"])
        dtypes = (torch.float32, torch.float64, torch.bool)
        self._recent = tuple(torch.tensor(v, dtype=dtype) for v, dtype in zip(state.get("recent", ()), dtypes))
