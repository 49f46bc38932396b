"""Calibration measures for reporting: each takes a `Predictions`, or probabilities (N, K) and labels (N,), and
returns a float.

    ece(p)                      # p = Predictions.from_logits(logits, labels), or from_probabilities(probs, labels)
    ece(probs, labels)          # two arrays are probabilities and labels, never logits

Notation: N samples, K classes, probabilities p (N, K), labels y, confidence c = max_k p_k, correctness a =
    1[argmax p = y]. The bins are (e_{m-1}, e_m], M = `n_bins` of them with equal width on [0, 1] unless
    said otherwise; n_m, acc_m and conf_m are a bin's count and its means of a and c. Values are fractions
    in [0, 1] unless said otherwise; sums are float64 and counts integers, whatever the type of the input.
    docs/measures.md says which measure to choose and how each misleads.

`MEASURES` is the one list of them, by name and in the order of tables: reports, comparisons, the bootstrap, streams and
monitors take from it whatever they need to know of a measure (see `metacal.calibration.measure.Measure`). A measure of
your own is one more entry.
"""

from __future__ import annotations

from collections.abc import Iterable

from metacal.calibration.binned import (
    BINNED,
    adaptive_ece,
    classwise_ece,
    debiased_ece,
    ece,
    mce,
    overconfidence,
    underconfidence,
)
from metacal.calibration.kernels import KERNELS, kce, sece, skce, smooth_ece
from metacal.calibration.measure import Measure
from metacal.calibration.ranking import RANKING, aurc, auroc
from metacal.calibration.scores import SCORES, accuracy, brier, confidence, error, nll
from metacal.predictions import Predictions

__all__ = [
    "MEASURES",
    "accuracy",
    "adaptive_ece",
    "aurc",
    "auroc",
    "brier",
    "classwise_ece",
    "confidence",
    "debiased_ece",
    "ece",
    "error",
    "kce",
    "mce",
    "nll",
    "overconfidence",
    "sece",
    "skce",
    "smooth_ece",
    "underconfidence",
    "values_of",
]

MEASURES: dict[str, Measure] = {**SCORES, **BINNED, **KERNELS, **RANKING}
"""Every measure by its name: reports, tables, comparisons, the bootstrap and logs take theirs from here."""


def values_of(p: Predictions, names: Iterable[str], n_bins: int = 15) -> dict[str, float]:
    """The named measures of `p`, those that bin in `n_bins` bins."""
    return {name: MEASURES[name](p, **MEASURES[name].options(n_bins)) for name in names}
