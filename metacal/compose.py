"""From the command's words to a checked `Config`: Hydra's composition, with errors of one line."""

from __future__ import annotations

import functools
import importlib.resources
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
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

__all__ = [
    "PATH_KEYS",
    "check_config_file",
    "check_words",
    "choices_of",
    "compose",
    "config_dir",
    "from_dictionary",
    "groups",
    "keys_of",
    "parse_config",
    "parse_yaml",
    "read_config",
    "read_yaml",
    "register_schema",
    "to_yaml",
]

_MAX_BYTES, _MAX_DEPTH = 2**16, 20  # of a YAML file; a run's config has 3 kB and a depth of 4
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where it is there, is twenty times faster


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
    check_words(overrides)
    for override in overrides:
        require(
            not override.lstrip("+~").startswith(("hydra.", "hydra/")),
            f"{override} says how Hydra runs a grid, not what a run computes: it goes with `metacal train -m`",
        )
    if config_file is None:
        folder, stem = config_dir(), "train"
    else:
        path = check_config_file(config_file)
        folder, stem = path.parent, path.stem
        for override in overrides:
            key = override.split("=", 1)[0]
            require(
                key not in groups(),
                f"{key}=… chooses a group, but {config_file} is a resolved config: override single keys of it, "
                f"or start from the groups without the file",
            )
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            node = hydra_compose(stem, overrides=[_quoted(word) for word in overrides])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise InputError(explain(error, overrides)) from None
    return from_dictionary(node)


def read_config(file: str | Path) -> Config:
    """The typed, validated config in a file, which may be anybody's.

    Raises:
        InputError: it does not exist, cannot be read, says more than what a run computes, or as `compose`.
    """
    require(Path(file).is_file(), f"config file {file} does not exist")
    return parse_config(Path(file).read_bytes(), f"config file {file}")


def parse_config(text: bytes | str, where: str) -> Config:
    """The typed, validated config in a text that is called `where`; raises as `read_config`."""
    node = _plain_keys(text, where)
    try:
        return from_dictionary(node)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def check_config_file(file: str | Path) -> Path:
    """The full path of a config file, for Hydra to read.

    Raises:
        InputError: it does not exist, cannot be read, or says more than what a run computes: sections of Hydra's own,
            which can name Python to call, or values that are to be fetched from the environment.
    """
    path = Path(file).resolve()
    require(path.is_file(), f"config file {file} does not exist")
    _plain_keys(path.read_bytes(), f"config file {file}")
    return path


def _plain_keys(text: bytes | str, where: str) -> dict[str, Any]:
    """The keys of a run in a config's text, and nothing that makes Hydra call or fetch anything."""
    node = parse_yaml(text, where)
    for key in ("hydra", "defaults"):
        require(key not in node, f"{where} may not have the key {key}: it holds the keys of a run, no more")
    _require_plain(node, where)
    return node


def check_words(words: Sequence[str]) -> None:
    """Refuse words that name Python to call, or that fetch values from the environment.

    Raises:
        InputError: naming the word.
    """
    for word in words:
        _require_plain(word, "the command's words")
        require("_target_" not in word, f"{word}: nothing is instantiated from a config, so _target_ is no key")


def _require_plain(value: Any, where: str) -> None:
    """Plain data, in which ``${key}`` may stand for another key's value, and nothing else is looked up or called."""
    if isinstance(value, dict):
        for key, item in value.items():
            require(key != "_target_", f"{where}: nothing is instantiated from a config, so _target_ is no key")
            _require_plain(item, where)
    elif isinstance(value, list):
        for item in value:
            _require_plain(item, where)
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
    return parse_yaml(text, str(file))


def parse_yaml(text: bytes | str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text, which may be anybody's, as it stands: ``${key}`` is left as it is.

    Raises:
        InputError: the text, called `where`, is no YAML mapping, is longer than 64 KiB or deeper than 20, or has
            aliases: a few of these can stand for billions of values.
    """
    require(len(text) <= _MAX_BYTES, f"{where} must have at most {_MAX_BYTES} bytes, got {len(text)}")
    try:
        depth = 0
        for event in yaml.parse(text, _LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            inside = event.value.count("${") if isinstance(event, yaml.ScalarEvent) else 0
            require(depth + inside <= _MAX_DEPTH, f"{where} must be nested at most {_MAX_DEPTH} deep")
            require(not isinstance(event, yaml.AliasEvent), f"{where} must not have YAML aliases (*name)")
        decoded = text.decode() if isinstance(text, bytes) else text
        node = OmegaConf.to_container(OmegaConf.load(io.StringIO(decoded)))
    except InputError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(f"{where} cannot be read: {lines[0]}") from None
    require(isinstance(node, dict), f"{where} must be a mapping of keys to values")
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


PATH_KEYS = ("resume", "run_dir", "runs", "data.path")
"""Keys whose values are paths, taken as they stand: folders of runs have signs of Hydra's grammar in their names."""


def groups() -> list[str]:
    """The groups of `configs/`. Studies are no part of a run's config."""
    return sorted(p.name for p in config_dir().iterdir() if p.is_dir() and p.name not in ("study", "__pycache__"))


def choices_of(group: str) -> list[str]:
    """The names of a group's YAML files."""
    return sorted(p.stem for p in (config_dir() / group).glob("*.yaml"))


def _quoted(word: str) -> str:
    """Values that are paths or choices in quotes: Hydra's grammar gives commas, equal signs and numbers a meaning."""
    key, equals, value = word.partition("=")
    is_path = key.lstrip("+") in PATH_KEYS and equals and value[:1] not in ("'", '"', "") and value != "null"
    # A choice is a name, also where it reads as a number: Hydra fails on these.
    is_choice = key in groups() and re.fullmatch(r"[\w.+-]+", value)
    if not is_path and not is_choice:
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


def explain(error: Exception, words: Sequence[str] = ()) -> str:
    """Hydra's and OmegaConf's errors over `words`, which run over several lines, as one line with a remedy."""
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):  # names no word
        return f"a group takes the name of a choice, which one of {' '.join(words)} does not give it"
    texts = [str(e) for e in (error, error.__cause__) if e is not None]
    text = "\n".join(texts)
    if found := re.search(r"Could not (?:find|load) '([^']+)'", text):
        group, _, option = found[1].partition("/")
        if group in groups():
            options = choices_of(group)
            return f"{group} must be one of {', '.join(options)}, got {option!r}{did_you_mean(option, options)}"
    if found := re.search(r"full_key: (\S+)", text):
        key = found[1]
        first = next(line for t in reversed(texts) for line in t.splitlines() if line.strip())
        if "not in" in first or "not found" in first:
            return f"unknown key {key!r}{did_you_mean(key, keys_of())}"
        return f"{key}: {first[0].lower()}{first[1:]}"
    if found := re.search(r"Could not override '([^']+)'", text):
        return f"unknown key or group {found[1]!r}{did_you_mean(found[1], keys_of())}"
    lines = (line.strip() for line in texts[0].splitlines())
    return " ".join(line for line in lines if line and not line.startswith("See http"))
