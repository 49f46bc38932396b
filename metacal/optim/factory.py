"""torch.optim optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from metacal.errors import require, require_choice

__all__ = ["build_optimizer", "parameter_groups"]


def parameter_groups(module: nn.Module, weight_decay: float, decay_norm_and_bias: bool = True) -> list[dict]:
    """The trainable parameters in at most two groups: with weight decay, and without.

    With `decay_norm_and_bias=False` the parameters of at most one dimension (biases, affine norms) get none.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    require(bool(parameters), "the model has no trainable parameter (requires_grad is false for all of them)")
    if decay_norm_and_bias or weight_decay == 0:
        return [{"params": parameters, "weight_decay": weight_decay}]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def build_optimizer(
    name: str,
    groups: list[dict] | Iterable[nn.Parameter],
    lr: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    betas: Iterable[float] = (0.9, 0.999),
    eps: float = 1e-8,
    amsgrad: bool = False,
) -> torch.optim.Optimizer:
    """The torch.optim optimizer called `name` (sgd, adam, adamw) over parameters or parameter groups.

    Raises:
        InputError: for another name, or `lr` < 0.
    """
    require_choice("optimizer.name", name, ("sgd", "adam", "adamw"))
    require(lr >= 0, f"optimizer.lr must be >= 0, got {lr}")
    if name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            dampening=dampening,
            weight_decay=weight_decay,
        )
    cls = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    beta1, beta2 = betas
    return cls(groups, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
