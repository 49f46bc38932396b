"""Weights & Biases. Where it sends to is W&B's own business: `wandb login`, WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY."""

from __future__ import annotations

import html
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from metacal.config import Config
from metacal.errors import InputError
from metacal.runs.folder import RunFolder
from metacal.training.sinks import Histogram

__all__ = ["WeightsAndBiases"]


class WeightsAndBiases:
    """One W&B run. Its id is kept in the run folder, so that a resumed run goes on in it.

    The project is that of WANDB_PROJECT, or else "metacal". W&B's step is the training step, and W&B knows which one
    it has got to. Offline it knows nothing, and a killed run leaves it little: a resumed run then sends all of its
    numbers anew, into a folder that replaces the earlier one.
    """

    in_folder = False

    def __init__(self, folder: RunFolder) -> None:
        import wandb

        run_id = folder.read_sinks().get("wandb") or secrets.token_hex(8)
        folder.write_sinks({"wandb": run_id})
        self._wandb = wandb
        try:
            self._run = wandb.init(
                id=run_id,
                resume="allow",  # not "must": the first process may have died before it reached W&B
                reinit="create_new",  # leaves a run of the caller's alone
                project=os.environ.get("WANDB_PROJECT", "metacal"),
                name="/".join(folder.path.absolute().parts[-2:]),
                dir=str(folder.path),
                settings=wandb.Settings(console="off"),
            )
            self.resumed, self._next = self._run.resumed, self._run.step  # W&B has the steps before that
            if self._run.offline:
                _remove_earlier(folder, self._run)
        except wandb.errors.Error as error:
            raise InputError(
                f"log=[wandb] cannot start a run: {error}; give a login by `wandb login`, or set WANDB_MODE=offline"
            ) from None

    def start(self, config: Config, command: str) -> None:
        self._run.config.update({**asdict(config), "command": command}, allow_val_change=True)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        if values and step >= self._next:
            self._run.log(dict(values), step=step)

    def scalars(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        self._log({**values, "epoch": epoch}, step)

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        counts_and_edges = (histogram.counts.tolist(), histogram.edges.tolist())
        self._log({tag: self._wandb.Histogram(np_histogram=counts_and_edges)}, step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._log({tag: self._wandb.Image(pixels)}, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._log({tag: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def finish(self, summary: Mapping[str, Any], step: int) -> None:
        self._run.summary.update(summary)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def _remove_earlier(folder: RunFolder, run: Any) -> None:
    """What earlier processes of this run have left of it, not yet sent to W&B."""
    for earlier in (folder.path / "wandb").glob(f"offline-run-*-{run.id}"):
        if earlier.resolve() != Path(run.dir).resolve().parent:
            shutil.rmtree(earlier)
