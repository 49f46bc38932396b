"""DenseNet-BC for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metacal.errors import require
from metacal.models.layers import check_dropout, check_image_shape, init_conv_, norm_layer

__all__ = ["DenseNet", "densenet"]


class _DenseLayer(nn.Module):
    """Appends `growth` maps to its input: a 1x1 bottleneck of 4·growth, then a 3x3 convolution, both pre-activated."""

    def __init__(self, c_in: int, growth: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm1 = norm_layer(norm, c_in)
        self.conv1 = nn.Conv2d(c_in, 4 * growth, 1, bias=False)
        self.norm2 = norm_layer(norm, 4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(torch.relu(self.norm1(x)))
        y = self.conv2(torch.relu(self.norm2(y)))
        return torch.cat([x, self.dropout(y)], 1)


class _Transition(nn.Module):
    """Half the maps, half the sides."""

    def __init__(self, c_in: int, c_out: int, norm: str) -> None:
        super().__init__()
        self.norm = norm_layer(norm, c_in)
        self.conv = nn.Conv2d(c_in, c_out, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(torch.relu(self.norm(x))))


class DenseNet(nn.Module):
    """DenseNet-BC of Huang et al. 2017: depth 6n + 4, three dense blocks of n layers, compression 1/2."""

    def __init__(self, depth: int, growth: int, n_classes: int, channels: int, norm: str, dropout: float) -> None:
        super().__init__()
        c = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(channels, c, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range((depth - 4) // 6):
                layers.append(_DenseLayer(c, growth, norm, dropout))
                c += growth
            if block < 2:
                layers.append(_Transition(c, c // 2, norm))
                c //= 2
        self.layers = nn.Sequential(*layers)
        self.norm = norm_layer(norm, c)
        self.fc = nn.Linear(c, n_classes)
        init_conv_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.layers(x)))
        return self.fc(x.mean((2, 3)))


def densenet(
    n_classes: int,
    input_shape: tuple[int, ...],
    *,
    depth: int = 100,
    width: int = 12,
    norm: str = "batch",
    dropout: float = 0.0,
) -> DenseNet:
    """DenseNet-BC for small images `(N, C, H, W) -> (N, K)`; `width` is the growth rate."""
    channels, _, _ = check_image_shape("densenet", input_shape, smallest=4)
    require(
        depth >= 10 and (depth - 4) % 6 == 0,
        f"model.depth of densenet must be 6n + 4 (10, 16, 22, 40, 100, ...), got {depth}",
    )
    require(width >= 1, f"model.width must be >= 1, got {width}")
    return DenseNet(depth, width, n_classes, channels, norm, check_dropout(dropout))
