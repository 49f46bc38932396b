"""Figures of several groups of runs: reliability, risk and coverage, training curves, accuracy against ECE.

A line is the mean over the seeds of a group, a band reaches from the least to the largest seed. Of many groups, those
in `highlight` are drawn in colour and named in the legend, the others grey and without a band. Each function returns a
matplotlib `Figure` that only the caller knows (no pyplot): its one legend stands beside the axes, for which it is made
large enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from metacal.calibration.binning import Bins, reliability_bins
from metacal.errors import require
from metacal.predictions import Predictions
from metacal.report.cells import column_of, summarise
from metacal.report.drawing import (
    COLORS,
    FEW,
    SMALL,
    clean,
    faint_bins,
    name_points,
    percent,
    reliability_axes,
    reliability_line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from metacal.runs.record import Run

__all__ = [
    "CURVES",
    "accuracy_ece_plane",
    "curves_of",
    "over_seeds",
    "overlaid_reliability",
    "risk_coverage",
    "training_curves",
]

_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")

_GREY = "#c4c4c4"
_WRAP = 44  # characters of a legend's line
_BESIDE = 28  # of a name beside its point

CURVES = {
    "train/nll": "training NLL",
    "val/nll": "val NLL",
    "train/ece": "training ECE",
    "val/ece": "val ECE",
    "val/accuracy": "val accuracy",
}
"""What `training_curves` draws by default: names in metrics.jsonl -> titles."""

Array = NDArray[np.float64]


def overlaid_reliability(
    panels: Mapping[str, Mapping[str, Sequence[Predictions | Bins]]],
    n_bins: int = 15,
    few: int = FEW,
    highlight: Collection[str] | None = None,
) -> Figure:
    """Reliability of every group in one plot a panel (such as before and after scaling).

    Args:
        panels: title -> group -> the predictions of its seeds, or their bins, the same groups in each. A point of a
            line stands at the mean confidence and accuracy that the seeds have in one bin; its size grows with the
            bin's share. The band reaches from the lowest to the highest seed. The ECE in the legend is the mean ±
            standard deviation of the seeds' ECE, from these very bins, of each panel.
        n_bins: of equal width.
        few: a bin with fewer samples of a seed, on average, is no point of the line: its number of samples stands
            there, faintly, for groups in colour. It counts in the ECE.
        highlight: the groups in colour; None: all.
    """
    require(len(panels) > 0 and all(len(groups) > 0 for groups in panels.values()), "panels must hold predictions")
    styles = _styles(next(iter(panels.values())), highlight)
    errors: dict[str, list[str]] = {label: [] for label in styles}
    points = []
    for title, groups in panels.items():
        require(groups.keys() == styles.keys(), "panels must hold the same groups")
        for label, seeds in groups.items():
            bins = [p if isinstance(p, Bins) else reliability_bins(p, n_bins) for p in seeds]
            count = np.array([b.count.numpy() for b in bins], dtype=float)
            correct = np.array([b.correct.numpy() for b in bins], dtype=float)
            confidence = np.array([b.confidence_sum.numpy() for b in bins])
            errors[label].append(_mean_std("ece", np.abs(correct - confidence).sum(1) / count.sum(1)))
            points.append((title, label, count, correct, confidence))
    header = column_of("ece").header
    heading = header if len(panels) == 1 else f"{header}: " + " | ".join(panels)
    texts = {label: " | ".join(values) for label, values in errors.items()}
    figure, axes = _canvas(1, len(panels), (4.7, 4.7), _legend_entries(styles, texts), heading)
    at = dict(zip(panels, axes))
    for title, ax in at.items():
        reliability_axes(ax, title)
        ax.set_anchor("N")
    for title, label, count, correct, confidence in points:
        style = styles[label]
        shown = count.mean(0) >= few
        total = count.sum(0)[shown]
        band = None
        if len(count) > 1 and _in_colour(style):
            each = correct[:, shown] / np.where(count[:, shown] > 0, count[:, shown], np.nan)
            band = np.nanmin(each, axis=0), np.nanmax(each, axis=0)
        share = total / count.sum() if _in_colour(style) else None
        x, y = confidence.sum(0)[shown] / total, correct.sum(0)[shown] / total
        reliability_line(at[title], x, y, style, label, share, band)
        if _in_colour(style):
            thin = ~shown & (count.sum(0) > 0)
            total = count.sum(0)[thin]
            x, y = confidence.sum(0)[thin] / total, correct.sum(0)[thin] / total
            faint_bins(at[title], x, y, count.mean(0)[thin], style["color"])
    return figure


def risk_coverage(
    groups: Mapping[str, Sequence[Predictions]], points: int = 200, highlight: Collection[str] | None = None
) -> Figure:
    """Error rate among the most confident share of the test samples, against that share.

    Lower is better, and a curve that rises says that confidence ranks well. Equal confidences count as ordered at
    random. The legend gives the area under the curve of each seed, mean ± standard deviation.
    """
    from metacal.calibration import aurc

    require(len(groups) > 0, "groups must hold predictions")
    styles = _styles(groups, highlight)
    texts = {label: _mean_std("aurc", np.array([aurc(p) for p in seeds])) for label, seeds in groups.items()}
    figure, (ax,) = _canvas(
        1, 1, (6.2, 4.4), _legend_entries(styles, texts), f"area under the curve ({column_of('aurc').header})"
    )
    coverage = np.linspace(0, 1, points + 1)[1:]
    for label, seeds in groups.items():
        each, style = np.array([_risk(p, coverage) for p in seeds]), styles[label]
        if len(seeds) > 1 and _in_colour(style):
            ax.fill_between(coverage, each.min(0), each.max(0), color=style["color"], alpha=0.13, linewidth=0)
        ax.plot(coverage, each.mean(0), label=label, **style)
    ax.set(xlim=(0, 1), xlabel="coverage: share of samples kept, the most confident first", ylabel="risk: error rate")
    ax.set_ylim(bottom=0)
    percent(ax.xaxis, ax.yaxis)
    clean(ax)
    return figure


def _risk(p: Predictions, coverage: Array) -> Array:
    """The error rate among the most confident `coverage` of the samples; equal confidences share their errors."""
    c = p.confidence.cpu().numpy()
    order = np.argsort(-c, kind="stable")
    wrong = (~p.correct.cpu().numpy())[order].astype(float)
    _, start, count = np.unique(-c[order], return_index=True, return_counts=True)
    wrong = np.repeat(np.add.reduceat(wrong, start) / count, count)
    covered = np.maximum(1, np.round(coverage * len(c)).astype(int))
    return np.cumsum(wrong)[covered - 1] / covered


def curves_of(groups: Mapping[str, Sequence[Run]]) -> tuple[dict[str, str], str]:
    """The curves that these runs can show, for `training_curves`, and what a caption must say of those on training.

    NLL and ECE on training are what methods can be compared by. Where no run measured them the training loss stands
    in, which every method has of its own.
    """
    lack = [label for label, runs in groups.items() if not all("train/nll" in run.series for run in runs)]
    if len(lack) == len(groups):
        curves = {"train/loss": "training loss"} | {k: v for k, v in CURVES.items() if k.startswith("val/")}
        return curves, (
            "These runs did not measure NLL and ECE on training: the training loss is each method's own and says "
            "nothing between methods."
        )
    text = "Training NLL and ECE were measured at every validation, on what the model was trained on in between."
    if lack:
        text += f" {len(lack)} of {len(groups)} groups lack them."
    return dict(CURVES), text


def over_seeds(runs: Sequence[Run], name: str) -> tuple[list[int], Array]:
    """The steps at which all of `runs` have the series `name` of metrics.jsonl, and their values (seeds, steps)."""
    series = [run.series.get(name, {}) for run in runs]
    steps = sorted(set.intersection(*(set(s) for s in series)))
    return steps, np.array([[s[step] for step in steps] for s in series], dtype=np.float64)


def training_curves(
    groups: Mapping[str, Sequence[Run]],
    curves: Mapping[str, str] = CURVES,
    highlight: Collection[str] | None = None,
) -> Figure | None:
    """Series of metrics.jsonl against the epoch, one panel for each that any run has; None if there is none.

    Steps at which some seed of a group has no value are left out of its line.
    """
    panels: dict[str, dict[str, tuple[Array, Array]]] = {}
    for name in curves:
        for label, runs in groups.items():
            common, values = over_seeds(runs, name)
            if not common:
                continue
            summary = runs[0].summary
            epochs, steps = summary.get("epochs"), summary.get("steps")
            scale = epochs / steps if epochs and steps else 1.0
            panels.setdefault(name, {})[label] = (np.array(common) * scale, values)
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    styles = _styles(groups, highlight)
    drawn = dict.fromkeys((label for label in groups if any(label in lines for lines in panels.values())), "")
    figure, axes = _canvas(rows, columns, (4.7, 2.9), _legend_entries(styles, drawn), "", len(panels))
    for ax, (name, lines) in zip(axes, panels.items()):
        for label, (x, values) in lines.items():
            style = styles[label]
            if len(values) > 1 and _in_colour(style):
                ax.fill_between(x, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0)
            ax.plot(x, values.mean(0), label=label, **style)
        ax.set(xlabel="epoch", xlim=(0, None))
        if column_of(name.partition("/")[2]).percent:
            percent(ax.yaxis)
        clean(ax, curves[name])
    return figure


def accuracy_ece_plane(
    groups: Mapping[str, tuple[Array, Array]],
    scaled: Mapping[str, tuple[Array, Array]] | None = None,
    highlight: Collection[str] | None = None,
) -> Figure:
    """A point for every group at its mean ECE and accuracy over seeds, whiskers one standard deviation; right and down
    is better.

    Args:
        groups: label -> (accuracy, ECE) of its seeds.
        scaled: the same after temperature scaling: hollow points, joined to those before it.
    """
    require(len(groups) > 0, "groups must hold values")
    styles = _styles(groups, highlight)
    entries = _legend_entries(styles, dict.fromkeys(groups, ""))
    figure, (ax,) = _canvas(1, 1, (6.2, 4.4), entries, "", markers=True)
    named: dict[str, tuple[float, float, str]] = {}
    for label, (accuracy, error) in groups.items():
        style = styles[label]
        color, clear = style["color"], _in_colour(style)
        bars: dict[str, Any] = {"color": color, "elinewidth": 1 if clear else 0, "capsize": 2 if clear else 0}
        bars |= {"markersize": 7 if clear else 4, "fmt": _marker(style), "zorder": style["zorder"]}
        ax.errorbar(accuracy.mean(), error.mean(), _std(error), _std(accuracy), label=label, **bars)
        if clear:
            short = shorten(label, _BESIDE, placeholder="…")  # the legend has all of it
            named[label if short in named else short] = accuracy.mean(), error.mean(), color
        if scaled is not None and label in scaled:
            x, y = scaled[label]
            ax.plot(
                [accuracy.mean(), x.mean()], [error.mean(), y.mean()], color=color, linewidth=0.8, alpha=0.6, zorder=1
            )
            ax.errorbar(x.mean(), y.mean(), _std(y), _std(x), markerfacecolor="white", **bars)
    ax.set(xlabel="accuracy", ylabel="ECE")
    percent(ax.xaxis, ax.yaxis)
    clean(ax, "hollow: after temperature scaling" if scaled else "")
    name_points(ax, named)
    return figure


def _styles(labels: Iterable[str], highlight: Collection[str] | None) -> dict[str, dict[str, Any]]:
    """The look of every group's line: those in `highlight` each its own, the others grey and behind."""
    names = list(labels)
    unknown = sorted(set(highlight or ()) - set(names))
    require(not unknown, f"highlight must name groups, {', '.join(unknown)} are none")
    styles: dict[str, dict[str, Any]] = {}
    i = 0
    for label in names:
        if highlight is not None and label not in highlight:
            styles[label] = {"color": _GREY, "linestyle": "-", "linewidth": 0.8, "zorder": 1.5}
            continue
        dash = _DASHES[i // len(COLORS) % len(_DASHES)]
        styles[label] = {"color": COLORS[i % len(COLORS)], "linestyle": dash, "linewidth": 1.5, "zorder": 3}
        i += 1
    return styles


def _in_colour(style: Mapping[str, Any]) -> bool:
    return style["color"] != _GREY


def _marker(style: Mapping[str, Any]) -> str:
    """A point's shape where a line would have its dashes."""
    return "os^D"[_DASHES.index(style["linestyle"])] if _in_colour(style) else "o"


def _legend_entries(
    styles: Mapping[str, Mapping[str, Any]], texts: Mapping[str, str]
) -> list[tuple[str, Mapping[str, Any]]]:
    """(label, its text in a line below it; style) of the groups in colour in `texts`, and one for all the others."""
    below = {k: [f"   {text}"] if text else [] for k, text in texts.items()}
    entries = [("\n".join(wrap(k, _WRAP) + below[k]), style) for k, style in styles.items() if k in texts]
    coloured = [entry for entry in entries if _in_colour(entry[1])]
    others = [entry for entry in entries if not _in_colour(entry[1])]
    return coloured + ([(f"{len(others)} others", others[0][1])] if others else [])


def _canvas(
    rows: int,
    columns: int,
    size: tuple[float, float],
    entries: Sequence[tuple[str, Mapping[str, Any]]],
    heading: str,
    panels: int | None = None,
    markers: bool = False,
) -> tuple[Figure, Sequence[Axes]]:
    """A figure of `panels` axes of about `size` inches, with its legend to their right in room of its own."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    lines = [line for text in (*(t for t, _ in entries), *wrap(heading, _WRAP)) for line in text.split("\n")]
    width = 0.7 + 0.0085 * SMALL * max(map(len, lines))  # inches of a legend's characters
    height = max(size[1] * rows, 0.5 + 0.0206 * SMALL * len(lines))
    figure = Figure(figsize=(size[0] * columns + width, height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(panels or rows * columns)]
    handles = [
        Line2D([], [], color=s["color"], marker=_marker(s), linestyle="", markersize=6 if _in_colour(s) else 4)
        if markers
        else Line2D([], [], color=s["color"], linestyle=s["linestyle"], linewidth=s["linewidth"])
        for _, s in entries
    ]
    style: dict[str, Any] = {"frameon": False, "fontsize": SMALL, "title_fontsize": SMALL, "alignment": "left"}
    title = "\n".join(wrap(heading, _WRAP))
    figure.legend(handles, [text for text, _ in entries], loc="outside right upper", title=title, **style)
    return figure, axes


def _std(values: Array) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _mean_std(measure: str, values: Array) -> str:
    """As tables show the measure, without its unit."""
    return column_of(measure).show(summarise(values.tolist()))
