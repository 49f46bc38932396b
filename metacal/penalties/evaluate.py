"""How the penalties run a network of their own accord: in its present mode, leaving all of it as it was.

A forward pass gets copies of the buffers, so running statistics stay what the plain training forward made them. No
penalty calls `backward`, so no `.grad` is written. Attention runs by its plain kernel, whose second derivatives
exist. Compiled networks run as what they were compiled from: compiled code has no second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from metacal.errors import InputError, require
from metacal.forward_mode import plain_attention

__all__ = [
    "check_batch",
    "check_number",
    "graph_names",
    "logits_of",
    "own_buffers",
    "plain",
    "require_second_derivative",
]


def plain(model: nn.Module) -> nn.Module:
    """The network behind a compiled one."""
    return getattr(model, "_orig_mod", model)


@contextmanager
def own_buffers(model: nn.Module) -> Iterator[None]:
    """Copies in place of the buffers for the block. Unlike writing the old values back, this harms no graph."""
    held = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    copies: dict[int, Tensor] = {}
    for module, name, buffer in held:
        module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The logits (N, K) of a network that returns them, alone or as the first of a tuple. Float32 at least."""
    net = plain(model)
    with own_buffers(net), plain_attention():
        out = net(x)
    out = out[0] if isinstance(out, tuple) else out
    if not isinstance(out, Tensor):
        raise InputError(f"model must return logits or (logits, features), it returned {type(out).__name__}")
    require(
        out.ndim == 2 and len(out) == len(x) and out.shape[1] >= 2,
        f"model must return logits (N, K) with N = {len(x)} and K >= 2, they have shape {tuple(out.shape)}",
    )
    return out.float() if out.dtype in (torch.float16, torch.bfloat16) else out


def check_batch(name: str, model: Any, x: Tensor, y: Tensor, inputs: bool = False) -> None:
    """Raise `InputError` for anything but a module and a batch; `inputs`: x must allow a gradient."""
    require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}")
    require(isinstance(x, Tensor) and isinstance(y, Tensor), "x and y must be tensors")
    require(
        x.ndim >= 1 and y.ndim == 1 and len(x) == len(y) > 0,
        f"x and y must hold the same number of samples, at least one, y as (N,); got shapes {tuple(x.shape)} and "
        f"{tuple(y.shape)}",
    )
    require(
        not (y.is_floating_point() or y.is_complex() or y.dtype is torch.bool),
        f"y must hold integer labels, got {y.dtype}",
    )
    require(
        not inputs or x.is_floating_point(),
        f"x must be floating point for {name}, which needs the gradient in the inputs, got {x.dtype}",
    )


def check_number(name: str, value: Any, low: float, strict: bool = False, integer: bool = False) -> None:
    """Raise `InputError` unless value is a finite number (an integer) >= low, or > low if strict."""
    kinds: tuple[type, ...] = (int,) if integer else (int, float)
    right = isinstance(value, kinds) and not isinstance(value, bool)
    what = f"an integer {'>' if strict else '>='} {low:g}" if integer else f"{'>' if strict else '>='} {low:g}"
    require(
        right and low <= value < float("inf") and not (strict and value == low), f"{name} must be {what}, got {value!r}"
    )


def require_second_derivative(name: str, slope: Tensor) -> None:
    """Raise `InputError` if a recorded gradient cannot be differentiated again.

    PyTorch says so only in the later backward pass (operators without a second derivative), or drops the term
    silently (functions marked once_differentiable): both leave a node in the graph of the gradient.
    """
    for kind in graph_names(slope):
        if kind.endswith("Error") or "NotImplemented" in kind:
            raise InputError(
                f"{name} needs a second derivative, which an operation of the model lacks (graph node {kind}): use "
                "plain operations in its place, for attention softmax and matrix products"
            )


def graph_names(t: Tensor) -> set[str]:
    """The names of all nodes in a tensor's graph."""
    return {node.name() for node in nodes_of(t)}


def nodes_of(t: Tensor) -> set[Any]:
    if t.grad_fn is None:
        return set()
    seen: set[Any] = {t.grad_fn}
    stack: list[Any] = [t.grad_fn]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return seen
