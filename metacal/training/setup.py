"""From a config to the parts of a run: data, backbone, gamma source, optimizers and the bilevel step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metacal import losses
from metacal.bilevel import MetaStep
from metacal.bilevel.inner import Mix
from metacal.calibration.surrogates import Outer, build_outer
from metacal.config import Config
from metacal.config_checks import WITH_GAMMA
from metacal.data import Batches, Data, LoaderBatches, Split, build_data
from metacal.data.batches import derived_seed
from metacal.errors import InputError, require
from metacal.gamma import FLSD, AdaFocal, FixedGamma, GammaNet, LearnedSmoothing, ScalarGamma, StepGamma, pool
from metacal.mixing import mixup
from metacal.models import Backbone, build_model
from metacal.modes import evaluation_mode
from metacal.network import coupling_layer
from metacal.objective import Term
from metacal.optim import backbone_optimizer, build_optimizer
from metacal.penalties import PENALTIES, Pixels

__all__ = [
    "Parts",
    "build_backbone",
    "build_parts",
    "build_terms",
    "choose_device",
    "curvature_loss",
    "evaluation_batches",
    "fixed_subset",
    "learns_gamma",
    "needs_meta",
    "pixels_of",
    "prepare_data",
    "size_of_batches",
]


AnyBatches = Batches | LoaderBatches

META_BATCH_LIMIT = 2048  # a meta batch is the whole meta split, up to this many samples, unless a size is given


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
    held_out: AnyBatches | None = None  # the meta split as it is, for a gamma source that follows its calibration


def evaluation_batches(split: Split) -> Batches:
    """All samples of a split once, in their order, as they are."""
    return Batches(split, 1024, stream=split.name, shuffle=False, augment=False)


def training_batches(config: Config, data: Data) -> tuple[Batches, Batches | None]:
    """Shuffled, augmented batches of the training split and, where there is one, of the meta split."""
    size, shuffle = size_of_batches(config, data.train)
    train = Batches(data.train, size, config.seed, stream="train", shuffle=shuffle)
    if data.meta is None:
        return train, None
    size = config.data.meta_batch_size or min(len(data.meta), META_BATCH_LIMIT)
    return train, Batches(data.meta, size, config.seed, stream="meta")


def size_of_batches(config: Config, train: Split) -> tuple[int, bool]:
    """How many samples a step takes, and whether they are shuffled: gradient descent takes all of them."""
    whole = config.optimizer.name == "gd"
    return (len(train) if whole else config.data.batch_size), not whole


def fixed_subset(split: Split, size: int, name: str) -> tuple[Tensor, Tensor]:
    """`size` samples of a split as they are: the same ones for every seed and method, whatever the batches are."""
    x, y = next(Batches(split, min(size, len(split)), stream=name, augment=False).epoch(0))
    return x, y


def learns_gamma(config: Config) -> bool:
    """Whether the run has an outer problem: a gamma source (or smoothing) with parameters of its own."""
    learned = config.loss.name in WITH_GAMMA and config.gamma.source in ("gamma_net", "scalar")
    return learned or config.loss.learn_smoothing != "no"


def needs_meta(config: Config) -> bool:
    """Whether the method needs a meta split: for an outer problem, or to follow its calibration error."""
    return learns_gamma(config) or config.gamma.source == "adafocal"


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
    """The four splits; without an outer problem the meta split goes back to train (`data.fold_meta_into_train`)."""
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
    learns = learns_gamma(config)
    require(
        not needs_meta(config) or meta is not None, f"method {config.method} sets its gammas by a meta split, got none"
    )
    with _seeded(config.seed, device):
        gamma = build_gamma(config, backbone, train)
    if gamma is not None:
        gamma.to(device)
    if optimizer is None:
        optimizer = _backbone_optimizer(config, backbone)
    for group in optimizer.param_groups:  # the schedule scales it; saved and restored with the optimizer
        group["initial_lr"] = group["lr"]
    meta_optimizer = None
    if learns:
        assert gamma is not None
        m = config.meta
        meta_optimizer = build_optimizer(m.optimizer, gamma.parameters(), m.lr, weight_decay=m.weight_decay)
    step = MetaStep(
        torch.compile(backbone) if config.compile else backbone,  # type: ignore[arg-type]
        optimizer,
        gamma,
        meta_optimizer,
        outer=build_objective(config),
        engine=config.meta.engine,
        engine_options={"steps": config.meta.inner_steps} if config.meta.engine == "higher" else None,
        loss=build_loss(config),
        penalties=build_terms(config, pixels),
        clip_norm=config.optimizer.clip_norm,
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
        every=config.meta.every,
        nonfinite=config.nonfinite,
        chunk=config.data.batch_size if config.optimizer.name == "gd" else None,
        mix=_mix(config),
    )
    if step.chunk is not None:
        _require_divisible(backbone, train, step.chunk)
    if step.penalties:
        x, y = next(train.epoch(0))
        step.check(x[:8], y[:8])
    held_out = None
    if isinstance(gamma, AdaFocal):
        held_out = evaluation_batches(meta.split) if isinstance(meta, Batches) else meta
    return Parts(
        device, backbone, gamma, optimizer, meta_optimizer, step, train, meta if learns else None, val, held_out
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


def _backbone_optimizer(config: Config, backbone: Backbone) -> torch.optim.Optimizer:
    o = config.optimizer
    return backbone_optimizer(
        backbone,
        o.name,
        o.lr,
        weight_decay=o.weight_decay,
        decay_norm_and_bias=o.decay_norm_and_bias,
        momentum=o.momentum,
        nesterov=o.nesterov,
        dampening=o.dampening,
        betas=o.betas,
        eps=o.eps,
        amsgrad=o.amsgrad,
        rest=o.rest,
        rest_lr=o.rest_lr,
        base=o.base,
        rho=o.rho,
        adaptive=o.adaptive,
        k=o.k,
        matrix=o.matrix,
        every=o.every,
        tol=o.tolerance,
        loss=curvature_loss(config),
    )


def curvature_loss(config: Config) -> str:
    """The loss whose curvature is measured and penalised: mse for a model that trains on it, else cross-entropy."""
    return "mse" if config.loss.name == "mse" else "cross_entropy"


def build_terms(config: Config, pixels: Pixels | None) -> dict[str, Term]:
    """The penalties with a weight, in the order of their names in the schema.

    pixels: how inputs are made of pixels in [0, 1]; None where that is not known.

    Raises:
        InputError: for a penalty that works on pixels without knowing their range.
    """
    terms: dict[str, Term] = {}
    for f in fields(config.penalties):
        keys = vars(getattr(config.penalties, f.name)).copy()
        term = {"weight": keys.pop("weight"), "every": keys.pop("every"), "ramp_epochs": keys.pop("ramp")}
        if term["weight"] == 0:
            continue
        if f.name == "robust_kl" or (f.name == "margin_tail" and config.penalties.margin_tail.robust):
            if pixels is None:
                raise InputError(
                    f"penalties.{f.name} works on pixels, and the range of these inputs' pixels is not known: give "
                    "uint8 images, or to metacal.fit pixels=(mean, std) with inputs = (pixel - mean) / std and pixels "
                    "in [0, 1]"
                )
            keys["pixels"] = pixels
        if f.name in ("hessian_trace", "gn_trace"):
            keys |= {"seed": config.seed, "loss": curvature_loss(config)}
        terms[f.name] = Term(PENALTIES[f.name](**keys), **term)
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
        return Backbone(build_model(config.model, data.n_classes, data.input_shape)).to(device)


def build_loss(config: Config) -> str | Callable[..., Tensor]:
    """The per-sample loss that `config.loss` names."""
    if config.loss.name == "label_smoothing" and config.loss.learn_smoothing == "no":
        return partial(losses.label_smoothing, smoothing=config.loss.smoothing)
    if config.loss.name == "confidence_penalty":
        return partial(losses.confidence_penalty, beta=config.loss.beta)
    return config.loss.name


def build_gamma(config: Config, backbone: Backbone, train: AnyBatches) -> nn.Module | None:
    """The gamma source that `config.gamma` names; None for losses without gamma."""
    g = config.gamma
    if config.loss.learn_smoothing != "no":
        per_class = config.loss.learn_smoothing == "class"
        return LearnedSmoothing(per_class, backbone.n_classes if per_class else 0, init=config.loss.smoothing)
    if config.loss.name not in WITH_GAMMA:
        return None
    if g.source == "adafocal":
        return AdaFocal(g.n_bins, g.rate, g.init)
    if g.source == "fixed":
        return FixedGamma(g.value)
    if g.source == "flsd":
        return FLSD()
    if g.source == "step":
        # rounded, so that a whole epoch is not missed by an ulp
        return StepGamma([round(m * config.epochs, 9) for m in g.milestones], g.values)
    if g.source == "scalar":
        return ScalarGamma(g.init, g.tau, g.max)
    return GammaNet(
        _gamma_inputs(config, backbone, train),
        hidden=g.hidden,
        tau=g.tau,
        gamma_init=g.init,
        gamma_max=g.max,
        input=g.input,
        layer=None if g.layer is None else f"net.{g.layer}",  # a Backbone holds the model as `net`
        num_classes=backbone.n_classes if g.label_aware else 0,
        seed=config.seed,
    )


def _gamma_inputs(config: Config, backbone: Backbone, train: AnyBatches) -> int:
    """How many numbers a sample gives to the gamma-net: the features' width, or that of the named layer's output."""
    if config.gamma.input != "layer":
        return backbone.in_features
    modules = dict(backbone.net.named_modules())
    layer = config.gamma.layer or ""
    require(layer in modules, f"gamma.layer must name a module of the backbone, got {layer!r}")
    widths: list[int] = []
    hook = modules[layer].register_forward_hook(lambda _m, _i, output: widths.append(pool(output, layer).shape[1]))
    try:
        with torch.no_grad(), evaluation_mode(backbone):
            backbone(next(train.epoch(0))[0])
    finally:
        hook.remove()
    require(bool(widths), f"gamma.layer={layer} is not run in the backbone's forward pass")
    return widths[0]


def build_objective(config: Config) -> Outer:
    """The outer objective `(logits, labels) -> scalar`: a surrogate by name, or a weighted sum of them."""
    m = config.meta
    weights = m.objective if isinstance(m.objective, dict) else {m.objective: 1.0}
    keys = {"bandwidth": m.bandwidth, "self_term": m.self_term, "norm": m.norm}
    terms: dict[str, Any] = {}
    for name, weight in weights.items():
        own = weight if isinstance(weight, dict) else {"weight": weight}
        terms[name] = keys | own if name == "sece" else own
    return build_outer(terms, reference_points=m.reference_points, bank_size=m.bank_batches)
