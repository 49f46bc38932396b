"""An autograd graph of logits, read backwards: a multilayer perceptron taken apart, or the last layer alone.

The tensors found carry their graphs, so closed forms made of them are differentiable in θ, and the forward pass that
the loss needed anyway is the only one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metacal.curvature.structure import Chain, kind_of, slopes_of

__all__ = ["Head", "chain_from", "ends_in_linear", "head_from"]


@dataclass
class Head:
    """The Linear layer z = W a + b on top: its input a (N, D), and its trained parameters as graph nodes' leaves."""

    a: Tensor
    weight: Tensor
    bias: Tensor | None  # None if there is none, or it is not trained


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
    keys = [s.variable if hasattr(s, "variable") else s for s in sources]
    return len({id(k) for k in keys}) == len(keys) and all(hasattr(s, "variable") or s in histories for s in sources)


def chain_from(z: Tensor, params: Iterable[Tensor], rows: slice = slice(None)) -> tuple[Chain, bool] | None:
    """The network behind logits z as a `Chain` with graphs, and whether all its activations are piecewise linear.

    None unless the graph is exactly linear layers on (N, in) with known elementwise activations in between, no
    parameter occurring twice. rows: the samples to keep.
    """
    chain = Chain([], [], [], [])
    sources: list[Any] = []
    straight = True
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
            straight = straight and bend is None
            chain.slope.insert(0, slope[rows])
            chain.bend.insert(0, torch.zeros_like(slope[rows]) if bend is None else bend[rows])
            node = node.next_functions[0][0]
    except (AttributeError, RuntimeError, NotImplementedError):
        # an operation of another torch, a graph that was freed or overwritten, a variant without a formula
        return None
    return (chain, straight) if sources and _known(sources, params) else None


def head_from(z: Tensor, params: Iterable[Tensor]) -> Head | None:
    """The Linear layer that made z, if its parameters are leaves that occur nowhere else in z's graph; else None."""
    node: Any = z.grad_fn
    try:
        layer = None if node is None else _linear(node)
        if layer is None or not layer.sources or not all(hasattr(s, "variable") for s in layer.sources):
            return None
        known = {id(p) for p in params}
        leaves = [s.variable for s in layer.sources]
        if not all(id(leaf) in known for leaf in leaves) or len(set(map(id, leaves))) < len(leaves):
            return None
        if layer.below is not None and _reaches(layer.below, layer.sources):
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


def _reaches(root: Any, targets: list[Any]) -> bool:
    aims = {id(t.variable) for t in targets}
    seen, stack = {root}, [root]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is None or child in seen:
                continue
            if hasattr(child, "variable") and id(child.variable) in aims:
                return True
            seen.add(child)
            stack.append(child)
    return False
