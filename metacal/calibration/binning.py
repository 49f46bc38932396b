"""Bins: which bin a confidence falls into, the sums per bin, and the formulas on them.

Equal-width bins are (e_{m-1}, e_m] with e_m = m/M in float64, m = 1..M; 0 goes to the first bin, 1 to the
last. Equal-mass bins are the same intervals with e_m the empirical quantiles of the confidences.

The formulas take arrays (..., M), so that one call serves one data set or a thousand resamples of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["Bins", "bin_edges", "bin_index", "reliability_bins", "wilson_interval"]

_BLOCK = 1 << 14  # confidences taken at a time, so that what is made of them stays in the processor's cache


@dataclass(frozen=True, eq=False)
class Bins:
    """Sums over the bins of confidence, all of shape (M,) and on the CPU.

    Attributes:
        lower, upper: the edges, float64; bin m holds lower < c <= upper. Of an empty equal-mass bin both
            are equal.
        count: the number of samples n_m, int64.
        correct: the number of correct ones, int64.
        confidence_sum: the sum of confidences, float64.
    """

    lower: Tensor
    upper: Tensor
    count: Tensor
    correct: Tensor
    confidence_sum: Tensor

    @property
    def accuracy(self) -> Tensor:
        """acc_m, float64 (M,); NaN in an empty bin."""
        return self.correct.double() / self.count

    @property
    def confidence(self) -> Tensor:
        """conf_m, float64 (M,); NaN in an empty bin."""
        return self.confidence_sum / self.count


def bin_edges(n_bins: int, device: torch.device | str = "cpu") -> Tensor:
    """The M + 1 edges m/M of equal-width bins on [0, 1], float64, each correctly rounded."""
    check_bins(n_bins)
    return torch.arange(n_bins + 1, dtype=torch.float64, device=device) / n_bins


def check_bins(n_bins: int) -> None:
    valid = isinstance(n_bins, int | np.integer) and not isinstance(n_bins, bool) and 1 <= n_bins <= 1_000_000
    require(bool(valid), f"n_bins must be an integer in 1..1000000, got {n_bins!r}")


def bin_index(values: Tensor, n_bins: int) -> Tensor:
    """The 0-based equal-width bin of each value in [0, 1], int64, as exact comparison with m/M gives it.

    Let i be the integer part of the rounded v M. Rounding is monotone, so v <= e_{i+1} and v > e_{i-1}, and whether
    v <= e_i says which of two bins it is.
    """
    lower = bin_edges(n_bins, values.device)
    lower[0] = -1.0  # the first bin holds 0 as well
    if values.device.type != "cpu":
        values = values.double()
        index = (values * n_bins).long().clamp_(max=n_bins)
        return index.sub_((values <= lower[index]).long()).clamp_(max=n_bins - 1)
    wide = values.numpy().astype(np.float64, copy=False)
    whole = (wide * n_bins).astype(np.int64)
    whole -= wide <= lower.numpy().take(whole, mode="clip")
    return torch.from_numpy(np.minimum(whole, n_bins - 1, out=whole))  # rounded rows may have a value above 1


def mass_edges(confidence: Tensor, n_bins: int) -> Tensor:
    """Upper edges of equal-mass bins, float64 (M,): edge m is the ceil(mN/M)-th smallest confidence.

    A value lies in the first bin whose edge it does not exceed. So equal values share a bin, whatever their order.
    """
    n = confidence.shape[0]
    ranks = (torch.arange(1, n_bins + 1) * n + n_bins - 1) // n_bins - 1
    if n_bins <= 64:  # the few order statistics without a sort
        return torch.from_numpy(np.partition(confidence.numpy(), ranks.unique().numpy())[ranks.numpy()])
    return confidence.sort().values[ranks]


def reliability_bins(p: Predictions, n_bins: int = 15, adaptive: bool = False) -> Bins:
    """Counts and sums per bin of confidence: what a reliability diagram draws and what `ece` reads.

    With `adaptive`, bins of equal mass, in which equal confidences always share a bin.
    """
    check_bins(n_bins)
    confidence, correct = p.confidence.cpu(), p.correct.cpu()
    if adaptive:
        upper = mass_edges(confidence, n_bins)
        lower = torch.cat([upper.new_zeros(1), upper[:-1]])
    else:
        edges = bin_edges(n_bins)
        lower, upper = edges[:-1], edges[1:]
    sums, counts = np.zeros(n_bins), np.zeros(2 * n_bins, np.int64)
    for c, a in zip(confidence.split(_BLOCK), correct.split(_BLOCK), strict=True):
        index = (torch.bucketize(c, upper) if adaptive else bin_index(c, n_bins)).numpy()
        sums += np.bincount(index, weights=c.numpy(), minlength=n_bins)
        # One pass for both counts: the wrong ones first, the correct ones behind them.
        counts += np.bincount(index + n_bins * a.numpy(), minlength=2 * n_bins)
    wrong, right = torch.from_numpy(counts).view(2, n_bins)
    return Bins(lower, upper, wrong + right, right, torch.from_numpy(sums))


def class_sums(p: Predictions, n_bins: int) -> tuple[Tensor, Tensor]:
    """For every class k and bin m of p_{.,k}: the sum of p_{i,k}, float64, and of 1[y_i = k], int64; both (M, K).

    Nearly all of a row's entries lie in the first bin, and at most M - 1 can lie above it. So only those are binned
    one by one; the first bin is the column's sum less theirs. Memory: one chunk of rows. Computed where the
    predictions are, returned on the CPU.
    """
    k = p.n_classes
    mass = torch.zeros(n_bins * k, dtype=torch.float64, device=p.device)
    total = torch.zeros(k, dtype=torch.float64, device=p.device)
    hits = torch.zeros(n_bins * k, dtype=torch.int64, device=p.device)
    for rows, probs in p.chunks():
        labels = p.labels[rows]
        label_bin = bin_index(probs.gather(1, labels[:, None]).squeeze(1), n_bins)
        hits += torch.bincount(label_bin * k + labels, minlength=n_bins * k)
        total += probs.sum(0, dtype=torch.float64)
        _, column, values = above_first_bin(probs, n_bins)
        cell = bin_index(values, n_bins).mul_(k).add_(column)
        if p.device.type == "cpu":
            mass += torch.bincount(cell, weights=values.double(), minlength=n_bins * k)
        else:  # this one has a deterministic form on a GPU
            mass.index_add_(0, cell, values.double())
    mass = mass.view(n_bins, k)
    mass[0] += total - mass.sum(0)
    return mass.cpu(), hits.view(n_bins, k).cpu()


def above_first_bin(probs: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of the entries of `probs` (n, K) above 1/M."""
    edge = 1 / n_bins
    if probs.dtype == torch.float32:
        # torch rounds a scalar to the tensor's type; rounded down, `>` decides as it would in float64.
        rounded = np.float32(edge)
        edge = float(rounded if rounded <= edge else np.nextafter(rounded, np.float32(0)))
    n, k = probs.shape
    if probs.device.type != "cpu":
        row, column = (probs > edge).nonzero(as_tuple=True)
        return row, column, probs[row, column]
    # numpy finds and takes sparse entries several times faster than torch.
    if k > 64:
        entries = probs.contiguous().numpy().reshape(-1)
        flat = np.flatnonzero(entries > entries.dtype.type(edge))
        rows, columns = np.divmod(flat, k)
    else:
        # Not so sparse: column by column, where neighbours in memory share a column and nothing is divided.
        transposed = np.ascontiguousarray(probs.numpy().T)
        above = transposed > transposed.dtype.type(edge)
        entries, flat = transposed.reshape(-1), np.flatnonzero(above)
        columns = np.repeat(np.arange(k), np.count_nonzero(above, axis=1))
        rows = flat - columns * n
    return torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(entries[flat])


def gap_norm(count: Tensor, correct: Tensor, confidence_sum: Tensor, norm: str = "l1") -> Tensor:
    """Σ_m n_m/N |acc_m - conf_m|, or with "l2" sqrt(Σ_m n_m/N (acc_m - conf_m)²); arguments (..., M)."""
    gap, n = (correct - confidence_sum).abs(), count.sum(-1)
    if norm == "l1":
        return gap.sum(-1) / n
    return ((gap.square() / count.clamp(min=1)).sum(-1) / n).sqrt()


def largest_gap(count: Tensor, correct: Tensor, confidence_sum: Tensor) -> Tensor:
    """max_m |acc_m - conf_m| over bins that are not empty; arguments (..., M)."""
    return ((correct - confidence_sum).abs() / count.clamp(min=1)).amax(-1)


def one_sided_gap(count: Tensor, correct: Tensor, confidence_sum: Tensor, over: bool) -> Tensor:
    """Σ_m n_m/N (conf_m - acc_m) over the bins where this is positive, or its mirror image; arguments (...,
    M).
    """
    gap = confidence_sum - correct if over else correct - confidence_sum
    return gap.clamp(min=0).sum(-1) / count.sum(-1)


def debiased_square(count: Tensor, correct: Tensor, confidence_sum: Tensor) -> Tensor:
    """Σ_m n_m/N [(acc_m - conf_m)² - acc_m (1 - acc_m) / (n_m - 1)], bins of one sample uncorrected; may be
    negative.
    """
    count = count.double()
    safe = count.clamp(min=1)
    accuracy = correct / safe
    square = ((correct - confidence_sum) / safe).square()
    variance = torch.where(count > 1, accuracy * (1 - accuracy) / (count - 1).clamp(min=1), 0.0)
    return (count * (square - variance)).sum(-1) / count.sum(-1)


def wilson_interval(correct: Tensor, count: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Wilson's score interval of a share correct/count, elementwise; NaN where count is 0."""
    require(0 < level < 1, f"level must lie in (0, 1), got {level}")
    z = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64))
    n = count.double()
    share = correct.double() / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)).sqrt()
    return (centre - half).clamp(min=0), (centre + half).clamp(max=1)
