"""The ends of the spectrum of G and H, by the eigensolver of `lanczos`.

The default start leans on the gradient, which leans to the large eigenvalues. Where the examples are kept in blocks
(`blocks.cache_block`) a short run on a quarter of them comes first, from that start or from a warm one, and its
vector is the start of the run that counts: an approximate eigenvector at a quarter of the price. Bound and stopping
rule are those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metacal.curvature.lanczos import lanczos
from metacal.curvature.loss import LogitLoss
from metacal.curvature.problem import check_vector
from metacal.curvature.products import Curvature
from metacal.errors import InputError, require

__all__ = ["Eigen", "extreme_eigenpairs", "gn_sharpness", "hessian_sharpness", "top_eigenpairs"]

NOISE, WARM_NOISE = 1.0, 0.1  # length of the random direction in a start vector, beside 1 of the gradient or `start`
QUARTER_PRODUCTS = 4  # at most, with a quarter of the examples, towards the start vector


@dataclass(frozen=True)
class Eigen:
    """One eigenpair as far as it was found.

    value      the Ritz value θ, signed
    vector     its unit vector, a list of tensors like the parameters
    products   matrix products spent by the whole run, those with a quarter of the examples counted as a quarter
    residual   ‖A v - θ v‖: some eigenvalue lies within this distance, without any premise
    bound      min(residual, residual²/gap), an absolute number: the same, if the gap seen from the basis is real
    converged  bound ≤ tol·abs(θ); False: the run ended at `max_products`, and `bound` says what was reached
    route      how the products were made
    """

    value: float
    vector: list[Tensor]
    products: int
    residual: float
    bound: float
    converged: bool
    route: str = ""


def flatten(v: Sequence[Tensor]) -> Tensor:
    """One vector of all entries, in order."""
    return torch.cat([t.reshape(-1) for t in v])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` with the shapes of `like`."""
    return [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in like]), like)]


# -- on networks ---------------------------------------------------------------------------------------------


def check_search(tol: float, max_products: int, k: int = 1) -> None:
    """`InputError` unless the stopping rule makes sense."""
    require(0 < tol < 1, f"tol must lie in (0, 1), a relative error, got {tol}")
    require(max_products >= 1, f"max_products must be at least 1, got {max_products}")
    require(k >= 1, f"k must be at least 1, got {k}")


def start_vector(c: Curvature, start: Sequence[Tensor] | None, seed: int) -> tuple[Tensor, torch.Generator]:
    """A flat start: `start`, else the gradient (it leans to the large eigenvalues), plus some random direction."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(c.size, generator=generator, dtype=c.params[0].dtype).to(c.params[0].device)
    noise /= noise.norm()
    if start is None:
        lead = flatten(c.gradient())
    else:
        lead = flatten(check_vector(start, c.params, "start"))
        require(
            bool(torch.isfinite(lead).all()) and float(lead.norm()) > 0,
            "start must be finite and not zero",
        )
    size = float(lead.norm())
    if not (size > 0 and math.isfinite(size)):
        return noise, generator
    share = NOISE if start is None else WARM_NOISE
    return lead / size + share * noise, generator


def _search(
    c: Curvature,
    matrix: str,
    k: int,
    which: str,
    tol: float,
    start: Sequence[Tensor] | None,
    max_products: int,
    seed: int,
) -> list[Eigen]:
    check_search(tol, max_products, k)
    require(k <= c.size, f"k must not exceed the {c.size} trainable parameters, got {k}")
    require(matrix in ("gn", "hessian"), f"matrix must be gn or hessian, got {matrix!r}")
    product = c.gn if matrix == "gn" else c.hessian
    c.prepare()

    def apply(v: Tensor) -> Tensor:
        return flatten(product(unflatten(v, c.params)))

    spent = 0
    if k == 1 and which != "both":
        with c.quarter() as apart:
            if apart:
                flat, generator = start_vector(c, start, seed)
                few = min(QUARTER_PRODUCTS, max_products)
                pairs, used = lanczos(apply, flat, which=which, tol=0.1, max_products=few, generator=generator)
                spent, start = math.ceil(used / 4), unflatten(pairs[0].vector, c.params)
    flat, generator = start_vector(c, start, seed)
    left = max(1, max_products - spent)
    pairs, products = lanczos(apply, flat, k=k, which=which, tol=tol, max_products=left, generator=generator)
    products += spent
    route = (c.gn_route if matrix == "gn" else c.hessian_route) or ""
    return [
        Eigen(p.value, unflatten(p.vector, c.params), products, p.residual, p.bound, p.converged, route) for p in pairs
    ]


def top_eigenpairs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    k: int,
    *,
    matrix: str = "gn",
    which: str = "largest",
    tol: float = 1e-2,
    start: Sequence[Tensor] | None = None,
    loss: LogitLoss = "cross_entropy",
    max_products: int | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Eigen]:
    """The k leading eigenpairs of G (`matrix="gn"`) or H (`"hessian"`), the leading one first.

    `which`: "largest", "smallest" or "magnitude". Each pair carries its own bound; `converged` is the whole run's.
    `options` go to `Curvature`. Default `max_products`: 50 + 10 k.
    """
    require(
        which in ("largest", "smallest", "magnitude"), f"which must be largest, smallest or magnitude, got {which!r}"
    )
    check_search(tol, 1 if max_products is None else max_products, k)
    with Curvature(model, x, y, loss=loss, **options) as c:
        return _search(c, matrix, k, which, tol, start, max_products or 50 + 10 * k, seed)


def extreme_eigenpairs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    tol: float = 1e-2,
    start: Sequence[Tensor] | None = None,
    loss: LogitLoss = "cross_entropy",
    max_products: int = 200,
    seed: int = 0,
    **options: Any,
) -> tuple[Eigen, Eigen]:
    """(largest, smallest) algebraic eigenpairs of H from one Lanczos run."""
    check_search(tol, max_products)
    with Curvature(model, x, y, loss=loss, **options) as c:
        pairs = _search(c, "hessian", 1, "both", tol, start, max_products, seed)
    return pairs[0], pairs[-1]


def gn_sharpness(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    tol: float = 1e-2,
    start: Sequence[Tensor] | None = None,
    loss: LogitLoss = "cross_entropy",
    *,
    max_products: int = 100,
    seed: int = 0,
    **options: Any,
) -> Eigen:
    """λ_max(G), G = 1/N Σ J_nᵀ S_n J_n, to the relative error `tol`.

    loss: "cross_entropy", "mse", `Focal(gamma)` or `LabelSmoothing(alpha)`, whose S is the exact Hessian in the logits.
    That of a focal loss may be indefinite: λ_max is the largest eigenvalue all the same, the smallest may be negative.

    `start`: the vector of an earlier `Eigen` of the same parameters, which saves about half of the products.
    `options` go to `Curvature` (chunk_size, route, randomness). Raises `InputError` for tol outside (0, 1).
    """
    check_search(tol, max_products)
    with Curvature(model, x, y, loss=loss, **options) as c:
        return _search(c, "gn", 1, "largest", tol, start, max_products, seed)[0]


def hessian_sharpness(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    tol: float = 1e-2,
    start: Sequence[Tensor] | None = None,
    which: str = "magnitude",
    *,
    loss: LogitLoss = "cross_entropy",
    max_products: int = 200,
    seed: int = 0,
    **options: Any,
) -> Eigen:
    """The eigenvalue of H largest in magnitude, signed (`which="magnitude"`), or the largest one ("algebraic").

    "smallest" gives the other end. `start`, `options` and errors as in `gn_sharpness`.
    """
    names = {"magnitude": "magnitude", "algebraic": "largest", "smallest": "smallest"}
    if which not in names:
        raise InputError(f"which must be magnitude, algebraic or smallest, got {which!r}")
    check_search(tol, max_products)
    with Curvature(model, x, y, loss=loss, **options) as c:
        return _search(c, "hessian", 1, names[which], tol, start, max_products, seed)[0]
