"""A multilayer perceptron read off the graph of its logits, and the closed forms that it allows.

For a chain of linear layers h_l = W_l a_{l-1} + b_l, a_l = φ_l(h_l), z = h_L, traces of G and of the residual
R = Σ_nk u_nk ∇²z_nk (`structure`) are closed form. With β_l = ‖a_{l-1}‖² + 1 (1 for the bias), and Q_l the Hessian of
u·z with respect to h_l,

    Q_L = 0,   Q_{l-1} = Φ'_{l-1} W_lᵀ Q_l W_l Φ'_{l-1} + diag(φ''(h_{l-1}) ∘ W_lᵀ δ_l),   Tr R = Σ_n Σ_l β_l tr Q_l

since ∂²/∂W_l[i,j]² = a_{l-1,j}² Q_l[i,i]. Q_{L-1} is diagonal, and of Q_1 only the diagonal is needed, so with up to
two hidden layers no matrix per example ever appears.

The tensors carry their graphs, so what is made of them is differentiable in θ, and the forward pass that the loss
needed anyway is the only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metacal.autodiff.graph import is_leaf, kind_of, nodes_of
from metacal.curvature.loss import LogitLoss, logit_pullback, logit_trace
from metacal.curvature.structure import slopes_of

__all__ = ["Chain", "Head", "chain_from", "ends_in_linear", "head_from"]


@dataclass
class Chain:
    """A multilayer perceptron taken apart: L linear layers with L - 1 elementwise activations between them."""

    weights: list[Tensor]  # W_l (out, in), l = 1..L
    beta: list[Tensor]  # β_l (n,): squared input norm (+ 1), as far as weight and bias are trainable
    slope: list[Tensor]  # φ'(h_l) (n, width), l = 1..L-1
    bend: list[Tensor]  # φ''(h_l)
    straight: bool = True  # whether all activations are piecewise linear

    @property
    def depth(self) -> int:
        """Number of hidden layers."""
        return len(self.slope)

    def detached(self) -> Chain:
        parts = (self.weights, self.beta, self.slope, self.bend)
        weights, beta, slope, bend = ([t.detach() for t in part] for part in parts)
        return Chain(weights, beta, slope, bend, self.straight)

    def gauss_newton(self, columns: Tensor) -> Tensor:
        """Σ_c ‖J_nᵀ C_n^c‖² for columns (n, C, K) → (n,)."""
        d = columns
        total = self.beta[-1] * d.square().sum((1, 2))
        for l in range(self.depth, 0, -1):
            d = (d @ self.weights[l]) * self.slope[l - 1][:, None]
            total = total + self.beta[l - 1] * d.square().sum((1, 2))
        return total

    def gauss_newton_exact(self, z: Tensor, loss: LogitLoss) -> Tensor:
        """tr(J_nᵀ S_n J_n), (n,): Σ_l β_l tr Q_l as for the residual, but with Q_L = S_n and no other source.

        O(K · width) an example with one hidden layer, and O((K + width) · width²) with more.
        """
        total = self.beta[-1] * logit_trace(z, loss)
        if not self.depth:
            return total
        q = _scaled(logit_pullback(z, self.weights[-1], loss, self.depth == 1), self.slope[-1])
        for l in range(self.depth, 0, -1):
            total = total + self.beta[l - 1] * _trace(q)
            if l > 1:
                q = _scaled(_pulled(q, self.weights[l - 1], l == 2), self.slope[l - 2])
        return total

    def sources(self, u: Tensor) -> list[Tensor]:
        """φ''(h_l) ∘ δ_l for each hidden layer, given u = N ∂L/∂z (n, K)."""
        out, d = [], u
        for l in range(self.depth, 0, -1):
            d = d @ self.weights[l]
            out.append(self.bend[l - 1] * d)
            d = d * self.slope[l - 1]
        return out[::-1]

    def residual(self, u: Tensor) -> Tensor:
        """Σ_l β_l tr Q_l, (n,)."""
        c = self.sources(u)
        total = torch.zeros_like(self.beta[-1])
        if not c:
            return total
        q = c[-1]
        for l in range(self.depth, 0, -1):
            total = total + self.beta[l - 1] * _trace(q)
            if l > 1:
                last = l == 2  # only the diagonal of Q_1 matters
                q = _scaled(_pulled(q, self.weights[l - 1], last), self.slope[l - 2])
                q = q + (c[l - 2] if last else torch.diag_embed(c[l - 2]))
        return total

    def residual_sampled(self, u: Tensor, signs: Sequence[Tensor], smooth: bool = False) -> Tensor:
        """An unbiased draw of `residual` (n,) from signs (n, width) for each hidden layer.

        With c = φ''(h) ∘ δ at every hidden unit Tr R = Σ_l β_l Σ c_h ‖∂h/∂h_l‖², whose square is sampled by a product
        of two sums with random signs, one weighted by c/r and one by r: any constant r gives the same mean. r² = |c|
        has the least noise. `smooth` adds its mean, for a draw to be differentiated in θ: the noise of the derivative
        in c, of order 1/r, then stays finite.
        """
        total = torch.zeros_like(self.beta[-1])
        s = t = torch.zeros_like(self.slope[-1])
        for l, c in reversed(list(enumerate(self.sources(u)))):
            if l + 1 < self.depth:
                s, t = ((a @ self.weights[l + 1]) * self.slope[l] for a in (s, t))
            size = c.detach().abs()
            r = (size + size.mean() if smooth else size).sqrt().clamp(min=1e-18)
            s, t = s + signs[l] * (c / r), t + signs[l] * r
            total = total + self.beta[l] * (s * t).sum(1)
        return total


# A symmetric matrix an example is given by all its entries (n, w, w), or by its diagonal (n, w) where it is diagonal or
# no more of it is needed.


def _trace(q: Tensor) -> Tensor:
    return (q if q.ndim == 2 else q.diagonal(dim1=1, dim2=2)).sum(1)


def _pulled(q: Tensor, w: Tensor, diagonal: bool) -> Tensor:
    """Wᵀ Q W for W (out, in), or its `diagonal`."""
    if diagonal:
        return q @ w.square() if q.ndim == 2 else ((q @ w) * w).sum(1)
    return (w.T * q[:, None]) @ w if q.ndim == 2 else w.T @ q @ w


def _scaled(q: Tensor, slope: Tensor) -> Tensor:
    """Φ' Q Φ' for φ' (n, w)."""
    return q * slope.square() if q.ndim == 2 else q * slope[:, :, None] * slope[:, None]


# -- reading it off a graph ----------------------------------------------------------------------------------------


@dataclass
class _Linear:
    a: Tensor | None  # input (N, in), None if the weight is not trained
    weight: Tensor | None  # (out, in), None if nothing below is trained
    sources: list[Any]  # graph nodes of the trained parameters
    trained_bias: bool
    below: Any


def _linear(node: Any) -> _Linear | None:
    """A Linear layer on (N, in) with whole parameters, or None."""
    kind = kind_of(node)
    if kind not in ("Addmm", "Mm"):
        return None
    children = [c for c, _ in node.next_functions]
    bias, below, weight = children if kind == "Addmm" else (None, *children)
    if kind == "Addmm" and not (node._saved_alpha == 1 and node._saved_beta == 1):
        return None
    if weight is not None and kind_of(weight) != "T":
        return None
    a = w = None
    if weight is not None:
        a = node._saved_mat1 if kind == "Addmm" else node._saved_self
    if below is not None:
        w = node._saved_mat2.t()
    sources = [] if weight is None else [weight.next_functions[0][0]]
    sources += [] if bias is None else [bias]
    return _Linear(a, w, sources, bias is not None, below)


def _known(sources: list[Any], params: Iterable[Tensor]) -> bool:
    """Whether each source is a parameter, and none occurs twice.

    A leaf is one. Other tensors are only if the model says so: its parameters have a history while an optimizer's
    steps are differentiated, and so has a weight that is made of other parameters, for which no formula here holds.
    """
    histories = {p.grad_fn for p in params if p.grad_fn is not None}
    keys = [s.variable if is_leaf(s) else s for s in sources]
    return len({id(k) for k in keys}) == len(keys) and all(is_leaf(s) or s in histories for s in sources)


def chain_from(z: Tensor, params: Sequence[Tensor], rows: slice = slice(None), copies: bool = False) -> Chain | None:
    """The network behind logits z as a `Chain` with graphs.

    None unless the graph is exactly linear layers on (N, in) with known elementwise activations in between, no
    parameter occurring twice. rows: the samples to keep; copies: whether other leaves may stand for the parameters.
    """
    chain = Chain([], [], [], [])
    sources: list[Any] = []
    node: Any = z.grad_fn
    try:
        while node is not None:
            layer = _linear(node)
            if layer is None:
                return None
            beta = torch.zeros(len(z), dtype=z.dtype, device=z.device)
            if layer.a is not None:
                beta = beta + layer.a.square().sum(1)
            if layer.trained_bias:
                beta = beta + 1
            sources += layer.sources
            chain.beta.insert(0, beta[rows])
            # the first layer's weight enters no formula
            chain.weights.insert(0, z.new_zeros(()) if layer.weight is None else layer.weight)
            node = layer.below
            if node is None:
                break
            parts = slopes_of(node)
            if parts is None:
                return None
            slope, bend = parts
            chain.straight = chain.straight and bend is None
            chain.slope.insert(0, slope[rows])
            chain.bend.insert(0, torch.zeros_like(slope[rows]) if bend is None else bend[rows])
            node = node.next_functions[0][0]
    except (AttributeError, RuntimeError, NotImplementedError):
        # an operation of another torch, a graph that was freed or overwritten, a variant without a formula
        return None
    leaves = {id(p) for p in params}
    if not copies and any(is_leaf(s) and id(s.variable) not in leaves for s in sources):
        return None
    return chain if sources and _known(sources, params) else None


@dataclass
class Head:
    """The Linear layer z = W a + b on top: its input a (N, D), and its trained parameters as graph nodes' leaves."""

    a: Tensor
    weight: Tensor
    bias: Tensor | None  # None if there is none, or it is not trained


def head_from(z: Tensor, params: Iterable[Tensor]) -> Head | None:
    """The Linear layer that made z, if its parameters are leaves that occur nowhere else in z's graph; else None."""
    node: Any = z.grad_fn
    try:
        layer = None if node is None else _linear(node)
        if layer is None or not layer.sources or not all(is_leaf(s) for s in layer.sources):
            return None
        known = {id(p) for p in params}
        leaves = [s.variable for s in layer.sources]
        if not all(id(leaf) in known for leaf in leaves) or len(set(map(id, leaves))) < len(leaves):
            return None
        if any(is_leaf(n) and any(n.variable is leaf for leaf in leaves) for n in nodes_of(layer.below)):
            return None
    except (AttributeError, RuntimeError):
        return None
    if layer.a is None:
        return None  # a frozen weight under a trained bias: nothing to gain
    return Head(layer.a, leaves[0], leaves[1] if layer.trained_bias else None)


def ends_in_linear(z: Tensor) -> bool:
    """Whether a Linear layer made z."""
    try:
        return z.grad_fn is not None and _linear(z.grad_fn) is not None
    except (AttributeError, RuntimeError):
        return False
