"""Sums over pairs of samples without the pairs: kernel calibration error, SECE and smooth ECE.

All on the CPU, since the last digits of a sum on a GPU depend on the order of its threads. Confidences are sorted
float64 (N,) throughout; weights (N, R), where they are taken, count each sample in R resamples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["grid_sums", "laplace_pairs", "smooth_gap", "spread_on_grid", "unit_interval_smooth"]

LAPLACE_SCALE = 0.4  # the kernel exp(-|u - v| / 0.4) of Kumar et al. (2018)
GRID = 2048  # cells of [0, 1] on which smooth ECE lives; its smallest bandwidth, 2^-10, spans two
_EXACT_BELOW = 4096  # samples up to which SECE is summed directly
_WIDE = 0.01  # bandwidth of smooth ECE from which on its cosines are summed one by one, some 290 of them at most
_REACH = 9.0  # bandwidths after which a Gaussian is nothing beside 1 in float64


def laplace_pairs(c: Tensor, r: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Σ_i w_i r_i² and Σ_{i>j} w_i w_j r_i r_j k(c_i, c_j), k(u, v) = exp(-|u - v| / 0.4), in O(N); float64
    (R,).

    On sorted c the kernel splits into exp(-c_i / 0.4) exp(c_j / 0.4), so the sum over j is a running one.
    Both factors lie in exp(±1.25) once c is centred: nothing over- or underflows. r (N,) are the residuals
    c - a; weights (N, R), by default R = 1 and all ones.
    """
    x = ((c - 0.5) / LAPLACE_SCALE)[:, None]
    r = r[:, None]
    weighted = r if weights is None else weights * r
    grown = weighted * x.exp()
    # The running sum includes the sample itself, which is no pair.
    below = grown.cumsum(0) - grown
    return (weighted * r).sum(0), (weighted * (-x).exp() * below).sum(0)


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


def grid_sums(
    c: Tensor, a: Tensor, bandwidth: float, weights: Tensor | None = None, cells_each: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j w_j K(c_i - c_j) and Σ_j w_j K(c_i - c_j) a_j, float64 (R, N), and each sample's own share of
    these (N,).

    By convolution on a grid of h/128, or h/`cells_each`, between whose points all is linear. weights (N, R), by default
    R = 1 and all ones.
    """
    cells = math.ceil(cells_each / min(bandwidth, 1.0))
    low, fraction = _cell(c, cells)
    reach = min(cells, math.ceil(_REACH * bandwidth * cells))
    offset = torch.arange(reach + 1, dtype=c.dtype)
    kernel = (-(offset / (cells * bandwidth)).square() / 2).exp()
    size = 1 << (cells + reach + 1).bit_length()
    around = torch.zeros(size, dtype=c.dtype)
    around[: reach + 1] = kernel
    around[-reach:] = kernel[1:].flip(0)
    spectrum = torch.fft.rfft(around)

    def convolved(values: Tensor) -> Tensor:
        on_grid = torch.fft.irfft(torch.fft.rfft(spread_on_grid(c, values, cells), n=size) * spectrum, n=size)
        return on_grid[:, low] * (1 - fraction) + on_grid[:, low + 1] * fraction

    w = torch.ones_like(c)[:, None] if weights is None else weights
    selves = fraction.square() + (1 - fraction).square() + 2 * fraction * (1 - fraction) * kernel[1]
    return convolved(w), convolved(w * a[:, None]), selves


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
    """`values` (N, R) at x (N,), each shared linearly between the two nearest of 0, 1/cells, … 1: (R, cells + 1)."""
    grid = x.new_zeros(cells + 1, values.shape[1])
    step = max(1, (1 << 16) // values.shape[1])  # stays in the processor's cache
    for x_part, part in zip(x.split(step), values.split(step), strict=True):
        low, fraction = _cell(x_part, cells)
        right = part * fraction[:, None]
        for share, points in ((part - right, grid[:-1]), (right, grid[1:])):
            if part.shape[1] == 1:  # the same, by the routine that is fast for one column
                points[:, 0] += torch.bincount(low, weights=share[:, 0], minlength=cells)
            else:
                points.index_add_(0, low, share)
    return grid.t().contiguous()


def unit_interval_smooth(residual: Tensor, mass: Tensor, mesh: int) -> Tensor:
    """smECE from the residuals c - a and the counts on the grid, both (R, GRID + 1), float64 (R,).

    A Gaussian reflected at 0 and 1 without end is diagonal in the basis cos(π k t): its factor there is
    exp(-(π k σ)²/2), so that one transform of the data serves every bandwidth of the search.
    """
    size = 2 * GRID
    waves = torch.fft.rfft(torch.stack([residual, mass], 1), n=size).real
    k = torch.arange(GRID + 1, dtype=waves.dtype)

    def error(rows: Tensor, sigma: float) -> Tensor:
        points = max(round(10 / sigma), mesh)
        factors = (-(math.pi * sigma * k).square() / 2).exp()
        if sigma >= _WIDE:  # few waves are left of a wide Gaussian: their sum at the points is a small product
            few = int((factors > 1e-18).sum())
            t = torch.arange(points, dtype=k.dtype) / (points - 1)
            ends = torch.where(k[:few] == 0, 1.0, 2.0) * factors[:few] / size
            smooth = waves[rows, :, :few] @ (ends[:, None] * (math.pi * k[:few, None] * t).cos())
        else:
            smooth = torch.fft.irfft(waves[rows] * factors, n=size)[..., : GRID + 1]
            low, fraction = _cell(torch.arange(points, dtype=k.dtype) / (points - 1), GRID)
            smooth = smooth[..., low] * (1 - fraction) + smooth[..., low + 1] * fraction
        return smooth[:, 0].abs().sum(-1) / smooth[:, 1].sum(-1)

    def errors(sigmas: Tensor) -> Tensor:
        out = torch.empty_like(sigmas)
        for sigma in sigmas.unique().tolist():  # few: the search halves the same interval for all
            rows = (sigmas == sigma).nonzero().squeeze(1)
            out[rows] = error(rows, sigma)
        return out

    # Ten halvings of [0, 1] for the fixed point σ = smECE_σ, kept from above; the error falls as σ grows.
    low = torch.zeros(len(waves), dtype=k.dtype)
    high = torch.ones_like(low)
    for _ in range(10):
        middle = (low + high) / 2
        below = (middle < 1e-3) | (middle < errors(middle))
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return errors(high)
