"""The drawings of docs/concepts.md: python scripts/draw_concepts.py writes them to docs/images/concepts_*.png."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import metacal
from metacal import losses
from metacal.calibration import accuracy, confidence, ece, reliability_bins

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BLUE, RED, GREY, GREEN = "#2b6cb0", "#c05621", "#718096", "#2f855a"
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "savefig.dpi": 130,
}


def main() -> None:
    """Draw every picture in one style."""
    plt.rcParams.update(STYLE)
    pictures: dict[str, Callable[[], Figure]] = {
        "calibration": calibration,
        "gamma": gamma_and_sece,
        "horizon": horizon,
        "margins": margins_and_curvature,
    }
    for name, draw in pictures.items():
        draw().savefig(IMAGES / f"concepts_{name}.png")


def answers(n: int, too_sure: float, seed: int = 0) -> metacal.Predictions:
    """Simulated predictions of two classes: right with probability q, and claiming `too_sure` times the logit of q."""
    generator = torch.Generator().manual_seed(seed)
    q = 0.5 + 0.5 * torch.rand(n, generator=generator, dtype=torch.float64) ** 0.8
    right = torch.rand(n, generator=generator, dtype=torch.float64) < q
    logits = torch.stack([torch.zeros_like(q), too_sure * torch.logit(q.clamp(max=0.999))], dim=1)
    return metacal.Predictions.from_logits(logits, right.long())


def calibration() -> Figure:
    """Two reliability diagrams of the same answers, one of a model that is too sure and one of a calibrated one."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.7), sharey=True)
    for ax, title, too_sure in zip(axes, ("too sure of itself", "calibrated"), (2.5, 1.0)):
        p = answers(20_000, too_sure)
        bins = reliability_bins(p, n_bins=20)
        full = bins.count > 0
        claimed, seen = bins.confidence[full], bins.accuracy[full]
        ax.bar(claimed, seen, width=0.02, color=BLUE, label="right, of these answers")
        ax.vlines(claimed, seen, claimed, color=RED, linewidth=6, alpha=0.5, label="the gap")
        ax.plot([0.5, 1], [0.5, 1], color=GREY, linewidth=1, linestyle="--")
        ax.set(xlim=(0.49, 1.01), ylim=(0.4, 1.02), xlabel="confidence of the answer")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        right, sure, gap = (100 * measure(p) for measure in (accuracy, confidence, ece))
        ax.set_title(f"{title}\n{right:.0f} % right, confidence {sure:.0f} %, ECE {gap:.1f} %", loc="left")
    axes[0].set_ylabel("share that is right")
    axes[0].legend(loc="upper left")
    return figure


def gamma_and_sece() -> Figure:
    """Left the focal loss for several gammas, right the kernel average whose distance to the diagonal SECE is."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.7))
    p_label = torch.linspace(0.01, 0.999, 300, dtype=torch.float64)
    logits = torch.stack([torch.zeros_like(p_label), torch.logit(p_label)], dim=1)
    labels = torch.ones(len(p_label), dtype=torch.long)
    for gamma, color in ((0, GREY), (1, GREEN), (3, BLUE), (10, RED)):
        left.plot(p_label, losses.focal(logits, labels, float(gamma)), color=color, label=f"γ = {gamma}")
    left.set(
        ylim=(0, 3),
        xlabel="probability of the label, $p_y$",
        ylabel="loss",
        title=r"focal loss $-(1-p_y)^\gamma\,\log\,p_y$",
    )
    left.legend()

    p = answers(400, 2.5, seed=3)
    c, a = p.confidence, p.correct.double()
    order = c.argsort()
    c, a = c[order], a[order]
    weight = torch.exp(-((c[:, None] - c[None]) ** 2) / (2 * 0.05**2))
    average = (weight @ a) / weight.sum(1)
    right.scatter(c, a, s=8, color=GREY, alpha=0.4, label="answers: right 1, wrong 0")
    right.plot(c, average, color=BLUE, label="their kernel average ã")
    right.fill_between(c, average, c, color=RED, alpha=0.25, label="SECE: the mean distance")
    right.plot([0.5, 1], [0.5, 1], color=GREY, linewidth=1, linestyle="--")
    right.set(xlim=(0.49, 1.01), ylim=(-0.05, 1.05), xlabel="confidence c", ylabel="right",
              title="smooth expected calibration error")  # fmt: skip
    right.legend(loc="center left", bbox_to_anchor=(0.0, 0.3))
    return figure


def box(ax: Axes, x: float, y: float, text: str, color: str) -> None:
    style = {"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": color, "linewidth": 1.5}
    ax.text(x, y, text, ha="center", va="center", bbox=style, zorder=3)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str, dashed: bool = False) -> None:
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.5, "linestyle": "--" if dashed else "-"}
    ax.annotate("", end, start, arrowprops=style | {"shrinkA": 0, "shrinkB": 0})


def horizon() -> Figure:
    """A training of three steps, and the way back from the calibration error at its end to the gammas."""
    figure, ax = plt.subplots(figsize=(8, 3.2))
    ax.set(xlim=(-0.5, 7.1), ylim=(-1.6, 1.5))
    ax.axis("off")
    for k in range(4):
        box(ax, 2 * k, 0, f"weights θ{'₀₁₂₃'[k]}", BLUE)
        if k < 3:
            middle = 2 * k + 1
            arrow(ax, (middle - 0.55, 0), (middle + 0.55, 0), BLUE)
            ax.text(middle, -0.08, "step", ha="center", va="top", color=BLUE)
            box(ax, middle, 1.15, "gammas\nof the batch", GREEN)
            arrow(ax, (middle, 0.8), (middle, 0.08), GREEN)
            arrow(ax, (middle + (0.55 if k == 2 else 1), -1), (middle - (0 if k == 0 else 1), -1), RED, dashed=True)
            arrow(ax, (middle, -1), (middle, -0.4), RED, dashed=True)
    arrow(ax, (6, -0.25), (6, -0.65), RED)
    box(ax, 6.25, -1, "calibration error\non held-out images", RED)
    ax.text(3, -1.4, "the hypergradient goes back through every step of the horizon", ha="center", color=RED)
    return figure


def margins_and_curvature() -> Figure:
    """Left the miss of one sample between its bounds by the margin, right gradient descent at the edge of stability."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.7))
    n_classes = 10
    m = torch.linspace(0, 10, 200, dtype=torch.float64)
    for others, label, color in ((0.0, "all others as close", RED), (-30.0, "one other close", GREEN)):
        logits = torch.full((len(m), n_classes), others, dtype=torch.float64)
        logits[:, 0], logits[:, 1] = m, 0.0
        left.plot(m, 1 - torch.softmax(logits, 1)[:, 0], color=color, label=f"$1-p_y$, {label}")
    left.fill_between(m, torch.exp(-m) / n_classes, (n_classes - 1) * torch.exp(-m), color=GREY, alpha=0.25,
                      label="from $e^{-m}/K$ to $(K-1)\\,e^{-m}$")  # fmt: skip
    left.set(
        yscale="log",
        ylim=(1e-6, 10),
        xlabel="margin m of the label",
        ylabel="miss, 1 − p",
        title="a large margin leaves a small miss",
    )
    left.legend(loc="lower left")

    theta = torch.linspace(-1.5, 1.5, 100)
    right.plot(theta, theta**2 / 2, color=GREY)
    for rate, label, color in ((1.8, "η λ = 1.8: it settles", GREEN), (2.1, "η λ = 2.1: it diverges", RED)):
        at = [-1.0 if rate < 2 else -0.75]
        for _ in range(7):
            at.append(at[-1] * (1 - rate))
        points = torch.tensor(at)
        right.plot(points, points**2 / 2, color=color, marker="o", markersize=4, linewidth=1, label=label)
    right.set(ylim=(-0.05, 1.45), xlabel="one direction of the weights, curvature λ", ylabel="loss")
    right.set(title="the edge of stability, η λ = 2")
    right.legend(loc="upper center")
    return figure


if __name__ == "__main__":
    main()
