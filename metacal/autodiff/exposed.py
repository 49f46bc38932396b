"""Calls that a tape records in another form, with the same value bit for bit and the same random numbers drawn.

Dropout's mask and the entries that a pooling chose are needed by their derivatives, and are results only in these
forms. `opened` turns a function that PyTorch writes in Python into the calls that it makes, which then have rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.autodiff.attention import attention

__all__ = ["EXPOSED", "opened"]


def _never(*args: Any) -> bool:
    return False


@functools.cache
def opened(func: Any) -> Callable[..., Any] | None:
    """The same function, whose body a mode sees call by call; None unless it is written in Python.

    Such a function begins by asking whether a mode is there, and if so hands it the whole call. The copy has "no" for
    an answer.
    """
    names = getattr(getattr(func, "__code__", None), "co_names", ())
    asks = [n for n in names if n.startswith("has_torch_function")]
    if not asks:
        return None
    copy = FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(asks, _never)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _dropout(native: Callable[..., Tensor], channels: bool = False, in_place: bool = False) -> Callable[..., Tensor]:
    """`native` as a product with a mask: what the same function makes of ones, by the same random numbers.

    channels: one number is drawn a sample and channel.
    """

    def exposed(input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0 or input.numel() == 0:
            return input
        if input.is_cuda and p < 1 and not channels and not in_place:
            return torch.native_dropout(input, p, True)[0]  # which the function calls there; its mask has a byte
        if p == 1:
            mask = input.new_zeros(())
        else:
            with torch.no_grad():
                shape = (*input.shape[:2], *[1] * (input.ndim - 2))
                mask = native(input.new_ones(shape) if channels else torch.ones_like(input), p, True)
        return input.mul_(mask) if in_place else input * mask

    return exposed


def _alpha_dropout(channels: bool = False, in_place: bool = False) -> Callable[..., Tensor]:
    """a m x + b with m of zeros and ones: what is dropped becomes -α, and mean and variance stay (Klambauer 2017)."""

    def exposed(input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0 or input.numel() == 0:
            return input
        if p == 1:
            mask, shift = input.new_zeros(()), None
        else:
            with torch.no_grad():
                alpha = 1.7580993408473766
                a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
                shape = (*input.shape[:2], *[1] * (input.ndim - 2))
                mask = (input.new_empty(shape) if channels else torch.empty_like(input)).bernoulli_(1 - p)
                shift = mask.add(-1).mul_(alpha * a).add_(alpha * a * p)
                mask = mask.mul_(a)
        scaled = input.mul_(mask) if in_place else input * mask
        return scaled if shift is None else scaled.add_(shift)

    return exposed


def _chosen(with_indices: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """A maximum pooling by the form that says which entries it chose."""

    def exposed(*args: Any, return_indices: bool = False, **kwargs: Any) -> Tensor:
        return with_indices(*args, **kwargs)[0]

    return exposed


EXPOSED: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: attention,
    torch.dropout: _dropout(torch.dropout),
    torch.dropout_: _dropout(torch.dropout_, in_place=True),
    torch.feature_dropout: _dropout(torch.feature_dropout, channels=True),
    torch.feature_dropout_: _dropout(torch.feature_dropout_, channels=True, in_place=True),
    torch.alpha_dropout: _alpha_dropout(),
    torch.alpha_dropout_: _alpha_dropout(in_place=True),
    torch.feature_alpha_dropout: _alpha_dropout(channels=True),
    torch.feature_alpha_dropout_: _alpha_dropout(channels=True, in_place=True),
    F.max_pool1d: _chosen(F.max_pool1d_with_indices),
    F.max_pool2d: _chosen(F.max_pool2d_with_indices),
    F.max_pool3d: _chosen(F.max_pool3d_with_indices),
    torch.max_pool1d: _chosen(F.max_pool1d_with_indices),
    torch.max_pool2d: _chosen(F.max_pool2d_with_indices),
    torch.max_pool3d: _chosen(F.max_pool3d_with_indices),
    F.adaptive_max_pool1d: _chosen(F.adaptive_max_pool1d_with_indices),
    F.adaptive_max_pool2d: _chosen(F.adaptive_max_pool2d_with_indices),
    F.adaptive_max_pool3d: _chosen(F.adaptive_max_pool3d_with_indices),
}
"""By the function that PyTorch hands to a mode."""
