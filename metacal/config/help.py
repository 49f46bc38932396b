"""What `metacal train --help` prints and what docs/keys.md shows: every group and every key, read from the schema."""

from __future__ import annotations

import textwrap
from typing import Any

from metacal.config.schema import Key, keys, sections
from metacal.config.words import groups

__all__ = ["key_table", "train_help"]

_EXAMPLES = """Examples:
  metacal train method=focal gamma.value=5 optimizer.lr=0.05 seed=1
  metacal train data=npz data.path=cifar10.npz model=resnet20 epochs=100
  metacal train -m method=cross_entropy,focal,gamma_net seed=0,1,2
  metacal train runs/…/config.yaml seed=3     (a run's own config as the starting point)
  metacal train … resume=RUN                  (go on with an interrupted run)
"""


def train_help() -> str:
    """Groups with their choices, and a line for every key: its default, what it does, and what it may be."""
    lines = ["metacal train: train one calibrated classifier, or with -m a grid of them.", ""]
    lines += ["== Groups: choose with group=name =="]
    lines += [f"{group}: {', '.join(choices)}" for group, choices in groups().items()]
    lines += ["", "== Keys: override with key=value =="]
    for key, described in keys().items():
        start = f"{key}={_default(described)}"
        lines += textwrap.wrap(f"{start:<40}  {_text(key, described)}", 116, subsequent_indent=" " * 42)
    return "\n".join([*lines, "", _EXAMPLES])


def key_table() -> str:
    """The same keys as tables in Markdown, a section each."""
    titles = {"": "Single keys", **{path: f"`{path}`" for path in sections()}}
    lines = ["# Every key", "", "Made by `python -m metacal.config.help` from the parts themselves.", ""]
    for path, title in titles.items():
        lines += [f"## {title}", "", "| key | default | |", "|---|---|---|"]
        for key, described in keys().items():
            if key.rpartition(".")[0] == path:
                cells = (f"`{key}`", f"`{_default(described)}`", _text(key, described).replace("<", "\\<"))
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _default(key: Key) -> str:
    """The default, as on the command line; of each part where they do not agree."""
    values = {owner: _shown(described.default) for owner, described in key.owners.items()}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    by_value: dict[str, list[str]] = {}
    for owner, value in values.items():
        by_value.setdefault(value, []).append(owner)
    return "|".join(f"{value} ({', '.join(owners)})" for value, owners in by_value.items())


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_shown, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(key: str, described: Key) -> str:
    """What it does, whose option it is, and what it may be."""
    option, owners = described.option, [owner for owner in described.owners if owner]
    whose = ""
    if owners and set(owners) != set(sections()[key.rpartition(".")[0]].parts):
        whose = f" ({', '.join(owners)})"
    return option.help + whose + (f"; {option.range}" if option.range else "")


if __name__ == "__main__":
    print(key_table(), end="")
