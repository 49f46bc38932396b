"""Methods side by side over seeds: their test split at the selected epoch and at the last one, and the gammas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from metacal.calibration import nll
from metacal.jsonio import to_json
from metacal.names import MeasureName
from metacal.predictions import Predictions
from metacal.report.figures import reliability_curves
from metacal.report.tables import Cell, Column, Table, methods_table, summarise
from metacal.studies.footer import NO_MARKS, footer, over_seeds
from metacal.studies.grid import Job, Study, load_series

__all__ = ["MEASURES", "Rows", "report", "val_nll", "with_choices"]

Rows = dict[str, list[dict[str, Any]]]
"""What the summaries of a group's runs say, by its label."""

MEASURES: tuple[MeasureName, ...] = ("accuracy", "nll", "ece", "adaptive_ece", "brier")


def report(study: Study) -> list[Path]:
    """Write the tables (Markdown), the numbers (JSON) and reliability curves; returns the files' paths."""
    study.folder.mkdir(parents=True, exist_ok=True)
    selected: Rows = {}
    last: Rows = {}
    series: dict[str, list[Mapping[str, Mapping[int, float]]]] = {}
    curves: dict[str, Predictions] = {}
    for job in study.jobs:
        summary = job.folder.read_summary() | {"folder": str(job.folder.path)}
        at_last = {f"test/{name[5:]}": value for name, value in summary.items() if name.startswith("last/")}
        for rows, epoch, values in ((selected, "selected", summary), (last, "last", {**summary, **at_last})):
            rows.setdefault(job.label, []).append(values | {"val/nll": val_nll(job, epoch)})
        series.setdefault(job.label, []).append(load_series(job.folder))
        curves.setdefault(job.label, Predictions.load(job.folder.predictions("test", "last")))  # of the first seed
    tables = [
        _unmarked(methods_table(with_choices(rows, study.choices), MEASURES, title=title))
        for rows, title in ((selected, "The selected epoch"), (last, "The last epoch"))
    ]
    tables.append(_costs(selected, series))
    for table in tables:
        print(table.render("text"), end="\n\n")
    text = "\n\n".join(table.render("markdown") for table in tables)
    text += "\n\n" + footer(study)
    paths = [study.folder / name for name in ("table.md", "numbers.json", "reliability.png")]
    paths[0].write_text(text)
    numbers = {"selected": with_choices(selected, study.choices), "last": with_choices(last, study.choices)}
    paths[1].write_text(to_json(numbers))
    reliability_curves(curves).savefig(paths[2], dpi=130)
    return paths


def val_nll(job: Job, epoch: str = "selected") -> float:
    """By which `with_choices` chooses; under val/nll in its rows."""
    return float(nll(Predictions.load(job.folder.predictions("val", epoch))))


def with_choices(rows: Rows, choices: Mapping[str, Sequence[str]]) -> Rows:
    """The rows, and those that take for each seed the run of some groups with the least validation NLL.

    That is what a user who searches has; the row's runs differ in what was chosen, which the numbers (JSON) tell.
    """
    result = dict(rows)
    for label, among in choices.items():
        seeds = {run["seed"] for name in among for run in rows.get(name, [])}
        result[label] = [
            min((run for name in among for run in rows.get(name, []) if run["seed"] == seed), key=_val_nll)
            for seed in sorted(seeds)
        ]
    return {label: runs for label, runs in result.items() if runs}


def _val_nll(run: Mapping[str, Any]) -> float:
    return float(run["val/nll"])


def _unmarked(table: Table) -> Table:
    return replace(table, marked=frozenset(), notes=[*table.notes, NO_MARKS])


def _costs(
    summaries: Mapping[str, Sequence[Mapping[str, Any]]],
    series: Mapping[str, Sequence[Mapping[str, Mapping[int, float]]]],
) -> Table:
    """Selected epoch, minutes, time of a step, and the gammas at the end."""
    columns = [
        Column("best_epoch", "Selected epoch", 1),
        Column("minutes", "Minutes", 1),
        Column("step_ms", "Step ms", 0),
        Column("gamma", "Gamma at the end", 1),
        Column("temperature", "Temperature", 2),
    ]
    rows: list[tuple[str, list[Cell]]] = []
    for method, runs in summaries.items():
        gammas = [_last(s.get("gamma/mean")) for s in series[method]]
        steps = [_median(s.get("time/step_ms")) for s in series[method]]
        rows.append(
            (
                method,
                [
                    summarise([float(r["best_epoch"]) for r in runs]),
                    summarise([r["time/train_s"] / 60 for r in runs]),
                    summarise(steps),
                    summarise(gammas),
                    summarise([r.get("test/temperature") for r in runs]),
                ],
            )
        )
    note = f"{over_seeds(map(len, summaries.values()))}."
    return Table(columns, rows, "method", "Cost and gammas", [note])


def _last(values: Mapping[int, float] | None) -> float | None:
    return values[max(values)] if values else None


def _median(values: Mapping[int, float] | None) -> float | None:
    return sorted(values.values())[len(values) // 2] if values else None
