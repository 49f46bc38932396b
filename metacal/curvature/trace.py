"""Traces of G and H with standard errors, sampled where the noise is small: in the space of the logits.

With S_n = E[(S^½ e)(S^½ e)ᵀ] over signs e ∈ {±1}^K drawn for each example,

    Tr G = 1/N Σ_n E ‖J_nᵀ S_n^½ e_n‖²

so one reverse pass that stops at the layers, plus per-example norms (`layers`), gives N independent draws; their mean
has a relative error of about one percent where parameter-space Hutchinson has ten. `exact=True` replaces the signs by
the K - 1 columns of a factor of S_n. For H = G + R the residual's trace is closed form for MLPs, zero for piecewise
linear networks, sampled at the activations for other networks without attention or layer statistics (all in
`structure`), and only else Hutchinson's vᵀR v. `Estimate.method` names what was used.

Where examples depend on each other (BatchNorm in training mode) per-example norms mean nothing; the batch form
1/N ‖Σ_n J_nᵀ S_n^½ e_n‖² is unbiased still, with far more noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metacal.curvature.layers import (
    cache_block,
    capture,
    column_norms,
    examples_depend,
    gram_of,
    per_example_gram,
)
from metacal.curvature.problem import Problem, factor_columns, logit_factor, logit_gradient
from metacal.curvature.products import Curvature
from metacal.curvature.structure import chain_of, curved_activations
from metacal.errors import require

__all__ = ["Estimate", "gn_trace", "hessian_trace"]

MAX_COLUMNS = 4096  # reverse passes or products that `exact` may cost where no closed form exists


@dataclass(frozen=True)
class Estimate:
    """value ± stderr (one standard deviation of the sampling; 0 for an exact value), how, and from how many draws."""

    value: float
    stderr: float
    method: str = ""
    draws: int = 1


def signs_at(shape: tuple[int, ...], first_row: int, key: tuple[int, ...], like: Tensor) -> Tensor:
    """Signs ±1 that depend only on (key, row, place in the row), so that they do not change with the chunk size.

    A counter run through the finaliser of splitmix64 (Steele et al. 2014); row = first_row + index along dim 0.
    """
    stream = 0
    for part in key:
        stream = ((stream ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (1 << 64)
        stream ^= stream >> 29
    size = math.prod(shape)
    per_row = size // shape[0]
    at = torch.arange(size, device=like.device) + first_row * per_row
    x = at * -7046029254386353131 + (stream - (1 << 63))
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return (1 - 2 * ((x >> 31) & 1)).to(like.dtype).view(shape)


def _standard_error(draws: list[Tensor], second: tuple[Tensor, Tensor] | None) -> float:
    """Error of the mean over examples and probes; `second`: two draws of the same rows, for a single probe.

    From the rows only the share of the noise in the draws' second moment is taken, and the moment itself from all
    examples: a few of them carry most of it, and the rows may have missed these.
    """
    n = len(draws[0])
    if second is None:
        values = torch.stack(draws).double()
        within = values.var(0).mean() / len(draws)
    else:
        one, two = (d.double() for d in second)
        moment = (one.square() + two.square()).mean() / 2
        share = (one - two).square().mean() / 2 / moment if float(moment) > 0 else moment
        within = share * draws[0].double().square().mean()
    return math.sqrt(float(within) / n)


Draw = Callable[[Problem, int, tuple[int, ...]], Tensor]  # (examples, index of the first, key of the probe) → (n,)


def _sampled(problem: Problem, chunk_size: int | None, probes: int, seed: int, draw: Draw) -> tuple[float, float]:
    """Mean and standard error of `probes` draws an example.

    A single probe cannot tell its noise from the spread between examples, so it is repeated on every 16th example
    (32 at least) for the error's sake.
    """
    step = len(problem) if chunk_size is None else chunk_size

    def run(part: Problem, first: int, key: tuple[int, ...]) -> Tensor:
        return torch.cat([draw(p, first + i * step, key) for i, p in enumerate(part.parts(chunk_size))])

    draws = [run(problem, 0, (seed, probe)) for probe in range(probes)]
    second = None
    if probes == 1:
        n = len(problem)
        rows = torch.arange(0, n, max(1, n // max(32, n // 16)), device=problem.x.device)
        again = run(problem.part(rows), n, (seed, probes))
        second = (draws[0][rows], again)
    value = float(torch.stack(draws).double().mean())
    return value, _standard_error(draws, second)


# -- Gauss-Newton ------------------------------------------------------------------------------------------------


def _gn_draw(problem: Problem, first: int, key: tuple[int, ...]) -> Tensor:
    captured = capture(problem)
    z = captured.z.detach()
    e = signs_at(tuple(z.shape), first, key, z)
    return per_example_gram(captured, logit_factor(z, e, problem.loss)[:, None])[:, 0, 0]


def _gn_exact(problem: Problem) -> Tensor:
    captured = capture(problem)
    chain = chain_of(captured)
    columns = factor_columns(captured.z.detach(), problem.loss)
    if chain is not None:
        return chain.gauss_newton(torch.stack(columns, 1))
    return column_norms(captured, columns)


def _exact_parts(problem: Problem, chunk_size: int | None) -> list[Problem]:
    """Chunks for `_gn_exact`, which holds all columns' cotangents: a quarter of the block that fits the caches."""
    block = cache_block(problem, share=4)
    if block is not None:
        chunk_size = min(chunk_size or block, block)
    return problem.parts(chunk_size)


def _norm2(v: list[Tensor]) -> float:
    return float(sum(t.double().square().sum() for t in v))


def _batch_gn(c: Curvature, probes: int, seed: int, exact: bool) -> tuple[float, float, int]:
    """Tr G where examples depend on each other: value, standard error, reverse passes."""
    z, n, loss = c.logits, len(c), c.problem.loss
    if exact:
        columns = factor_columns(z, loss)
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
    loss: str = "cross_entropy",
    chunk_size: int | None = None,
    randomness: str = "refuse",
) -> Estimate:
    """Tr G = 1/N Σ_n tr(J_nᵀ S_n J_n), from `probes` sign vectors an example, or `exact`ly from K - 1 columns.

    Equal for every chunk size up to rounding. Where examples depend on each other the batch form is used, with two
    probes at least (else there is no standard error); it is named in `method`, and `exact` is then limited to
    small N·K. Raises `InputError` as `Curvature` does, and for probes < 1.
    """
    _check_probes(probes)
    problem = Problem.of(model, x, y, loss, randomness, seed)
    with problem.math():
        depend = examples_depend(problem)
        if depend is None:
            method = "output space, " + capture(problem.part(slice(0, 1))).method
            if exact:
                values = torch.cat([_gn_exact(p) for p in _exact_parts(problem, chunk_size)])
                columns = len(factor_columns(torch.zeros(1, _classes(problem)), loss))
                return Estimate(float(values.double().mean()), 0.0, method + ", exact", columns)
            block = cache_block(problem) if chunk_size is None else chunk_size
            value, stderr = _sampled(problem, block, probes, seed, _gn_draw)
            return Estimate(value, stderr, method, probes)
    with Curvature(model, x, y, loss=loss, chunk_size=chunk_size, randomness=randomness, seed=seed) as c:
        value, stderr, passes = _batch_gn(c, max(2, probes), seed, exact)
    return Estimate(value, stderr, f"batch form ({depend})" + (", exact" if exact else ""), passes)


def _classes(problem: Problem) -> int:
    with torch.no_grad():
        return problem.logits(x=problem.x[:1]).shape[1]


# -- Hessian -----------------------------------------------------------------------------------------------------


def _chain_draw(problem: Problem, first: int, key: tuple[int, ...]) -> Tensor:
    chain, z, u = _taken_apart(problem)
    e = signs_at(tuple(z.shape), first, key, z)
    gauss_newton = chain.gauss_newton(logit_factor(z, e, problem.loss)[:, None])
    if chain.depth <= 2:
        return gauss_newton + chain.residual(u)
    signs = [signs_at(tuple(s.shape), first, (*key, l), z) for l, s in enumerate(chain.slope)]
    return gauss_newton + chain.residual_sampled(u, signs)


def _chain_exact(problem: Problem) -> Tensor:
    chain, z, u = _taken_apart(problem)
    columns = torch.stack(factor_columns(z, problem.loss), 1)
    return chain.gauss_newton(columns) + chain.residual(u)


def _taken_apart(problem: Problem) -> tuple[Any, Tensor, Tensor]:
    captured = capture(problem)
    chain = chain_of(captured)
    assert chain is not None
    z = captured.z.detach()
    return chain, z, logit_gradient(z, problem.y, problem.loss)


def _activation_draw(problem: Problem, first: int, key: tuple[int, ...]) -> Tensor:
    """Tr G + Tr R of each example: output-space signs for G, signs at the curved activations for R."""
    captured = capture(problem)
    z = captured.z.detach()
    e = signs_at(tuple(z.shape), first, key, z)
    gauss_newton = per_example_gram(captured, logit_factor(z, e, problem.loss)[:, None])[:, 0, 0]
    sites = curved_activations(captured)
    assert sites is not None
    if not sites:
        return gauss_newton
    u = logit_gradient(z, problem.y, problem.loss)
    deltas = torch.autograd.grad(captured.z, [out for _, out, _ in sites], u, retain_graph=True)
    left, right = [], []
    for l, ((_, _, bend), delta) in enumerate(zip(sites, deltas)):
        c = bend * delta
        root = signs_at(tuple(c.shape), first, (*key, l), c) * c.abs().sqrt()
        left.append(root * c.sign())
        right.append(root)
    edges = [s.edge for s in captured.sites]
    heads = [h for h, _, _ in sites]
    columns = [torch.autograd.grad(heads, edges, side, retain_graph=True, allow_unused=True) for side in (left, right)]
    gram = gram_of(captured, columns)
    return gauss_newton if gram is None else gauss_newton + gram[:, 0, 1]


def _hutchinson(c: Curvature, probes: int, seed: int) -> tuple[float, float]:
    """Tr R from vᵀH v - vᵀG v with signs v in parameter space."""
    values = []
    for probe in range(probes):
        v = [signs_at((p.numel(),), 0, (seed, probe, i), p).view(p.shape) for i, p in enumerate(c.params)]
        h, g = c.residual_quadratic(v)
        values.append(h - g)
    t = torch.tensor(values, dtype=torch.float64)
    return float(t.mean()), float(t.std()) / math.sqrt(probes)


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
    loss: str = "cross_entropy",
    chunk_size: int | None = None,
    randomness: str = "refuse",
) -> Estimate:
    """Tr H of the mean loss, by the least noisy form that the network allows (`method` says which):

    - a chain of linear layers and activations (MLP): Tr G as in `gn_trace` plus the residual in closed form
      (sampled too with three or more hidden layers, unless `exact`);
    - piecewise linear networks: Tr H = Tr G;
    - other activations without attention or layer statistics: Tr G plus the residual sampled at the activations;
    - else: Tr G plus Hutchinson's vᵀ(H - G)v with sign vectors, two probes at least. The noise may be large.

    `exact=True` works for the first two, and for up to 4096 parameters in any network. Raises `InputError` as
    `gn_trace` does, and where `exact` is out of reach.
    """
    _check_probes(probes)
    problem = Problem.of(model, x, y, loss, randomness, seed)
    with problem.math():
        depend = examples_depend(problem)
        draw: Draw | None = None
        if depend is None:
            block = cache_block(problem) if chunk_size is None else chunk_size
            look = capture(problem.part(slice(0, 1)))
            chain, sites = chain_of(look), curved_activations(look)
            name = look.method
            del look
            if chain is not None:
                draw, method = _chain_draw, "closed form"
                if chain.depth > 2 and not exact:
                    method = "closed form, residual sampled"
            elif sites is not None:
                draw = _activation_draw
                method = f"activation space, {name}" if sites else f"Tr H = Tr G, output space, {name}"
            if exact and (chain is not None or sites == []):
                form = _chain_exact if chain is not None else _gn_exact
                values = torch.cat([form(p) for p in _blocks(problem, chunk_size, chain)])
                return Estimate(float(values.double().mean()), 0.0, method + ", exact", _classes(problem))
            if draw is not None and not exact:
                value, stderr = _sampled(problem, block, probes, seed, draw)
                return Estimate(value, stderr, method, probes)
    with Curvature(model, x, y, loss=loss, chunk_size=chunk_size, randomness=randomness, seed=seed) as c:
        if exact:
            require(
                c.size <= MAX_COLUMNS,
                f"exact=True needs one product a parameter for this network, {c.size} of them "
                f"({MAX_COLUMNS} at most): use probes",
            )
            return Estimate(_diagonal_sum(c), 0.0, "diagonal, exact", c.size)
        residual, noise = _hutchinson(c, max(2, probes), seed)
        if depend is not None:
            value, stderr, _ = _batch_gn(c, max(2, probes), seed, exact=False)
    if depend is None:
        with problem.math():
            value, stderr = _sampled(problem, block, probes, seed, _gn_draw)
    method = "Tr G + Hutchinson on H - G" + (f", batch form ({depend})" if depend else "")
    return Estimate(value + residual, math.hypot(stderr, noise), method, max(2, probes))


def _blocks(problem: Problem, chunk_size: int | None, chain: Any) -> list[Problem]:
    """Chunks; with three or more hidden layers small enough for a width × width matrix an example."""
    if chain is None:
        return _exact_parts(problem, chunk_size)
    if chain.depth > 2:
        widest = max(w.shape[0] for w in chain.weights[:-1])
        chunk_size = min(chunk_size or len(problem), max(1, (1 << 24) // widest**2))
        if problem.randomness == "freeze":
            return [problem]
    return problem.parts(chunk_size)
