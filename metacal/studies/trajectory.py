"""Calibration and curvature along the trajectory: how closely ECE follows the Gauss-Newton sharpness in a run.

For every run the series of train and held-out ECE (and KCE) and of the Gauss-Newton sharpness, over the logged steps,
give one Pearson correlation each; a table cell is its mean and standard deviation over the runs of a group.
The sharpness beside held-out ECE is once that of the training images and once that of the held-out images. The same is
done with the sharpness of mini-batches and with the margin moments Q and Q_ε in its place.
Published values: "Too Sharp, Too Sure: When Calibration Follows Curvature" (arXiv 2604.20614).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from scipy import stats

from metacal.errors import require
from metacal.report.drawing import SMALL, percent
from metacal.report.tables import Cell, Column, Spread, Table
from metacal.studies import pages
from metacal.studies.footer import published_cell
from metacal.studies.grid import Study, load_series

__all__ = ["collect", "coupling", "figures", "lag_of_best_correlation", "report", "tables"]

SHARPNESS = "curvature/gn_sharpness"
HELD_OUT_SHARPNESS = "curvature/held_out_gn_sharpness"
SERIES = {
    "train ECE": "train_subset/ece",
    "train KCE": "train_subset/kce",
    "held-out ECE": "val_subset/ece",
    "held-out KCE": "val_subset/kce",
}
MARKERS = "os^Dv<>P"
# What calibration is compared with: of the training images, and of the held-out images where that was measured too.
PARTNERS = {
    "GN sharpness": (SHARPNESS, HELD_OUT_SHARPNESS),
    "batch sharpness": ("curvature/batch_sharpness", "curvature/batch_sharpness"),
    "Q": ("train_subset/certificate_q", "val_subset/certificate_q"),
    "Q_ε": ("train_subset/robust_q", "val_subset/robust_q"),
}
# Shown as they are at the end of a run, and saved for that.
OTHERS = {
    "train accuracy": "train_subset/accuracy",
    "held-out accuracy": "val_subset/accuracy",
    "train confidence": "train_subset/confidence",
    "edge": "curvature/edge",
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


def coupling(
    series: Mapping[str, Mapping[int, float]], own: bool = False, partner: str = "GN sharpness"
) -> dict[str, dict[str, float]]:
    """For each of `SERIES`: Pearson and Spearman correlation with a partner, and the lag of the best one.

    partner: of `PARTNERS`; that of the training images or, with `own` and for held-out series, of the held-out images.
    """
    correlations: dict[str, dict[str, float]] = {}
    for key in (*PARTNERS[partner], *SERIES.values()):
        require(key in series, f"the run's metrics have no {key}: the study needs monitor=full")
    for name, key in SERIES.items():
        other = series[PARTNERS[partner][own and name.startswith("held-out")]]
        steps = sorted(series[key].keys() & other.keys())
        a, b = [series[key][s] for s in steps], [other[s] for s in steps]
        correlations[name] = {"pearson": math.nan, "spearman": math.nan, "lag": 0.0, "points": float(len(steps))}
        if len(steps) >= 3 and np.ptp(a) > 0 and np.ptp(b) > 0:
            lag, _ = lag_of_best_correlation(a, b, max_lag=len(steps) // 4)
            correlations[name]["pearson"] = float(stats.pearsonr(a, b).statistic)
            correlations[name]["spearman"] = float(stats.spearmanr(a, b).statistic)
            correlations[name]["lag"] = float(lag)
    return correlations


def report(study: Study) -> list[Path]:
    """Write the tables, the numbers behind them and the figures; returns the files' paths."""
    return pages.write(study, collect(study))


def collect(study: Study) -> dict[str, Any]:
    """Of each run the series that tables and figures are made of, in four digits, and its correlations."""
    keys = [*SERIES.values(), *(key for pair in PARTNERS.values() for key in pair), *OTHERS.values()]
    runs = []
    for job in study.jobs:
        whole = load_series(job.folder)
        saved = {
            key: {step: float(f"{value:.4g}") for step, value in whole[key].items()}
            for key in dict.fromkeys(keys)
            if key in whole
        }
        named = {"label": job.label, "seed": job.config.seed, "swept": dict(job.swept), "folder": str(job.folder.path)}
        runs.append({**named, "training sharpness": coupling(whole), "own": coupling(whole, own=True), "series": saved})
    return {**pages.about(study), "published": study.spec.get("published", {}), "runs": runs}


Runs = Sequence[Mapping[str, Any]]


def _series(run: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """As they were saved; JSON has steps as text, and nothing for what is not finite."""
    return {
        key: {int(step): math.nan if value is None else value for step, value in values.items()}
        for key, values in run["series"].items()
    }


def tables(numbers: Mapping[str, Any]) -> list[Table]:
    """Correlations by group with the published ones, with the other partners, where the runs end, and each run."""
    runs = numbers["runs"]
    published = numbers["published"]
    return [
        _published_table(runs, published, "training sharpness", "of the training images"),
        _published_table(runs, published, "own", "of the same images"),
        _partners_table(runs),
        _ends_table(runs),
        _runs_table(runs),
    ]


def _labels(runs: Runs) -> list[str]:
    return list(dict.fromkeys(run["label"] for run in runs))


def _published_table(runs: Runs, published: Mapping[str, Any], whose: str, named: str) -> Table:
    rows: list[tuple[str, list[Cell]]] = []
    for label in _labels(runs):
        values = {name: [run[whose][name]["pearson"] for run in runs if run["label"] == label] for name in SERIES}
        rows.append((f"{label}, here", [_spread(values[name]) for name in SERIES]))
        if label in published:
            rows.append((f"{label}, published", [published_cell(published[label].get(name)) for name in SERIES]))
    counts = ", ".join(f"{label}: {sum(run['label'] == label for run in runs)}" for label in _labels(runs))
    return Table(
        [Column(name, name, 2) for name in SERIES],
        rows,
        "optimizer",
        f"Pearson correlation with the Gauss-Newton sharpness {named}",
        [
            f"Mean ± standard deviation over the runs, which differ in the rate ({counts}). Held-out images are "
            'the validation split; so are those that the publication calls "test".'
        ],
    )


def _partners_table(runs: Runs) -> Table:
    """Rank correlations too: Q is exponential in the margins, so that a line through it is not to be expected."""
    names, kinds = ("train ECE", "held-out ECE"), {"pearson": "linear", "spearman": "rank"}
    rows: list[tuple[str, list[Cell]]] = []
    for label in _labels(runs):
        for partner, keys in PARTNERS.items():
            series = [s for run in runs if run["label"] == label and set(keys) <= (s := _series(run)).keys()]
            of_runs = [coupling(s, own=True, partner=partner) for s in series]
            cells: list[Cell] = [_spread([c[name][kind] for c in of_runs]) for name in names for kind in kinds]
            rows += [(f"{label}, {partner}", cells)] if of_runs else []
    columns = [Column(f"{name} {kind}", f"{name}, {said}", 2) for name in names for kind, said in kinds.items()]
    note = "Of the same images, but for the sharpness of mini-batches, which is that of training images."
    return Table(
        columns, rows, "optimizer, and what ECE is correlated with", "Correlation with other quantities", [note]
    )


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else math.nan)


def _ends_table(runs: Runs) -> Table:
    names = {
        "GN sharpness": SHARPNESS,
        "train ECE": SERIES["train ECE"],
        "held-out ECE": SERIES["held-out ECE"],
        **{name: key for name, key in OTHERS.items() if name != "edge"},
    }
    columns = [Column(name, name, 1, percent=key != SHARPNESS) for name, key in names.items()]
    rows: list[tuple[str, list[Cell]]] = []
    for run in runs:
        series = _series(run)
        rows.append((_title(run), [series[key][max(series[key])] if key in series else None for key in names.values()]))
    return Table(columns, rows, "run", "At the last measurement", [], marked=frozenset())


def _runs_table(runs: Runs) -> Table:
    """Every run by itself: correlations, the lag of held-out ECE behind the sharpness, and how many points it has."""
    columns = [Column(name, name, 2) for name in SERIES]
    columns += [Column("lag", "lag of held-out ECE", 0), Column("points", "points", 0)]
    rows: list[tuple[str, list[Cell]]] = []
    for run in runs:
        values = run["own"]
        cells: list[Cell] = [values[name]["pearson"] for name in SERIES]
        rows.append((_title(run), [*cells, values["held-out ECE"]["lag"], values["held-out ECE"]["points"]]))
    title = "Pearson correlation of each run, sharpness of the same images"
    return Table(columns, rows, "run", title, ["Lag in measurements; > 0: ECE follows."])


def _title(run: Mapping[str, Any]) -> str:
    return " ".join([run["label"], *(f"{key.rpartition('.')[2]} {value}" for key, value in run["swept"].items())])


def figures(numbers: Mapping[str, Any]) -> dict[str, Figure]:
    """`phase`: ECE against sharpness; `curves`: all of it over the steps."""
    return {"phase": _phase(numbers["runs"]), "curves": _curves(numbers["runs"])}


def _phase(runs: Runs) -> Figure:
    """ECE against sharpness, a panel a group and split, a line a run; colour is time, from the start to the end."""
    labels = _labels(runs)
    figure = Figure(figsize=(3.6 * len(labels), 6.6), layout="constrained")
    axes = figure.subplots(2, len(labels), squeeze=False)
    for column, label in enumerate(labels):
        for row, name in enumerate(("train ECE", "held-out ECE")):
            ax = axes[row][column]
            for i, run in enumerate([run for run in runs if run["label"] == label]):
                series = _series(run)
                ece, sharpness = series[SERIES[name]], series[HELD_OUT_SHARPNESS if row else SHARPNESS]
                steps = sorted(ece.keys() & sharpness.keys())
                x, y = [sharpness[t] for t in steps], [ece[t] for t in steps]
                ax.plot(x, y, lw=0.8, color="0.7", zorder=1)
                time = [t / steps[-1] for t in steps]
                points = ax.scatter(
                    x, y, c=time, cmap="viridis", vmin=0, vmax=1, s=14, marker=MARKERS[i % len(MARKERS)]
                )
                ax.plot(
                    [], [], MARKERS[i % len(MARKERS)], color="0.4", ms=4, label=_title(run).removeprefix(f"{label} ")
                )
            ax.set(xscale="log", xlabel="GN sharpness of the same images", ylabel=name, title=f"{label}: {name}")
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
            percent(ax.yaxis)
            ax.grid(alpha=0.3)
            ax.legend(fontsize=SMALL)
    figure.colorbar(points, ax=axes, label="share of the run's steps", shrink=0.6)
    return figure


def _curves(runs: Runs) -> Figure:
    """Sharpness, with its edge, and train and held-out ECE and accuracy over the steps."""
    labels = _labels(runs)
    names = {
        "GN sharpness": SHARPNESS,
        "held-out sharpness": HELD_OUT_SHARPNESS,
        "train ECE": SERIES["train ECE"],
        "held-out ECE": SERIES["held-out ECE"],
        "train accuracy": OTHERS["train accuracy"],
        "held-out accuracy": OTHERS["held-out accuracy"],
    }
    figure = Figure(figsize=(3.6 * len(labels), 2.2 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), len(labels), squeeze=False)
    for column, label in enumerate(labels):
        for row, (name, key) in enumerate(names.items()):
            ax = axes[row][column]
            for i, run in enumerate([run for run in runs if run["label"] == label]):
                series = _series(run)
                values = series.get(key, {})
                ax.plot(list(values), list(values.values()), lw=1, color=f"C{i}", label=_title(run))
                if key == SHARPNESS and "curvature/edge" in series:
                    ax.axhline(next(iter(series["curvature/edge"].values())), ls=":", lw=0.8, color=f"C{i}")
            ax.set(xlabel="step", ylabel=name, title=f"{label}: {name}")
            if key in (SHARPNESS, HELD_OUT_SHARPNESS):
                ax.set_yscale("log")
            else:
                percent(ax.yaxis)
            if key == SHARPNESS:
                ax.legend(fontsize=SMALL)
            ax.grid(alpha=0.3)
    return figure
