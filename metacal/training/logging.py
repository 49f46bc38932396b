"""What a run tells: metrics.jsonl, the sinks of `log=[…]`, and lines or a live bar on the console."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from metacal.config import Config
from metacal.errors import InputError, RunError, note
from metacal.report.cells import in_words
from metacal.runs.folder import RunFolder, line_digest, mark_changed, read_metrics
from metacal.training.sinks import Histogram, Sink, open_sink

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURE_SHARE", "ConsoleLog", "RunLog"]

FIGURE_SHARE = 0.01  # of a run's time for the figures that it draws while it trains
_FIGURE_SECONDS = 0.25  # taken for the first one, when none has been timed


class RunLog:
    """Numbers to metrics.jsonl in the run folder and to the run's sinks; nothing at all when `folder` is None.

    A line of metrics.jsonl is ``{"step": …, "epoch": …, "split": …, name: value, …}``; the same value is called
    ``split/name`` in the sinks. Values that are not finite become null, since JSON has no NaN.

    A resumed run logs again what it had logged after its checkpoint. metrics.jsonl and TensorBoard's file are cut back
    to the checkpoint first. A service is given all of metrics.jsonl and what follows, and takes what it does not have.

    Args:
        step: that the run starts or goes on at.
        resume: what `state_dict` gave at that step; None starts anew.
        sinks: their names, as in `log=[…]`.
    """

    def __init__(
        self,
        folder: Path | None,
        step: int = 0,
        resume: Mapping[str, Any] | None = None,
        sinks: Sequence[str] = ("tensorboard",),
    ) -> None:
        self.history: list[dict[str, float]] = []  # what each validation logged, in memory
        self.figures_wait = False  # figures were due and too dear
        self._folder = None if folder is None else RunFolder(folder)
        self._sinks: dict[str, Sink] = {}
        self._file: Any = None
        self._digests: list[str] = []  # of the lines of metrics.jsonl, for the next checkpoint
        self._finished = False
        self._began, self._drawing, self._drawn = time.perf_counter(), 0.0, 0
        if self._folder is None:
            return
        if resume is None:
            self._folder.metrics.write_bytes(b"")
        else:
            self._go_back(self._folder, resume)
        self._file = open(self._folder.metrics, "a", buffering=1)  # noqa: SIM115 (closed by close)
        try:
            for name in dict.fromkeys(sinks):
                self._sinks[name] = open_sink(name, self._folder, step, resume)
        except InputError:
            self.close()
            raise

    def _go_back(self, folder: RunFolder, state: Mapping[str, Any]) -> None:
        """To what `state_dict` saw. What was logged after it goes, since it is logged again."""
        path = folder.metrics
        with open(path, "ab") as file:
            lost = state["metrics_bytes"] - file.tell()
            file.truncate(min(state["metrics_bytes"], file.tell()))
        with open(path, "r+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
        if lost > 0:
            note(f"{path} has lost its last {lost} bytes: what they held is missing from the curves")
        changed = mark_changed(path, set(state["metrics_lines"])) if "metrics_lines" in state else []
        if changed:
            numbers = ", ".join(map(str, changed))
            note(f"{path}: line {numbers} has changed since it was written: the curves leave out what it holds")
        if damaged := [number for number in read_metrics(path)[1] if number not in changed]:
            note(f"{path}: line {', '.join(map(str, damaged))} cannot be read: the curves lack what they hold")
        self._digests = [line_digest(text) for text in path.read_bytes().split(b"\n")[:-1]]
        if "figures_wait" not in state:  # of an older run
            return
        self.figures_wait = state["figures_wait"]
        self._began -= state["elapsed"]
        self._drawing, self._drawn = state["drawing"], state["drawn"]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on logging as if it had never stopped; empty without a folder.

        All that was logged until now is on its way to the disk when this returns.
        """
        if self._folder is None or self._file is None:
            return {}
        self._file.flush()
        state = {
            "metrics_bytes": self._file.tell(),
            "metrics_lines": list(self._digests),
            "figures_wait": self.figures_wait,
            "elapsed": time.perf_counter() - self._began,
            "drawing": self._drawing,
            "drawn": self._drawn,
        }
        for sink in self._sinks.values():
            state |= sink.state_dict()
        return state

    def scalars(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Log ``split/name`` → value."""
        if self._file is None or not values:
            return
        by_split: dict[str, dict[str, float | None]] = {}
        for name, value in values.items():
            split, _, measure = name.partition("/")
            by_split.setdefault(split, {})[measure] = value if math.isfinite(value) else None
        try:
            for split, measures in by_split.items():
                line = json.dumps({"step": step, "epoch": epoch, "split": split, **measures})
                self._file.write(line + "\n")
                self._digests.append(line_digest(line.encode()))
            self._tell(lambda sink: sink.scalars(values, step, epoch))
        except OSError as error:
            raise RunError(f"{self._file.name} could not be written: {error.strerror}") from error

    def _tell(self, what: Callable[[Sink], Any]) -> None:
        """Tell every sink. A service that fails is told nothing more, and the run goes on without it."""
        for name, sink in list(self._sinks.items()):
            try:
                what(sink)
            except Exception as error:  # whatever the client of a service may raise
                if sink.in_folder:
                    raise
                del self._sinks[name]
                note(f"log=[{name}] failed: {error}; the run goes on without it, and metrics.jsonl has every number")

    def histogram(
        self, name: str, values: torch.Tensor, step: int, low: float | None = None, high: float | None = None
    ) -> None:
        """The distribution of `values` in 50 bins from `low` to `high`, or over their own range.

        The number of bins is fixed: rules that derive it from the data take millions for a few outliers.
        """
        if not self._sinks or not values.numel() or not bool(torch.isfinite(values).all()):
            return
        numbers = values.detach().double().flatten().cpu().numpy()
        low, high = (float(numbers.min()) if low is None else low), (float(numbers.max()) if high is None else high)
        if not low < high:
            low, high = low - 0.5, low + 0.5
        histogram = Histogram(numbers, *np.histogram(numbers, 50, (low, high)))
        self._tell(lambda sink: sink.histogram(name, histogram, step))

    def figures(self, draw: Mapping[str, Callable[[], Figure]], step: int, share: float | None = None) -> None:
        """Draw figures, by name.

        With `share`, only if drawing has taken and will take less than this share of the time since the run began;
        otherwise `figures_wait` is true until it does.
        """
        if not self._sinks:
            return
        each = self._drawing / self._drawn if self._drawn else _FIGURE_SECONDS
        expected = self._drawing + each * len(draw)
        self.figures_wait = share is not None and expected > share * (time.perf_counter() - self._began)
        if self.figures_wait:
            return
        for name, figure in draw.items():
            began = time.perf_counter()
            self.figure(name, figure(), step)
            self._drawing += time.perf_counter() - began
            self._drawn += 1

    def figure(self, name: str, figure: Figure, step: int, file: Path | None = None) -> None:
        """Log `figure` as an image, and write it to `file`, a PNG. It is rendered here, once and without pyplot."""
        if not self._sinks and file is None:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
        if file is not None:
            from matplotlib.image import imsave

            imsave(file, pixels, dpi=figure.dpi)
        self._tell(lambda sink: sink.image(name, pixels, step))

    def text(self, name: str, text: str, step: int = 0) -> None:
        self._tell(lambda sink: sink.text(name, text, step))

    def start(self, config: Config, command: str = "") -> None:
        """What this run is, for the sinks that do not know it, and for services the numbers that they do not have."""
        self._tell(lambda sink: None if sink.resumed else sink.start(config, command))
        if self._folder is not None and any(not sink.in_folder for sink in self._sinks.values()):
            lines = read_metrics(self._folder.metrics)[0]
            self._tell(lambda sink: None if sink.in_folder else _repeat(lines, sink))

    def finish(self, values: Mapping[str, Any], step: int) -> None:
        """The run is over, and `values` are its summary."""
        self._tell(lambda sink: sink.finish(values, step))
        self._finished = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._tell(lambda sink: sink.close(self._finished))
            self._file, self._sinks = None, {}


def _repeat(lines: Sequence[Mapping[str, Any]], sink: Sink) -> None:
    """The numbers of a metrics.jsonl, which leaves open whether one that is missing was infinite or not a number."""
    for line in lines:
        values = {f"{line['split']}/{k}": v for k, v in line.items() if k not in ("step", "epoch", "split")}
        sink.scalars({tag: value for tag, value in values.items() if value is not None}, line["step"], line["epoch"])


class ConsoleLog:
    """A live bar on a terminal; elsewhere about ten plain lines a run, so that a log file stays readable.

    Both say how many epochs are done, and the last validation's numbers in the units of tables.
    """

    def __init__(self, title: str, total_steps: int, epochs: int, enabled: bool = True) -> None:
        self._title, self._total, self._epochs, self._enabled = title, total_steps, epochs, enabled
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._below = Text()  # a line of its own: a narrow terminal cuts off neither

    def start(self, step: int) -> None:
        if not self._enabled:
            return
        if self._console.is_terminal:
            self._task = self._bar.add_task(self._title, total=self._total, completed=step)
            self._below.plain = f"epoch {step * self._epochs // max(1, self._total)}/{self._epochs}"
            self._live = Live(Group(self._bar, self._below), console=self._console)
            self._live.start()
        else:
            self.line(
                f"{self._title}: {self._epochs} epochs, {self._total} steps" + (f", from step {step}" * (step > 0))
            )

    def step(self, step: int) -> None:
        if self._live is not None:
            self._bar.update(self._task, completed=step)

    def epoch(self, epoch: int, values: Mapping[str, float], names: Sequence[str]) -> None:
        """Show the named measures of val after `epoch` (counted from 1)."""
        text = f"epoch {epoch}/{self._epochs}  val: {in_words(values, names)}"
        if self._live is not None:
            self._below.plain = text
        elif self._enabled and (epoch % max(1, round(self._epochs / 10)) == 0 or epoch == self._epochs):
            self.line(f"{self._title}: {text}")

    def line(self, text: str, always: bool = False) -> None:
        """always: also where the progress is not shown."""
        if self._enabled or always:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
