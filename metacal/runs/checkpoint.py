"""Checkpoints: written atomically, loadable with `weights_only=True`, complete enough to resume bit for bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from metacal.errors import InputError, require
from metacal.files import write_atomically

__all__ = ["epoch_of", "load", "load_weights", "rng_state", "save", "set_rng_state"]

FORMAT = 1
_SEAL = b"metacal sha256 "
_SEAL_BYTES = len(_SEAL) + 64


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain Python only) to `path`, atomically, with a digest of its bytes.

    The file is a zip archive, as torch.save writes it; its comment is ``metacal sha256 <hexadecimal digits>``, the
    SHA-256 of all bytes before the comment. torch.load takes it like any other.
    """

    def write(file: BinaryIO) -> None:
        torch.save({"format": FORMAT, "digest": "sha256", **state}, file)
        file.seek(-2, os.SEEK_END)
        file.write(_SEAL_BYTES.to_bytes(2, "little"))  # the length of the comment, with which an archive ends
        file.write(_seal(file, file.tell()))

    write_atomically(path, write)


def load(path: str | Path, of_run: bool = True) -> dict[str, Any]:
    """The state that `save` wrote, on the CPU, where Adam keeps its count of steps; who loads a state puts it in place.

    of_run: whether the other files in the folder are checkpoints of the same run.

    Raises:
        InputError: when the file is missing, damaged, truncated, or no checkpoint of this format; with the newest other
            checkpoint of the run that is whole.
    """
    path = Path(path)
    try:
        return _read(path)
    except InputError as error:
        if not of_run:
            raise
        raise InputError(f"{error}; {_good_beside(path)}") from None


def _read(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"checkpoint {path} does not exist")
    try:
        with open(path, "rb") as file:
            sealed = _check_seal(file)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except InputError as error:
        raise InputError(f"checkpoint {path} {error}") from None
    except Exception as error:  # damaged bytes without a seal, of an older run, can raise anything
        raise InputError(f"checkpoint {path} is truncated or no checkpoint ({type(error).__name__})") from None
    version = state.get("format") if isinstance(state, dict) else None
    require(version == FORMAT, f"checkpoint {path} must be of format {FORMAT}, got {version}")
    require(sealed or "digest" not in state, f"checkpoint {path} is truncated or no checkpoint (its digest is lost)")
    return state


def _seal(file: BinaryIO, length: int) -> bytes:
    """The comment that belongs behind the first `length` bytes of `file`."""
    digest = hashlib.sha256()
    file.seek(0)
    while length > 0:
        chunk = file.read(min(length, 2**20))
        digest.update(chunk)
        length -= len(chunk)
    return _SEAL + digest.hexdigest().encode()


def _check_seal(file: BinaryIO) -> bool:
    """Whether `file` has a seal, as those of older runs have not; it is left at its beginning.

    Raises:
        InputError: the seal is not that of the bytes before it.
    """
    length = max(0, file.seek(0, os.SEEK_END) - _SEAL_BYTES)
    file.seek(length)
    seal = file.read()
    sealed = seal.startswith(_SEAL)
    if sealed:
        require(seal == _seal(file, length), "is damaged: its bytes do not give the digest that was written with them")
    file.seek(0)
    return sealed


def _good_beside(path: Path) -> str:
    """Which other checkpoint of the folder can be used instead."""
    others = [file for file in path.parent.glob("*.pt") if file != path]
    for file in sorted(others, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            state = _read(file)
        except InputError:
            continue
        return f"the last good one is {file}, of epoch {epoch_of(state)}"
    return "no other one there is whole: start the run again with overwrite=true"


def epoch_of(state: Mapping[str, Any]) -> int:
    """The number of epochs after which a checkpoint was written."""
    return int(state["progress"]["epoch"] if "progress" in state else state.get("epoch", 0))


def load_weights(module: nn.Module, weights: dict[str, torch.Tensor], where: str) -> None:
    """`module.load_state_dict(weights)`, with one line for the first key that does not fit.

    Raises:
        InputError: when `weights` belong to another model.
    """
    expected = module.state_dict()
    for key in expected:
        if key not in weights:
            raise InputError(f"{where} is of another model: it has no {key!r}")
        if expected[key].shape != weights[key].shape:
            raise InputError(
                f"{where} is of another model: {key!r} has shape {tuple(weights[key].shape)}, "
                f"this model's is {tuple(expected[key].shape)}"
            )
    for key in weights:
        if key not in expected:
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
