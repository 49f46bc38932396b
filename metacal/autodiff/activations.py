"""First and second derivatives of elementwise functions, differentiable once more, and right at the kinks' sides.

Each function maps a tensor and the function's own options to (φ'(h), φ''(h)); φ'' is None where it is zero almost
everywhere, and a piecewise linear function's φ' is constant, so it has no graph. `BY_RESULT` wants a = φ(h), which
survives where a network overwrites its input, `BY_INPUT` wants h. Both go by the name of the function in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BY_INPUT", "BY_RESULT", "Slopes"]

Slopes = tuple[Tensor, "Tensor | None"]


def _tanh(a: Tensor) -> Slopes:
    slope = 1 - a * a
    return slope, -2 * a * slope


def _sigmoid(a: Tensor) -> Slopes:
    slope = a * (1 - a)
    return slope, slope * (1 - 2 * a)


def _relu(a: Tensor) -> Slopes:
    return (a.detach() > 0).to(a.dtype), None


def _leaky_relu(a: Tensor, negative_slope: float = 0.01) -> Slopes:
    if negative_slope < 0:
        raise NotImplementedError("a leaky relu of negative slope hides the sign of its input")
    up = (a.detach() > 0).to(a.dtype)
    return up + (1 - up) * negative_slope, None


def _hardtanh(a: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Slopes:
    return ((a.detach() > min_val) & (a.detach() < max_val)).to(a.dtype), None


def _relu6(a: Tensor) -> Slopes:
    return _hardtanh(a, 0.0, 6.0)


def _exp(a: Tensor) -> Slopes:
    return a, a


def _rsqrt(a: Tensor) -> Slopes:
    cube = a * a * a
    return -0.5 * cube, 0.75 * cube * a * a


def _gelu(h: Tensor, approximate: str = "none") -> Slopes:
    if approximate == "none":
        density = (-0.5 * h * h).exp() / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(h * math.sqrt(0.5))) + h * density, density * (2 - h * h)
    k, c = math.sqrt(2 / math.pi), 0.044715
    square = h * h
    t = torch.tanh(k * h * (1 + c * square))
    u = k * (1 + 3 * c * square)  # derivative of tanh's argument
    dt = 1 - t * t
    return 0.5 * (1 + t + h * dt * u), dt * (u + h * (3 * k * c * h - t * u * u))


def _silu(h: Tensor) -> Slopes:
    s = torch.sigmoid(h)
    slope = s * (1 - s)
    return s + h * slope, slope * (2 + h * (1 - 2 * s))


def _softplus(h: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Slopes:
    s = torch.sigmoid(beta * h)
    s = torch.where(h.detach() * beta > threshold, torch.ones_like(s), s)
    return s, beta * s * (1 - s)


def _pow(h: Tensor, exponent: float) -> Slopes:
    if exponent in (0, 1):
        raise NotImplementedError(f"the power {exponent}")
    return exponent * h ** (exponent - 1), exponent * (exponent - 1) * h ** (exponent - 2)


def _square(h: Tensor) -> Slopes:
    return _pow(h, 2)


BY_RESULT: dict[str, Callable[..., Slopes]] = {
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
    "exp": _exp,
    "rsqrt": _rsqrt,
}
BY_INPUT: dict[str, Callable[..., Slopes]] = {
    "gelu": _gelu,
    "silu": _silu,
    "softplus": _softplus,
    "pow": _pow,
    "square": _square,
}
"""By the name of the torch function. Raise `NotImplementedError` for a variant that they do not cover."""
