"""Between the pixels of an image, in [0, 1], and what the network is given: (pixel − mean) / std per channel.

A distance or a gradient in the input has the units of one or the other, `UNITS`: by default of pixels, in which radii
are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metacal.devices import sent
from metacal.errors import require

__all__ = ["NORMS", "RADIUS", "UNITS", "Pixels", "check_pixels", "require_known", "to_inputs"]

NORMS = ("linf", "l2")
"""Of perturbations of the input."""

UNITS = ("pixels", "inputs")
"""Of distances and gradients in the input: pixels in [0, 1], or the inputs as the network is given them."""

RADIUS = 8 / 255
"""The usual one for images, in pixels in [0, 1]."""

OUTSIDE = 1e-3  # how far, in pixel units, rounding may carry a valid input out of [0, 1]


class Pixels(NamedTuple):
    """Inputs are (pixel − mean) / std, one mean and std a channel (dimension 1 of x), pixels in [0, 1].

    mean, std: numbers, sequences or tensors (C,); a single number serves all channels.
    """

    mean: float | Sequence[float] | Tensor
    std: float | Sequence[float] | Tensor


def check_pixels(pixels: Any) -> None:
    """Raise `InputError` unless `pixels` is None or holds finite means and as many positive stds."""
    if pixels is None:
        return
    require(
        isinstance(pixels, Pixels),
        f"pixels must be None (inputs in [0, 1]) or metacal.penalties.Pixels(mean, std), got {pixels!r}",
    )
    if any(isinstance(t, Tensor) and t.device.type != "cpu" for t in pixels):
        return  # a look at the values would make a GPU wait
    mean, std = (torch.as_tensor(t, dtype=torch.float64) for t in pixels)
    require(
        mean.shape == std.shape and mean.ndim <= 1 and bool(mean.isfinite().all()) and bool(std.isfinite().all()),
        f"pixels must hold finite mean and std of one length, got mean {mean.tolist()} and std {std.tolist()}",
    )
    require(bool((std > 0).all()), f"pixels.std must be > 0, got {std.tolist()}")


def require_known(what: str, units_key: str, pixels: Pixels | None) -> None:
    """Raise `InputError` where `what` is in units of pixels and nobody knows how inputs are made of them."""
    require(
        pixels is not None,
        f"{what} works on pixels, and the range of these inputs' pixels is not known: give uint8 images, or to "
        "metacal.fit pixels=(mean, std) with inputs = (pixel - mean) / std and pixels in [0, 1], or set "
        f"{units_key}=inputs",
    )


def to_inputs(pixels: Pixels | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, std), shaped to broadcast over x; (0, 1) where inputs are pixels themselves."""
    if pixels is None:
        return x.new_zeros(()), x.new_ones(())
    mean, std = (sent(torch.as_tensor(t, dtype=x.dtype), x.device) for t in pixels)
    if mean.ndim == 0 or mean.numel() == 1:
        return mean.reshape(()), std.reshape(())
    require(
        x.ndim >= 2 and x.shape[1] == len(mean),
        f"pixels has {len(mean)} channels, x has shape {tuple(x.shape)}: they must agree in dimension 1",
    )
    shape = (1, -1, *[1] * (x.ndim - 2))
    return mean.view(shape), std.view(shape)
