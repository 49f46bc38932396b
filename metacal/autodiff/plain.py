"""Normalisation by plain arithmetic.

PyTorch has third derivatives of normalisation by a batch's or a layer's own statistics wrong, without saying so, or
not at all. Here they are made of operations whose derivatives of every order are right, and which have `rules`. Each
function has the signature of the one that it stands for and gives its value; running statistics stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

__all__ = ["NORMS", "WRONG", "PlainNorms", "mean_square", "standardised"]


def mean_square(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean of x² over dims, which stay as ones. One function to a mode, since its jet is cheaper than its parts'."""
    if has_torch_function((x,)):
        return handle_torch_function(mean_square, (x,), x, dims)
    return x.square().mean(dims, keepdim=True)


def standardised(x: Tensor, dims: tuple[int, ...], eps: float, centred: bool = True) -> tuple[Tensor, Tensor]:
    """x - mean and 1/√(variance + eps), over dims; x itself and its mean square instead unless `centred`."""
    centre = x - x.mean(dims, keepdim=True) if centred else x
    return centre, (mean_square(centre, dims) + eps).rsqrt()


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if weight is not None:
        y = y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    shape = (1, -1, *[1] * (input.ndim - 2))
    if training:
        centre, scale = standardised(input, (0, *range(2, input.ndim)), eps)
    else:
        assert running_mean is not None and running_var is not None
        centre, scale = input - running_mean.view(shape), (running_var.view(shape) + eps).rsqrt()
    if weight is not None:  # scale and weight are one number a channel: multiply them first
        scale = scale * weight.view(shape)
    return _affine(centre * scale, None, bias, shape)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    centre, scale = standardised(input.reshape(len(input), num_groups, -1), (2,), eps)
    return _affine((centre * scale).reshape(input.shape), weight, bias, (1, -1, *[1] * (input.ndim - 2)))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    centre, scale = standardised(input, _last(input, normalized_shape), eps)
    return _affine(centre * scale, weight, bias, tuple(normalized_shape))


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    centre, scale = standardised(input, _last(input, normalized_shape), eps, centred=False)
    return _affine(centre * scale, weight, None, tuple(normalized_shape))


def _last(input: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(input.ndim - len(shape), input.ndim))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    dims = tuple(i for i in range(v.ndim) if i != dim)
    square = mean_square(v, dims) * math.prod(v.shape[i] for i in dims)
    return v * (g * square.rsqrt())


NORMS: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    torch._weight_norm: _weight_norm,
}
if hasattr(F, "rms_norm"):
    NORMS[F.rms_norm] = _rms_norm

WRONG = ("BatchNorm", "GroupNorm", "LayerNorm", "RmsNorm", "RMSNorm", "WeightNorm")
"""Parts of the names of graph nodes whose third derivatives PyTorch has wrong, without saying so, or not at all."""


class PlainNorms(TorchFunctionMode):
    """Within, normalisations are computed by plain arithmetic, whose derivatives of every order are right."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return NORMS.get(func, func)(*args, **(kwargs or {}))
