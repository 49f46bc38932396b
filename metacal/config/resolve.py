"""From a plain dictionary of keys to a checked config, and back.

A dictionary may be partial, of an older version, or hold options of parts that it does not name: `complete` gives it
every key that its parts have, and takes out what belongs to others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from metacal.config.rules import validate
from metacal.config.schema import Config, Section, keys, record, sections, typed_section, typed_value
from metacal.errors import InputError, did_you_mean, require
from metacal.options import Described, converted, options_of

__all__ = ["complete", "flat", "from_plain", "to_yaml"]


def from_plain(plain: Mapping[str, Any], given: Collection[str] | None = None) -> Config:
    """The typed, checked config of a (partial) dictionary of keys.

    given: the dotted keys that somebody has asked for, None for all of them. One that belongs to a part that is not
    there must have that part's default: it would be ignored.

    Raises:
        InputError: unknown keys, wrong types, values out of range; with the nearest valid name.
    """
    every = keys()
    for key, value in flat(plain).items():
        require(key not in sections() and key != "penalties", f"{key} holds several keys, got {value!r}")
        if key not in every:
            raise InputError(f"unknown key {key!r}{did_you_mean(key, every)}")
    _require_owned(plain, given)
    whole = complete(plain)
    config = Config(**{n: typed_value(n, whole[n], d) for n, d in options_of(Config).items()})
    penalties: dict[str, Any] = {}
    for path, section in sections().items():
        group, _, name = path.rpartition(".")
        typed = typed_section(path, section, whole[group][name] if group else whole[name])
        if group:
            penalties[name] = typed
        else:
            setattr(config, name, typed)
    config.penalties = record("penalties", penalties)
    validate(config)
    return config


def to_yaml(config: Config) -> str:
    """The config as YAML: itself a valid input."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def flat(plain: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; a weighted sum of parts is one value."""
    sums = {f"{path}.{section.key}" for path, section in sections().items() if section.sums}
    return dict(_flat(plain, prefix, sums))


def _flat(plain: Mapping[Any, Any], prefix: str, sums: Collection[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in plain.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in sums and value:
            found += _flat(value, f"{name}.", sums)
        else:
            found.append((name, value))
    return found


def complete(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary of keys with the defaults of what it leaves out, and without options of parts that it has not.

    Nothing is checked, and keys that are not in the schema stay, so that runs of other versions can be read. A null
    where a value cannot be null is the default.
    """
    result: dict[str, Any] = {
        name: plain.get(name, described.default) for name, described in options_of(Config).items()
    }
    known = sections()
    for path, section in known.items():
        group, _, name = path.rpartition(".")
        holder = plain.get(group) if group else plain
        values = holder.get(name) if isinstance(holder, Mapping) else None
        target = result.setdefault(group, {}) if group else result
        target[name] = _completed(section, values if isinstance(values, Mapping) else {})
    for key, value in plain.items():
        result.setdefault(key, value)
    for name, value in (plain.get("penalties") or {}).items():
        result["penalties"].setdefault(name, value)
    return result


def _completed(section: Section, values: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(values)
    owners = section.owners()
    result: dict[str, Any] = {}
    if section.key is not None:
        result[section.key] = values.setdefault(section.key, section.default)
        if any(name not in section.parts for name in section.named(values)):
            return result | values  # a part that this version does not know: all that is said of it stays
    for name, described in section.options(values).items():
        value = values.get(name)
        absent = name not in values or (value is None and not described.optional)
        result[name] = described.default if absent else _alike(value, described)
    return result | {name: value for name, value in values.items() if name not in owners and name != section.key}


def _alike(value: Any, described: Described) -> Any:
    """A value as its type says, such as 2.0 for 2, so that equal values look alike; one of another kind as it is."""
    try:
        return converted("", value, described.type)
    except InputError:
        return value


def _require_owned(plain: Mapping[str, Any], given: Collection[str] | None) -> None:
    """No option of a part that is not there, unless it has that part's default."""
    values = flat(plain)
    for path, section in sections().items():
        if section.key is None or section.of_method:
            continue
        here = {k.rpartition(".")[2]: v for k, v in values.items() if k.rpartition(".")[0] == path}
        options = section.options(here)
        for name, owners in section.owners().items():
            key, value = f"{path}.{name}", here.get(name)
            if name in options or value is None or (given is not None and key not in given):
                continue
            typed_value(key, value, next(iter(owners.values())))
            if any(value == described.default for described in owners.values()):
                continue
            parts = section.named(here)
            several = [part for part in parts if part in owners]
            if len(several) > 1:
                raise InputError(
                    f"{key}={value} could be of {' or '.join(several)}: give it with the weight, "
                    f"{path}.{section.key}={{{several[0]}: {{weight: 1, {name}: {value}}}, …}}"
                )
            raise InputError(
                f"{key}={value} is no setting of {' + '.join(parts)}, which has {', '.join(sorted(options))}"
            )
