"""A trained model in use: calibrated probabilities of inputs as they come, from one file.

result = metacal.fit(model, (x, y))
result.save("model.pt")                                    # later, in another process:
model = metacal.load("model.pt", model=Net())              # or metacal.load(RUN), a run folder of `metacal train`
model.predict_proba(images), model.predict(images)
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metacal import __version__
from metacal.calibration.choice import as_tensors, restored
from metacal.calibration.fitted import Scaling
from metacal.config import Config, ModelConfig
from metacal.data import Data, InputKind, Task, Transform
from metacal.data.arrays import is_image
from metacal.data.kind import AnyKind, InputKinds
from metacal.data.stores import resized
from metacal.data.wrap import input_kind
from metacal.errors import require
from metacal.export import export
from metacal.inputs import at_a_time, call, placed
from metacal.models import Backbone, build_model
from metacal.models.factory import Architecture, architecture_of
from metacal.modes import evaluation_mode
from metacal.runs import checkpoint

__all__ = ["CalibratedModel", "load_file", "of_run", "save"]


class CalibratedModel(nn.Module):
    """A trained network with all that its use needs: normalisation of inputs, temperature, names of classes.

    `forward(x)` gives calibrated logits z / T, (N, K), of inputs of the kind that the network was trained on, such as
    uint8 images: softmax makes probabilities of them. Inputs of another kind are refused (see `InputKind`). With a map
    other than a temperature they are what that makes of z, without a gradient.

    Args:
        backbone: the network, which is put in evaluation mode.
        kind: of the inputs that it was trained on.
        task: its classes and the type of its parameters.
        temperature: T.
        image_size: PIL images are resized and cropped to it, as image files were in training; None: they are not.
        scaling: a fitted map of z / T; None: none.
    """

    def __init__(
        self,
        backbone: Backbone,
        kind: AnyKind,
        task: Task,
        temperature: float,
        image_size: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.kind, self.task = kind, task
        self.temperature = float(temperature)
        self.image_size = image_size
        self.scaling = scaling
        self.eval()

    @property
    def class_names(self) -> list[str]:
        """The names of the classes 0, 1, ...: those of the training data, else their numbers."""
        names = list(self.task.class_names or [])
        return names + [str(k) for k in range(len(names), self.backbone.n_classes)]

    def forward(self, x: Any) -> Tensor:
        return self._calibrated(self._logits(self._accepted(x)))

    def predict_proba(self, x: Any, batch_size: int | None = None, scaled: bool = True, ranged: bool = True) -> Tensor:
        """Class probabilities (N, K) of inputs (N, ...), on the model's device.

        batch_size: inputs at a time; None: up to 1,024, of large ones fewer. scaled: after calibration.
        ranged: refuse inputs whose values lie far from those of training.
        """
        require(batch_size is None or batch_size >= 1, f"batch_size must be >= 1, got {batch_size}")
        x = self._accepted(x, ranged)
        with torch.no_grad(), evaluation_mode(self):
            logits = torch.cat([self._logits(part) for part in x.split(batch_size or at_a_time(x))])
        return torch.softmax(self._calibrated(logits) if scaled else logits, dim=1)

    def predict(self, x: Any, batch_size: int | None = None) -> Tensor:
        """The most probable class (N,) of inputs (N, ...), int64: an index into `class_names`."""
        return self.predict_proba(x, batch_size, scaled=self.scaling is not None).argmax(1)

    def save(self, path: str | Path) -> None:
        """Write the model to one file, which `metacal.load` reads; raises as `metacal.deploy.save`."""
        save(self, path)

    def export(self, path: str | Path, format: str = "torch-export") -> None:
        """Write it for other programs, from raw inputs to calibrated probabilities: torch-export, onnx or state_dict.

        See `metacal.export.export` for what the files hold, how they are checked, and what raises.
        """
        export(self.backbone.net, self.kind, self.temperature, self.class_names, path, format, self.scaling)

    def extra_repr(self) -> str:
        calibrated = f"temperature {self.temperature:.4g}" if self.scaling is None else type(self.scaling).__name__
        return f"{self.backbone.n_classes} classes, {calibrated}"

    def _calibrated(self, logits: Tensor) -> Tensor:
        logits = logits / self.temperature
        return logits if self.scaling is None else self.scaling.map_logits(logits).to(logits.dtype)

    def _accepted(self, x: Any, ranged: bool = True) -> Any:
        """All inputs at once, so that a bad one is named by its index among them."""
        if self.image_size is not None and isinstance(x, (list, tuple)) and len(x) and is_image(x[0]):
            x = [resized(image, self.image_size) for image in x]
        return self.kind.accept(x, "new", ranged)

    def _logits(self, x: Any) -> Tensor:
        first = next(self.backbone.parameters())
        transform = self.kind.transform_of(x)
        x = x if transform is None else transform(x)
        logits, _ = call(self.backbone, placed(x, first.device, first.dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def save(model: CalibratedModel, path: str | Path) -> None:
    """Write `model` to one file of tensors and plain Python, which `load` reads.

    The weights, what inputs are, the temperature and the classes' names are in it. How to make the network is in it
    where `metacal.models.build_model` made it; of another network it has the class's name only.

    Raises:
        InputError: for a network whose state holds anything but tensors.
        RunError: when the file cannot be written.
    """
    net = model.backbone.net
    weights = net.state_dict()
    strange = next((key for key, value in weights.items() if not isinstance(value, Tensor)), None)
    require(strange is None, f"model {type(net).__name__} cannot be saved: its state {strange!r} is no tensor")
    architecture = architecture_of(net)
    state = {
        "contains": "model",
        "versions": {"metacal": __version__, "torch": str(torch.__version__)},
        "class": f"{type(net).__module__}.{type(net).__qualname__}",
        "architecture": None if architecture is None else asdict(architecture),
        "weights": dict(weights),
        "head": model.backbone.head_name,
        "temperature": model.temperature,
        "scaling": None if model.scaling is None else as_tensors(model.scaling),
        "class_names": None if model.task.class_names is None else list(model.task.class_names),
        "dtype": _name(model.task.dtype),
        "image_size": model.image_size,
        "inputs": _plain_kind(model.kind),
    }
    checkpoint.save(Path(path), state)


def load_file(path: str | Path, model: nn.Module | None = None, device: str | torch.device = "cpu") -> CalibratedModel:
    """The calibrated model in a file that `save` wrote; `metacal.load` takes run folders too.

    Args:
        model: the network for the weights, made by your own code; needed where the file cannot make it.

    Raises:
        InputError: for a path without a model, a damaged file, and a network that the weights do not fit.
    """
    file = Path(path)
    require(file.is_file(), f"{path} does not exist")
    state = checkpoint.load(file, of_run=False)
    require(state.get("contains") == "model", f"{file} is no saved model, but the state of a training: load its run")
    built = state["architecture"]
    if model is None:
        require(
            built is not None,
            f"{file} holds the weights of a {state['class']}, which only your own code can make: "
            f"metacal.load({str(path)!r}, model=…)",
        )
        model = _built(Architecture(ModelConfig(**built["config"]), built["n_classes"], tuple(built["input_shape"])))
    backbone = Backbone(model.to(_DTYPES[state["dtype"]]), state["head"])
    checkpoint.load_weights(model, state["weights"], str(file))
    task = Task(backbone.n_classes, _DTYPES[state["dtype"]], state["class_names"])
    scaling = None if state.get("scaling") is None else restored(state["scaling"])  # older files have none
    kind, image_size = _kind(state["inputs"]), state["image_size"]
    return CalibratedModel(backbone, kind, task, state["temperature"], image_size, scaling).to(device)


def of_run(config: Config, data: Data, backbone: Backbone, temperature: float) -> CalibratedModel:
    """The calibrated model of a run of `metacal train`."""
    task = Task(data.n_classes, next(backbone.parameters()).dtype, data.class_names)
    return CalibratedModel(backbone, input_kind(data.train), task, temperature, config.data.image_size)


def _built(architecture: Architecture) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # its weights are about to be replaced
        return build_model(architecture.config, architecture.n_classes, architecture.input_shape)


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_kind(kind: AnyKind) -> dict[str, Any]:
    """An `InputKind`, or several by the argument of the network that they are, as tensors and plain Python."""
    if isinstance(kind, InputKinds):
        return {"arguments": [[key, _plain_kind(k)] for key, k in kind.kinds.items()]}
    t = kind.transform
    transform = None
    if t is not None:
        transform = {"scale": t.scale, "mean": t.mean.cpu(), "std": t.std.cpu(), "dtype": _name(t.dtype)}
    numbers = {"low": kind.low, "high": kind.high, "outside": list(kind.outside)}
    return {"shape": list(kind.shape), "dtype": _name(kind.dtype), "transform": transform, **numbers}


def _kind(plain: dict[str, Any]) -> Any:
    if "arguments" in plain:
        return InputKinds({key: _kind(k) for key, k in plain["arguments"]})
    t = plain["transform"]
    transform = None if t is None else Transform(**{**t, "dtype": _DTYPES[t["dtype"]]})
    kind = InputKind(**{**plain, "transform": transform, "dtype": _DTYPES[plain["dtype"]]})
    return replace(kind, shape=tuple(plain["shape"]), outside=tuple(plain["outside"]))
