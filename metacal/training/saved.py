"""A run's model and predictions, made again from its folder.

What reads run folders needs Hydra and is imported there; a file of a model needs PyTorch only.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from metacal.calibration import TemperatureScaling
from metacal.config import Config
from metacal.data import Data
from metacal.deploy import CalibratedModel, load_file, of_run
from metacal.errors import note, require
from metacal.models import Backbone
from metacal.predict import predict
from metacal.predictions import Predictions
from metacal.runs import checkpoint
from metacal.training.setup import build_backbone, choose_device, evaluation_batches, prepare_data

__all__ = ["SavedRun", "load", "load_run", "predict_run"]


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
    from metacal.runs.config import recorded_config
    from metacal.runs.folder import check_run

    folder = check_run(path)
    file = folder.best if which == "best" else folder.last
    require(file.is_file(), f"{path} has no checkpoint yet (checkpoints/{file.name})")
    device = choose_device(device_name)
    state = checkpoint.load(file)
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


def predict_run(
    path: str | Path, device_name: str = "auto", which: str = "best", splits: Collection[str] = ("val", "test")
) -> dict[str, Predictions]:
    """Predictions of a run's best (or last) checkpoint on its splits, of train, val and test, without augmentation.

    Raises:
        InputError: as `load_run`.
    """
    _, data, backbone = load_run(path, device_name, which)
    return {name: predict(backbone, evaluation_batches(getattr(data, name)).epoch(0)) for name in splits}


def load(path: str | Path, model: nn.Module | None = None, device: str | torch.device = "cpu") -> CalibratedModel:
    """The calibrated model in a file that `result.save` wrote, or of a run folder of `metacal train`.

    A run that is not finished, or was made before runs kept such a file, is loaded from its best checkpoint, which
    needs the data that it was trained on; its temperature is fitted on val.

    Args:
        model: the network for the weights, made by your own code; needed where the file cannot make it.

    Raises:
        InputError: for a path without a model, a damaged file, a network that the weights do not fit, and a run without
            a checkpoint or whose data have changed.
    """
    if not Path(path).is_dir():
        return load_file(path, model, device)
    require(model is None, f"{path} is a run folder, whose config says what the model is: leave out model")
    from metacal.runs.folder import RunFolder

    folder = RunFolder(path)
    if folder.model.is_file():
        return load_file(folder.model, None, device)
    config, data, backbone = load_run(path, "cpu")
    known = folder.predictions("val")
    val = Predictions.load(known) if known.is_file() else predict(backbone, evaluation_batches(data.val).epoch(0))
    return of_run(config, data, backbone, TemperatureScaling().fit(val).temperature).to(device)
