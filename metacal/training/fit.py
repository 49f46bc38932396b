"""`metacal.fit`: train somebody's own model on their own data, in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metacal import deploy, ranks
from metacal.calibration import TemperatureScaling
from metacal.config import Config, DataConfig
from metacal.config.compose import compose, to_yaml
from metacal.config.unread import check_read
from metacal.data.kind import AnyKind, remember
from metacal.deploy import CalibratedModel
from metacal.errors import did_you_mean, require, require_packages
from metacal.models import Backbone
from metacal.modes import evaluation_mode, training_mode
from metacal.names import DEFAULT_METHOD, MethodName, OptimizerName
from metacal.objective import class_weights
from metacal.pixels import Pixels
from metacal.predict import predict
from metacal.predictions import Predictions
from metacal.report.report import Report
from metacal.runs.folder import RunFolder
from metacal.training.fit_data import FitData, evaluation_data, prepare_fit
from metacal.training.logging import ConsoleLog, RunLog
from metacal.training.loop import train as train_loop
from metacal.training.run import build_watch
from metacal.training.setup import Parts, build_parts, choose_device
from metacal.training.sinks import require_sinks
from metacal.training.state import Progress

__all__ = ["Fit", "fit"]


# Keys of a run that arguments of `fit` replace.
_OUT_OF_REACH = {"baselines", "data", "model", "name", "overwrite", "resume", "run_dir", "runs"}


@dataclass
class Fit:
    """A trained model, with what is needed to use it and to know how true its confidence is.

    Attributes:
        model: the module given to `fit`, holding the weights of the selected epoch, in evaluation mode.
        backbone: the same module as `metacal.Backbone`, returning (logits, features).
        gamma: the gamma source, trained; None for losses without gamma.
        scaling: temperature scaling, fitted on val.
        calibrated: the model in use: from inputs as `fit` takes them to probabilities (see `metacal.deploy`).
        history: what each validation measured: dicts of step, epoch and ``split/measure``.
        config: the run's config.
    """

    model: nn.Module
    backbone: Backbone
    gamma: nn.Module | None
    scaling: TemperatureScaling
    calibrated: CalibratedModel
    history: list[dict[str, float]]
    best_epoch: int
    seconds: float
    config: Config
    _val: Predictions

    def __repr__(self) -> str:
        nll = next(line["val/nll"] for line in self.history if line["epoch"] == self.best_epoch)
        return (
            f"Fit(method={self.config.method}, best epoch {self.best_epoch} of {self.config.epochs}, "
            f"val NLL {nll:.4f}, temperature {self.scaling.temperature:.3f})"
        )

    def predict_proba(self, x: Any, scaled: bool = True) -> Tensor:
        """Class probabilities (N, K) of inputs (N, ...) as `fit` takes them, after temperature scaling if `scaled`."""
        return self.calibrated.predict_proba(x, scaled=scaled)

    def predict(self, x: Any) -> Tensor:
        """The most probable class (N,) of inputs (N, ...): an index into `calibrated.class_names`."""
        return self.calibrated.predict(x)

    def evaluate(self, data: Any, **keys: Any) -> Report:
        """The report of `data` (as `fit` takes it), before and after temperature scaling; `keys` go to `Report`."""
        device = next(self.model.parameters()).device
        batches = evaluation_data(data, "test", device, self.calibrated.kind, self.calibrated.task)
        return Report(predict(self.backbone, batches.epoch(0)), self._val, **keys)

    def save(self, path: str | Path) -> None:
        """Write the calibrated model to one file, which `metacal.load` reads."""
        deploy.save(self.calibrated, path)

    def export(self, path: str | Path, format: str = "torch-export") -> None:
        """Write the calibrated model for other programs, as `CalibratedModel.export`."""
        self.calibrated.export(path, format)


def fit(
    model: nn.Module,
    train: Any,
    meta: Any = None,
    val: Any = None,
    method: MethodName = DEFAULT_METHOD,
    *,
    meta_from: str | None = None,
    epochs: int | None = None,
    batch_size: int = DataConfig.batch_size,
    seed: int = Config.seed,
    select: str = Config.select,
    patience: int | None = Config.patience,
    optimizer: OptimizerName | torch.optim.Optimizer | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    class_weight: str | Sequence[float] | Mapping[Any, float] | None = None,
    freeze: str | Sequence[str] = (),
    ignore_index: int | None = None,
    callbacks: Sequence[Callable[[dict[str, float]], Any]] = (),
    pixels: tuple[Sequence[float], Sequence[float]] | None = None,
    head: str | None = None,
    device: str = Config.device,
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    log: Sequence[str] | None = None,
    progress: bool = Config.progress,
) -> Fit:
    """Train `model` for calibration, in place.

    Examples:
        >>> result = metacal.fit(model, (x, y), epochs=30)                      # doctest: +SKIP
        >>> print(result.evaluate((x_test, y_test)))                            # doctest: +SKIP
        >>> probabilities = result.predict_proba(x_new)                         # doctest: +SKIP

    Args:
        model: from inputs to logits (N, K), or for two classes to one logit z, which stands for (0, z); its last Linear
            layer is the head, unless `head` names another.
        train, meta, val: each a pair (x, y) of tensors or arrays, a Dataset of pairs, or a DataLoader, whose samples
            may be dictionaries with the labels in them; docs/data.md has the kinds of inputs and labels. Where `val` is
            missing, a stratified tenth of `train` is set aside for it, which a DataLoader does not allow; where `meta`
            is (for methods that learn their gammas), `meta_from` says what serves as it. A `meta` that the method does
            not need is added to `train`, so that methods see the same images (DataLoaders cannot be added up: there it
            stays unused). `val` selects the epoch and fits the temperature; keep test data out of them all.
        meta_from: where `meta` is missing: ``"train"``, a stratified tenth of `train`, which is then not trained on;
            ``"val"``, the images of `val`, whose scores are then fitted; ``"folds"``, at each epoch another fold of
            `train`, which this epoch does not train on (docs/data.md). None: as the method's file says, else "train".
        method: a name in `configs/method/`, such as gamma_net, focal, cross_entropy; that of `metacal train` if none is
            given.
        epochs, batch_size, seed: of the training; `batch_size` does not touch a DataLoader.
        select: the epoch whose weights the model keeps: of the least validation ``"nll"`` or ``"ece"``, these after the
            one fitted temperature (``"nll_scaled"``, ``"ece_scaled"``), of the highest ``"accuracy"``, or the
            ``"last"``. Of equal epochs the first.
        patience: training ends when so many epochs after the selected one have not been better; None: never.
        optimizer: a name in `configs/optimizer/`, such as adamw; or your own over `model.parameters()` (for methods
            that learn their gammas SGD, Adam or AdamW of torch.optim or one of metacal.optim), whose learning rates
            follow the schedule and are afterwards what they were.
        lr, weight_decay: of the optimizer by its name.
        class_weight: of the classes in the mean of the loss, Σ_i w_{y_i} ℓ_i / Σ_i w_{y_i}: "balanced" (n / (K n_k) of
            the training labels), a number > 0 for each class, or some by class (an index or a name), the others 1.
        freeze: names of modules, as in `model.named_modules()`, that this training leaves as they are: their parameters
            get no gradient, BatchNorm and Dropout in them are in evaluation mode. So are other modules that are in
            evaluation mode inside a model that is not.
        ignore_index: a label, such as -100, of samples that are left out of train, meta, val and `evaluate`: they do
            not go through the model. None: no label means that.
        callbacks: functions that are called after each validation, with what it measured (as in `Fit.history`) and the
            model in evaluation mode; if one returns true, the training ends there.
        pixels: (mean, std) per channel, when inputs are (pixel - mean) / std with pixels in [0, 1]: what penalties that
            perturb images need to know. uint8 images bring it with them.
        overrides: keys of the optimizer, schedule, loss, gamma, penalties, meta problem, monitors and precision, as on
            the command line: ``["optimizer=sam", "optimizer.lr=0.05", "penalties.mbls.weight=0.1"]``.
        run_dir: a folder for checkpoints, metrics.jsonl and TensorBoard's file; None writes nothing.
        log: where the run is logged beside metrics.jsonl: some of "tensorboard", "wandb" and "mlflow"; it needs a
            `run_dir`. None: TensorBoard.

    Raises:
        InputError: for input that cannot be used, before training.
        RunError: for a loss, gradient or hypergradient that is not finite.
    """
    given = {"epochs": epochs, "seed": seed, "select": select, "patience": patience}
    given |= {"data.batch_size": batch_size, "data.meta_from": meta_from, "log": _as_word(log)}
    config = _composed(method, overrides, given, optimizer, {"lr": lr, "weight_decay": weight_decay})
    _check(model, callbacks, run_dir, config.log if log is None else log, log is not None)
    if meta is not None:
        config = _with_meta_given(config, meta_from)
    own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    backbone = Backbone(model, head)
    chosen = choose_device(device if device != "auto" or own is None else str(next(model.parameters()).device))
    backbone.to(chosen)
    with training_mode(backbone.net), _frozen(model, freeze), _as_numbers(own):
        data = prepare_fit(config, backbone, train, meta, val, ignore_index)
        config.loss.class_weight = _as_listed(class_weight, data, config.loss.class_weight)
        said = pixels_as_said(pixels, data.kind, chosen)
        parts = build_parts(config, backbone, data.train, data.meta, data.val, own, said)
        done, best, history = _trained(config, parts, run_dir, progress, callbacks)
    backbone.eval().load_state_dict(best)
    remember(backbone.net, data.kind, data.task)
    p_val = predict(backbone, parts.val.epoch(0))
    scaling = TemperatureScaling().fit(p_val)
    return Fit(
        model=backbone.net,
        backbone=backbone,
        gamma=parts.gamma,
        scaling=scaling,
        calibrated=CalibratedModel(backbone, data.kind, data.task, scaling.temperature),
        history=history,
        best_epoch=done.best_epoch,
        seconds=done.seconds,
        config=config,
        _val=p_val,
    )


def _as_listed(class_weight: str | Sequence[float] | Mapping[Any, float] | None, data: FitData, default: Any) -> Any:
    """Class weights as a config has them: by a rule's name, or one number for each class; None: the default."""
    require(class_weight is None or not data.soft, "class_weight goes with labels that are classes, not probabilities")
    if class_weight is None or isinstance(class_weight, str):
        return default if class_weight is None else class_weight
    assert data.task.n_classes is not None
    weights = class_weights(class_weight, data.task.n_classes, names=data.task.class_names)
    assert weights is not None
    return weights.tolist()


def _with_meta_given(config: Config, meta_from: str | None) -> Config:
    require(
        meta_from is None,
        f"meta_from says what serves as meta where none is given, got {meta_from!r} and meta",
    )
    return replace(config, data=replace(config.data, meta_from=DataConfig.meta_from))


def _as_word(log: Sequence[str] | None) -> str | None:
    """Names of sinks as the value of a word."""
    require(log is None or not isinstance(log, str), f"log must be a list of names, got the string {log!r}")
    return None if log is None else f"[{','.join(map(str, log))}]"


def _check(model: Any, callbacks: Sequence[Any], run_dir: str | Path | None, log: Sequence[str], given: bool) -> None:
    """given: whether `log` was, and is not the default."""
    require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}")
    require(
        ranks.size() == 1,
        "metacal.fit trains in one process: several ranks are for `metacal train`, or for MetaStep in your own loop",
    )
    for callback in callbacks:
        require(callable(callback), f"callbacks must be functions of what a validation measured, got {callback!r}")
    require(not given or run_dir is not None, f"log={list(log)} needs a run_dir, where the run's id is kept")
    if run_dir is not None:
        require_packages("run_dir", "matplotlib")
        require_sinks(log)


@contextmanager
def _as_numbers(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """For the block, the settings of `optimizer` as plain numbers, which a schedule scales and a log writes.

    Afterwards it has the settings that it came with, its learning rates among them.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    given = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    for group, settings in zip(groups, given):
        group.update({key: _number(value) for key, value in settings.items()})
    try:
        yield
    finally:
        for group, settings in zip(groups, given):
            group.pop("initial_lr", None)
            group.update(settings)


def _number(value: Any) -> Any:
    """A tensor of one number, or a numpy scalar, as a number; anything else as it is."""
    if isinstance(value, (tuple, list)):
        return type(value)(_number(v) for v in value)
    return value.item() if isinstance(value, (Tensor, np.generic)) and np.prod(value.shape) == 1 else value


@contextmanager
def _frozen(model: nn.Module, names: str | Sequence[str]) -> Iterator[None]:
    """The named modules without gradients, and in evaluation mode, for the block."""
    names = [names] if isinstance(names, str) else list(names)
    modules = dict(model.named_modules())
    for name in names:
        require(
            name in modules and name != "",
            f"freeze must name modules of the model, got {name!r}{did_you_mean(name, modules)}",
        )
    parameters = {p for name in names for p in modules[name].parameters() if p.requires_grad}
    for name in names:
        modules[name].eval()  # whoever holds the modes puts them back
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


def _composed(
    method: str,
    overrides: Sequence[str],
    arguments: Mapping[str, Any],
    optimizer: str | torch.optim.Optimizer | None,
    settings: Mapping[str, float | None],
) -> Config:
    """The config of a run that the arguments of `fit` describe, and only those and `overrides`.

    arguments: keys of the config; None: their defaults. settings: of the optimizer by its name.
    """
    require(not isinstance(overrides, str), f"overrides must be a list of words, got the string {overrides!r}")
    require(
        optimizer is None or isinstance(optimizer, (str, torch.optim.Optimizer)),
        f"optimizer must be the name of one, or a torch.optim.Optimizer over the model's parameters, got {optimizer!r}",
    )
    settings = {key: value for key, value in settings.items() if value is not None}
    own = isinstance(optimizer, torch.optim.Optimizer)
    for key in settings:
        require(not own, f"{key} cannot be given beside an optimizer of your own: set it there")
    taken = {"epochs", "seed", "select", "patience", "method", "device", "log", "loss.class_weight"}
    taken |= {f"optimizer.{key}" for key in settings}
    if isinstance(optimizer, str):
        taken.add("optimizer")
    for word in overrides:
        key = word.lstrip("+~").split("=", 1)[0]
        require(
            not own or key.split(".")[0] != "optimizer" or key == "optimizer.clip_norm",
            f"overrides cannot hold {key} beside an optimizer of your own: set it there",
        )
        require(
            key.split(".")[0] not in _OUT_OF_REACH or key in ("data.meta_batch_size", "data.meta_folds"),
            f"overrides cannot hold {key}: metacal.fit takes the model, the data and where to write as arguments",
        )
        require(key not in taken, f"overrides cannot hold {key}: it is an argument of metacal.fit")
    words = [f"method={method}", *(f"{key}={value}" for key, value in arguments.items() if value is not None)]
    if isinstance(optimizer, str):
        words.append(f"optimizer={optimizer}")
    words += [*overrides, *(f"optimizer.{key}={_number(value)}" for key, value in settings.items())]
    config = compose(words)
    check_read([(config, words)])
    return config


def _trained(
    config: Config,
    parts: Parts,
    run_dir: str | Path | None,
    progress: bool,
    callbacks: Sequence[Callable[[dict[str, float]], Any]],
) -> tuple[Progress, dict[str, Tensor], list[dict[str, float]]]:
    """Train `parts`: the progress, the best weights and what each validation measured."""
    folder = None
    # Model and data are the caller's own: nothing can be made again from the config alone.
    shown = replace(config, data=replace(config.data, name="own"), model=replace(config.model, name="own"))
    if run_dir is not None:
        folder = RunFolder(run_dir)
        folder.create()
    watch = build_watch(config, parts)
    devices = [parts.device] if parts.device.type == "cuda" else []
    with folder.locked() if folder else nullcontext(), torch.random.fork_rng(devices=devices):
        if folder is not None:
            require(not folder.config.exists(), f"run_dir {run_dir} already holds a run; choose another")
            folder.write_config(to_yaml(shown))
        torch.manual_seed(config.seed)
        log = RunLog(folder.path if folder else None, sinks=config.log)
        if folder is not None:
            log.start(shown)
        console = ConsoleLog(config.method, config.epochs * len(parts.train), config.epochs, enabled=progress)

        def ends(measured: dict[str, float]) -> bool:
            with evaluation_mode(parts.backbone):
                answers = [callback(dict(measured)) for callback in callbacks]
            return any(answers)

        try:
            done, best = train_loop(config, parts, watch, log, console, folder, after_validation=ends)
            log.finish({"time/train_s": done.seconds}, done.step)
        finally:
            console.stop()
            log.close()
    return done, best, log.history


def pixels_as_said(
    given: tuple[Sequence[float], Sequence[float]] | None, kind: AnyKind, device: torch.device
) -> Pixels | None:
    """How the inputs are made of pixels: as said, or by the transform of uint8 images."""
    if given is not None:
        mean, std = (torch.as_tensor(values, dtype=torch.float32, device=device) for values in given)
        require(mean.shape == std.shape and mean.dim() == 1, f"pixels must be (mean, std) per channel, got {given}")
        require(bool((std > 0).all()), f"pixels must have std > 0, got {given[1]}")
        return Pixels(mean, std)
    if kind.dtype != torch.uint8 or kind.transform is None:
        return None
    return Pixels(*(values.to(device, torch.float32) for values in (kind.transform.mean, kind.transform.std)))
