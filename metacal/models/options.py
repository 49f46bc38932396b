"""The options of a run's backbone."""

from __future__ import annotations

from dataclasses import dataclass

from metacal.options import option

__all__ = ["ModelConfig"]


@dataclass
class ModelConfig:
    """The backbone. None means the model's own default; an option that the model lacks is refused when set."""

    name: str = option("mlp", "mlp, cnn, resnet20/32/44/56/110, wide_resnet, densenet, vit or torchvision/<name>")
    hidden: list[int] | None = option(None, "mlp: widths of the hidden layers, [200,200]")
    activation: str | None = option(None, "mlp, cnn: tanh (mlp's), relu (cnn's) or gelu")
    width: int | None = option(
        None, "cnn: 32, resnets: 16, wide_resnet: 10 (times 16), densenet: 12 (growth), vit: 128"
    )
    depth: int | None = option(None, "wide_resnet: 28, densenet: 100, vit: 6")
    dropout: float | None = option(None, "mlp, cnn, wide_resnet, densenet, vit: 0")
    norm: str | None = option(None, "cnn, resnets, wide_resnet, densenet: batch or group")
    patch_size: int | None = option(None, "vit: 4")
    heads: int | None = option(None, "vit: 4")
    pool: int | None = option(None, "cnn: 1, cells a side that the last mean leaves; more of them overfit sooner")
    stem: str | None = option(None, "torchvision/<name>: small or original; by the images' size")
