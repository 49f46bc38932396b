"""From the command's words to a checked `Config`: Hydra's composition, with errors of one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metacal.config.files import check_config_file
from metacal.config.resolve import flat, from_plain, to_yaml
from metacal.config.schema import Config, keys, sections
from metacal.config.words import TORCHVISION, check_words, config_dir, groups, key_of, nearest_key
from metacal.errors import InputError, did_you_mean, require

__all__ = [
    "PATH_KEYS",
    "check_config_file",
    "compose",
    "config_dir",
    "explain",
    "from_dictionary",
    "open_sums",
    "register_schema",
    "to_yaml",
]


def register_schema(words: Sequence[str] = ()) -> None:
    """Give Hydra every key of the schema, so that overrides of others are refused.

    Values are null where parts disagree about a default: they are filled in when it is known which part is meant. The
    choices of `model` among `words` that have no file are made known too.
    """
    schema: dict[str, Any] = {}
    for key, described in keys().items():
        *path, name = key.split(".")
        holder = schema
        for part in path:
            holder = holder.setdefault(part, {})
        holder[name] = described.default
    store = ConfigStore.instance()
    store.store(name="schema", node=schema)
    store.store(name="default_method", node={"defaults": [{"/method": Config.method}]})
    for name in re.findall(rf"{TORCHVISION}(\w+)", " ".join(word for word in words if key_of(word) == "model")):
        node = {"name": f"{TORCHVISION}{name}"}
        store.store(group=f"model/{TORCHVISION.rstrip('/')}", name=name, node=node, package="model")


def compose(overrides: Sequence[str] = (), config_file: str | Path | None = None) -> Config:
    """The config that `overrides` (``group=name`` or ``key=value``) make of `configs/train.yaml` or of `config_file`.

    `config_file` is a resolved config, such as a run folder's config.yaml: single keys can be overridden, groups not.

    Raises:
        InputError: unknown keys or groups, wrong types, values out of range; with the nearest valid name.
    """
    check_words(overrides)
    for word in overrides:
        require(
            not word.lstrip("+~").startswith(("hydra.", "hydra/")),
            f"{word} says how Hydra runs a grid, not what a run computes: it goes with `metacal train -m`",
        )
    register_schema(overrides)
    words = [_quoted(word) for word in open_sums(overrides)]
    if config_file is None:
        folder, stem = config_dir(), "train"
    else:
        path = check_config_file(config_file)
        folder, stem = path.parent, path.stem
        for word in overrides:
            require(
                key_of(word) not in groups(),
                f"{key_of(word)}=… chooses a group, but {config_file} is a resolved config: override single keys of "
                "it, or start from the groups without the file",
            )
        # the file has the options of its own parts alone, and another one may be named
        words = [word if word[0] in "+~" else f"++{word}" for word in words]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            node = hydra_compose(stem, overrides=words)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise InputError(explain(error, overrides)) from None
    return from_dictionary(node, overrides)


PATH_KEYS = ("resume", "run_dir", "runs", "data.path")
"""Keys whose values are paths, taken as they stand: folders of runs have signs of Hydra's grammar in their names."""


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


def from_dictionary(node: DictConfig | dict[str, Any], overrides: Sequence[str] | None = None) -> Config:
    """The typed, validated config of a (partial) dictionary of keys.

    overrides: the words that went into it, None if all of it was asked for. An option that they set must be one of the
    parts that are there. What files say of other parts is left out, as older versions did it; of another optimizer
    these refused it, and so it is here.

    Raises:
        InputError: as `compose`.
    """
    try:
        plain: Any = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    except OmegaConfBaseException as error:
        raise InputError(explain(error)) from None
    given = None
    if overrides is not None:
        _put_sums(plain, overrides)
        given = {key_of(word) for word in overrides} | {key for key in flat(plain) if key.startswith("optimizer.")}
    return from_plain(plain, given)


def open_sums(words: Sequence[str]) -> list[str]:
    """The words with ``++`` before weighted sums, whose terms Hydra would else refuse beside those of a file."""
    return [f"++{word}" if _is_sum(word) and word[0] not in "+~" else word for word in words]


def _is_sum(word: str) -> bool:
    sums = {f"{path}.{section.key}" for path, section in sections().items() if section.sums}
    return key_of(word) in sums and word.partition("=")[2][:1] == "{"


def _put_sums(plain: dict[str, Any], words: Sequence[str]) -> None:
    """A weighted sum in the words takes the place of the one in a file, to which Hydra has added its terms."""
    last = {key_of(word): word for word in words}
    for key, word in last.items():
        if _is_sum(word):
            section, _, name = key.rpartition(".")
            plain[section][name] = OverridesParser.create().parse_override(word).value()


def explain(error: Exception, words: Sequence[str] = ()) -> str:
    """Hydra's and OmegaConf's errors over `words`, which run over several lines, as one line with a remedy."""
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):  # names no word
        return f"a group takes the name of a choice, which one of {' '.join(words)} does not give it"
    texts = [str(e) for e in (error, error.__cause__) if e is not None]
    text = "\n".join(texts)
    if missing := re.search(r"Could not (?:find|load) '([^']+)'", text):
        group, _, choice = missing[1].partition("/")
        if choices := groups().get(group, []):
            return f"{group} must be one of {', '.join(choices)}, got {choice!r}{did_you_mean(choice, choices)}"
    if refused := re.search(r"Could not override '([^']+)'", text):
        return f"unknown key or group {refused[1]!r}{nearest_key(refused[1])}"
    lines = (line.strip() for line in texts[0].splitlines())
    return " ".join(line for line in lines if line and not line.startswith("See http"))
