"""A small vision transformer, with attention spelled out so that every kind of derivative exists."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metacal.errors import require
from metacal.models.layers import check_dropout, check_image_shape

__all__ = ["ViT", "vit"]


class _Attention(nn.Module):
    """softmax(q kᵀ / sqrt(d)) v per head.

    Written as matrix products: the fused kernels have neither a double backward nor a forward-mode
    derivative.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, t, d))


class _Layer(nn.Module):
    """Pre-norm transformer layer: attention, then an MLP of 4·width, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Patches, learned positions, `depth` layers, mean over the tokens, head (Dosovitskiy et al. 2021, mean-pooled)."""

    def __init__(
        self,
        n_classes: int,
        input_shape: tuple[int, int, int],
        width: int,
        depth: int,
        heads: int,
        patch_size: int,
        dropout: float,
    ) -> None:
        super().__init__()
        channels, height, side = input_shape
        tokens = (height // patch_size) * (side // patch_size)
        self.patches = nn.Conv2d(channels, width, patch_size, stride=patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.layers = nn.Sequential(*(_Layer(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.fc(self.norm(self.layers(x)).mean(1))


def vit(
    n_classes: int,
    input_shape: tuple[int, ...],
    *,
    width: int = 128,
    depth: int = 6,
    heads: int = 4,
    patch_size: int = 4,
    dropout: float = 0.0,
) -> ViT:
    """A small vision transformer `(N, C, H, W) -> (N, K)`; the sides must be multiples of `patch_size`."""
    channels, height, side = check_image_shape("vit", input_shape)
    require(
        patch_size >= 1 and height % patch_size == 0 and side % patch_size == 0,
        f"model.patch_size must divide the image's sides {height}x{side}, got {patch_size}",
    )
    require(depth >= 1, f"model.depth must be >= 1, got {depth}")
    require(
        heads >= 1 and width >= 1 and width % heads == 0,
        f"model.width must be a multiple of model.heads, got width {width} and heads {heads}",
    )
    shape = (channels, height, side)
    return ViT(n_classes, shape, width, depth, heads, patch_size, check_dropout(dropout))
