"""A study's runs as `metacal compare` tests them: a row a group before and after scaling, with its page and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from metacal.calibration.binning import Bins, bin_edges, reliability_bins
from metacal.names import MeasureName
from metacal.report.comparison import UNTESTED, RunComparison
from metacal.report.html import comparison_page, highlighted
from metacal.report.judge import judge_groups, load_predictions
from metacal.report.run_figures import accuracy_ece_plane, overlaid_reliability
from metacal.report.tables import Cell, Column, Table, column_of, methods_table, summarise
from metacal.report.verdict import verdict
from metacal.runs.record import Group, group_runs, load_runs
from metacal.studies import pages
from metacal.studies.choices import chosen, val_nll
from metacal.studies.grid import Study

__all__ = ["collect", "figures", "report", "tables"]

BEFORE = ("accuracy", "nll", "ece")
AFTER = ("nll", "ece", "smooth_ece", "auroc")
OF_CHOSEN: tuple[MeasureName, ...] = ("accuracy", "nll", "ece")
PANELS = {"none": "without scaling", "temperature": "after temperature scaling"}


def report(study: Study) -> list[Path]:
    """Write the table (Markdown), the numbers (JSON), the figures (PNG) and `metacal compare`'s page (HTML), which has
    more measures; returns the paths.
    """
    result = _compared(study)
    page = study.folder / "report.html"
    paths = pages.write(study, _numbers(study, result))
    page.write_text(comparison_page(result, title=study.name, command=study.command))
    return [*paths, page]


def collect(study: Study) -> dict[str, Any]:
    """The numbers that the table and the figures are made of."""
    return _numbers(study, _compared(study))


def _compared(study: Study) -> RunComparison:
    runs, left_out = load_runs([job.folder.path for job in (*study.jobs, *study.unfinished)])
    return judge_groups(group_runs(runs), sort="ece", left_out=left_out)


def _numbers(study: Study, result: RunComparison) -> dict[str, Any]:
    notes = [*([f"Verdict: {verdict(result)}"] if len(result.groups) > 1 else []), *result.notes(costs=False)]
    after = "temperature" if "temperature" in result.scalings else "none"
    shown, _ = highlighted(result)
    rows = []
    for i in result.order[after]:
        group = result.groups[i]
        measures = {scaling: {name: _entry(result, scaling, name, i) for name in names}
                    for scaling, names in _columns(result.scalings)}  # fmt: skip
        bins = {scaling: [_bins(group, k, result, scaling) for k in range(len(group.runs))] for scaling in PANELS
                if scaling in result.scalings}  # fmt: skip
        rows.append({"name": group.short, "seeds": list(group.seeds), "measures": measures, "bins": bins})
    return {
        **pages.about(study),
        "split": result.split,
        "notes": notes,
        "highlight": None if shown is None else sorted(shown),
        "rows": rows,
        "chosen": _chosen(study),
        "left_out": [{"path": str(path), "reason": reason} for path, reason in result.left_out],
    }


def _columns(scalings: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(scaling, its measures) in the order of the table's columns."""
    return [(scaling, names) for scaling, names in (("none", BEFORE), ("temperature", AFTER)) if scaling in scalings]


def _entry(result: RunComparison, scaling: str, name: str, i: int) -> dict[str, Any]:
    values = result.results[scaling][name][i].values.tolist()
    mark = result.is_among_best(scaling, name, i)
    return {"values": values, "among_best": mark, "untested": result.is_untested(scaling, name, i)}


def _bins(group: Group, k: int, result: RunComparison, scaling: str) -> list[list[float]]:
    """Counts, correct ones and the sums of confidence in the bins of one run."""
    bins = reliability_bins(load_predictions(group.runs[k], result.split, scaling), result.n_bins)
    return [bins.count.tolist(), bins.correct.tolist(), bins.confidence_sum.tolist()]


def _chosen(study: Study) -> dict[str, list[dict[str, float]]]:
    """The rows that take for each seed one run of several groups: the others' tests do not hold for what is chosen."""
    if not study.choices:
        return {}
    runs = [
        {**job.folder.read_summary(), "group": job.label, "seed": job.config.seed, "val/nll": val_nll(job)}
        for job in study.jobs
    ]
    kept = [f"test/{name}{scaled}" for name in OF_CHOSEN for scaled in ("", "_scaled")]
    return {
        label: [{name: float(run[name]) for name in kept if name in run} for run in among]
        for label, among in chosen(runs, study.choices).items()
    }


def tables(numbers: Mapping[str, Any]) -> list[Table]:
    """A row a group, sorted by ECE after scaling; and the rows that are chosen for each seed, without a test."""
    scalings = list(numbers["rows"][0]["measures"])
    columns: list[Column] = []
    for scaling, names in _columns(scalings):
        for name in names:
            shown = column_of(name)
            title = shown.title if scaling == "none" else f"{shown.title}, scaled"
            columns.append(Column(f"{scaling}/{name}", title, shown.digits, shown.percent))
    rows: list[tuple[str, Sequence[Cell]]] = []
    marked: set[tuple[int, int]] = set()
    for r, row in enumerate(numbers["rows"]):
        cells: list[Cell] = []
        for c, column in enumerate(columns):
            entry = row["measures"][column.name.partition("/")[0]][column.name.partition("/")[2]]
            cell = _cell(entry["values"])
            cells.append(column.show(cell) + UNTESTED if entry["untested"] else cell)
            marked |= {(r, c)} if entry["among_best"] else set()
        rows.append((row["name"], cells))
    note = "the best of its column, and those that do not differ from it significantly"
    title = f"{numbers['split'].capitalize()} split"
    made = [Table(columns, rows, "method", title, numbers["notes"], marked=frozenset(marked), mark_note=note)]
    if numbers["chosen"]:
        one = methods_table(numbers["chosen"], OF_CHOSEN, title="Chosen for each seed by validation NLL")
        made.append(Table(one.columns, one.rows, one.corner, one.title, one.notes, marked=frozenset()))
    return made


def _cell(values: Sequence[float]) -> Cell:
    return summarise(values) if np.isfinite(values).all() else float(np.mean(values))


def figures(numbers: Mapping[str, Any]) -> dict[str, Figure]:
    """Accuracy against ECE, and reliability, before and after scaling."""
    rows, shown = numbers["rows"], numbers["highlight"]
    scalings = [scaling for scaling in PANELS if scaling in rows[0]["bins"]]

    def plane(scaling: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        errors = {row["name"]: np.array(row["measures"][scaling]["ece"]["values"]) for row in rows}
        return {
            row["name"]: (np.array(row["measures"]["none"]["accuracy"]["values"]), errors[row["name"]]) for row in rows
        }

    after = plane("temperature") if "temperature" in scalings else None
    panels = {
        PANELS[scaling]: {row["name"]: [_as_bins(sums) for sums in row["bins"][scaling]] for row in rows}
        for scaling in scalings
    }
    return {
        "accuracy_ece": accuracy_ece_plane(plane("none"), after, shown),
        "reliability": overlaid_reliability(panels, highlight=shown),
    }


def _as_bins(sums: Sequence[Sequence[float]]) -> Bins:
    count, correct, confidence = (torch.tensor(values) for values in sums)
    edges = bin_edges(len(count))
    return Bins(edges[:-1], edges[1:], count, correct, confidence.double())
