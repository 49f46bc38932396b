"""The words of a command line, checked before Hydra reads them, so that a slip gets the nearest valid word."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence

from metacal.config.files import require_plain
from metacal.config.schema import keys, sections
from metacal.configs import config_dir
from metacal.errors import InputError, did_you_mean, require

__all__ = ["TORCHVISION", "check_flags", "check_words", "config_dir", "groups", "key_of", "nearest_key"]

TORCHVISION = "torchvision/"
"""Start of the choices of the group `model` that have no file."""


@functools.cache
def groups() -> dict[str, list[str]]:
    """The groups of a run's config, each with its choices. Studies are no part of it."""
    folders = sorted(p for p in config_dir().iterdir() if p.is_dir() and p.name not in ("study", "__pycache__"))
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def key_of(word: str) -> str:
    """The key of ``key=value``, ``+key=value``, ``~key``."""
    return word.lstrip("+~").partition("=")[0]


def check_words(words: Sequence[str]) -> None:
    """Look at what the words name, not yet at what their values are.

    Raises:
        InputError: for a word that is neither ``group=name`` nor ``key=value``, an unknown key, or a choice that a
            group does not have, with the nearest valid word; for a group that is taken away; and for a word that names
            Python to call or fetches values from the environment.
    """
    for word in words:
        require_plain(word, "the command's words")
        require("_target_" not in word, f"{word}: nothing is instantiated from a config, so _target_ is no key")
        key, value = key_of(word), word.partition("=")[2]
        require(
            not (word.startswith("~") and key in groups()),
            f"{word}: a run needs a choice of the group {key}, which cannot be taken away: choose one by {key}=NAME",
        )
        if not key or key.startswith("hydra") or "@" in key or word.startswith("~"):
            continue
        if "=" not in word:
            hint = f" (did you mean {key}=…?)" if key in groups() or key in keys() else ""
            raise InputError(f"words must be group=name or key=value, got {word!r}{hint}")
        if key in groups():
            _check_choice(key, value)
        elif key in _holders():
            _check_holder(key, value)
        elif key not in keys():
            raise InputError(f"unknown key {key!r}{nearest_key(key)}")


def check_flags(words: Sequence[str], known: Sequence[str]) -> None:
    """Refuse all flags but the known ones, which are Hydra's, and say what ``--key value`` should be.

    Raises:
        InputError: naming the flag.
    """
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if not flag.startswith("-") or flag in known:
            continue
        name = flag.lstrip("-")
        meant = [name] if name in keys() or name in groups() else _ending_in(name)
        if not meant:
            hint = did_you_mean(flag, known) or nearest_key(name)
            raise InputError(
                f"{flag} is no flag of metacal train, which are {', '.join(known)}{hint}; a config "
                "file is the first word"
            )
        if not equals:
            value = words[i + 1] if i + 1 < len(words) and "=" not in words[i + 1] else "…"
        raise InputError(f"metacal train takes key=value, got {word} (did you mean {meant[0]}={value}?)")


def _ending_in(name: str) -> list[str]:
    """The keys whose last part is `name`."""
    return [known for known in keys() if known.endswith(f".{name}")]


def _holders() -> set[str]:
    """Sections, and what holds sections."""
    return {*sections(), *(path.partition(".")[0] for path in sections())}


def _check_choice(group: str, value: str) -> None:
    choices, name = groups()[group], value.strip("'\"")
    sweep = any(sign in value for sign in ",([{*$")
    if sweep or name in choices or (group == "model" and name.startswith(TORCHVISION)):
        return
    close = difflib.get_close_matches(name, choices, n=1)
    others = _named(name, group)
    hint = " or ".join(repr(word) for word in others) or "".join(repr(word) for word in close)
    raise InputError(
        f"{group} must be one of {', '.join(choices)}, got {name!r}" + (f" (did you mean {hint}?)" if hint else "")
    )


def _check_holder(key: str, value: str) -> None:
    """A section that is no group: its keys can be set, or all of it by a dictionary."""
    if value.startswith("{"):
        return
    words = _named(value, key)
    if f"{key}.weight" in keys():
        words = [f"{key}.weight={value}"]
    hint = f": did you mean {' or '.join(words)}?" if words else ""
    raise InputError(f"{key} holds several keys and is no group, got {key}={value}{hint}")


def _named(name: str, where: str) -> list[str]:
    """Words that choose what is called `name`, if not by `where=name`."""
    words = [f"{group}={name}" for group, choices in groups().items() if name in choices and group != where]
    words += [
        f"{path}.{section.key}={name}"
        for path, section in sections().items()
        if name in section.parts and (path == where or f"{path}={name}" not in words)
    ]
    if where == "model" and name in _torchvision_names():
        words.append(f"model={TORCHVISION}{name}")
    return [word for word in words if word.partition(".")[0] == where or "." not in word] or words


def _torchvision_names() -> list[str]:
    import torchvision.models

    return torchvision.models.list_models(module=torchvision.models)


def nearest_key(key: str) -> str:
    """`` (did you mean 'optimizer.lr'?)``: the keys that end in `key`, or the nearest key or group."""
    same = _ending_in(key)
    if not same:
        return did_you_mean(key, [*keys(), *groups(), *_holders()])
    return f" (did you mean {' or '.join(repr(known) for known in same[:3])}?)"
