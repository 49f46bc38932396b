"""Rules across sections: keys that are right or wrong only together. What a value alone must be, its option says."""

from __future__ import annotations

from dataclasses import fields

from metacal.config.parts import needs_meta, optimizer_of, outer_terms, penalty_of, smoothing_of, source_of
from metacal.config.schema import Config
from metacal.errors import require
from metacal.losses import LOSSES, SIGNED, takes
from metacal.monitors import measurable

__all__ = ["validate"]


def validate(config: Config) -> None:
    """Check what goes together.

    Sizes of the data and options of the model are checked where they are used (`build_data`, `build_model`),
    which also happens before training starts.

    Raises:
        InputError: naming the first key at fault, its value and what would be right.
    """
    optimizer_of(config).check("optimizer.")
    require(
        config.patience is None or config.select != "last",
        f"patience={config.patience} needs a value that can stop improving, which select=last has not; leave it out",
    )
    for rule in (_monitor, _gamma, _smoothing, _outer, _penalties, _whole_set):
        rule(config)


def _monitor(config: Config) -> None:
    m = config.monitor
    for key, on in (
        ("curvature", m.curvature),
        ("robust_eps", m.robust_eps is not None),
        ("certificate", m.certificate > 0),
    ):
        require(not on or m.every > 0, f"monitor.{key} needs monitor.every > 0, the steps between measurements")
    if m.curvature and m.curvature_loss == "trained":
        measurable(config.loss.name)
    require(
        m.certificate == 0 or m.curvature,
        f"monitor.certificate needs monitor.curvature=true, got {m.certificate} without it",
    )
    require(
        m.name != "off" or m.every == 0,
        f"monitor=off measures nothing while training, got monitor.every={m.every}",
    )


def _gamma(config: Config) -> None:
    gamma, loss = config.gamma, config.loss
    with_gamma = [name for name, function in LOSSES.items() if takes(function) == "gamma"]
    require(
        loss.name in with_gamma or gamma.source == "fixed",
        f"gamma.source={gamma.source} needs a loss with a gamma, {', '.join(with_gamma)}, got {loss.name}",
    )
    require(
        (loss.name == "adafocal") == (gamma.source == "adafocal"),
        f"loss.name=adafocal and gamma.source=adafocal go together, got {loss.name} and {gamma.source}",
    )
    source = source_of(config)
    if source is not None:
        source.check("gamma.")
        require(
            getattr(gamma, "min", 0) == 0 or loss.name in SIGNED,
            f"gamma.min must be 0 with loss.name={loss.name}, got {getattr(gamma, 'min', 0)}: negative gammas need "
            "loss.name=signed_focal",
        )
    if gamma.source == "step":
        m = list(gamma.milestones)
        require(
            all(0 < x < 1 for x in m) and sorted(set(m)) == m,
            f"gamma.milestones must be increasing fractions of the training in (0, 1), got {m}; "
            f"with epochs={config.epochs}, epoch e is the fraction e/{config.epochs}",
        )


def _smoothing(config: Config) -> None:
    loss = config.loss
    if smoothing_of(config) is None:
        return
    require(
        takes(LOSSES[loss.name]) == "smoothing",
        f"loss.learn_smoothing={loss.learn_smoothing} needs loss.name=label_smoothing, got {loss.name}",
    )
    require(0 < loss.smoothing < 1, f"loss.smoothing must be in (0, 1) where it is learned, got {loss.smoothing}")


def _outer(config: Config) -> None:
    meta, optimizer = config.meta, config.optimizer.name
    outer_terms(config)
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
        meta.horizon <= meta.every,
        f"meta.horizon must be <= meta.every={meta.every}, so that windows do not overlap, got {meta.horizon}",
    )
    require(
        meta.horizon == 1 or meta.engine == "forward",
        f"meta.horizon > 1 needs meta.engine=forward, got {meta.horizon} with {meta.engine}",
    )
    require(
        meta.engine != "higher" or optimizer == "sgd",
        f"meta.engine=higher unrolls only sgd, got optimizer {optimizer}; use meta.engine=forward",
    )
    require(
        config.data.mixup == 0 or meta.engine != "higher",
        f"data.mixup={config.data.mixup} does not go with meta.engine=higher",
    )


def _penalties(config: Config) -> None:
    for f in fields(config.penalties):
        keys = getattr(config.penalties, f.name)
        if keys.weight == 0:
            continue
        penalty = penalty_of(config, f.name)
        require(getattr(keys, "eps", 1) > 0, f"penalties.{f.name}.eps must be > 0, got {getattr(keys, 'eps', None)}")
        require(
            not getattr(penalty, "first_order", False) or config.meta.engine != "higher",
            f"penalties.{f.name} has no second derivative, which meta.engine=higher needs; use meta.engine=forward",
        )
    tail = config.penalties.margin_tail
    require(
        not (tail.robust and tail.weight == 0),
        "penalties.margin_tail.robust=true needs penalties.margin_tail.weight > 0, got 0",
    )


def _whole_set(config: Config) -> None:
    """Gradient descent: every step takes the training set, in parts."""
    if not optimizer_of(config).whole_set:
        return
    name, data = f"optimizer={config.optimizer.name}", config.data
    require(data.mixup == 0, f"data.mixup={data.mixup} does not go with {name}")
    require(
        not (data.flip or data.crop_padding),
        f"{name} descends one function, the loss on the training set: data.flip and data.crop_padding must be off",
    )
    require(
        data.meta_from != "folds" or not needs_meta(config),
        f"{name} descends one function, and data.meta_from=folds changes the training set at every epoch",
    )
    require(
        config.meta.engine == "forward",
        f"{name} takes its batch in parts, which only meta.engine=forward does, got {config.meta.engine}",
    )
    for f in fields(config.penalties):
        weight = getattr(config.penalties, f.name).weight
        require(
            weight == 0 or not getattr(penalty_of(config, f.name), "batchwise", False),
            f"penalties.{f.name}.weight={weight} does not go with {name}, which takes the training set in parts: "
            "the penalty is no mean over samples",
        )
