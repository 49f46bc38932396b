"""Optimizers by name: those of torch.optim over any parameters, and all of them over a backbone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from metacal.errors import require, require_choice
from metacal.optim.bulk_sgd import BulkSGD
from metacal.optim.muon import Muon, muon_groups
from metacal.optim.sam import SAM

__all__ = ["OPTIMIZERS", "backbone_optimizer", "build_optimizer", "parameter_groups"]

OPTIMIZERS = ("gd", "sgd", "adam", "adamw", "muon", "sam", "bulk_sgd")
"""What `backbone_optimizer` knows. gd is sgd, whose batch is the whole training set."""


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


def backbone_optimizer(
    backbone: nn.Module,
    name: str,
    lr: float,
    *,
    weight_decay: float = 0.0,
    decay_norm_and_bias: bool = True,
    momentum: float = 0.0,
    nesterov: bool = False,
    dampening: float = 0.0,
    betas: Iterable[float] = (0.9, 0.999),
    eps: float = 1e-8,
    amsgrad: bool = False,
    rest: str = "adamw",
    rest_lr: float = 1e-3,
    base: str = "sgd",
    rho: float = 0.05,
    adaptive: bool = False,
    k: int = 1,
    matrix: str = "hessian",
    every: int = 1,
    tol: float = 1e-3,
    loss: str = "cross_entropy",
) -> torch.optim.Optimizer:
    """The optimizer called `name`, one of `OPTIMIZERS`, over the trainable parameters of a backbone.

    Args:
        momentum, nesterov, dampening: sgd, gd, bulk_sgd, and the first two muon (weight decay is decoupled there).
        betas, eps, amsgrad: adam, adamw; betas and eps also muon's AdamW for `rest`.
        rest, rest_lr: muon's optimizer for heads, biases and norms, adamw or sgd.
        base, rho, adaptive: sam, around any of sgd, adam, adamw and muon.
        k, matrix, every, tol, loss: bulk_sgd.

    Raises:
        InputError: for another name, settings out of range, muon on a model without matrices, a k too large.
    """
    require_choice("optimizer.name", name, OPTIMIZERS)
    settings: dict[str, Any] = {
        "weight_decay": weight_decay,
        "decay_norm_and_bias": decay_norm_and_bias,
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": dampening,
        "betas": betas,
        "eps": eps,
        "amsgrad": amsgrad,
        "rest": rest,
        "rest_lr": rest_lr,
    }
    if name == "sam":
        require_choice("optimizer.base", base, ("sgd", "adam", "adamw", "muon"))
        return SAM(backbone_optimizer(backbone, base, lr, **settings), rho=rho, adaptive=adaptive)
    if name == "muon":
        options: dict[str, Any] = {"momentum": momentum}
        if rest == "adamw":
            options = {"betas": tuple(betas), "eps": eps}
        groups = muon_groups(
            backbone,
            lr=lr,
            weight_decay=weight_decay,
            rest=rest,
            rest_lr=rest_lr,
            rest_weight_decay=weight_decay,
            rest_options=options,
            decay_norm_and_bias=decay_norm_and_bias,
        )
        return Muon(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    groups = parameter_groups(backbone, weight_decay, decay_norm_and_bias)
    sgd: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}
    if name == "bulk_sgd":
        return BulkSGD(groups, lr, backbone, k=k, matrix=matrix, every=every, tol=tol, loss=loss, **sgd)
    return build_optimizer("sgd" if name == "gd" else name, groups, lr, **sgd, betas=betas, eps=eps, amsgrad=amsgrad)
