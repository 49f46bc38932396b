"""The run folder: its name, what state it is in, and the small files in it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from metacal.config import Config
from metacal.config.compose import parse_config, read_config
from metacal.config.files import read_yaml
from metacal.errors import InputError, note, require
from metacal.jsonio import to_json
from metacal.training import checkpoint
from metacal.training.checkpoint import write_atomically

__all__ = [
    "NOT_IN_NAME",
    "RunFolder",
    "check_run",
    "differing_keys",
    "folder_of",
    "read_line",
    "read_metrics",
    "recorded_config",
    "require_same_config",
    "run_name",
    "versions",
]

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
    """A run's folder: config.yaml, command.txt, metrics.jsonl, summary.json, model.pt, and the folders checkpoints,
    predictions and figures.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.command = self.path / "command.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.model = self.path / "model.pt"
        self.last = self.path / "checkpoints" / "last.pt"
        self.best = self.path / "checkpoints" / "best.pt"

    @property
    def finished(self) -> bool:
        """Whether the run ended and its summary can be read; a damaged one is made again from the last checkpoint."""
        try:
            self.read_summary()
        except InputError:
            return False
        return True

    @property
    def interrupted(self) -> bool:
        return self.last.is_file() and not self.finished

    @property
    def taken(self) -> bool:
        """Whether a run ended here, even if its summary is damaged, or can be gone on with."""
        return self.summary.exists() or self.last.is_file()

    def create(self) -> None:
        """Make the folder and prove that it can be written.

        Raises:
            InputError: with the reason that the system gives, or because somebody else's files lie there.
        """
        ours = {"method", "gamma", "meta"} <= _keys_of(self.config)
        files = self.config.is_file() or any((self.path / "checkpoints").glob("*"))
        if files and not ours and self.read_checkpoint() is None:
            raise InputError(f"{self.path} holds files that are not a metacal run's; choose another folder")
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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working in this folder for the block.

        Raises:
            InputError: when another one does.
        """
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.path} is in use: another process trains there") from None
            yield

    def clear(self) -> None:
        """Remove what an earlier run left here: the files that a run writes, no others."""
        for pattern in (
            "config.yaml",
            "command.txt",
            "metrics.jsonl",
            "summary.json",
            "model.pt",
            "shift.json",
            "events.out.tfevents.*",
            "checkpoints/*.pt",
            "predictions/*.npz",
            "figures/*.png",
        ):
            for file in self.path.glob(pattern):
                file.unlink()

    def write_config(self, text: str) -> None:
        write_atomically(self.config, lambda file: file.write(text.encode()))

    def write_command(self, command: str) -> None:
        """Keep what the run was started with, in the shell's quotes, for the summary that it writes at its end."""
        write_atomically(self.command, lambda file: file.write(command.encode() + b"\n"))

    def read_command(self) -> str | None:
        """What the run was started with; None where nothing says it."""
        return self.command.read_text().rstrip("\n") if self.command.is_file() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        text = to_json(summary)
        write_atomically(self.summary, lambda file: file.write(text.encode() + b"\n"))

    def read_summary(self) -> dict[str, Any]:
        """What the run wrote when it ended.

        Raises:
            InputError: there is no summary, or it is damaged.
        """
        try:
            summary = json.loads(self.summary.read_bytes())
            summary["method"], int(summary["seed"]), summary["data"]["fingerprint"]
        except FileNotFoundError:
            raise InputError(f"{self.path} has no summary.json: the run has not ended") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{self.summary} is damaged or not that of a run") from None
        return summary

    def read_config(self) -> Config:
        """The config in config.yaml.

        Raises:
            InputError: it is damaged.
        """
        missing = _SECTIONS - _keys_of(self.config)
        require(not missing, f"{self.config} is damaged: it has no {', '.join(sorted(missing))}")
        return read_config(self.config)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, or else the best; None where neither can be read."""
        for file in (self.last, self.best):
            try:
                return checkpoint.load(file)
            except InputError:
                continue
        return None


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


_SECTIONS = {"method", "data", "model", "loss", "gamma", "optimizer", "schedule", "meta", "monitor"}  # of every config


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


def recorded_config(folder: RunFolder, state: Mapping[str, Any] | None = None) -> Config:
    """The config that a run was started with: the copy in its checkpoint's `state` before what config.yaml says.

    Where config.yaml cannot be read or says something else than the copy, that is told. Without `state` a checkpoint
    is only looked at if config.yaml cannot be read.

    Raises:
        InputError: neither is there.
    """
    trouble, said = "", None
    try:
        said = folder.read_config()
    except InputError as error:
        trouble, state = str(error), state or folder.read_checkpoint()
    copy = state.get("config") if state is not None else None
    if not copy:  # of a run that is older than these copies
        require(said is not None, f"{trouble}, and no checkpoint of {folder.path} has a copy of it")
        assert said is not None
        return said
    config = parse_config(copy, f"the config in a checkpoint of {folder.path}")
    if said is not None and (keys := differing_keys(asdict(said), asdict(config))):
        trouble = f"{folder.config} was changed or damaged: another {', '.join(keys)}"
    if trouble:
        note(f"{trouble}; the checkpoint's copy of the config is taken")
    return config


def require_same_config(config: Config, folder: RunFolder) -> None:
    """A run is gone on with, or its results reused, only under the config that it was started with.

    Raises:
        InputError: naming the keys that differ.
    """
    own = asdict(config)
    keys = differing_keys(asdict(recorded_config(folder)), own)
    if keys and (state := folder.read_checkpoint()) is not None:  # config.yaml may be damaged
        keys = differing_keys(asdict(recorded_config(folder, state)), own)
    if keys:
        state_of = "a finished" if folder.finished else "an interrupted"
        how = "choose another name=…" if folder.finished else f"go on with it by {shlex.quote(f'resume={folder.path}')}"
        raise InputError(
            f"{folder.path} holds {state_of} run with another {', '.join(keys)}; {how}, or start over with "
            "overwrite=true"
        )


def read_line(text: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl: `step`, `epoch`, `split`, and numbers or None by name; None where it cannot be read."""
    try:
        line = json.loads(text)
        split = line.pop("split")
        good = isinstance(split, str) and isinstance(line["step"], int) and isinstance(line["epoch"], int)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    good = good and all(value is None or isinstance(value, int | float) for value in line.values())
    return {**line, "split": split} if good else None


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines of a metrics.jsonl, and the numbers (from 1) of those that cannot be read; none where there is no file.

    Raises:
        InputError: the file is there and cannot be opened.
    """
    try:
        texts = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    lines = [read_line(text) for text in texts]
    return [line for line in lines if line is not None], [
        number for number, (text, line) in enumerate(zip(texts, lines), 1) if line is None and text.strip()
    ]


def _keys_of(path: Path) -> set[str]:
    """The top-level keys of a YAML file; none if it is not one."""
    try:
        return set(read_yaml(path))
    except InputError:
        return set()


def versions() -> dict[str, str]:
    """Versions and git state that a number of this run depends on."""
    import numpy
    import torch

    import metacal

    found = {
        "metacal": metacal.__version__,
        "torch": torch.__version__,
        "torchvision": importlib.metadata.version("torchvision"),  # importing it takes over a second
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
