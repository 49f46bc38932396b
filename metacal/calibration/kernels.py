"""The measures that compare each confidence with those near it: kernel calibration error, SECE and smooth ECE."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metacal.calibration.arguments import takes_arrays
from metacal.calibration.kernel import (
    gaussian_product,
    grid_product,
    laplace_pairs,
    smooth_gap,
    spread_on_grid,
    unit_interval_smooth,
)
from metacal.calibration.measure import Counted, Measure, Weighted
from metacal.calibration.ranking import ascending
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["KERNELS", "kce", "sece", "skce", "smooth_ece"]


@takes_arrays
def kce(p: Predictions) -> float:
    """Kernel calibration error sqrt(1/N² Σ_ij (c_i - a_i)(c_j - a_j) exp(-|c_i - c_j| / 0.4)), over all i,
    j.

    Exact, in O(N log N). Biased upwards by about mean (c - a)² / N under the root; `skce` is not.
    Kumar et al. 2018 (MMCE).
    """
    c, a, _ = _sorted(p.to("cpu"))
    squares, pairs = laplace_pairs(c, c - a)
    return math.sqrt(max(0.0, float(squares + 2 * pairs))) / len(p)


@takes_arrays
def skce(p: Predictions) -> float:
    """Unbiased estimate of the *squared* kernel calibration error: the mean over i ≠ j of the summand of
    `kce`.

    May be negative; 0 for a single sample, which has no pair. Widmann et al. 2019 (arXiv 1910.11385).
    """
    if len(p) == 1:
        return 0.0
    c, a, _ = _sorted(p.to("cpu"))
    _, pairs = laplace_pairs(c, c - a)
    return float(2 * pairs) / (len(p) * (len(p) - 1))


@takes_arrays
def smooth_ece(p: Predictions, mesh: int = 200) -> float:
    """Smooth calibration error smECE: smECE_σ at the bandwidth where σ = smECE_σ.

        smECE_σ = ∫_0^1 |1/N Σ_i (c_i - a_i) G_σ(t, c_i)| dt,   G_σ the Gaussian reflected at 0 and 1.

    As in the authors' code, σ is found to 1/1024 from above, and the integral is a sum over max(10/σ,
    `mesh`) points divided by the density's, so that values compare with published ones. With 200 points it
    may be 3e-4 off the integral; a larger mesh removes that. Błasiok & Nakkiran 2023 (arXiv 2309.12236).
    """
    require(isinstance(mesh, int) and mesh >= 2, f"mesh must be an integer >= 2, got {mesh!r}")
    c, a = p.confidence.cpu(), p.correct.cpu()
    residual = spread_on_grid(c, c - a.double())
    return float(unit_interval_smooth(residual, spread_on_grid(c, torch.ones_like(c)), mesh))


@takes_arrays
def sece(p: Predictions, bandwidth: float = 0.01, self_term: bool = True, norm: str = "l1") -> float:
    """SECE 1/N Σ_i |ã_i - c_i| with ã_i = Σ_j K(c_i - c_j) a_j / Σ_j K(c_i - c_j), K(u) = exp(-u²/(2 h²));
    h = `bandwidth`.

    norm="l2": sqrt(1/N Σ_i (ã_i - c_i)²). Without `self_term` j = i is left out. The hard value of the
    surrogate of the same name: for reporting, at any N. Strongly biased upwards at small N h. Direct sums
    up to N = 4,096, beyond that on a grid, in O(N log N) and within 1e-4. arXiv 2303.15057.
    """
    require(bandwidth > 0 and math.isfinite(bandwidth), f"bandwidth must be > 0, got {bandwidth}")
    require(norm in ("l1", "l2"), f"norm must be 'l1' or 'l2', got {norm!r}")
    c, a, _ = _sorted(p.to("cpu"))
    gap = smooth_gap(c, a, bandwidth, self_term)
    return float(gap.abs().mean() if norm == "l1" else gap.square().mean().sqrt())


# ------------------------------------------------------------------------------------------------ resamples at once


def _weighted_pairs(p: Predictions) -> Callable[[Tensor], tuple[int, Tensor, Tensor, Tensor]]:
    c, a, order = _sorted(p)
    r = c - a

    def sums(w: Tensor) -> tuple[int, Tensor, Tensor, Tensor]:
        w = w[order]
        # Copies of one sample are pairs as well, at distance 0.
        return len(p), r.square() @ w.square(), *laplace_pairs(c, r, w)

    return sums


def _kce_of(n: int, copies: Tensor, squares: Tensor, pairs: Tensor) -> Tensor:
    return (copies + 2 * pairs).clamp(min=0).sqrt() / n


def _skce_of(n: int, copies: Tensor, squares: Tensor, pairs: Tensor) -> Tensor:
    return (copies - squares + 2 * pairs) / max(1, n * (n - 1))


def _weighted_smooth_ece(p: Predictions, mesh: int = 200) -> Counted:
    near = smooth_ece(p, mesh)
    residual = p.confidence - p.correct.double()
    on_grid = grid_product(p.confidence, torch.stack([residual, torch.ones_like(residual)]))

    def measure(w: Tensor) -> Tensor:
        residual, mass = on_grid(w)
        return unit_interval_smooth(residual, mass, mesh, near)

    return measure


def _weighted_sece(p: Predictions, bandwidth: float = 0.01, self_term: bool = True, norm: str = "l1") -> Counted | None:
    if not self_term or bandwidth < 1e-3:  # each sample's own neighbours, and too fine a grid
        return None
    c, sums = p.confidence, gaussian_product(p.confidence, p.correct.double(), bandwidth)

    def measure(w: Tensor) -> Tensor:
        w = w.contiguous()
        mass, hits = sums(w)
        # A sample that was not drawn has weight 0; the floor keeps 0/0 out of its place.
        gap = hits.div_(mass.clamp_(min=1e-12)).sub_(c[:, None])
        return (w * gap.abs_()).sum(0) / len(p) if norm == "l1" else ((w * gap.square_()).sum(0) / len(p)).sqrt()

    return measure


def _sorted(p: Predictions) -> tuple[Tensor, Tensor, Any]:
    """Confidences in ascending order and the correctness of each, float64 (N,), and the order as an index."""
    c, order = ascending(p.confidence)
    return c, p.correct[order].double(), order


KERNELS: dict[str, Measure] = {
    "smooth_ece": Measure(
        smooth_ece, "Smooth ECE", 2, percent=True, best="min", weighted=_weighted_smooth_ece, compared=True
    ),
    "sece": Measure(sece, "SECE", 2, percent=True, best="min", weighted=_weighted_sece),
    "kce": Measure(kce, "KCE", 4, best="min", weighted=Weighted(_weighted_pairs, _kce_of), compared=True),
    "skce": Measure(skce, "SKCE", 5, weighted=Weighted(_weighted_pairs, _skce_of)),
}
