"""Penalties on margins: their tail, how fast they change with the input, and MbLS's limit on logit distances.

    m_i = z_{i,y_i} − max_{j≠y_i} z_{i,j}

All values are means over the batch of per-sample terms: those of parts of a batch, weighted by their sizes, add up to
that of the whole (for networks whose samples do not depend on each other).
Source of the first two: "Too Sharp, Too Sure: When Calibration Follows Curvature" (arXiv 2604.20614).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from metacal.autodiff.graph import require_second_derivative
from metacal.errors import require
from metacal.margins import dual_norm, true_margin
from metacal.options import option
from metacal.penalties.evaluate import check_batch, logits_of
from metacal.penalties.part import InputPart, PenaltyPart
from metacal.pixels import NORMS, RADIUS, Pixels, check_pixels, to_inputs

__all__ = [
    "MarginSmoothness",
    "MarginTail",
    "MbLS",
    "margin_smoothness",
    "margin_tail",
    "mbls",
    "robust_margin_tail",
]


@dataclass
class MarginTail(InputPart):
    """`margin_tail` of the margins, or `robust_margin_tail`, as a penalty."""

    temperature: float = option(1.0, "T of mean exp(-m / T)", above=0)
    clip: float = option(5.0, "from -m / T = clip on the exponential goes on as its tangent", low=0, infinite=True)
    robust: bool = option(False, "of m - eps * norm of its gradient in the input")
    eps: float = option(RADIUS, "robust: radius of the perturbation", low=0)
    norm: str = option("linf", "robust: of the perturbation", choices=NORMS)

    @property
    def needs_pixels(self) -> bool:  # type: ignore[override]
        return self.robust and super().needs_pixels

    @property
    def of_logits(self) -> bool:  # type: ignore[override]
        return not self.robust

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        if self.robust:
            return robust_margin_tail(model, x, y, self.eps, self.temperature, self.norm, self.scale, clip=self.clip)
        return margin_tail(_given(logits, model, x), y, self.temperature, clip=self.clip)


@dataclass
class MarginSmoothness(InputPart):
    """`margin_smoothness` as a penalty."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        return margin_smoothness(model, x, y, self.scale)


@dataclass
class MbLS(PenaltyPart):
    """`mbls` as a penalty."""

    margin: float = option(10.0, "logit distance from which on it costs", low=0)

    of_logits: ClassVar[bool] = True

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        return mbls(_given(logits, model, x), y, self.margin)


def margin_tail(
    logits: Tensor, labels: Tensor, temperature: float = MarginTail.temperature, *, clip: float = MarginTail.clip
) -> Tensor:
    """mean_i t(−m_i / T), an exponential that goes on as its tangent where it is large.

        t(s) = exp(s)                      for s <= c
        t(s) = exp(c)·(1 + s − c)          for s > c

    t is convex and continuously differentiable, 0 < t(s) <= exp(s), and its slope, the pull on one margin, is at
    most exp(c)/T: a hopeless sample counts in proportion to its margin instead of deciding the step alone. Value and
    gradient are finite for every finite margin (m = −1e4: exp(c)·(1e4/T + 1 − c)). With c = inf it is mean exp(−m/T).

    Args:
        logits: (N, K), K >= 2. labels: (N,).
        temperature: T > 0. clip: c >= 0, in units of T; inf: none.
    Returns a scalar in float32 at least, differentiable in the logits.
    """
    MarginTail(temperature, clip)
    return _tail(true_margin(logits, labels), temperature, clip).mean()


def robust_margin_tail(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float = MarginTail.eps,
    temperature: float = MarginTail.temperature,
    norm: str = MarginTail.norm,
    pixels: Pixels | None = None,
    *,
    clip: float = MarginTail.clip,
) -> Tensor:
    """`margin_tail` of the robust margin to first order, m_i − ε‖∇_x m_i‖_* (L1 for "linf", L2 for "l2").

    ε and the gradient are in pixel units: see `Pixels`; None: the inputs are what ε refers to.
    Forward in the model's present mode, double backward for θ. Where samples share batch statistics, ∇_x m_i
    stands for ∂(Σ_j m_j)/∂x_i. Raises `InputError` as `margin_smoothness` does.
    """
    MarginTail(temperature, clip, True, eps, norm, pixels=pixels)
    check_batch("margin_tail with robust", model, x, y, inputs=True)
    margin, slope = _margin_and_slope("margin_tail with robust", model, x, y)
    _, std = to_inputs(pixels, x)
    return _tail(margin - eps * dual_norm(slope / std, norm).to(margin.dtype), temperature, clip).mean()


def margin_smoothness(model: nn.Module, x: Tensor, y: Tensor, pixels: Pixels | None = None) -> Tensor:
    """mean_i ‖∇_x m_i‖²₂ over all entries of an input; differentiable in θ by double backward.

    The gradient is in the pixels that `pixels` says the inputs are made of; None: in the inputs as they are. With a
    standard deviation of a quarter the value in pixels is 16 times that in the inputs.

    The forward is the model's own, in its present mode. Where samples share batch statistics (BatchNorm in training
    mode), ∇_x m_i stands for ∂(Σ_j m_j)/∂x_i, which one backward pass gives.

    Raises `InputError` for integer inputs and for networks that lack a second derivative, naming the operation.
    """
    check_pixels(pixels)
    check_batch("margin_smoothness", model, x, y, inputs=True)
    margin, slope = _margin_and_slope("margin_smoothness", model, x, y)
    _, std = to_inputs(pixels, x)
    return (slope / std).to(margin.dtype).square().sum() / len(x)


def mbls(logits: Tensor, labels: Tensor | None = None, margin: float = MbLS.margin) -> Tensor:
    """mean_i Σ_k relu(max_j z_ij − z_ik − margin): logit distances above the margin cost. Labels are not read.

    Liu et al. 2022 ("The Devil is in the Margin") add 0.1 of it to cross-entropy.
    Args: logits (N, K); margin >= 0.
    """
    MbLS(margin)
    require(
        isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim == 2,
        "logits must be a floating-point tensor of shape (N, K)",
    )
    z = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return torch.relu(z.amax(1, keepdim=True) - z - margin).sum(1).mean()


def _given(logits: Tensor | None, model: nn.Module, x: Tensor) -> Tensor:
    return logits_of(model, x) if logits is None else logits


def _tail(margin: Tensor, temperature: float, clip: float) -> Tensor:
    s = -margin / temperature
    if math.isinf(clip):
        return s.exp()
    # the exponential sees min(s, c) only, so that neither branch overflows and no 0·inf arises in the gradient
    low = s.clamp(max=clip)
    return low.exp() * (1 + (s - low))


def _margin_and_slope(name: str, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """m (N,) and ∂(Σ_i m_i)/∂x like x, both with their graphs."""
    at = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        margin = true_margin(logits_of(model, at), y)
        require(margin.requires_grad, f"model must be differentiable in its inputs for {name}")
        (slope,) = torch.autograd.grad(margin.sum(), at, create_graph=True)
    require_second_derivative(name, slope)
    return margin, slope
