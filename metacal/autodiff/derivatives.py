"""Derivatives of recorded logits along a direction v of the parameters, each formula in a function of its own.

Two ways lead to J v and to products with second derivatives. Along a `Tape` of the pass, which gives z₁ and z₂:

    J v = z₁,   ∇²(u·z) v = ∇_θ (u·z₁),   vᵀ∇²(u·z) v = u·z₂

and, where an operation has no rule there, by reverse passes over a recorded gradient g(u, θ) = Jᵀu, linear in u:

    J v = ∂⟨g, v⟩/∂u,   ∇²(u·z) v = ∂⟨g, v⟩/∂θ

The logits behind g must have been made with normalisations spelled out (`plain.PlainNorms`): PyTorch has second
derivatives of weight normalisation wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metacal.autodiff.graph import without_second_derivative
from metacal.errors import InputError

__all__ = [
    "dot",
    "dots",
    "filled",
    "hv_along",
    "hv_by_reverse",
    "jv_by_reverse",
    "naming_reentrant_checkpoints",
    "pulled_back",
    "recorded_gradient",
]

Cotangents = Sequence["Tensor | None"]


def filled(grads: Cotangents, params: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with zeros for None, and dense where an embedding gave sparse ones."""
    return [
        torch.zeros_like(p) if g is None else g.to_dense() if g.layout is torch.sparse_coo else g
        for g, p in zip(grads, params)
    ]


def dot(a: Cotangents, b: Cotangents) -> Tensor | None:
    """Σ ⟨a, b⟩ over the pairs without a None, or None if there is no pair."""
    terms = [torch.dot(s.reshape(-1), t.reshape(-1)) for s, t in zip(a, b) if s is not None and t is not None]
    return torch.stack(terms).sum() if terms else None


def dots(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩, ‖a‖² and ‖b‖², (3,), without an array as large."""
    a, b = a.reshape(-1), b.reshape(-1)
    return torch.stack([a @ b, a @ a, b @ b])


def pulled_back(z: Tensor, params: Sequence[Tensor], w: Tensor) -> list[Tensor]:
    """Jᵀw.

    >>> a = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    >>> theta = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> pulled_back(a @ theta, [theta], torch.tensor([1.0, 10.0]))
    [tensor([12., 30.])]
    """
    return filled(torch.autograd.grad(z, params, w, retain_graph=True, allow_unused=True), params)


def hv_along(z1: Tensor | None, u: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """∇_θ (u·z₁) for z₁ = J v with its graph: the product of ∇²(u·z) with v; H v if u = ∂L/∂z carries its own graph.

    For ∇_θ (u·J v) = Jᵀ (∂²L/∂z²) J v + Σ u ∇²z v.

    >>> theta = torch.tensor([3.0, 2.0], requires_grad=True)
    >>> from metacal.autodiff.tape import Tape
    >>> with Tape([theta]) as tape: z = theta ** 3
    >>> z1, _ = tape.close(z).run([torch.tensor([1.0, 10.0])])
    >>> hv_along(z1, torch.ones(2), [theta])
    [tensor([ 18., 120.])]
    """
    if z1 is None or not (z1.requires_grad or u.requires_grad):
        return [torch.zeros_like(p) for p in params]
    return filled(torch.autograd.grad((u * z1).sum(), params, retain_graph=True, allow_unused=True), params)


def recorded_gradient(z: Tensor, params: Sequence[Tensor], u: Tensor) -> list[Any]:
    """g = Jᵀu as a graph in u and θ; None where a parameter has no part in z.

    Raises NotImplementedError, naming the operation, if it cannot be differentiated again.
    """
    g = list(torch.autograd.grad(z, params, u, create_graph=True, allow_unused=True))
    lacking = without_second_derivative(*g)
    if lacking is not None:  # the engine would raise late, or silently skip a function that is once_differentiable
        raise NotImplementedError(f"an operation has no second derivative (graph node {lacking})")
    return g


def jv_by_reverse(g: Cotangents, u: Tensor, v: Cotangents, graph: bool = False, last: bool = False) -> Tensor:
    """J v = ∂⟨g, v⟩/∂u for g = Jᵀu. It does not depend on the value of u.

    graph: to be differentiated in θ. last: no other product will be asked of g, whose graph is freed on the way.

    >>> theta = torch.tensor([3.0, 2.0], requires_grad=True)
    >>> u = torch.zeros(2, requires_grad=True)
    >>> jv_by_reverse(recorded_gradient(theta * theta, [theta], u), u, [torch.tensor([1.0, 10.0])])
    tensor([ 6., 40.])
    """
    pairs = [(s, t) for s, t in zip(g, v) if s is not None and t is not None and s.requires_grad]
    if not pairs:
        return torch.zeros_like(u)
    ends, along = [s for s, _ in pairs], [t for _, t in pairs]
    (jv,) = torch.autograd.grad(ends, u, along, create_graph=graph, retain_graph=not last, allow_unused=True)
    return torch.zeros_like(u) if jv is None else jv if graph else jv.detach()


def hv_by_reverse(g: Cotangents, params: Sequence[Tensor], v: Cotangents, graph: bool = False) -> list[Any]:
    """∂⟨g, v⟩/∂θ for g = Jᵀu: H v if u = ∂L/∂z was recorded as a function of θ.

    >>> theta = torch.tensor([3.0, 2.0], requires_grad=True)
    >>> g = recorded_gradient(theta ** 3, [theta], torch.ones(2))
    >>> hv_by_reverse(g, [theta], [torch.tensor([1.0, 10.0])])
    [tensor([ 18., 120.])]
    """
    along = dot(g, v)
    if along is None or not along.requires_grad:
        return [torch.zeros_like(p) for p in params]
    grads = torch.autograd.grad(along, params, create_graph=graph, retain_graph=True, allow_unused=True)
    return filled(grads, params) if graph else [t.detach() for t in filled(grads, params)]


@contextmanager
def naming_reentrant_checkpoints() -> Iterator[None]:
    """Raise `InputError` where a gradient is asked for that torch's reentrant checkpointing does not give."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise InputError(
            "model uses torch.utils.checkpoint with use_reentrant=True, through which no gradient can be taken "
            "aside: set use_reentrant=False"
        ) from error
