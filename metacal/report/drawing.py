"""What the figures have in common: colours, axes, and the line of a reliability plot.

Nothing here opens a window: a figure made by `canvas` is known to its caller alone (no pyplot).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "FEW",
    "INK",
    "SMALL",
    "canvas",
    "clean",
    "diagonal",
    "faint",
    "faint_bins",
    "name_points",
    "percent",
    "reliability_axes",
    "reliability_line",
]

INK = "#333333"
FEW = 10  # samples in a bin, below which its accuracy says little: it is drawn faintly
SMALL = 8.0  # points of the least type: 11 pixels at the 100 dots an inch that TensorBoard gets
COLORS = (
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

Array = NDArray[np.float64]


def canvas(ax: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """The axes given and their figure, or a new figure of `size` inches with one pair of axes."""
    if ax is not None:
        return ax.get_figure(), ax  # type: ignore[return-value]
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def clean(ax: Axes, title: str = "") -> None:
    """No frame above and to the right, a pale grid behind the drawing."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(color="#e6e6e6", linewidth=0.7)
    if title:
        ax.set_title(title, fontsize=10.5)


def percent(*axes: Axis) -> None:
    """Show the fractions along an axis as tables do, in percent."""
    from matplotlib.ticker import PercentFormatter

    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def diagonal(ax: Axes) -> None:
    """Where confidence is true."""
    ax.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1, zorder=4)


def faint(color: str) -> str:
    """The colour mixed with as much white, for what rests on few samples."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = (0.5 * part + 0.5 for part in to_rgb(color))
    return to_hex((red, green, blue))


def faint_bins(ax: Axes, x: Array, y: Array, counts: Array, color: str) -> None:
    """Bins of few samples, which are no part of a line: their counts, written faintly where their points would be."""
    for at_x, at_y, count in zip(x.tolist(), y.tolist(), counts.tolist()):
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL, "clip_on": True, "zorder": 2}
        inside = min(max(at_y, 0.02), 0.98)  # a bin without a right prediction lies on the frame
        ax.text(at_x, inside, f"{count:.0f}", color=faint(color), **style)


def reliability_axes(ax: Axes, title: str = "") -> None:
    """Square axes of accuracy against confidence, with the diagonal."""
    diagonal(ax)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
    percent(ax.xaxis, ax.yaxis)
    clean(ax, title)


def reliability_line(
    ax: Axes,
    x: Array,
    y: Array,
    style: Mapping[str, Any],
    label: str,
    share: Array | None = None,
    band: tuple[Array, Array] | None = None,
) -> None:
    """A line through the bins at (mean confidence, accuracy), all (m,).

    Args:
        style: of the line; its color is that of the points and of the band too.
        share: of the samples in each bin, by which the points grow; None: no points.
        band: (low, high) accuracy; None: no band.
    """
    if band is not None:
        ax.fill_between(x, *band, color=style["color"], alpha=0.13, linewidth=0)
    ax.plot(x, y, label=label, **style)
    if share is not None:
        ax.scatter(x, y, s=6 + 80 * share, color=style["color"], edgecolor="white", zorder=4)


def name_points(ax: Axes, points: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each label beside its (x, y) in its colour, from below upwards, higher where another label stands, and to
    the left of a point that leaves no room on its right.
    """
    ax.autoscale_view()
    pixel, taken = 72 / ax.figure.dpi, list[tuple[float, float, float]]()
    edge = pixel * ax.transAxes.transform((1, 1))[0]
    for label, (x, y, color) in sorted(points.items(), key=lambda point: point[1][1]):
        (point, at), width = pixel * ax.transData.transform((x, y)) + (0, 4), 0.62 * SMALL * len(label)
        inside = point + 5 + width < edge
        left = point + 5 if inside else point - 5 - width
        height = at
        for start, end, other in sorted(taken, key=lambda box: box[2]):
            if left < end and start < left + width and abs(height - other) < 1.2 * SMALL:
                height = other + 1.2 * SMALL
        taken.append((left, left + width, height))
        beside: dict[str, Any] = {"xytext": (5 if inside else -5, 4 + height - at), "textcoords": "offset points"}
        ax.annotate(label, (x, y), color=color, fontsize=SMALL, ha="left" if inside else "right", **beside)
