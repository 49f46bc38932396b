"""A study's runs as `metacal compare` tests them: a row a group before and after scaling, with its page and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from metacal.calibration import nll
from metacal.calibration.binning import Bins, bin_edges, reliability_bins
from metacal.names import MeasureName
from metacal.predictions import Predictions
from metacal.report.comparison import UNTESTED, RunComparison, spread_of
from metacal.report.html import comparison_page, highlighted
from metacal.report.judge import judge_groups, load_predictions
from metacal.report.run_figures import accuracy_ece_plane, overlaid_reliability
from metacal.report.tables import Cell, Column, Table, column_of, methods_table
from metacal.report.verdict import verdict, when_scaled
from metacal.runs.record import Run, group_runs, load_runs
from metacal.studies import pages
from metacal.studies.choices import chosen
from metacal.studies.grid import Study

__all__ = ["figures", "report", "tables"]

COLUMNS = {"none": ("accuracy", "nll", "ece"), "temperature": ("nll", "ece", "smooth_ece", "auroc")}
OF_CHOSEN: tuple[MeasureName, ...] = ("accuracy", "nll", "ece")


def report(study: Study) -> list[Path]:
    """Write the table (Markdown), the numbers (JSON), the figures (PNG) and `metacal compare`'s page (HTML), which has
    more measures; returns the paths.
    """
    runs, left_out = load_runs([job.folder.path for job in (*study.jobs, *study.unfinished)])
    result = judge_groups(group_runs(runs), sort="ece", left_out=left_out)
    paths = pages.write(study, _numbers(study, result))
    page = study.folder / "report.html"
    page.write_text(comparison_page(result, title=study.name, command=study.command))
    return [*paths, page]


def _numbers(study: Study, result: RunComparison) -> dict[str, Any]:
    """What the table and the figures are made of; its rows by ECE after scaling."""
    columns = {scaling: names for scaling, names in COLUMNS.items() if scaling in result.scalings}
    rows = []
    for i in result.order[list(columns)[-1]]:
        group = result.groups[i]
        measures = {scaling: {n: result.entry(scaling, n, i) for n in names} for scaling, names in columns.items()}
        bins = {scaling: [_bins(run, result, scaling) for run in group.runs] for scaling in columns}
        rows.append({"name": group.short, "seeds": list(group.seeds), "measures": measures, "bins": bins})
    shown, _ = highlighted(result)
    return {
        **pages.about(study),
        "split": result.split,
        "notes": [*([f"Verdict: {verdict(result)}"] if len(rows) > 1 else []), *result.notes(costs=False)],
        "highlight": None if shown is None else sorted(shown),
        "rows": rows,
        "chosen": _chosen(study),
        "left_out": [{"path": str(path), "reason": reason} for path, reason in result.left_out],
    }


def _bins(run: Run, result: RunComparison, scaling: str) -> list[list[float]]:
    """Counts, correct ones and the sums of confidence in the bins of one run."""
    bins = reliability_bins(load_predictions(run, result.split, scaling), result.n_bins)
    return [bins.count.tolist(), bins.correct.tolist(), bins.confidence_sum.tolist()]


def _chosen(study: Study) -> dict[str, list[dict[str, float]]]:
    """The rows that take for each seed one run of several groups: the others' tests do not hold for what is chosen."""
    if not study.choices:
        return {}
    runs = []
    for job in study.jobs:
        by = float(nll(Predictions.load(job.folder.predictions("val"))))
        runs.append({**job.folder.read_summary(), "group": job.label, "seed": job.config.seed, "val/nll": by})
    kept = [f"test/{name}{scaled}" for name in OF_CHOSEN for scaled in ("", "_scaled")]
    return {
        label: [{name: float(run[name]) for name in kept if name in run} for run in among]
        for label, among in chosen(runs, study.choices).items()
    }


def tables(numbers: Mapping[str, Any]) -> list[Table]:
    """A row a group; and the rows that are chosen for each seed, without a test."""
    columns: list[Column] = []
    for scaling, names in numbers["rows"][0]["measures"].items():
        for shown in map(column_of, names):
            title = shown.title if scaling == "none" else f"{shown.title}, scaled"
            columns.append(Column(f"{scaling}/{shown.name}", title, shown.digits, shown.percent))
    rows: list[tuple[str, Sequence[Cell]]] = []
    marked: set[tuple[int, int]] = set()
    for r, row in enumerate(numbers["rows"]):
        entries = [entry for measures in row["measures"].values() for entry in measures.values()]
        cells = [spread_of(entry["values"]) for entry in entries]
        shown_cells = [
            column.show(cell) + UNTESTED if entry["untested"] else cell
            for column, cell, entry in zip(columns, cells, entries, strict=True)
        ]
        rows.append((row["name"], shown_cells))
        marked |= {(r, c) for c, entry in enumerate(entries) if entry["among_best"]}
    note = "the best of its column, and those that do not differ from it significantly"
    title = f"{numbers['split'].capitalize()} split"
    made = [Table(columns, rows, "method", title, numbers["notes"], marked=frozenset(marked), mark_note=note)]
    if numbers["chosen"]:
        table = methods_table(numbers["chosen"], OF_CHOSEN, title="Chosen for each seed by validation NLL")
        made.append(replace(table, marked=frozenset()))
    return made


def figures(numbers: Mapping[str, Any]) -> dict[str, Figure]:
    """Accuracy against ECE, and reliability, before and after scaling."""
    rows, shown = numbers["rows"], numbers["highlight"]
    scalings = list(rows[0]["bins"])

    def values(row: Mapping[str, Any], scaling: str, name: str) -> np.ndarray:
        return np.array(row["measures"][scaling][name]["values"])

    planes = [
        {row["name"]: (values(row, "none", "accuracy"), values(row, scaling, "ece")) for row in rows}
        for scaling in scalings
    ]
    panels = {
        when_scaled(scaling): {row["name"]: [_as_bins(sums) for sums in row["bins"][scaling]] for row in rows}
        for scaling in scalings
    }
    return {
        "accuracy_ece": accuracy_ece_plane(planes[0], planes[1] if planes[1:] else None, shown),
        "reliability": overlaid_reliability(panels, highlight=shown),
    }


def _as_bins(sums: Sequence[Sequence[float]]) -> Bins:
    count, correct, confidence = (torch.tensor(values) for values in sums)
    edges = bin_edges(len(count))
    return Bins(edges[:-1], edges[1:], count, correct, confidence.double())
