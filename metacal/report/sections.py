"""Further tables of a report: prediction sets, another data set, and the parts of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from metacal.calibration.bootstrap import compare
from metacal.calibration.conformal import SCORES, ConformalSets, Coverage, share_interval
from metacal.calibration.measures import MEASURES, values_of
from metacal.calibration.novelty import Separation
from metacal.errors import require
from metacal.predictions import Predictions
from metacal.report.tables import Cell, Column, Range, Table, column_of

__all__ = ["change_table", "conformal_sets", "conformal_table", "group_measures", "group_table", "ood_table"]

GROUP_MEASURES = ("confidence", "ece", "nll")  # beside the accuracy, which has its interval


def conformal_sets(val: Predictions, test: Predictions, alpha: float) -> dict[str, Coverage]:
    """The coverage and size of sets by each score, fitted on `val` and measured on `test`."""
    return {score: ConformalSets(score, alpha).fit(val).measure(test) for score in SCORES}


def conformal_table(measured: Mapping[str, Coverage], alpha: float, n_val: int) -> Table:
    """Scores as rows; coverage with its interval, and the mean number of classes."""
    columns = [Column("coverage", "Coverage", 2, percent=True), Column("size", "Mean size", 2)]
    rows: list[tuple[str, Sequence[Cell]]] = [
        (name.upper(), [Range(c.coverage, c.low, c.high), c.size]) for name, c in measured.items()
    ]
    n = next(iter(measured.values())).n
    notes = [
        f"Sets that hold the label with probability {100 * (1 - alpha):g} % or more, fitted on {n_val:,} validation "
        f"predictions as they are, measured on {n:,}; the interval is of the {n:,} (Wilson, 95 %)."
    ]
    return Table(columns, rows, "score", "Conformal prediction sets", notes)


def ood_table(measured: Mapping[str, Separation], known: Predictions, other: Predictions, name: str) -> Table:
    """Scores as rows; how well each tells `known` from `other` predictions."""
    columns = [
        Column("auroc", "AUROC", 2, percent=True, best="max"),
        Column("fpr", "FPR at 95 % TPR", 2, percent=True, best="min"),
    ]
    rows: list[tuple[str, Sequence[Cell]]] = [
        (score.replace("_", " "), [s.auroc, s.fpr]) for score, s in measured.items()
    ]
    notes = [f"{len(known):,} samples of the data that the model knows against {len(other):,} of {name}."]
    return Table(columns, rows, "score", f"Out of distribution: {name}", notes)


def group_measures(p: Predictions, groups: Any, n_bins: int, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Group -> n, accuracy with its interval, confidence, ECE and NLL, of the samples of each group in their order.

    Args:
        groups: of each sample, integers or strings (N,).
        names: of the integers 0, 1, ...; None: as they are.

    Raises:
        InputError: for another shape, and values that are neither integers nor strings.
    """
    values = np.asarray(groups)
    require(values.shape == (len(p),), f"groups must have shape ({len(p)},), one for each sample, got {values.shape}")
    require(values.dtype.kind in "iubUS", f"groups must be integers or strings, got {values.dtype}")
    kinds, index = np.unique(values, return_inverse=True)
    out = {}
    for i, kind in enumerate(kinds.tolist()):
        part = p[torch.from_numpy(np.flatnonzero(index == i)).to(p.device)]
        hits = int(part.correct.sum())
        low, high = share_interval(hits, len(part))
        measured = {"n": len(part), "accuracy": hits / len(part), "accuracy_low": low, "accuracy_high": high}
        label = kind.decode() if isinstance(kind, bytes) else names[kind] if names is not None else str(kind)
        out[label] = measured | values_of(part, GROUP_MEASURES, n_bins)
    return out


def group_table(measured: Mapping[str, Mapping[str, float]], what: str) -> Table:
    """Groups as rows."""
    columns = [Column("n", "n"), *(column_of(name) for name in ("accuracy", *GROUP_MEASURES))]
    rows: list[tuple[str, Sequence[Cell]]] = []
    for label, of in measured.items():
        accuracy = Range(of["accuracy"], of["accuracy_low"], of["accuracy_high"])
        rows.append((label, [of["n"], accuracy, *(of[name] for name in GROUP_MEASURES)]))
    note = "Accuracy with Wilson's 95 % interval. The fewer samples, the larger the ECE of a calibrated model."
    return Table(columns, rows, what, f"By {what}", [note], marked=frozenset())


def change_table(before: Predictions, after: Predictions, split: str, n_bins: int = 15, resamples: int = 1000) -> Table:
    """What a map does to predictions of the same samples: each measure before and after, and the paired difference."""
    columns = [Column("before", f"{split}, before"), Column("after", f"{split}, after")]
    columns += [Column("difference", "difference")]
    rows: list[tuple[str, Sequence[Cell]]] = []
    for name in (name for name, measure in MEASURES.items() if measure.compared):
        options = MEASURES[name].options(n_bins)
        c = compare(after, before, MEASURES[name], n=resamples, **options)
        shown = column_of(name)
        values = [MEASURES[name](p, **options) for p in (before, after)]
        rows.append((shown.header, [*map(shown.show, values), shown.show(Range(c.difference, c.low, c.high))]))
    notes = [f"{len(before):,} predictions; differences with 95 % intervals of {resamples:,} paired resamples."]
    return Table(columns, rows, "measure", "", notes)
