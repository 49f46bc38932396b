"""From the command's words to a checked `Config`: Hydra's composition, with errors of one line."""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metacal.config import Config
from metacal.config_checks import validate
from metacal.errors import InputError, did_you_mean, require

__all__ = ["PATH_KEYS", "compose", "config_dir", "from_dictionary", "keys_of", "register_schema", "to_yaml"]


def config_dir() -> Path:
    """The folder of the YAML groups, in the checkout or in the installed wheel."""
    return Path(str(importlib.resources.files("metacal.configs")))


@functools.cache
def register_schema() -> None:
    """Give Hydra the dataclasses, so that every YAML and override is checked against their types."""
    ConfigStore.instance().store(name="schema", node=Config)


def compose(overrides: Sequence[str] = (), config_file: str | Path | None = None) -> Config:
    """The config that `overrides` (``group=name`` or ``key=value``) make of `configs/train.yaml` or of `config_file`.

    `config_file` is a resolved config, such as a run folder's config.yaml: single keys can be overridden, groups not.

    Raises:
        InputError: unknown keys or groups, wrong types, values out of range; with the nearest valid name.
    """
    register_schema()
    if config_file is None:
        folder, stem = config_dir(), "train"
    else:
        path = Path(config_file)
        require(path.is_file(), f"config file {config_file} does not exist")
        folder, stem = path.resolve().parent, path.stem
        groups = [p.name for p in config_dir().iterdir() if p.is_dir()]
        for override in overrides:
            key = override.split("=", 1)[0]
            require(
                key not in groups,
                f"{key}=… chooses a group, but {config_file} is a resolved config: override single keys of it, "
                f"or start from the groups without the file",
            )
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            node = hydra_compose(stem, overrides=[_quoted(word) for word in overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error)) from None
    return from_dictionary(node)


PATH_KEYS = ("resume", "run_dir", "runs", "data.path")
"""Keys whose values are paths, taken as they stand: folders of runs have signs of Hydra's grammar in their names."""


def _quoted(word: str) -> str:
    """Values that are paths in quotes: Hydra's grammar gives commas and equal signs, which folders have, a meaning."""
    key, equals, value = word.partition("=")
    if key.lstrip("+") not in PATH_KEYS or not equals or value[:1] in ("'", '"', "") or value == "null":
        return word
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def from_dictionary(node: DictConfig | dict[str, Any]) -> Config:
    """The typed, validated config of a (partial) dictionary of keys.

    Raises:
        InputError: as `compose`.
    """
    try:
        # As plain data first: merging one structured config into another would let added keys (+key=…) pass.
        plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    except OmegaConfBaseException as error:
        raise InputError(explain(error)) from None
    assert isinstance(config, Config)
    validate(config)
    return config


def to_yaml(config: Config) -> str:
    """The resolved config as YAML: itself a valid `config_file`."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def keys_of(node: Any = None, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, to suggest the nearest one."""
    node = OmegaConf.to_container(OmegaConf.structured(Config)) if node is None else node
    keys: list[str] = []
    for key, value in node.items():
        keys.append(prefix + key)
        if isinstance(value, dict) and value:
            keys += keys_of(value, f"{prefix}{key}.")
    return keys


def explain(error: Exception) -> str:
    """Hydra's and OmegaConf's errors, which run over several lines, as one line with a remedy."""
    texts = [str(e) for e in (error, error.__cause__) if e is not None]
    text = "\n".join(texts)
    if found := re.search(r"Could not find '([^']+)'", text):
        group, _, option = found[1].rpartition("/")
        folder = config_dir() / group
        options = sorted(p.stem for p in folder.glob("*.yaml")) if folder.is_dir() and group else []
        if options:
            return f"{group} must be one of {', '.join(options)}, got {option!r}{did_you_mean(option, options)}"
    if found := re.search(r"full_key: (\S+)", text):
        key = found[1]
        first = next(line for t in reversed(texts) for line in t.splitlines() if line.strip())
        if "not in" in first or "not found" in first:
            return f"unknown key {key!r}{did_you_mean(key, keys_of())}"
        return f"{key}: {first[0].lower()}{first[1:]}"
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found[1].split("@")[0]
        return f"unknown key or group {key!r}{did_you_mean(key, keys_of())}"
    lines = (line.strip() for line in texts[0].splitlines())
    return " ".join(line for line in lines if line and not line.startswith("See http"))
