"""The forms in which traces of G and of the residual R = H − G are computed: for each example, or along a direction.

All are differentiable in θ where what they are given carries graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metacal.autodiff.derivatives import dot, hv_by_reverse, jv_by_reverse, recorded_gradient
from metacal.autodiff.graph import graph_names
from metacal.autodiff.plain import WRONG, PlainNorms
from metacal.autodiff.tape import Tape
from metacal.curvature.chain import Chain, Head
from metacal.curvature.layers import Captured, gram_of
from metacal.curvature.loss import FactorColumns, logit_gradient, logit_hessian, logit_trace
from metacal.curvature.problem import Problem
from metacal.curvature.sampling import signs_at
from metacal.curvature.structure import CurvedActivation
from metacal.errors import InputError

__all__ = ["activation_residual", "closed_form", "head_trace", "quadratic_by_reverse", "quadratic_by_tape"]


def closed_form(
    chain: Chain,
    columns: Sequence[Tensor],
    weight: float = 1.0,
    u: Tensor | None = None,
    signs: Sequence[Sequence[Tensor]] | None = None,
    smooth: bool = False,
) -> Tensor:
    """`weight` Σ_c ‖J_nᵀ C_n^c‖² for columns (n, K), and with u = N ∂L/∂z the trace of R_n as well → (n,).

    All columns of a factor of S together are tr(J_nᵀ S_n J_n), for which fewer operations do than one pass a column
    where there are more classes than units. The trace of R_n comes exactly, or as the mean of draws from signs at the
    hidden units (`Chain.residual_sampled`).
    """
    if isinstance(columns, FactorColumns) and (chain.depth < 2 or len(columns) > chain.weights[-1].shape[1]):
        total = weight * chain.gauss_newton_exact(columns.z, columns.loss)
    else:
        total = weight * chain.gauss_newton(torch.stack(list(columns), 1))
    if u is None or chain.straight:
        return total
    if signs is None:
        return total + chain.residual(u)
    for drawn in signs:
        total = total + chain.residual_sampled(u, drawn, smooth) / len(signs)
    return total


def activation_residual(
    captured: Captured, sites: Sequence[CurvedActivation], u: Tensor, first: int, key: tuple[int, ...]
) -> Tensor | None:
    """A draw of Tr R_n (n,) from signs at the curved activations (`structure`), or None if no parameter is below them.

    With c = φ''(h) δ formula (*) is E ⟨Jᵀs, Jᵀt⟩ for cotangents s = e √|c| sign(c), t = e √|c| of h.
    """
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
    return None if gram is None else gram[:, 0, 1]


def head_trace(z: Tensor, head: Head, loss: str) -> Tensor:
    """tr S_n (‖a_n‖² + 1), (n,): the trace over the last layer's own parameters, of G and of H alike."""
    beta = head.a.square().sum(1) + (head.bias is not None)
    return logit_trace(z, loss) * beta


def quadratic_by_tape(problem: Problem, v: Sequence[Tensor | None], hessian: bool) -> Tensor:
    """vᵀH v = 1/N Σ z₁ᵀS z₁ + u·z₂, or its first part for G, as a graph in θ. Inside `problem.math()`.

    Raises NotImplementedError where an operation has no rule.
    """
    with Tape(problem.params, fixed=[problem.x], spelled_out=True) as tape:
        z = problem.logits()
    z1, z2 = tape.close(z).run(v, second=hessian)
    if z1 is None:
        raise NotImplementedError("a network whose operations do not show its parameters")
    value = (z1 * logit_hessian(z, problem.y, z1, problem.loss)).sum()
    if z2 is not None:
        value = value + (logit_gradient(z, problem.y, problem.loss) * z2).sum()
    return value / len(problem)


def quadratic_by_reverse(problem: Problem, v: Sequence[Tensor | None], hessian: bool) -> Tensor:
    """The same by reverse passes alone. Raises `InputError` where PyTorch lacks a derivative, or has it wrong."""
    name = f"{'hessian' if hessian else 'gn'}_trace"
    some = [(p, t) for p, t in zip(problem.params, v) if t is not None]
    moved, along = [p for p, _ in some], [t for _, t in some]
    with PlainNorms():
        z = problem.logits()
    wrong = next((kind for kind in sorted(graph_names(z)) if any(part in kind for part in WRONG)), None)
    if hessian and wrong is not None:
        raise InputError(
            f"{name} needs a third derivative, which PyTorch has wrong for an operation of the model (graph node "
            f"{wrong}): use the function of torch.nn.functional, or plain operations"
        )
    u = torch.zeros_like(z, requires_grad=True)
    if hessian:
        u = logit_gradient(z, problem.y, problem.loss) / len(problem)
    try:
        g = recorded_gradient(z, moved, u)
        if hessian:
            value = dot(hv_by_reverse(g, moved, along, graph=True), along)
        else:
            jv = jv_by_reverse(g, u, along, graph=True)
            value = (jv * logit_hessian(z, problem.y, jv, problem.loss)).sum() / len(problem)
    except NotImplementedError as error:
        raise InputError(f"{name} needs derivatives that an operation of the model lacks: {error}") from error
    return z.new_zeros(()) if value is None else value
