"""Tables as HTML, for the page of a comparison and for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metacal.report.tables import Table

__all__ = ["notes_html", "table_html"]


def table_html(table: Table, sortable: bool = False) -> str:
    """The table without its title and notes. Marked cells are bold and have the class `best`.

    With `sortable` each header is a button, for a script to sort by.
    """
    header, *rows = table.grid()

    def name(i: int) -> str:
        return "name" if i <= table.lead else ""

    def head(text: str) -> str:
        return f'<button type="button">{escape(text)}</button>' if sortable else escape(text)

    cells = "".join(f'<th scope="col" class="{name(i)}">{head(text)}</th>' for i, (text, _) in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{name(i)} best"><b>{escape(text)}</b></td>'
            if best
            else f'<td class="{name(i)}">{escape(text)}</td>'
            for i, (text, best) in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def notes_html(notes: list[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
