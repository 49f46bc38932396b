"""Where a run is logged beside its metrics.jsonl: a sink for each word of ``log=[tensorboard,wandb,mlflow]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from metacal.config import Config
from metacal.errors import require_packages
from metacal.runs.folder import RunFolder

__all__ = ["Histogram", "Sink", "open_sink", "require_sinks"]


@dataclass(frozen=True)
class Histogram:
    """A distribution: how many of `values` (N,) lie between each two `edges`, as `counts` says."""

    values: np.ndarray
    counts: np.ndarray
    edges: np.ndarray


class Sink(Protocol):
    """Takes what a run logs. A tag has at most one value at a step, and its steps never decrease.

    Attributes:
        resumed: whether it goes on with what an earlier process began; otherwise it is yet to be started.
        in_folder: whether it writes into the run folder alone, and goes back to a checkpoint with it. The others are
            services: they keep what they were sent, and leave out what they are sent again. A run does without one
            that fails.
    """

    resumed: bool
    in_folder: bool

    def start(self, config: Config, command: str) -> None:
        """What this run is, once in its life."""

    def scalars(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Numbers by tag, ``split/measure``."""

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None: ...

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        """`pixels`: (H, W, 3), uint8."""

    def text(self, tag: str, text: str, step: int) -> None:
        """`text`: Markdown."""

    def finish(self, summary: Mapping[str, Any], step: int) -> None:
        """The run is over, and this is its summary."""

    def state_dict(self) -> dict[str, Any]:
        """What it has to get back when a run goes on from a checkpoint; all that it was given is on its way."""

    def close(self, finished: bool) -> None: ...


def require_sinks(names: Sequence[str]) -> None:
    """Raise `InputError` unless the packages that these sinks need are there; before any work."""
    for name in names:
        require_packages(f"log=[{name}]", name)


def open_sink(name: str, folder: RunFolder, step: int, resume: Mapping[str, Any] | None) -> Sink:
    """The sink of this name for the run in `folder`, which starts or goes on at `step`.

    Args:
        resume: what `state_dict` gave at that step; None starts anew.

    Raises:
        InputError: the service that it needs cannot be reached.
    """
    if name == "tensorboard":
        from metacal.training.sinks.tensorboard import TensorBoard

        return TensorBoard(folder, step, resume)
    if name == "wandb":
        from metacal.training.sinks.wandb import WeightsAndBiases

        return WeightsAndBiases(folder)
    assert name == "mlflow", name
    from metacal.training.sinks.mlflow import MLflow

    return MLflow(folder)
