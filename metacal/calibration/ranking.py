"""How well confidence ranks correct predictions above wrong ones: AUROC and the area under the
risk-coverage curve.

The sums behind both are exact with ties and take optional integer weights, so that one call serves a thousand
resamples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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
    count, wrong = _per_value(confidence, correct, weights)
    right = count - wrong
    below = wrong.cumsum(1)
    n_wrong = below[:, -1]
    pairs = right.sum(1) * n_wrong
    # Those below and half of the equal ones: the running sum up to and with these less their half.
    ordered = _dot(right, below.sub_(wrong, alpha=0.5))
    return torch.where(pairs > 0, ordered / pairs.clamp(min=1), 0.5)


def risk_area(confidence: Tensor, correct: Tensor, weights: Tensor | None = None) -> Tensor:
    """1/N Σ_n (mean error among the n most confident), float64 (R,); equal confidences count as ordered at
    random.

    Let g equal confidences with e errors follow n0 samples with e0 errors. The expected risk at the j-th of
    them is (e0 + j e/g) / (n0 + j), and summed over j = 1..g that is e + (e0 - n0 e/g) (H(n0 + g) - H(n0)),
    H the harmonic numbers. `confidence` (N,) is sorted ascending and float64, `weights` (N, R) are counts
    whose columns have one sum (R = 1 and all ones by default).
    """
    g, e = _per_value(confidence, correct, weights)
    seen, errors = g.cumsum(1), e.cumsum(1)
    n, total = int(seen[0, -1]), errors[:, -1:].clone()
    steps = torch.arange(1, n + 1, dtype=torch.float64)
    harmonic = torch.cat([steps.new_zeros(1), steps.reciprocal_().cumsum(0)])
    # Running sums go upwards and coverage downwards: n0 and e0 are what the sums up to and with this value leave.
    reached = torch.from_numpy(harmonic.flip(0).numpy().take(seen.long().numpy(), mode="clip"))
    spread = torch.empty_like(reached)
    torch.sub(reached[:, :-1], reached[:, 1:], out=spread[:, 1:])
    torch.sub(harmonic[-1], reached[:, 0], out=spread[:, 0])
    n0, e0 = torch.sub(seen.new_tensor(n), seen, out=seen), torch.sub(total, errors, out=errors)
    # Of values that one sample holds each, e/g needs no division: where none was drawn, the spread is 0.
    share = ~correct if g.shape[1] == len(correct) else e / g.clamp(min=1)
    slope = e0.sub_(n0.mul_(share))
    return (total[:, 0] + _dot(slope, spread)) / n


def tie_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry of monotone x (N,): where its run of equal values starts, and one past where it ends."""
    _, inverse, counts = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - counts)[inverse], last[inverse]


def _per_value(confidence: Tensor, correct: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many samples, and how many wrong ones, hold each of the V distinct values of sorted `confidence`; (R, V)."""
    count = (torch.ones_like(confidence)[:, None] if weights is None else weights).t()
    wrong = count * ~correct
    first = torch.cat([torch.ones(1, dtype=torch.bool), confidence[1:] != confidence[:-1]])
    if bool(first.all()):
        return count, wrong
    starts = first.nonzero().squeeze(1).numpy()
    count, wrong = (torch.from_numpy(np.add.reduceat(x.numpy(), starts, axis=1)) for x in (count, wrong))
    return count, wrong


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ_j x_ij y_ij, (R,) of (R, V)."""
    return torch.from_numpy(np.einsum("ij,ij->i", x.numpy(), y.numpy()))


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
