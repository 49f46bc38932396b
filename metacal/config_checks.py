"""What a config's values must be: choices, ranges, and keys that are only right or wrong together."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from metacal.config import Config, OptimizerConfig
from metacal.errors import InputError, require, require_choice

__all__ = ["validate"]

BATCH_PENALTIES = ("confidence_gap", "dece", "mdca", "mmce", "mmce_weighted", "sece", "skce", "soft_ece")
"""Penalties that are calibration errors of the batch, no means over samples."""

WITH_GAMMA = ("focal", "dual_focal", "inverse_focal", "adafocal")
"""Losses that take a gamma."""

CHOICES = {
    "loss.name": (*WITH_GAMMA, "cross_entropy", "label_smoothing", "confidence_penalty", "brier", "mse"),
    "loss.learn_smoothing": ("no", "scalar", "class"),
    "gamma.source": ("fixed", "flsd", "step", "adafocal", "scalar", "gamma_net"),
    "gamma.input": ("features", "noise", "random", "layer"),
    "penalties.robust_kl.norm": ("linf", "l2"),
    "penalties.margin_tail.norm": ("linf", "l2"),
    "optimizer.name": ("gd", "sgd", "adam", "adamw", "muon", "sam", "bulk_sgd"),
    "optimizer.base": ("sgd", "adam", "adamw", "muon"),
    "optimizer.rest": ("adamw", "sgd"),
    "optimizer.matrix": ("hessian", "gauss_newton"),
    "schedule.name": ("constant", "step", "cosine"),
    "meta.engine": ("forward", "reverse", "difference", "higher"),
    "meta.optimizer": ("adam", "sgd"),
    "meta.norm": ("l1", "l2"),
    "meta.reference_points": ("samples", "bank"),
    "monitor.name": ("light", "full", "off"),
    "precision": ("float32", "bf16"),
    "nonfinite": ("raise", "skip"),
}

# key -> (lowest, highest, whether the lowest itself is allowed)
_RANGES = {
    "epochs": (1, math.inf, True),
    "seed": (0, 2**63, True),
    "threads": (1, math.inf, True),
    "keep_every": (0, math.inf, True),
    "checkpoint_every": (0, math.inf, False),
    "loss.smoothing": (0, 1, True),
    "loss.beta": (0, math.inf, True),
    "data.mixup": (0, math.inf, True),
    "gamma.n_bins": (1, math.inf, True),
    "gamma.rate": (0, math.inf, True),
    "gamma.value": (0, math.inf, True),
    "gamma.init": (0, math.inf, False),
    "gamma.max": (0, math.inf, False),
    "gamma.hidden": (1, math.inf, True),
    "gamma.tau": (0, math.inf, False),
    "optimizer.lr": (0, math.inf, True),
    "optimizer.momentum": (0, 1, True),
    "optimizer.dampening": (0, 1, True),
    "optimizer.weight_decay": (0, math.inf, True),
    "optimizer.eps": (0, math.inf, False),
    "optimizer.clip_norm": (0, math.inf, False),
    "optimizer.rest_lr": (0, math.inf, True),
    "optimizer.rho": (0, math.inf, True),
    "optimizer.k": (1, math.inf, True),
    "optimizer.every": (1, math.inf, True),
    "optimizer.tolerance": (0, 1, False),
    "schedule.warmup_epochs": (0, math.inf, True),
    "schedule.factor": (0, math.inf, True),
    "schedule.final": (0, math.inf, True),
    "meta.every": (1, math.inf, True),
    "meta.start_epoch": (0, math.inf, True),
    "meta.inner_steps": (1, math.inf, True),
    "meta.lr": (0, math.inf, True),
    "meta.weight_decay": (0, math.inf, True),
    "meta.bandwidth": (0, math.inf, False),
    "meta.bank_batches": (1, math.inf, True),
    "monitor.val_every": (1, math.inf, True),
    "monitor.every": (0, math.inf, True),
    "monitor.subset": (1, math.inf, True),
    "monitor.tolerance": (0, 1, False),
    "monitor.robust_eps": (0, math.inf, False),
    "monitor.certificate": (0, math.inf, True),
    "monitor.max_share": (0, 1, False),
    "monitor.log_every": (1, math.inf, True),
    "monitor.n_bins": (1, math.inf, True),
    "monitor.resamples": (0, math.inf, True),
    "monitor.figures_every": (0, math.inf, True),
}

_PENALTY_RANGES = {
    "weight": (0, math.inf, True),
    "every": (1, math.inf, True),
    "ramp": (0, math.inf, True),
    "eps": (0, math.inf, True),
    "alpha": (0, math.inf, False),
    "steps": (1, math.inf, True),
    "temperature": (0, math.inf, False),
    "clip": (0, math.inf, True),
    "probes": (1, math.inf, True),
    "batch": (1, math.inf, True),
    "margin": (0, math.inf, True),
}


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def validate(config: Config) -> None:
    """Check every range and choice of `config`.

    Sizes of the data and options of the model are checked where they are used (`build_data`, `build_model`),
    which also happens before training starts.

    Raises:
        InputError: naming the first key at fault, its value and what would be right.
    """
    for key, options in CHOICES.items():
        require_choice(key, _get(config, key), options)
    ranges = _RANGES | {
        f"penalties.{f.name}.{key}": bounds
        for f in fields(config.penalties)
        for key, bounds in _PENALTY_RANGES.items()
        if hasattr(getattr(config.penalties, f.name), key)
    }
    for key, (low, high, closed) in ranges.items():
        value = _get(config, key)
        if value is None:
            continue
        good = low <= value <= high if closed else low < value <= high
        if high == math.inf:
            bound = f">= {low}" if closed else f"> {low}"
            good = good and math.isfinite(value)
        else:
            bound = f"in {'[' if closed else '('}{low}, {high}]"
        require(good, f"{key} must be {bound}, got {value}")
    _validate_combinations(config)


_SGD, _ADAM = {"momentum", "nesterov", "dampening"}, {"betas", "eps", "amsgrad"}
_MUON = {"momentum", "nesterov", "rest", "rest_lr", "betas", "eps"}
_EVERY_OPTIMIZER = {"name", "lr", "weight_decay", "decay_norm_and_bias", "clip_norm"}
_OPTIMIZER_KEYS = {
    "gd": _SGD,
    "sgd": _SGD,
    "adam": _ADAM,
    "adamw": _ADAM,
    "muon": _MUON,
    "bulk_sgd": _SGD | {"k", "matrix", "every", "tolerance"},
    "sam": {"base", "rho", "adaptive"},  # and those of its base
}


def _validate_optimizer_keys(optimizer: OptimizerConfig) -> None:
    """A setting that the chosen optimizer does not have must stay at its default: it would be ignored."""
    known = _EVERY_OPTIMIZER | _OPTIMIZER_KEYS[optimizer.name]
    if optimizer.name == "sam":
        known |= _OPTIMIZER_KEYS[optimizer.base]
    default = OptimizerConfig()
    for f in fields(optimizer):
        value = getattr(optimizer, f.name)
        if f.name not in known and value != getattr(default, f.name):
            what = optimizer.name if optimizer.name != "sam" else f"sam around {optimizer.base}"
            raise InputError(
                f"optimizer.{f.name}={value} is no setting of {what}, which has {', '.join(sorted(known))}"
            )


def _validate_combinations(config: Config) -> None:
    """Keys that are only right or wrong together."""
    _validate_optimizer_keys(config.optimizer)
    gamma, meta, optimizer, schedule = config.gamma, config.meta, config.optimizer, config.schedule
    monitor = config.monitor
    for key, on in (
        ("curvature", monitor.curvature),
        ("robust_eps", monitor.robust_eps is not None),
        ("certificate", monitor.certificate > 0),
    ):
        require(not on or monitor.every > 0, f"monitor.{key} needs monitor.every > 0, the steps between measurements")
    require(
        monitor.certificate == 0 or monitor.curvature,
        f"monitor.certificate needs monitor.curvature=true, got {monitor.certificate} without it",
    )
    require(
        monitor.name != "off" or monitor.every == 0,
        f"monitor=off measures nothing while training, got monitor.every={monitor.every}",
    )
    require(
        isinstance(meta.objective, str) or (isinstance(meta.objective, dict) and len(meta.objective) > 0),
        f"meta.objective must be a name or {{name: weight, ...}}, got {meta.objective!r}",
    )
    require(
        len(optimizer.betas) == 2 and all(0 <= b < 1 for b in optimizer.betas),
        f"optimizer.betas must be two numbers in [0, 1), got {list(optimizer.betas)}",
    )
    require(
        not optimizer.nesterov or (optimizer.momentum > 0 and optimizer.dampening == 0),
        f"optimizer.nesterov=true needs momentum > 0 and dampening 0, got momentum {optimizer.momentum} "
        f"and dampening {optimizer.dampening}",
    )
    require(
        all(0 < m < 1 for m in schedule.milestones) and sorted(schedule.milestones) == list(schedule.milestones),
        f"schedule.milestones must be increasing fractions in (0, 1), got {list(schedule.milestones)}",
    )
    if gamma.source == "step":
        require(
            len(gamma.values) == len(gamma.milestones) + 1 and all(v >= 0 for v in gamma.values),
            "gamma.values must hold one number >= 0 more than gamma.milestones, got "
            f"{list(gamma.values)} and {list(gamma.milestones)}",
        )
        require(
            all(0 < m < 1 for m in gamma.milestones) and sorted(set(gamma.milestones)) == list(gamma.milestones),
            f"gamma.milestones must be increasing fractions of the training in (0, 1), got {list(gamma.milestones)}; "
            f"with epochs={config.epochs}, epoch e is the fraction e/{config.epochs}",
        )
    require(gamma.init < gamma.max, f"gamma.init must be < gamma.max={gamma.max}, got {gamma.init}")
    require(
        (gamma.input == "layer") == (gamma.layer is not None),
        f"gamma.layer names a module of the backbone and goes with gamma.input=layer, got layer {gamma.layer} "
        f"with input {gamma.input}",
    )
    require(
        config.loss.name in WITH_GAMMA or gamma.source == "fixed",
        f"gamma.source={gamma.source} needs a loss with a gamma, {', '.join(WITH_GAMMA)}, got {config.loss.name}",
    )
    require(
        (config.loss.name == "adafocal") == (gamma.source == "adafocal"),
        f"loss.name=adafocal and gamma.source=adafocal go together, got {config.loss.name} and {gamma.source}",
    )
    require(
        config.loss.learn_smoothing == "no" or config.loss.name == "label_smoothing",
        f"loss.learn_smoothing={config.loss.learn_smoothing} needs loss.name=label_smoothing, got {config.loss.name}",
    )
    require(
        config.loss.learn_smoothing == "no" or 0 < config.loss.smoothing < 1,
        f"loss.smoothing must be in (0, 1) where it is learned, got {config.loss.smoothing}",
    )
    require(
        config.data.mixup == 0 or (optimizer.name != "gd" and meta.engine != "higher"),
        f"data.mixup={config.data.mixup} does not go with optimizer=gd or meta.engine=higher",
    )
    require(
        meta.inner_steps == 1 or meta.engine == "higher",
        f"meta.inner_steps > 1 needs meta.engine=higher, got {meta.inner_steps} with {meta.engine}",
    )
    require(
        meta.inner_steps <= meta.every,
        f"meta.inner_steps must be <= meta.every={meta.every}, so that unrolled windows do not overlap, "
        f"got {meta.inner_steps}",
    )
    require(
        not (meta.engine == "higher" and optimizer.name != "sgd"),
        f"meta.engine=higher unrolls only sgd, got optimizer {optimizer.name}; use meta.engine=forward",
    )
    require(
        not (meta.engine != "forward" and optimizer.name == "gd"),
        f"optimizer=gd takes its batch in parts, which only meta.engine=forward does, got {meta.engine}",
    )
    for name in ("hessian_trace", "gn_trace"):
        penalty = getattr(config.penalties, name)
        require(
            penalty.weight == 0 or penalty.batch is None or optimizer.name != "gd",
            f"penalties.{name}.batch={penalty.batch} does not go with optimizer=gd, whose batch is the whole set",
        )
    for name in BATCH_PENALTIES:
        weight = getattr(config.penalties, name).weight
        require(
            weight == 0 or optimizer.name != "gd",
            f"penalties.{name}.weight={weight} does not go with optimizer=gd, which takes the training set in parts: "
            "the penalty is no mean over samples",
        )
    require(
        not (optimizer.name == "gd" and (config.data.flip or config.data.crop_padding)),
        "optimizer=gd descends one function, the loss on the training set: data.flip and data.crop_padding must be off",
    )
    for name in ("robust_kl", "margin_tail"):
        penalty = getattr(config.penalties, name)
        require(penalty.weight == 0 or penalty.eps > 0, f"penalties.{name}.eps must be > 0, got {penalty.eps}")
    for name in ("sece", "mmce", "mmce_weighted", "skce"):
        require(
            getattr(config.penalties, name).weight == 0 or meta.engine != "higher",
            f"penalties.{name} has no second derivative, which meta.engine=higher needs; use meta.engine=forward",
        )
    require(
        not (config.penalties.margin_tail.robust and config.penalties.margin_tail.weight == 0),
        "penalties.margin_tail.robust=true needs penalties.margin_tail.weight > 0, got 0",
    )
