"""Sources with parameters, which the outer problem learns: one gamma, one for each sample, or a smoothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.devices import sent
from metacal.errors import InputError, require
from metacal.gamma.bounds import cap, settle_, uncap
from metacal.gamma.options import Around, SourceOptions
from metacal.losses import label_smoothing
from metacal.modes import evaluation_mode
from metacal.options import option, options_of

__all__ = [
    "INPUTS",
    "GammaNet",
    "GammaNetOptions",
    "LearnedSmoothing",
    "ScalarGamma",
    "ScalarOptions",
    "SmoothingOptions",
    "pool",
]

INPUTS = ("features", "noise", "random", "layer")
"""What a `GammaNet` can look at: the features, noise, fixed random features of the input, another layer's output."""

SMOOTHING: float = options_of(label_smoothing)["smoothing"].default


@dataclass
class ScalarOptions(SourceOptions):
    """`ScalarGamma`."""

    init: float = option(1.0, "gamma at the start")
    max: float = option(50.0, "the smooth cap of gamma", above=0)
    min: float = option(0.0, "the lower bound of gamma, smooth; below 0 only with loss.name=signed_focal", high=0)
    tau: float = option(1.0, "the scale of the score behind gamma", above=0)

    learned: ClassVar[bool] = True

    def check(self, prefix: str = "") -> None:
        super().check(prefix)
        require(self.init > self.min, f"{prefix}init must be > {prefix}min={self.min}, got {self.init}")
        require(self.init < self.max, f"{prefix}init must be < {prefix}max={self.max}, got {self.init}")

    def build(self, around: Around) -> nn.Module:
        return ScalarGamma(self.init, self.tau, self.max, self.min)


@dataclass
class GammaNetOptions(ScalarOptions):
    """`GammaNet`."""

    hidden: int = option(64, "width of the hidden layer", low=1)
    input: str = option("features", "what it looks at", choices=INPUTS)
    layer: str | None = option(None, "with input=layer: the module of the backbone whose output it looks at")
    label_aware: bool = option(False, "the one-hot label is appended to the input")

    def check(self, prefix: str = "") -> None:
        super().check(prefix)
        require(
            (self.input == "layer") == (self.layer is not None),
            f"{prefix}layer names a module of the backbone and goes with {prefix}input=layer, got layer {self.layer} "
            f"with input {self.input}",
        )

    def build(self, around: Around) -> nn.Module:
        return GammaNet(
            around.backbone.in_features if self.layer is None else _width_of(self.layer, around),
            hidden=self.hidden,
            tau=self.tau,
            gamma_init=self.init,
            gamma_max=self.max,
            gamma_min=self.min,
            input=self.input,
            layer=None if self.layer is None else f"net.{self.layer}",  # a Backbone holds the model as `net`
            num_classes=around.backbone.n_classes if self.label_aware else 0,
            seed=around.seed,
        )


@dataclass
class SmoothingOptions:
    """Whether the smoothing of `losses.label_smoothing` is learned, by `LearnedSmoothing`."""

    learn_smoothing: str = option(
        "no",
        "label_smoothing: learned by the outer problem, one for all or one for each class",
        choices=("no", "scalar", "class"),
    )

    def build(self, around: Around, init: float) -> nn.Module:
        """The source, with `init` as the first α."""
        per_class = self.learn_smoothing == "class"
        return LearnedSmoothing(per_class, around.backbone.n_classes if per_class else 0, init=init)


def _width_of(name: str, around: Around) -> int:
    """How many numbers a sample gives at the output of a module of the backbone."""
    backbone = around.backbone
    modules = dict(backbone.net.named_modules())
    require(name in modules, f"gamma.layer must name a module of the backbone, got {name!r}")
    widths: list[int] = []
    hook = modules[name].register_forward_hook(lambda _m, _i, output: widths.append(pool(output, name).shape[1]))
    try:
        with torch.no_grad(), evaluation_mode(backbone):
            backbone(around.inputs())
    finally:
        hook.remove()
    require(bool(widths), f"gamma.layer={name} is not run in the backbone's forward pass")
    return widths[0]


def pool(output: object, layer: str | None = None) -> Tensor:
    """The output of a layer as features `(N, D)`: what a `GammaNet` with `input="layer"` sees, of width `shape[1]`.

    `(N, D)` as it is; `(N, T, D)`, as transformer blocks give, averaged over the T tokens; `(N, D, H, W)` averaged
    over space. Any other output raises `InputError`, which names the `layer`.
    """
    name = "the layer" if layer is None else f"layer {layer!r}"
    allowed = "(N, D), (N, T, D) of tokens or (N, D, H, W)"
    if not isinstance(output, Tensor):
        raise InputError(f"{name} must give one tensor of shape {allowed}, got a {type(output).__name__}")
    require(2 <= output.dim() <= 4, f"{name} must give shape {allowed}, got {tuple(output.shape)}")
    if output.dim() == 2:
        return output
    return output.mean(dim=1 if output.dim() == 3 else (2, 3))


class ScalarGamma(nn.Module):
    """One learned gamma for every sample, the simplest meta-learner: gamma = cap(score) as in `GammaNet`."""

    def __init__(
        self,
        gamma_init: float = ScalarOptions.init,
        tau: float = ScalarOptions.tau,
        gamma_max: float = ScalarOptions.max,
        gamma_min: float = ScalarOptions.min,
    ) -> None:
        super().__init__()
        self.tau, self.gamma_max, self.gamma_min = tau, gamma_max, gamma_min
        self.score = nn.Parameter(torch.tensor(uncap(gamma_init, tau, gamma_max, gamma_min)))

    def forward(self, features: Tensor | None = None, **_: object) -> Tensor:
        return cap(self.score, self.tau, self.gamma_max, self.gamma_min)

    def settle(self) -> None:
        """See `metacal.gamma.bounds.settle_`."""
        settle_(self.score, self.tau, self.gamma_max, self.gamma_min)


class LearnedSmoothing(nn.Module):
    """A learned α for `losses.label_smoothing`: one for all samples, or one per class (Bohdal et al. 2023).

        α = sigmoid(score),    per class: α_i = sigmoid(score_{y_i})

    With `loss=losses.label_smoothing` the bilevel step learns the score as it learns a gamma. The sigmoid keeps α in
    (0, 1) with a gradient everywhere; the paper clips it to [0, 0.5] instead.

    n_classes: K, needed for `per_class` alone. init: the first α.
    """

    def __init__(self, per_class: bool = False, n_classes: int = 0, init: float = SMOOTHING) -> None:
        super().__init__()
        require(not per_class or n_classes >= 2, f"n_classes must be >= 2 with per_class, got {n_classes}")
        require(0 < init < 1, f"init must be between 0 and 1, both exclusive, got {init}")
        self.per_class = per_class
        shape = (n_classes,) if per_class else ()
        self.score = nn.Parameter(torch.full(shape, math.log(init) - math.log1p(-init)))

    def forward(self, features: Tensor | None = None, *, labels: Tensor | None = None, **_: object) -> Tensor:
        """α of each sample `(N,)` per class, else a 0-d tensor."""
        alpha = torch.sigmoid(self.score)
        if not self.per_class:
            return alpha
        if labels is None:
            raise InputError("labels must be given: this smoothing is one per class")
        return alpha[labels]


class GammaNet(nn.Module):
    """One gamma per sample from the backbone's penultimate features, learned by the outer loop.

        o_i = w2ᵀ relu(W1 ĥ_i + b1) + b2,    gamma_i = gamma_max · tanh(softplus(o_i / tau) / gamma_max)

    ĥ is h standardised by running statistics kept here, so that the output does not depend on the backbone's
    scale. w2 starts at zero and b2 where gamma = gamma_init: training begins from a focal loss with fixed
    gamma. The features are detached: gamma is a constant in the backbone's own gradient, since the loss falls
    in gamma everywhere and training through it would only inflate gamma.

    The arguments are the options of a run (`GammaNetOptions`), and what its backbone and seed give beside them.

    in_features: D, the width of what `input` names. hidden: width of W1. tau: scales the range. gamma_max: the smooth
    cap. gamma_min: 0, or a lower bound below it for `losses.signed_focal` (`cap`). Ablations:

    - `input="noise"`: standard normal noise `(N, D)` drawn anew in every call from this module's own generator `seed`
      (advanced by `observe`, so that calls between two training batches see the same noise);
    - `input="random"`: tanh of a fixed random projection of the network's flattened input to D numbers;
    - `input="layer"`: the output of the backbone's module `layer`, averaged over space or tokens (`pool`);
    - `num_classes=K`: label-aware; the one-hot label is appended to the input (not standardised).

    Each argument is an option. `forward(features)` changes nothing. `observe` updates the running statistics; the
    bilevel step calls it once per training batch.
    """

    mean: Tensor
    var: Tensor
    batches: Tensor

    def __init__(
        self,
        in_features: int,
        hidden: int = GammaNetOptions.hidden,
        tau: float = GammaNetOptions.tau,
        gamma_init: float = GammaNetOptions.init,
        gamma_max: float = GammaNetOptions.max,
        gamma_min: float = GammaNetOptions.min,
        *,
        input: str = GammaNetOptions.input,
        layer: str | None = None,
        num_classes: int = 0,
        momentum: float = 0.01,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require(in_features >= 1, f"in_features must be >= 1, got {in_features}")
        require(hidden >= 1, f"hidden must be >= 1, got {hidden}")
        require(num_classes >= 0, f"num_classes must be >= 0, got {num_classes}")
        require(0 < momentum <= 1, f"momentum must be in (0, 1], got {momentum}")
        require(input in INPUTS, f"input must be one of {', '.join(INPUTS)}, got {input!r}")
        require(
            (input == "layer") == (layer is not None),
            f"layer names a module of the backbone and goes with input='layer', got layer={layer!r} "
            f"with input={input!r}",
        )
        self.in_features, self.tau, self.gamma_max, self.gamma_min = in_features, tau, gamma_max, gamma_min
        self.input, self.layer, self.num_classes = input, layer, num_classes
        self.reads_inputs = input == "random"
        self.momentum, self.seed = momentum, seed
        self.first = nn.Linear(in_features + num_classes, hidden)
        self.last = nn.Linear(hidden, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, uncap(gamma_init, tau, gamma_max, gamma_min))
        self.register_buffer("mean", torch.zeros(in_features))
        self.register_buffer("var", torch.ones(in_features))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        # one random projection per module, made at the first input since its size is known only then
        self._projection: Tensor | None = None

    def forward(
        self,
        features: Tensor | None,
        *,
        labels: Tensor | None = None,
        inputs: Tensor | None = None,
        start: int = 0,
        total: int | None = None,
        **_: object,
    ) -> Tensor:
        """gamma `(N,)` for features `(N, D)`; `labels` are read if label-aware, `inputs` if `input="random"`.

        start, total: of a part of a batch, the place of its first sample and the size of the whole.
        """
        seen = (self._seen(features, inputs, start, total) - self.mean) * torch.rsqrt(self.var + 1e-5)
        if self.num_classes:
            if labels is None:
                raise InputError("labels must be given: this GammaNet is label-aware")
            of_seen, of_labels = self.first.weight.split([seen.shape[1], self.num_classes], dim=1)
            hidden = F.linear(seen, of_seen, self.first.bias) + F.embedding(labels, of_labels.T)  # [seen, one-hot] Wᵀ
        else:
            hidden = self.first(seen)
        score = self.last(F.relu(hidden)).squeeze(-1)
        return cap(score, self.tau, self.gamma_max, self.gamma_min)

    @torch.no_grad()
    def observe(self, features: Tensor | None, *, inputs: Tensor | None = None, **_: object) -> None:
        """Update the running mean and variance from one training batch.

        A cumulative average over the first 1 / momentum batches, exponential from then on.
        """
        seen = self._seen(features, inputs)
        self.batches += 1
        # a tensor, not a number: reading the count would wait for the device
        rate = torch.clamp(1.0 / self.batches, min=self.momentum).to(seen.dtype)
        var, mean = torch.var_mean(seen, dim=0, correction=0)
        self.mean.lerp_(mean, rate)
        self.var.lerp_(var, rate)

    def _seen(self, features: Tensor | None, inputs: Tensor | None, start: int = 0, total: int | None = None) -> Tensor:
        """What the net looks at, `(N, D)`, detached, in the net's own precision."""
        dtype = self.last.weight.dtype
        if self.input == "random":
            if inputs is None:
                raise InputError("inputs must be given: this GammaNet reads random features of the network's input")
            flat = inputs.detach().flatten(1).to(dtype)
            return torch.tanh(flat @ self._project(flat))
        if features is None:
            raise InputError(
                "features must be given: this GammaNet reads them, and the model returns logits alone; give "
                "Backbone(model)"
            )
        if self.input == "noise":
            # the CPU generator reads 32 bits of a seed: both numbers must be mixed into these
            mixed = (self.seed * 0x9E3779B1 + int(self.batches)) % 2**32
            generator = torch.Generator().manual_seed(mixed)
            noise = torch.randn(total or len(features), self.in_features, generator=generator)
            return sent(noise[start : start + len(features)], features.device).to(dtype)
        require(
            features.dim() == 2 and features.shape[1] == self.in_features,
            f"features must have shape (N, {self.in_features}), got {tuple(features.shape)}",
        )
        return features.detach().to(dtype)

    def _project(self, flat: Tensor) -> Tensor:
        """The fixed projection `(inputs, D)`, the same for a seed on every device."""
        if self._projection is None or self._projection.shape[0] != flat.shape[1]:
            generator = torch.Generator().manual_seed(self.seed)
            projection = torch.randn(flat.shape[1], self.in_features, generator=generator)
            self._projection = projection / math.sqrt(flat.shape[1])
        self._projection = self._projection.to(flat)
        return self._projection
