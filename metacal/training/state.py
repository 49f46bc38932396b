"""The state of a run under way: where it is, and all that a checkpoint holds of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metacal.errors import RunError, require
from metacal.monitors import Watch
from metacal.runs import checkpoint
from metacal.runs.folder import RunFolder
from metacal.training.logging import RunLog
from metacal.training.setup import Parts

__all__ = [
    "Progress",
    "best_weights",
    "complete_state",
    "kept",
    "require_finite_weights",
    "restore",
    "save_weights",
]


@dataclass
class Progress:
    """Where a run is. With the states of its modules and generators it is all that a resume needs."""

    epoch: int = 0
    batch: int = 0  # the next one of this epoch
    step: int = 0
    outer_steps: int = 0
    outer_in_epoch: int = 0  # how many of them in this epoch
    best_score: float = math.inf  # of the selected epoch, see `selection.score`
    best_nll: float = math.inf  # its val NLL
    best_epoch: int = 0
    ended: bool = False  # before the last epoch: by patience, or because somebody asked for it
    seconds: float = 0.0  # of training, interruptions left out
    # Sum and count of what the steps reported since the last line of the log.
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    running: dict[str, Any] = field(default_factory=dict)  # of the training batches since the last validation
    outer: dict[str, Any] = field(default_factory=dict)  # what `OuterNotes` has seen


def require_finite_weights(module: nn.Module, step: int, folder: RunFolder | None) -> None:
    """Never save weights over good ones when a parameter is infinite or not a number: a step can overflow.

    Raises:
        RunError: saying what is left.
    """
    finite = [torch.isfinite(p).all() for p in module.parameters()]
    if not torch.stack(finite).all():
        raise RunError(f"the weights are not finite after step {step}; {kept(folder)}; lower optimizer.lr")


def kept(folder: RunFolder | None) -> str:
    """What a run that fails leaves, in words."""
    if folder is not None and folder.last.is_file():
        return f"the last good checkpoint is {folder.last}"
    return "nothing was saved"


def complete_state(parts: Parts, p: Progress, watch: Watch, log: RunLog, config_text: str = "") -> dict[str, Any]:
    """Everything that decides the rest of the run, as tensors and plain Python."""
    return {
        "config": config_text,
        "progress": asdict(p),
        "log": log.state_dict(),
        "backbone": parts.backbone.state_dict(),
        "gamma": parts.gamma.state_dict() if parts.gamma is not None else None,
        "optimizer": parts.optimizer.state_dict(),
        "meta_optimizer": parts.meta_optimizer.state_dict() if parts.meta_optimizer is not None else None,
        "step": parts.step.state_dict(),
        "watch": watch.state_dict(),
        "rng": checkpoint.rng_state(parts.device),
    }


def restore(parts: Parts, watch: Watch, state: Mapping[str, Any], where: str) -> Progress:
    """Undo to what `complete_state` read; returns the progress.

    Raises:
        InputError: when the state is of another model, or holds weights only.
    """
    missing = [key for key in ("progress", "optimizer", "step", "watch", "rng") if key not in state]
    require(not missing, f"{where} cannot be resumed from: it has no {', '.join(missing)}")
    checkpoint.load_weights(parts.backbone, state["backbone"], where)
    parts.optimizer.load_state_dict(state["optimizer"])
    if parts.gamma is not None:
        checkpoint.load_weights(parts.gamma, state["gamma"] or {}, where)
    if parts.meta_optimizer is not None:
        parts.meta_optimizer.load_state_dict(state["meta_optimizer"])
    parts.step.load_state_dict(state["step"])
    watch.load_state_dict(state["watch"])
    checkpoint.set_rng_state(state["rng"], parts.device)
    progress = dict(state["progress"])
    progress.setdefault("best_score", progress["best_nll"])  # older runs selected the least NLL
    return Progress(**progress)


def save_weights(file: Path, weights: Mapping[str, Tensor], p: Progress, config_text: str) -> None:
    """The weights of an epoch, which `metacal evaluate` reads."""
    checkpoint.save(file, {"config": config_text, "backbone": dict(weights), "epoch": p.epoch})


def best_weights(folder: RunFolder | None, p: Progress) -> dict[str, Tensor]:
    """The best weights so far of a resumed run."""
    if folder is None or p.best_epoch == 0:
        return {}
    return checkpoint.load(folder.best)["backbone"]
