"""The format of a run folder: the names of its files, how each is written and read, and what state a run is in.

config.yaml              every key; the copy in each checkpoint counts where they differ
command.txt              what the run was started with
metrics.jsonl            a line for each logged step: {"step": …, "epoch": …, "split": …, name: number or null, …}; one
                         that was found to have changed since it was written begins with # in place of {
summary.json             written last, with the SHA-256 of itself and of metrics.jsonl under "digests"
model.pt                 the calibrated model
checkpoints/             last.pt, best.pt, and epochNNNN.pt of those that are kept
predictions/             val.npz, test.npz of the selected epoch; val_last.npz, test_last.npz of the last one;
                         measured.npz, what comparisons measured of them, which they need not measure again
figures/                 reliability.png, shift.png
shift.json               what `metacal evaluate --shift` measured
events.out.tfevents.*    TensorBoard's
sinks.json               the run's id at each service that it is logged to
log.txt                  the output of a run that a sweep or a study started
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metacal.config.files import read_yaml
from metacal.errors import InputError, require
from metacal.files import write_atomically
from metacal.jsonio import to_json
from metacal.runs import checkpoint

__all__ = ["RunFolder", "check_run", "line_digest", "mark_changed", "read_line", "read_metrics", "series_of"]

DIGESTS = "digests"


class RunFolder:
    """The folder of a run at `path`; the files are where the module's docstring says."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.command = self.path / "command.txt"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.model = self.path / "model.pt"
        self.shift = self.path / "shift.json"
        self.sinks = self.path / "sinks.json"
        self.log = self.path / "log.txt"
        self.figures = self.path / "figures"
        self.measured = self.path / "predictions" / "measured.npz"
        self.last = self.checkpoint("last")
        self.best = self.checkpoint("best")

    def checkpoint(self, name: str | int) -> Path:
        """Of a name, or of the weights that are kept after an epoch."""
        return self.path / "checkpoints" / f"{name if isinstance(name, str) else f'epoch{name:04d}'}.pt"

    def checkpoints(self) -> list[Path]:
        return sorted(self.last.parent.glob("*.pt"))

    def predictions(self, split: str, epoch: str = "selected") -> Path:
        """Of `split`, at the "selected" or the "last" epoch."""
        return self.path / "predictions" / f"{split}{'_last' if epoch == 'last' else ''}.npz"

    def event_files(self) -> list[Path]:
        """TensorBoard's, the oldest first."""
        return sorted(self.path.glob("events.out.tfevents.*"))

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
        files = self.config.is_file() or any(self.last.parent.glob("*"))
        if files and not ours and self.read_checkpoint() is None:
            raise InputError(f"{self.path} holds files that are not a metacal run's; choose another folder")
        try:
            self.last.parent.mkdir(parents=True, exist_ok=True)
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

    @property
    def in_use(self) -> bool:
        """Whether another process works here now; always false on a system without such locks."""
        if not (self.path / ".lock").is_file():
            return False
        try:
            with self.locked():
                return False
        except InputError:
            return True

    def clear(self) -> None:
        """Remove what an earlier run left here: the files that a run writes, no others."""
        files = [self.config, self.command, self.metrics, self.summary, self.model, self.shift, self.sinks]
        files += [*self.event_files(), *self.checkpoints()]
        files += [*self.path.glob("predictions/*.npz"), *self.figures.glob("*.png")]
        for file in files:
            file.unlink(missing_ok=True)

    def write_config(self, text: str) -> None:
        _write(self.config, text)

    def write_command(self, command: str) -> None:
        """Keep what the run was started with, in the shell's quotes, for the summary that it writes at its end."""
        _write(self.command, command + "\n")

    def read_command(self) -> str | None:
        """What the run was started with; None where nothing says it."""
        return self.command.read_text(errors="replace").rstrip("\n") if self.command.is_file() else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary with the digest of the log, which is at its end, and with its own."""
        whole = json.loads(to_json(summary)) | {DIGESTS: {self.metrics.name: self._metrics_digest()}}
        whole[DIGESTS][self.summary.name] = _digest(to_json(whole).encode())
        _write(self.summary, to_json(whole) + "\n")

    def _metrics_digest(self) -> str | None:
        return _digest(self.metrics.read_bytes()) if self.metrics.is_file() else None

    def metrics_changed(self, summary: Mapping[str, Any]) -> bool:
        """Whether metrics.jsonl is not the one that was there when the summary was written; older runs cannot tell."""
        was = summary.get(DIGESTS, {}).get(self.metrics.name)
        return was is not None and was != self._metrics_digest()

    def write_shift(self, measured: Mapping[str, Any]) -> None:
        _write(self.shift, to_json(measured) + "\n")

    def read_sinks(self) -> dict[str, Any]:
        """What `write_sinks` wrote; empty where there is nothing that can be read."""
        try:
            sinks = json.loads(self.sinks.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return sinks if isinstance(sinks, dict) else {}

    def write_sinks(self, more: Mapping[str, Any]) -> None:
        """Keep this beside what is there."""
        _write(self.sinks, to_json({**self.read_sinks(), **more}) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """What the run wrote when it ended.

        Raises:
            InputError: there is no summary, or it is damaged: its numbers do not give the digest written with them.
        """
        try:
            summary = json.loads(self.summary.read_bytes())
            if DIGESTS in summary:  # an older run's has none
                digest = summary[DIGESTS].pop(self.summary.name)
                require(digest == _digest(to_json(summary).encode()), "its numbers do not give its digest")
            summary["method"], int(summary["seed"]), summary["data"]["fingerprint"]
        except FileNotFoundError:
            raise InputError(f"{self.path} has no summary.json: the run has not ended") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{self.summary} is damaged or not that of a run") from None
        return summary

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, or else the best; None where neither can be read."""
        for file in (self.last, self.best):
            try:
                return checkpoint.load(file)
            except InputError:
                continue
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(file: Path, text: str) -> None:
    write_atomically(file, lambda handle: handle.write(text.encode()))


def _keys_of(file: Path) -> set[str]:
    """The top-level keys of a YAML file; none if it is not one."""
    try:
        return set(read_yaml(file))
    except InputError:
        return set()


_NUMBERS = (int, float)  # int | float would be made anew for each of millions of values


def read_line(text: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl: `step`, `epoch`, `split`, and numbers or None by name; None where it cannot be read."""
    try:
        line = json.loads(text.decode())  # of bytes it would guess the encoding, which takes as long as the rest
        split = line.pop("split")
        good = isinstance(split, str) and isinstance(line["step"], int) and isinstance(line["epoch"], int)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    good = good and all(value is None or isinstance(value, _NUMBERS) for value in line.values())
    return {**line, "split": split} if good else None


def line_digest(text: bytes) -> str:
    """Of a line of metrics.jsonl, without its end: 64 bits of its SHA-256, in hexadecimal digits."""
    return _digest(text)[:16]


def mark_changed(file: Path, digests: Collection[str]) -> list[int]:
    """Make a comment of every line of a metrics.jsonl that can be read and has none of these digests.

    No line gets longer, since checkpoints know how long the file was. Returns the numbers (from 1) of these lines.
    """
    texts = file.read_bytes().split(b"\n")
    changed = [
        number for number, text in enumerate(texts) if read_line(text) is not None and line_digest(text) not in digests
    ]
    for number in changed:
        texts[number] = b"#" + texts[number][1:]
    if changed:
        write_atomically(file, lambda handle: handle.write(b"\n".join(texts)))
    return [number + 1 for number in changed]


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


def series_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """The lines of a metrics.jsonl as ``split/measure`` -> step -> value; ``split/epoch`` are the epochs done.

    Names of older runs are those of today.
    """
    series: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "split") and value is not None:
                full = f"{line['split']}/{name}"
                series.setdefault(_RENAMED.get(full, full), {})[line["step"]] = float(value)
    return series


# What older runs called a value.
_RENAMED = {"margin/gamma_min": "margin/least_margin"} | {
    f"{split}/certificate_gamma_min": f"{split}/certificate_least_margin" for split in ("train_subset", "val_subset")
}


def check_run(path: str | Path) -> RunFolder:
    """The run folder at `path`, or an error that says what is missing there."""
    folder = RunFolder(path)
    require(folder.path.is_dir(), f"run folder {path} does not exist")
    require(folder.config.is_file(), f"{path} is no run folder: it has no config.yaml")
    return folder
