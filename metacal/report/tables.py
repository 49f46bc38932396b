"""Tables of named rows × measures, in one path to plain text, Markdown, CSV, LaTeX and rich.

    table = methods_table({"focal": [run.to_dict() for run in runs], "gamma-net": ...})
    print(table)                        # plain text;  rich.print(table) draws it
    table.render("markdown")            # or "latex", "csv", "text"

Values are fractions. A column shown in percent says "%" in its header; CSV has fractions in full precision.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from metacal.calibration import MEASURES
from metacal.errors import InputError, require
from metacal.names import MeasureName
from metacal.report.cells import Cell, Column, Range, Spread, central, column_of, is_scaled, summarise
from metacal.report.markup import notes_html, table_html

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable

__all__ = [
    "FORMATS",
    "Cell",
    "Column",
    "Range",
    "Spread",
    "Table",
    "budgets",
    "central",
    "column_of",
    "inert",
    "is_scaled",
    "methods_table",
    "summarise",
]

FORMATS = ("text", "markdown", "csv", "latex")


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, the first entry of a row being its name.

    Attributes:
        rows: (name, cells), with as many cells as columns.
        corner: the header above the names.
        title, notes: lines before and after the table; LaTeX makes the title the caption, CSV has neither.
        best_within: a column whose values divide the rows into groups, each with a best of its own; None: one group.
        marked: the cells to mark, as (row, column), in place of the best of each column.
        mark_note: what the mark means, for plain text.
        lead: leading columns that name a row together with its name, repeated where a wide table is broken.
    """

    columns: Sequence[Column]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    corner: str = ""
    title: str = ""
    notes: Sequence[str] = field(default=())
    best_within: int | None = None
    marked: frozenset[tuple[int, int]] | None = None
    mark_note: str = "best of its column"
    lead: int = 0

    def __post_init__(self) -> None:
        for name, cells in self.rows:
            require(
                len(cells) == len(self.columns),
                f"row {name!r} must have {len(self.columns)} cells, one for each column, got {len(cells)}",
            )

    def render(self, to: str = "text") -> str:
        """The table as "text", "markdown", "csv" or "latex"."""
        writers = {
            "text": self._text,
            "markdown": self._markdown,
            "csv": self._csv,
            "latex": self._latex,
        }
        if to not in writers:
            raise InputError(f"format must be one of {', '.join(FORMATS)}, got {to!r}")
        return writers[to]()

    def __str__(self) -> str:
        return self.render("text")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """As one table if the console is wide enough, else as several below each other, so that no cell is cut off."""
        from rich.markup import escape

        if self.title:
            yield f"[bold]{escape(self.title)}[/bold]"
        grid = self.grid()
        cells = [max((len(row[i][0]) for row in grid[1:]), default=0) for i in range(len(grid[0]))]
        whole = [max(len(title), n) + 2 for (title, _), n in zip(grid[0], cells)]  # 2: between columns
        broken = [max(n, *map(len, title.split() or [""])) + 2 for (title, _), n in zip(grid[0], cells)]
        # Headers break at their spaces when that is what makes the columns fit; cells never do.
        widths = whole if sum(whole) <= options.max_width else broken
        for part in _fitting(widths, options.max_width, self.lead):
            yield self._rich_part(grid, part, widths)
        for note in self.notes:
            yield f"[dim]{escape(note)}[/dim]"

    def _rich_part(self, grid: list[list[tuple[str, bool]]], part: Sequence[int], widths: Sequence[int]) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        header, *body = grid
        for i in part:
            table.add_column(escape(header[i][0]), justify="right" if i > self.lead else "left", width=widths[i] - 2)
        for row in body:
            cells = [(escape(row[i][0]), row[i][1]) for i in part]
            table.add_row(*(f"[bold]{text}[/bold]" if best else text for text, best in cells))
        return table

    def grid(self, times: str = "±") -> list[list[tuple[str, bool]]]:
        """Header and rows as (text, whether it is marked): what every format is made of."""
        best = [self._best(i) for i in range(len(self.columns))]
        grid = [[(self.corner, False), *((c.header, False) for c in self.columns)]]
        for r, (name, cells) in enumerate(self.rows):
            shown = [(c.show(cell, times), r in best[i]) for i, (c, cell) in enumerate(zip(self.columns, cells))]
            grid.append([(name, False), *shown])
        return grid

    def _best(self, index: int) -> set[int]:
        """The rows whose value, as shown, is the best of the column in their group; none in a group of one row."""
        if self.marked is not None:
            return {r for r, c in self.marked if c == index}
        column = self.columns[index]
        if column.best is None:
            return set()
        groups: dict[Cell, dict[int, float]] = {}
        for r, (_, cells) in enumerate(self.rows):
            value = central(cells[index])
            if value is not None and not math.isnan(value):
                group = None if self.best_within is None else cells[self.best_within]
                groups.setdefault(group, {})[r] = float(column._number(value))
        choose = min if column.best == "min" else max
        return {
            r
            for known in groups.values()
            if len(known) > 1
            for r, value in known.items()
            if value == choose(known.values())
        }

    def to_frame(self) -> Any:
        """The rows as a pandas DataFrame with the columns of CSV: fractions, and `_low`, `_high`, `_std` beside them.

        Raises:
            InputError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InputError("to_frame needs pandas, which is not installed here: pip install pandas") from None
        names, rows = self._numbers()
        index = pandas.Index([row[0] for row in rows], name=names[0])
        return pandas.DataFrame([row[1:] for row in rows], index, names[1:])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        title = f"<p><b>{escape(self.title)}</b></p>" if self.title else ""
        return title + table_html(self) + notes_html(list(self.notes))

    def _text(self) -> str:
        marked = self.grid()
        # A column with a mark keeps a place for it in every row, so that the numbers stay aligned.
        places = {i for row in marked for i, (_, best) in enumerate(row) if best}
        grid = [[t + ("*" if best else " ") if i in places else t for i, (t, best) in enumerate(row)] for row in marked]
        widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
        lines = [_aligned(row, widths) for row in grid]
        lines.insert(1, "  ".join("─" * w for w in widths))
        notes = [*self.notes, *([f"* {self.mark_note}"] if places else [])]
        return "\n".join([*([self.title] if self.title else []), *lines, *notes])

    def _markdown(self) -> str:
        grid = [[f"**{text}**" if best else text.replace("|", r"\|") for text, best in row] for row in self.grid()]
        rule = ["---", *["---:"] * len(self.columns)]
        lines = ["| " + " | ".join(row) + " |" for row in [grid[0], rule, *grid[1:]]]
        head = [f"**{self.title}**", ""] if self.title else []
        tail = ["", *self.notes] if self.notes else []
        return "\n".join([*head, *lines, *tail])

    def _latex(self) -> str:
        grid = [[(_latex_text(text), best) for text, best in row] for row in self.grid(r"\pm")]
        body = [" & ".join(rf"\textbf{{{text}}}" if best else text for text, best in row) + r" \\" for row in grid]
        lines = [
            rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
        ]
        lines += [r"\bottomrule", r"\end{tabular}"]
        if self.title:
            lines = [
                r"\begin{table}",
                r"\centering",
                *lines,
                rf"\caption{{{_latex_text(self.title)}}}",
                r"\end{table}",
            ]
        return "\n".join([*lines, *(f"% {note}" for note in self.notes)])

    def _csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names, rows = self._numbers()
        for row in [names, *rows]:
            writer.writerow(["" if x is None else inert(x) for x in row])
        return out.getvalue()

    def _numbers(self) -> tuple[list[str], list[list[Any]]]:
        """Header and rows with one column for each number: `ece`, and `ece_low`, `ece_high` or `ece_std` where cells
        have them.
        """
        parts = [_parts(cells[i] for _, cells in self.rows) for i in range(len(self.columns))]
        names = [c.name + suffix for c, suffixes in zip(self.columns, parts) for suffix in suffixes]
        rows = [
            [name, *(_part(cell, s) for cell, suffixes in zip(cells, parts) for s in suffixes)]
            for name, cells in self.rows
        ]
        return [self.corner or "name", *names], rows


def inert(cell: Any) -> Any:
    """Text that a spreadsheet would take for a formula, with an apostrophe before it; numbers stay as they are."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def methods_table(
    runs: Mapping[str, Mapping[str, float] | Sequence[Mapping[str, float]]],
    measures: Sequence[MeasureName | Literal["temperature"]] = ("accuracy", "nll", "ece", "adaptive_ece", "brier"),
    scaled: bool = True,
    split: str = "test",
    title: str = "",
) -> Table:
    """Methods as rows, measures as columns; first without scaling, then after temperature scaling.

    Args:
        runs: method -> the results of its run, or of several (seeds), which become mean ± standard deviation.
            Results are flat, `{"ece": …, "ece_scaled": …}` as from `Report.to_dict`; names may carry the
            split, `test/ece`, as in a run's summary.json.
        measures: names in `metacal.calibration.MEASURES`, or "temperature"; those that no run has are left out.
        scaled: give each method a second row, after temperature scaling, if any run has such values.
        split: which split's names to look up.
    """
    require(len(runs) > 0, "runs must hold at least one method, got none")
    for name in measures:
        valid = [*MEASURES, "temperature"]
        require(name in valid, f"measures must be among {', '.join(valid)}, got {name!r}")
    seeds = {m: [results] if isinstance(results, Mapping) else list(results) for m, results in runs.items()}

    def block(suffix: str, scaling: str) -> list[tuple[str, list[Cell]]]:
        def cell(method: str, name: str) -> Cell:
            key = name + suffix if is_scaled(name) else name
            return summarise([_look_up(s, key, split) for s in seeds[method]])

        return [(method, [scaling, *(cell(method, name) for name in measures)]) for method in runs]

    rows = block("", "none")
    after = block("_scaled", "temperature")
    has_scaled = scaled and any(
        cells[i] is not None for _, cells in after for i, name in enumerate(measures, 1) if is_scaled(name)
    )
    if has_scaled:
        rows += after
    columns = [Column("scaling", "Scaling"), *(column_of(name) for name in measures)]
    first = 0 if has_scaled else 1
    known = [i for i in range(first, len(columns)) if any(cells[i] is not None for _, cells in rows)]
    columns = [columns[i] for i in known]
    rows = [(name, [cells[i] for i in known]) for name, cells in rows]
    notes = [f"Split: {split}."]
    if has_scaled:
        notes.append("Scaling by one temperature, fitted on validation predictions.")
    counts = sorted({len(s) for s in seeds.values()})
    if counts[-1] > 1:
        notes.append(f"Mean ± standard deviation over {' or '.join(map(str, counts))} runs.")
    notes += budgets(seeds)
    return Table(columns, rows, "method", title, notes, best_within=0 if has_scaled else None)


def budgets(summaries: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A line on how many images each method trained on and in how many optimizer steps, by its runs' summaries.

    Nothing where these do not tell.
    """

    def span(values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    def told(runs: Sequence[Mapping[str, Any]]) -> str:
        data = [run["data"] for run in runs]
        aside = span([d.get("meta") or 0 for d in data])
        of_meta = {"val": ", with val as meta images", "folds": ", a fold of which is meta at each epoch"}
        more = of_meta.get(data[0].get("meta_from") or "", "" if aside == "0" else f" beside {aside} meta images")
        return f"{span([d['train'] for d in data])} images{more}, in {span([run['steps'] for run in runs])} steps"

    if not all("steps" in run and run.get("data", {}).get("train") for runs in summaries.values() for run in runs):
        return []
    who: dict[str, list[str]] = {}
    for name, runs in summaries.items():
        who.setdefault(told(runs), []).append(name)
    parts = [budget + (f" ({', '.join(names)})" if len(who) > 1 else "") for budget, names in who.items()]
    return [f"Trained on {'; '.join(parts)}."]


def _look_up(results: Mapping[str, float], name: str, split: str) -> float | None:
    value = results.get(f"{split}/{name}", results.get(name))
    return None if value is None else float(value)


def _parts(cells: Iterable[Cell]) -> list[str]:
    kinds = {type(cell) for cell in cells}
    return ["", *(["_low", "_high"] if Range in kinds else []), *(["_std"] if Spread in kinds else [])]


def _part(cell: Cell, suffix: str) -> float | int | str | None:
    if suffix == "":
        return cell[0] if isinstance(cell, Range | Spread) else cell
    if isinstance(cell, Range):
        return {"_low": cell.low, "_high": cell.high}.get(suffix)
    return cell.std if isinstance(cell, Spread) and suffix == "_std" else None


def _fitting(widths: Sequence[int], limit: int, lead: int = 0) -> list[list[int]]:
    """Columns in groups no wider than `limit`, the names (column 0) and `lead` more in each; a group has one other."""
    names = list(range(lead + 1))
    groups: list[list[int]] = [list(names)]
    for i in range(lead + 1, len(widths)):
        if len(groups[-1]) > len(names) and sum(widths[k] for k in groups[-1]) + widths[i] > limit:
            groups.append(list(names))
        groups[-1].append(i)
    return groups


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = row
    return "  ".join([first.ljust(widths[0]), *(text.rjust(w) for text, w in zip(others, widths[1:]))]).rstrip()


def _latex_text(text: str) -> str:
    for plain, escaped in (("\\", r"\textbackslash{}"), *((c, "\\" + c) for c in "&%$#_{}")):
        if plain == "\\":
            text = text.replace("\\pm", "\0").replace("\\", "\1")
        else:
            text = text.replace(plain, escaped)
    text = text.replace("\1", r"\textbackslash{}").replace("\0", r"$\pm$").replace("–", "--")
    return text.replace("↑", r"$\uparrow$").replace("↓", r"$\downarrow$")
