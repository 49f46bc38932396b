"""Checkpoints: written atomically, loadable with `weights_only=True`, complete enough to resume bit for bit."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metacal.errors import InputError, RunError, require

__all__ = ["load", "load_weights", "rng_state", "save", "set_rng_state", "write_atomically"]

FORMAT = 1


def write_atomically(path: Path, write: Any) -> None:
    """Call `write(file)` on a temporary file in the folder of `path`, flush it to disk, then rename it to `path`.

    A crash at any moment leaves either the old file or the new one, whole.

    Raises:
        RunError: when the disk is full or the folder cannot be written; the old file is kept.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError when a write comes up short
        temporary.unlink(missing_ok=True)
        kept = " (the one written before is kept)" if path.exists() else ""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise RunError(f"{path} could not be written: {reason}{kept}") from error


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain Python only) to `path`, atomically."""
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state that `save` wrote.

    Raises:
        InputError: when the file is missing, truncated, or no checkpoint of this format.
    """
    path = Path(path)
    require(path.is_file(), f"checkpoint {path} does not exist")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise InputError(
            f"checkpoint {path} is truncated or no checkpoint ({type(error).__name__}); "
            "use another checkpoint or start the run again with overwrite=true"
        ) from None
    found = state.get("format") if isinstance(state, dict) else None
    require(found == FORMAT, f"checkpoint {path} must be of format {FORMAT}, got {found}")
    return state


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], where: str) -> None:
    """`module.load_state_dict(weights)`, with one line for the first key that does not fit.

    Raises:
        InputError: when `weights` belong to another model.
    """
    own = module.state_dict()
    for key in own:
        if key not in weights:
            raise InputError(f"{where} is of another model: it has no {key!r}")
        if own[key].shape != weights[key].shape:
            raise InputError(
                f"{where} is of another model: {key!r} has shape {tuple(weights[key].shape)}, "
                f"this model's is {tuple(own[key].shape)}"
            )
    for key in weights:
        if key not in own:
            raise InputError(f"{where} is of another model: this one has no {key!r}")
    module.load_state_dict(weights)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's global generators, which dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Undo to what `rng_state` read."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
