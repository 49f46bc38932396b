"""How well confidence ranks correct predictions above wrong ones: AUROC and the area under the
risk-coverage curve.

The sums behind both are exact with ties and take optional integer weights, so that one call serves a thousand
resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metacal.calibration.arguments import takes_arrays
from metacal.calibration.measure import Measure, Weighted, row_dots
from metacal.predictions import Predictions

__all__ = [
    "RANKING",
    "ascending",
    "aurc",
    "auroc",
    "pair_order",
    "risk_area",
    "running_sums",
    "tie_groups",
    "value_counts",
]


@takes_arrays
def auroc(p: Predictions) -> float:
    """P(confidence of a correct prediction > that of a wrong one), ties counting half; 0.5 if there is no
    such pair.

    It says how well confidence ranks, not whether it is true: any increasing map of c leaves it as it is.
    """
    c, a, _ = _sorted(p.to("cpu"))
    return float(pair_order(*value_counts(c, a)))


@takes_arrays
def aurc(p: Predictions) -> float:
    """Area under the risk-coverage curve, 1/N Σ_n (error rate among the n most confident); lower is better.

    Equal confidences count as ordered at random (the mean over their orders). Geifman & El-Yaniv 2019
    (arXiv 1805.08206).
    """
    c, a, _ = _sorted(p.to("cpu"))
    return float(risk_area(*value_counts(c, a)))


def pair_order(count: Tensor, wrong: Tensor, seen: Tensor) -> Tensor:
    """P(c of a correct > c of a wrong one) + P(equal) / 2 from the `value_counts`, float64 (R,); 0.5 where there is no
    such pair.

    Σ_v wrong_v seen_v are the pairs of a wrong one with one that is not above it: (W² + Σ_v wrong_v²)/2 of them hold
    two of the W wrong ones, and of the others Σ_v wrong_v (count_v - wrong_v) are equal. All are integers, and exact.
    """
    n_wrong = wrong.sum(1)
    pairs = (seen[:, -1] - n_wrong) * n_wrong
    ordered = pairs - row_dots(wrong, seen) + (n_wrong.square() + row_dots(wrong, count)) / 2
    return torch.where(pairs > 0, ordered / pairs.clamp(min=1), 0.5)


def risk_area(count: Tensor, wrong: Tensor, seen: Tensor) -> Tensor:
    """1/N Σ_n (mean error among the n most confident) from the `value_counts` of N samples, float64 (R,); equal
    confidences count as ordered at random.

    The m-th most confident sample, if it is wrong, adds 1/n to the error of every n >= m: H(N) - H(m - 1) in all, H the
    harmonic numbers. T(m) sums this over the ranks up to m, and a value that takes the ranks m + 1 to m + g adds
    T(m + g) - T(m) times its share of wrong ones.
    """
    n = int(seen[0, -1])
    steps = torch.arange(n, 0, -1, dtype=torch.float64).reciprocal()
    remaining = steps.cumsum(0).flip(0)  # H(N) - H(m - 1) at m = 1, 2, …
    ranks = torch.cat([steps.new_zeros(1), remaining.cumsum(0)])
    # Running sums go upwards and ranks downwards.
    above = torch.from_numpy(ranks.flip(0).numpy().take(seen.long().numpy(), mode="clip"))
    added = torch.empty_like(above)
    torch.sub(above[:, :-1], above[:, 1:], out=added[:, 1:])
    torch.sub(ranks[-1], above[:, 0], out=added[:, 0])
    return row_dots(added, wrong / count.clamp(min=1)) / n


def value_counts(confidence: Tensor, correct: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of the V distinct values of `confidence` (N,), ascending: how many samples hold it, how many wrong ones,
    and how many hold it or less; float64 (R, V). `weights` (N, R) are counts, by default R = 1 and all ones.
    """
    count = (torch.ones_like(confidence)[:, None] if weights is None else weights).t()
    wrong = count * ~correct
    first = torch.cat([torch.ones(1, dtype=torch.bool), confidence[1:] != confidence[:-1]])
    if not bool(first.all()):
        starts = first.nonzero().squeeze(1).numpy()
        count, wrong = (torch.from_numpy(np.add.reduceat(x.numpy(), starts, axis=1)) for x in (count, wrong))
    return count, wrong, count.cumsum(1)


def tie_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry of monotone x (N,): where its run of equal values starts, and one past where it ends."""
    _, inverse, counts = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - counts)[inverse], last[inverse]


def running_sums(x: Tensor) -> Tensor:
    """Sums of the first 0, 1, … N columns of x (R, N): (R, N + 1)."""
    out = x.new_zeros(x.shape[0], x.shape[1] + 1)
    torch.cumsum(x, 1, out=out[:, 1:])
    return out


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


def _weighted_counts(p: Predictions) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    c, a, order = _sorted(p)
    return lambda w: value_counts(c, a, w[order])


RANKING: dict[str, Measure] = {
    "auroc": Measure(auroc, "AUROC", 4, best="max", weighted=Weighted(_weighted_counts, pair_order), compared=True),
    "aurc": Measure(aurc, "AURC", 4, best="min", weighted=Weighted(_weighted_counts, risk_area)),
}
