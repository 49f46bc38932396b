"""Training and evaluation mode of a network, and the modes that its owner gave to modules inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["evaluation_mode", "training_mode"]


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Training mode for the block, of all but what the owner of `model` has put in evaluation mode.

    A module in evaluation mode inside a model that is not was singled out, as a frozen BatchNorm or Dropout: it stays
    in evaluation mode. Where no module is in training mode, as `model.eval()` and an earlier training leave them, none
    was singled out: all are trained but modules with parameters of which none requires a gradient, with what is inside
    them. The model's own `train` is called, so that one which keeps layers in evaluation mode is heard.

    Afterwards every module has the mode that it had.
    """
    modes = {module: module.training for module in model.modules()}
    evaluating = {module for module, training in modes.items() if not training}
    if len(evaluating) == len(modes):
        evaluating = {inner for module in modes if _is_frozen(module) for inner in module.modules()}
    model.train()
    _set_modes(dict.fromkeys(evaluating, False))
    try:
        yield
    finally:
        _set_modes(modes)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Evaluation mode for the block; afterwards every module has the mode that it had. Not for modules: nothing."""
    modes = {module: module.training for module in model.modules()} if isinstance(model, nn.Module) else {}
    _set_modes(dict.fromkeys(modes, False))
    try:
        yield
    finally:
        _set_modes(modes)


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)
