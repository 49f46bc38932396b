"""`metacal.fit`: train somebody's own model on their own data, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset

from metacal.calibration import TemperatureScaling
from metacal.compose import compose, to_yaml
from metacal.config import Config
from metacal.data import LoaderBatches, Split, as_batches, as_split
from metacal.data.splits import stratified_draw
from metacal.errors import InputError, require
from metacal.models import Backbone
from metacal.modes import evaluation_mode, training_mode
from metacal.penalties import Pixels
from metacal.predictions import Predictions
from metacal.report.report import Report, predict
from metacal.training.folder import RunFolder
from metacal.training.logging import ConsoleLog, RunLog
from metacal.training.loop import Progress
from metacal.training.loop import train as train_loop
from metacal.training.run import build_watch
from metacal.training.setup import (
    META_BATCH_LIMIT,
    AnyBatches,
    Parts,
    build_parts,
    choose_device,
    needs_meta,
    size_of_batches,
)

__all__ = ["Fit", "fit"]


# Keys of a run that arguments of `fit` replace.
_OUT_OF_REACH = {"baselines", "data", "model", "name", "overwrite", "resume", "run_dir", "runs"}


@dataclass
class Fit:
    """A trained model, with what is needed to use it and to know how true its confidence is.

    Attributes:
        model: the module given to `fit`, holding the weights of the epoch with the least validation NLL, in evaluation
            mode.
        backbone: the same module as `metacal.Backbone`, returning (logits, features).
        gamma: the gamma source, trained; None for losses without gamma.
        scaling: temperature scaling, fitted on val.
        history: what each validation measured: dicts of step, epoch and ``split/measure``.
        config: the run's config.
    """

    model: nn.Module
    backbone: Backbone
    gamma: nn.Module | None
    scaling: TemperatureScaling
    history: list[dict[str, float]]
    best_epoch: int
    seconds: float
    config: Config
    _val: Predictions
    _train: Split | None

    def __repr__(self) -> str:
        nll = next(line["val/nll"] for line in self.history if line["epoch"] == self.best_epoch)
        return (
            f"Fit(method={self.config.method}, best epoch {self.best_epoch} of {self.config.epochs}, "
            f"val NLL {nll:.4f}, temperature {self.scaling.temperature:.3f})"
        )

    @torch.no_grad()
    def predict_proba(self, x: Tensor, scaled: bool = True) -> Tensor:
        """Class probabilities (N, K) of inputs (N, ...), after temperature scaling unless `scaled=False`."""
        x = torch.as_tensor(x).to(next(self.model.parameters()).device)
        if x.dtype == torch.uint8 and self._train is not None and self._train.transform is not None:
            x = self._train.transform(x[:, None] if x.ndim == 3 else x)  # grey images, as `fit` takes them
        with evaluation_mode(self.backbone):
            logits, _ = self.backbone(x)
        return torch.softmax(logits.float() / (self.scaling.temperature if scaled else 1.0), dim=1)

    def evaluate(self, data: Any, **keys: Any) -> Report:
        """The report of `data` (as `fit` takes it), before and after temperature scaling; `keys` go to `Report`."""
        device = next(self.model.parameters()).device
        batches = _evaluation(data, "test", device, self._train)
        return Report(predict(self.backbone, batches.epoch(0)), self._val, **keys)


def fit(
    model: nn.Module,
    train: Any,
    meta: Any = None,
    val: Any = None,
    method: str = "gamma_net",
    *,
    epochs: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    pixels: tuple[Sequence[float], Sequence[float]] | None = None,
    head: str | None = None,
    device: str = "auto",
    overrides: Sequence[str] = (),
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> Fit:
    """Train `model` for calibration, in place.

    >>> result = metacal.fit(model, (x, y), method="gamma_net", epochs=30)      # doctest: +SKIP
    >>> print(result.evaluate((x_test, y_test)))                                # doctest: +SKIP
    >>> probabilities = result.predict_proba(x_new)                             # doctest: +SKIP

    Args:
        model: from inputs to logits (N, K); its last Linear layer is the head, unless `head` names another.
        train, meta, val: each a pair of tensors (x, y), a Dataset of pairs, or a DataLoader. Where `meta` (for methods
            that learn their gammas) or `val` is missing, a stratified tenth of `train` is set aside for it, which a
            DataLoader does not allow. A `meta` that the method does not need is added to `train`, so that methods see
            the same images (DataLoaders cannot be added up: there it stays unused). `val` selects the epoch and fits
            the temperature; keep test data out of them all.
        method: a name in `configs/method/`, such as gamma_net, focal, cross_entropy.
        epochs, batch_size, seed: of the training; `batch_size` does not touch a DataLoader.
        optimizer: your own over `model.parameters()` (for methods that learn their gammas SGD, Adam or AdamW of
            torch.optim or one of metacal.optim); else the configured one.
        pixels: (mean, std) per channel, when inputs are (pixel - mean) / std with pixels in [0, 1]: what penalties that
            perturb images need to know. uint8 images bring it with them.
        overrides: keys of the optimizer, schedule, loss, gamma, penalties, meta problem, monitors and precision, as on
            the command line: ``["optimizer=sam", "optimizer.lr=0.05", "penalties.mbls.weight=0.1"]``.
        run_dir: a folder for checkpoints, metrics.jsonl and TensorBoard's file; None writes nothing.

    Raises:
        InputError: for input that cannot be used, before training.
        RunError: for a loss, gradient or hypergradient that is not finite.
    """
    config = _composed(method, seed, batch_size, epochs, overrides, optimizer)
    require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = choose_device(device if device != "auto" or optimizer is None else str(next(model.parameters()).device))
    backbone = Backbone(model, head).to(chosen)
    with training_mode(backbone.net):
        batches, source = _batches(config, train, meta, val, chosen, backbone.n_classes)
        _require_fit(backbone, batches)
        said = pixels_as_said(pixels, source, chosen)
        parts = build_parts(config, backbone, *batches, optimizer=optimizer, pixels=said)
        done, best, history = _trained(config, parts, run_dir, progress)
    backbone.load_state_dict(best)
    backbone.eval()
    p_val = predict(backbone, parts.val.epoch(0))
    return Fit(
        model=backbone.net,
        backbone=backbone,
        gamma=parts.gamma,
        scaling=TemperatureScaling().fit(p_val),
        history=history,
        best_epoch=done.best_epoch,
        seconds=done.seconds,
        config=config,
        _val=p_val,
        _train=source,
    )


def _composed(
    method: str,
    seed: int,
    batch_size: int,
    epochs: int | None,
    overrides: Sequence[str],
    optimizer: torch.optim.Optimizer | None,
) -> Config:
    """The config of a run that the arguments of `fit` describe, and only those and `overrides`."""
    require(not isinstance(overrides, str), f"overrides must be a list of words, got the string {overrides!r}")
    require(
        optimizer is None or isinstance(optimizer, torch.optim.Optimizer),
        f"optimizer must be a torch.optim.Optimizer over the model's parameters, got {optimizer!r}; one of metacal's "
        "own by name: overrides=['optimizer=adam']",
    )
    for word in overrides:
        key = word.lstrip("+~").split("=", 1)[0]
        require(
            optimizer is None or key.split(".")[0] != "optimizer" or key == "optimizer.clip_norm",
            f"overrides cannot hold {key} beside an optimizer of your own: set it there",
        )
        require(
            key.split(".")[0] not in _OUT_OF_REACH or key == "data.meta_batch_size",
            f"overrides cannot hold {key}: metacal.fit takes the model, the data and where to write as arguments",
        )
        require(
            key not in ("epochs", "seed", "method", "device"),
            f"overrides cannot hold {key}: it is an argument of metacal.fit",
        )
    words = [f"method={method}", f"seed={seed}", f"data.batch_size={batch_size}", *overrides]
    if epochs is not None:
        words.append(f"epochs={epochs}")
    return compose(words)


def _trained(
    config: Config, parts: Parts, run_dir: str | Path | None, progress: bool
) -> tuple[Progress, dict[str, Tensor], list[dict[str, float]]]:
    """Train `parts`: the progress, the best weights and what each validation measured."""
    folder = None
    # Model and data are the caller's own: nothing can be made again from the config alone.
    shown = replace(config, data=replace(config.data, name="own"), model=replace(config.model, name="own"))
    if run_dir is not None:
        folder = RunFolder(run_dir)
        require(not folder.config.exists(), f"run_dir {run_dir} already holds a run; choose another")
        folder.create()
        folder.write_config(to_yaml(shown))
    watch = build_watch(config, parts)
    with torch.random.fork_rng(devices=[parts.device] if parts.device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        log = RunLog(folder.path if folder else None)
        if folder is not None:
            log.start(shown)
        console = ConsoleLog(config.method, config.epochs * len(parts.train), config.epochs, enabled=progress)
        try:
            done, best = train_loop(config, parts, watch, log, console, folder.path if folder else None)
            log.finish({"time/train_s": done.seconds}, done.step)
        finally:
            console.stop()
            log.close()
    return done, best, log.history


def pixels_as_said(
    given: tuple[Sequence[float], Sequence[float]] | None, source: Split | None, device: Any
) -> Pixels | None:
    """How the inputs are made of pixels: as said, or by the transform of uint8 images."""
    if given is not None:
        mean, std = (torch.as_tensor(values, dtype=torch.float32, device=device) for values in given)
        require(mean.shape == std.shape and mean.dim() == 1, f"pixels must be (mean, std) per channel, got {given}")
        require(bool((std > 0).all()), f"pixels must have std > 0, got {given[1]}")
        return Pixels(mean, std)
    if source is None or source.transform is None:
        return None
    return Pixels(source.transform.mean.float(), source.transform.std.float())


def _batches(
    config: Config, train: Any, meta: Any, val: Any, device: torch.device, n_classes: int
) -> tuple[tuple[AnyBatches, AnyBatches | None, AnyBatches], Split | None]:
    """Training, meta and validation batches, and the training split unless it is a DataLoader's."""
    learns = needs_meta(config)
    size, seed = config.data.batch_size, config.seed
    source: Split | None = None
    if isinstance(train, DataLoader):
        missing = [name for name, data in (("meta", meta if learns else train), ("val", val)) if data is None]
        require(
            not missing,
            f"{' and '.join(missing)} must be given when train is a DataLoader: nothing can be set aside from it",
        )
    else:
        source = as_split(train, "train", device)
        _require_labels(source.labels, "train", n_classes)  # before classes are counted to set some aside
        if val is None:
            val, source = _set_aside(source, "val", seed)
        if learns and meta is None:
            meta, source = _set_aside(source, "meta", seed)
        elif not learns and meta is not None and not isinstance(meta, DataLoader):
            source = _joined(source, as_split(meta, "meta", device, like=source))
        train = source
    shuffle = True
    if isinstance(train, Split):
        size, shuffle = size_of_batches(config, train)
    train_batches = as_batches(train, size, seed, "train", shuffle=shuffle, device=device)
    meta_batches = None
    if learns:
        if not isinstance(meta, DataLoader):
            meta = as_split(meta, "meta", device, like=source)
        meta_size = config.data.meta_batch_size or META_BATCH_LIMIT  # never more than there are
        meta_batches = as_batches(meta, meta_size, seed, "meta", device=device)
    return (train_batches, meta_batches, _evaluation(val, "val", device, source)), source


def _evaluation(data: Any, name: str, device: torch.device, like: Split | None) -> AnyBatches:
    """All samples of `data` once, in order."""
    if not isinstance(data, DataLoader):
        data = as_split(data, name, device, like=like)
    return as_batches(data, 1024, stream=name, shuffle=False, augment=False, device=device)


def _set_aside(split: Split, name: str, seed: int) -> tuple[Split, Split]:
    """A stratified tenth of `split` and the rest."""
    labels = split.labels.cpu().numpy()
    n_classes = int(labels.max()) + 1
    rng = np.random.default_rng([seed, len(name)])
    names = [str(k) for k in range(n_classes)]
    drawn, rest = stratified_draw(labels, max(n_classes, len(labels) // 10), rng, names, f"{name} (a tenth of train)")
    return _subset(split, drawn, name), _subset(split, rest, split.name)


def _joined(a: Split, b: Split) -> Split:
    """The samples of both, as `a` takes them."""
    if a.in_memory != b.in_memory or a.yields_labels != b.yields_labels:
        raise InputError("train and meta must be of one kind (both tensors, or both Datasets) to be joined")
    storage: Any = torch.cat([a.storage, b.storage]) if a.in_memory else ConcatDataset([a.storage, b.storage])
    return replace(a, storage=storage, labels=torch.cat([a.labels, b.labels]))


def _subset(split: Split, index: np.ndarray, name: str) -> Split:
    rows = torch.from_numpy(index)
    if split.in_memory:
        storage = split.storage[rows.to(split.device)]
    else:
        storage = Subset(split.storage, rows.tolist())
    return replace(split, name=name, storage=storage, labels=split.labels[rows.to(split.device)])


def _require_labels(labels: Tensor, name: str, n_classes: int) -> None:
    """Labels below K."""
    top = int(labels.max())
    require(top < n_classes, f"{name} labels must be in 0..{n_classes - 1} (the model's outputs), got {top}")


@torch.no_grad()
def _require_fit(backbone: Backbone, batches: Sequence[AnyBatches | None]) -> None:
    """Inputs that the model takes, in the first batch of each; labels below K, in all that can be looked through."""
    for b in batches:
        if b is None:
            continue
        x, y = next(b.epoch(0))
        _require_labels(y if isinstance(b, LoaderBatches) else b.split.labels, b.stream, backbone.n_classes)
        try:
            with evaluation_mode(backbone):
                backbone(x[:2])
        except RuntimeError as error:
            shape = ", ".join(map(str, x.shape[1:]))
            raise InputError(f"the model cannot take {b.stream} inputs of shape (N, {shape}): {error}") from None
