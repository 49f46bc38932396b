"""The file of a study, checked before anything is made of it.

    report: trajectory               the module of `metacal.studies` that makes the report
    common: [key=value, ...]         words of every run's command
    groups: {label: {words: [key=value, ...], sweep: {key: [value, ...]}}}
    choices: {label: [labels]}       rows of a report: of these groups, for each seed, the run with the least val NLL
    variants: {name: {common: [...], groups: {label: {...}}, leave_out: [labels]}}    a shorter, longer or other version

A group has one run for each combination of the values that it sweeps over. `common`, `choices` and `variants` may be
missing, of a group `words` or `sweep`. A variant's `common` comes after the file's; of a group that the file has too,
its `words` or `sweep` replace the file's; the groups that it leaves out have no runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metacal.config.files import read_yaml
from metacal.errors import require, require_choice

__all__ = ["REPORTS", "read_spec"]

REPORTS = ("compare", "methods", "optimizers", "trajectory", "validation")
"""The modules of `metacal.studies` that make a report."""


def read_spec(file: Path, variant: str | None = None) -> dict[str, Any]:
    """The file's `report`, `common` and `groups`, with the variant's replacements in place.

    Raises:
        InputError: with what is wrong in the file, or for a variant that it does not have.
    """
    spec = _mapping(read_yaml(file), str(file), ("report", "common", "groups", "choices", "variants"))
    require_choice(f"report of {file}", spec.get("report"), REPORTS)
    _check_part(spec, str(file))
    require(bool(spec.get("groups")), f"{file} must have groups, each with words or a sweep, got none")
    variants = spec.get("variants", {})
    require(isinstance(variants, dict), f"{file}: variants must be a mapping of names, got {variants!r}")
    for name, change in variants.items():
        where = f"{file}: variants: {name}"
        _check_part(_mapping(change, where, ("common", "groups", "leave_out")), where)
        _check_labels(change.get("leave_out", []), f"{where}: leave_out", spec["groups"])
    choices = spec.get("choices", {})
    require(isinstance(choices, dict), f"{file}: choices must map labels to lists of groups, got {choices!r}")
    for label, among in choices.items():
        _check_labels(among, f"{file}: choices: {label}", spec["groups"])
    if variant is None:
        return spec
    require_choice("variant", variant, variants)
    change = variants[variant]
    groups = {label: spec["groups"].get(label, {}) | group for label, group in change.get("groups", {}).items()}
    common, left_out = [*spec.get("common", []), *change.get("common", [])], change.get("leave_out", [])
    groups = {label: group for label, group in {**spec["groups"], **groups}.items() if label not in left_out}
    choices = {label: [name for name in among if name in groups] for label, among in choices.items()}
    return {**spec, "common": common, "groups": groups, "choices": choices}


def _mapping(value: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    require(isinstance(value, dict), f"{where} must be a mapping with the keys {', '.join(known)}, got {value!r}")
    for key in value:
        require_choice(f"a key of {where}", key, known)
    return value


def _check_part(part: Mapping[str, Any], where: str) -> None:
    """`common` and `groups`, of the file or of a variant."""
    _check_words(part.get("common", []), f"{where}: common")
    groups = part.get("groups", {})
    require(isinstance(groups, dict), f"{where}: groups must be a mapping of labels, got {groups!r}")
    for label, group in groups.items():
        at = f"{where}: groups: {label}"
        require(isinstance(label, str), f"{at}: a label must be text, got {label!r}; put it in quotes")
        _check_words(_mapping(group, at, ("words", "sweep")).get("words", []), f"{at}: words")
        sweep = group.get("sweep", {})
        lists = isinstance(sweep, dict) and all(isinstance(values, list) and values for values in sweep.values())
        require(lists, f"{at}: sweep must map each key to a list of values, got {sweep!r}")


def _check_labels(labels: Any, where: str, groups: Mapping[str, Any]) -> None:
    require(isinstance(labels, list), f"{where} must be a list of groups, got {labels!r}")
    for label in labels:
        require_choice(f"a group of {where}", label, groups)


def _check_words(words: Any, where: str) -> None:
    good = isinstance(words, list) and all(isinstance(word, str) and re.match(r"[\w+~].*=", word) for word in words)
    require(good, f"{where} must be a list of key=value words, got {words!r}")
