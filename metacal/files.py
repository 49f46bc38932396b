"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from metacal.errors import RunError

__all__ = ["write_atomically"]


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write(file)` on a temporary file in the folder of `path`, flush it to disk, then rename it to `path`.

    A crash at any moment leaves either the old file or the new one, whole.

    Raises:
        RunError: when the disk is full or the folder cannot be written; the old file is kept.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError when a write comes up short
        temporary.unlink(missing_ok=True)
        kept = " (the one written before is kept)" if path.exists() else ""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise RunError(f"{path} could not be written: {reason}{kept}") from error
