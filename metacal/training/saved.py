"""A run's model and predictions, made again from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from metacal.config import Config
from metacal.data import Data
from metacal.errors import note, require
from metacal.models import Backbone
from metacal.predict import predict
from metacal.predictions import Predictions
from metacal.runs import checkpoint
from metacal.runs.config import recorded_config
from metacal.runs.folder import check_run
from metacal.training.setup import build_backbone, choose_device, evaluation_batches, prepare_data

__all__ = ["SavedRun", "load_run", "predict_run"]


class SavedRun(NamedTuple):
    """What a run worked with."""

    config: Config
    data: Data
    backbone: Backbone


def load_run(path: str | Path, device_name: str = "auto", which: str = "best") -> SavedRun:
    """The config, the data and the backbone at a run's best (or last) checkpoint.

    Raises:
        InputError: when the folder is no run, has no checkpoint, or its data have changed since.
    """
    folder = check_run(path)
    file = folder.best if which == "best" else folder.last
    require(file.is_file(), f"{path} has no checkpoint yet (checkpoints/{file.name})")
    device = choose_device(device_name)
    state = checkpoint.load(file, device)
    config = recorded_config(folder, state)
    data = prepare_data(config, device)
    if folder.summary.exists() and not folder.finished:
        note(f"{folder.summary} is damaged: whether the data are those of the run is not checked")
    if folder.finished:
        was = folder.read_summary()["data"]["fingerprint"]
        require(
            was == data.fingerprint,
            f"the test split of {path} is not the one that it was trained with (fingerprint {data.fingerprint}, "
            f"was {was}): {config.data.path or config.data.name} has changed",
        )
    backbone = build_backbone(config, data, device)
    checkpoint.load_weights(backbone, state["backbone"], str(file))
    return SavedRun(config, data, backbone)


def predict_run(path: str | Path, device_name: str = "auto", which: str = "best") -> dict[str, Predictions]:
    """Predictions of a run's best (or last) checkpoint on its val and test splits.

    Raises:
        InputError: as `load_run`.
    """
    _, data, backbone = load_run(path, device_name, which)
    return {split.name: predict(backbone, evaluation_batches(split).epoch(0)) for split in (data.val, data.test)}
