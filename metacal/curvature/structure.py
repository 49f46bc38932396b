"""What a network's autograd graph says about its second derivatives.

Write z for the logits and let every parameter be used once. If between its elementwise activations the network is
linear in each single parameter (linear and convolution layers, BatchNorm in evaluation mode, pooling, sums), then
the residual R = Σ_nk u_nk ∇²z_nk of H = G + R gets its diagonal from the activations' own curvature alone: with
h a pre-activation, δ the gradient of u·z with respect to φ(h),

    Tr R = Σ_n Σ_h φ''(h) δ_h ‖∇_θ h‖²                                                                  (*)

For: ∂²(u·z)/∂θ_i² collects, over all activations, φ''(h) δ_h (∂h/∂θ_i)² (the chain rule's second-order term), and
nothing else, since θ_i enters each h linearly but for the activations below it, which are terms of the same sum.
Piecewise linear activations have φ'' = 0: then Tr H = Tr G exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from metacal.autodiff.activations import BY_INPUT, BY_RESULT, Slopes
from metacal.autodiff.graph import below, is_leaf, kind_of, leaf_under, nodes_of
from metacal.curvature.layers import Captured

__all__ = ["CurvedActivation", "curved_activations", "slopes_of"]

# graph nodes by what they do to a single parameter's path; names without "Backward0"/"Backward1"
LINEAR = {
    "Add", "Sub", "Neg", "View", "ReshapeAlias", "UnsafeView", "Reshape", "Expand", "Permute", "Transpose", "T",
    "Squeeze", "Unsqueeze", "Slice", "Select", "Cat", "Mean", "Sum", "AvgPool2D", "AdaptiveAvgPool2D",
    "MkldnnAdaptiveAvgPool2D", "ConstantPadNd", "ReflectionPad2D", "ReplicationPad2D", "Clone", "ToCopy", "Alias",
    "Div", "Relu", "LeakyRelu", "Hardtanh", "Threshold", "MaxPool2DWithIndices", "Contiguous", "AsStrided",
    "NativeDropout",  # on a GPU; its mask is a constant
}  # fmt: skip
PRODUCT = {
    "Addmm", "Mm", "Bmm", "Mul", "Linear", "Convolution", "MkldnnConvolution", "NativeBatchNorm",
    "CudnnBatchNorm", "MiopenBatchNorm", "BatchNorm",
}  # fmt: skip
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


CurvedActivation = tuple[GradientEdge, GradientEdge, Tensor]
"""(edge of h, edge of φ(h), φ''(h))"""


def curved_activations(captured: Captured) -> list[CurvedActivation] | None:
    """Smooth activations, if formula (*) holds for this network; else None.

    An empty list says Tr H = Tr G. None: a parameter is used twice or outside the covered layers, or the graph
    holds an operation that is not linear in a single parameter's path (normalisation by the layer's own statistics,
    attention, products of activations, unknown nodes).
    """
    if captured.others:
        return None
    sites = []
    for node in nodes_of(captured.z):
        kind, children = kind_of(node), below(node)
        if is_leaf(node):
            continue
        if kind in PRODUCT:
            if sum(leaf_under(c) is None for c in children) > 1:
                return None
        elif kind == "Div":
            if len(children) > 1:
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
    return sites
