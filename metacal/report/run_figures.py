"""Figures of several groups of runs: reliability, risk and coverage, training curves, accuracy against ECE.

A line is the mean over the seeds of a group, a band reaches from the least to the largest seed. Each function returns
a matplotlib `Figure` that only the caller knows (no pyplot).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metacal.calibration.binning import reliability_bins
from metacal.errors import require
from metacal.predictions import Predictions
from metacal.report.figures import _clean, _diagonal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from metacal.report.runs import Run

__all__ = ["CURVES", "accuracy_ece_plane", "overlaid_reliability", "risk_coverage", "training_curves"]

_COLORS = (
    "#4878a8",
    "#c44e52",
    "#5a9e6f",
    "#8172b2",
    "#dd9a3c",
    "#2a9da8",
    "#8c613c",
    "#d673a8",
    "#555555",
    "#a3a63b",
)
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")

CURVES = {
    "train/loss": "training loss",
    "val/nll": "val NLL",
    "val/ece": "val ECE",
    "val/accuracy": "val accuracy",
}
"""What `training_curves` draws by default: names in metrics.jsonl -> titles."""

Array = NDArray[np.float64]


def overlaid_reliability(
    panels: Mapping[str, Mapping[str, Sequence[Predictions]]], n_bins: int = 15, min_share: float = 0.003
) -> Figure:
    """Reliability of every group in one plot a panel (such as before and after scaling).

    Args:
        panels: title -> group -> the predictions of its seeds. A point of a line stands at the mean confidence and
            accuracy that the seeds have in one bin; its size grows with the bin's share. The band reaches from the
            lowest to the highest seed. The ECE in the legend is the mean ± standard deviation of the seeds' ECE, from
            these very bins.
        n_bins: of equal width.
        min_share: bins with a smaller share of a group's samples are not drawn; they count in the ECE.
    """
    require(len(panels) > 0 and all(len(groups) > 0 for groups in panels.values()), "panels must hold predictions")
    longest = max(map(len, panels.values()))
    figure, axes = _row(len(panels), (4.9, 5.3 + _legend_height(longest)))
    for ax, (title, groups) in zip(axes, panels.items()):
        _diagonal(ax)
        for i, (label, seeds) in enumerate(groups.items()):
            bins = [reliability_bins(p, n_bins) for p in seeds]
            count = np.array([b.count.numpy() for b in bins], dtype=float)
            correct = np.array([b.correct.numpy() for b in bins], dtype=float)
            confidence = np.array([b.confidence_sum.numpy() for b in bins])
            errors = np.abs(correct - confidence).sum(1) / count.sum(1)
            shown = count.sum(0) >= max(1.0, min_share * count.sum())
            total = count.sum(0)[shown]
            x, y = confidence.sum(0)[shown] / total, correct.sum(0)[shown] / total
            style = _style(i)
            if len(seeds) > 1:
                each = correct[:, shown] / np.where(count[:, shown] > 0, count[:, shown], np.nan)
                low, high = np.nanmin(each, axis=0), np.nanmax(each, axis=0)
                ax.fill_between(x, low, high, color=style["color"], alpha=0.13, linewidth=0)
            ax.plot(x, y, linewidth=1.5, label=f"{label}: ECE {_mean_std(errors)}", **style)
            ax.scatter(x, y, s=6 + 80 * total / count.sum(), color=style["color"], edgecolor="white", zorder=4)
        ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal", anchor="N")
        _legend_below(ax, len(groups))
        _clean(ax, title)
    return figure


def risk_coverage(groups: Mapping[str, Sequence[Predictions]], points: int = 200) -> Figure:
    """Error rate among the most confident share of the test samples, against that share.

    Lower is better, and a curve that rises says that confidence ranks well. Equal confidences count as ordered at
    random. The legend gives the area under the curve of each seed, mean ± standard deviation.
    """
    from metacal.calibration import aurc

    require(len(groups) > 0, "groups must hold predictions")
    figure, (ax,) = _row(1, (6.4, 4.6 + _legend_height(len(groups))))
    for i, (label, seeds) in enumerate(groups.items()):
        coverage = np.linspace(0, 1, points + 1)[1:]
        each = np.array([_risk(p, coverage) for p in seeds])
        style = _style(i)
        if len(seeds) > 1:
            ax.fill_between(coverage, each.min(0), each.max(0), color=style["color"], alpha=0.13, linewidth=0)
        areas = np.array([aurc(p) for p in seeds])
        ax.plot(coverage, each.mean(0), linewidth=1.5, label=f"{label}: AURC {_mean_std(areas)}", **style)
    ax.set(xlim=(0, 1), xlabel="coverage: share of samples kept, the most confident first", ylabel="risk: error rate")
    ax.set_ylim(bottom=0)
    _legend_below(ax, len(groups))
    _clean(ax)
    return figure


def _risk(p: Predictions, coverage: Array) -> Array:
    """The error rate among the most confident `coverage` of the samples; equal confidences share their errors."""
    c = p.confidence.cpu().numpy()
    order = np.argsort(-c, kind="stable")
    wrong = (~p.correct.cpu().numpy())[order].astype(float)
    _, start, count = np.unique(-c[order], return_index=True, return_counts=True)
    wrong = np.repeat(np.add.reduceat(wrong, start) / count, count)
    kept = np.maximum(1, np.round(coverage * len(c)).astype(int))
    return np.cumsum(wrong)[kept - 1] / kept


def training_curves(groups: Mapping[str, Sequence[Run]], curves: Mapping[str, str] = CURVES) -> Figure | None:
    """Series of metrics.jsonl against the epoch, one panel for each that any run has; None if there is none.

    Steps at which some seed of a group has no value are left out of its line.
    """
    found: dict[str, dict[str, tuple[Array, Array]]] = {}
    for name in curves:
        for label, runs in groups.items():
            series = [(run, run.series.get(name, {})) for run in runs]
            common = sorted(set.intersection(*(set(s) for _, s in series)))
            if not common:
                continue
            summary = runs[0].summary
            epochs, steps = summary.get("epochs"), summary.get("steps")
            scale = epochs / steps if epochs and steps else 1.0
            values = np.array([[s[step] for step in common] for _, s in series])
            found.setdefault(name, {})[label] = (np.array(common) * scale, values)
    if not found:
        return None
    from matplotlib.figure import Figure

    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    entries = -(-len(groups) // 2)
    figure = Figure(figsize=(5.3 * columns, 3.1 * rows + 0.22 * entries), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    order = {label: i for i, label in enumerate(groups)}
    for ax, (name, lines) in zip(axes, found.items()):
        for label, (x, values) in lines.items():
            style = _style(order[label])
            if len(values) > 1:
                band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
                ax.fill_between(x, values.min(0), values.max(0), **band)
            ax.plot(x, values.mean(0), linewidth=1.3, label=label, **style)
        ax.set(xlabel="epoch", xlim=(0, None))
        _clean(ax, curves[name])
    for ax in axes[len(found) :]:
        ax.set_visible(False)
    handles = {label: h for ax in axes[: len(found)] for h, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def accuracy_ece_plane(
    groups: Mapping[str, tuple[Array, Array]], scaled: Mapping[str, tuple[Array, Array]] | None = None
) -> Figure:
    """A point for every group at its mean ECE and accuracy over seeds, whiskers one standard deviation; right and down
    is better.

    Args:
        groups: label -> (accuracy, ECE) of its seeds.
        scaled: the same after temperature scaling: hollow points, joined to those before it.
    """
    require(len(groups) > 0, "groups must hold values")
    figure, (ax,) = _row(1, (6.4, 4.6 + _legend_height(len(groups))))
    for i, (label, (accuracy, error)) in enumerate(groups.items()):
        color, marker = _style(i)["color"], "os^Dv"[i // len(_COLORS) % 5]
        bars: dict[str, Any] = {"color": color, "elinewidth": 1, "capsize": 2, "markersize": 7, "fmt": marker}
        ax.errorbar(accuracy.mean(), error.mean(), _std(error), _std(accuracy), label=label, **bars)
        if scaled is not None and label in scaled:
            x, y = scaled[label]
            ax.plot([accuracy.mean(), x.mean()], [error.mean(), y.mean()], color=color, linewidth=0.8, alpha=0.6)
            ax.errorbar(x.mean(), y.mean(), _std(y), _std(x), markerfacecolor="white", **bars)
    ax.set(xlabel="accuracy", ylabel="ECE")
    ax.set_ylim(bottom=0)
    _legend_below(ax, len(groups))
    _clean(ax, "hollow: after temperature scaling" if scaled else "")
    return figure


def _row(n: int, size: tuple[float, float]) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * n, size[1]), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, n)).tolist()


def _style(i: int) -> dict[str, Any]:
    return {"color": _COLORS[i % len(_COLORS)], "linestyle": _DASHES[i // len(_COLORS) % len(_DASHES)]}


def _legend_below(ax: Axes, n: int) -> None:
    """Below the axes: never over the curves, however many there are."""
    style: dict[str, Any] = {"frameon": False, "fontsize": 8 if n <= 12 else 6.5, "borderaxespad": 0}
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), **style)


def _legend_height(n: int) -> float:
    """Of n lines of `_legend_below`, in inches."""
    return 0.17 * n if n <= 12 else 0.15 * n


def _std(values: Array) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _mean_std(values: Array) -> str:
    return f"{values.mean():.4f}" + (f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else "")
