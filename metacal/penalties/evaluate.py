"""Checks of what penalties are given; they run networks by `metacal.network.logits_of`, which leaves all as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metacal.errors import require
from metacal.network import logits_of

__all__ = ["check_batch", "logits_of"]


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
