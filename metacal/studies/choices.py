"""Rows of a report that take for each seed one run of several groups: what a user who searches has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["chosen"]


def chosen(
    runs: Sequence[Mapping[str, Any]], choices: Mapping[str, Sequence[str]]
) -> dict[str, list[Mapping[str, Any]]]:
    """For each label of `choices` and each seed the run of its groups with the least validation NLL.

    Args:
        runs: with their `group`, `seed` and `val/nll` beside whatever else; what is chosen keeps all of it.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for label, among in choices.items():
        candidates = [run for run in runs if run["group"] in among]
        seeds = sorted({run["seed"] for run in candidates})
        best = [min((run for run in candidates if run["seed"] == s), key=lambda run: run["val/nll"]) for s in seeds]
        rows |= {label: best} if best else {}
    return rows
