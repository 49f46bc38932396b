"""Sharpness-aware minimisation around any optimizer: the base's step with the gradient taken at θ + ε.

Sources: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization (ICLR 2021); the adaptive
form is that of Kwon et al., ASAM (ICML 2021), with T = diag(|θ|).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from metacal.errors import require
from metacal.network import on_copies
from metacal.optim.basic import AdamOptions, AdamWOptions, OptimizerOptions, SGDOptions
from metacal.optim.muon import MuonOptions
from metacal.optim.transpose import TRANSPOSES, transposed_update
from metacal.options import check_options, check_value, option, options_of

__all__ = ["BASES", "SAM", "SAMOptions", "ascent"]

BASES: dict[str, type[OptimizerOptions]] = {
    "sgd": SGDOptions,
    "adam": AdamOptions,
    "adamw": AdamWOptions,
    "muon": MuonOptions,
}
"""What can be inside, by name."""


@dataclass
class SAMOptions:
    """`SAM` around another optimizer, whose options stand beside these."""

    base: Any = option("sgd", "the optimizer inside", parts=BASES)
    rho: float = option(0.05, "length of the perturbation, in units of the parameters", low=0)
    adaptive: bool = option(False, "the perturbation is scaled by |theta|")

    whole_set: ClassVar[bool] = False

    @property
    def head_lr(self) -> float:
        """Of the optimizer inside."""
        return float(self.base.head_lr)

    def check(self, prefix: str = "") -> None:
        """As `OptimizerOptions.check`."""
        check_options(self, prefix)
        self.base.check(prefix)

    def build(self, module: nn.Module, loss: str = "cross_entropy") -> Optimizer:
        """The optimizer of a backbone's trainable parameters."""
        return SAM(self.base.build(module, loss), self.rho, self.adaptive)


@torch.no_grad()
def ascent(params: list[Tensor], grads: list[Tensor], rho: float, adaptive: bool = False) -> list[Tensor]:
    """The displacement of length ρ along the gradient g, one tensor per parameter.

        ε = ρ g / ‖g‖          adaptive: ε = ρ T² g / ‖T g‖, T = |θ| entry by entry

    with the norm over all tensors together. g is divided by its largest entry before the norm is taken, so gradients
    whose squares overflow or underflow keep their direction. A zero gradient gives ε = 0. Nothing waits for the device.
    """
    if not grads:
        return []
    lengths = torch._foreach_abs(params) if adaptive else None
    moves = list(grads if lengths is None else torch._foreach_mul(grads, lengths))
    largest = torch.stack(torch._foreach_norm(moves, math.inf)).max()
    moves = list(torch._foreach_div(moves, torch.where(largest > 0, largest, torch.ones_like(largest))))
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(moves)))
    torch._foreach_mul_(moves, rho / torch.where(norm > 0, norm, torch.ones_like(norm)))
    if lengths is not None:
        torch._foreach_mul_(moves, lengths)
    return moves


class SAM(Optimizer):
    """Sharpness-aware minimisation (SAM) around `base`.

        ε = ρ g(θ) / ‖g(θ)‖,    θ' = the base's step from θ with the gradient g(θ + ε)

    Args:
        base: any optimizer of torch.optim's kind whose step needs no closure. `param_groups`, `state`, `state_dict` and
            whatever else is not named below are the base's, so schedulers and checkpoints see the base.
        rho: length ρ of the perturbation, in parameter units, >= 0. With 0 the path is the base's.
        adaptive: the perturbation of ASAM, ε = ρ T² g / ‖T g‖ with T = |θ|; ρ is then in relative units, and useful
            values are some ten times as large.

    In a loop of one's own, with a closure that zeroes the gradients, computes the loss, calls backward and returns it:

        loss = optimizer.step(closure, model=model)

    or, where the loop makes the passes itself (`step()` alone is the base's step):

        loss_at(θ).backward(); optimizer.perturb()
        optimizer.zero_grad(); loss_at(θ + ε).backward(); optimizer.restore(); optimizer.step()

    `restore` returns θ bit for bit, from copies. ε is a constant of the step: nothing is differentiated through it.

    Raises:
        InputError: for a base that is no optimizer, is SAM itself or needs a closure (LBFGS); ρ negative or not finite;
            `perturb` or `step` while perturbed, `restore` while not.
    """

    # Optimizer.__init__ is not called: groups, state and hooks live in the base alone
    def __init__(self, base: Optimizer, rho: float = SAMOptions.rho, adaptive: bool = SAMOptions.adaptive) -> None:
        require(isinstance(base, Optimizer), f"base must be a torch.optim.Optimizer, got {type(base).__name__}")
        require(
            not isinstance(base, (SAM, LBFGS)),
            f"base must be an optimizer whose step needs no closure, such as SGD or AdamW, got {type(base).__name__}",
        )
        check_value("rho", rho, options_of(SAMOptions)["rho"])
        self.base, self.rho, self.adaptive = base, float(rho), bool(adaptive)
        self._away: list[tuple[Tensor, Tensor]] | None = None

    # -- the two halves ------------------------------------------------------------------------------------------

    @property
    def perturbed(self) -> bool:
        """Whether the parameters stand at θ + ε."""
        return self._away is not None

    @torch.no_grad()
    def perturb(self) -> None:
        """Move the parameters that have a gradient from θ to θ + ε, with the gradients in `.grad`, which stay."""
        require(not self.perturbed, "perturb() was called twice: call restore() first")
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = ascent(params, [p.grad for p in params], self.rho, self.adaptive)
        self._away = [(p, p.detach().clone()) for p in params]
        if params:
            torch._foreach_add_(params, moves)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the parameters back to θ, bit for bit."""
        require(self.perturbed, "restore() was called without perturb()")
        assert self._away is not None
        for p, value in self._away:
            p.copy_(value)
        self._away = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, model: nn.Module | None = None) -> Any:
        """With a closure the whole step, its loss at θ returned; without one the base's step.

        The closure runs twice, at θ and at θ + ε. With `model` its buffers keep what the pass at θ made of them:
        BatchNorm's statistics move once. Dropout draws a mask for each pass. If the closure raises, θ is as before.
        """
        require(not self.perturbed, "step() was called while perturbed: call restore() first")
        if closure is None:
            return self.base.step()
        with torch.enable_grad():
            loss = closure()
        self.perturb()
        try:
            aside = nullcontext() if model is None else on_copies(model)
            with aside, torch.enable_grad():
                closure()
        finally:
            self.restore()
        self.base.step()
        return loss

    # -- all else is the base's ----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The base's; ρ and the kind of perturbation are settings, not state."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "base":  # not set yet, while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.base, name)

    def __getstate__(self) -> dict[str, Any]:
        require(not self.perturbed, "SAM cannot be copied while perturbed: call restore() first")
        return {"base": self.base, "rho": self.rho, "adaptive": self.adaptive, "_away": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


# the perturbation ε is a constant of the step, whose derivative is then that of the base's
TRANSPOSES[SAM] = lambda optimizer, params: transposed_update(optimizer.base, params)
