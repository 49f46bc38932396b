"""How well confidence ranks correct predictions above wrong ones: AUROC and the area under the
risk-coverage curve.

The sums behind both are exact with ties and take optional integer weights, so that one call serves a thousand
resamples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metacal.calibration.arguments import takes_arrays
from metacal.calibration.measure import Counted, Measure
from metacal.predictions import Predictions

__all__ = ["RANKING", "ascending", "aurc", "auroc", "pair_order", "risk_area", "running_sums", "tie_groups"]


@takes_arrays
def auroc(p: Predictions) -> float:
    """P(confidence of a correct prediction > that of a wrong one), ties counting half; 0.5 if there is no
    such pair.

    It says how well confidence ranks, not whether it is true: any increasing map of c leaves it as it is.
    """
    c, a, _ = _sorted(p.to("cpu"))
    return float(pair_order(c, a))


@takes_arrays
def aurc(p: Predictions) -> float:
    """Area under the risk-coverage curve, 1/N Σ_n (error rate among the n most confident); lower is better.

    Equal confidences count as ordered at random (the mean over their orders). Geifman & El-Yaniv 2019
    (arXiv 1805.08206).
    """
    c, a, _ = _sorted(p.to("cpu"))
    return float(risk_area(c, a))


def pair_order(confidence: Tensor, correct: Tensor, weights: Tensor | None = None) -> Tensor:
    """P(c of a correct > c of a wrong one) + P(equal) / 2, float64 (R,); 0.5 where there is no such pair.

    `confidence` (N,) is sorted ascending and float64, `weights` (N, R) are counts (R = 1 and all ones by
    default).
    """
    w = _ones(confidence) if weights is None else weights
    first, last = _groups(confidence)
    below = running_sums(w * ~correct[:, None])
    n_wrong = below[-1]
    right = w * correct[:, None]
    pairs = right.sum(0) * n_wrong
    ordered = (right * (below[first] + below[last])).sum(0) / 2
    return torch.where(pairs > 0, ordered / pairs.clamp(min=1), 0.5)


def risk_area(confidence: Tensor, correct: Tensor, weights: Tensor | None = None) -> Tensor:
    """1/N Σ_n (mean error among the n most confident), float64 (R,); equal confidences count as ordered at
    random.

    Let g equal confidences with e errors follow n0 samples with e0 errors. The expected risk at the j-th of
    them is (e0 + j e/g) / (n0 + j), and summed over j = 1..g that is e + (e0 - n0 e/g) (H(n0 + g) - H(n0)),
    H the harmonic numbers. `confidence` (N,) is sorted ascending and float64, `weights` (N, R) are counts
    whose columns have one sum (R = 1 and all ones by default).
    """
    w = (_ones(confidence) if weights is None else weights).flip(0)
    first, last = _groups(confidence.flip(0), once=True)
    seen, errors = running_sums(w), running_sums(w * ~correct.flip(0)[:, None])
    n0, e0 = seen[first], errors[first]
    g, e = seen[last] - n0, errors[last] - e0
    n = int(seen[-1, 0])
    steps = torch.arange(1, n + 1, dtype=torch.float64)
    harmonic = torch.cat([steps.new_zeros(1), steps.reciprocal_().cumsum(0)])
    reached = harmonic[seen.long()]
    spread = reached[last] - reached[first]
    return (e + (e0 - n0 * e / g.clamp(min=1)) * spread).sum(0) / n


def tie_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry of monotone x (N,): where its run of equal values starts, and one past where it ends."""
    _, inverse, counts = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - counts)[inverse], last[inverse]


def _groups(x: Tensor, once: bool = False) -> tuple[Any, Any]:
    """`tie_groups`, as an index into running sums; slices, which copy nothing, where no two are equal.

    once: each group once, and not once for each of its entries.
    """
    if bool((x[1:] != x[:-1]).all()):
        return slice(None, -1), slice(1, None)
    first, last = tie_groups(x)
    start = torch.arange(len(x)) == first
    return (first[start], last[start]) if once else (first, last)


def _ones(confidence: Tensor) -> Tensor:
    return torch.ones_like(confidence)[:, None]


def running_sums(x: Tensor) -> Tensor:
    """Sums of the first 0, 1, … N rows of x (N, R): (N + 1, R)."""
    return torch.cat([x.new_zeros(1, x.shape[1]), x.cumsum(0)])


def ascending(x: Tensor) -> tuple[Tensor, Any]:
    """x (N,) in ascending order, and the index that orders it: a slice, which copies nothing, where it was in order."""
    if bool((x[1:] >= x[:-1]).all()):
        return x, slice(None)
    values, order = x.sort()
    return values, order


def _sorted(p: Predictions) -> tuple[Tensor, Tensor, Any]:
    """Confidences in ascending order, float64 (N,), the correctness of each, bool (N,), and the order as an index."""
    c, order = ascending(p.confidence)
    return c, p.correct[order], order


def _weighted_auroc(p: Predictions) -> Counted:
    c, a, order = _sorted(p)
    return lambda w: pair_order(c, a, w[order])


def _weighted_aurc(p: Predictions) -> Counted:
    c, a, order = _sorted(p)
    return lambda w: risk_area(c, a, w[order])


RANKING: dict[str, Measure] = {
    "auroc": Measure(auroc, "AUROC", 4, best="max", weighted=_weighted_auroc, compared=True),
    "aurc": Measure(aurc, "AURC", 4, best="min", weighted=_weighted_aurc),
}
