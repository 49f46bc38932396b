"""`metacal list`: what there is to choose from, with a line for each."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence

from metacal.configs import comment_of, config_dir
from metacal.errors import require_choice

__all__ = ["list_command"]

# What can be listed -> the folder of configs/ that holds it, and how it is chosen.
_FOLDERS = {
    "methods": ("method", "metacal train method=NAME"),
    "models": ("model", "metacal train model=NAME"),
    "optimizers": ("optimizer", "metacal train optimizer=NAME"),
    "data": ("data", "metacal train data=NAME"),
    "studies": ("study", "metacal study NAME"),
}
_KINDS = (*_FOLDERS, "measures")

USAGE = f"""usage: metacal list {"|".join(_KINDS)}

Names with a line for each: of methods, models, optimizers, data and studies what their files in configs/ say of
themselves, of measures their unit, which end is good, and their formula.
"""


def list_command(argv: Sequence[str]) -> int:
    """Run `metacal list ARGV`; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    require_choice("list", " ".join(argv), _KINDS)
    if argv[0] == "measures":
        lines, how = _measures(), "metacal compare RUNS --measures NAME,NAME"
    else:
        folder, how = _FOLDERS[argv[0]]
        lines = {file.stem: comment_of(file) for file in sorted((config_dir() / folder).glob("*.yaml"))}
    width = max(map(len, lines)) + 2
    for name, said in lines.items():
        text = f"{name:<{width}}{said}"
        print(textwrap.fill(text, 116, subsequent_indent=" " * width, break_on_hyphens=False))
    print(f"\n{how}")
    return 0


def _measures() -> dict[str, str]:
    """Name -> title, unit, which end is good, and the first paragraph of its docstring."""
    from metacal.calibration import MEASURES  # imports PyTorch, which takes a second or more

    ends = {"min": "less is better", "max": "more is better", None: "neither end is good"}
    return {
        name: f"{m.title}{' in %' if m.percent else ''}, {ends[m.best]}: "
        + " ".join((inspect.getdoc(m.function) or "").partition("\n\n")[0].split())
        for name, m in MEASURES.items()
    }
