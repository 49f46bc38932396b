"""Where a run lies: a folder whose name tells what was asked for, the same for the same words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from metacal.config import Config
from metacal.errors import require
from metacal.runs.folder import RunFolder

__all__ = ["NOT_IN_NAME", "folder_of", "run_name", "says_where"]

# Keys that say where and how a run is watched, not what it computes: they do not enter its name.
NOT_IN_NAME = {
    "name",
    "seed",
    "runs",
    "run_dir",
    "resume",
    "overwrite",
    "device",
    "threads",
    "progress",
    "log",
    "baselines",
    "method",
    "checkpoint_every",
}


def says_where(key: str) -> bool:
    """Whether a key says where and how a run is made, and not what it is: one that goes on may have another value."""
    launches = key.startswith("launch.") and key != "launch.batchnorm"  # which changes what is computed
    return launches or key in NOT_IN_NAME - {"method", "seed"}


def run_name(method: str, overrides: Sequence[str]) -> str:
    """The folder name that tells a run from its siblings: the method, then the overridden keys in order.

    Keys that do not change what is computed are left out, and of paths all but the last part. Long names are cut and
    closed with a hash, so that they stay valid on every file system and distinct.
    """
    words = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key not in NOT_IN_NAME and not says_where(key) and key.split(".")[0] != "monitor":
            words.append(f"{key}={Path(value).name if key.endswith('path') else value}")
    words.sort()
    name = ",".join([method, *words])
    safe = re.sub(r"[^\w.,=+\[\]{}:-]+", "_", name)
    if len(safe) > 120 or safe != name:
        safe = f"{safe[:110]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return safe


def folder_of(config: Config, overrides: Sequence[str], config_file: str | None = None) -> RunFolder:
    """`config.run_dir`, or the deterministic runs/<name>/<method and overrides>/seed<seed>.

    Of a config file the name takes the part of the run that it lies in, or else a hash of its text.

    Raises:
        InputError: a name that would lead out of `config.runs`.
    """
    if config.run_dir is not None:
        return RunFolder(config.run_dir)
    base = config.method
    if config_file is not None:
        file = Path(config_file).resolve()
        if file.parent.name.startswith("seed"):
            base = file.parent.parent.name
        else:
            base += f",{file.stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    inside = f"{config.name}/{run_name(base, overrides)}"
    require(
        inside.isprintable() and not {"", ".", ".."}.intersection(re.split(r"[/\\]", inside)),
        f"name={config.name} must name a folder inside runs={config.runs} (another place: runs=FOLDER), got {inside!r}",
    )
    return RunFolder(Path(config.runs) / inside / f"seed{config.seed}")
