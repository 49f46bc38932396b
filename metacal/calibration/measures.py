"""Calibration measures for reporting: each takes a `Predictions`, or probabilities (N, K) and labels (N,), and
returns a float.

    ece(p)                      # p = Predictions.from_logits(logits, labels), or from_probabilities(probs, labels)
    ece(probs, labels)          # two arrays are probabilities and labels, never logits

Notation: N samples, K classes, probabilities p (N, K), labels y, confidence c = max_k p_k, correctness a =
    1[argmax p = y]. The bins are (e_{m-1}, e_m], M = `n_bins` of them with equal width on [0, 1] unless
    said otherwise; n_m, acc_m and conf_m are a bin's count and its means of a and c. Values are fractions
    in [0, 1] unless said otherwise; sums are float64 and counts integers, whatever the type of the input.
    docs/measures.md says which measure to choose and how each misleads.

`MEASURES` maps the names to the functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from metacal.calibration.arguments import takes_arrays
from metacal.calibration.binning import (
    Bins,
    check_bins,
    class_sums,
    debiased_square,
    gap_norm,
    largest_gap,
    one_sided_gap,
    reliability_bins,
)
from metacal.calibration.kernel import laplace_pairs, smooth_gap, spread_on_grid, unit_interval_smooth
from metacal.calibration.ranking import pair_order, risk_area
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = [
    "MEASURES",
    "accuracy",
    "adaptive_ece",
    "aurc",
    "auroc",
    "brier",
    "classwise_ece",
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
]


@takes_arrays
def ece(p: Predictions, n_bins: int = 15, norm: str = "l1") -> float:
    """Expected calibration error Σ_m n_m/N |acc_m - conf_m|; with norm="l2" sqrt(Σ_m n_m/N (acc_m -
    conf_m)²).

    Guo et al. 2017 (arXiv 1706.04599). Raises InputError for an unknown norm or n_bins < 1.
    """
    _check_norm(norm)
    return float(gap_norm(*_sums(reliability_bins(p, n_bins)), norm))


@takes_arrays
def mce(p: Predictions, n_bins: int = 15) -> float:
    """Maximum calibration error: the largest |acc_m - conf_m| of a bin that is not empty."""
    return float(largest_gap(*_sums(reliability_bins(p, n_bins))))


@takes_arrays
def adaptive_ece(p: Predictions, n_bins: int = 15, norm: str = "l1") -> float:
    """As `ece` with bins of equal mass, whose edges are the m/M quantiles of the confidences.

    Equal confidences always share a bin, so the value does not depend on the order of the samples, and a
    bin may hold more than its share or none. Any N serves, also N < M.
    """
    _check_norm(norm)
    return float(gap_norm(*_sums(reliability_bins(p, n_bins, adaptive=True)), norm))


@takes_arrays
def classwise_ece(p: Predictions, n_bins: int = 15) -> float:
    """Mean over the K classes of Σ_m n_{m,k}/N |freq_{m,k} - conf_{m,k}|, the bins holding p_{i,k} of every
    sample.

    freq_{m,k} is the share of class k in the bin. A class that never occurs counts as well. The value
    shrinks as K grows, since nearly all of the p_{i,k} are then nearly 0: compare it only at equal K. Kull
    et al. 2019 (arXiv 1910.12656).
    """
    check_bins(n_bins)
    mass, hits = class_sums(p, n_bins)
    return float((hits - mass).abs().sum() / (len(p) * p.n_classes))


@takes_arrays
def debiased_ece(p: Predictions, n_bins: int = 15, squared: bool = False) -> float:
    """sqrt(max(0, Σ_m n_m/N [(acc_m - conf_m)² - acc_m (1 - acc_m) / (n_m - 1)])): the l2 error less its
    bias.

    A bin of one sample is not corrected. With `squared` the sum itself, which may be negative: its mean
    over test sets is the squared error of the binned classifier. Kumar et al. 2019 (arXiv 1909.10155).
    """
    square = float(debiased_square(*_sums(reliability_bins(p, n_bins))))
    return square if squared else math.sqrt(max(0.0, square))


@takes_arrays
def overconfidence(p: Predictions, n_bins: int = 15) -> float:
    """Σ n_m/N (conf_m - acc_m) over the bins with conf_m > acc_m. With `underconfidence` it adds up to
    `ece`.
    """
    return float(one_sided_gap(*_sums(reliability_bins(p, n_bins)), over=True))


@takes_arrays
def underconfidence(p: Predictions, n_bins: int = 15) -> float:
    """Σ n_m/N (acc_m - conf_m) over the bins with acc_m > conf_m. With `overconfidence` it adds up to
    `ece`.
    """
    return float(one_sided_gap(*_sums(reliability_bins(p, n_bins)), over=False))


@takes_arrays
def kce(p: Predictions) -> float:
    """Kernel calibration error sqrt(1/N² Σ_ij (c_i - a_i)(c_j - a_j) exp(-|c_i - c_j| / 0.4)), over all i,
    j.

    Exact, in O(N log N). Biased upwards by about mean (c - a)² / N under the root; `skce` is not.
    Kumar et al. 2018 (MMCE).
    """
    c, a = _sorted(p)
    own, pairs = laplace_pairs(c, c - a.double())
    return math.sqrt(max(0.0, float(own + 2 * pairs))) / len(p)


@takes_arrays
def skce(p: Predictions) -> float:
    """Unbiased estimate of the *squared* kernel calibration error: the mean over i ≠ j of the summand of
    `kce`.

    May be negative; 0 for a single sample, which has no pair. Widmann et al. 2019 (arXiv 1910.11385).
    """
    if len(p) == 1:
        return 0.0
    c, a = _sorted(p)
    _, pairs = laplace_pairs(c, c - a.double())
    return float(2 * pairs) / (len(p) * (len(p) - 1))


@takes_arrays
def smooth_ece(p: Predictions, mesh: int = 200) -> float:
    """Smooth calibration error smECE: smECE_σ at the bandwidth where σ = smECE_σ, which is

        smECE_σ = ∫_0^1 |1/N Σ_i (c_i - a_i) G_σ(t, c_i)| dt,   G_σ the Gaussian reflected at 0 and 1.

    As in the authors' code, σ is found to 1/1024 from above, and the integral is a sum over max(10/σ,
    `mesh`) points divided by the density's, so that values compare with published ones. With 200 points it
    may be 3e-4 off the integral; a larger mesh removes that. Błasiok & Nakkiran 2023 (arXiv 2309.12236).
    """
    require(isinstance(mesh, int) and mesh >= 2, f"mesh must be an integer >= 2, got {mesh!r}")
    c, a = p.confidence.cpu(), p.correct.cpu()
    residual = spread_on_grid(c, (c - a.double())[:, None])
    return float(unit_interval_smooth(residual, spread_on_grid(c, torch.ones_like(c)[:, None]), mesh))


@takes_arrays
def sece(p: Predictions, bandwidth: float = 0.01, self_term: bool = True, norm: str = "l1") -> float:
    """SECE 1/N Σ_i |ã_i - c_i| with ã_i = Σ_j K(c_i - c_j) a_j / Σ_j K(c_i - c_j), K(u) = exp(-u²/(2 h²));
    h = `bandwidth`.

    norm="l2": sqrt(1/N Σ_i (ã_i - c_i)²). Without `self_term` j = i is left out. The hard value of the
    surrogate of the same name: for reporting, at any N. Strongly biased upwards at small N h. Direct sums
    up to N = 4,096, beyond that on a grid, in O(N log N) and within 1e-4. arXiv 2303.15057.
    """
    require(bandwidth > 0 and math.isfinite(bandwidth), f"bandwidth must be > 0, got {bandwidth}")
    _check_norm(norm)
    c, a = _sorted(p)
    gap = smooth_gap(c, a.double(), bandwidth, self_term)
    return float(gap.abs().mean() if norm == "l1" else gap.square().mean().sqrt())


@takes_arrays
def nll(p: Predictions) -> float:
    """Negative log-likelihood, mean -log p_y in nats, by log-softmax if there are logits; inf where some
    p_y is 0.
    """
    return float(-p.log_likelihood.mean()) + 0.0  # + 0.0: a perfect one scores 0, not -0


@takes_arrays
def brier(p: Predictions) -> float:
    """Brier score, mean Σ_k (p_k - 1[k = y])², in [0, 2]."""
    return float(brier_terms(p).mean())


def brier_terms(p: Predictions) -> torch.Tensor:
    """Σ_k (p_k - 1[k = y])² of each sample, float64 (N,)."""
    out = torch.empty_like(p.confidence)
    for rows, probs in p.chunks():
        # p_y is taken out of the sum of squares and put back as (1 - p_y)²; each part is small when p is
        # near one-hot.
        rest = probs.double().scatter(1, p.labels[rows, None], 0.0)
        p_y = probs.gather(1, p.labels[rows, None]).squeeze(1).double()
        out[rows] = rest.square_().sum(1) + (1 - p_y).square_()
    return out


@takes_arrays
def accuracy(p: Predictions) -> float:
    """The share of correct predictions, mean a."""
    return int(p.correct.sum()) / len(p)


@takes_arrays
def error(p: Predictions) -> float:
    """The share of wrong predictions, 1 - mean a."""
    return (len(p) - int(p.correct.sum())) / len(p)


@takes_arrays
def auroc(p: Predictions) -> float:
    """P(confidence of a correct prediction > that of a wrong one), ties counting half; 0.5 if there is no
    such pair.

    It says how well confidence ranks, not whether it is true: any increasing map of c leaves it as it is.
    """
    return float(pair_order(*_sorted(p)))


@takes_arrays
def aurc(p: Predictions) -> float:
    """Area under the risk-coverage curve, 1/N Σ_n (error rate among the n most confident); lower is better.

    Equal confidences count as ordered at random (the mean over their orders). Geifman & El-Yaniv 2019
    (arXiv 1805.08206).
    """
    return float(risk_area(*_sorted(p)))


MEASURES: dict[str, Callable[..., float]] = {
    f.__name__: f
    for f in (
        ece,
        mce,
        adaptive_ece,
        classwise_ece,
        debiased_ece,
        overconfidence,
        underconfidence,
        kce,
        skce,
        sece,
        smooth_ece,
        nll,
        brier,
        accuracy,
        error,
        auroc,
        aurc,
    )
}


def _check_norm(norm: str) -> None:
    require(norm in ("l1", "l2"), f"norm must be 'l1' or 'l2', got {norm!r}")


def _sums(bins: Bins) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return bins.count, bins.correct, bins.confidence_sum


def _sorted(p: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences in ascending order, float64 (N,), and the correctness of each, bool (N,), on the CPU."""
    confidence, order = p.confidence.cpu().sort()
    return confidence, p.correct.cpu()[order]
