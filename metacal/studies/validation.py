"""A grid of settings measured on the validation split alone, so that the choice leaves the test split unread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metacal.jsonio import to_json
from metacal.names import MeasureName
from metacal.predictions import Predictions
from metacal.report.report import Report
from metacal.report.tables import Cell, Column, Table, central, column_of, summarise
from metacal.studies.footer import footer, over_seeds
from metacal.studies.grid import Study

__all__ = ["report"]

MEASURES: tuple[MeasureName, ...] = ("accuracy", "nll", "brier", "ece", "adaptive_ece")


def report(study: Study) -> list[Path]:
    """Write one table with a row a setting, sorted by NLL (Markdown), and the numbers (JSON); returns the paths."""
    study.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for job in study.jobs:
        setting = ", ".join(f"{key}={value}" for key, value in job.swept.items() if key != "seed")
        p = Predictions.load(job.folder.predictions("val"))
        values = Report(p, measures=MEASURES, resamples=0).to_dict()
        minutes = job.folder.read_summary()["time/train_s"] / 60
        named = {"seed": job.config.seed, "folder": str(job.folder.path)}
        found.setdefault(setting, []).append({**named, **values, "minutes": minutes})
    columns = [*(column_of(name) for name in MEASURES), Column("minutes", "Minutes", 1)]
    rows: list[tuple[str, list[Cell]]] = [
        (name, [summarise([run[column.name] for run in runs]) for column in columns]) for name, runs in found.items()
    ]
    rows.sort(key=lambda row: central(row[1][1]) or 0.0)
    seeds = over_seeds(map(len, found.values()))
    note = f"{seeds}; validation split, at the epoch of its least NLL, unscaled. Sorted by NLL; no value is marked."
    table = Table(columns, rows, "setting", "Validation", [note], marked=frozenset())
    print(table.render("text"), end="\n\n")
    paths = [study.folder / "table.md", study.folder / "numbers.json"]
    paths[0].write_text(f"{table.render('markdown')}\n\n{footer(study)}")
    paths[1].write_text(to_json(found))
    return paths
