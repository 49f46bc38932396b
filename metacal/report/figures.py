"""Figures of calibration: reliability diagram, confidence histogram, reliability curves of several methods.

Each returns the matplotlib `Figure` that holds the drawing: a new one that only the caller knows (no pyplot, so nothing
stays open), or that of the `ax` given. What is drawn and what is written on it come from the same bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from metacal.calibration.binning import Bins, reliability_bins, wilson_interval
from metacal.errors import require
from metacal.predictions import Predictions
from metacal.report.cells import Range, column_of
from metacal.report.drawing import (
    COLORS,
    FEW,
    INK,
    SMALL,
    canvas,
    clean,
    diagonal,
    faint,
    faint_bins,
    percent,
    reliability_axes,
    reliability_line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["confidence_histogram", "gamma_scatter", "reliability_curves", "reliability_diagram", "wilson_interval"]

_ACCURACY, _OVER, _UNDER = "#4878a8", "#c44e52", "#dd9a3c"


def reliability_diagram(
    p: Predictions,
    n_bins: int = 15,
    ax: Axes | None = None,
    interval: tuple[float, float] | None = None,
    level: float = 0.95,
    title: str = "",
) -> Figure:
    """Accuracy in every bin of confidence, its gap to the mean confidence, and the number of samples.

    A bar's dark line is the bin's accuracy, with Wilson's interval as whiskers; the hatched bar from there to the mean
    confidence is the gap, red where the bin is overconfident and amber where it is underconfident. ECE, the mean of
    the gaps weighted by the counts, is written on it.

    Args:
        ax: draw the reliability there, without the counts; None makes a figure with the counts below.
        interval: (low, high) of the ECE, written beside it.
        level: of the whiskers.
    """
    bins = reliability_bins(p, n_bins)
    if ax is None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6, 5.6), layout="constrained")
        ax, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
        _draw_counts(below, bins, p)
        below.set_xlabel("confidence")
    else:
        figure = ax.get_figure()  # type: ignore[assignment]
        ax.set_xlabel("confidence")
    _draw_gaps(ax, bins, level)
    count, total = bins.count.double(), len(p)
    gap = (bins.correct - bins.confidence_sum).abs().sum().item() / total
    lines = [
        column_of("ece").in_words(gap if interval is None else Range(gap, *interval)),
        column_of("accuracy").in_words(bins.correct.sum().item() / total),
        column_of("confidence").in_words(bins.confidence_sum.sum().item() / total),
        f"N = {int(count.sum().item()):,}",
    ]
    ax.text(
        0.03,
        0.97,
        "\n".join(lines),
        transform=ax.transAxes,
        va="top",
        fontsize=SMALL,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "#cccccc", "alpha": 0.9, "boxstyle": "round,pad=0.35"},
        zorder=6,
    )
    if title:
        ax.set_title(title, fontsize=10.5)
    return figure


def confidence_histogram(p: Predictions, n_bins: int = 20, ax: Axes | None = None, title: str = "") -> Figure:
    """Counts of right and wrong predictions by confidence, with the accuracy and the mean confidence as lines."""
    figure, ax = canvas(ax, (5.0, 3.4))
    bins = reliability_bins(p, n_bins)
    left, width = bins.lower.cpu().numpy(), (bins.upper - bins.lower).cpu().numpy()
    right, wrong = bins.correct.cpu().numpy(), (bins.count - bins.correct).cpu().numpy()
    style: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.6}
    ax.bar(left, right, width, color=_ACCURACY, label="right", **style)
    ax.bar(left, wrong, width, bottom=right, color=_OVER, label="wrong", **style)
    lines = (("accuracy", bins.correct, "-"), ("mean confidence", bins.confidence_sum, ":"))
    for name, sums, style_of in lines:
        mean = sums.sum().item() / len(p)
        ax.axvline(mean, ymax=1 / 1.3, color=INK, linewidth=1.4, linestyle=style_of, label=f"{name} {100 * mean:.1f} %")
    percent(ax.xaxis)
    # Room above the bars for the legend.
    ax.set(xlim=(0, 1), ylim=(0, 1.3 * float(bins.count.max())), xlabel="confidence", ylabel="samples")
    ax.legend(frameon=False, fontsize=SMALL, ncols=2, loc="upper center")
    clean(ax, title)
    return figure


def reliability_curves(
    methods: Mapping[str, Predictions],
    n_bins: int = 15,
    ax: Axes | None = None,
    level: float = 0.95,
    min_count: int = FEW,
    title: str = "",
) -> Figure:
    """Reliability of several methods in one plot: a point for each bin at (mean confidence, accuracy).

    Points have an area that grows with the bin's share of the samples, and a band of Wilson's interval around
    them. A bin of fewer than `min_count` samples is no point of the line: its count stands there, faintly. It counts
    in the ECE of the legend.
    """
    require(len(methods) > 0, "methods must hold at least one set of predictions, got none")
    figure, ax = canvas(ax, (5.0, 5.0))
    reliability_axes(ax, title)
    for i, (name, p) in enumerate(methods.items()):
        bins = reliability_bins(p, n_bins)
        error = (bins.correct - bins.confidence_sum).abs().sum().item() / len(p)
        shown = (bins.count >= min_count).cpu().numpy()
        x, y, share = (t.cpu().numpy()[shown] for t in (bins.confidence, bins.accuracy, bins.count / len(p)))
        low, high = (t.cpu().numpy()[shown] for t in wilson_interval(bins.correct, bins.count, level))
        color = COLORS[i % len(COLORS)]
        style = {"color": color, "linewidth": 1.5, "zorder": 3}
        thin = ((bins.count > 0) & (bins.count < min_count)).cpu().numpy()
        at, accuracy, count = (t.cpu().numpy()[thin] for t in (bins.confidence, bins.accuracy, bins.count))
        faint_bins(ax, at, accuracy, count, color)
        reliability_line(ax, x, y, style, f"{name} ({column_of('ece').in_words(error)})", share, (low, high))
    ax.legend(frameon=False, fontsize=SMALL, loc="upper left")
    return figure


def gamma_scatter(
    gamma: Tensor, confidence: Tensor, correct: Tensor, ax: Axes | None = None, n_bins: int = 10, title: str = ""
) -> Figure:
    """The focal loss's gamma of single samples against their confidence, right and wrong predictions apart.

    The line joins the median gammas in up to `n_bins` bins of equal numbers of samples, and the correlation is
    Spearman's, of the ranks: NaN where all gammas or all confidences are equal.

    Args:
        gamma, confidence: (n,).
        correct: bool (n,).
    """
    n = len(gamma)
    require(
        n > 0 and gamma.shape == confidence.shape == correct.shape,
        f"gamma, confidence and correct must have one shape (n,) with n > 0, got {tuple(gamma.shape)}, "
        f"{tuple(confidence.shape)} and {tuple(correct.shape)}",
    )
    figure, ax = canvas(ax, (5.0, 3.8))
    g, c, right = gamma.double().cpu().numpy(), confidence.double().cpu().numpy(), correct.cpu().numpy().astype(bool)
    for name, chosen, color in (("right", right, _ACCURACY), ("wrong", ~right, _OVER)):
        ax.scatter(
            c[chosen], g[chosen], s=12, color=color, alpha=0.5, linewidth=0, label=f"{name} ({chosen.sum()})", zorder=3
        )
    bins = np.array_split(np.argsort(c, kind="stable"), min(n_bins, n))
    middle = [(np.median(c[b]), np.median(g[b])) for b in bins]
    ax.plot(*zip(*middle), color=INK, linewidth=1.6, marker="o", markersize=3.5, label="median", zorder=4)
    ax.set(xlim=(0, 1), xlabel="confidence", ylabel="gamma")
    percent(ax.xaxis)
    ax.set_ylim(bottom=min(0.0, 1.1 * float(g.min())))
    said = f"rank correlation {_rank_correlation(g, c):.2f}"
    ax.legend(frameon=True, framealpha=0.9, edgecolor="#cccccc", fontsize=SMALL, title=said, title_fontsize=SMALL)
    clean(ax, title)
    return figure


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing the mean of theirs; NaN for a constant."""

    def ranks(x: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts + 1) / 2)[inverse]

    u, v = (r - r.mean() for r in (ranks(a), ranks(b)))
    scale = float(np.sqrt((u**2).sum() * (v**2).sum()))
    return float((u * v).sum()) / scale if scale > 0 else float("nan")


# ------------------------------------------------------------------------------------------------ drawing


def _draw_gaps(ax: Axes, bins: Bins, level: float) -> None:
    full = (bins.count > 0).cpu().numpy()
    left, width = bins.lower.cpu().numpy()[full], (bins.upper - bins.lower).cpu().numpy()[full]
    accuracy, confidence = bins.accuracy.cpu().numpy()[full], bins.confidence.cpu().numpy()[full]
    low, high = (t.cpu().numpy()[full] for t in wilson_interval(bins.correct, bins.count, level))
    edge: dict[str, Any] = {"align": "edge", "linewidth": 0.8}
    thin = (bins.count < FEW).cpu().numpy()[full]

    def shades(color: str, of: np.ndarray) -> list[str]:
        return [faint(color) if few else color for few in of]

    ax.bar(left, accuracy, width, color=shades(_ACCURACY, thin), edgecolor="white", label="accuracy", **edge)
    for sign, color, pale, label in ((1, _OVER, "#f5dcdd", "overconfident"), (-1, _UNDER, "#fbecd3", "underconfident")):
        side = (confidence - accuracy) * sign > 0
        if side.any():  # opaque: where accuracy is the higher one, the gap covers the top of its bar
            style: dict[str, Any] = {"facecolor": pale, "edgecolor": shades(color, thin[side]), "hatch": "////"}
            style["label"] = f"gap, {label}"
            gap = (confidence - accuracy)[side]
            ax.bar(left[side], gap, width[side], bottom=accuracy[side], **style, **edge)
    ax.hlines(accuracy, left, left + width, color=shades("#1f3f66", thin), linewidth=2, zorder=3)
    whiskers = np.maximum([accuracy - low, high - accuracy], 0)
    style = {"fmt": "none", "ecolor": INK, "elinewidth": 1, "capsize": 2, "zorder": 5}
    ax.errorbar(left + width / 2, accuracy, whiskers, label=f"{level * 100:g} % interval", **style)
    diagonal(ax)
    ax.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    percent(ax.xaxis, ax.yaxis)
    ax.legend(frameon=True, framealpha=0.9, edgecolor="#cccccc", fontsize=SMALL, loc="lower right").set_zorder(6)
    clean(ax)


def _draw_counts(ax: Axes, bins: Bins, p: Predictions) -> None:
    left, width, count = (t.cpu().numpy() for t in (bins.lower, bins.upper - bins.lower, bins.count))
    ax.bar(left, count, width, align="edge", color="#9a9a9a", edgecolor="white", linewidth=0.8)
    ax.set(ylabel="samples", ylim=(0, 1.22 * float(count.max())))
    if len(count) <= 20:
        for x, n in zip((left + width / 2).tolist(), count.tolist()):
            if n:
                ax.text(x, n, _short(n), ha="center", va="bottom", fontsize=SMALL, color=INK)
    clean(ax)


def _short(n: int) -> str:
    """A count in at most four characters: 950, 1.2k, 13k, 4.0M."""
    for unit, suffix in ((10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.1f}{suffix}" if n < 9.95 * unit else f"{n / unit:.0f}{suffix}"
    return str(n)
