"""YAML files that may be anybody's: read as plain data, within bounds, and nothing that calls or fetches anything."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from metacal.errors import InputError, require

__all__ = ["check_config_file", "parse_yaml", "plain_keys", "read_yaml", "require_plain"]

_MAX_BYTES, _MAX_DEPTH = 2**16, 20  # of a YAML file; a run's config has 3 kB and a depth of 4
_MAX_VALUES = 20_000  # in it, with every alias (*name) counted as what it stands for


def _loader() -> type:
    """OmegaConf's, with Hydra's floats and duplicate keys; where libyaml is there, on it: twenty times faster."""
    loader: type = get_yaml_loader()
    return type("Loader", (yaml.CSafeLoader, loader), {}) if hasattr(yaml, "CSafeLoader") else loader


_LOADER = _loader()


def check_config_file(file: str | Path) -> Path:
    """The full path of a config file, for Hydra to read.

    Raises:
        InputError: it does not exist, cannot be read, or says more than what a run computes: sections of Hydra's own,
            which can name Python to call, or values that are to be fetched from the environment.
    """
    path = Path(file).resolve()
    require(path.is_file(), f"config file {file} does not exist")
    plain_keys(path.read_bytes(), f"config file {file}")
    return path


def plain_keys(text: bytes | str, where: str) -> dict[str, Any]:
    """The keys of a run in a config's text, and nothing that makes Hydra call or fetch anything."""
    node = parse_yaml(text, where)
    for key in ("hydra", "defaults"):
        require(key not in node, f"{where} may not have the key {key}: it holds the keys of a run, no more")
    require_plain(node, where)
    return node


def require_plain(value: Any, where: str) -> None:
    """Plain data, in which ``${key}`` may stand for another key's value, and nothing else is looked up or called."""
    if isinstance(value, dict):
        for key, item in value.items():
            require(key != "_target_", f"{where}: nothing is instantiated from a config, so _target_ is no key")
            require_plain(item, where)
    elif isinstance(value, list):
        for item in value:
            require_plain(item, where)
    elif isinstance(value, str):
        unknown, text = "", value
        while text != unknown:  # from the inside outwards
            unknown, text = text, re.sub(r"\$\{[\w.\[\]]*\}", "", text)
        require(
            "${" not in text,
            f"{where}: {value!r} would look something up and record it; only ${{key}} can be used, for the value of "
            "another key (what comes from the environment, let the shell put in)",
        )


def read_yaml(file: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; see `parse_yaml`."""
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    return parse_yaml(text, str(file), for_hydra=False)


def _check_size(text: bytes | str, where: str) -> None:
    """How deep it is, and how many values it stands for: read from its events, before any value is made."""
    count, sizes = 0, {}  # values so far; those of each anchor (&name)
    opened: list[tuple[str | None, int]] = []  # collections: their anchor, and the count before them
    for event in yaml.parse(text, _LOADER):
        inside = event.value.count("${") if isinstance(event, yaml.ScalarEvent) else 0
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            require(event.anchor in sizes, f"{where}: *{event.anchor} must come after the whole of &{event.anchor}")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, count - 1))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
        require(len(opened) + inside <= _MAX_DEPTH, f"{where} must be nested at most {_MAX_DEPTH} deep")
        require(count <= _MAX_VALUES, f"{where} must stand for at most {_MAX_VALUES} values, with its aliases (*name)")


def _is_plain(node: Any) -> bool:
    """Whether OmegaConf takes the mapping as it stands: it has rules for other keys and values, and for ``${``."""

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(type(key) is str and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in (bool, int, float) or (type(value) is str and "${" not in value)

    return isinstance(node, dict) and plain(node)


def _unshared(value: Any) -> Any:
    """A copy in which every alias has containers of its own."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def parse_yaml(text: bytes | str, where: str, for_hydra: bool = True) -> dict[str, Any]:
    """The mapping in a YAML text, which may be anybody's, as it stands: ``${key}`` is left as it is.

    for_hydra: Hydra is to read it too, with a slower parser that refuses some of what libyaml takes, such as `[???]`.

    Raises:
        InputError: the text, called `where`, is no YAML mapping, is longer than 64 KiB, deeper than 20, or stands for
            more than 20,000 values: a few aliases of aliases can stand for billions.
    """
    require(len(text) <= _MAX_BYTES, f"{where} must have at most {_MAX_BYTES} bytes, got {len(text)}")
    try:
        _check_size(text, where)
        decoded = text.decode() if isinstance(text, bytes) else text
        node = None if for_hydra else yaml.load(decoded, _LOADER)
        # Where OmegaConf has nothing to say, it would only take its time: most of that of reading a run.
        node = _unshared(node) if _is_plain(node) else OmegaConf.to_container(OmegaConf.load(io.StringIO(decoded)))
    except InputError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"{where} cannot be read: {lines[0]}") from None
    require(isinstance(node, dict), f"{where} must be a mapping of keys to values")
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}
