"""The options of optimizers, and the optimizers of torch.optim as parts: a dataclass each, whose `build` makes it.

Another one is a dataclass like these and an entry in `metacal.optim.OPTIMIZERS`; beside the bilevel step it also needs
its transpose in `metacal.optim.transpose.TRANSPOSES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from metacal.errors import InputError, require
from metacal.options import check_options, option

__all__ = [
    "AdamOptions",
    "AdamWOptions",
    "GradientDescentOptions",
    "OptimizerOptions",
    "SGDOptions",
    "betas",
    "decay",
    "epsilon",
    "momentum",
    "nesterov",
    "parameter_groups",
    "rate",
    "slow_head",
]

Parameters = Iterable[nn.Parameter] | list[dict[str, Any]]


def rate(default: float) -> Any:
    """The option `lr`."""
    return option(default, "learning rate", low=0)


def decay(default: float) -> Any:
    """The option `weight_decay`."""
    return option(default, "weight decay", low=0)


def momentum(default: float) -> Any:
    """The option `momentum`."""
    return option(default, "how much of the last update stays", low=0, high=1)


def nesterov(default: bool) -> Any:
    """The option `nesterov`."""
    return option(default, "Nesterov's form of the momentum")


def betas() -> Any:
    """The option `betas`."""
    return option(
        factory=lambda: [0.9, 0.999],
        help="decay rates of Adam's moments",
        valid=lambda pair: len(pair) == 2 and all(0 <= b < 1 for b in pair),
        must="two numbers in [0, 1)",
    )


def epsilon() -> Any:
    """The option `eps`."""
    return option(1e-8, "added to Adam's denominator", above=0)


def parameter_groups(module: nn.Module, weight_decay: float, decay_norm_and_bias: bool = True) -> list[dict[str, Any]]:
    """The trainable parameters in at most two groups: with weight decay, and without.

    With `decay_norm_and_bias=False` the parameters of at most one dimension (biases, affine norms) get none.
    """
    return _by_decay(_trainable(module), weight_decay, decay_norm_and_bias)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    require(bool(parameters), "the model has no trainable parameter (requires_grad is false for all of them)")
    return parameters


def _by_decay(parameters: list[nn.Parameter], weight_decay: float, all_of_them: bool) -> list[dict[str, Any]]:
    if all_of_them or weight_decay == 0:
        groups = [{"params": parameters, "weight_decay": weight_decay}]
    else:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
    return [g for g in groups if g["params"]]


@torch.no_grad()
def slow_head(head: nn.Module, head_lr: float) -> None:
    """Multiply the first weights and bias of a head by √head_lr, in place: see `OptimizerOptions.groups`."""
    for p in head.parameters():
        if p.requires_grad:  # a frozen one has no rate
            p.mul_(head_lr**0.5)


@dataclass
class OptimizerOptions:
    """What every optimizer of a backbone has.

    Attributes: `whole_set`, that a step takes the whole training set.
    """

    lr: float = rate(0.1)
    weight_decay: float = decay(5e-4)
    decay_norm_and_bias: bool = option(True, "false: no weight decay on one-dimensional parameters (biases, norms)")
    head_lr: float = option(1.0, "rate of the last layer in units of lr; its first weights shrink by the root", above=0)

    whole_set: ClassVar[bool] = False

    def check(self, prefix: str = "") -> None:
        """Raise `InputError` for options out of range, named with the `prefix`, or that do not go together."""
        check_options(self, prefix)

    def over(self, parameters: Parameters) -> Optimizer:
        """The optimizer of these parameters or groups of them."""
        raise NotImplementedError

    def build(self, module: nn.Module, loss: str = "cross_entropy") -> Optimizer:
        """The optimizer of a backbone's trainable parameters. loss: what curvature is taken of, for those that do."""
        return self.over(self.groups(module))

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """`parameter_groups`, those of the head apart where it has a rate of its own.

        With head_lr = α² the head has the rate α² lr and the weight decay of `weight_decay` / α², which shrinks it as
        fast as before. From first weights times α (`slow_head`) SGD then trains what it would with logits times α.
        """
        if self.head_lr == 1:
            return parameter_groups(module, self.weight_decay, self.decay_norm_and_bias)
        head = getattr(module, "head", None)
        if not isinstance(head, nn.Module):
            raise InputError(f"head_lr must be 1 for a model without a `head`, got {self.head_lr}")
        of_head = {id(p) for p in head.parameters()}
        body, last = ([p for p in _trainable(module) if (id(p) in of_head) == which] for which in (False, True))
        slow = _by_decay(last, self.weight_decay / self.head_lr, self.decay_norm_and_bias)
        slow = [{**group, "lr": self.lr * self.head_lr} for group in slow]
        return _by_decay(body, self.weight_decay, self.decay_norm_and_bias) + slow


@dataclass
class SGDOptions(OptimizerOptions):
    """torch.optim.SGD."""

    momentum: float = momentum(0.9)
    nesterov: bool = nesterov(False)
    dampening: float = option(0.0, "of the gradient that enters the momentum", low=0, high=1)

    def check(self, prefix: str = "") -> None:
        super().check(prefix)
        require(
            not self.nesterov or (self.momentum > 0 and self.dampening == 0),
            f"{prefix}nesterov=true needs momentum > 0 and dampening 0, got momentum {self.momentum} "
            f"and dampening {self.dampening}",
        )

    def momenta(self) -> dict[str, Any]:
        """The keys of torch.optim.SGD beside rate and decay."""
        return {"momentum": self.momentum, "nesterov": self.nesterov, "dampening": self.dampening}

    def over(self, parameters: Parameters) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, weight_decay=self.weight_decay, **self.momenta())


@dataclass
class GradientDescentOptions(SGDOptions):
    """torch.optim.SGD, with the gradient of the whole training set in every step."""

    lr: float = rate(0.05)
    weight_decay: float = decay(0.0)
    momentum: float = momentum(0.0)

    whole_set: ClassVar[bool] = True


@dataclass
class AdamOptions(OptimizerOptions):
    """torch.optim.Adam; the weight decay is added to the gradient."""

    lr: float = rate(1e-3)
    weight_decay: float = decay(0.0)
    betas: list[float] = betas()
    eps: float = epsilon()
    amsgrad: bool = option(False, "Adam's denominator never shrinks")

    kind: ClassVar[type[Optimizer]] = torch.optim.Adam

    def over(self, parameters: Parameters) -> Optimizer:
        keys: dict[str, Any] = {"betas": tuple(self.betas), "eps": self.eps, "amsgrad": self.amsgrad}
        return self.kind(parameters, lr=self.lr, weight_decay=self.weight_decay, **keys)  # type: ignore[call-arg]


@dataclass
class AdamWOptions(AdamOptions):
    """torch.optim.AdamW; the weight decay is decoupled."""

    weight_decay: float = decay(1e-2)

    kind: ClassVar[type[Optimizer]] = torch.optim.AdamW
