"""What a run was made by."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Versions and git state that a number of this run depends on."""
    import numpy
    import torch

    import metacal

    known = {
        "metacal": metacal.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not all data and models need it
        known["torchvision"] = importlib.metadata.version("torchvision")  # importing it takes over a second
    if commit := _git_state(Path(metacal.__file__).parent):
        known["git"] = commit
    return known


def _git_state(folder: Path) -> str | None:
    """The commit of the checkout that holds `folder`, with ``+changes`` when it is not clean; None outside one."""
    if not (folder.parent / ".git").exists():
        return None
    try:
        describe = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+changes", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return describe.stdout.strip() or None
