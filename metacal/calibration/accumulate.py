"""Measures of a stream: batches in, values out, with a state that does not grow.

    total = CalibrationAccumulator(n_classes=10)
    for x, y in loader:
        total.update(model(x), y)
    total.compute()["ece"]

Accumulators add: `a + b` is that of both streams, and so are the sums of their `state_dict()` entries,
    which is what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metacal.calibration import binning
from metacal.calibration.measures import brier_terms
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["CalibrationAccumulator"]


class CalibrationAccumulator:
    """ece, mce, debiased_ece, over- and underconfidence, classwise_ece, nll, brier, accuracy and error of a
    stream.

    The values are those of the functions of the same names on all samples at once, up to the rounding of
    float64 sums. The state is counts (int64) and sums (float64) on the CPU: per bin (M,), with `classwise`
    per bin and class (M, K), and three scalars. Measures that need all confidences in order or on a fine
    grid (adaptive_ece, kce, skce, sece, smooth_ece, auroc, aurc) have no such state: keep the logits for
    these.

    Args:
        n_classes: K, the width of every batch.
        n_bins: M, equal-width bins on [0, 1].
        classwise: keep the (M, K) sums for `classwise_ece`.
    """

    def __init__(self, n_classes: int, n_bins: int = 15, classwise: bool = True) -> None:
        require(isinstance(n_classes, int) and n_classes >= 2, f"n_classes must be an integer >= 2, got {n_classes!r}")
        binning.check_bins(n_bins)
        self.n_classes, self.n_bins, self.classwise = n_classes, n_bins, classwise
        shapes: dict[str, tuple[int, ...]] = {"count": (n_bins,), "correct": (n_bins,), "confidence_sum": (n_bins,)}
        shapes |= {"nll_sum": (), "brier_sum": ()}
        if classwise:
            shapes |= {"class_hits": (n_bins, n_classes), "class_mass": (n_bins, n_classes)}
        integers = ("count", "correct", "class_hits")
        self._state: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=torch.int64 if name in integers else torch.float64)
            for name, shape in shapes.items()
        }

    def update(self, logits: Any = None, labels: Any = None, *, probs: Any = None) -> None:
        """Add a batch: logits (n, K), or probs (n, K) by keyword, with labels (n,), checked as by
        `Predictions`.
        """
        require((logits is None) != (probs is None), "give exactly one of logits and probs")
        require(labels is not None, "labels must be given, got None")
        p = Predictions.from_logits(logits, labels) if probs is None else Predictions.from_probabilities(probs, labels)
        self.add(p)

    def add(self, p: Predictions) -> None:
        """Add predictions that are already checked."""
        require(
            p.n_classes == self.n_classes,
            f"the batch must have n_classes = {self.n_classes} columns, got {p.n_classes}",
        )
        bins = binning.reliability_bins(p, self.n_bins)
        sums = {"count": bins.count, "correct": bins.correct, "confidence_sum": bins.confidence_sum}
        sums |= {"nll_sum": -p.log_likelihood.sum(), "brier_sum": brier_terms(p).sum()}
        if self.classwise:
            sums["class_mass"], sums["class_hits"] = binning.class_sums(p, self.n_bins)
        for name, value in sums.items():
            self._state[name] += value.cpu()

    def compute(self) -> dict[str, float]:
        """The measures of all samples so far. Raises InputError if there are none."""
        n = len(self)
        require(n > 0, "no predictions to compute from: call update first")
        s = self._state
        sums = (s["count"], s["correct"], s["confidence_sum"])
        right = int(s["correct"].sum())
        values = {
            "ece": float(binning.gap_norm(*sums)),
            "mce": float(binning.largest_gap(*sums)),
            "debiased_ece": float(binning.debiased_square(*sums).clamp(min=0).sqrt()),
            "overconfidence": float(binning.one_sided_gap(*sums, over=True)),
            "underconfidence": float(binning.one_sided_gap(*sums, over=False)),
            "nll": float(s["nll_sum"]) / n + 0.0,
            "brier": float(s["brier_sum"]) / n,
            "accuracy": right / n,
            "error": (n - right) / n,
        }
        if self.classwise:
            values["classwise_ece"] = float((s["class_hits"] - s["class_mass"]).abs().sum()) / (n * self.n_classes)
        return values

    def bins(self) -> binning.Bins:
        """The sums per bin, for a reliability diagram."""
        edges = binning.bin_edges(self.n_bins)
        s = self._state
        return binning.Bins(
            edges[:-1], edges[1:], s["count"].clone(), s["correct"].clone(), s["confidence_sum"].clone()
        )

    def __len__(self) -> int:
        return int(self._state["count"].sum())

    def __add__(self, other: CalibrationAccumulator) -> CalibrationAccumulator:
        """The accumulator of both streams; neither is changed. Raises InputError if their settings differ."""
        if not isinstance(other, CalibrationAccumulator):
            return NotImplemented
        mine, theirs = self._settings(), other._settings()
        require(mine == theirs, f"accumulators must have equal settings, got {mine} and {theirs}")
        out = CalibrationAccumulator(**mine)
        out._state = {name: value + other._state[name] for name, value in self._state.items()}
        return out

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the sums. Every entry adds: the sum over ranks of each is the state of the union of
        their samples.
        """
        return {name: value.clone() for name, value in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the sums by those of `state`. Raises InputError if names or shapes do not fit the
        settings.
        """
        missing = sorted(set(self._state) ^ set(state))
        names = ", ".join(self._state)
        require(not missing, f"state must have the entries {names}; these differ: {', '.join(missing)}")
        for name, value in self._state.items():
            got = tuple(state[name].shape)
            require(got == tuple(value.shape), f"state[{name!r}] must have shape {tuple(value.shape)}, got {got}")
        self._state = {name: state[name].detach().to(value, copy=True) for name, value in self._state.items()}

    def _settings(self) -> dict[str, Any]:
        return {"n_classes": self.n_classes, "n_bins": self.n_bins, "classwise": self.classwise}

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"CalibrationAccumulator({settings}; {len(self)} samples)"
