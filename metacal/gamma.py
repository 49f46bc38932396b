"""Where the gamma of the focal loss comes from.

A gamma source is a module called as

    gamma = source(features, logits=logits, labels=labels, inputs=inputs, epoch=epoch)

with the batch's penultimate features `(N, D)`, its logits `(N, K)`, labels `(N,)`, network inputs `(N, ...)` and the
epoch, a number. It returns one gamma per sample `(N,)` or one for all, a 0-d tensor. Each source reads what it needs
and ignores the rest; none of them sends a gradient back into the backbone. Two optional attributes complete it:

- `observe(features, ...)`, same arguments: called once for every training batch, before the source is; running
statistics
  live here, so that evaluating a source never changes it;
- `layer`: the name of a module of the backbone whose output, pooled to `(N, D)`, is passed as the features.

`LearnedSmoothing` has the same interface and gives the α of `losses.label_smoothing` in place of a gamma.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.calibration.binning import bin_edges, reliability_bins
from metacal.errors import InputError, require
from metacal.predictions import Predictions

__all__ = [
    "FLSD",
    "INPUTS",
    "AdaFocal",
    "FixedGamma",
    "GammaNet",
    "LearnedSmoothing",
    "ScalarGamma",
    "StepGamma",
    "cap",
    "flsd_gamma",
    "pool",
    "uncap",
]

INPUTS = ("features", "noise", "random", "layer")
"""What a `GammaNet` can look at: the features, noise, fixed random features of the input, another layer's output."""


def flsd_gamma(logits: Tensor, labels: Tensor) -> Tensor:
    """FLSD-53 (Mukhoti et al. 2020): gamma = 5 where p_y < 0.2, else 3. Shapes `(N, K)`, `(N,)` -> `(N,)`, detached."""
    logits = logits.detach()
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    p = F.softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.where(p < 0.2, 5.0, 3.0).to(logits.dtype)


def cap(score: Tensor, tau: float, gamma_max: float) -> Tensor:
    """gamma_max · tanh(softplus(score / tau) / gamma_max): positive, below gamma_max, with a gradient everywhere."""
    return gamma_max * torch.tanh(F.softplus(score / tau) / gamma_max)


def uncap(gamma: float, tau: float, gamma_max: float) -> float:
    """The score that `cap` maps to gamma."""
    require(tau > 0, f"tau must be > 0, got {tau}")
    require(gamma_max > 0, f"gamma_max must be > 0, got {gamma_max}")
    require(
        0 < gamma < gamma_max,
        f"gamma_init must be between 0 and gamma_max = {gamma_max}, both exclusive, got {gamma}",
    )
    positive = gamma_max * math.atanh(gamma / gamma_max)
    # log(expm1(s)), written so that it does not overflow for large s
    return tau * (positive + math.log(-math.expm1(-positive)))


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


class FixedGamma(nn.Module):
    """One gamma for every sample, never changed."""

    value: Tensor

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        require(value >= 0, f"value must be >= 0, got {value}")
        self.register_buffer("value", torch.tensor(float(value)), persistent=False)

    def forward(self, features: Tensor | None = None, **_: object) -> Tensor:
        return self.value


class StepGamma(nn.Module):
    """A gamma that changes with the epoch: `values[0]` at first, `values[i]` from epoch `milestones[i - 1]` on.

    milestones: increasing epochs, whole or not (`metacal train` makes them of the fractions `gamma.milestones`);
    values: one more than milestones, each >= 0.
    """

    def __init__(self, milestones: Sequence[float], values: Sequence[float]) -> None:
        super().__init__()
        require(
            len(values) == len(milestones) + 1,
            f"values must have one entry more than milestones ({len(milestones)}), got {len(values)}",
        )
        require(
            all(a < b for a, b in itertools.pairwise(milestones)),
            f"milestones must increase, got {list(milestones)}",
        )
        require(all(v >= 0 for v in values), f"values must be >= 0, got {list(values)}")
        self.milestones = tuple(milestones)
        self.values = tuple(float(v) for v in values)

    def forward(
        self, features: Tensor | None = None, *, logits: Tensor | None = None, epoch: float = 0, **_: object
    ) -> Tensor:
        value = self.values[sum(epoch >= m for m in self.milestones)]
        device = None if logits is None else logits.device
        return torch.tensor(value, device=device)


class FLSD(nn.Module):
    """Sample-dependent schedule FLSD-53 of `flsd_gamma`: 5 where the true class has p < 0.2, else 3."""

    def forward(self, features: Tensor | None = None, *, logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        return flsd_gamma(logits, labels)


class AdaFocal(nn.Module):
    """Gammas by bins of p_y, steered by the calibration of held-out predictions (Ghosh et al. 2022).

    For the loss `losses.adafocal`. `update` moves the gamma of every bin b by the gap of its held-out samples:

        E_b = conf_b - acc_b
        gamma_b <- gamma_b · exp(rate · E_b)     if gamma_b > 0, focal: more of it where the network is overconfident
        gamma_b <- gamma_b · exp(-rate · E_b)    if gamma_b < 0, inverse focal
        gamma_b <- -threshold · sign(gamma_b)    if then |gamma_b| < threshold: from one loss to the other
        gamma_b <- clip(gamma_b, gamma_min, gamma_max)

    A training sample gets the gamma of the bin in which its p_y lies, as the paper has it: the bins are made of
    held-out *confidences* (of the predicted class), into which the probabilities of the true class are sorted.

    Choices where the paper leaves one: bins are (lower, upper], of equal mass as `calibration.reliability_bins` makes
    them (equal confidences share a bin); a bin that ties leave empty keeps its gamma; probabilities outside all bins
    go to the first or last one. Before the first update the bins have equal width and every gamma is `gamma_init`.
    Give `update` samples by which no model is selected, since the training then depends on them.

    n_bins: M. rate: λ of the paper. threshold: S_th, >= 0. The state is in buffers, which checkpoints carry: `gammas`
    `(M,)` and `upper` `(M,)`, the bins' upper edges.
    """

    gammas: Tensor
    upper: Tensor

    def __init__(
        self,
        n_bins: int = 15,
        rate: float = 1.0,
        gamma_init: float = 1.0,
        *,
        threshold: float = 0.2,
        gamma_max: float = 20.0,
        gamma_min: float = -2.0,
    ) -> None:
        super().__init__()
        require(0 < rate < math.inf, f"rate must be > 0, got {rate}")
        require(threshold >= 0, f"threshold must be >= 0, got {threshold}")
        require(
            gamma_min <= -threshold and threshold <= gamma_max,
            f"gamma_min and gamma_max must be at or beyond -threshold and threshold = {threshold}, "
            f"got {gamma_min} and {gamma_max}",
        )
        require(
            gamma_min <= gamma_init <= gamma_max and abs(gamma_init) >= threshold and gamma_init != 0,
            f"gamma_init must be in [{gamma_min}, {gamma_max}], not 0 and at least threshold = {threshold} in size, "
            f"got {gamma_init}",
        )
        self.rate, self.threshold = rate, threshold
        self.gamma_min, self.gamma_max = gamma_min, gamma_max
        self.register_buffer("upper", bin_edges(n_bins)[1:].float())
        self.register_buffer("gammas", torch.full((n_bins,), float(gamma_init)))

    @torch.no_grad()
    def update(self, predictions: Predictions) -> None:
        """One step of the rule above, from held-out predictions: once an epoch, or every so many steps."""
        bins = reliability_bins(predictions, len(self.gammas), adaptive=True)
        # in the buffer's precision: a gamma that was put at the threshold must not look smaller than it
        gap = ((bins.confidence_sum - bins.correct) / bins.count.clamp(min=1)).to(self.gammas)
        sign = self.gammas.sign()
        moved = self.gammas * torch.exp(sign * self.rate * gap)
        moved = torch.where(moved.abs() < self.threshold, -self.threshold * sign, moved)
        empty = (bins.count == 0).to(moved.device)
        self.gammas.copy_(torch.where(empty, self.gammas, moved.clamp(self.gamma_min, self.gamma_max)))
        self.upper.copy_(bins.upper)

    def forward(self, features: Tensor | None = None, *, logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        """The gamma of each sample `(N,)`, a constant."""
        p = F.softmax(logits.detach().to(self.upper.dtype), dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return self.gammas[torch.bucketize(p, self.upper[:-1])]


class ScalarGamma(nn.Module):
    """One learned gamma for every sample, the simplest meta-learner: gamma = cap(score) as in `GammaNet`."""

    def __init__(self, gamma_init: float = 1.0, tau: float = 1.0, gamma_max: float = 50.0) -> None:
        super().__init__()
        self.tau, self.gamma_max = tau, gamma_max
        self.score = nn.Parameter(torch.tensor(uncap(gamma_init, tau, gamma_max)))

    def forward(self, features: Tensor | None = None, **_: object) -> Tensor:
        return cap(self.score, self.tau, self.gamma_max)


class LearnedSmoothing(nn.Module):
    """A learned α for `losses.label_smoothing`: one for all samples, or one per class (Bohdal et al. 2023).

        α = sigmoid(score),    per class: α_i = sigmoid(score_{y_i})

    With `loss=losses.label_smoothing` the bilevel step learns the score as it learns a gamma. The sigmoid keeps α in
    (0, 1) with a gradient everywhere; the paper clips it to [0, 0.5] instead.

    n_classes: K, needed for `per_class` alone. init: the first α.
    """

    def __init__(self, per_class: bool = False, n_classes: int = 0, init: float = 0.05) -> None:
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

    in_features: D, the width of what `input` names. hidden: width of W1. tau: scales the range. gamma_max: the smooth
    cap. Ablations:

    - `input="noise"`: standard normal noise `(N, D)` drawn anew in every call from this module's own generator `seed`
      (advanced by `observe`, so that calls between two training batches see the same noise);
    - `input="random"`: tanh of a fixed random projection of the network's flattened input to D numbers;
    - `input="layer"`: the output of the backbone's module `layer`, averaged over space or tokens (`pool`);
    - `num_classes=K`: label-aware; the one-hot label is appended to the input (not standardised).

    `forward(features)` changes nothing. `observe` updates the running statistics; the bilevel step calls it once per
    training batch.
    """

    mean: Tensor
    var: Tensor
    batches: Tensor

    def __init__(
        self,
        in_features: int,
        hidden: int = 64,
        tau: float = 1.0,
        gamma_init: float = 1.0,
        gamma_max: float = 50.0,
        *,
        input: str = "features",
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
        self.in_features, self.tau, self.gamma_max = in_features, tau, gamma_max
        self.input, self.layer, self.num_classes = input, layer, num_classes
        self.momentum, self.seed = momentum, seed
        self.first = nn.Linear(in_features + num_classes, hidden)
        self.last = nn.Linear(hidden, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, uncap(gamma_init, tau, gamma_max))
        self.register_buffer("mean", torch.zeros(in_features))
        self.register_buffer("var", torch.ones(in_features))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        # one random projection per module, made at the first input since its size is known only then
        self._projection: Tensor | None = None

    def forward(
        self,
        features: Tensor,
        *,
        labels: Tensor | None = None,
        inputs: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """gamma `(N,)` for features `(N, D)`; `labels` are read if label-aware, `inputs` if `input="random"`."""
        seen = (self._seen(features, inputs) - self.mean) * torch.rsqrt(self.var + 1e-5)
        if self.num_classes:
            if labels is None:
                raise InputError("labels must be given: this GammaNet is label-aware")
            seen = torch.cat([seen, F.one_hot(labels, self.num_classes).to(seen.dtype)], dim=1)
        score = self.last(F.relu(self.first(seen))).squeeze(-1)
        return cap(score, self.tau, self.gamma_max)

    @torch.no_grad()
    def observe(self, features: Tensor, *, inputs: Tensor | None = None, **_: object) -> None:
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

    def _seen(self, features: Tensor, inputs: Tensor | None) -> Tensor:
        """What the net looks at, `(N, D)`, detached, in the net's own precision."""
        dtype = self.last.weight.dtype
        if self.input == "noise":
            # the CPU generator reads 32 bits of a seed: both numbers must be mixed into these
            mixed = (self.seed * 0x9E3779B1 + int(self.batches)) % 2**32
            generator = torch.Generator().manual_seed(mixed)
            noise = torch.randn(len(features), self.in_features, generator=generator)
            return noise.to(features.device, dtype)
        if self.input == "random":
            if inputs is None:
                raise InputError("inputs must be given: this GammaNet reads random features of the network's input")
            flat = inputs.detach().flatten(1).to(dtype)
            return torch.tanh(flat @ self._project(flat))
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
