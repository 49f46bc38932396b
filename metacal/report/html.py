"""The comparison of runs as one HTML file: tables, figures and origins, with nothing to fetch from anywhere."""

from __future__ import annotations

import base64
import io
import math
from html import escape
from typing import TYPE_CHECKING

from metacal.report.comparison import RunComparison
from metacal.report.judge import load_predictions
from metacal.report.run_figures import (
    accuracy_ece_plane,
    curves_of,
    overlaid_reliability,
    risk_coverage,
    training_curves,
)
from metacal.report.tables import Table, column_of
from metacal.runs.settings import equal_settings, show_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["comparison_page", "figures_of"]

# With more groups than this a figure shows some in colour: the best, the baseline, and one of each of these methods.
_ALL_IN_COLOUR = 10
_BEST_IN_COLOUR = 5
_KNOWN = ("cross_entropy", "focal", "gamma_net", "metacal")

_STYLE = """
:root { --ink: #222; --pale: #667; --line: #d9dce1; --back: #fff; --mark: #eef4fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde; --pale: #99a; --line: #3a3e46; --back: #16181c; --mark: #22303f; }
  img { filter: invert(0.9) hue-rotate(180deg); }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .65rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid var(--line); cursor: pointer; vertical-align: bottom; }
th.name, td.name { text-align: left; }
td.best { font-weight: 700; background: var(--mark); }
.note, figcaption { color: var(--pale); font-size: 13px; margin: .35rem 0; max-width: 62rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
code { font-size: 12px; overflow-wrap: anywhere; }
"""

# Sorting by a click on a header: numbers as numbers ("35.2 ± 0.4" by its first), the rest as text.
_SCRIPT = """
document.querySelectorAll("table").forEach(table => table.querySelectorAll("th").forEach((th, i) =>
  th.addEventListener("click", () => {
    const up = th.dataset.up = th.dataset.up === "1" ? "0" : "1";
    const key = row => { const t = row.cells[i].textContent, n = parseFloat(t); return isNaN(n) ? t : n; };
    [...table.tBodies[0].rows].sort((a, b) => { const x = key(a), y = key(b);
      return (x > y ? 1 : x < y ? -1 : 0) * (up === "1" ? 1 : -1); }).forEach(r => table.tBodies[0].append(r));
  })));
"""


def comparison_page(result: RunComparison, title: str = "metacal compare", command: str = "") -> str:
    """The page as text.

    It holds the table of `result.table()`, the differences from the baseline if there is one, the figures of
    `figures_of`, and a table of the runs with seeds, folders, commands and versions.
    """
    table = result.table(origins="none")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<h2>{escape(table.title)}</h2>",
        _table_html(table),
        _equal_html(result),
    ]
    if result.baseline is not None:
        differences = result.difference_table()
        parts += [f"<h2>{escape(differences.title)}</h2>", _table_html(differences)]
    for name, caption, figure in figures_of(result):
        image = _png(figure)
        parts.append(
            f'<h2>{escape(name)}</h2><figure><img alt="{escape(name)}: {escape(caption)}" '
            f'src="data:image/png;base64,{image}"><figcaption>{escape(caption)}</figcaption></figure>'
        )
    runs = result.runs_table()
    parts += [f"<h2>{escape(runs.title)}</h2>", _table_html(runs)]
    if command:
        parts.append(f'<p class="note">This page: <code>{escape(command)}</code></p>')
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def figures_of(result: RunComparison) -> list[tuple[str, str, Figure]]:
    """(name, caption, figure) of the comparison: reliability, risk and coverage, training curves, accuracy and ECE."""
    scaling = result.scalings[0]
    order = result.order[scaling]
    groups = [result.groups[i] for i in order]
    titles = {s: f"after {s} scaling" for s in result.scalings} | {"none": "without scaling"}
    predictions = {
        s: {g.short: [load_predictions(run, result.split, s) for run in g.runs] for g in groups}
        for s in result.scalings
    }
    shown, who = _highlighted(result)
    where = f"{result.split} split, {result.n_samples:,} samples"
    bands = f"Lines are means over seeds, bands reach from the least to the largest seed.{who}"
    figures = [
        (
            "Reliability",
            f"Accuracy against confidence in {result.n_bins} bins, {where}. {bands} Below the diagonal: overconfident.",
            overlaid_reliability({titles[s]: p for s, p in predictions.items()}, result.n_bins, highlight=shown),
        )
    ]
    measured = {"accuracy", "ece"} <= set(result.measures)
    if measured:
        values = {
            s: {
                result.groups[i].short: (
                    result.results[s]["accuracy"][i].values,
                    result.results[s]["ece"][i].values,
                )
                for i in order
            }
            for s in result.scalings
        }
        first, *after = result.scalings
        figures.append(
            (
                "Accuracy and ECE",
                f"Mean over seeds ± one standard deviation, {where}. To the right and down is better.{who}",
                accuracy_ece_plane(values[first], values[after[0]] if after else None, shown),
            )
        )
    figures.append(
        (
            "Risk and coverage",
            f"Error rate among the samples that a method is most confident of, {where}, {titles[scaling]}. {bands}",
            risk_coverage(predictions[scaling], highlight=shown),
        )
    )
    runs = {g.short: g.runs for g in groups}
    which, said = curves_of(runs)
    curves = training_curves(runs, which, shown)
    if curves is not None:
        figures.append(("Training", f"From each run's metrics.jsonl. {bands} {said}", curves))
    return figures


def _highlighted(result: RunComparison) -> tuple[set[str] | None, str]:
    """The groups that figures show in colour (None: all of them), and a sentence on which they are."""
    if len(result.groups) <= _ALL_IN_COLOUR:
        return None, ""
    scaling = result.scalings[0]
    name = next((m for m in ("ece", *result.measures) if m in result.measures and column_of(m).best), None)
    chosen: list[int] = []
    if name is not None:
        sign = -1.0 if column_of(name).best == "max" else 1.0
        means = [sign * r.mean for r in result.results[scaling][name]]
        known = [i for i, mean in enumerate(means) if math.isfinite(mean)]
        chosen += sorted(known, key=lambda i: means[i])[:_BEST_IN_COLOUR]
    chosen += [] if result.baseline is None else [result.baseline]
    for method in _KNOWN:
        chosen += [i for i, g in enumerate(result.groups) if g.method == method][:1]
    best = "" if name is None else f"the {_BEST_IN_COLOUR} best by {column_of(name).title}"
    base = "" if result.baseline is None else "the baseline"
    who = ", ".join(filter(None, [best, base, f"and one group each of {', '.join(_KNOWN)}"]))
    return {result.groups[i].short for i in chosen}, f" In colour: {who}; grey: all others."


def _table_html(table: Table) -> str:
    header, *rows = table.grid()
    names = table.lead
    head = "".join(f"<th{_left(i, names)}>{escape(text)}</th>" for i, (text, _) in enumerate(header))
    body = []
    for row in rows:
        cells = (
            f'<td class="{"name" if i <= names else ""}{" best" if best else ""}">{escape(text)}</td>'
            for i, (text, best) in enumerate(row)
        )
        body.append(f"<tr>{''.join(cells)}</tr>")
    lines = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    table_text = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll">{table_text}</div>{lines}'


def _equal_html(result: RunComparison) -> str:
    equal = equal_settings(result.groups, main=False)
    lines = "<br>".join(f"<code>{escape(key)}={escape(show_value(value))}</code>" for key, value in equal.items())
    return f'<details class="note"><summary>All {len(equal)} settings that are equal</summary>{lines}</details>'


def _left(i: int, names: int) -> str:
    return ' class="name"' if i <= names else ""


def _png(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return base64.b64encode(file.getvalue()).decode()
