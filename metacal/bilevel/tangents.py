"""Tangents that are worth more than PyTorch's own.

**Batch normalisation.** In training mode y = w x̂ + b with x̂ = (x − μ) s, and the derivative in x is
symmetric: what carries a cotangent backward carries a tangent forward. So

    ẏ = BN'(ẋ) + ẇ x̂ + ḃ

with the fused backward kernel for the first term and a normalisation with scale ẇ and shift ḃ for the others,
instead of the dozen passes over the activations of PyTorch's formula, which cost more than the convolutions in
a narrow net.

**First layers.** Where the input of a linear or convolutional layer has no tangent, ẏ is the layer with (ẇ, ḃ)
in place of (w, b). PyTorch multiplies w by a zero tangent as well, which doubles the cost of a net whose first
layer dominates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

__all__ = ["FastTangents"]


class FastTangents(TorchFunctionMode):
    """Inside a forward-AD level, without grad: the tangents above; every other function as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        if func in _LAYERS and len(args) >= 2:
            return _layer(func, *args, **kwargs)
        return func(*args, **kwargs)


_LAYERS = {F.linear, F.conv1d, F.conv2d, F.conv3d}


def _layer(
    func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    x, dx = forward_ad.unpack_dual(input)
    w, dw = forward_ad.unpack_dual(weight)
    if dx is not None or dw is None:
        return func(input, weight, bias, *args, **kwargs)
    b, db = (None, None) if bias is None else forward_ad.unpack_dual(bias)
    return forward_ad.make_dual(func(x, w, b, *args, **kwargs), func(x, dw, db, *args, **kwargs))


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
    x, dx = forward_ad.unpack_dual(input)
    plain = not training or dx is None or input.device.type != "cpu" or weight is None or bias is None
    if plain:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    assert weight is not None and bias is not None and dx is not None
    (w, dw), (b, db) = forward_ad.unpack_dual(weight), forward_ad.unpack_dual(bias)
    y, mean, invstd = torch.native_batch_norm(x, w, b, running_mean, running_var, True, momentum, eps)
    dy = torch.ops.aten.native_batch_norm_backward(
        dx.contiguous(), x, w, None, None, mean, invstd, True, eps, [True, False, False]
    )[0]
    if dw is not None or db is not None:
        # x̂ dw + db as a normalisation by given statistics: its kernel adds eps, which the variance here lacks
        dw = torch.zeros_like(w) if dw is None else dw
        db = torch.zeros_like(b) if db is None else db
        variance = invstd.pow(-2) - eps
        dy.add_(torch.native_batch_norm(x, dw, db, mean, variance, False, 0.0, eps)[0])
    return forward_ad.make_dual(y, dy)
