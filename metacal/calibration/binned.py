"""The measures that sort samples into bins of confidence, or of every class's probability.

The bins are (e_{m-1}, e_m], M = `n_bins` of them with equal width on [0, 1] unless said otherwise; n_m, acc_m and
conf_m are a bin's count and its means of correctness a and confidence c.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from metacal.calibration import binning
from metacal.calibration.arguments import takes_arrays
from metacal.calibration.measure import Counted, Measure, Streamed, Weighted, sparse_product
from metacal.calibration.ranking import ascending, running_sums, tie_groups
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = [
    "BINNED",
    "adaptive_ece",
    "bin_sums",
    "classwise_ece",
    "debiased_ece",
    "ece",
    "mce",
    "overconfidence",
    "underconfidence",
]


@takes_arrays
def ece(p: Predictions, n_bins: int = 15, norm: str = "l1") -> float:
    """Expected calibration error Σ_m n_m/N |acc_m - conf_m|; with norm="l2" sqrt(Σ_m n_m/N (acc_m -
    conf_m)²).

    Guo et al. 2017 (arXiv 1706.04599). Raises InputError for an unknown norm or n_bins < 1.
    """
    _check_norm(norm)
    return float(binning.gap_norm(*_sums(binning.reliability_bins(p, n_bins)), norm))


@takes_arrays
def mce(p: Predictions, n_bins: int = 15) -> float:
    """Maximum calibration error: the largest |acc_m - conf_m| of a bin that is not empty."""
    return float(binning.largest_gap(*_sums(binning.reliability_bins(p, n_bins))))


@takes_arrays
def adaptive_ece(p: Predictions, n_bins: int = 15, norm: str = "l1") -> float:
    """As `ece` with bins of equal mass, whose edges are the m/M quantiles of the confidences.

    Equal confidences always share a bin, so the value does not depend on the order of the samples, and a
    bin may hold more than its share or none. Any N serves, also N < M.
    """
    _check_norm(norm)
    return float(binning.gap_norm(*_sums(binning.reliability_bins(p, n_bins, adaptive=True)), norm))


@takes_arrays
def classwise_ece(p: Predictions, n_bins: int = 15) -> float:
    """Mean over the K classes of Σ_m n_{m,k}/N |freq_{m,k} - conf_{m,k}|, the bins holding p_{i,k} of every
    sample.

    freq_{m,k} is the share of class k in the bin. A class that never occurs counts as well. The value
    shrinks as K grows, since nearly all of the p_{i,k} are then nearly 0: compare it only at equal K. Kull
    et al. 2019 (arXiv 1910.12656).
    """
    binning.check_bins(n_bins)
    mass, hits = binning.class_sums(p, n_bins)
    return float((hits - mass).abs().sum() / (len(p) * p.n_classes))


@takes_arrays
def debiased_ece(p: Predictions, n_bins: int = 15, squared: bool = False) -> float:
    """sqrt(max(0, Σ_m n_m/N [(acc_m - conf_m)² - acc_m (1 - acc_m) / (n_m - 1)])): the l2 error less its
    bias.

    A bin of one sample is not corrected. With `squared` the sum itself, which may be negative: its mean
    over test sets is the squared error of the binned classifier. Kumar et al. 2019 (arXiv 1909.10155).
    """
    square = float(binning.debiased_square(*_sums(binning.reliability_bins(p, n_bins))))
    return square if squared else math.sqrt(max(0.0, square))


@takes_arrays
def overconfidence(p: Predictions, n_bins: int = 15) -> float:
    """Σ n_m/N (conf_m - acc_m) over the bins with conf_m > acc_m. With `underconfidence` it adds up to
    `ece`.
    """
    return float(binning.one_sided_gap(*_sums(binning.reliability_bins(p, n_bins)), over=True))


@takes_arrays
def underconfidence(p: Predictions, n_bins: int = 15) -> float:
    """Σ n_m/N (acc_m - conf_m) over the bins with acc_m > conf_m. With `overconfidence` it adds up to
    `ece`.
    """
    return float(binning.one_sided_gap(*_sums(binning.reliability_bins(p, n_bins)), over=False))


# ------------------------------------------------------------------------------------------------ sums of a stream


def bin_sums(p: Predictions, n_bins: int) -> dict[str, Tensor]:
    """`count` and `correct`, int64, and `confidence_sum`, float64, of equal-width bins; all (M,)."""
    bins = binning.reliability_bins(p, n_bins)
    return {"count": bins.count, "correct": bins.correct, "confidence_sum": bins.confidence_sum}


def _class_sums(p: Predictions, n_bins: int) -> dict[str, Tensor]:
    """`class_mass`, float64, and `class_hits`, int64, of every bin and class; both (M, K)."""
    mass, hits = binning.class_sums(p, n_bins)
    return {"class_mass": mass, "class_hits": hits}


def _of_bins(formula: Callable[..., Tensor]) -> Streamed:
    """A formula on counts, correct and confidence sums (M,)."""
    return Streamed((bin_sums,), lambda s: float(formula(s["count"], s["correct"], s["confidence_sum"])))


def _classwise_value(sums: Mapping[str, Tensor]) -> float:
    gap = (sums["class_hits"] - sums["class_mass"]).abs().sum()
    return float(gap) / (int(sums["count"].sum()) * sums["class_hits"].shape[1])


# ------------------------------------------------------------------------------------------------ resamples at once


def _weighted_bins(p: Predictions, n_bins: int = 15) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Counts, correct and confidence sums (R, M) of equal-width bins."""
    c, order = ascending(p.confidence)
    per_sample = torch.stack([torch.ones_like(c), p.correct[order].double(), c])
    # On sorted samples a bin is a run of them, and its sums are one small product.
    ends = torch.bincount(binning.bin_index(c, n_bins), minlength=n_bins).cumsum(0).tolist()
    runs = [(m, low, high) for m, (low, high) in enumerate(zip([0, *ends], ends, strict=False)) if high > low]

    def sums(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w = w[order].t()
        count, correct, confidence_sum = of_bins = w.new_zeros(3, w.shape[0], n_bins)
        for m, low, high in runs:
            of_bins[:, :, m] = per_sample[:, low:high] @ w[:, low:high].t()
        return count, correct, confidence_sum

    return sums


def _weighted_adaptive_ece(p: Predictions, n_bins: int = 15, norm: str = "l1") -> Counted:
    c, order = ascending(p.confidence)
    first, _ = tie_groups(c)
    distinct = bool((first.diff() > 0).all())
    residual = p.correct[order].double() - c
    edges = torch.arange(n_bins, dtype=torch.float64) * len(p) / n_bins

    def measure(w: Tensor) -> Tensor:
        w = w[order].t()
        seen, gaps = running_sums(w), running_sums(w * residual)
        below = seen[:, :-1] if distinct else seen[:, first]
        # Sample i is in bin m where m <= n_bins · (those of smaller confidence) / N < m + 1, so a bin is a run of the
        # samples. Exact: a quotient of integers far below 2^53 does not round across an integer.
        ends = torch.searchsorted(below.contiguous(), edges.repeat(len(w), 1))
        ends = torch.cat([ends, torch.full_like(ends[:, :1], len(p))], 1)
        count, gap = (sums.gather(1, ends).diff(dim=1) for sums in (seen, gaps))
        return binning.gap_norm(count, gap, torch.zeros_like(gap), norm)

    return measure


def _weighted_classwise_ece(p: Predictions, n_bins: int = 15) -> Counted:
    k = p.n_classes
    samples, cells, values, entries_above = [], [], [], []
    for rows, probs in p.chunks():
        labels = p.labels[rows]
        here = torch.arange(rows.start, rows.start + len(labels))
        label_bin = binning.bin_index(probs.gather(1, labels[:, None]).squeeze(1), n_bins)
        row, column, above = binning.above_first_bin(probs, n_bins)
        # hits - mass: the label, and the entries above the first bin.
        samples += [here, rows.start + row]
        cells += [label_bin * k + labels, binning.bin_index(above, n_bins) * k + column]
        values += [torch.ones_like(here, dtype=torch.float64), -above.double()]
        entries_above.append((row, column))
    sums = sparse_product(torch.cat(cells), torch.cat(samples), torch.cat(values), (n_bins * k, len(p)))

    def first_bin() -> Iterator[tuple[slice, Tensor]]:
        """The probabilities with 0 in place of those above the first bin."""
        for (rows, probs), above in zip(p.chunks(), entries_above, strict=True):
            yield rows, probs.double().index_put(above, torch.zeros((), dtype=torch.float64))

    # Probabilities of few samples and classes are made once, others again for every call.
    few = list(first_bin()) if len(p) * k <= 1 << 22 else None

    def measure(w: Tensor) -> Tensor:
        residual = sums(w)
        for rows, probs in few or first_bin():
            residual[:k] -= probs.t() @ w[rows]
        return residual.abs_().sum(0) / (len(p) * k)

    return measure


def _debiased(count: Tensor, correct: Tensor, confidence_sum: Tensor, squared: bool = False) -> Tensor:
    square = binning.debiased_square(count, correct, confidence_sum)
    return square if squared else square.clamp(min=0).sqrt()


# ------------------------------------------------------------------------------------------------ the records


def _record(function: Callable[..., float], title: str, formula: Callable[..., Tensor], **keys: Any) -> Measure:
    """Of a measure that is a formula on the sums of equal-width bins."""
    shown: dict[str, Any] = {"digits": 2, "percent": True, "best": "min"}
    return Measure(
        function, title, **shown, weighted=Weighted(_weighted_bins, formula), streamed=_of_bins(formula), **keys
    )


BINNED: dict[str, Measure] = {
    "ece": _record(ece, "ECE", binning.gap_norm, watched=True, compared=True),
    "adaptive_ece": Measure(
        adaptive_ece,
        "Adaptive ECE",
        2,
        percent=True,
        best="min",
        weighted=_weighted_adaptive_ece,
        watched=True,
        compared=True,
    ),
    "classwise_ece": Measure(
        classwise_ece,
        "Class-wise ECE",
        3,
        percent=True,
        best="min",
        weighted=_weighted_classwise_ece,
        streamed=Streamed((bin_sums, _class_sums), _classwise_value),
        watched=True,
        compared=True,
    ),
    "mce": _record(mce, "MCE", binning.largest_gap),
    "debiased_ece": _record(debiased_ece, "Debiased ECE", _debiased),
    "overconfidence": _record(
        overconfidence, "Overconfidence", functools.partial(binning.one_sided_gap, over=True), watched=True
    ),
    "underconfidence": _record(
        underconfidence, "Underconfidence", functools.partial(binning.one_sided_gap, over=False), watched=True
    ),
}


def _check_norm(norm: str) -> None:
    require(norm in ("l1", "l2"), f"norm must be 'l1' or 'l2', got {norm!r}")


def _sums(bins: binning.Bins) -> tuple[Tensor, Tensor, Tensor]:
    return bins.count, bins.correct, bins.confidence_sum
