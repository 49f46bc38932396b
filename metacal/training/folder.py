"""The run folder: its name, what state it is in, and the small files in it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metacal.config import Config
from metacal.errors import InputError, require
from metacal.training.checkpoint import write_atomically

__all__ = ["NOT_IN_NAME", "RunFolder", "check_run", "differing_keys", "folder_of", "run_name", "versions"]

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
    "baselines",
    "method",
    "checkpoint_every",
}


def run_name(method: str, overrides: Sequence[str]) -> str:
    """The folder name that tells a run from its siblings: the method, then the overridden keys in order.

    Keys that do not change what is computed are left out, and of paths all but the last part. Long names are cut and
    closed with a hash, so that they stay valid on every file system and distinct.
    """
    kept = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key not in NOT_IN_NAME and key.split(".")[0] != "monitor":
            kept.append(f"{key}={Path(value).name if key.endswith('path') else value}")
    kept.sort()
    name = ",".join([method, *kept])
    safe = re.sub(r"[^\w.,=+\[\]{}:-]+", "_", name)
    if len(safe) > 120 or safe != name:
        safe = f"{safe[:110]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return safe


class RunFolder:
    """A run's folder: config.yaml, metrics.jsonl, summary.json, checkpoints/, predictions/, figures/."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.last = self.path / "checkpoints" / "last.pt"
        self.best = self.path / "checkpoints" / "best.pt"

    @property
    def finished(self) -> bool:
        return self.summary.is_file()

    @property
    def interrupted(self) -> bool:
        return self.last.is_file() and not self.finished

    def create(self) -> None:
        """Make the folder and prove that it can be written.

        Raises:
            InputError: with the reason that the system gives.
        """
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            probe = self.path / ".write-test"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"run folder {self.path} cannot be written: {error.strerror or error}; choose another with "
                "runs=FOLDER or run_dir=FOLDER"
            ) from None

    def clear(self) -> None:
        """Remove what an earlier run left here, and nothing else that may lie in the folder."""
        for pattern in (
            "config.yaml",
            "metrics.jsonl",
            "summary.json",
            "events.out.tfevents.*",
            "checkpoints/*.pt",
            "predictions/*.npz",
            "figures/*.png",
        ):
            for file in self.path.glob(pattern):
                file.unlink()

    def write_config(self, text: str) -> None:
        write_atomically(self.config, lambda file: file.write(text.encode()))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """As JSON, which has no NaN and no infinity: such values become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
        text = json.dumps(finite, indent=2, allow_nan=False)
        write_atomically(self.summary, lambda file: file.write(text.encode() + b"\n"))

    def read_summary(self) -> dict[str, Any]:
        return json.loads(self.summary.read_text())


def folder_of(config: Config, overrides: Sequence[str]) -> RunFolder:
    """`config.run_dir`, or the deterministic runs/<name>/<method and overrides>/seed<seed>."""
    if config.run_dir is not None:
        return RunFolder(config.run_dir)
    return RunFolder(Path(config.runs) / config.name / run_name(config.method, overrides) / f"seed{config.seed}")


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys whose values differ between two resolved configs, those of `NOT_IN_NAME` left out."""
    keys: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        if not prefix and key in NOT_IN_NAME - {"seed", "method"}:
            continue
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            keys += differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(prefix + key)
    return keys


def versions() -> dict[str, str]:
    """Versions and git state that a number of this run depends on."""
    import numpy
    import torch
    import torchvision

    import metacal

    found = {
        "metacal": metacal.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
    }
    if commit := _git_state(Path(metacal.__file__).parent):
        found["git"] = commit
    return found


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


def check_run(path: str | Path) -> RunFolder:
    """The run folder at `path`, or an error that says what is missing there."""
    folder = RunFolder(path)
    require(folder.path.is_dir(), f"run folder {path} does not exist")
    require(folder.config.is_file(), f"{path} is no run folder: it has no config.yaml")
    return folder
