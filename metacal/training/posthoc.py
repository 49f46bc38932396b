"""Calibration after training, of predictions or of a model trained here or elsewhere.

scaling = metacal.calibrate(val_logits, val_labels)           # a map: scaling.predict_proba(test_logits)
model = metacal.calibrate(net, (x_val, y_val))                # a model: model.predict_proba(x), model.save("model.pt")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from torch import nn
from torch.utils.data import DataLoader

from metacal.calibration.choice import AUTO, SCALINGS, fit_scaling
from metacal.calibration.fitted import Scaling
from metacal.calibration.temperature import TemperatureScaling
from metacal.data import Task, as_batches, as_split
from metacal.data.kind import AnyKind, trained_on
from metacal.data.wrap import input_kind, loader_batches
from metacal.deploy import CalibratedModel
from metacal.errors import require, require_choice
from metacal.models import Backbone
from metacal.predict import predict
from metacal.predictions import Predictions

if TYPE_CHECKING:
    from metacal.training.fit import Fit  # whose module needs the trainer's packages

__all__ = ["calibrate"]


@overload
def calibrate(
    model: nn.Module | Fit, val: Any, method: str = ..., *, seed: int = ..., head: str | None = ...
) -> CalibratedModel: ...
@overload
def calibrate(model: Any, val: Any = ..., method: str = ..., *, seed: int = ..., head: str | None = ...) -> Scaling: ...
def calibrate(
    model: Any, val: Any = None, method: str = AUTO, *, seed: int = 0, head: str | None = None
) -> CalibratedModel | Scaling:
    """Fit a post-hoc map on held-out data, and give back the calibrated thing.

    Args:
        model: logits (N, K), with `val` their labels (N,); or a `Predictions`, without `val`: the result is the fitted
            map, with `apply(predictions)` and `predict_proba(logits)`. Or an nn.Module from inputs to logits, a
            `metacal.Fit`, or a model that `metacal.load` gave, with `val` data: the result is a `CalibratedModel` as
            `metacal.load` gives, which shares the network and puts it in evaluation mode. An earlier map is replaced.
        val: data (x, y), a Dataset of pairs, or a DataLoader that the model was not trained on. Of a model trained by
            metacal, inputs as it takes them; of another one what its forward takes, so images are normalised already.
        method: none, temperature, ets, spline, vector, beta, dirichlet, histogram or isotonic (docs/calibrate.md says
            which when); auto: the simplest of them that cross-validation cannot tell from the best (see
            `metacal.calibration.choose_scaling`).
        seed: of the folds.
        head: the Linear layer that makes the logits, where that is not the last one.

    Warns where fewer than ten of the predictions are wrong.

    Raises:
        InputError: for another method, and for data that do not fit the model.
    """
    require_choice("method", method, [AUTO, *SCALINGS])
    if isinstance(model, Predictions):
        require(val is None, "val is not given beside a Predictions, which holds its labels")
        return fit_scaling(model, method, seed)
    trained_here = getattr(model, "calibrated", None)  # of a Fit
    if isinstance(trained_here, CalibratedModel):
        model = trained_here
    if not isinstance(model, nn.Module):
        require(
            val is not None,
            f"model must be a torch.nn.Module, or logits (N, K) with their labels as val, got {type(model).__name__} "
            "alone",
        )
        return fit_scaling(Predictions.from_logits(model, val), method, seed)
    require(val is not None, "val must be given: data (x, y) that the model was not trained on")
    image_size = None
    trained: tuple[AnyKind, Task] | None
    if isinstance(model, CalibratedModel):
        backbone, trained, image_size = model.backbone, (model.kind, model.task), model.image_size
    else:
        backbone = model if isinstance(model, Backbone) else Backbone(model, head)
        trained = trained_on(model)
    p, kind, task = _predictions(backbone, val, trained)
    scaling = fit_scaling(p, method, seed)
    if isinstance(scaling, TemperatureScaling):
        return CalibratedModel(backbone, kind, task, scaling.temperature, image_size)
    return CalibratedModel(backbone, kind, task, 1.0, image_size, scaling)


def _predictions(
    backbone: Backbone, val: Any, trained: tuple[AnyKind, Task] | None
) -> tuple[Predictions, AnyKind, Task]:
    """The predictions of `val`, and what the backbone's inputs and classes are: those of its training, or of `val`."""
    first = next(backbone.parameters())
    if trained is not None:
        kind, task = trained
        batches = as_batches(
            val, None, stream="val", shuffle=False, augment=False, device=first.device, like=kind, task=task
        )
        return predict(backbone, batches.epoch(0)), kind, task
    task = Task(backbone.n_classes, first.dtype)
    if isinstance(val, DataLoader):
        batches, kind = loader_batches(val, 0, first.device, task)
    else:
        split = as_split(val, "val", first.device, task=task)
        kind, task = input_kind(split), Task(task.n_classes, task.dtype, split.class_names)
        batches = as_batches(split, None, stream="val", shuffle=False, augment=False)
    require(
        kind.transform is None,
        "val inputs are uint8 images, and how this model's training normalised them is not known: give them as its "
        "forward takes them",
    )
    return predict(backbone, batches.epoch(0)), kind, task
