"""Measures of the training batches themselves, from the logits that the steps compute anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metacal.calibration import CalibrationAccumulator
from metacal.names import MeasureName
from metacal.predictions import Predictions

__all__ = ["RunningMeasures"]

MEASURED: tuple[MeasureName, ...] = ("accuracy", "nll", "ece", "confidence")

_TOGETHER = 20  # batches that are binned at once: one copy to the host, one pass of small operations
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
        self._pending: list[tuple[Tensor, Tensor, Tensor | None, Tensor | float]] = []
        self._sent: _Sent | None = None  # the batches before these, on their way to the host
        self._recent: tuple[Tensor, ...] = ()  # gamma, confidence and correctness of the last samples
        self._total = self._empty()

    def _empty(self) -> CalibrationAccumulator:
        return CalibrationAccumulator(None, self.n_bins, measures=MEASURED)

    def add(self, logits: Tensor, labels: Tensor, gamma: Tensor | None = None, skipped: Tensor | float = 0.0) -> None:
        """A batch: logits (n, K) and labels (n,), both detached, and the gammas (n,) if every sample has its own.

        skipped: other than 0 if its step was left out, and the batch is to be too; a 0-d tensor where only the device
        knows it.
        """
        if not isinstance(skipped, Tensor) and skipped != 0:
            return
        each_its_own = gamma is not None and gamma.numel() == len(labels) > 1
        self._pending.append((logits, labels, gamma if each_its_own else None, skipped))
        if len(self._pending) == _TOGETHER:
            self._send()
            if logits.device.type == "cpu":
                self._fold()

    def _send(self) -> None:
        """Start the copy of what is pending; what was sent before has long arrived, and is folded."""
        sent, self._sent = self._sent, _Sent(self._pending) if self._pending else None
        self._pending = []
        if sent is not None:
            self._add(*sent.arrived())

    def _fold(self) -> None:
        """Everything, now: on a GPU this waits."""
        self._send()
        self._send()

    def _add(self, logits: Tensor, labels: Tensor, sizes: list[int], gammas: list[Tensor | None]) -> None:
        if not sizes:
            return
        p = Predictions.from_logits(logits, labels)
        self._total.add(p.in_units(_UNIT))
        # Batch by batch, so that when they are folded, as a checkpoint does, changes nothing.
        for gamma, *of_samples in zip(gammas, p.confidence.split(sizes), p.correct.split(sizes)):
            if gamma is not None:
                batch = (gamma, *of_samples)
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


class _Sent:
    """Batches on their way to the host, behind whatever the device had to do before."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | float]]) -> None:
        logits, labels, gammas, skipped = zip(*batches)
        self.sizes = [len(batch) for batch in labels]
        flags = [f if isinstance(f, Tensor) else torch.zeros((), device=logits[0].device) for f in skipped]
        self.logits, self.labels = _to_host(torch.cat(logits)), _to_host(torch.cat(labels))
        self.gammas = [None if g is None else _to_host(g.float().flatten()) for g in gammas]
        self.skipped = _to_host(torch.stack(flags)) if any(isinstance(f, Tensor) for f in skipped) else None
        self.event: Any = None
        if logits[0].is_cuda:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(logits[0].device))

    def arrived(self) -> tuple[Tensor, Tensor, list[int], list[Tensor | None]]:
        """Logits and labels of all samples, sizes and gammas of the batches, without those that were skipped."""
        if self.event is not None:
            self.event.synchronize()
        logits, labels, sizes, gammas = self.logits, self.labels, self.sizes, self.gammas
        if self.skipped is not None and self.skipped.any():
            taken = self.skipped == 0
            rows = taken.repeat_interleave(torch.tensor(sizes))
            logits, labels = logits[rows], labels[rows]
            sizes = [size for size, keep in zip(sizes, taken.tolist()) if keep]
            gammas = [gamma for gamma, keep in zip(gammas, taken.tolist()) if keep]
        return logits, labels, sizes, gammas


def _to_host(t: Tensor) -> Tensor:
    return t.to("cpu", non_blocking=True)
