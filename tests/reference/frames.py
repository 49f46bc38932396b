"""Which line of the package a stack goes through last."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path

import metacal

__all__ = ["line_of_package"]

_PACKAGE = Path(metacal.__file__).parent


def line_of_package(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """``bilevel/step.py:120`` of the last frame in the package; None without one."""
    files = [(Path(frame.filename), frame.lineno) for frame in frames]
    inside = [f"{file.relative_to(_PACKAGE)}:{line}" for file, line in files if file.is_relative_to(_PACKAGE)]
    return inside[-1] if inside else None
