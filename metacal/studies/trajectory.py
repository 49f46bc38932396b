"""Calibration and curvature along the trajectory: how closely ECE follows the Gauss-Newton sharpness in a run.

For every run the series of train and held-out ECE (and KCE) and of the Gauss-Newton sharpness, over the logged steps,
give one Pearson correlation each; a table cell is its mean and standard deviation over the learning rates of a group.
The sharpness beside held-out ECE is once that of the training images and once that of the held-out images.
Published values: "Too Sharp, Too Sure: When Calibration Follows Curvature" (arXiv 2604.20614).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from metacal.errors import require
from metacal.jsonio import to_json
from metacal.report.drawing import SMALL, percent
from metacal.report.tables import Cell, Column, Spread, Table
from metacal.studies.footer import footer
from metacal.studies.grid import Job, Study, load_series

__all__ = ["coupling", "lag_of_best_correlation", "report"]

SHARPNESS = "curvature/gn_sharpness"
HELD_OUT_SHARPNESS = "curvature/held_out_gn_sharpness"
SERIES = {
    "train ECE": "train_subset/ece",
    "train KCE": "train_subset/kce",
    "held-out ECE": "val_subset/ece",
    "held-out KCE": "val_subset/kce",
}
# Pearson correlation with the Gauss-Newton sharpness, mean and standard deviation over four learning rates.
PUBLISHED = {
    "GD": {
        "train ECE": (0.83, 0.08),
        "train KCE": (0.83, 0.08),
        "held-out ECE": (0.96, 0.02),
        "held-out KCE": (0.97, 0.01),
    },
    "SGD": {
        "train ECE": (0.84, 0.07),
        "train KCE": (0.84, 0.08),
        "held-out ECE": (0.97, 0.01),
        "held-out KCE": (0.97, 0.01),
    },
    "AdamW": {
        "train ECE": (0.72, 0.07),
        "train KCE": (0.70, 0.08),
        "held-out ECE": (0.15, 0.15),
        "held-out KCE": (0.21, 0.22),
    },
    "Muon": {
        "train ECE": (0.63, 0.26),
        "train KCE": (0.61, 0.28),
        "held-out ECE": (-0.10, 0.28),
        "held-out KCE": (-0.16, 0.31),
    },
    "SAM": {
        "train ECE": (0.92, 0.04),
        "train KCE": (0.91, 0.04),
        "held-out ECE": (0.98, 0.01),
        "held-out KCE": (0.98, 0.01),
    },
}


def lag_of_best_correlation(a: Sequence[float], b: Sequence[float], max_lag: int) -> tuple[int, float]:
    """The shift k, |k| ≤ max_lag, with the largest Pearson correlation of a(t + k) and b(t), and that correlation.

    k > 0: `a` follows `b` by k places. The smallest |k| wins a tie. Series too short or constant give (0, nan).
    """
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    best = (0, float("nan"))
    for k in sorted(range(-max_lag, max_lag + 1), key=abs):
        left, right = (x[k:], y[: len(y) - k]) if k >= 0 else (x[:k], y[-k:])
        if len(left) < 3 or np.ptp(left) == 0 or np.ptp(right) == 0:
            continue
        r = float(np.corrcoef(left, right)[0, 1])
        if not best[1] >= r:
            best = (k, r)
    return best


def coupling(series: Mapping[str, Mapping[int, float]], own: bool = False) -> dict[str, dict[str, float]]:
    """For each of `SERIES`: Pearson and Spearman correlation with the sharpness, and the lag of the best one.

    The sharpness is that of the training images; with `own`, for held-out series, that of the held-out images.
    """
    found: dict[str, dict[str, float]] = {}
    for key in (SHARPNESS, HELD_OUT_SHARPNESS, *SERIES.values()):
        require(key in series, f"the run's metrics have no {key}: the study needs monitor=full")
    for name, key in SERIES.items():
        sharpness = series[HELD_OUT_SHARPNESS if own and name.startswith("held-out") else SHARPNESS]
        steps = sorted(series[key].keys() & sharpness.keys())
        a, b = [series[key][s] for s in steps], [sharpness[s] for s in steps]
        if len(steps) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
            found[name] = {"pearson": float("nan"), "spearman": float("nan"), "lag": 0.0, "points": float(len(steps))}
            continue
        lag, _ = lag_of_best_correlation(a, b, max_lag=len(steps) // 4)
        found[name] = {
            "pearson": float(stats.pearsonr(a, b).statistic),
            "spearman": float(stats.spearmanr(a, b).statistic),
            "lag": float(lag),
            "points": float(len(steps)),
        }
    return found


def report(study: Study) -> list[Path]:
    """Write the tables, the numbers behind them and the figures; returns the files' paths."""
    study.folder.mkdir(parents=True, exist_ok=True)
    series = {job: load_series(job.folder) for job in study.jobs}
    found = {job: coupling(s) for job, s in series.items()}
    own = {job: coupling(s, own=True) for job, s in series.items()}
    labels = list(dict.fromkeys(job.label for job in study.jobs))
    tables = [
        _table(labels, f, kind, whose)
        for f, whose in ((found, "of the training images"), (own, "of the same images"))
        for kind in ("pearson", "spearman")
    ]
    tables += [
        _runs_table(study.jobs, found, "of the training images"),
        _runs_table(study.jobs, own, "of the same images"),
    ]
    text = "\n\n".join([*(table.render("markdown") for table in tables), footer(study)])
    for table in tables:
        print(table.render("text"), end="\n\n")
    paths = [study.folder / name for name in ("table.md", "numbers.json", "phase.png", "curves.png")]
    paths[0].write_text(text)
    numbers = [
        {
            "label": j.label,
            "seed": j.config.seed,
            **j.swept,
            "folder": str(j.folder.path),
            "training sharpness": found[j],
            "own": own[j],
        }
        for j in study.jobs
    ]
    paths[1].write_text(to_json(numbers))
    _phase(study.jobs, series).savefig(paths[2], dpi=130)
    _curves(study.jobs, series).savefig(paths[3], dpi=130)
    return paths


def _table(
    labels: Sequence[str], found: Mapping[Job, Mapping[str, Mapping[str, float]]], kind: str, whose: str
) -> Table:
    rows: list[tuple[str, list[Cell]]] = []
    for label in labels:
        values = {name: [f[name][kind] for j, f in found.items() if j.label == label] for name in SERIES}
        rows.append((f"{label}, here", [_spread(values[name]) for name in SERIES]))
        if kind == "pearson" and label in PUBLISHED:
            rows.append((f"{label}, published", [Spread(*PUBLISHED[label][name]) for name in SERIES]))
    counts = {label: sum(j.label == label for j in found) for label in labels}
    return Table(
        [Column(name, name, 2) for name in SERIES],
        rows,
        "optimizer",
        f"{kind.capitalize()} correlation with the Gauss-Newton sharpness {whose}",
        [
            f"Mean ± standard deviation over the learning rates ({', '.join(f'{k}: {v}' for k, v in counts.items())}). "
            "Held-out images are the validation split here, the test set in the published numbers."
        ],
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan"))


def _runs_table(jobs: Sequence[Job], found: Mapping[Job, Mapping[str, Mapping[str, float]]], whose: str) -> Table:
    """Every run by itself: correlations, the lag of held-out ECE behind the sharpness, and how many points it has."""
    columns = [Column(name, name, 2) for name in SERIES]
    columns += [Column("lag", "lag of held-out ECE", 0), Column("points", "points", 0)]
    rows: list[tuple[str, list[Cell]]] = []
    for job in jobs:
        f = found[job]
        cells: list[Cell] = [f[name]["pearson"] for name in SERIES]
        rows.append((_title(job), [*cells, f["held-out ECE"]["lag"], f["held-out ECE"]["points"]]))
    return Table(
        columns,
        rows,
        "run",
        f"Pearson correlation of each run, sharpness {whose}",
        ["Lag in measurements; > 0: ECE follows."],
    )


def _title(job: Job) -> str:
    return " ".join([job.label, *(f"{key.rpartition('.')[2]} {value}" for key, value in job.swept.items())])


def _phase(jobs: Sequence[Job], series: Mapping[Job, Mapping[str, Mapping[int, float]]]) -> Figure:
    """ECE against sharpness, one panel a group and split, one line a run, its end marked."""
    labels = list(dict.fromkeys(job.label for job in jobs))
    figure = Figure(figsize=(4.2 * len(labels), 7.2), layout="constrained")
    axes = figure.subplots(2, len(labels), squeeze=False)
    for column, label in enumerate(labels):
        for row, name in enumerate(("train ECE", "held-out ECE")):
            ax = axes[row][column]
            for i, job in enumerate([j for j in jobs if j.label == label]):
                s, key = series[job], SERIES[name]
                sharpness = s[HELD_OUT_SHARPNESS if row else SHARPNESS]
                steps = sorted(s[key].keys() & sharpness.keys())
                x, y = [sharpness[t] for t in steps], [s[key][t] for t in steps]
                (line,) = ax.plot(x, y, lw=1, color=f"C{i}", label=_title(job))
                ax.plot(x[-1:], y[-1:], "o", ms=5, color=line.get_color())
            ax.set(
                xscale="log", xlabel="Gauss–Newton sharpness of the same images", ylabel=name, title=f"{label}: {name}"
            )
            percent(ax.yaxis)
            ax.grid(alpha=0.3)
            ax.legend(fontsize=SMALL)
    return figure


def _curves(jobs: Sequence[Job], series: Mapping[Job, Mapping[str, Mapping[int, float]]]) -> Figure:
    """Sharpness, with its edge, and train and test ECE and accuracy over the steps."""
    labels = list(dict.fromkeys(job.label for job in jobs))
    names = {
        "Gauss–Newton sharpness": SHARPNESS,
        "held-out sharpness": HELD_OUT_SHARPNESS,
        "train ECE": SERIES["train ECE"],
        "held-out ECE": SERIES["held-out ECE"],
        "train accuracy": "train_subset/accuracy",
        "held-out accuracy": "val_subset/accuracy",
    }
    figure = Figure(figsize=(4.2 * len(labels), 2.6 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), len(labels), squeeze=False)
    for column, label in enumerate(labels):
        for row, (name, key) in enumerate(names.items()):
            ax = axes[row][column]
            for i, job in enumerate([j for j in jobs if j.label == label]):
                s = series[job]
                ax.plot(list(s[key]), list(s[key].values()), lw=1, color=f"C{i}", label=_title(job))
                if key == SHARPNESS and "curvature/edge" in s:
                    ax.axhline(next(iter(s["curvature/edge"].values())), ls=":", lw=0.8, color=f"C{i}")
            ax.set(xlabel="step", ylabel=name, title=f"{label}: {name}")
            if key in (SHARPNESS, HELD_OUT_SHARPNESS):
                ax.set_yscale("log")
            else:
                percent(ax.yaxis)
            if key == SHARPNESS:
                ax.legend(fontsize=SMALL)
            ax.grid(alpha=0.3)
    return figure
