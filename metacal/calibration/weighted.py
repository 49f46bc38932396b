"""The named measures of many resamples at once, for the bootstrap.

A resample of N samples is the number of times that each was drawn, so R of them are a matrix of counts (N,
R), and a measure of all R is a few matrix products, running sums or scattered sums along the samples.
`weighted(name, p, **options)` does what does not depend on the counts and returns the function `counts (N,
R) float64 -> values (R,)`, or None where there is no such form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metacal.calibration import binning
from metacal.calibration.kernel import grid_sums, laplace_pairs, spread_on_grid, unit_interval_smooth
from metacal.calibration.measures import brier_terms
from metacal.calibration.ranking import pair_order, risk_area, tie_groups
from metacal.predictions import Predictions

__all__ = ["Counted", "weighted"]

Counted = Callable[[Tensor], Tensor]


def weighted(name: str, p: Predictions, **options: Any) -> Counted | None:
    """The measure `name` of `p` as a function of counts (N, R); None if only resampling itself will do."""
    if name == "sece" and not (options.get("self_term", True) and options.get("bandwidth", 0.01) >= 1e-3):
        return None
    return _FORMS[name](p, **options) if name in _FORMS else None


def _mean(values: Callable[[Predictions], Tensor]) -> Callable[[Predictions], Counted]:
    def prepare(p: Predictions) -> Counted:
        v = values(p).double()
        infinite = v.isinf()
        v, lost = v.masked_fill(infinite, 0.0), infinite.double()
        # A sample at infinity counts where it was drawn; 0 · inf would spoil the other resamples.
        return lambda w: torch.where(lost @ w > 0, torch.inf, v @ w / len(p))

    return prepare


def _binned(formula: Callable[..., Tensor]) -> Callable[..., Counted]:
    """A formula on counts, correct and confidence sums (R, M) over equal-width bins."""

    def prepare(p: Predictions, n_bins: int = 15, **options: Any) -> Counted:
        index = binning.bin_index(p.confidence, n_bins)
        per_sample = (torch.ones_like(p.confidence), p.correct.double(), p.confidence)

        def measure(w: Tensor) -> Tensor:
            empty = w.new_zeros(n_bins, w.shape[1])
            sums = (empty.index_add(0, index, w * v[:, None]).t() for v in per_sample)
            return formula(*sums, **options)

        return measure

    return prepare


def _debiased(count: Tensor, correct: Tensor, confidence_sum: Tensor, squared: bool = False) -> Tensor:
    square = binning.debiased_square(count, correct, confidence_sum)
    return square if squared else square.clamp(min=0).sqrt()


def _adaptive_ece(p: Predictions, n_bins: int = 15, norm: str = "l1") -> Counted:
    c, a, order = _sorted(p)
    first, _ = tie_groups(c)
    residual = (a.double() - c)[:, None]

    def measure(w: Tensor) -> Tensor:
        w = w[order]
        before = torch.cat([w.new_zeros(1, w.shape[1]), w.cumsum(0)])[first]
        # Exact: a quotient of integers far below 2^53 does not round across an integer.
        index = (before * n_bins / len(p)).long().clamp_(max=n_bins - 1)
        empty = w.new_zeros(n_bins, w.shape[1])
        gap = empty.scatter_add(0, index, w * residual).t()
        count = empty.scatter_add(0, index, w).t()
        return binning.gap_norm(count, gap, torch.zeros_like(gap), norm)

    return measure


def _classwise_ece(p: Predictions, n_bins: int = 15) -> Counted:
    k = p.n_classes
    samples, cells, values = [], [], []
    for rows, probs in p.chunks():
        labels = p.labels[rows]
        here = torch.arange(rows.start, rows.start + len(labels))
        label_bin = binning.bin_index(probs.gather(1, labels[:, None]).squeeze(1), n_bins)
        row, column, above = binning.above_first_bin(probs, n_bins)
        sample = rows.start + row
        # hits - mass: the label, the entries above the first bin, and their removal from the column's sum.
        samples += [here, sample, sample]
        cells += [label_bin * k + labels, binning.bin_index(above, n_bins) * k + column, column]
        values += [torch.ones_like(here, dtype=torch.float64), -above.double(), above.double()]
    sample, cell, value = torch.cat(samples), torch.cat(cells), torch.cat(values)
    step = 1 << 10  # entries at a time: times R resamples they stay in the processor's cache

    def measure(w: Tensor) -> Tensor:
        residual = w.new_zeros(n_bins * k, w.shape[1])
        for start in range(0, len(cell), step):
            part = slice(start, start + step)
            residual.index_add_(0, cell[part], w[sample[part]] * value[part, None])
        for rows, probs in p.chunks():
            residual[:k] -= probs.double().t() @ w[rows]
        return residual.abs_().sum(0) / (len(p) * k)

    return measure


def _kce(p: Predictions) -> Counted:
    c, a, order = _sorted(p)
    r = c - a.double()

    def measure(w: Tensor) -> Tensor:
        w = w[order]
        # Copies of one sample are pairs as well, at distance 0.
        _, pairs = laplace_pairs(c, r, w)
        return (r.square() @ w.square() + 2 * pairs).clamp(min=0).sqrt() / len(p)

    return measure


def _skce(p: Predictions) -> Counted:
    c, a, order = _sorted(p)
    r = c - a.double()

    def measure(w: Tensor) -> Tensor:
        w = w[order]
        _, pairs = laplace_pairs(c, r, w)
        return (r.square() @ (w.square() - w) + 2 * pairs) / max(1, len(p) * (len(p) - 1))

    return measure


def _smooth_ece(p: Predictions, mesh: int = 200) -> Counted:
    c = p.confidence
    r = (c - p.correct.double())[:, None]
    return lambda w: unit_interval_smooth(spread_on_grid(c, w * r), spread_on_grid(c, w), mesh)


def _sece(p: Predictions, bandwidth: float = 0.01, self_term: bool = True, norm: str = "l1") -> Counted:
    c, a = p.confidence, p.correct.double()

    def measure(w: Tensor) -> Tensor:
        mass, hits, _ = grid_sums(c, a, bandwidth, w)
        # A sample that was not drawn has weight 0; the floor keeps 0/0 out of its place.
        gap = hits / mass.clamp(min=1e-12) - c
        w = w.t()
        return (w * gap.abs()).sum(1) / len(p) if norm == "l1" else ((w * gap.square()).sum(1) / len(p)).sqrt()

    return measure


def _auroc(p: Predictions) -> Counted:
    c, a, order = _sorted(p)
    return lambda w: pair_order(c, a, w[order])


def _aurc(p: Predictions) -> Counted:
    c, a, order = _sorted(p)
    return lambda w: risk_area(c, a, w[order])


def _sorted(p: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    c, order = p.confidence.sort()
    return c, p.correct[order], order


_FORMS: dict[str, Callable[..., Counted]] = {
    "ece": _binned(binning.gap_norm),
    "mce": _binned(binning.largest_gap),
    "adaptive_ece": _adaptive_ece,
    "classwise_ece": _classwise_ece,
    "debiased_ece": _binned(_debiased),
    "overconfidence": _binned(functools.partial(binning.one_sided_gap, over=True)),
    "underconfidence": _binned(functools.partial(binning.one_sided_gap, over=False)),
    "kce": _kce,
    "skce": _skce,
    "sece": _sece,
    "smooth_ece": _smooth_ece,
    "nll": _mean(lambda p: -p.log_likelihood),
    "brier": _mean(brier_terms),
    "accuracy": _mean(lambda p: p.correct),
    "error": _mean(lambda p: ~p.correct),
    "auroc": _auroc,
    "aurc": _aurc,
}
