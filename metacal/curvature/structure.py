"""What a network's autograd graph says about its second derivatives, and exact forms for those that allow them.

Write z for the logits and let every parameter be used once. If between its elementwise activations the network is
linear in each single parameter (linear and convolution layers, BatchNorm in evaluation mode, pooling, sums), then
the residual R = Σ_nk u_nk ∇²z_nk of H = G + R gets its diagonal from the activations' own curvature alone: with
h a pre-activation, δ the gradient of u·z with respect to φ(h),

    Tr R = Σ_n Σ_h φ''(h) δ_h ‖∇_θ h‖²                                                                  (*)

For: ∂²(u·z)/∂θ_i² collects, over all activations, φ''(h) δ_h (∂h/∂θ_i)² (the chain rule's second-order term), and
nothing else, since θ_i enters each h linearly but for the activations below it, which are terms of the same sum.
Piecewise linear activations have φ'' = 0: then Tr H = Tr G exactly.

For a chain of linear layers h_l = W_l a_{l-1} + b_l, a_l = φ_l(h_l), z = h_L, all of it is closed form. With
β_l = ‖a_{l-1}‖² + 1 (1 for the bias), and Q_l the Hessian of u·z with respect to h_l,

    Q_L = 0,   Q_{l-1} = Φ'_{l-1} W_lᵀ Q_l W_l Φ'_{l-1} + diag(φ''(h_{l-1}) ∘ W_lᵀ δ_l),   Tr R = Σ_n Σ_l β_l tr Q_l

since ∂²/∂W_l[i,j]² = a_{l-1,j}² Q_l[i,i]. Q_{L-1} is diagonal, and of Q_1 only the diagonal is needed, so
with up to two hidden layers no matrix per example ever appears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from metacal.autodiff.activations import BY_INPUT, BY_RESULT, Slopes
from metacal.curvature.layers import Captured

__all__ = ["Chain", "chain_of", "curved_activations", "kind_of", "slopes_of"]

# graph nodes by what they do to a single parameter's path; names without "Backward0"/"Backward1"
LINEAR = {
    "Add", "Sub", "Neg", "View", "ReshapeAlias", "UnsafeView", "Reshape", "Expand", "Permute", "Transpose", "T",
    "Squeeze", "Unsqueeze", "Slice", "Select", "Cat", "Mean", "Sum", "AvgPool2D", "AdaptiveAvgPool2D",
    "MkldnnAdaptiveAvgPool2D", "ConstantPadNd", "ReflectionPad2D", "ReplicationPad2D", "Clone", "ToCopy", "Alias",
    "Div", "Relu", "LeakyRelu", "Hardtanh", "Threshold", "MaxPool2DWithIndices", "Contiguous", "AsStrided",
}  # fmt: skip
PRODUCT = {
    "Addmm", "Mm", "Bmm", "Mul", "Linear", "Convolution", "MkldnnConvolution", "NativeBatchNorm",
    "CudnnBatchNorm", "MiopenBatchNorm", "BatchNorm",
}  # fmt: skip
LEAF_VIEW = {"T", "View", "Transpose", "Permute", "Expand", "Unsqueeze", "ReshapeAlias", "Reshape"}
# activations: the function in torch, and its options as the node saved them
ACTIVATIONS = {
    "Tanh": ("tanh",),
    "Sigmoid": ("sigmoid",),
    "Relu": ("relu",),
    "LeakyRelu": ("leaky_relu", "_saved_negative_slope"),
    "Gelu": ("gelu", "_saved_approximate"),
    "Silu": ("silu",),
    "Softplus": ("softplus", "_saved_beta", "_saved_threshold"),
}


def kind_of(node: Any) -> str:
    """The name of a graph node without its suffix, as in "Addmm" for AddmmBackward0."""
    return node.name().split("Backward")[0].split("::")[-1]


def _is_leaf_view(node: Any) -> bool:
    while node is not None and not hasattr(node, "variable"):
        if kind_of(node) not in LEAF_VIEW or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None


def slopes_of(node: Any) -> Slopes | None:
    """(φ'(h), φ''(h)) of an activation's node from what it saved, with graphs; None if it is none that is known.

    φ'' is None where it is zero almost everywhere. Raises RuntimeError if what was saved is overwritten or freed.
    """
    name, *options = ACTIVATIONS.get(kind_of(node), ("",))
    if name in BY_RESULT:
        saved = node._saved_result if hasattr(node, "_saved_result") else node._saved_self
        return BY_RESULT[name](saved, *[getattr(node, o) for o in options])
    if name in BY_INPUT:
        return BY_INPUT[name](node._saved_self, *[getattr(node, o) for o in options])
    return None


def curved_activations(captured: Captured) -> list[tuple[GradientEdge, GradientEdge, Tensor]] | None:
    """Smooth activations as (edge of h, edge of φ(h), φ''(h)), if formula (*) holds for this network; else None.

    An empty list says Tr H = Tr G. None: a parameter is used twice or outside the covered layers, or the graph
    holds an operation that is not linear in a single parameter's path (normalisation by the layer's own statistics,
    attention, products of activations, unknown nodes).
    """
    if captured.others:
        return None
    sites = []
    seen, stack = {captured.z.grad_fn}, [captured.z.grad_fn]
    while stack:
        node: Any = stack.pop()
        kind = kind_of(node)
        children = [c for c, _ in node.next_functions if c is not None]
        if hasattr(node, "variable"):
            continue
        if kind in PRODUCT:
            if sum(not _is_leaf_view(c) for c in children) > 1:
                return None
        elif kind == "Div":
            if len(node.next_functions) > 1 and node.next_functions[1][0] is not None:
                return None
        elif kind not in LINEAR:
            try:
                with torch.no_grad():
                    parts = slopes_of(node)
            except RuntimeError:  # saved values overwritten in place
                return None
            if parts is None or parts[1] is None:
                return None
            child, index = node.next_functions[0]
            sites.append((GradientEdge(child, index), GradientEdge(node, 0), parts[1]))
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append(child)
    return sites


@dataclass
class Chain:
    """A multilayer perceptron taken apart: L linear layers with L - 1 elementwise activations between them."""

    weights: list[Tensor]  # W_l (out, in), l = 1..L
    beta: list[Tensor]  # β_l (n,): squared input norm (+ 1), as far as weight and bias are trainable
    slope: list[Tensor]  # φ'(h_l) (n, width), l = 1..L-1
    bend: list[Tensor]  # φ''(h_l)

    @property
    def depth(self) -> int:
        """Number of hidden layers."""
        return len(self.slope)

    def gauss_newton(self, columns: Tensor) -> Tensor:
        """Σ_c ‖J_nᵀ C_n^c‖² for columns (n, C, K) → (n,)."""
        d = columns
        total = self.beta[-1] * d.square().sum((1, 2))
        for l in range(self.depth, 0, -1):
            d = (d @ self.weights[l]) * self.slope[l - 1][:, None]
            total = total + self.beta[l - 1] * d.square().sum((1, 2))
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
        q = c[-1]  # the diagonal of Q, or all of it once `full`
        full = False
        for l in range(self.depth, 0, -1):
            diagonal = q.diagonal(dim1=1, dim2=2) if full else q
            total = total + self.beta[l - 1] * diagonal.sum(1)
            if l == 1:
                break
            w, slope = self.weights[l - 1], self.slope[l - 2]
            if l == 2:  # only the diagonal of Q_1 matters
                pulled = ((q @ w) * w).sum(1) if full else q @ w.square()
                q, full = pulled * slope.square() + c[l - 2], False
            else:
                pulled = w.T @ q @ w if full else (w.T * q[:, None]) @ w
                q = pulled * slope[:, :, None] * slope[:, None] + torch.diag_embed(c[l - 2])
                full = True
        return total

    def residual_sampled(self, u: Tensor, signs: list[Tensor], smooth: bool = False) -> Tensor:
        """An unbiased draw of `residual` (n,) from signs (n, width) for each hidden layer.

        With c = φ''(h) ∘ δ at every hidden unit, (*) is Tr R = Σ_l β_l Σ c_h ‖∂h/∂h_l‖², whose square is sampled by a
        product of two sums with random signs, one weighted by c/r and one by r: any constant r gives the same mean.
        r² = |c| has the least noise. `smooth` adds its mean, for a draw to be differentiated in θ: the noise of the
        derivative in c, of order 1/r, then stays finite.
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


def chain_of(captured: Captured) -> Chain | None:
    """The network as a `Chain`, if its graph is one: linear layers with known elementwise activations; else None."""
    by_node = {s.edge.node: s for s in captured.sites}
    if captured.others or not all(isinstance(s.module, nn.Linear) and s.a.ndim == 2 for s in captured.sites):
        return None
    node: Any = captured.z.grad_fn
    chain = Chain([], [], [], [])
    while True:
        site = by_node.pop(node, None)
        if site is None:
            return None
        module = site.module
        assert isinstance(module, nn.Linear)
        beta = torch.zeros(len(site.a), dtype=captured.z.dtype, device=captured.z.device)
        if module.weight.requires_grad:
            beta = beta + site.a.square().sum(1)
        if module.bias is not None and module.bias.requires_grad:
            beta = beta + 1
        chain.weights.insert(0, module.weight.detach())
        chain.beta.insert(0, beta)
        below = [c for c, _ in node.next_functions if c is not None and not _is_leaf_view(c)]
        if not below:
            return None if by_node else chain
        if len(below) > 1:
            return None
        try:
            with torch.no_grad():
                parts = slopes_of(below[0])
        except RuntimeError:
            return None
        if parts is None:
            return None
        slope, bend = parts
        chain.slope.insert(0, slope)
        chain.bend.insert(0, torch.zeros_like(slope) if bend is None else bend)
        node = below[0].next_functions[0][0]
