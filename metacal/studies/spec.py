"""The file of a study, checked before anything is made of it.

    report: trajectory               the module of `metacal.studies` that makes the report
    common: [key=value, ...]         words of every run's command
    groups: {label: {words: [key=value, ...], sweep: {key: [value, ...]}}}
    choices: {label: [labels]}       rows of a report: of these groups, for each seed, the run with the least val NLL
    variants: {name: {common: [...], groups: {label: {...}}, leave_out: [labels]}}    a shorter, longer or other version
    title, setting, takes, differs: text      the heading of its page; what it trains on what; how long that took; what
                                              is otherwise than in the publication
    columns: [names], epochs: [selected, last], plots: [[column or swept key, column]]         of the report `measured`
    sort: column                                                              by whose mean the rows stand; of the same
    published: {row: {column: value or [mean, std]}}                                           beside its own rows

A group has one run for each combination of the values that it sweeps over. All but `report` and `groups` may be
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

REPORTS = ("compare", "measured", "optimizers", "trajectory")
"""The modules of `metacal.studies` that make a report."""
TEXTS = ("title", "setting", "takes", "differs")
OF_MEASURED = ("columns", "epochs", "plots", "published", "sort")


def read_spec(file: Path, variant: str | None = None) -> dict[str, Any]:
    """The file's `report`, `common` and `groups`, with the variant's replacements in place.

    Raises:
        InputError: with what is wrong in the file, or for a variant that it does not have.
    """
    spec = _mapping(
        read_yaml(file), str(file), (*TEXTS, *OF_MEASURED, "report", "common", "groups", "choices", "variants")
    )
    require_choice(f"report of {file}", spec.get("report"), REPORTS)
    _check_part(spec, str(file))
    _check_said(spec, str(file))
    require(bool(spec.get("groups")), f"{file} must have groups, each with words or a sweep, got none")
    variants = spec.get("variants", {})
    require(isinstance(variants, dict), f"{file}: variants must be a mapping of names, got {variants!r}")
    for name, change in variants.items():
        where = f"{file}: variants: {name}"
        _check_part(_mapping(change, where, (*TEXTS, "published", "common", "groups", "leave_out")), where)
        _check_said(change, where)
        _check_labels(change.get("leave_out", []), f"{where}: leave_out", spec["groups"])
    choices = spec.get("choices", {})
    require(isinstance(choices, dict), f"{file}: choices must map labels to lists of groups, got {choices!r}")
    for label, among in choices.items():
        _check_labels(among, f"{file}: choices: {label}", spec["groups"])
    if variant is None:
        return spec
    require(bool(variants), f"{file} has no variants, got variant={variant}")
    require_choice("variant", variant, variants)
    change = variants[variant]
    groups = {label: spec["groups"].get(label, {}) | group for label, group in change.get("groups", {}).items()}
    common, left_out = [*spec.get("common", []), *change.get("common", [])], change.get("leave_out", [])
    groups = {label: group for label, group in {**spec["groups"], **groups}.items() if label not in left_out}
    choices = {label: [name for name in among if name in groups] for label, among in choices.items()}
    said = {key: change[key] for key in (*TEXTS, "published") if key in change}
    return {**spec, **said, "common": common, "groups": groups, "choices": choices}


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


def _check_said(part: Mapping[str, Any], where: str) -> None:
    """What a study's file says of itself and of its report."""
    for key in TEXTS:
        require(isinstance(part.get(key, ""), str), f"{where}: {key} must be text, got {part.get(key)!r}")
    if part.get("report") == "measured":
        require(bool(part.get("columns")), f"{where}: the report measured needs columns, a list of names")
    for key in ("columns", "epochs"):
        names = part.get(key, [])
        good = isinstance(names, list) and all(isinstance(name, str) for name in names)
        require(good, f"{where}: {key} must be a list of names, got {names!r}")
    for epoch in part.get("epochs", []):
        require_choice(f"an epoch of {where}", epoch, ("selected", "last"))
    plots = part.get("plots", [])
    pairs = isinstance(plots, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in plots)
    require(pairs, f"{where}: plots must be a list of pairs, got {plots!r}")
    published = part.get("published", {})
    rows = isinstance(published, dict) and all(isinstance(row, dict) for row in published.values())
    require(rows, f"{where}: published must map rows to values by column, got {published!r}")


def _check_labels(labels: Any, where: str, groups: Mapping[str, Any]) -> None:
    require(isinstance(labels, list), f"{where} must be a list of groups, got {labels!r}")
    for label in labels:
        require_choice(f"a group of {where}", label, groups)


def _check_words(words: Any, where: str) -> None:
    good = isinstance(words, list) and all(isinstance(word, str) and re.match(r"[\w+~].*=", word) for word in words)
    require(good, f"{where} must be a list of key=value words, got {words!r}")
