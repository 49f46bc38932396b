"""Files that are whole or not there, and arrays in files."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from metacal.errors import RunError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["UNREADABLE", "arrays_in", "write_atomically"]

UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, TypeError, AttributeError, RuntimeError)
"""What `arrays_in` raises for a file that is damaged or is none of arrays; ValueError also for one of objects."""


def arrays_in(path: Path, wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by their names, the array of an .npy file by the name ""; nothing is unpickled.

    wanted: names of the arrays to read; the others are empty ones, so that they can be named. None: all.
    """
    import numpy as np  # not needed to write

    opened = np.load(path, allow_pickle=False)
    if isinstance(opened, np.ndarray):
        return {"": opened}
    with opened as file:
        return {key: file[key] if wanted is None or key in wanted else np.empty(0) for key in file.files}


def write_atomically(path: Path, write: Callable[[BinaryIO], Any], durable: bool = True) -> None:
    """Call `write(file)` on a temporary file in the folder of `path`, flush it to disk, then rename it to `path`.

    A crash at any moment leaves either the old file or the new one, whole.
    durable: wait for the disk, without which a crash of the whole machine may leave a damaged file.

    Raises:
        RunError: when the disk is full or the folder cannot be written; the old file is kept.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w+b") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError when a write comes up short
        temporary.unlink(missing_ok=True)
        kept = " (the one written before is kept)" if path.exists() else ""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise RunError(f"{path} could not be written: {reason}{kept}") from error
