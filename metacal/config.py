"""The typed schema of `configs/`: every key of a run, its type, default and range.

The dataclasses are registered with Hydra (group YAMLs are merged into them, so an unknown key or a wrong type
stops the composition), and `metacal.config_checks.validate` checks the ranges before any work is done. No torch is
imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Config",
    "DataConfig",
    "GammaConfig",
    "LossConfig",
    "MetaConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "PenaltiesConfig",
    "PenaltyConfig",
    "ScheduleConfig",
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
    mixup: float = 0.0  # alpha of the Beta distribution of the weights; 0: none
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

    # focal | dual_focal | inverse_focal | adafocal, which take a gamma,
    # cross_entropy | label_smoothing | confidence_penalty | brier | mse
    name: str = "focal"
    smoothing: float = 0.05  # label_smoothing: the alpha of alpha/K, at the start if it is learned
    learn_smoothing: str = "no"  # label_smoothing, by the outer problem: no | scalar | class (one for each)
    beta: float = 0.1  # confidence_penalty: weight of the entropy


@dataclass
class GammaConfig:
    """Where the focal loss's gamma comes from."""

    # fixed | flsd | step | adafocal (by the meta split's calibration); learned by the outer problem: scalar | gamma_net
    source: str = "fixed"
    value: float = 3.0  # fixed
    milestones: list[float] = field(default_factory=list)  # step: fractions of the training at which gamma changes
    values: list[float] = field(default_factory=list)  # step: one more than milestones
    init: float = 1.0  # gamma_net, scalar: gamma at the start
    max: float = 50.0  # gamma_net, scalar: the smooth cap
    tau: float = 1.0  # gamma_net, scalar: the scale of the output
    hidden: int = 64  # gamma_net
    input: str = "features"  # gamma_net: features | noise | random (of the input) | layer
    layer: str | None = None  # gamma_net with input=layer: the module of the backbone whose output it reads
    label_aware: bool = False  # gamma_net: one-hot label appended to the input
    n_bins: int = 15  # adafocal
    rate: float = 1.0  # adafocal: how fast gammas follow the calibration error


@dataclass
class PenaltyConfig:
    """What every penalty of the inner problem has."""

    weight: float = 0.0  # 0: left out
    every: int = 1  # steps; the penalty enters every so many-th with `every` times its weight
    ramp: float = 0.0  # epochs over which the weight grows from 0


@dataclass
class RobustKLConfig(PenaltyConfig):
    """KL(p(x) || p(x_adv)); lengths in pixels in [0, 1]."""

    eps: float = 8 / 255
    alpha: float = 2 / 255  # step of the attack
    steps: int = 3
    norm: str = "linf"  # linf | l2


@dataclass
class MarginTailConfig(PenaltyConfig):
    """mean exp(-m / temperature)."""

    temperature: float = 1.0
    clip: float = 5.0  # from -m / temperature = clip on the exponential goes on as its tangent
    robust: bool = False  # of m - eps ||grad_x m||
    eps: float = 8 / 255  # robust: pixels in [0, 1]
    norm: str = "linf"  # robust: linf | l2


@dataclass
class TraceConfig(PenaltyConfig):
    """Tr(H) or Tr(G) of the curvature loss by Rademacher probes."""

    probes: int = 1
    batch: int | None = None  # of the first so many samples of a batch; None: all


@dataclass
class MblsConfig(PenaltyConfig):
    """Margin-based label smoothing."""

    margin: float = 10.0


@dataclass
class PenaltiesConfig:
    """Penalties on the backbone, by name; those from `confidence_gap` on are calibration errors of the batch."""

    robust_kl: RobustKLConfig = field(default_factory=RobustKLConfig)
    margin_smoothness: PenaltyConfig = field(default_factory=PenaltyConfig)
    margin_tail: MarginTailConfig = field(default_factory=MarginTailConfig)
    hessian_trace: TraceConfig = field(default_factory=TraceConfig)
    gn_trace: TraceConfig = field(default_factory=TraceConfig)
    mbls: MblsConfig = field(default_factory=MblsConfig)
    confidence_gap: PenaltyConfig = field(default_factory=PenaltyConfig)
    dece: PenaltyConfig = field(default_factory=PenaltyConfig)
    mdca: PenaltyConfig = field(default_factory=PenaltyConfig)
    mmce: PenaltyConfig = field(default_factory=PenaltyConfig)
    mmce_weighted: PenaltyConfig = field(default_factory=PenaltyConfig)
    sece: PenaltyConfig = field(default_factory=PenaltyConfig)
    skce: PenaltyConfig = field(default_factory=PenaltyConfig)
    soft_ece: PenaltyConfig = field(default_factory=PenaltyConfig)


@dataclass
class OptimizerConfig:
    """The backbone's optimizer."""

    name: str = "sgd"  # gd | sgd | adam | adamw | muon | sam | bulk_sgd
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
    rest: str = "adamw"  # muon: adamw | sgd, for heads, biases and norms
    rest_lr: float = 1e-3  # muon
    base: str = "sgd"  # sam: sgd | adam | adamw | muon
    rho: float = 0.05  # sam: length of the perturbation
    adaptive: bool = False  # sam: scaled by |theta|
    k: int = 1  # bulk_sgd: eigenvectors that are projected out
    matrix: str = "hessian"  # bulk_sgd: hessian | gauss_newton
    every: int = 1  # bulk_sgd: steps between new eigenvectors
    tolerance: float = 1e-3  # bulk_sgd: of the eigenvectors


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
    max_share: float | None = 0.09  # of the run's time for these measurements: they wait rather than exceed it
    n_bins: int = 15
    resamples: int = 1000  # bootstrap resamples behind the test intervals; 0: no intervals
    histograms: bool = True
    figures_every: int = 10  # epochs between reliability diagrams in TensorBoard; 0: only the last


@dataclass
class Config:
    """A whole run. `configs/train.yaml` and its groups compose it."""

    name: str = "default"  # the experiment: runs/<name>/<overrides>/seed<seed>
    method: str = "metacal"
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
    penalties: PenaltiesConfig = field(default_factory=PenaltiesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    meta: MetaConfig = field(default_factory=MetaConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
