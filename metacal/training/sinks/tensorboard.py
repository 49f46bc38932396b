"""TensorBoard's event file in the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from metacal.config import Config
from metacal.config.compose import to_yaml
from metacal.runs.folder import RunFolder
from metacal.training import dashboards
from metacal.training.sinks import Histogram

__all__ = ["TensorBoard"]


class TensorBoard:
    """One event file, in which a resumed run goes on from the byte where its checkpoint was.

    Args:
        step: that the run starts or goes on at.
        resume: what `state_dict` gave at that step; None starts anew.
    """

    in_folder = True

    def __init__(self, folder: RunFolder, step: int, resume: Mapping[str, Any] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # about a second to import

        self._folder = folder
        self._tags: set[str] = set()
        self._described: set[str] = set()  # in this run's event files
        self._layout: Mapping[str, Any] = {}
        if resume is not None and "events" in resume:  # else TensorBoard discards what came later by the mark below
            self._go_back(resume)
        self.resumed = resume is not None and bool(folder.event_files())
        # The mark of a start: TensorBoard discards what came later, at a run's second one.
        self._writer = SummaryWriter(str(folder.path), purge_step=0 if resume is None else step + 1, flush_secs=30)

    def _go_back(self, state: Mapping[str, Any]) -> None:
        """To what `state_dict` saw. What was logged after it goes, since it is logged again."""
        for file in self._folder.event_files():
            if file.name not in state["events"]:
                file.unlink()
            elif file.stat().st_size > state["events"][file.name]:
                os.truncate(file, state["events"][file.name])
        self._tags, self._described = set(state["tags"]), set(state.get("described", ()))
        self._layout = dashboards.layout(self._tags) if self._folder.event_files() else {}

    def state_dict(self) -> dict[str, Any]:
        self._writer.flush()
        return {
            "events": {file.name: file.stat().st_size for file in self._folder.event_files()},
            "tags": sorted(self._tags),
            "described": sorted(self._described),
        }

    def start(self, config: Config, command: str) -> None:
        """The entry of the HParams tab, the config and the command as text."""
        for summary in (dashboards.experiment(config), dashboards.session_start(dashboards.hyperparameters(config))):
            self._add(summary)
        self.text("config", "```yaml\n" + to_yaml(config) + "```", 0)
        if command:
            self.text("command", f"`{command}`", 0)
        self._writer.flush()  # a killed run is still to be recognised, and a resumed one does not write this again

    def scalars(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        self._arrange(values)
        self._write(values, step)
        self._write(dashboards.by_epoch(values), epoch)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        """All of them as one event: ten times cheaper than `add_scalar` for each. The first of a tag describes it."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        if not values:
            return
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        for value in summary.value:
            if value.tag not in self._described:
                self._described.add(value.tag)
                value.metadata.CopyFrom(SummaryMetadata(summary_description=dashboards.describe(value.tag)))
        self._add(summary, step)

    def _add(self, summary: Any, step: int | None = None) -> None:
        events = self._writer.file_writer
        assert events is not None  # until the writer is closed
        events.add_summary(summary, step)

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

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        values, counts, edges = histogram.values, histogram.counts, histogram.edges
        full = np.flatnonzero(counts)
        shown = slice(full[0], full[-1] + 1)  # of the outer ones TensorBoard takes the least and the largest value
        self._writer.add_histogram_raw(
            tag,
            min=values.min(),
            max=values.max(),
            num=len(values),
            sum=values.sum(),
            sum_squares=values @ values,
            bucket_limits=edges[1:][shown].tolist(),
            bucket_counts=counts[shown].tolist(),
            global_step=step,
        )

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)

    def finish(self, summary: Mapping[str, Any], step: int) -> None:
        """Those values that the HParams tab shows, what each scalar means, and the run's status."""
        # those of val have their curve
        self._write({k: summary[k] for k in dashboards.METRICS if k in summary and k[:4] != "val/"}, step)
        rows = [f"| {tag} | {dashboards.describe(tag)} |" for tag in sorted(self._described)]
        self.text("scalars", "\n".join(["| scalar | |", "|---|---|", *rows]), step)
        self._add(dashboards.session_end())

    def close(self, finished: bool) -> None:
        self._writer.close()
