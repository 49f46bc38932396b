"""How far runs are, read from their folders, and one table of them: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from metacal.report.cells import column_of, in_words
from metacal.runs.folder import read_line
from metacal.studies.grid import Job

__all__ = ["Board", "RunState", "choose_rows", "progress_table"]

SHOWN = ("nll", "accuracy", "ece")
STYLES = {"waiting": "dim", "running": "cyan", "done": "green", "failed": "bold red", "stopped": "yellow"}
# Which rows stay when a terminal is too low for all of them.
_PRIORITY = {"running": 0, "failed": 1, "stopped": 2, "done": 3, "waiting": 4}


@dataclass(eq=False)
class RunState:
    """A run of a grid as its folder tells it.

    Attributes:
        state: waiting | running | done | failed | stopped.
        epoch: how many epochs are done.
        values: NLL (nats), accuracy and ECE (fractions) of the latest validation.
        seconds: of its process; of a run that was finished before, its training time.
    """

    job: Job
    state: str = "waiting"
    epoch: int = 0
    values: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    status: int | None = None
    started: float | None = None  # time.time() of its process
    ended: float | None = None
    _step: int = 0
    _per_epoch: float = 0.0  # steps; known after the first validation
    _offset: int = 0
    _first: tuple[float, float] | None = None  # (time, fraction done) when this process first told of progress
    _latest: tuple[float, float] | None = None

    def start(self, now: float) -> None:
        self.state, self.started = "running", now

    def end(self, state: str, status: int, now: float) -> None:
        self.state, self.status, self.ended = state, status, now
        self.seconds = 0.0 if self.started is None else now - self.started

    def read(self, now: float) -> None:
        """Take in what metrics.jsonl has got since the last call."""
        if self.state == "running" and self.started is not None:
            self.seconds = now - self.started
        file = self.job.folder.metrics
        try:
            stat = file.stat()
            if self.job.config.overwrite and (self.started is None or stat.st_mtime < self.started):
                return  # of the run that this one will replace
            if stat.st_size < self._offset:  # a resumed run cuts what came after its checkpoint
                self._offset, self._step, self.epoch, self.values = 0, 0, 0, {}
            if stat.st_size == self._offset:
                return
            with open(file, "rb") as lines:
                lines.seek(self._offset)
                chunk = lines.read()
        except OSError:  # not there yet
            return
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.split(b"\n"):
            self._take(text)
        if self.state == "running" and self._per_epoch:
            self._latest = (now, self.fraction)
            self._first = self._first or self._latest

    def _take(self, text: bytes) -> None:
        line = read_line(text)
        if line is None:  # a killed run left it half written
            return
        self._step, self.epoch = line["step"], line["epoch"]
        if line["split"] == "val" and "nll" in line:
            self.values = {name: line[name] for name in SHOWN if line.get(name) is not None}
            self._per_epoch = self._step / max(self.epoch, 1)

    @property
    def fraction(self) -> float:
        """Of the training that is done."""
        if not self._per_epoch:
            return 0.0
        return min(1.0, self._step / (self._per_epoch * self.job.config.epochs))

    def left(self, now: float) -> float | None:
        """Seconds that a running run will still take at the pace so far; None while that is not known."""
        if self.state != "running" or self._first is None or self._latest is None:
            return None
        (t0, f0), (t1, f1) = self._first, self._latest
        if f1 <= f0:
            return None
        return max(0.0, (1 - f1) * (t1 - t0) / (f1 - f0) - (now - t1))


def choose_rows(states: Sequence[RunState], room: int) -> list[RunState]:
    """At most `room` of `states`, in their order: what runs or failed first, then the latest done, then the next."""
    if len(states) <= room:
        return list(states)

    def key(item: tuple[int, RunState]) -> tuple[int, float]:
        place, s = item
        return _PRIORITY[s.state], -(s.ended or 0.0) if s.state == "done" else place

    chosen = {id(s) for _, s in sorted(enumerate(states), key=key)[: max(room, 1)]}
    return [s for s in states if id(s) in chosen]


def progress_table(states: Sequence[RunState], now: float, room: int | None = None) -> Table:
    """A row for each run: its state, epochs, latest validation, minutes and minutes left."""
    rows = list(states) if room is None else choose_rows(states, room)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    table.add_column("state")
    columns = [column_of(name) for name in SHOWN]
    for name in ("epoch", *(f"val {column.header}" for column in columns), "minutes", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in rows:
        left = s.left(now)
        table.add_row(
            Text(s.job.title),
            Text(s.state, style=STYLES[s.state]),
            f"{s.epoch}/{s.job.config.epochs}" if s.epoch or s.state != "waiting" else "",
            *(column.show(s.values[column.name]) if column.name in s.values else "" for column in columns),
            f"{s.seconds / 60:.1f}" if s.seconds else "",
            f"{left / 60:.1f}" if left is not None else "",
        )
    return table


def caption(states: Sequence[RunState], n_jobs: int, now: float, began: float) -> str:
    """``12 runs: 3 done, 2 running, 7 waiting; 4.1 min so far, about 9 min left``."""
    counts = Counter(s.state for s in states)
    runs = "run" if len(states) == 1 else "runs"
    text = f"{len(states)} {runs}: " + ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])
    text += f"; {(now - began) / 60:.1f} min so far"
    lefts = [s.left(now) for s in states if s.state == "running"]
    known = [left for left in lefts if left is not None]
    lengths = [s.seconds for s in states if s.state == "done" and s.started is not None]
    lengths += [s.seconds + left for s in states if (left := s.left(now)) is not None]
    if not lengths or not counts["running"]:
        return text
    length = sum(lengths) / len(lengths)
    unknown = sum(max(0.0, length - s.seconds) for s in states if s.state == "running" and s.left(now) is None)
    left = (sum(known) + unknown + length * counts["waiting"]) / max(1, min(n_jobs, len(lefts) + counts["waiting"]))
    return text + f", about {left / 60:.0f} min left"


class Board:
    """The states of a grid's runs for as long as a `with` block lasts, then their table once more.

    On a terminal the table is live; elsewhere a line is written when a run starts or ends, and one a minute.
    """

    def __init__(self, states: Sequence[RunState], n_jobs: int, console: Console | None = None) -> None:
        self.states, self.n_jobs = states, n_jobs
        self.console = console or Console()
        if console is None and not self.console.is_terminal:
            self.console = Console(width=160)  # a log file has no edge
        self._began = self._shown = time.time()
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> Board:
        self.line(caption(self.states, self.n_jobs, self._began, self._began) + f"; {self.n_jobs} at a time")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        now = time.time()
        for s in self.states:
            s.read(now)
        self.console.print(progress_table(self.states, now))
        self.line(caption(self.states, self.n_jobs, now, self._began))

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def event(self, s: RunState) -> None:
        """Tell that a run started or ended, where there is no live table to see it in."""
        if self._live is not None:
            return
        text = f"{s.job.title}: {s.state}"
        if s.state == "running":
            text += f", from epoch {s.epoch}/{s.job.config.epochs}" if s.epoch else ""
        else:
            text += f" (status {s.status})" * (s.state == "failed") + f" after {s.seconds / 60:.1f} min"
            text += f"  val: {in_words(s.values, SHOWN)}" if s.values else ""
        self.line(text)

    def refresh(self) -> None:
        """Read the running runs' folders and show what is new, at most once a second."""
        now = time.time()
        if now - self._shown < (1 if self._live is not None else 60):
            return
        self._shown = now
        for s in self.states:
            if s.state == "running":
                s.read(now)
        text = caption(self.states, self.n_jobs, now, self._began)
        if self._live is not None:
            table = progress_table(self.states, now, room=self.console.height - 4)
            self._live.update(Group(table, Text(text, style="bold")), refresh=True)
        else:
            running = [f"{s.job.title} {s.epoch}/{s.job.config.epochs}" for s in self.states if s.state == "running"]
            self.line(f"{text} ({'; '.join(running)})")
