"""Sums over pairs of samples without the pairs: kernel calibration error, SECE and smooth ECE.

All on the CPU, since the last digits of a sum on a GPU depend on the order of its threads. Confidences are sorted
float64 (N,) throughout; weights (N, R), where they are taken, count each sample in R resamples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from metacal.calibration.measure import row_dots, sparse_product

__all__ = [
    "gaussian_product",
    "grid_product",
    "grid_sums",
    "laplace_pairs",
    "smooth_gap",
    "spread_on_grid",
    "unit_interval_smooth",
]

LAPLACE_SCALE = 0.4  # the kernel exp(-|u - v| / 0.4) of Kumar et al. (2018)
GRID = 2048  # cells of [0, 1] on which smooth ECE lives; its smallest bandwidth, 2^-10, spans two
_STEPS = 1024  # of [0, 1], among which smooth ECE looks for its bandwidth
_EXACT_BELOW = 4096  # samples up to which SECE is summed directly
_WIDE = 0.01  # bandwidth of smooth ECE from which on its cosines are summed one by one, some 290 of them at most
_WAVES = 2.9  # over a Gaussian's bandwidth, the number of its waves on [0, 1] that are above 1e-18 of the first
_REACH = 9.0  # bandwidths after which a Gaussian is nothing beside 1 in float64


def laplace_pairs(c: Tensor, r: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Σ_i w_i r_i² and Σ_{i>j} w_i w_j r_i r_j k(c_i, c_j), k(u, v) = exp(-|u - v| / 0.4), in O(N); float64
    (R,).

    On sorted c the kernel splits into exp(-c_i / 0.4) exp(c_j / 0.4), so the sum over j is a running one.
    Both factors lie in exp(±1.25) once c is centred: nothing over- or underflows. r (N,) are the residuals
    c - a; weights (N, R), by default R = 1 and all ones.
    """
    x = (c - 0.5) / LAPLACE_SCALE
    w = torch.ones_like(c)[None] if weights is None else weights.t()
    grown, fallen = w * (r * x.exp()), w * (r * (-x).exp())
    # The running sum includes the sample itself, which is no pair.
    selves = row_dots(grown, fallen)
    return w @ r.square(), row_dots(fallen, grown.cumsum(1)) - selves


def smooth_gap(c: Tensor, a: Tensor, bandwidth: float, self_term: bool) -> Tensor:
    """ã_i - c_i (N,) with ã_i = Σ_j K(c_i - c_j) a_j / Σ_j K(c_i - c_j), K(u) = exp(-u²/(2 h²)).

    Without the self term j = i is left out, and a sample with no neighbour in reach takes its nearest ones'
    correctness (the limit of the quotient); of a single sample the gap is then 0. Up to 4,096 samples, or h
    < 1e-4, the sums are direct, over the neighbours within reach; beyond, both are convolutions on a grid
    of h/128, within 1e-4.
    """
    n = c.shape[0]
    if n == 1 and not self_term:
        return torch.zeros_like(c)
    everyone = torch.arange(n)
    if n <= _EXACT_BELOW or bandwidth < 1e-4:
        return _near_mean(c, a, everyone, bandwidth, self_term) - c
    mass, hits, selves = grid_sums(c, a, bandwidth)
    if self_term:
        return hits[0] / mass[0] - c
    others = mass[0] - selves
    # The difference has lost its digits where next to nothing is left: at most one sample in some 3 h of
    # the interval.
    lonely = others < 1e-3
    gap = (hits[0] - selves * a) / others - c
    if bool(lonely.any()):
        gap[lonely] = _near_mean(c, a, everyone[lonely], bandwidth, self_term) - c[lonely]
    return gap


def grid_sums(c: Tensor, a: Tensor, bandwidth: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j K(c_i - c_j) and Σ_j K(c_i - c_j) a_j, float64 (1, N), and each sample's own share of these (N,).

    By convolution on a grid of h/128, between whose points all is linear.
    """
    cells = math.ceil(128 / min(bandwidth, 1.0))
    low, fraction = _cell(c, cells)
    kernel, spectrum, size = _gaussian_spectrum(bandwidth, cells, cells + 1)

    def convolved(values: Tensor) -> Tensor:
        on_grid = torch.fft.irfft(torch.fft.rfft(spread_on_grid(c, values, cells), n=size) * spectrum, n=size)
        return on_grid[:, low] * (1 - fraction) + on_grid[:, low + 1] * fraction

    w = torch.ones_like(c)
    selves = fraction.square() + (1 - fraction).square() + 2 * fraction * (1 - fraction) * kernel[1]
    return convolved(w), convolved(w * a), selves


def _gaussian_spectrum(bandwidth: float, cells: int, points: int) -> tuple[Tensor, Tensor, int]:
    """The Gaussian at 0, 1/cells, … as far as it reaches, its spectrum, and the number of points that this is for: at
    least `points` and that reach, so that a circular convolution is none.
    """
    reach = min(points, math.ceil(_REACH * bandwidth * cells))
    offset = torch.arange(reach + 1, dtype=torch.float64)
    kernel = (-(offset / (cells * bandwidth)).square() / 2).exp()
    size = 1 << (points + reach).bit_length()
    around = torch.zeros(size, dtype=torch.float64)
    around[: reach + 1] = kernel
    around[-reach:] = kernel[1:].flip(0)
    return kernel, torch.fft.rfft(around), size


def gaussian_product(c: Tensor, a: Tensor, bandwidth: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """w (N, R) -> Σ_j w_j K(c_i - c_j) and Σ_j w_j a_j K(c_i - c_j), float64 (N, R), within 1e-10 of the sum of w_j.

    On a grid of h/16, where a Gaussian is so smooth that a polynomial through its nearest 8 points is within 4e-11 of
    it: each sample is shared among 8 points by the weights that interpolate, and its sums are interpolated by the same.
    """
    cells = math.ceil(16 / min(bandwidth, 1.0))
    low, fraction = _cell(c, cells)
    nodes = torch.arange(-3, 5, dtype=torch.float64)  # of the 8 points, from the one below the sample
    away = fraction[:, None] - nodes
    lagrange = torch.stack(
        [
            torch.cat([away[:, :j], away[:, j + 1 :]], 1).prod(1)
            / torch.cat([nodes[j] - nodes[:j], nodes[j] - nodes[j + 1 :]]).prod()
            for j in range(8)
        ],
        1,
    ).flatten()
    n, points = len(c), cells + 8
    point = (low[:, None] + torch.arange(8)).flatten()  # the grid begins 3 points below 0
    sample = torch.arange(n).repeat_interleave(8)
    hit = a[sample] > 0
    spread = sparse_product(
        torch.cat([point, points + point[hit]]),
        torch.cat([sample, sample[hit]]),
        torch.cat([lagrange, lagrange[hit]]),
        (2 * points, n),
    )
    interpolated = sparse_product(sample, point, lagrange, (n, points))
    _, spectrum, size = _gaussian_spectrum(bandwidth, cells, points)

    def product(w: Tensor) -> tuple[Tensor, Tensor]:
        on_grid = spread(w).view(2, points, -1).transpose(0, 1).flatten(1).t().contiguous()  # mass, then hits
        smooth = torch.fft.irfft(torch.fft.rfft(on_grid, n=size).mul_(spectrum), n=size)[:, :points]
        mass, hits = interpolated(smooth.t()).chunk(2, 1)
        return mass, hits

    return product


def _near_mean(c: Tensor, a: Tensor, rows: Tensor, bandwidth: float, self_term: bool) -> Tensor:
    """ã at the samples `rows` (increasing) by the sum itself, taken relative to its largest term."""
    reach = torch.full_like(c, _REACH * bandwidth)
    if not self_term:
        step = c.diff()
        far = c.new_full((1,), torch.inf)
        # Beyond the nearest other sample by nine bandwidths a term is nothing beside that sample's.
        reach += torch.minimum(torch.cat([far, step]), torch.cat([step, far]))
    start = torch.searchsorted(c, c[rows] - reach[rows])
    stop = torch.searchsorted(c, c[rows] + reach[rows], right=True)
    out = torch.empty(len(rows), dtype=c.dtype)
    first = 0
    while first < len(rows):
        size = 512
        while True:
            block = slice(first, first + size)
            low, high = int(start[block].min()), int(stop[block].max())
            if size == 1 or size * (high - low) <= 1 << 20:
                break
            size //= 2
        exponent = -((c[rows[block], None] - c[low:high]) / bandwidth).square() / 2
        if not self_term:
            exponent.scatter_(1, rows[block, None] - low, -torch.inf)
        out[block] = torch.softmax(exponent, 1) @ a[low:high]
        first += size
    return out


def _cell(x: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """The cell of each x in [0, 1] among `cells` equal ones, and where in it x lies, in [0, 1]."""
    scaled = x * cells
    low = scaled.long().clamp_(max=cells - 1)
    return low, scaled - low


def spread_on_grid(x: Tensor, values: Tensor, cells: int = GRID) -> Tensor:
    """`values` (N,) at x (N,), each shared linearly between the two nearest of 0, 1/cells, … 1: (1, cells + 1)."""
    grid = x.new_zeros(1, cells + 1)
    step = 1 << 16  # stays in the processor's cache
    for x_part, part in zip(x.split(step), values.split(step), strict=True):
        low, fraction = _cell(x_part, cells)
        right = part * fraction
        for share, points in ((part - right, grid[0, :-1]), (right, grid[0, 1:])):
            points += torch.bincount(low, weights=share, minlength=cells)
    return grid


def grid_product(x: Tensor, factors: Tensor) -> Callable[[Tensor], Tensor]:
    """w (N, R) -> `spread_on_grid(x, w_r * f)` for each column of w and f of `factors` (F, N): (F, R, GRID + 1)."""
    low, fraction = _cell(x, GRID)
    n, points = len(x), GRID + 1
    shift = (torch.arange(len(factors)) * points)[:, None]
    sums = sparse_product(
        torch.cat([low + shift, low + 1 + shift]).flatten(),
        torch.arange(n).repeat(2 * len(factors)),
        torch.cat([(1 - fraction) * factors, fraction * factors]).flatten(),
        (len(factors) * points, n),
    )
    return lambda w: sums(w).view(len(factors), points, -1).transpose(1, 2)


def unit_interval_smooth(residual: Tensor, mass: Tensor, mesh: int, near: float = 0.05) -> Tensor:
    """smECE from the residuals c - a and the counts on the grid, both (R, GRID + 1), float64 (R,); `near` is where the
    search begins.

    A Gaussian reflected at 0 and 1 without end is diagonal in the basis cos(π k t): its factor there is
    exp(-(π k σ)²/2), so that one transform of the data serves every bandwidth of the search.

    The fixed point σ = smECE_σ is the least k/1024, k >= 2, that is no smaller than its smECE, which falls as k grows.
    k and k - 1 are tried together: they say whether k is that one, and the line through them says where it is.
    """
    errors = _errors(residual, mass, mesh)
    rows = torch.arange(len(residual))
    value = torch.empty(len(rows), dtype=residual.dtype)
    low, high = torch.full_like(rows, 2), torch.full_like(rows, _STEPS)  # the least and the largest that k may be
    k = torch.full_like(rows, round(near * _STEPS)).clamp_(2, _STEPS)
    trials = 0
    while len(rows) > 0:
        value[rows], before = errors(rows.repeat(2), torch.cat([k, k - 1])).chunk(2)
        at_k, before = value[rows] * _STEPS, before * _STEPS
        small, large = (k < at_k) & (k < high), (k - 1 >= before) & (k > low)
        low, high = torch.where(small, k + 1, low), torch.where(large, k - 1, high)
        slope = (at_k - before).clamp_(max=0.0)
        trials += 1
        # A curve that is far from a line is halved in the end.
        k = ((at_k - slope * k) / (1 - slope)).ceil_().long() if trials < 5 else (low + high) // 2
        left = small | large
        rows, low, high, k = rows[left], low[left], high[left], k.clamp(low, high)[left]
    return value


def _errors(residual: Tensor, mass: Tensor, mesh: int) -> Callable[[Tensor, Tensor], Tensor]:
    """(rows of the data on the grid, k for each of them) -> smECE at the bandwidths k/1024."""
    size = 2 * GRID
    residuals, masses = (torch.fft.rfft(x, n=size).real.contiguous() for x in (residual, mass))
    wave = torch.arange(GRID + 1, dtype=residuals.dtype)

    def of_points(rows: Tensor, sigmas: Tensor, points: int) -> Tensor:
        """At one number of points; more than one bandwidth only of wide ones."""
        least = float(sigmas.amin())
        if least >= _WIDE:  # few waves are left of a wide Gaussian: their sum at the points is a small product
            few = math.ceil(_WAVES / least)
            factors = (-(math.pi * sigmas[:, None] * wave[:few]).square() / 2).exp()
            factors[:, 0] /= 2
            cosines = _cosines(few, points)
            smooth = (residuals[rows, :few] * factors) @ cosines
            return smooth.abs().sum(1) / ((masses[rows, :few] * factors) @ cosines.sum(1))
        low, fraction = _cell(torch.arange(points, dtype=wave.dtype) / (points - 1), GRID)
        factors = (-(math.pi * least * wave).square() / 2).exp()
        smooth = torch.fft.irfft(torch.stack([residuals[rows], masses[rows]]) * factors, n=size)[..., : GRID + 1]
        smooth = smooth[..., low] * (1 - fraction) + smooth[..., low + 1] * fraction
        return smooth[0].abs().sum(1) / smooth[1].sum(1)

    def errors(rows: Tensor, k: Tensor) -> Tensor:
        sigmas = k.double() / _STEPS
        out = torch.empty_like(sigmas)
        usual = sigmas >= max(_WIDE, 10 / mesh)  # these have `mesh` points: one product for all
        if bool(usual.any()):
            out[usual] = of_points(rows[usual], sigmas[usual], mesh)
        for sigma in sigmas[~usual].unique().tolist():  # few: most bandwidths lie near that of the whole sample
            same = sigmas == sigma
            out[same] = of_points(rows[same], sigmas[same], max(round(10 / sigma), mesh))
        return out

    return errors


@functools.lru_cache(maxsize=64)  # resamples of one data set ask for the same few again and again
def _cosines(waves: int, points: int) -> Tensor:
    """cos(π k t) for the first waves k at `points` equal steps of t over [0, 1]: (waves, points)."""
    k, t = torch.arange(waves, dtype=torch.float64), torch.arange(points, dtype=torch.float64) / (points - 1)
    return (math.pi * k[:, None] * t).cos_()
