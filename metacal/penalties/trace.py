"""Traces of the Hessian and the Gauss-Newton matrix as penalties: unbiased, in value and in gradient in θ.

    Tr H,  H = ∇²_θ of the mean cross-entropy (or MSE) of the batch        Tr G,  G = 1/N Σ_n J_nᵀ S_n J_n

whatever loss trains the network. Both are those of the network in its present mode on this batch. The route depends
on the network; each has the trace as its mean over probes, and the first that applies is the least noisy:

`closed form`   multilayer perceptrons. Tr G from signs e_n at the logits, ‖J_nᵀ S_n^½ e_n‖² layer by layer; the
                residual Tr(H − G) exactly with up to two hidden layers, else from signs at the hidden units. Read off
                the graph of the logits that the loss has made: no forward pass of its own.
`layers`        networks of independent samples whose parameters all lie in linear, convolution and normalisation
                layers: Tr G as above, from one recorded backward pass. Tr H too if they are piecewise linear, where it
                equals Tr G.
`jets`          any other network: with signs v for all parameters but those of the last layer,
                vᵀHv = d²/dε² L(θ + εv), or its part z₁ᵀS z₁ for G, from the derivatives of the logits along v (`Tape`);
                the last layer's own 1/N Σ tr(S_n)(‖a_n‖² + 1) is exact. BatchNorm in training mode is differentiated
                through its statistics.
`reverse`       where an operation has no rule in `autodiff.jets`: the same by double and triple backward.

With K − 1 probes and more the signs at the logits give way to the K − 1 columns of a factor of S_n, which are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor, nn

from metacal.autodiff.graph import require_second_derivative
from metacal.curvature.loss import LOSSES
from metacal.curvature.penalty import Looked, penalty_trace
from metacal.curvature.sampling import Probe
from metacal.errors import require, require_choice
from metacal.options import option
from metacal.penalties.evaluate import check_batch
from metacal.penalties.part import PenaltyPart

__all__ = ["TracePenalty", "gn_trace", "hessian_trace"]


@dataclass
class TracePenalty(PenaltyPart):
    """`hessian_trace` or `gn_trace` as a penalty. Signs depend on (seed, step) alone: nothing else to resume.

    Attributes: `which`, "hessian" or "gn"; `step`, the number of the training step, and `offset`, the place of the
    first sample in its batch, so that parts of a batch add up to the estimate of the whole, both set by the loop;
    `route`, that of the last call (see the module).
    """

    which: str
    probes: int = option(1, "vectors of random signs in one estimate", low=1, must="an integer >= 1")
    batch: int | None = option(
        None, "of the first so many samples of a batch; null: all", low=1, must="an integer >= 1"
    )
    seed: int = 0
    loss: str = "cross_entropy"
    step: int = field(default=0, compare=False)
    offset: int = field(default=0, compare=False)
    route: str | None = field(default=None, compare=False)
    looked: Looked = field(default_factory=Looked, compare=False, repr=False)

    @property
    def batchwise(self) -> bool:  # type: ignore[override]
        """With `batch` it is the mean over some samples of a batch, not over all."""
        return self.batch is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("seed", self.seed), ("step", self.step)):
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            require(whole and value >= 0, f"{name} must be an integer >= 0, got {value!r}")
        require_choice("loss", self.loss, LOSSES)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        name = f"{self.which}_trace"
        check_batch(name, model, x, y)
        require(
            logits is None or (logits.ndim == 2 and len(logits) == len(x)),
            f"logits must be those of x, ({len(x)}, K), got shape {tuple(logits.shape) if logits is not None else ()}",
        )
        probe = Probe(self.which == "hessian", self.probes, (self.seed, self.step), self.loss, self.offset)
        rows = slice(0, min(self.batch or len(x), len(x)))
        value, self.route, z = penalty_trace(probe, model, x, y, rows, logits, self.looked)
        if self.route != "closed form":
            require_second_derivative(name, value)
        # a trace that does not depend on θ, as of a linear model's MSE
        return value if value.requires_grad else value + 0 * z.sum()


def hessian_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = TracePenalty.probes,
    seed: int = TracePenalty.seed,
    loss: str = TracePenalty.loss,
    *,
    batch: int | None = TracePenalty.batch,
    step: int = 0,
    logits: Tensor | None = None,
) -> Tensor:
    """An unbiased estimate of Tr H, a scalar whose gradient in θ estimates that of Tr H without bias.

    Args:
        model: x -> logits (N, K) or (logits, features), in the mode that H is wanted in. Buffers, modes and `.grad`
            stay as they are. Dropout draws from `seed` and `step`, not from the training's stream.
        probes: >= 1 sign vectors, whose estimates are averaged.
        seed, step: fix the signs; give the number of the step for fresh ones in every step.
        loss: "cross_entropy" or "mse" (mean over samples and classes, against one-hot labels).
        batch: use the first so many samples only; None: all.
        logits: of the plain forward of x, with their graph, if there are any: a perceptron then needs no other pass.

    Raises `InputError` for bad arguments, for a network none of whose routes works, and where the value is not finite.
    """
    return _finite(TracePenalty("hessian", probes, batch, seed, loss, step), model, x, y, logits)


def gn_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = TracePenalty.probes,
    seed: int = TracePenalty.seed,
    loss: str = TracePenalty.loss,
    *,
    batch: int | None = TracePenalty.batch,
    step: int = 0,
    logits: Tensor | None = None,
) -> Tensor:
    """An unbiased estimate of Tr G, as `hessian_trace`. θ moves J and the probabilities in S. y is not used."""
    return _finite(TracePenalty("gn", probes, batch, seed, loss, step), model, x, y, logits)


def _finite(penalty: TracePenalty, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None) -> Tensor:
    value = penalty(model, x, y, logits)
    require(
        bool(torch.isfinite(value)),
        f"{penalty.which}_trace is {value.item()} for this batch: the inputs, the logits or their derivatives are not "
        "finite",
    )
    return value
