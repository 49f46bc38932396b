"""Traces of G and H with standard errors, sampled where the noise is small: in the space of the logits.

With S_n = E[(S^½ e)(S^½ e)ᵀ] over signs e ∈ {±1}^K drawn for each example,

    Tr G = 1/N Σ_n E ‖J_nᵀ S_n^½ e_n‖²

so one reverse pass that stops at the layers, plus per-example norms (`layers`), gives N independent draws; their mean
has a relative error of about one percent where parameter-space Hutchinson has ten. `exact=True` replaces the signs by
the K - 1 columns of a factor of S_n. For H = G + R the residual's trace is closed form for MLPs, zero for piecewise
linear networks, sampled at the activations for other networks without attention or layer statistics (all in
`structure`), and only else Hutchinson's vᵀR v. `Estimate.method` names what was used.

Where examples depend on each other (BatchNorm in training mode, a way through the network that is chosen for the whole
batch) per-example norms mean nothing; the batch form 1/N ‖Σ_n J_nᵀ S_n^½ e_n‖² is unbiased still, with far more noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metacal.curvature.blocks import cache_block, n_classes
from metacal.curvature.chain import Chain, chain_from
from metacal.curvature.forms import (
    activation_residual,
    closed_form,
)
from metacal.curvature.layers import capture, column_norms, examples_depend
from metacal.curvature.loss import FactorColumns, Focal, LogitLoss, factor_rank, logit_factor, logit_gradient
from metacal.curvature.problem import OtherWay, Problem
from metacal.curvature.products import Curvature
from metacal.curvature.sampling import Estimate, sampled, signs_at
from metacal.curvature.structure import curved_activations
from metacal.errors import require

__all__ = ["gn_trace", "hessian_trace"]

PARAMETER_PROBES = 8  # at least, where only signs in parameter space will do
MAX_COLUMNS = 4096  # reverse passes or products that `exact` may cost where no closed form exists


# -- Gauss-Newton ------------------------------------------------------------------------------------------------


def _gn_draw(problem: Problem, first: int, key: tuple[int, ...]) -> Tensor:
    captured = capture(problem)
    z = captured.z.detach()
    return column_norms(captured, [logit_factor(z, signs_at(tuple(z.shape), first, key, z), problem.loss)])


def _gn_exact(problem: Problem, straight: bool = False) -> Tensor:
    """straight: of a piecewise linear network, whose Tr H it is. Raises `OtherWay` if this part of it is not."""
    captured = capture(problem)
    if straight and curved_activations(captured) != []:
        raise OtherWay
    columns = FactorColumns(captured.z.detach(), problem.loss)
    chain = chain_from(captured.z, problem.params)
    return column_norms(captured, columns) if chain is None else closed_form(chain.detached(), columns)


def _exact_parts(problem: Problem, chunk_size: int | None, chain: Chain | None) -> list[Problem]:
    """Chunks for exact forms: a quarter of the block that fits the caches, for all columns' cotangents are held.

    Of a `chain` with several hidden layers there are columns, or matrices, as wide as these for each example.
    """
    block = cache_block(problem, share=4)
    if chain is not None and problem.randomness == "refuse":
        k, widest = n_classes(problem), max((s.shape[1] for s in chain.slope), default=1)
        entries = k * widest if chain.depth == 2 else max(k, widest) * (widest if chain.depth > 2 else 1)
        block = min(block or len(problem), max(1, (1 << 24) // entries))
    if block is not None:
        chunk_size = min(chunk_size or block, block)
    return problem.parts(chunk_size)


def _norm2(v: list[Tensor]) -> float:
    return float(sum(t.double().square().sum() for t in v))


def _batch_gn(c: Curvature, probes: int, seed: int, exact: bool) -> tuple[float, float, int]:
    """Tr G where examples depend on each other: value, standard error, reverse passes."""
    z, n, loss = c.logits, len(c), c.problem.loss
    if exact:
        columns = FactorColumns(z, loss)
        require(
            n * len(columns) <= MAX_COLUMNS,
            f"exact=True needs {n * len(columns)} reverse passes here, since examples depend on each other "
            f"({MAX_COLUMNS} at most): use probes, or evaluation mode",
        )
        total = 0.0
        for column in columns:
            for i in range(n):
                w = torch.zeros_like(z)
                w[i] = column[i]
                total += _norm2(c.jtu(w))
        return total / n, 0.0, n * len(columns)
    values = torch.tensor(
        [_norm2(c.jtu(logit_factor(z, signs_at(tuple(z.shape), 0, (seed, i), z), loss))) / n for i in range(probes)],
        dtype=torch.float64,
    )
    return float(values.mean()), float(values.std()) / math.sqrt(probes), probes


def _traces_along(c: Curvature, probes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws of Tr H and Tr G, vᵀH v and vᵀG v with signs v in parameter space, (probes,) each."""
    draws = []
    for probe in range(probes):
        v = [signs_at((p.numel(),), 0, (seed, probe, i), p).view(p.shape) for i, p in enumerate(c.params)]
        draws.append(c.residual_quadratic(v))
    h, g = torch.tensor(draws, dtype=torch.float64).unbind(1)
    return h, g


def _mean(draws: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(draws.mean()), float(draws.std()) / math.sqrt(len(draws))


def _without_a_root(c: Curvature, hessian: bool, probes: int, seed: int) -> Estimate:
    """Tr H or Tr G by signs in parameter space, which need no root of the loss's Hessian in the logits."""
    probes = max(PARAMETER_PROBES, probes)
    h, g = _traces_along(c, probes, seed)
    return Estimate(*_mean(h if hessian else g), "signs of the parameters", probes)


def _check_probes(probes: int) -> None:
    require(probes >= 1, f"probes must be at least 1, got {probes}")


def gn_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    exact: bool = False,
    seed: int = 0,
    *,
    loss: LogitLoss = "cross_entropy",
    chunk_size: int | None = None,
    randomness: str = "refuse",
) -> Estimate:
    """Tr G = 1/N Σ_n tr(J_nᵀ S_n J_n), from `probes` sign vectors an example, or `exact`ly from K - 1 columns.

    Equal for every chunk size up to rounding. Where examples depend on each other the batch form is used, with two
    probes at least (else there is no standard error); it is named in `method`, and `exact` is then limited to
    small N·K. A focal loss, whose S may be indefinite and have no root, takes signs in parameter space, eight of them
    at least: read `stderr`. Raises `InputError` as `Curvature` does, for probes < 1, and for `exact` with a focal loss.
    """
    _check_probes(probes)
    problem = Problem.of(model, x, y, loss, randomness, seed)
    if isinstance(loss, Focal):
        require(
            not exact,
            "exact=True needs a root of the loss's Hessian in the logits, which for a focal loss may be indefinite: "
            "use probes, or loss='cross_entropy'",
        )
        with _operators(problem, chunk_size) as c:
            return _without_a_root(c, False, probes, seed)
    estimate, depend = _by_example(problem, chunk_size, partial(_gn_estimate, probes=probes, exact=exact, seed=seed))
    if estimate is not None:
        return estimate
    with _operators(problem, len(problem)) as c:
        problem.note(c.logits)
        value, stderr, passes = _batch_gn(c, max(2, probes), seed, exact)
    return Estimate(value, stderr, f"batch form ({depend})" + (", exact" if exact else ""), passes)


def _gn_estimate(problem: Problem, chunk_size: int | None, probes: int, exact: bool, seed: int) -> Estimate:
    look = capture(problem.part(slice(0, 1)))
    method = "output space, " + look.method
    if exact:
        chain = chain_from(look.z, problem.params)
        values = torch.cat([_gn_exact(p) for p in _exact_parts(problem, chunk_size, chain)])
        columns = factor_rank(look.z.shape[1], problem.loss)
        return Estimate(float(values.double().mean()), 0.0, method + ", exact", columns)
    block = cache_block(problem) if chunk_size is None else chunk_size
    value, stderr = sampled(problem, block, probes, seed, _gn_draw)
    return Estimate(value, stderr, method, probes)


def _by_example(
    problem: Problem, chunk_size: int | None, estimate: Callable[[Problem, int | None], Estimate | None]
) -> tuple[Estimate | None, str | None]:
    """What `estimate(problem, chunk_size)` makes of per-example terms, or None and why it cannot be had of them.

    Raises `InputError` where parts of the batch would give another result.
    """
    with problem.math():
        depend = examples_depend(problem)
        if depend is None:
            try:
                result = estimate(problem, chunk_size)
                problem.check_ways()
                return result, None
            except OtherWay as error:
                depend = str(error)
    n = len(problem)
    require(
        chunk_size is None or chunk_size >= n,
        f"chunk_size={chunk_size} < {n} examples changes the result, since {depend}: "
        "leave chunk_size out, or measure in evaluation mode",
    )
    return None, depend


def _operators(problem: Problem, chunk_size: int | None) -> Curvature:
    options: dict[str, Any] = {"loss": problem.loss, "randomness": problem.randomness, "seed": problem.seed}
    return Curvature(problem.model, problem.x, problem.y, chunk_size=chunk_size, **options)


# -- Hessian -----------------------------------------------------------------------------------------------------


def _chain_draw(problem: Problem, first: int, key: tuple[int, ...]) -> Tensor:
    chain, z, u = _taken_apart(problem)
    columns = [logit_factor(z, signs_at(tuple(z.shape), first, key, z), problem.loss)]
    if chain.depth <= 2:
        return closed_form(chain, columns, u=u)
    signs = [signs_at(tuple(s.shape), first, (*key, l), z) for l, s in enumerate(chain.slope)]
    return closed_form(chain, columns, u=u, signs=[signs])


def _chain_exact(problem: Problem) -> Tensor:
    chain, z, u = _taken_apart(problem)
    return closed_form(chain, FactorColumns(z, problem.loss), u=u)


def _taken_apart(problem: Problem) -> tuple[Chain, Tensor, Tensor]:
    z = problem.logits()
    problem.check_logits(z)
    chain = chain_from(z, problem.params)
    if chain is None:
        raise OtherWay
    z = z.detach()
    return chain.detached(), z, logit_gradient(z, problem.y, problem.loss)


def _activation_draw(problem: Problem, first: int, key: tuple[int, ...]) -> Tensor:
    """Tr G + Tr R of each example: output-space signs for G, signs at the curved activations for R."""
    captured = capture(problem)
    z = captured.z.detach()
    columns = [logit_factor(z, signs_at(tuple(z.shape), first, key, z), problem.loss)]
    total = column_norms(captured, columns)
    sites = curved_activations(captured)
    if sites is None:
        raise OtherWay
    if not sites:
        return total
    residual = activation_residual(captured, sites, logit_gradient(z, problem.y, problem.loss), first, key)
    return total if residual is None else total + residual


def _hutchinson(c: Curvature, probes: int, seed: int) -> tuple[float, float]:
    """Tr R from vᵀH v - vᵀG v with signs v in parameter space."""
    h, g = _traces_along(c, probes, seed)
    return _mean(h - g)


def _diagonal_sum(c: Curvature) -> float:
    """Σ_i H_ii, one product a parameter."""
    total = 0.0
    v = [torch.zeros_like(p) for p in c.params]
    for i, p in enumerate(c.params):
        flat = v[i].view(-1)
        for j in range(p.numel()):
            flat[j] = 1
            total += float(c.hessian(v)[i].reshape(-1)[j])
            flat[j] = 0
    return total


def hessian_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    exact: bool = False,
    seed: int = 0,
    *,
    loss: LogitLoss = "cross_entropy",
    chunk_size: int | None = None,
    randomness: str = "refuse",
) -> Estimate:
    """Tr H of the mean loss, by the least noisy form that the network allows (`method` says which):

    - a chain of linear layers and activations (MLP): Tr G as in `gn_trace` plus the residual in closed form
      (sampled too with three or more hidden layers, unless `exact`);
    - piecewise linear networks: Tr H = Tr G;
    - other activations without attention or layer statistics: Tr G plus the residual sampled at the activations;
    - else: Tr G plus Hutchinson's vᵀ(H - G)v with sign vectors, two probes at least. The noise may be large;
    - a focal loss: Hutchinson's vᵀHv, eight probes at least.

    `exact=True` works for the first two, and for up to 4096 parameters in any network. Raises `InputError` as
    `gn_trace` does, and where `exact` is out of reach.
    """
    _check_probes(probes)
    problem = Problem.of(model, x, y, loss, randomness, seed)
    options: dict[str, Any] = {"probes": probes, "exact": exact, "seed": seed}
    if isinstance(loss, Focal):
        return _hessian_products(problem, chunk_size, **options, depend=None)
    estimate, depend = _by_example(problem, chunk_size, partial(_hessian_estimate, **options))
    return estimate or _hessian_products(problem, len(problem), **options, depend=depend)


def _hessian_estimate(problem: Problem, chunk_size: int | None, probes: int, exact: bool, seed: int) -> Estimate:
    form, method, chain = _form_of(problem, exact)
    if form is None:
        return _hessian_products(problem, chunk_size, probes, exact, seed, depend=None)
    if exact:
        values = torch.cat([form(p) for p in _exact_parts(problem, chunk_size, chain)])
        return Estimate(float(values.double().mean()), 0.0, method + ", exact", n_classes(problem))
    block = cache_block(problem) if chunk_size is None else chunk_size
    value, stderr = sampled(problem, block, probes, seed, form)
    return Estimate(value, stderr, method, probes)


def _hessian_products(
    problem: Problem, chunk_size: int | None, probes: int, exact: bool, seed: int, depend: str | None
) -> Estimate:
    """Tr H from products with H. depend: why examples depend on each other, if they do."""
    with _operators(problem, chunk_size) as c:
        if exact:
            require(
                c.size <= MAX_COLUMNS,
                f"exact=True needs one product a parameter for this network, {c.size} of them "
                f"({MAX_COLUMNS} at most): use probes",
            )
            result = Estimate(_diagonal_sum(c), 0.0, "diagonal, exact", c.size)
            problem.note(c.logits)
            return result
        if isinstance(problem.loss, Focal):
            return _without_a_root(c, True, probes, seed)
        residual, noise = _hutchinson(c, max(2, probes), seed)
        problem.note(c.logits)
        if depend is not None:
            value, stderr, _ = _batch_gn(c, max(2, probes), seed, exact=False)
    if depend is None:
        block = cache_block(problem) if chunk_size is None else chunk_size
        with problem.math():
            value, stderr = sampled(problem, block, probes, seed, _gn_draw)
    method = "Tr G + Hutchinson on H - G" + (f", batch form ({depend})" if depend else "")
    return Estimate(value + residual, math.hypot(stderr, noise), method, max(2, probes))


def _form_of(problem: Problem, exact: bool) -> tuple[Callable[..., Tensor] | None, str, Chain | None]:
    """A draw of Tr H_n, or with `exact` its value, in a form that this network allows; its name; a chain."""
    look = capture(problem.part(slice(0, 1)))
    chain, sites = chain_from(look.z, problem.params), curved_activations(look)
    if chain is not None:
        sampled_too = chain.depth > 2 and not exact
        method = "closed form, residual sampled" if sampled_too else "closed form"
        return _chain_exact if exact else _chain_draw, method, chain
    if sites == []:
        straight = partial(_gn_exact, straight=True)
        return straight if exact else _activation_draw, f"Tr H = Tr G, output space, {look.method}", None
    if sites is None or exact:
        return None, "", None
    return _activation_draw, f"activation space, {look.method}", None
