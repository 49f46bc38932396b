"""Residual nets for small images: He et al.'s resnet20 to resnet110, and wide resnets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.errors import require
from metacal.models.layers import check_dropout, check_image_shape, init_conv_, norm_layer

__all__ = ["ResNet", "WideResNet", "resnet", "wide_resnet"]


def _conv3x3(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)


class _Block(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))), the shortcut without parameters ("option A").

    Where the block halves the sides and doubles the channels, the shortcut takes every second pixel and pads
    zeros.
    """

    def __init__(self, c_in: int, c_out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = _conv3x3(c_in, c_out, stride)
        self.norm1 = norm_layer(norm, c_out)
        self.conv2 = _conv3x3(c_out, c_out)
        self.norm2 = norm_layer(norm, c_out)
        self.stride = stride
        self.extra = c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            x = F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))
        return torch.relu(x + y)


class ResNet(nn.Module):
    """The net of section 4.2 of He et al. 2016: depth 6n + 2, three stages of n blocks, `width`·(1, 2, 4) channels."""

    def __init__(self, depth: int, n_classes: int, channels: int, width: int, norm: str) -> None:
        super().__init__()
        self.conv = _conv3x3(channels, width)
        self.norm = norm_layer(norm, width)
        blocks = []
        c_in = width
        for stage in range(3):
            for i in range((depth - 2) // 6):
                c_out = width * 2**stage
                blocks.append(_Block(c_in, c_out, 2 if stage > 0 and i == 0 else 1, norm))
                c_in = c_out
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(c_in, n_classes)
        init_conv_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc(self.blocks(x).mean((2, 3)))


def resnet(depth: int, n_classes: int, input_shape: tuple[int, ...], *, width: int = 16, norm: str = "batch") -> ResNet:
    """`resnet<depth>` for small images `(N, C, H, W) -> (N, K)`; resnet20 has 0.27 million parameters."""
    channels, _, _ = check_image_shape(f"resnet{depth}", input_shape, smallest=4)
    require(width >= 1, f"model.width must be >= 1, got {width}")
    return ResNet(depth, n_classes, channels, width, norm)


class _WideBlock(nn.Module):
    """x + conv(dropout(relu(norm(conv(relu(norm(x))))))), with a 1x1 convolution where the shape changes."""

    def __init__(self, c_in: int, c_out: int, stride: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm1 = norm_layer(norm, c_in)
        self.conv1 = _conv3x3(c_in, c_out, stride)
        self.norm2 = norm_layer(norm, c_out)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.conv2 = _conv3x3(c_out, c_out)
        changes = stride > 1 or c_in != c_out
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.norm1(x))
        y = self.conv2(self.dropout(torch.relu(self.norm2(self.conv1(a)))))
        return (x if self.shortcut is None else self.shortcut(a)) + y


class WideResNet(nn.Module):
    """WRN-`depth`-`width` of Zagoruyko & Komodakis 2016.

    Depth 6n + 4, three stages of n pre-activated blocks, 16·width·(1, 2, 4) channels.
    """

    def __init__(self, depth: int, width: int, n_classes: int, channels: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.conv = _conv3x3(channels, 16)
        blocks = []
        c_in = 16
        for stage in range(3):
            for i in range((depth - 4) // 6):
                c_out = 16 * width * 2**stage
                blocks.append(_WideBlock(c_in, c_out, 2 if stage > 0 and i == 0 else 1, norm, dropout))
                c_in = c_out
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm_layer(norm, c_in)
        self.fc = nn.Linear(c_in, n_classes)
        init_conv_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.blocks(self.conv(x))))
        return self.fc(x.mean((2, 3)))


def wide_resnet(
    n_classes: int,
    input_shape: tuple[int, ...],
    *,
    depth: int = 28,
    width: int = 10,
    norm: str = "batch",
    dropout: float = 0.0,
) -> WideResNet:
    """A wide resnet for small images `(N, C, H, W) -> (N, K)`; `width` is the widening factor."""
    channels, _, _ = check_image_shape("wide_resnet", input_shape, smallest=4)
    require(
        depth >= 10 and (depth - 4) % 6 == 0,
        f"model.depth of wide_resnet must be 6n + 4 (10, 16, 22, 28, 40, ...), got {depth}",
    )
    require(width >= 1, f"model.width must be >= 1, got {width}")
    return WideResNet(depth, width, n_classes, channels, norm, check_dropout(dropout))
