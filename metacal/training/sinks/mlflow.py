"""MLflow. Where it writes to is MLflow's own business: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from metacal.config import Config
from metacal.config.compose import to_yaml
from metacal.config.resolve import flat
from metacal.errors import InputError
from metacal.runs.folder import RunFolder
from metacal.runs.settings import show_value
from metacal.training.sinks import Histogram

__all__ = ["MLflow"]

_LONGEST = 500  # characters of a parameter that every MLflow server takes
_AT_ONCE = 100  # parameters, or a thousand metrics


class MLflow:
    """One MLflow run. Its id is kept in the run folder, so that a resumed run goes on in it.

    The experiment is that of MLFLOW_EXPERIMENT_NAME, or else "metacal". MLflow has no histograms: these are left out.
    """

    in_folder = False

    def __init__(self, folder: RunFolder) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        known = folder.read_sinks().get("mlflow")
        self.resumed = known is not None
        self._last: dict[str, int] = {}
        try:
            self._client = MlflowClient()
            if known is None:
                name = "/".join(folder.path.absolute().parts[-2:])
                self._run = self._client.create_run(self._experiment(), run_name=name).info.run_id
                folder.write_sinks({"mlflow": self._run})
            else:
                self._run = known
                self._client.update_run(known, status="RUNNING")
                self._last = self._last_steps()
        except (MlflowException, OSError) as error:
            raise InputError(
                f"log=[mlflow] cannot start a run: {error}; MLFLOW_TRACKING_URI says where MLflow writes"
            ) from None

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "metacal")
        known = self._client.get_experiment_by_name(name)
        try:
            return self._client.create_experiment(name) if known is None else known.experiment_id
        except MlflowException:  # another run of a sweep has just made it
            known = self._client.get_experiment_by_name(name)
            if known is None:
                raise
            return known.experiment_id

    def start(self, config: Config, command: str) -> None:
        from mlflow.entities import Param, RunTag

        params = [Param(key, show_value(value)[:_LONGEST]) for key, value in flat(asdict(config)).items()]
        for first in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[first : first + _AT_ONCE])
        self._client.log_batch(self._run, tags=[RunTag("command", command)])
        self._client.log_text(self._run, to_yaml(config), "config.yaml")

    def scalars(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(tag, value, now, step) for tag, value in values.items() if step > self._last.get(tag, -1)]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def _last_steps(self) -> dict[str, int]:
        """Tag -> the last step that MLflow has of it."""
        tags = self._client.get_run(self._run).data.metrics
        return {tag: max(m.step for m in self._client.get_metric_history(self._run, tag)) for tag in tags}

    def histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        return

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._client.log_image(self._run, pixels, f"{tag}/{step:08d}.png")

    def text(self, tag: str, text: str, step: int) -> None:
        self._client.log_text(self._run, text, f"{tag}/{step:08d}.md")

    def finish(self, summary: Mapping[str, Any], step: int) -> None:
        """The numbers of test and of the last epoch as metrics, and all of it as summary.json."""
        numbers = {k: v for k, v in summary.items() if "/" in k and isinstance(v, (int, float)) and k[:4] != "val/"}
        self.scalars(numbers, step, summary.get("last_epoch", 0))
        self._client.log_dict(self._run, dict(summary), "summary.json")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")
