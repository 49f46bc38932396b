"""The files of a study's report, made of its numbers alone, so that all of them can be made again without its runs.

A report whose module makes `tables(numbers)` and `figures(numbers)` of a study's numbers is written here: into
the study's own folder as table.md, numbers.json and NAME.png; or, by `redraw`, as a page of documentation with its
pictures and numbers beside it, of which what stands from `READING` on is somebody's and stays.
"""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from matplotlib.figure import Figure

from metacal.errors import InputError, require, require_choice
from metacal.jsonio import to_json
from metacal.report.tables import Table
from metacal.studies.footer import footer, headline, versions_of
from metacal.studies.grid import Study

__all__ = ["DRAWN", "about", "redraw", "write"]

DRAWN = ("compare", "measured", "trajectory")
"""The reports that can be drawn again from their numbers."""
READING = "## Reading it"
SAID = ("command", "headline", "versions")  # of `about`, on every page


class Report(Protocol):
    """What a module of `DRAWN` has."""

    def tables(self, numbers: Mapping[str, Any]) -> Sequence[Table]: ...

    def figures(self, numbers: Mapping[str, Any]) -> Mapping[str, Figure]: ...


def about(study: Study) -> dict[str, Any]:
    """What the numbers of every report begin with: which study this is, and what its file says of it."""
    return {
        "report": study.report,
        "name": study.name,
        "command": study.command,
        "headline": headline(study),
        "versions": list(dict.fromkeys(re.sub(r", (platform|git) [^,]+", "", said) for said in versions_of(study))),
        **{key: study.spec[key] for key in ("title", "shows", "setting", "differs") if key in study.spec},
    }


def write(study: Study, numbers: Mapping[str, Any]) -> list[Path]:
    """Print the tables, and write them with the runs behind them, the numbers and the pictures; returns the paths."""
    study.folder.mkdir(parents=True, exist_ok=True)
    module = _module(str(numbers["report"]))
    tables = module.tables(numbers)
    for table in tables:
        print(table.render("text"), end="\n\n")
    paths = [study.folder / "table.md", study.folder / "numbers.json"]
    parts = [*(table.render("markdown") for table in tables), *_differs(numbers), footer(study)]
    paths[0].write_text("\n\n".join(parts))
    paths[1].write_text(to_json(numbers))
    return paths + _save(module.figures(numbers), study.folder, "")


def redraw(file: str | Path, folder: str | Path | None = None) -> list[Path]:
    """Write a study's page, pictures and numbers (NAME.md, NAME_*.png, NAME.json) from a file of its numbers.

    folder: where to; None: beside the file.

    Raises:
        InputError: for a file that holds no such numbers.
    """
    source = Path(file)
    require(source.is_file(), f"the file of numbers {file} does not exist")
    try:
        numbers = json.loads(source.read_text())
    except ValueError as error:
        raise InputError(f"{file} is no file of numbers: {error}") from None
    require(isinstance(numbers, dict) and "name" in numbers, f"{file} holds no numbers that a study can be drawn from")
    require_choice(f"report of {file}", numbers.get("report"), DRAWN)
    target = source.parent if folder is None else Path(folder)
    name, module = numbers["name"], _module(numbers["report"])
    try:
        tables, figures, _ = module.tables(numbers), module.figures(numbers), [numbers[key] for key in SAID]
    except KeyError as error:
        raise InputError(f"{file} lacks {error}, of which a report {numbers['report']} is drawn") from None
    target.mkdir(parents=True, exist_ok=True)
    pictures = _save(figures, target, f"{name}_")
    page, saved = target / f"{name}.md", target / f"{name}.json"
    page.write_text(_page(numbers, tables, pictures) + _reading(page))
    saved.write_text(to_json(numbers, indent=None) + "\n")
    return [page, saved, *pictures]


def _page(numbers: Mapping[str, Any], tables: Sequence[Table], pictures: Sequence[Path]) -> str:
    parts = [f"# {numbers.get('title', numbers['name'])}", f"    {numbers['command']}"]
    parts += [" ".join(filter(None, [numbers.get("shows"), numbers.get("setting")]))]
    parts += [*(table.render("markdown") for table in tables), *_differs(numbers)]
    parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    parts += [f"{numbers['headline']} Versions: {'; '.join(numbers['versions'])}."]
    return "\n".join(map(_wrapped, "\n\n".join(filter(None, parts)).splitlines())) + "\n"


def _wrapped(line: str) -> str:
    """A line of prose at a width that can be read; rows of tables and code as they are."""
    return line if line.startswith(("|", " ")) else textwrap.fill(line, 118, break_on_hyphens=False)


def _differs(numbers: Mapping[str, Any]) -> list[str]:
    return [f"What differs from the published setting: {numbers['differs']}"] if "differs" in numbers else []


def _reading(page: Path) -> str:
    """What somebody wrote of the results, with its heading; empty where there is nothing yet."""
    _, heading, text = page.read_text().partition(f"\n{READING}") if page.is_file() else ("", "", "")
    return heading + text


def _save(figures: Mapping[str, Figure], folder: Path, prefix: str) -> list[Path]:
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{prefix}{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _module(name: str) -> Report:
    return cast(Report, importlib.import_module(f"metacal.studies.{name}"))
