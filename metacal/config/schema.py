"""The schema of a run's config, collected from the parts: every key with its type, default, range and a line of help.

A config has single keys (`Config`), and sections of keys. Most sections name a part and hold the options of the part
that is named: `optimizer.name=sam` has `optimizer.rho`. Where these options come from, `metacal.options` says.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple

from metacal.bilevel import ENGINES
from metacal.calibration.surrogates import SURROGATES, ProperTerm, ReferencePoints
from metacal.data.options import DataConfig
from metacal.errors import require, require_choice
from metacal.gamma import SOURCES, SmoothingOptions
from metacal.launch import LaunchOptions
from metacal.losses import LOSSES
from metacal.models.options import ModelConfig
from metacal.monitors import MONITORS
from metacal.names import DEFAULT_METHOD
from metacal.objective import ClassWeighting, Weighting
from metacal.optim import OPTIMIZERS, SCHEDULES
from metacal.optim.schedule import Warmup
from metacal.options import Described, Option, check_value, converted, option, options_of
from metacal.penalties import PENALTIES

__all__ = ["Config", "Key", "Section", "keys", "record", "sections", "typed_section", "typed_value"]


@dataclass
class Config:
    """A whole run. `configs/train.yaml` and its groups compose it.

    The sections are objects with the keys of `sections()`, such as `config.optimizer.lr`.
    """

    name: str = option("default", "the experiment: runs/<name>/<method and overrides>/seed<seed>")
    method: str = option(DEFAULT_METHOD, "what trains: see the group")
    seed: int = option(0, "of all that is random", low=0, high=2**63, must="in [0, 2**63]")
    epochs: int = option(30, "passes through the training images, in as many steps for every method", low=1)
    select: str = option(
        "nll",
        "the epoch whose weights are the run's: with the least val NLL or ECE, before or after temperature scaling, "
        "the highest val accuracy, or the last",
        choices=("nll", "nll_scaled", "ece", "ece_scaled", "accuracy", "last"),
    )
    patience: int | None = option(
        None, "epochs after the selected one without a better one, after which training ends; null: never", low=1
    )
    runs: str = option("runs", "the folder of all runs")
    run_dir: str | None = option(None, "the run's own folder; null: by name, overrides and seed")
    resume: str | None = option(None, "a run folder to go on with")
    overwrite: bool = option(False, "start over where a run exists")
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: the first GPU if there is one")
    threads: int | None = option(None, "of PyTorch; null: its own choice", low=1)
    precision: str = option(
        "float32",
        "of the training forward, and bf16_outer: of the outer passes too",
        choices=("float32", "bf16", "bf16_outer"),
    )
    compile: bool = option(False, "compile the backbone's training forward; the outer part repeats it uncompiled")
    memory_format: str = option("contiguous", "of the weights of convolutions", choices=("contiguous", "channels_last"))
    nonfinite: str = option("raise", "what a step with a non-finite number does", choices=("raise", "skip"))
    checkpoint_every: float = option(1.0, "epochs; a fraction saves within an epoch", above=0)
    keep_every: int = option(
        0, "epochs between checkpoints that are kept (checkpoints/epoch*.pt); 0: only best and last", low=0
    )
    progress: bool = option(True, "show the progress")
    log: list[str] = option(
        factory=lambda: ["tensorboard"],
        help="where the run is logged beside metrics.jsonl, a list",
        choices=("tensorboard", "wandb", "mlflow"),
    )
    baselines: list[str] = option(factory=list, help="methods to train beside this one and to compare with")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: Any = None
    gamma: Any = None
    penalties: Any = None
    optimizer: Any = None
    schedule: Any = None
    meta: Any = None
    monitor: Any = None
    launch: Any = None


@dataclass
class Clipping:
    """What every optimizer has beside its own options."""

    clip_norm: float | None = option(None, "limit on the norm of the whole gradient; null: none", above=0)


@dataclass
class OuterKeys:
    """How the outer problem is solved."""

    every: int = option(1, "one outer step every so many inner steps", low=1)
    start: float = option(0.0, "the share of the training before the first outer step", low=0, below=1)
    horizon: int = option(1, "training steps that an outer step is differentiated through, at most meta.every", low=1)
    horizon_decay: float = option(1.0, "discount on each older step of the horizon", above=0, high=1)
    engine: str = option("forward", "how the hypergradient is computed", choices=ENGINES)
    inner_steps: int = option(1, "engine=higher: steps that are unrolled", low=1)
    optimizer: str = option("adam", "of what is learned", choices=("adam", "sgd"))
    lr: float = option(1e-2, "its learning rate", low=0)
    weight_decay: float = option(0.0, "its weight decay", low=0)
    beta1: float = option(0.9, "adam: memory of its gradients; less turns round sooner", low=0, below=1)
    beta2: float = option(0.999, "adam: memory of their squares", low=0, below=1)


@dataclass
class WatchKeys:
    """What is watched, and how often."""

    name: str = option("light", "how much is watched", choices=("light", "full", "off"))
    val_every: int = option(1, "epochs between validations", low=1)
    log_every: int = option(10, "steps between scalars", low=1)
    every: int = option(0, "steps between measurements on the fixed train and val subsets; 0: never", low=0)
    subset: int = option(512, "samples of each subset", low=1)
    max_share: float | None = option(
        0.09, "of the run's time for these measurements, which wait rather than exceed it; null: any", above=0, below=1
    )
    n_bins: int = option(15, "bins of the binned measures", low=1)
    resamples: int = option(1000, "bootstrap resamples behind the test intervals; 0: no intervals", low=0)
    histograms: bool = option(True, "histograms in TensorBoard")
    figures_every: int = option(10, "epochs between reliability diagrams in TensorBoard; 0: only the last", low=0)


class Section(NamedTuple):
    """A section of keys.

    Attributes:
        always: the parts whose options are there in any case.
        key: the option that names a part of `parts`, `default` if it is not given; None where nothing is named.
        sums: a weighted sum of parts can be named, {name: weight, ...}.
        of_method: a method chooses the part. What its file says of another one is then left out and not refused.
    """

    always: tuple[Callable[..., Any], ...]
    key: str | None = None
    default: str = ""
    parts: Mapping[str, Callable[..., Any]] = {}
    help: str = ""
    sums: bool = False
    of_method: bool = False

    def named(self, values: Mapping[str, Any]) -> list[str]:
        """The parts that the values name: one, or those of a weighted sum."""
        value = None if self.key is None else values.get(self.key, self.default)
        return [value] if isinstance(value, str) else list(value) if isinstance(value, Mapping) else []

    def options(self, values: Mapping[str, Any]) -> dict[str, Described]:
        """The options that the section has, with these values of others; the key that names a part is none.

        An option that several of the parts in a sum have belongs into the sum, beside the weight.
        """
        of_parts = [options_of(self.parts[name], values) for name in self.named(values) if name in self.parts]
        count = Counter(name for options in of_parts for name in options)
        always = {name: d for part in self.always for name, d in options_of(part, values).items()}
        return always | {name: d for options in of_parts for name, d in options.items() if count[name] == 1}

    def owners(self) -> dict[str, dict[str, Described]]:
        """Option -> who has it -> what it is there; "" for those that are there in any case."""
        owners: dict[str, dict[str, Described]] = {}
        for part in self.always:
            for name, described in options_of(part).items():
                require(name not in owners, f"two parts have an option {name}: give it another name in one of them")
                owners[name] = {"": described}
        for owner, part in self.parts.items():
            for name, described in options_of(part).items():
                owners.setdefault(name, {})[owner] = described
        return owners


def sections() -> dict[str, Section]:
    """The sections by their path, in order. Parts may have been added since the last call."""
    outer = (OuterKeys, ReferencePoints, ProperTerm)
    return {
        "data": Section((DataConfig,)),
        "model": Section((ModelConfig,)),
        "loss": Section(
            (SmoothingOptions, ClassWeighting), "name", "focal", LOSSES, "the per-sample loss", of_method=True
        ),
        "gamma": Section((), "source", "fixed", SOURCES, "where the gammas come from", of_method=True),
        **{f"penalties.{name}": Section((Weighting, part)) for name, part in PENALTIES.items()},
        "optimizer": Section((Clipping,), "name", "sgd", OPTIMIZERS, "the backbone's optimizer"),
        "schedule": Section((Warmup,), "name", "cosine", SCHEDULES, "the learning rate over training, a factor of lr"),
        "meta": Section(outer, "objective", "sece", SURROGATES, "what is minimised", sums=True),
        "monitor": Section((WatchKeys, *MONITORS.values())),
        "launch": Section((LaunchOptions,)),
    }


class Key(NamedTuple):
    """A key of the config.

    Attributes:
        owners: part -> what the option is there; "" for a key that is there in any case.
    """

    owners: Mapping[str, Described]

    @property
    def option(self) -> Option:
        """What its value may be, for the first owner."""
        return next(iter(self.owners.values())).option

    @property
    def default(self) -> Any:
        """The default that all owners share; None where they do not."""
        defaults = [described.default for described in self.owners.values()]
        return defaults[0] if all(default == defaults[0] for default in defaults) else None


def keys() -> dict[str, Key]:
    """Every dotted key of the schema, in order."""
    every = {name: Key({"": described}) for name, described in options_of(Config).items()}
    for path, section in sections().items():
        if section.key is not None:
            text = section.help + (", or {name: weight, ...}" if section.sums else "")
            naming = Option(text, choices=tuple(section.parts))
            every[f"{path}.{section.key}"] = Key({"": Described(str, section.default, naming)})
        every |= {f"{path}.{name}": Key(owners) for name, owners in section.owners().items()}
    return every


def typed_section(path: str, section: Section, values: Mapping[str, Any]) -> Any:
    """The object of a section, with all of its values converted and checked.

    Raises:
        InputError: for the first value that is not what it must be.
    """
    result: dict[str, Any] = {}
    if section.key is not None:
        result[section.key] = _named(f"{path}.{section.key}", section, values[section.key])
    for name, described in section.options(values).items():
        result[name] = typed_value(f"{path}.{name}", values[name], described)
    if path in ("data", "model"):
        return {"data": DataConfig, "model": ModelConfig}[path](**result)
    return record(path.rpartition(".")[2], result)


def typed_value(key: str, value: Any, described: Described) -> Any:
    """A value, converted and checked."""
    value = converted(key, value, described.type)
    check_value(key, value, described)
    return value


def _named(key: str, section: Section, value: Any) -> Any:
    """The name of a part, or a sum of parts where the section takes one."""
    if section.sums:
        require(
            isinstance(value, str) or (isinstance(value, Mapping) and len(value) > 0),
            f"{key} must be a name or {{name: weight, ...}}, got {value!r}",
        )
    for name in value if section.sums and isinstance(value, Mapping) else [value]:
        require_choice(key, name, section.parts)
    return value


def record(name: str, values: Mapping[str, Any]) -> Any:
    """An object with these attributes, for `dataclasses.asdict` and the like."""
    return _class_of(name, tuple(values))(**values)


@functools.cache
def _class_of(name: str, names: tuple[str, ...]) -> Any:
    """The class of a section's objects that have these attributes: one, so that equal sections compare equal."""
    return make_dataclass(name, [(attribute, Any) for attribute in names])
