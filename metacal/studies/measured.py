"""Rows of a grid, the columns that the study's file names, and what was published beside them.

A row is a group with the values that it sweeps over, the seeds apart: mean and standard deviation over these. Columns:

    accuracy, ece, ece_scaled, …      a measure of the test split; train/ece, val/ece of another one
    q, train/q, val/q                 the margin moment mean exp(−m)
    gn_sharpness, hessian_sharpness, gn_trace, hessian_trace      of the cross-entropy of `IMAGES` validation images
    trained/gn_sharpness, …           the same of the per-sample loss that is trained
    epoch, temperature                which epoch it is; the one fitted to it
    minutes, step_ms                  of the training; the median of its steps
    gamma                             the mean of training images at the end
    parameters, gamma_parameters      how many numbers the network and the gammas have

A plot is a pair of columns, or of a swept key and a column; of a swept key it has a line for each value of the others.
`sort` is the column by whose mean rows stand; `choices` adds rows that take for each seed one run of several groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from metacal.calibration import MEASURES, Measure
from metacal.config.parts import learns, source_of
from metacal.curvature import gn_sharpness, gn_trace, hessian_sharpness, hessian_trace
from metacal.curvature.loss import LogitLoss
from metacal.errors import require, require_choice
from metacal.margins import moment, true_margin
from metacal.predict import predict
from metacal.predictions import Predictions
from metacal.report.drawing import COLORS, SMALL, name_points, percent
from metacal.report.tables import Cell, Column, Spread, Table, central, column_of, summarise
from metacal.runs import checkpoint
from metacal.studies import pages
from metacal.studies.choices import chosen
from metacal.studies.footer import NO_MARKS, over_seeds, published_cell
from metacal.studies.grid import Job, Study, load_series
from metacal.training.saved import SavedRun, load_run
from metacal.training.setup import (
    build_gamma,
    evaluation_batches,
    fixed_subset,
    gammas_of,
    trained_loss,
    training_batches,
)

__all__ = ["check", "collect", "column", "figures", "report", "tables"]

IMAGES = 256
CURVATURE: dict[str, tuple[Column, Callable[..., Any]]] = {
    "gn_sharpness": (Column("gn_sharpness", "λ(G)", 1), gn_sharpness),
    "hessian_sharpness": (Column("hessian_sharpness", "λ(H)", 1), hessian_sharpness),
    "gn_trace": (Column("gn_trace", "Tr G", 0), gn_trace),
    "hessian_trace": (Column("hessian_trace", "Tr H", 0), hessian_trace),
}
OTHERS = {
    "minutes": Column("minutes", "Minutes", 2),
    "step_ms": Column("step_ms", "Step ms", 1),
    "gamma": Column("gamma", "Gamma at the end", 2),
    "parameters": Column("parameters", "Parameters", 0),
    "gamma_parameters": Column("gamma_parameters", "of the gammas", 0),
}
OF_EPOCH = {
    "epoch": Column("epoch", "Epoch", 1),
    "temperature": Column("temperature", "T", 2),
}
BESIDE, MARKERS = 10, "osD^v"  # so many points have their names beside them
EPOCHS = {"selected": "best", "last": "last"}  # the epoch -> its checkpoint


def column(name: str) -> Column:
    """How the column `name` is shown.

    Raises:
        InputError: for a name that is no column.
    """
    where, _, measure = name.rpartition("/")
    base = measure.removesuffix("_scaled")
    require_choice("column", base, (*MEASURES, "q", *CURVATURE, *OTHERS, *OF_EPOCH))
    splits, losses = ("", "train", "val"), ("", "trained")
    known = losses if base in CURVATURE else splits if base in (*MEASURES, "q") else ("",)
    require(where in known and (base == measure or base in MEASURES), f"there is no column {name}")
    if base in (*OTHERS, *OF_EPOCH):
        return {**OTHERS, **OF_EPOCH}[base]
    if base in CURVATURE:
        shown, _ = CURVATURE[base]
        return Column(name, f"{shown.title}, trained loss" if where else shown.title, shown.digits)
    shown = Column("q", "Q", 3) if base == "q" else column_of(base)
    title = f"{where} {shown.title}".lstrip() + (", scaled" if measure != base else "")
    return Column(name, title, shown.digits, shown.percent)


def report(study: Study) -> list[Path]:
    """Write the tables (Markdown), the numbers (JSON) and a figure of the plots; returns the files' paths."""
    return pages.write(study, collect(study))


def check(study: Study) -> None:
    """What the study's file says of the report, before any of its runs.

    Raises:
        InputError: for names that are no columns, and for a plot or a sort of something that the report does not have.
    """
    names = list(study.spec["columns"])
    for name in names:
        column(name)
    sort = study.spec.get("sort")
    require(sort is None or sort in names, f"sort must be one of the study's columns {', '.join(names)}, got {sort}")
    swept = list(dict.fromkeys(key for job in study.jobs for key in job.swept if key != "seed"))
    for x, y in study.spec.get("plots", []):
        require_choice("the x of a plot: a swept key or a column", x, (*swept, *names))
        require_choice("the y of a plot: a column", y, names)


def collect(study: Study) -> dict[str, Any]:
    """The numbers of all runs, and what the study's file says of them."""
    check(study)
    names = list(study.spec["columns"])
    wanted = [*names, "val/nll"] if study.choices and "val/nll" not in names else names  # what `chosen` chooses by
    epochs = list(study.spec.get("epochs", ["selected"]))
    runs = []
    for job in study.jobs:
        swept = {key: value for key, value in job.swept.items() if key != "seed"}
        of_run = {name: _other(job, name) for name in names if name in OTHERS}
        values = {epoch: _values(job, epoch, wanted, of_run) for epoch in epochs}
        runs.append({"group": job.label, "swept": swept, "seed": job.config.seed, **values})
    said = {key: study.spec.get(key, default) for key, default in (("published", {}), ("plots", []), ("sort", None))}
    said |= {"columns": names, "epochs": epochs, "choices": study.choices, "select": study.jobs[0].config.select}
    return {**pages.about(study), **said, "runs": runs}


def _values(job: Job, epoch: str, names: Sequence[str], of_run: Mapping[str, float | None]) -> dict[str, float | None]:
    """The columns of one run at one epoch, with those that no epoch changes; None where the run has no such value."""
    summary = job.folder.read_summary()
    split_of_summary = "test" if epoch == "selected" else "last"
    saved: list[SavedRun] = []  # at most one: made when a column needs the network

    def run() -> SavedRun:
        if not saved:
            saved.append(load_run(job.folder.path, "cpu", EPOCHS[epoch]))
            saved[0].backbone.eval()
        return saved[0]

    def predictions(split: str) -> Predictions:
        if split == "train":
            return predict(run().backbone, evaluation_batches(run().data.train).epoch(0))
        return Predictions.load(job.folder.predictions(split, epoch))

    values: dict[str, float | None] = {}
    known: dict[str, Predictions] = {}
    for name in names:
        where, _, measure = name.rpartition("/")
        if measure in CURVATURE:
            values[name] = _curvature(job, run(), measure, where == "trained")
        elif name in of_run:
            values[name] = of_run[name]
        elif name == "epoch":
            values[name] = float(summary["best_epoch" if epoch == "selected" else "last_epoch"])
        elif f"{split_of_summary}/{name}" in summary:
            values[name] = float(summary[f"{split_of_summary}/{name}"])
        else:
            split = where or "test"
            known[split] = known.get(split) or predictions(split)
            values[name] = _measure(known[split], measure)
    return values


def _measure(p: Predictions, measure: str) -> float:
    if measure == "q":
        assert p.logits is not None  # a run's
        return moment(true_margin(p.logits, p.labels))
    shown: Measure = MEASURES[measure]
    return float(shown.function(p))


def _curvature(job: Job, run: SavedRun, measure: str, trained: bool) -> float | None:
    """Of the cross-entropy, or of the per-sample loss that is trained where its gammas are not learned."""
    x, y = fixed_subset(run.data.val, IMAGES, "curvature")
    loss: LogitLoss = "cross_entropy"
    if trained:
        if learns(job.config):
            return None
        source = build_gamma(job.config, run.backbone, training_batches(job.config, run.data)[0])
        loss = trained_loss(job.config, run.backbone, source, x, y, job.config.epochs)
    return float(CURVATURE[measure][1](run.backbone, x, y, loss=loss).value)


def _other(job: Job, name: str) -> float | None:
    if name == "minutes":
        return float(job.folder.read_summary()["time/train_s"]) / 60
    if name in ("parameters", "gamma_parameters"):
        state = checkpoint.load(job.folder.last)["backbone" if name == "parameters" else "gamma"] or {}
        return float(sum(value.numel() for value in state.values()))
    if name == "gamma":
        return _mean_gamma(job)
    steps = sorted(load_series(job.folder).get("time/step_ms", {}).values())
    return steps[len(steps) // 2] if steps else None


def _mean_gamma(job: Job) -> float | None:
    """Of training images as they are, at the run's end, whether or not a monitor was on; None without gammas."""
    if source_of(job.config) is None:
        return None
    run, state = load_run(job.folder.path, "cpu", "last"), checkpoint.load(job.folder.last)
    source = build_gamma(job.config, run.backbone, training_batches(job.config, run.data)[0])
    assert source is not None
    source.load_state_dict(state["gamma"] or {})
    x, y = fixed_subset(run.data.train, IMAGES, "gamma")
    with torch.no_grad():
        return float(gammas_of(run.backbone, source.eval(), x, y, state["progress"]["epoch"]).mean())


def tables(numbers: Mapping[str, Any]) -> list[Table]:
    """One table an epoch, the published rows below ours."""
    return [_table(numbers, epoch) for epoch in numbers["epochs"]]


def _table(numbers: Mapping[str, Any], epoch: str) -> Table:
    columns = [column(name) for name in numbers["columns"]]
    rows: list[tuple[str, list[Cell]]] = []
    known = _rows(numbers, epoch)
    for name, runs in known.items():
        rows.append((name, [summarise([run[c.name] for run in runs]) for c in columns]))
        published = numbers["published"].get(name, {})
        if published:
            rows.append((f"{name}, published", [published_cell(published.get(c.name)) for c in columns]))
    select = numbers.get("select", "nll")  # numbers of older reports do not say it
    by_nll = {"nll": "least validation NLL", "nll_scaled": "least scaled validation NLL"}
    selected = f"the epoch of the {by_nll.get(select, f'best validation {select}')}"
    which = "the last epoch" if epoch == "last" else selected
    note = (
        f"{over_seeds(map(len, known.values()))}, at {which}; measures are of the test split if nothing else is said."
    )
    if any(c.name.rpartition("/")[2] in CURVATURE for c in columns):
        note += f" Curvature is that of {IMAGES} validation images in evaluation mode."
    return Table(columns, rows, "runs", f"At {which}", [note, NO_MARKS], marked=frozenset())


def _row_name(run: Mapping[str, Any], without: str = "") -> str:
    swept = [f"{key.rpartition('.')[2]} {value}" for key, value in run["swept"].items() if key != without]
    return " ".join([run["group"], *swept])


def _rows(numbers: Mapping[str, Any], epoch: str) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of every row, with their values at an epoch; numbers of older reports have no choices and no sort."""
    runs = [{**run, **run[epoch]} for run in numbers["runs"]]
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        rows.setdefault(_row_name(run), []).append(run)
    rows |= chosen(runs, numbers.get("choices", {}))
    key = numbers.get("sort")
    if key is None:
        return rows

    def mean(name: str) -> float:
        value = central(summarise([run[key] for run in rows[name]]))
        return math.inf if value is None else value

    return {name: rows[name] for name in sorted(rows, key=mean, reverse=column(key).best == "max")}


def figures(numbers: Mapping[str, Any]) -> dict[str, Figure]:
    """One figure, `plots`, with a row of panels an epoch; none where the study's file has no plots."""
    plots, epochs = numbers["plots"], numbers["epochs"]
    if not plots:
        return {}
    figure = Figure(figsize=(5.2 * len(plots), 4.2 * len(epochs)), layout="constrained")
    for row, epoch in zip(figure.subplots(len(epochs), len(plots), squeeze=False), epochs):
        for ax, (x, y) in zip(row, plots):
            swept = any(x in run["swept"] for run in numbers["runs"])
            (_lines if swept else _points)(ax, numbers, epoch, x, y)
            _label(ax, x, y, swept, epoch if len(epochs) > 1 else "")
    if len(_rows(numbers, epochs[0])) > BESIDE:
        entries = [ax.get_legend_handles_labels() for ax in figure.axes if ax.get_legend() is None]
        points = {name: handle for handles, labels in entries for handle, name in zip(handles, labels, strict=True)}
        if points:  # lines have legends of their own
            figure.legend(points.values(), points, loc="outside right center", frameon=False, fontsize=SMALL)
    return {"plots": figure}


def _lines(ax: Axes, numbers: Mapping[str, Any], epoch: str, x: str, y: str) -> None:
    """Mean of `y` with its standard deviation over the swept values `x`, a line for each of the other values."""
    lines: dict[str, dict[float, list[float | None]]] = {}
    for run in numbers["runs"]:
        if x in run["swept"]:
            points = lines.setdefault(_row_name(run, without=x), {})
            points.setdefault(float(run["swept"][x]), []).append(run[epoch][y])
    for i, (name, points) in enumerate(lines.items()):
        cells = {at: summarise(values) for at, values in sorted(points.items())}
        known = {at: cell for at, cell in cells.items() if cell is not None}
        spread = [cell.std if isinstance(cell, Spread) else 0.0 for cell in known.values()]
        means = [mean for mean in map(central, known.values()) if mean is not None]
        ax.errorbar(list(known), means, spread, label=name, color=COLORS[i % len(COLORS)], marker="o", ms=4, capsize=2)
    values = sorted({at for points in lines.values() for at in points})
    positive = [value for value in values if value > 0]
    if positive and positive[-1] >= 10 * positive[0]:
        ax.set_xscale("symlog", linthresh=positive[0])  # a weight or gamma of 0 has its place
    ax.legend(fontsize=SMALL)


def _points(ax: Axes, numbers: Mapping[str, Any], epoch: str, x: str, y: str) -> None:
    """A point a row, at its means: with its name beside it in the colour of its group, or, where there are more than
    `BESIDE`, in a colour and shape that the figure's legend explains.
    """
    groups = list(dict.fromkeys(run["group"] for run in numbers["runs"]))
    rows = _rows(numbers, epoch)
    few = len(rows) <= BESIDE
    named: dict[str, tuple[float, float, str]] = {}
    for i, (name, runs) in enumerate(rows.items()):
        cells = [summarise([run[key] for run in runs]) for key in (x, y)]
        at_x, at_y = (central(cell) for cell in cells)
        if at_x is None or at_y is None:
            continue
        spread_x, spread_y = (cell.std if isinstance(cell, Spread) else 0.0 for cell in cells)
        color = COLORS[(groups.index(runs[0]["group"]) if few else i) % len(COLORS)]
        marker = "o" if few else MARKERS[i // len(COLORS) % len(MARKERS)]
        ax.errorbar(at_x, at_y, spread_y, spread_x, color=color, marker=marker, ms=4, lw=0.8, label=name)
        named[name] = at_x, at_y, color
    ax.xaxis.set_major_locator(MaxNLocator(5))
    if few:
        name_points(ax, named)


def _label(ax: Axes, x: str, y: str, swept: bool, epoch: str) -> None:
    shown = column(y)
    ax.set(xlabel=x if swept else column(x).title, ylabel=shown.title, title=f"{epoch} epoch" if epoch else "")
    if not swept and x.rpartition("/")[2] == "q":
        ax.set_xscale("log")  # a mean of exponentials
    if y.rpartition("/")[2] == "q":
        ax.set_yscale("log")
    axes = [(ax.yaxis, shown.percent), (ax.xaxis, not swept and column(x).percent)]
    percent(*(axis for axis, in_percent in axes if in_percent))
    ax.grid(alpha=0.3)
