"""The YAML files that come with the package: a folder for each group of a run's config, and the studies."""

from __future__ import annotations

from pathlib import Path

__all__ = ["comment_of", "config_dir"]


def config_dir() -> Path:
    """The folder of the YAML groups, in the checkout or in the installed wheel."""
    return Path(__file__).parent


def comment_of(file: Path) -> str:
    """What a YAML file says of itself: the first paragraph of the comment at its top, on one line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or (lines and not text):
            break
        if text and not text.startswith("@package"):
            lines.append(text)
    return " ".join(lines)
