"""Reading an autograd graph: every node once, what lies below a node, and what its names tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from metacal.errors import InputError

__all__ = [
    "below",
    "graph_names",
    "has_hooks",
    "is_leaf",
    "kind_of",
    "leaf_under",
    "leaf_uses",
    "nodes_of",
    "require_second_derivative",
    "without_second_derivative",
]


def below(node: Any) -> list[Any]:
    """The nodes that a node hands its gradients to."""
    return [child for child, _ in node.next_functions if child is not None]


def is_leaf(node: Any) -> bool:
    """Whether a node stands for a leaf tensor, which is then its `variable`."""
    return hasattr(node, "variable")


def has_hooks(node: Any) -> bool:
    """Whether Python code has registered a hook on a node, before it or after it.

    A node does not show its hooks: what registering one more gives back does.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def nodes_of(*roots: Any) -> Iterator[Any]:
    """All nodes of the graphs of tensors, or under nodes, each once; none for a tensor without a graph."""
    starts = [t.grad_fn if isinstance(t, Tensor) else t for t in roots]
    stack = list(dict.fromkeys(node for node in starts if node is not None))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for child in below(node):
            if child not in seen:
                seen.add(child)
                stack.append(child)


def graph_names(*roots: Any) -> set[str]:
    """The names of all nodes in the graphs of tensors."""
    return {node.name() for node in nodes_of(*roots)}


def kind_of(node: Any) -> str:
    """The name of a node without its suffix, as in "Addmm" for AddmmBackward0."""
    return node.name().split("Backward")[0].split("::")[-1]


_LEAF_VIEWS = {"T", "View", "Transpose", "Permute", "Expand", "Unsqueeze", "ReshapeAlias", "Reshape"}


def leaf_under(node: Any) -> Any | None:
    """The leaf's node of which a node is, or is but a view; else None."""
    while not is_leaf(node):
        if kind_of(node) not in _LEAF_VIEWS or len(below(node)) != 1:
            return None
        (node,) = below(node)
    return node


def leaf_uses(*tensors: Tensor) -> Counter[int]:
    """How many operations in the graphs of tensors read each leaf or a view of it, by id of the leaf tensor.

    A view may be read twice: a derivative that is part of the forward pass reads the transposed weight of its layer.
    """
    ends = [t.grad_fn for t in tensors if t.grad_fn is not None]
    read = [child for node in nodes_of(*tensors) if leaf_under(node) is None for child in below(node)]
    leaves = [leaf_under(node) for node in (*ends, *read)]
    return Counter(id(leaf.variable) for leaf in leaves if leaf is not None)


def without_second_derivative(*gradients: Tensor | None) -> str | None:
    """The node in the graphs of gradients that cannot be differentiated again, by name, or None.

    PyTorch says so only in the later backward pass (operators without a second derivative), or drops the term
    silently (functions marked once_differentiable).
    """
    names = graph_names(*[g for g in gradients if g is not None])
    return next((n for n in sorted(names) if n.endswith("Error") or "NotImplemented" in n), None)


def require_second_derivative(name: str, *gradients: Tensor | None) -> None:
    """Raise `InputError`, for the sake of `name`, if recorded gradients cannot be differentiated again."""
    node = without_second_derivative(*gradients)
    if node is not None:
        raise InputError(
            f"{name} needs a second derivative, which an operation of the model lacks (graph node {node}): use plain "
            "operations in its place, for attention softmax and matrix products"
        )
