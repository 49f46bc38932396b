"""Which settings tell groups of runs apart, and what to call the groups.

A method's name stands for what its YAML sets, `optimizer.name` for what that optimizer's YAML sets, and so on: only
what departs from it says something more. Nothing else that differs between groups is left unsaid.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from omegaconf import OmegaConf

from metacal.config.resolve import complete, flat
from metacal.config.words import config_dir
from metacal.runs.naming import says_where

__all__ = [
    "defaults_of",
    "equal_settings",
    "is_bookkeeping",
    "name_first",
    "short_names",
    "show_value",
    "telling",
]

# Parts of the config that belong to methods, and those whose name chooses a YAML of defaults.
_OF_METHODS = ("loss", "gamma", "meta", "penalties")
_CHOICES = ("data", "model", "optimizer", "schedule")
# Beside keys that say where a run is made, those that cannot change what it computes: where its data lie and how they
# are fetched (what they are, fingerprints tell), and what is kept.
_BOOKKEEPING = {"seed", "keep_every", "data.path", "data.download", "data.storage", "data.workers"}
_MAIN = ("data.name", "data.train_size", "data.batch_size", "model.name", "optimizer.name", "optimizer.lr", "epochs")


class Configured(Protocol):
    """Anything with a config, such as a `Group`."""

    @property
    def config(self) -> Mapping[str, Any]: ...


def is_bookkeeping(key: str) -> bool:
    """Whether a dotted key cannot change a result. Monitors only watch, but for the epochs that can be selected."""
    return key in _BOOKKEEPING or says_where(key) or (key.startswith("monitor.") and key != "monitor.val_every")


def show_value(value: Any) -> str:
    """A config value as on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show_value(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def defaults_of(group: str, option: str) -> Mapping[str, Any] | None:
    """What `compose([f"{group}={option}"])` gives, flat, without the method of no words; None if there is no such YAML.

    Made without Hydra, which takes a second for two of them.
    """
    path = config_dir() / group / f"{option.split('/')[0]}.yaml"
    if not path.is_file():
        return None
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    whole = path.read_text().startswith("# @package _global_")
    return flat(complete(values if whole else {group: values}))


def telling(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each flat config the keys, with its values, that tell it from the others beyond what names tell.

    A key that has one value in all configs is in none. Of the others,

    * keys of loss, gamma, meta and penalties, and keys in which the YAMLs of these methods differ (such as data.mixup),
      are given for a method's configs where they vary among these, or depart from the method's YAML;
    * keys beside a name that varies (optimizer.name, model.name, …) in the same way for the configs of one name;
    * any other key is given for all.

    Where a name has no YAML, nothing is known of it, and all its keys that differ from others' are given. A config of
    a method alone, such as that of a file of predictions, says nothing and is held against nothing.
    """
    known = [i for i, c in enumerate(configs) if c.keys() - {"method"}]
    if len(known) < len(configs):
        among_known = dict(zip(known, telling([configs[i] for i in known])))
        return [among_known.get(i, {}) for i in range(len(configs))]
    told: list[dict[str, Any]] = [{} for _ in configs]
    methods = [defaults_of("method", str(method)) for method in sorted({str(c["method"]) for c in configs})]
    for key in sorted({key for c in configs for key in c} - {"method"}, key=name_first):
        values = [_text(c.get(key)) for c in configs]
        if len(set(values)) == 1:
            continue
        part = key.split(".")[0]
        namer = None
        if part in _OF_METHODS or len({_text(d.get(key)) for d in methods if d is not None}) > 1:
            namer = "method"
        elif part in _CHOICES and key != f"{part}.name" and len({c.get(f"{part}.name") for c in configs}) > 1:
            namer = f"{part}.name"
        names = ["" if namer is None else str(c.get(namer)) for c in configs]
        for name in set(names):
            among = [i for i, other in enumerate(names) if other == name]
            normal = None if namer is None else defaults_of("method" if namer == "method" else part, name)
            varies = len({values[i] for i in among}) > 1
            for i in among:
                if varies or namer is None or normal is None or values[i] != _text(normal.get(key)):
                    told[i][key] = configs[i].get(key)
    return told


def short_names(methods: Sequence[str], told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Distinct names for legends and notes: the method, and what tells it from most others.

    Values that more than half of all groups have are left out, of `optimizer.name=sam` the value says enough, and of
    `optimizer.lr` the last part where no other key ends alike.
    """
    keys = {key for settings in told for key in settings}
    ends = Counter(key.split(".")[-1] for key in keys)
    common = {
        key: text
        for key in keys
        for text, n in Counter(_text(settings[key]) for settings in told if key in settings).items()
        if 2 * n > len(told)
    }

    def named(key: str, value: Any) -> str:
        part, _, name = key.partition(".")
        if part in _CHOICES and name == "name":
            return str(value)
        brief = name if part == "penalties" or (part in _CHOICES and ends[key.split(".")[-1]] == 1) else key
        return f"{brief}={show_value(value)}"

    names = []
    for method, settings in zip(methods, told):
        special = {key: value for key, value in settings.items() if common.get(key) != _text(value)}
        names.append(", ".join([method, *(named(k, v) for k, v in special.items())]))
    if len(set(names)) == len(names):
        return names
    return [
        ", ".join([m, *(f"{k}={show_value(v)}" for k, v in settings.items())]) for m, settings in zip(methods, told)
    ]


def equal_settings(groups: Sequence[Configured], main: bool = True) -> dict[str, Any]:
    """The settings in which all groups agree, less those that are null.

    With `main` what a reader asks first, and those of methods that depart from the YAML of one of the methods.
    """
    groups = [g for g in groups if g.config.keys() - {"method"}] or groups
    keys = sorted({key for g in groups for key in g.config} - ({"method"} if main else set()))
    equal = {
        key: groups[0].config[key]
        for key in keys
        if groups[0].config.get(key) is not None and len({_text(g.config.get(key)) for g in groups}) == 1
    }
    if not main:
        return equal
    normal = [defaults_of("method", str(method)) for method in sorted({str(g.config.get("method")) for g in groups})]
    special = [
        key
        for key, value in equal.items()
        if key.split(".")[0] in _OF_METHODS and any(d and _text(d.get(key)) != _text(value) for d in normal)
    ]
    return {key: equal[key] for key in (*_MAIN, *special) if key in equal}


def name_first(key: str) -> tuple[str, bool, str]:
    """To sort keys by: `optimizer.name` before `optimizer.lr`."""
    part, _, name = key.partition(".")
    return part, name != "name", name


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
