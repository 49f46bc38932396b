"""The config of a run that is there: read from its folder, also where that is damaged or old, and compared."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from metacal.config import Config
from metacal.config.compose import from_dictionary
from metacal.config.files import plain_keys
from metacal.config.resolve import flat
from metacal.errors import InputError, note, require
from metacal.runs.folder import RunFolder
from metacal.runs.naming import says_where

__all__ = ["recorded_config", "require_same_config", "stated_config", "translated"]

_SECTIONS = {"method", "data", "model", "loss", "gamma", "optimizer", "schedule", "meta", "monitor"}  # of every config


def translated(plain: dict[str, Any]) -> dict[str, Any]:
    """A run's config as this version says it.

    Milestones of gamma were whole epochs before they were fractions. Before there were keys for these, meta images were
    augmented like training images, and `margin_smoothness` and the monitors' radius were in units of the inputs.
    The outer steps' start was an epoch before it was a share of the training.
    """
    return _with_units(_with_start(_with_fractions(_with_augmentation(plain))))


def _with_augmentation(plain: dict[str, Any]) -> dict[str, Any]:
    data = plain.get("data")
    if isinstance(data, dict) and "meta_augment" not in data and (data.get("crop_padding") or data.get("flip")):
        return {**plain, "data": {**data, "meta_augment": True}}
    return plain


def _with_units(plain: dict[str, Any]) -> dict[str, Any]:
    smoothness = (plain.get("penalties") or {}).get("margin_smoothness") or {}
    if smoothness.get("weight") and "units" not in smoothness:
        penalties = {**plain["penalties"], "margin_smoothness": {**smoothness, "units": "inputs"}}
        plain = {**plain, "penalties": penalties}
    monitor = plain.get("monitor") or {}
    if monitor.get("robust_eps") and "robust_units" not in monitor:
        plain = {**plain, "monitor": {**monitor, "robust_units": "inputs"}}
    return plain


def _with_fractions(plain: dict[str, Any]) -> dict[str, Any]:
    gamma, epochs = plain.get("gamma"), plain.get("epochs")
    if not isinstance(gamma, dict) or not isinstance(epochs, int):
        return plain
    milestones = gamma.get("milestones")
    if not milestones or not all(isinstance(at, int) and at >= 1 for at in milestones):
        return plain
    return {**plain, "gamma": {**gamma, "milestones": [at / epochs for at in milestones]}}


def _with_start(plain: dict[str, Any]) -> dict[str, Any]:
    meta, epochs = plain.get("meta"), plain.get("epochs")
    if not isinstance(meta, dict) or "start_epoch" not in meta or not isinstance(epochs, int) or epochs < 1:
        return plain
    epoch = meta["start_epoch"]
    rest = {key: value for key, value in meta.items() if key != "start_epoch"}
    return {**plain, "meta": {**rest, "start": min(epoch / epochs, 1 - 1e-9) if isinstance(epoch, int) else epoch}}


def stated_config(folder: RunFolder) -> Config:
    """What config.yaml says.

    Raises:
        InputError: it is not there, or damaged.
    """
    try:
        return _parsed(folder.config.read_bytes(), str(folder.config))
    except OSError as error:
        raise InputError(f"{folder.config} cannot be read: {error.strerror}") from None


def _parsed(text: bytes | str, where: str) -> Config:
    plain = plain_keys(text, where)
    missing = _SECTIONS - plain.keys()
    require(not missing, f"{where} is damaged: it has no {', '.join(sorted(missing))}")
    try:
        return from_dictionary(translated(plain), ())
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def recorded_config(folder: RunFolder, state: Mapping[str, Any] | None = None) -> Config:
    """The config that a run was started with: the copy in its checkpoint's `state` before what config.yaml says.

    Where config.yaml cannot be read or says something else than the copy, that is told. Without `state` a checkpoint
    is only looked at if config.yaml cannot be read.

    Raises:
        InputError: neither is there.
    """
    trouble, said = "", None
    try:
        said = stated_config(folder)
    except InputError as error:
        trouble, state = str(error), state or folder.read_checkpoint()
    copy = state.get("config") if state is not None else None
    if not copy:  # of a run that is older than these copies
        require(said is not None, f"{trouble}, and no checkpoint of {folder.path} has a copy of it")
        assert said is not None
        return said
    config = _parsed(copy, f"the config in a checkpoint of {folder.path}")
    if said is not None and (keys := _differing(said, config)):
        trouble = f"{folder.config} was changed or damaged: another {', '.join(keys)}"
    if trouble:
        note(f"{trouble}; the checkpoint's copy of the config is taken")
    return config


def require_same_config(config: Config, folder: RunFolder) -> None:
    """A run is gone on with, or its results reused, only under the config that it was started with.

    Raises:
        InputError: naming the keys that differ.
    """
    keys = _differing(recorded_config(folder), config)
    if keys and (state := folder.read_checkpoint()) is not None:  # config.yaml may be damaged
        keys = _differing(recorded_config(folder, state), config)
    if keys:
        state_of = "a finished" if folder.finished else "an interrupted"
        how = "choose another name=…" if folder.finished else f"go on with it by {shlex.quote(f'resume={folder.path}')}"
        raise InputError(
            f"{folder.path} holds {state_of} run with another {', '.join(keys)}; {how}, or start over with "
            "overwrite=true"
        )


def _differing(old: Config, new: Config) -> list[str]:
    """The dotted keys whose values differ, but for those that say where and how a run is watched."""
    a, b = flat(asdict(old)), flat(asdict(new))
    return [key for key in sorted(a.keys() | b.keys()) if not says_where(key) and a.get(key) != b.get(key)]
