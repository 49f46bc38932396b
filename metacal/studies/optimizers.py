"""Methods under several optimizers: accuracy, calibration, and curvature on the validation images, over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter, SymmetricalLogLocator

from metacal.curvature import gn_sharpness, hessian_trace
from metacal.jsonio import to_json
from metacal.report.drawing import COLORS, SMALL, percent
from metacal.report.tables import Cell, Column, Table, column_of, summarise
from metacal.studies.footer import NO_MARKS, footer, over_seeds
from metacal.studies.grid import Job, Study
from metacal.training.saved import load_run
from metacal.training.setup import fixed_subset

__all__ = ["plane", "report"]

IMAGES = 512  # of the validation split, for the curvature

COLUMNS_OF_RUNS = (
    column_of("accuracy"),
    column_of("nll"),
    column_of("ece"),
    Column("ece_scaled", "ECE, scaled", 2, percent=True, best="min"),
    Column("nll_scaled", "NLL, scaled", 4, best="min"),
    Column("hessian_trace", "Tr H", 0),
    Column("gn_sharpness", "λ(G)", 1),
    Column("minutes", "Minutes", 1),
)


def report(study: Study) -> list[Path]:
    """Write one table an optimizer (Markdown), the numbers (JSON) and a figure; returns the files' paths."""
    study.folder.mkdir(parents=True, exist_ok=True)
    numbers = [_numbers(job) for job in study.jobs]
    optimizers = list(dict.fromkeys(str(n["optimizer"]) for n in numbers))
    tables = [_table(optimizer, [n for n in numbers if n["optimizer"] == optimizer]) for optimizer in optimizers]
    for table in tables:
        print(table.render("text"), end="\n\n")
    text = "\n\n".join([*(table.render("markdown") for table in tables), footer(study)])
    paths = [study.folder / name for name in ("table.md", "numbers.json", "plane.png")]
    paths[0].write_text(text)
    paths[1].write_text(to_json(numbers))
    plane(optimizers, numbers).savefig(paths[2], dpi=130)
    return paths


def _numbers(job: Job) -> dict[str, Any]:
    """A run in numbers.json."""
    named = {"method": job.label, "optimizer": job.config.optimizer.name, "seed": job.config.seed}
    return {**named, **job.swept, "folder": str(job.folder.path), **_values(job)}


def _values(job: Job) -> dict[str, float]:
    """What the columns show of one run; the curvature is that of the selected weights in evaluation mode."""
    summary = job.folder.read_summary()
    names = ("accuracy", "nll", "ece", "ece_scaled", "nll_scaled")
    values = {name: float(summary[f"test/{name}"]) for name in names}
    _, data, backbone = load_run(job.folder.path)
    x, y = fixed_subset(data.val, IMAGES, "curvature")
    backbone.eval()
    values["gn_sharpness"] = gn_sharpness(backbone, x, y).value
    values["hessian_trace"] = hessian_trace(backbone, x, y, probes=8).value
    values["minutes"] = summary["time/train_s"] / 60
    return values


def _table(optimizer: str, numbers: Sequence[dict[str, Any]]) -> Table:
    rows: list[tuple[str, list[Cell]]] = []
    counts = []
    for method in dict.fromkeys(n["method"] for n in numbers):
        runs = [n for n in numbers if n["method"] == method]
        counts.append(len(runs))
        rows.append((method, [summarise([run[column.name] for run in runs]) for column in COLUMNS_OF_RUNS]))
    return Table(
        COLUMNS_OF_RUNS,
        rows,
        "method",
        f"Optimizer {optimizer}",
        [
            f"{over_seeds(counts)}; test split, at the epoch of the least validation NLL. "
            f"Curvature of the cross-entropy of {IMAGES} validation images.",
            NO_MARKS,
        ],
        marked=frozenset(),
    )


def plane(optimizers: Sequence[str], numbers: Sequence[dict[str, Any]]) -> Figure:
    """ECE against the Hessian's trace and against accuracy: a colour a method, a marker an optimizer.

    numbers: of each run, or of a mean of runs: method, optimizer, accuracy, ece, hessian_trace.
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2)
    methods = list(dict.fromkeys(n["method"] for n in numbers))
    markers = ("o", "s", "^", "D", "v", "P", "X")
    for ax, (key, label, log) in zip(
        axes, (("hessian_trace", "Tr H, validation images", True), ("accuracy", "accuracy", False))
    ):
        for n in numbers:
            ax.plot(
                n[key],
                n["ece"],
                markers[optimizers.index(n["optimizer"]) % len(markers)],
                color=COLORS[methods.index(n["method"]) % len(COLORS)],
                ms=5,
                alpha=0.8,
            )
        ax.set(xlabel=label, ylabel="test ECE")
        percent(ax.yaxis, *([] if log else [ax.xaxis]))
        ax.grid(alpha=0.3)
        if log:
            ax.set_xscale("symlog", linthresh=1.0)
            ax.xaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1.0, subs=[1, 3]))
            ax.xaxis.set_major_formatter(ScalarFormatter())
        else:
            ax.xaxis.set_major_locator(MaxNLocator(5))
    for i, method in enumerate(methods):
        axes[1].plot([], [], "o", color=COLORS[i % len(COLORS)], label=method)
    for i, optimizer in enumerate(optimizers):
        axes[1].plot([], [], markers[i % len(markers)], color="black", mfc="none", label=optimizer)
    axes[1].legend(fontsize=SMALL, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
