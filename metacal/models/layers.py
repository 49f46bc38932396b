"""Pieces that several models share. None works in place: forward-mode differentiation and hooks need the inputs."""

from __future__ import annotations

from math import gcd

from torch import nn

from metacal.errors import require

__all__ = ["activation_layer", "check_dropout", "check_image_shape", "init_conv_", "norm_layer"]

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def activation_layer(name: str) -> nn.Module:
    """The activation called `name`: tanh, relu or gelu."""
    require(name in _ACTIVATIONS, f"model.activation must be one of {', '.join(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]()


def norm_layer(name: str, channels: int) -> nn.Module:
    """Normalisation of `channels` maps: `batch` statistics, or `group`: up to 8 groups of each sample's own."""
    require(name in ("batch", "group"), f"model.norm must be batch or group, got {name!r}")
    return nn.BatchNorm2d(channels) if name == "batch" else nn.GroupNorm(gcd(channels, 8), channels)


def check_dropout(p: float) -> float:
    """`p` if it is a probability below 1."""
    require(0.0 <= p < 1.0, f"model.dropout must be in [0, 1), got {p}")
    return p


def check_image_shape(model: str, input_shape: tuple[int, ...], smallest: int = 1) -> tuple[int, int, int]:
    """`input_shape` as (channels, height, width), each side at least `smallest`."""
    require(
        len(input_shape) == 3,
        f"model {model} needs images (channels, height, width), got inputs of shape {tuple(input_shape)}; "
        "use model=mlp for features",
    )
    channels, height, width = input_shape
    require(
        min(height, width) >= smallest,
        f"model {model} needs images of at least {smallest}x{smallest}, got {height}x{width}",
    )
    return channels, height, width


def init_conv_(net: nn.Module) -> None:
    """He et al.'s normal initialisation (variance 2 / fan-out) of every convolution of `net`, biases zero."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
