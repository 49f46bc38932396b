"""The two small models: a multilayer perceptron and a convolutional net that trains in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from metacal.errors import require
from metacal.models.layers import activation_layer, check_dropout, check_image_shape, init_conv_, norm_layer

__all__ = ["cnn", "mlp"]


def mlp(
    n_classes: int,
    input_shape: tuple[int, ...],
    *,
    hidden: Sequence[int] = (200, 200),
    activation: str = "tanh",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Flatten, then a Linear and an activation for each of `hidden`, then the head: `(N, *input_shape) -> (N, K)`.

    Two hidden layers of 200 with tanh are the fully connected net of Cohen et al. 2021, which the study of
    calibration along the trajectory (arXiv 2604.20614) trains too.
    """
    require(
        len(hidden) > 0 and all(isinstance(h, int) and h >= 1 for h in hidden),
        f"model.hidden must be a list of sizes >= 1 with at least one, got {list(hidden)}",
    )
    check_dropout(dropout)
    layers: list[nn.Module] = [nn.Flatten()]
    size = prod(input_shape)
    for width in hidden:
        layers += [nn.Linear(size, width), activation_layer(activation)]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
        size = width
    return nn.Sequential(*layers, nn.Linear(size, n_classes))


def cnn(
    n_classes: int,
    input_shape: tuple[int, ...],
    *,
    width: int = 32,
    activation: str = "relu",
    norm: str = "batch",
    dropout: float = 0.0,
    pool: int = 1,
) -> nn.Sequential:
    """Four 3x3 convolutions, each with norm and activation, then a mean and the head: `(N, C, H, W) -> (N, K)`.

    Channels: `width`, `width`, 2 `width`, 2 `width`. The first convolution has stride 2 for sides of 16 and
    more, which makes a step about four times cheaper; maxima over 2x2 follow the second one. The mean leaves
    `pool` x `pool` cells: 1 is the global mean; with more the head has weights by place and can overfit.
    """
    channels, height, side = check_image_shape("cnn", input_shape, smallest=4)
    require(width >= 1, f"model.width must be >= 1, got {width}")
    check_dropout(dropout)
    last = min(height, side) // (4 if min(height, side) >= 16 else 2)
    require(1 <= pool <= last, f"model.pool must be between 1 and {last} for images of {height}x{side}, got {pool}")
    stride = 2 if min(height, side) >= 16 else 1

    def block(c_in: int, c_out: int, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        return [conv, norm_layer(norm, c_out), activation_layer(activation)]

    net = nn.Sequential(
        *block(channels, width, stride),
        *block(width, width),
        nn.MaxPool2d(2),
        *block(width, 2 * width),
        *block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(pool),
        nn.Flatten(),
        *([nn.Dropout(dropout)] if dropout > 0 else []),
        nn.Linear(2 * width * pool**2, n_classes),
    )
    init_conv_(net)
    return net
