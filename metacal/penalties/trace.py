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

from typing import Any

import torch
from torch import Tensor, nn

from metacal.autodiff.graph import require_second_derivative
from metacal.curvature.problem import LOSSES
from metacal.curvature.sampling import Probe
from metacal.curvature.traces import penalty_trace
from metacal.errors import require, require_choice
from metacal.penalties.evaluate import check_batch, check_number

__all__ = ["check_trace", "gn_trace", "hessian_trace", "trace_and_route"]


def hessian_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    seed: int = 0,
    loss: str = "cross_entropy",
    *,
    batch: int | None = None,
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
    return _finite("hessian", model, x, y, probes, seed, loss, batch=batch, step=step, logits=logits)


def gn_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    seed: int = 0,
    loss: str = "cross_entropy",
    *,
    batch: int | None = None,
    step: int = 0,
    logits: Tensor | None = None,
) -> Tensor:
    """An unbiased estimate of Tr G, as `hessian_trace`. θ moves J and the probabilities in S. y is not used."""
    return _finite("gn", model, x, y, probes, seed, loss, batch=batch, step=step, logits=logits)


def _finite(which: str, *args: Any, **keys: Any) -> Tensor:
    value, _ = trace_and_route(which, *args, **keys)
    require(
        bool(torch.isfinite(value)),
        f"{which}_trace is {value.item()} for this batch: the inputs, the logits or their derivatives are not finite",
    )
    return value


def check_trace(probes: int, seed: int, loss: str, batch: int | None, step: int = 0) -> None:
    """Raise `InputError` for options that no trace can have."""
    check_number("probes", probes, 1, integer=True)
    check_number("seed", seed, 0, integer=True)
    check_number("step", step, 0, integer=True)
    require_choice("loss", loss, LOSSES)
    if batch is not None:
        check_number("batch", batch, 1, integer=True)


def trace_and_route(
    which: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    seed: int = 0,
    loss: str = "cross_entropy",
    *,
    batch: int | None = None,
    step: int = 0,
    logits: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, str]:
    """The estimate, `which` "hessian" or "gn", and the route that it took (see the module).

    offset: the place of the first sample in its batch, so that parts of a batch add up to the estimate of the whole.
    """
    check_trace(probes, seed, loss, batch, step)
    check_batch(f"{which}_trace", model, x, y)
    require(
        logits is None or (logits.ndim == 2 and len(logits) == len(x)),
        f"logits must be those of x, ({len(x)}, K), got shape {tuple(logits.shape) if logits is not None else ()}",
    )
    probe = Probe(which == "hessian", probes, (seed, step), loss, offset)
    rows = slice(0, min(batch or len(x), len(x)))
    value, route, z = penalty_trace(probe, model, x, y, rows, logits)
    if route != "closed form":
        require_second_derivative(f"{which}_trace", value)
    if not value.requires_grad:  # a trace that does not depend on θ, as of a linear model's MSE
        value = value + 0 * z.sum()
    return value, route
