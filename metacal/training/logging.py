"""What a run tells: metrics.jsonl, TensorBoard's event file, and lines or a live bar on the console."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metacal.errors import RunError

__all__ = ["ConsoleLog", "RunLog"]

# TensorBoard's custom-scalars tab: charts that belong together. Names are regular expressions.
_SUBSETS = "(train_subset|val_subset)"
LAYOUT = {
    "calibration": {
        "ECE": ["Multiline", [f"(val|{_SUBSETS})/ece$", "val/adaptive_ece$"]],
        "NLL": ["Multiline", [f"(val|{_SUBSETS})/nll$"]],
        "accuracy": ["Multiline", [f"(val|{_SUBSETS})/accuracy$"]],
        "over- and underconfidence": ["Multiline", ["val/overconfidence$", "val/underconfidence$"]],
    },
    "curvature beside ECE": {
        "ECE": ["Multiline", [f"{_SUBSETS}/ece$"]],
        "sharpness": [
            "Multiline",
            ["curvature/(gn_sharpness|held_out_gn_sharpness|hessian_sharpness|batch_sharpness|edge)$"],
        ],
        "traces": ["Multiline", ["curvature/(gn_trace|hessian_trace)$"]],
        "sharpness over the edge of stability": ["Multiline", ["curvature/edge_ratio$"]],
    },
    "margins": {
        "quantiles of the true margin": ["Multiline", [f"{_SUBSETS}/margin_q(05|50|95)$"]],
        "margin moment Q": ["Multiline", ["margin/q$", f"{_SUBSETS}/certificate_q$"]],
        "certificate ratios": [
            "Multiline",
            ["margin/ratio_.*$", f"{_SUBSETS}/certificate_ratio_.*$", "curvature/certificate_ratio$"],
        ],
    },
    "gamma": {
        "gamma": ["Multiline", ["gamma/(mean|q05|q50|q95)$"]],
        "correlation with confidence": ["Multiline", ["gamma/confidence_correlation$"]],
    },
    "outer problem": {
        "outer loss": ["Multiline", ["meta/outer_loss$"]],
        "hypergradient norm": ["Multiline", ["meta/hypergradient_norm$"]],
    },
    "time": {"step": ["Multiline", ["time/step_ms$"]], "monitors": ["Multiline", ["time/monitor_.*_ms$"]]},
}


class RunLog:
    """Numbers to metrics.jsonl and TensorBoard, both in the run folder; nothing at all when `folder` is None.

    A line of metrics.jsonl is ``{"step": …, "epoch": …, "split": …, name: value, …}``; the same value is called
    ``split/name`` in TensorBoard. Values that are not finite become null, since JSON has no NaN.
    """

    def __init__(self, folder: Path | None, resume: Mapping[str, int] | None = None) -> None:
        self.history: list[dict[str, float]] = []  # what each validation logged, in memory
        self._writer: Any = None
        self._file: Any = None
        if folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # about a second to import

        path = folder / "metrics.jsonl"
        purge = None
        if resume is None:
            path.write_bytes(b"")
        else:
            purge = resume["step"] + 1
            # What was logged after the checkpoint is logged again by the resumed run.
            with open(path, "ab") as file:
                file.truncate(min(resume["metrics_bytes"], path.stat().st_size))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed by close)
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)
        if resume is None:
            self._writer.add_custom_scalars(LAYOUT)

    @property
    def metrics_bytes(self) -> int:
        """How long metrics.jsonl is: a checkpoint stores it, so that a resumed run cuts what came later."""
        if self._file is None:
            return 0
        self._file.flush()
        return self._file.tell()

    def scalars(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Log ``split/name`` → value."""
        if self._file is None or not values:
            return
        by_split: dict[str, dict[str, float | None]] = {}
        for name, value in values.items():
            split, _, measure = name.partition("/")
            by_split.setdefault(split, {})[measure] = value if math.isfinite(value) else None
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            for split, measures in by_split.items():
                self._file.write(json.dumps({"step": step, "epoch": epoch, "split": split, **measures}) + "\n")
        except OSError as error:
            raise RunError(f"{self._file.name} could not be written: {error.strerror}") from error

    def histogram(self, name: str, values: torch.Tensor, step: int) -> None:
        if self._writer is not None and values.numel() and bool(torch.isfinite(values).all()):
            self._writer.add_histogram(name, values.detach().float().cpu().numpy(), step, bins="auto")

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Draw `figure` into the Images tab. It is rendered here, so that no pyplot state is made."""
        if self._writer is None:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        self._writer.add_image(name, np.asarray(canvas.buffer_rgba())[..., :3].copy(), step, dataformats="HWC")

    def text(self, name: str, text: str) -> None:
        if self._writer is not None:
            self._writer.add_text(name, text)

    def hyperparameters(self, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """The HParams tab's entry, through this run's own event file."""
        if self._writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()}
        for summary in hparams(plain, dict(metrics)):
            self._writer.file_writer.add_summary(summary)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._writer.close()
            self._file = self._writer = None


class ConsoleLog:
    """A live bar on a terminal; elsewhere about ten plain lines a run, so that a log file stays readable."""

    def __init__(self, title: str, total_steps: int, epochs: int, enabled: bool = True) -> None:
        self._title, self._total, self._epochs, self._enabled = title, total_steps, epochs, enabled
        self._console = Console(file=sys.stdout)
        self._bar: Progress | None = None

    def start(self, step: int) -> None:
        if not self._enabled:
            return
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[last]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(self._title, total=self._total, completed=step, last="")
            self._bar.start()
        else:
            self.line(
                f"{self._title}: {self._epochs} epochs, {self._total} steps" + (f", from step {step}" * (step > 0))
            )

    def step(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def epoch(self, epoch: int, values: Mapping[str, float], names: Sequence[str]) -> None:
        """Show the named values after `epoch` (counted from 1)."""
        text = "  ".join(f"{name} {values[name]:.4g}" for name in names if name in values)
        if self._bar is not None:
            self._bar.update(self._task, last=text)
        elif self._enabled and (epoch % max(1, round(self._epochs / 10)) == 0 or epoch == self._epochs):
            self.line(f"{self._title}: epoch {epoch}/{self._epochs}  {text}")

    def line(self, text: str) -> None:
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
