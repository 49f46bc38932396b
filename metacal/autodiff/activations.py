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
        return torch.full_like(h, exponent, requires_grad=False), None
    if exponent == 2:
        return 2 * h, torch.full_like(h, 2.0, requires_grad=False)
    return exponent * h ** (exponent - 1), exponent * (exponent - 1) * h ** (exponent - 2)


def _square(h: Tensor) -> Slopes:
    return 2 * h, torch.full_like(h, 2.0, requires_grad=False)


def _sqrt(a: Tensor) -> Slopes:
    slope = 0.5 / a
    return slope, -0.5 * slope / (a * a)


def _reciprocal(a: Tensor) -> Slopes:
    square = a * a
    return -square, 2 * square * a


def _log(h: Tensor) -> Slopes:
    slope = 1 / h
    return slope, -slope * slope


def _log1p(h: Tensor) -> Slopes:
    return _log(1 + h)


def _expm1(a: Tensor) -> Slopes:
    return a + 1, a + 1


def _abs(h: Tensor) -> Slopes:
    return torch.sign(h.detach()), None


def _sin(h: Tensor) -> Slopes:
    return torch.cos(h), -torch.sin(h)


def _cos(h: Tensor) -> Slopes:
    return -torch.sin(h), -torch.cos(h)


def _erf(h: Tensor) -> Slopes:
    slope = (2 / math.sqrt(math.pi)) * (-h * h).exp()
    return slope, -2 * h * slope


def _elu(h: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Slopes:
    below = h.detach() <= 0
    # exponentials of what is above may overflow, and would spoil the gradient there
    e = torch.where(below, h * input_scale, 0.0).exp()
    slope = torch.where(below, scale * alpha * input_scale * e, scale)
    return slope, torch.where(below, scale * alpha * input_scale**2 * e, 0.0)


def _celu(h: Tensor, alpha: float = 1.0) -> Slopes:
    return _elu(h, alpha, 1.0, 1.0 / alpha)


def _selu(h: Tensor) -> Slopes:
    return _elu(h, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _mish(h: Tensor) -> Slopes:
    t, s = torch.tanh(torch.nn.functional.softplus(h)), torch.sigmoid(h)
    dt = (1 - t * t) * s
    return t + h * dt, dt * (2 + h * (1 - s) - 2 * h * t * s)


def _hardswish(h: Tensor) -> Slopes:
    up, between = (h.detach() > 3).to(h.dtype), ((h.detach() > -3) & (h.detach() <= 3)).to(h.dtype)
    return up + between * (h / 3 + 0.5), between / 3


def _hardsigmoid(h: Tensor) -> Slopes:
    return ((h.detach() > -3) & (h.detach() < 3)).to(h.dtype) / 6, None


def _log_sigmoid(h: Tensor) -> Slopes:
    s = torch.sigmoid(-h)
    return s, -s * (1 - s)


def _shrunk(h: Tensor, lambd: float = 0.5) -> Slopes:
    return (h.detach().abs() > lambd).to(h.dtype), None


def _threshold(h: Tensor, threshold: float, value: float) -> Slopes:
    return (h.detach() > threshold).to(h.dtype), None


def _clamp(h: Tensor, min: float | Tensor | None = None, max: float | Tensor | None = None) -> Slopes:
    inside = torch.ones_like(h, dtype=torch.bool)
    if min is not None:
        inside = inside & (h.detach() >= min)
    if max is not None:
        inside = inside & (h.detach() <= max)
    return inside.to(h.dtype), None


def _clamp_max(h: Tensor, max: float | Tensor) -> Slopes:
    return _clamp(h, None, max)


def _flat(h: Tensor, *args: object, **kwargs: object) -> Slopes:
    return torch.zeros_like(h, requires_grad=False), None


BY_RESULT: dict[str, Callable[..., Slopes]] = {
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
    "exp": _exp,
    "rsqrt": _rsqrt,
    "sqrt": _sqrt,
    "reciprocal": _reciprocal,
    "expm1": _expm1,
}
BY_INPUT: dict[str, Callable[..., Slopes]] = {
    "gelu": _gelu,
    "silu": _silu,
    "softplus": _softplus,
    "pow": _pow,
    "square": _square,
    "log": _log,
    "log1p": _log1p,
    "abs": _abs,
    "absolute": _abs,
    "sin": _sin,
    "cos": _cos,
    "erf": _erf,
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "mish": _mish,
    "hardswish": _hardswish,
    "hardsigmoid": _hardsigmoid,
    "log_sigmoid": _log_sigmoid,
    "hardshrink": _shrunk,
    "softshrink": _shrunk,
    "threshold": _threshold,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    **dict.fromkeys(("sign", "sgn", "round", "floor", "ceil", "trunc", "fix"), _flat),
}
"""By the name of the torch function. Raise `NotImplementedError` for a variant that they do not cover."""
