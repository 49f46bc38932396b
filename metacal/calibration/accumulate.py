"""Measures of a stream: batches in, values out, with a state that does not grow.

    total = CalibrationAccumulator(n_classes=10)
    for x, y in loader:
        total.update(model(x), y)
    total.compute()["ece"]

Accumulators add: `a + b` is that of both streams, and so are the sums of their `state_dict()` entries,
    which is what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metacal.calibration import binning
from metacal.calibration.binned import bin_sums
from metacal.calibration.measures import MEASURES
from metacal.errors import require, require_choice
from metacal.names import MeasureName
from metacal.predictions import Predictions

__all__ = ["CalibrationAccumulator"]


class CalibrationAccumulator:
    """The measures of a stream that are functions of sums: all in `MEASURES` with a `streamed` form.

    The values are those of the functions of the same names on all samples at once, up to the rounding of
    float64 sums. The state is the sums that these forms ask for, counts (int64) and sums (float64) on the CPU: per bin
    (M,), with `classwise_ece` per bin and class (M, K), and scalars. Measures that need all confidences in order or on
    a fine grid (adaptive_ece, kce, skce, sece, smooth_ece, auroc, aurc) have no such form: keep the logits for these.

    Args:
        n_classes: K, the width of every batch; None: any, where no measure keeps sums per class.
        n_bins: M, equal-width bins on [0, 1].
        classwise: keep the (M, K) sums for `classwise_ece`.
        measures: only these; None: all that have a streamed form.
    """

    def __init__(
        self,
        n_classes: int | None,
        n_bins: int = 15,
        classwise: bool = True,
        measures: Sequence[MeasureName] | None = None,
    ) -> None:
        valid = n_classes is None or (isinstance(n_classes, int) and n_classes >= 2)
        require(valid, f"n_classes must be an integer >= 2, got {n_classes!r}")
        binning.check_bins(n_bins)
        self.n_classes, self.n_bins, self.classwise = n_classes, n_bins, classwise
        streamed = {name: m.streamed for name, m in MEASURES.items() if m.streamed is not None}
        for name in measures or ():
            require_choice("measures", name, streamed)
        names = [name for name in measures or streamed if classwise or name != "classwise_ece"]
        self.measures = tuple(names)
        self._forms = {name: streamed[name] for name in names}
        self._sums = dict.fromkeys([bin_sums, *(sums for form in self._forms.values() for sums in form.sums)])
        self._state = self._zeros(n_classes or 2)
        per_class = [name for name, value in self._zeros(3).items() if value.shape != self._state[name].shape]
        require(n_classes is not None or not per_class, f"n_classes must be given to keep {', '.join(per_class)}")

    def _zeros(self, n_classes: int) -> dict[str, Tensor]:
        """The sums of no sample: with the names, shapes and types of those of any one."""
        one = Predictions.from_logits(torch.zeros(1, n_classes), [0])
        return {name: torch.zeros_like(value) for name, value in self._sums_of(one).items()}

    def _sums_of(self, p: Predictions) -> dict[str, Tensor]:
        return {name: value.cpu() for sums in self._sums for name, value in sums(p, self.n_bins).items()}

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
            self.n_classes in (None, p.n_classes),
            f"the batch must have n_classes = {self.n_classes} columns, got {p.n_classes}",
        )
        for name, value in self._sums_of(p).items():
            self._state[name] += value

    def compute(self) -> dict[str, float]:
        """The measures of all samples so far. Raises InputError if there are none."""
        require(len(self) > 0, "no predictions to compute from: call update first")
        return {name: form.value(self._state) for name, form in self._forms.items()}

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
        settings = {"n_classes": self.n_classes, "n_bins": self.n_bins, "classwise": self.classwise}
        return settings | {"measures": self.measures}

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"CalibrationAccumulator({settings}; {len(self)} samples)"
