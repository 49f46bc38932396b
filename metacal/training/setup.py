"""From a config to the parts of a run: data, backbone, gamma source, optimizers and the bilevel step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from metacal.bilevel import MetaStep
from metacal.bilevel.inner import Mix, values_of
from metacal.calibration.surrogates import SURROGATES, Outer, build_outer
from metacal.config import Config
from metacal.config.parts import (
    learns,
    loss_of,
    needs_meta,
    optimizer_of,
    outer_terms,
    penalty_of,
    smoothing_of,
    source_of,
)
from metacal.curvature.loss import LogitLoss
from metacal.data import Batches, Data, Folds, LoaderBatches, Split, build_data
from metacal.data.batches import derived_seed, samples_at_a_time
from metacal.errors import InputError, require
from metacal.gamma import Around
from metacal.mixing import mixup
from metacal.models import Backbone, build_model
from metacal.modes import evaluation_mode
from metacal.monitors import measurable
from metacal.network import Network, coupling_layer
from metacal.objective import Term, class_weights
from metacal.optim.basic import slow_head
from metacal.options import options_of
from metacal.pixels import Pixels, require_known

__all__ = [
    "Parts",
    "build_backbone",
    "build_parts",
    "build_terms",
    "choose_device",
    "curvature_loss",
    "evaluation_batches",
    "fixed_subset",
    "gammas_of",
    "meta_batches",
    "pixels_of",
    "prepare_data",
    "train_batches",
    "trained_loss",
    "training_batches",
]


AnyBatches = Batches | LoaderBatches

META_BATCH_LIMIT = 2048  # a meta batch is all of the meta images, up to this many small ones, unless a size is given


@dataclass
class Parts:
    """All that the training loop works with."""

    device: torch.device
    backbone: Backbone
    gamma: nn.Module | None
    optimizer: torch.optim.Optimizer
    meta_optimizer: torch.optim.Optimizer | None
    step: MetaStep
    train: AnyBatches
    meta: AnyBatches | None
    val: AnyBatches
    pixels: Pixels | None = None  # how inputs are made of pixels, where that is known
    held_out: AnyBatches | None = None  # the meta images as they are, for a gamma source that follows their calibration


def evaluation_batches(split: Split, visits: Callable[[int], Tensor] | None = None) -> Batches:
    """All samples of a split, or those that an epoch visits, once, in their order, as they are."""
    return Batches(split, None, stream=split.name, shuffle=False, augment=False, visits=visits)


def training_batches(config: Config, data: Data) -> tuple[Batches, Batches | None]:
    """Shuffled, augmented batches of the training split, and those of the meta images where the method needs some."""
    train = train_batches(config, data.train, data.set_aside, data.folds)
    return train, meta_batches(config, data.train if data.meta is None else data.meta, data.folds)


def train_batches(config: Config, split: Split, set_aside: int = 0, folds: Folds | None = None) -> Batches:
    """Batches to train on: as many an epoch as if the images that serve as meta images were trained on too.

    So every method makes the same number of optimizer steps. Gradient descent takes all of the split at each step.

    Args:
        set_aside: how many images were taken from the split for meta. folds: those of the split that are held out.
    """
    if optimizer_of(config).whole_set:
        return Batches(split, len(split), config.seed, "train", shuffle=False, shared=True)
    size = config.data.batch_size
    steps = max(1, (len(split) + set_aside) // size)
    visits = None if folds is None else folds.others
    return Batches(split, size, config.seed, "train", steps=steps, visits=visits, shared=True)


def meta_batch_size(config: Config, split: Split) -> int:
    """What was asked for; else `META_BATCH_LIMIT`, of large inputs fewer, but no fewer than a training batch has."""
    least = min(config.data.batch_size, META_BATCH_LIMIT)
    return config.data.meta_batch_size or max(least, samples_at_a_time(split, META_BATCH_LIMIT))


def meta_batches(config: Config, split: Split, folds: Folds | None = None) -> Batches | None:
    """Batches of the meta images: all of the split, or of its fold whose turn it is; None where the method needs none.

    A batch has all of these, up to `meta_batch_size`.
    """
    if not needs_meta(config):
        return None
    count = len(split) if folds is None else folds.least
    size, augment = min(meta_batch_size(config, split), count), config.data.meta_augment
    if folds is None:
        return Batches(split, size, config.seed, "meta", augment=augment, shared=True)
    # As many in each pass over a fold, though folds differ by one sample.
    steps, visits = count // size, folds.held_out
    return Batches(split, size, config.seed, "meta", augment=augment, steps=steps, visits=visits, shared=True)


def fixed_subset(split: Split, size: int, name: str) -> tuple[Tensor, Tensor]:
    """`size` samples of a split as they are: the same ones for every seed and method, whatever the batches are."""
    x, y = next(Batches(split, min(size, len(split)), stream=name, augment=False).epoch(0))
    return x, y


def choose_device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU.

    Raises:
        InputError: when torch cannot use the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def prepare_data(config: Config, device: torch.device) -> Data:
    """The splits; without an outer problem all images but those of val are trained on (`data.fold_meta_into_train`)."""
    return build_data(config.data, seed=config.seed, device=device, needs_meta=needs_meta(config))


def pixels_of(data: Data) -> Pixels | None:
    """How the inputs are made of pixels in [0, 1]; None for data that are no pixels."""
    return None if data.pixel_range is None else Pixels(*data.normalization)


def build_parts(
    config: Config,
    backbone: Backbone,
    train: AnyBatches,
    meta: AnyBatches | None,
    val: AnyBatches,
    optimizer: torch.optim.Optimizer | None = None,
    pixels: Pixels | None = None,
) -> Parts:
    """The gamma source, the optimizers and the bilevel step that `config` asks for, around `backbone` and its batches.

    Args:
        optimizer: a user's own over the backbone's parameters, in place of the one that `config.optimizer` names.
        pixels: how inputs are made of pixels, for penalties that work on these.

    Raises:
        InputError: for parts that do not go together, such as a learned gamma without a meta split.
    """
    device = next(backbone.parameters()).device
    if config.memory_format == "channels_last":
        backbone.to(memory_format=torch.channels_last)
    require(
        not needs_meta(config) or meta is not None, f"method {config.method} sets its gammas by a meta split, got none"
    )
    labels = train.split.labels if isinstance(train, Batches) else None
    class_weight = class_weights(config.loss.class_weight, backbone.n_classes, labels)
    with _seeded(config.seed, device):
        gamma = build_gamma(config, backbone, train)
    if gamma is not None:
        gamma.to(device)
    if optimizer is None:
        optimizer = optimizer_of(config).build(backbone, curvature_loss(config))
    for group in optimizer.param_groups:  # the schedule scales it; saved and restored with the optimizer
        group["initial_lr"] = group["lr"]
    meta_optimizer: torch.optim.Optimizer | None = None
    if learns(config):
        assert gamma is not None
        m = config.meta
        keys: dict[str, Any] = {"lr": m.lr, "weight_decay": m.weight_decay}
        if m.optimizer == "adam":
            meta_optimizer = torch.optim.Adam(gamma.parameters(), betas=(m.beta1, m.beta2), **keys)
        else:
            meta_optimizer = torch.optim.SGD(gamma.parameters(), **keys)
    step = _meta_step(config, backbone, gamma, optimizer, meta_optimizer, pixels, class_weight)
    if step.chunk is not None:
        _require_divisible(backbone, train, step.chunk)
    if step.penalties:
        x, y = next(train.epoch(0))
        step.check(x[:8], y[:8])
    source, held_out = source_of(config), None
    if source is not None and source.follows:
        held_out = evaluation_batches(meta.split, meta.visits) if isinstance(meta, Batches) else meta
    meta = meta if learns(config) else None
    return Parts(device, backbone, gamma, optimizer, meta_optimizer, step, train, meta, val, pixels, held_out)


def _meta_step(
    config: Config,
    backbone: Backbone,
    gamma: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    meta_optimizer: torch.optim.Optimizer | None,
    pixels: Pixels | None,
    class_weight: Tensor | None,
) -> MetaStep:
    return MetaStep(
        torch.compile(backbone) if config.compile else backbone,  # type: ignore[arg-type]
        optimizer,
        gamma,
        meta_optimizer,
        outer=build_objective(config),
        engine=config.meta.engine,
        engine_options={"steps": config.meta.inner_steps} if config.meta.engine == "higher" else None,
        loss=loss_of(config),
        penalties=build_terms(config, pixels),
        clip_norm=config.optimizer.clip_norm,
        autocast=None if config.precision == "float32" else torch.bfloat16,
        outer_autocast=config.precision == "bf16_outer",
        every=config.meta.every,
        nonfinite=config.nonfinite,
        chunk=config.data.batch_size if optimizer_of(config).whole_set else None,
        mix=_mix(config),
        horizon=config.meta.horizon,
        horizon_decay=config.meta.horizon_decay,
        class_weight=class_weight,
    )


def _require_divisible(backbone: Backbone, train: AnyBatches, chunk: int) -> None:
    """Gradient descent in parts of `chunk` samples, on a network that allows it."""
    require(isinstance(train, Batches), "optimizer=gd takes the whole training set at once, which a DataLoader has not")
    assert isinstance(train, Batches)
    found = coupling_layer(backbone.net)
    if found is not None and len(train.split) > chunk:
        raise InputError(
            f"optimizer=gd takes the {len(train.split)} training samples in parts of data.batch_size={chunk}, but "
            f"layer {found[0]} takes statistics over a batch: set model.norm=group (or a model without BatchNorm), or "
            f"data.batch_size>={len(train.split)}"
        )


def _mix(config: Config) -> Mix | None:
    """Mixup of training batches, drawn from the seed and the number of the step."""
    alpha, seed = config.data.mixup, config.seed
    if alpha == 0:
        return None

    def mix(x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor, float]:
        return mixup(x, y, alpha, torch.Generator().manual_seed(derived_seed(seed, "mixup", step)))

    return mix


def curvature_loss(config: Config) -> str:
    """The loss whose curvature is measured and penalised: mse for a model that trains on it, else cross-entropy."""
    return "mse" if config.loss.name == "mse" else "cross_entropy"


def trained_loss(
    config: Config, backbone: Backbone, source: nn.Module | None, x: Tensor, y: Tensor, epoch: float
) -> LogitLoss:
    """The per-sample loss that is trained, with the gammas or smoothing of these examples in evaluation mode."""
    name = config.loss.name
    if source is None:
        return measurable(name, getattr(config.loss, "smoothing", None))
    return measurable(name, gammas_of(backbone, source, x, y, epoch))


def gammas_of(backbone: Backbone, source: nn.Module, x: Tensor, y: Tensor, epoch: float) -> Tensor:
    """What a source gives for these examples, `(N,)` or 0-d, with the backbone in evaluation mode."""
    with evaluation_mode(backbone):
        return values_of(source, Network(backbone), x, y, epoch)


def build_terms(config: Config, pixels: Pixels | None) -> dict[str, Term]:
    """The penalties with a weight, in the order of their names in the schema.

    pixels: how inputs are made of pixels in [0, 1]; None where that is not known.

    Raises:
        InputError: for a penalty in units of pixels without knowing their range.
    """
    context = {"pixels": pixels, "seed": config.seed, "loss": curvature_loss(config)}
    terms: dict[str, Term] = {}
    for f in fields(config.penalties):
        keys = getattr(config.penalties, f.name)
        if keys.weight == 0:
            continue
        penalty = penalty_of(config, f.name, **context)
        if getattr(penalty, "needs_pixels", False):
            require_known(f"penalties.{f.name}", f"penalties.{f.name}.units", pixels)
        terms[f.name] = Term(penalty, keys.weight, keys.every, keys.ramp)
    return terms


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within it torch's global generators start from `seed`; outside they stay as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def build_backbone(config: Config, data: Data, device: torch.device) -> Backbone:
    """The backbone that `config.model` names, for `data`, on `device`; its initialisation depends on the seed alone."""
    with _seeded(config.seed, device):
        backbone = Backbone(build_model(config.model, data.n_classes, data.input_shape))
    slow_head(backbone.head, optimizer_of(config).head_lr)
    return backbone.to(device)


def build_gamma(config: Config, backbone: Backbone, train: AnyBatches) -> nn.Module | None:
    """The source of gammas or of a learned smoothing that the config names; None for losses that take neither."""
    around = Around(backbone, lambda: next(train.epoch(0))[0], config.epochs, config.seed)
    smoothing = smoothing_of(config)
    if smoothing is not None:
        return smoothing.build(around, config.loss.smoothing)
    source = source_of(config)
    return None if source is None else source.build(around)


def build_objective(config: Config) -> Outer:
    """The outer objective `(logits, labels) -> scalar`: a surrogate by name, or a weighted sum of them."""
    m = config.meta
    terms = outer_terms(config)
    known = {name for term in terms for name in options_of(SURROGATES[term])}
    keys: dict[str, Any] = {name: value for name, value in vars(m).items() if name in known}
    return build_outer(terms, reference_points=m.reference_points, bank_size=m.bank_batches, **keys)
