"""`metacal evaluate --ensemble`: the mean of several runs' probabilities, beside its members."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metacal.errors import InputError, note, require
from metacal.jsonio import to_json

if TYPE_CHECKING:
    from metacal.predictions import Predictions

__all__ = ["evaluate_ensemble"]


def evaluate_ensemble(arguments: argparse.Namespace) -> int:
    from metacal.report.ensemble import average
    from metacal.report.report import Report
    from metacal.report.tables import methods_table

    _require_same_data(arguments)
    loaded = {what: _member(what, arguments) for what in arguments.what}
    pooled = average({what: p for what, (p, _) in loaded.items()})
    pooled_val, why_not = _pooled_val({what: val for what, (_, val) in loaded.items()}, arguments)
    options = {"n_bins": arguments.n_bins, "split": arguments.split, "scaling": arguments.scaling}
    members = {what: Report(p, val, resamples=0, **options).to_dict() for what, (p, val) in loaded.items()}
    mean = {
        name: statistics.fmean(of[name] for of in members.values())
        for name in next(iter(members.values()))
        if all(name in of for of in members.values())
    }
    report = Report(pooled, pooled_val, resamples=arguments.resamples, **options)
    if arguments.figure:
        report.reliability_diagram(f"ensemble of {len(members)}").savefig(arguments.figure, dpi=150)
    if arguments.json:
        print(to_json({"members": members, "mean": mean, "ensemble": report.to_dict(), "unscaled_because": why_not}))
        return 0
    rows: dict[str, Any] = {f"member {i}": of for i, of in enumerate(members.values(), 1)}
    rows |= {"mean of members": list(members.values()), "ensemble": report.to_dict()}
    for i, what in enumerate(members, 1):
        print(f"member {i}: {what}")
    table = methods_table(rows, split=arguments.split, title=f"Ensemble of {len(members)}: mean of the probabilities")
    print(table.render("markdown" if arguments.markdown else "text"))
    if why_not:
        print(f"The ensemble is not scaled: {why_not}.")
    print(f"\nensemble ({len(pooled)} samples)")
    print(report.to_markdown() if arguments.markdown else report)
    return 0


def _member(what: str, arguments: argparse.Namespace) -> tuple[Predictions, Predictions | None]:
    """A member's predictions, and those on val for a run measured on test.

    A finished run's are read from its predictions/, which hold the best checkpoint's.
    """
    from metacal.predictions import Predictions
    from metacal.runs.folder import check_run
    from metacal.training.saved import predict_run

    if Path(what).is_file():
        return Predictions.load(what), None
    folder = check_run(what)
    files = {name: folder.predictions(name) for name in ("val", "test")}
    found = None
    if arguments.checkpoint == "best" and folder.finished and all(file.is_file() for file in files.values()):
        try:
            found = {name: Predictions.load(file) for name, file in files.items()}
        except InputError as error:
            note(f"{error}; the predictions are made again from the checkpoint")
    found = found or predict_run(what, arguments.device, arguments.checkpoint)
    return found[arguments.split], found["val"] if arguments.split == "test" else None


def _pooled_val(
    vals: Mapping[str, Predictions | None], arguments: argparse.Namespace
) -> tuple[Predictions | None, str | None]:
    """The average on val, for the ensemble's scaling, or None and the reason why there is none."""
    from metacal.report.ensemble import average

    known = {what: val for what, val in vals.items() if val is not None}
    if arguments.split == "val":
        return None, "the scaling is fitted on val, which is measured here"
    if missing := [what for what in vals if what not in known]:
        return None, f"{missing[0]} has no predictions on val"
    first = next(iter(known))
    for what in known:
        if _val_split(what) != _val_split(first):
            return None, f"{what} and {first} have different val splits"
    try:
        return average(known), None
    except InputError as error:
        return None, f"on val, {error}"


def _val_split(what: str) -> tuple[Any, ...]:
    """What decides which samples are in val, beside the data themselves."""
    from metacal.runs.config import recorded_config
    from metacal.runs.folder import check_run

    config = recorded_config(check_run(what))
    d = config.data
    return config.seed if d.split_seed is None else d.split_seed, d.val_size, d.test_size


def _require_same_data(arguments: argparse.Namespace) -> None:
    """Refuse runs whose samples differ, which equal labels would not tell: by the test splits' content, where they are
    finished, and for val by what it was drawn with.
    """
    from metacal.runs.folder import check_run

    runs = [what for what in arguments.what if Path(what).is_dir()]
    folders = {what: check_run(what) for what in runs}
    known = {what: f.read_summary().get("data", {}).get("fingerprint") for what, f in folders.items() if f.finished}
    checks: list[tuple[str, Mapping[str, Any]]] = [("test", known)]
    if arguments.split == "val":
        checks.append(("val", {what: _val_split(what) for what in runs}))
    for split, marks in checks:
        for what, mark in marks.items():
            first = next(iter(marks))
            require(
                mark == marks[first],
                f"--ensemble needs members with the same {split} split: that of {what} is not that of {first}",
            )
