"""Elementwise functions with their first two derivatives, all differentiable once more, and right at the kinks' sides.

Each entry maps the input h and whatever options the operation has to (φ(h), φ'(h), φ''(h)); φ'' is None where it is
zero almost everywhere. A piecewise linear function's φ' is constant, so it has no graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "sigmoid_from_value", "tanh_from_value"]

Parts = tuple[Tensor, Tensor, "Tensor | None"]


def tanh_from_value(a: Tensor) -> Parts:
    slope = 1 - a * a
    return a, slope, -2 * a * slope


def sigmoid_from_value(a: Tensor) -> Parts:
    slope = a * (1 - a)
    return a, slope, slope * (1 - 2 * a)


def _tanh(h: Tensor) -> Parts:
    return tanh_from_value(torch.tanh(h))


def _sigmoid(h: Tensor) -> Parts:
    return sigmoid_from_value(torch.sigmoid(h))


def _relu(h: Tensor, inplace: bool = False) -> Parts:
    a = torch.relu(h)
    return a, (a.detach() > 0).to(h.dtype), None


def _leaky_relu(h: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Parts:
    up = (h.detach() > 0).to(h.dtype)
    return F.leaky_relu(h, negative_slope), up + (1 - up) * negative_slope, None


def _hardtanh(h: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Parts:
    inside = (h.detach() > min_val) & (h.detach() < max_val)
    return F.hardtanh(h, min_val, max_val), inside.to(h.dtype), None


def _relu6(h: Tensor, inplace: bool = False) -> Parts:
    return _hardtanh(h, 0.0, 6.0)


def _gelu(h: Tensor, approximate: str = "none") -> Parts:
    if approximate != "none":
        raise NotImplementedError("gelu by tanh")
    cdf = 0.5 * (1 + torch.erf(h * math.sqrt(0.5)))
    density = torch.exp(-0.5 * h * h) * (1 / math.sqrt(2 * math.pi))
    return F.gelu(h), cdf + h * density, density * (2 - h * h)


def _silu(h: Tensor, inplace: bool = False) -> Parts:
    s = torch.sigmoid(h)
    slope = s * (1 - s)
    return F.silu(h), s + h * slope, slope * (2 + h * (1 - 2 * s))


def _softplus(h: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Parts:
    linear = h.detach() * beta > threshold
    s = torch.sigmoid(beta * h)
    bend = beta * s * (1 - s)
    return (
        F.softplus(h, beta, threshold),
        torch.where(linear, torch.ones_like(s), s),
        torch.where(linear, torch.zeros_like(s), bend),
    )


def _exp(h: Tensor) -> Parts:
    a = torch.exp(h)
    return a, a, a


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
    "gelu": _gelu,
    "silu": _silu,
    "softplus": _softplus,
    "exp": _exp,
}
"""By the name of the torch function. Raise `NotImplementedError` for a variant that they do not cover."""
