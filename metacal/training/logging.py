"""What a run tells: metrics.jsonl, TensorBoard's event file, and lines or a live bar on the console."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from metacal.config import Config
from metacal.config.compose import to_yaml
from metacal.errors import RunError, note
from metacal.report.cells import in_words
from metacal.runs.folder import RunFolder, read_metrics
from metacal.training import dashboards

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURE_SHARE", "ConsoleLog", "RunLog"]

FIGURE_SHARE = 0.01  # of a run's time for the figures that it draws while it trains
_FIGURE_SECONDS = 0.25  # taken for the first one, when none has been timed


class RunLog:
    """Numbers to metrics.jsonl and TensorBoard, both in the run folder; nothing at all when `folder` is None.

    A line of metrics.jsonl is ``{"step": …, "epoch": …, "split": …, name: value, …}``; the same value is called
    ``split/name`` in TensorBoard. Values that are not finite become null, since JSON has no NaN.

    Args:
        step: that the run starts or goes on at.
        resume: what `state_dict` gave at that step; None starts anew.
    """

    def __init__(self, folder: Path | None, step: int = 0, resume: Mapping[str, Any] | None = None) -> None:
        self.history: list[dict[str, float]] = []  # what each validation logged, in memory
        self.figures_wait = False  # figures were due and too dear
        self._folder = None if folder is None else RunFolder(folder)
        self._writer: Any = None
        self._file: Any = None
        self._tags: set[str] = set()
        self._described: set[str] = set()  # in this run's event files
        self._layout: Mapping[str, Any] = {}
        self._began, self._drawing, self._drawn = time.perf_counter(), 0.0, 0
        if self._folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # about a second to import

        if resume is None:
            self._folder.metrics.write_bytes(b"")
        else:
            self._go_back(self._folder, resume)
        self._file = open(self._folder.metrics, "a", buffering=1)  # noqa: SIM115 (closed by close)
        # The mark of a start: TensorBoard discards what came later, at a run's second one.
        self._writer = SummaryWriter(str(folder), purge_step=0 if resume is None else step + 1, flush_secs=30)

    def _go_back(self, folder: RunFolder, state: Mapping[str, Any]) -> None:
        """To what `state_dict` saw. What was logged after it goes, since it is logged again: in both files."""
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
        if damaged := read_metrics(path)[1]:
            note(f"{path}: line {', '.join(map(str, damaged))} cannot be read: the curves lack what they hold")
        if "events" not in state:  # of an older run: TensorBoard discards what came later by the mark of the start
            return
        for file in folder.event_files():
            if file.name not in state["events"]:
                file.unlink()
            elif file.stat().st_size > state["events"][file.name]:
                os.truncate(file, state["events"][file.name])
        self._tags, self._described = set(state["tags"]), set(state.get("described", ()))
        self._layout = dashboards.layout(self._tags) if folder.event_files() else {}
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
        self._writer.flush()
        return {
            "metrics_bytes": self._file.tell(),
            "events": {file.name: file.stat().st_size for file in self._folder.event_files()},
            "tags": sorted(self._tags),
            "described": sorted(self._described),
            "figures_wait": self.figures_wait,
            "elapsed": time.perf_counter() - self._began,
            "drawing": self._drawing,
            "drawn": self._drawn,
        }

    def scalars(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Log ``split/name`` → value."""
        if self._file is None or not values:
            return
        by_split: dict[str, dict[str, float | None]] = {}
        for name, value in values.items():
            split, _, measure = name.partition("/")
            by_split.setdefault(split, {})[measure] = value if math.isfinite(value) else None
        try:
            self._arrange(values)
            self._write_scalars(values, step)
            self._write_scalars(dashboards.by_epoch(values), epoch)
            for split, measures in by_split.items():
                self._file.write(json.dumps({"step": step, "epoch": epoch, "split": split, **measures}) + "\n")
        except OSError as error:
            raise RunError(f"{self._file.name} could not be written: {error.strerror}") from error

    def _write_scalars(self, values: Mapping[str, float], step: int) -> None:
        """All of them as one event: ten times cheaper than `add_scalar` for each. The first of a tag describes it."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        if not values:
            return
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        for value in summary.value:
            if value.tag not in self._described:
                self._described.add(value.tag)
                value.metadata.CopyFrom(SummaryMetadata(summary_description=dashboards.describe(value.tag)))
        self._writer.file_writer.add_summary(summary, step)

    def _arrange(self, tags: Iterable[str]) -> None:
        """Write the layout of the custom-scalars tab when new tags give it more charts; TensorBoard takes the last."""
        if self._tags.issuperset(tags) and self._layout:
            return
        self._tags.update(tags)
        layout = dashboards.layout(self._tags)
        if layout != self._layout:
            self._layout = layout
            self._writer.add_custom_scalars(
                {
                    category: {chart: ["Multiline", tags] for chart, tags in charts.items()}
                    for category, charts in layout.items()
                }
            )

    def histogram(
        self, name: str, values: torch.Tensor, step: int, low: float | None = None, high: float | None = None
    ) -> None:
        """The distribution of `values` in 50 bins from `low` to `high`, or over their own range.

        The number of bins is fixed: rules that derive it from the data take millions for a few outliers.
        """
        if self._writer is None or not values.numel() or not bool(torch.isfinite(values).all()):
            return
        numbers = values.detach().double().flatten().cpu().numpy()
        low, high = (float(numbers.min()) if low is None else low), (float(numbers.max()) if high is None else high)
        if not low < high:
            low, high = low - 0.5, low + 0.5
        counts, edges = np.histogram(numbers, 50, (low, high))
        full = np.flatnonzero(counts)
        shown = slice(full[0], full[-1] + 1)  # of the outer ones TensorBoard takes the least and the largest value
        self._writer.add_histogram_raw(
            name,
            min=numbers.min(),
            max=numbers.max(),
            num=len(numbers),
            sum=numbers.sum(),
            sum_squares=numbers @ numbers,
            bucket_limits=edges[1:][shown].tolist(),
            bucket_counts=counts[shown].tolist(),
            global_step=step,
        )

    def figures(self, draw: Mapping[str, Callable[[], Figure]], step: int, share: float | None = None) -> None:
        """Draw figures into the Images tab, by name.

        With `share`, only if drawing has taken and will take less than this share of the time since the run began;
        otherwise `figures_wait` is true until it does.
        """
        if self._writer is None:
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

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Put `figure` into the Images tab. It is rendered here, so that no pyplot state is made."""
        if self._writer is None:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        self._writer.add_image(name, np.asarray(canvas.buffer_rgba())[..., :3].copy(), step, dataformats="HWC")

    def text(self, name: str, text: str, step: int = 0) -> None:
        if self._writer is not None:
            self._writer.add_text(name, text, step)

    def start(self, config: Config, command: str = "") -> None:
        """What this run is: the entry of the HParams tab, the config and the command as text. Once in a run's life."""
        if self._writer is None:
            return
        for summary in (dashboards.experiment(config), dashboards.session_start(dashboards.hyperparameters(config))):
            self._writer.file_writer.add_summary(summary)
        self.text("config", "```yaml\n" + to_yaml(config) + "```")
        if command:
            self.text("command", f"`{command}`")
        self._writer.flush()  # a killed run is still to be recognised, and a resumed one does not write this again

    def finish(self, values: Mapping[str, float], step: int) -> None:
        """The run is over: those of `values` that the HParams tab shows, and its status."""
        if self._writer is None:
            return
        # those of val have their curve
        self._write_scalars({k: values[k] for k in dashboards.METRICS if k in values and k[:4] != "val/"}, step)
        rows = [f"| {tag} | {dashboards.describe(tag)} |" for tag in sorted(self._described)]
        self.text("scalars", "\n".join(["| scalar | |", "|---|---|", *rows]), step)
        self._writer.file_writer.add_summary(dashboards.session_end())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._writer.close()
            self._file = self._writer = None


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

    def line(self, text: str) -> None:
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
