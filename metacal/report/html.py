"""The comparison of runs as one HTML file: tables, figures and origins, with nothing to fetch from anywhere."""

from __future__ import annotations

import base64
import io
import math
import time
from html import escape
from typing import TYPE_CHECKING

from metacal import __version__
from metacal.report.comparison import RunComparison
from metacal.report.drawing import FEW
from metacal.report.judge import load_predictions
from metacal.report.markup import notes_html, table_html
from metacal.report.run_figures import (
    accuracy_ece_plane,
    curves_of,
    overlaid_reliability,
    risk_coverage,
    training_curves,
)
from metacal.report.tables import Table, column_of
from metacal.report.verdict import heading, verdict, when_scaled
from metacal.runs.settings import equal_settings, show_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["comparison_page", "figures_of", "highlighted"]

# With more groups than this a figure shows some in colour: the best, the baseline, and one of each of these methods.
_ALL_IN_COLOUR = 10
_BEST_IN_COLOUR = 5
_KNOWN = ("cross_entropy", "focal", "gamma_net", "metacal")
_PIXELS = 100  # of the page to an inch of a figure, so that all figures have type of one size

_STYLE = """
:root { --ink: #222; --pale: #5b6070; --line: #d9dce1; --back: #fff; --mark: #e3effa; --link: #1f5f99; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde; --pale: #a3a8b6; --line: #3a3e46; --back: #16181c; --mark: #22405c; --link: #8cc1f0; }
  img { filter: invert(0.9) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 90rem; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.3; margin-bottom: .3rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
a { color: var(--link); } nav ul { padding-left: 1.2rem; } :focus-visible { outline: 2px solid var(--link); }
.verdict { font-size: 1.05rem; border-left: 4px solid var(--link); padding: .3rem .8rem; max-width: 62rem; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .65rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
th button { all: unset; cursor: pointer; font-weight: 700; }
th button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\25B4"; }
th[aria-sort=descending] button::after { content: " \\25BE"; }
th.name, td.name { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; z-index: 1; background: var(--back);
  max-width: 16rem; white-space: normal; border-right: 1px solid var(--line); }
td.best { background: var(--mark); }
.note, figcaption, details { color: var(--pale); font-size: 13px; margin: .35rem 0; max-width: 62rem; }
summary { cursor: pointer; } figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
.legend { display: none; font-size: 13px; } .legend span { margin-right: 1rem; display: inline-block; }
.legend b { font-size: 16px; }
code { font-size: 12px; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  th:first-child, td:first-child { max-width: 8rem; }
  img { max-width: none; }
  .legend { display: block; }
}
"""

# Sorting by a header's button: numbers as numbers ("35.2 ± 0.4" by its first), before text, and dashes last.
_SCRIPT = """
document.querySelectorAll("table").forEach(table => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((th, i) => th.querySelector("button").addEventListener("click", () => {
    const way = th.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const compare = (r, s) => { const a = r.cells[i].textContent, b = s.cells[i].textContent;
      const x = parseFloat(a), y = parseFloat(b);
      if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
      return sign * (isNaN(x) ? a.localeCompare(b) : x - y); };
    [...table.tBodies[0].rows].sort(compare).forEach(row => table.tBodies[0].append(row));
  }));
});
"""

_MARKS = "Blue and bold: the best of its column and scaling, and all that do not differ from it beyond noise."


def comparison_page(result: RunComparison, title: str = "", command: str = "") -> str:
    """The page as text.

    It begins with what was compared, when, and the verdict in one sentence, then has contents, the table of
    `result.table()`, the differences from the baseline if there is one, the figures of `figures_of`, and a table of the
    runs with seeds, folders, commands and versions. `title` replaces what was compared.
    """
    title = title or heading(result)
    said, sections = verdict(result), _sections(result)
    made = f"Made {time.strftime('%Y-%m-%d %H:%M')} by metacal {__version__}"
    links = "".join(f'<li><a href="#part{i}">{escape(name)}</a></li>' for i, (name, _) in enumerate(sections))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(result.notes()[0])} {made}{f": {_code(command)}" if command else "."}</p>',
        f'<p class="verdict">{escape(said)}</p>' if said else "",
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
        *(f'<h2 id="part{i}">{escape(name)}</h2>\n{text}' for i, (name, text) in enumerate(sections)),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _sections(result: RunComparison) -> list[tuple[str, str]]:
    """(heading, HTML) of each part of the page."""
    table, warnings = result.table(origins="none"), result.warnings()
    folded = notes_html([note for note in result.notes()[1:] if note not in warnings])
    marks = [_MARKS] if table.marked else []
    equal = equal_settings(result.groups, main=False)
    settings = "<br>".join(_code(f"{key}={show_value(value)}") for key, value in equal.items())
    text = _scrolling(table) + notes_html([*marks, *warnings]) + _folded("How it was measured and tested", folded)
    sections = [(table.title, text + _folded(f"All {len(equal)} settings that are equal", settings))]
    if result.baseline is not None:
        differences = result.difference_table()
        sections.append((differences.title, _scrolling(differences) + notes_html(list(differences.notes))))
    for name, caption, figure in figures_of(result):
        width = f'width="{_PIXELS * figure.get_figwidth():.0f}"'
        image = f'<img alt="{escape(name)}: {escape(caption)}" {width} src="data:image/png;base64,{_png(figure)}">'
        shown = f'<div class="scroll" tabindex="0">{image}</div><figcaption>{escape(caption)}</figcaption>'
        sections.append((name, f"<figure>{_legend(figure)}{shown}</figure>"))
    runs = result.runs_table()
    return [*sections, (runs.title, _scrolling(runs))]


def _scrolling(table: Table) -> str:
    return f'<div class="scroll" tabindex="0">{table_html(table, sortable=True)}</div>'


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{text}</details>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def figures_of(result: RunComparison) -> list[tuple[str, str, Figure]]:
    """(name, caption, figure) of the comparison: reliability, risk and coverage, training curves, accuracy and ECE."""
    scaling = result.scalings[0]
    order = result.order[scaling]
    groups = [result.groups[i] for i in order]
    titles = {s: when_scaled(s) for s in result.scalings}
    predictions = {
        s: {g.short: [load_predictions(run, result.split, s) for run in g.runs] for g in groups}
        for s in result.scalings
    }
    shown, who = highlighted(result)
    where = f"{result.split} split, {result.n_samples:,} samples"
    bands = f"Lines are means over seeds, bands reach from the least to the largest seed.{who}"
    figures = [
        (
            "Reliability",
            f"Accuracy against confidence in {result.n_bins} bins, {where}. {bands} Below the diagonal: overconfident. "
            f"Pale numbers are bins of fewer than {FEW} samples, with their counts.",
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


def highlighted(result: RunComparison) -> tuple[set[str] | None, str]:
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


def _legend(figure: Figure) -> str:
    """A figure's legend as text, for screens so narrow that its own lies beyond their edge."""
    from matplotlib.colors import to_hex

    (legend,) = figure.legends
    names = [" ".join(text.get_text().split()) for text in legend.get_texts()]
    colors = [to_hex(handle.get_color()) for handle in legend.legend_handles]  # type: ignore[union-attr]
    lines = [f'<span><b style="color:{c}">&#9679;</b> {escape(name)}</span>' for c, name in zip(colors, names)]
    return f'<p class="legend">{escape(" ".join(legend.get_title().get_text().split()))} {"".join(lines)}</p>'


def _png(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=1.5 * _PIXELS)
    return base64.b64encode(file.getvalue()).decode()
