"""The typed schema of `configs/`: every key of a run, its type, default and range.

The dataclasses are registered with Hydra (group YAMLs are merged into them, so an unknown key or a wrong type
stops the composition), and `validate` checks the ranges before any work is done. No torch is imported here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from metacal.errors import require, require_choice

__all__ = [
    "Config",
    "DataConfig",
    "GammaConfig",
    "LossConfig",
    "MetaConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "validate",
]


@dataclass
class DataConfig:
    """Where the images come from and how they are split, batched and augmented.

    Sizes: a float in (0, 1) is a fraction, an int >= 1 a count.
    """

    name: str = "digits"  # digits | npz | folder | cifar10 | cifar100 | fashion_mnist | mnist | svhn
    path: str | None = None
    download: bool = False
    image_size: int | None = None  # folder: resize to this
    train_size: Any = None  # None: all; else a stratified subset for train and meta together
    meta_size: Any = 0.1  # of train and meta together
    val_size: Any = 0.1  # of the labelled pool
    test_size: Any = 0.2  # only where the source has no test set
    split_seed: int | None = 0  # the same splits for every training seed; null: those of the run's seed
    fold_meta_into_train: str = "auto"  # auto | true | false
    batch_size: int = 128
    meta_batch_size: int | None = None  # None: the whole meta split, up to 2048
    crop_padding: int = 0
    flip: bool = False
    normalize: str = "auto"  # auto: per channel, from the training images (or mean and std below) | none
    mean: list[float] | None = None  # per channel, of pixels in [0, 1]; given together with std
    std: list[float] | None = None
    storage: str = "auto"  # memory: one tensor on the device | stream: a DataLoader | auto: by size
    workers: int = 2  # processes that read image files or stream


@dataclass
class ModelConfig:
    """The backbone. None means the model's own default; an option that the model lacks is refused when set."""

    name: str = "mlp"  # mlp | cnn | resnet20/32/44/56/110 | wide_resnet | densenet | vit | torchvision/<name>
    hidden: list[int] | None = None  # mlp: [200, 200]
    activation: str | None = None  # mlp, cnn: tanh (mlp's) | relu (cnn's) | gelu
    width: int | None = None  # cnn: 32, resnets: 16, wide_resnet: 10 (times 16), densenet: 12 (growth), vit: 128
    depth: int | None = None  # wide_resnet: 28, densenet: 100, vit: 6
    dropout: float | None = None  # mlp, cnn, wide_resnet, densenet, vit: 0
    norm: str | None = None  # cnn, resnets, wide_resnet, densenet: batch | group
    patch_size: int | None = None  # vit: 4
    heads: int | None = None  # vit: 4
    stem: str | None = None  # torchvision/<name>: small | original; by the images' size


@dataclass
class LossConfig:
    """The per-sample loss of the inner problem."""

    name: str = "focal"  # focal | cross_entropy | label_smoothing | brier | mse
    smoothing: float = 0.05  # label_smoothing: the alpha of alpha/K


@dataclass
class GammaConfig:
    """Where the focal loss's gamma comes from."""

    source: str = "fixed"  # fixed | flsd | step | scalar | gamma_net; the last two are learned by the outer problem
    value: float = 3.0  # fixed
    milestones: list[int] = field(default_factory=list)  # step: epochs at which the next value begins
    values: list[float] = field(default_factory=list)  # step: one more than milestones
    init: float = 1.0  # gamma_net, scalar: gamma at the start
    max: float = 50.0  # gamma_net, scalar: the smooth cap
    tau: float = 1.0  # gamma_net, scalar: the scale of the output
    hidden: int = 64  # gamma_net
    input: str = "features"  # gamma_net: features | noise | random (of the input) | layer
    layer: str | None = None  # gamma_net with input=layer: the module of the backbone whose output it reads
    label_aware: bool = False  # gamma_net: one-hot label appended to the input


@dataclass
class OptimizerConfig:
    """The backbone's optimizer."""

    name: str = "sgd"  # sgd | adam | adamw
    lr: float = 0.1
    momentum: float = 0.9  # sgd
    nesterov: bool = False  # sgd
    dampening: float = 0.0  # sgd
    weight_decay: float = 5e-4
    decay_norm_and_bias: bool = True  # false: no weight decay on one-dimensional parameters
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # adam, adamw
    eps: float = 1e-8  # adam, adamw
    amsgrad: bool = False  # adam, adamw
    clip_norm: float | None = None


@dataclass
class ScheduleConfig:
    """The learning rate over training, as a factor of optimizer.lr; updated every step."""

    name: str = "cosine"  # constant | step | cosine
    warmup_epochs: float = 0.0
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])  # step: fractions of the training
    factor: float = 0.1  # step
    final: float = 0.0  # cosine: the factor at the end


@dataclass
class MetaConfig:
    """The outer problem: what the gamma source minimises on the meta split, and how."""

    objective: Any = "sece"  # a surrogate's name, or {name: weight, ...}
    every: int = 1  # one outer step every so many inner steps
    start_epoch: int = 0  # the first epoch with outer steps
    engine: str = "forward"  # forward | reverse | difference | higher
    inner_steps: int = 1  # engine higher only
    optimizer: str = "adam"  # adam | sgd
    lr: float = 1e-2
    weight_decay: float = 0.0
    bandwidth: float = 0.01  # sece
    self_term: bool = True  # sece
    norm: str = "l1"  # sece: l1 | l2
    reference_points: str = "samples"  # sece: samples | bank
    bank_batches: int = 8  # sece with a bank: meta batches that it remembers


@dataclass
class MonitorConfig:
    """What is watched, and how often."""

    name: str = "light"  # light | full | off
    val_every: int = 1  # epochs between validations
    log_every: int = 10  # steps between scalars
    every: int = 0  # steps between measurements on the fixed train and val subsets; 0: never
    subset: int = 512  # samples of each
    curvature: bool = False  # sharpness and traces on the training subset, with `every`
    tolerance: float = 0.01  # of eigenvalues, relative
    robust_eps: float | None = None  # L-infinity radius of robust margins, in normalised units; None: none
    certificate: int = 0  # samples for the margin bound on the Gauss-Newton sharpness; 0: none
    max_share: float | None = 0.1  # of the run's time for these measurements: they wait rather than exceed it
    n_bins: int = 15
    resamples: int = 1000  # bootstrap resamples behind the test intervals; 0: no intervals
    histograms: bool = True
    figures_every: int = 10  # epochs between reliability diagrams in TensorBoard; 0: only the last


@dataclass
class Config:
    """A whole run. `configs/train.yaml` and its groups compose it."""

    name: str = "default"  # the experiment: runs/<name>/<overrides>/seed<seed>
    method: str = "gamma_net"
    seed: int = 0
    epochs: int = 30
    runs: str = "runs"
    run_dir: str | None = None  # None: derived from name, the overrides and the seed
    resume: str | None = None  # a run folder to go on with
    overwrite: bool = False  # start over where a run exists
    device: str = "auto"
    threads: int | None = None
    precision: str = "float32"  # float32 | bf16
    compile: bool = False
    nonfinite: str = "raise"  # raise | skip
    checkpoint_every: float = 1.0  # epochs; a fraction saves within an epoch
    keep_every: int = 0  # epochs between checkpoints that are kept (checkpoints/epoch*.pt); 0: only best and last
    progress: bool = True
    baselines: list[str] = field(default_factory=list)  # methods to train beside this one and to compare with
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    gamma: GammaConfig = field(default_factory=GammaConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    meta: MetaConfig = field(default_factory=MetaConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)


_CHOICES = {
    "loss.name": ("focal", "cross_entropy", "label_smoothing", "brier", "mse"),
    "gamma.source": ("fixed", "flsd", "step", "scalar", "gamma_net"),
    "gamma.input": ("features", "noise", "random", "layer"),
    "optimizer.name": ("sgd", "adam", "adamw"),
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
    for key, options in _CHOICES.items():
        require_choice(key, _get(config, key), options)
    for key, (low, high, closed) in _RANGES.items():
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


def _validate_combinations(config: Config) -> None:
    """Keys that are only right or wrong together."""
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
    require(gamma.init < gamma.max, f"gamma.init must be < gamma.max={gamma.max}, got {gamma.init}")
    require(
        (gamma.input == "layer") == (gamma.layer is not None),
        f"gamma.layer names a module of the backbone and goes with gamma.input=layer, got layer {gamma.layer} "
        f"with input {gamma.input}",
    )
    require(
        config.loss.name == "focal" or gamma.source == "fixed",
        f"gamma.source={gamma.source} needs loss.name=focal, got {config.loss.name}",
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
