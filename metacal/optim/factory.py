"""Optimizers by name."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from metacal.errors import require, require_choice
from metacal.optim.basic import (
    AdamOptions,
    AdamWOptions,
    GradientDescentOptions,
    OptimizerOptions,
    Parameters,
    SGDOptions,
)
from metacal.optim.bulk_sgd import BulkSGDOptions
from metacal.optim.muon import MuonOptions
from metacal.optim.sam import SAMOptions
from metacal.options import built

__all__ = ["OPTIMIZERS", "backbone_optimizer", "build_optimizer"]

OPTIMIZERS: dict[str, type[OptimizerOptions] | type[SAMOptions]] = {
    "gd": GradientDescentOptions,
    "sgd": SGDOptions,
    "adam": AdamOptions,
    "adamw": AdamWOptions,
    "muon": MuonOptions,
    "sam": SAMOptions,
    "bulk_sgd": BulkSGDOptions,
}
"""By the name that a configuration gives: dataclasses like `OptimizerOptions`, whose `build` makes the optimizer."""


def backbone_optimizer(backbone: nn.Module, name: str, *, loss: str = "cross_entropy", **options: Any) -> Optimizer:
    """The optimizer called `name`, one of `OPTIMIZERS`, over the trainable parameters of a backbone.

    Args:
        loss: "cross_entropy" or "mse", whose curvature bulk_sgd reads.
        options: of that optimizer, such as `lr`, its own defaults for what is left out. For sam also those of the one
            inside it, which `base` names.

    Raises:
        InputError: for another name or option, settings out of range, muon on a model without matrices, a k too large.
    """
    require_choice("optimizer.name", name, OPTIMIZERS)
    part = built(f"optimizer {name}", OPTIMIZERS[name], options)
    part.check("optimizer.")
    return part.build(backbone, loss)


def build_optimizer(name: str, groups: Parameters, lr: float, **options: Any) -> Optimizer:
    """The optimizer called `name`, of those that need no model (sgd, adam, adamw), over parameters or groups of them.

    Raises:
        InputError: for another name or option, or values out of range.
    """
    require_choice("optimizer.name", name, ("sgd", "adam", "adamw"))
    part = built(f"optimizer {name}", OPTIMIZERS[name], {"lr": lr, **options})
    part.check("optimizer.")
    require(part.head_lr == 1, f"optimizer.head_lr needs a model, got {part.head_lr} for parameters or groups of them")
    return part.over(groups)
