"""Margins in logit space, and what they certify about calibration.

    m_i = z_{i,y_i} − max_{j≠y_i} z_{i,j}      m̂_i = z_{i,ŷ_i} − second largest      Q = 1/N Σ_i exp(−m_i)

Q bounds the calibration error from above, and from below when every sample is right (see `ece_certificate`).
Source: "Too Sharp, Too Sure: When Calibration Follows Curvature" (arXiv 2604.20614).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metacal.calibration.measures import ece
from metacal.errors import InputError, require
from metacal.inputs import logits_in
from metacal.modes import evaluation_mode
from metacal.pixels import Pixels, to_inputs
from metacal.predictions import Predictions

__all__ = [
    "EceCertificate",
    "ece_certificate",
    "gamma_min",
    "log_margin_moment",
    "margin_moment",
    "moment",
    "predicted_margin",
    "robust_margin",
    "true_margin",
]


def true_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """m_i = z_{y_i} − max_{j≠y_i} z_j, shape (N,), differentiable; positive where the prediction is right.

    Args: logits (N, K), K >= 2; labels (N,) in 0..K−1. Half types are taken to float32.

    Raises `InputError` for labels out of range that lie on the CPU.
    """
    logits = _checked(logits)
    _check_labels(logits, labels)
    at = labels.long()[:, None]
    rival = logits.detach().scatter(1, at, -math.inf).argmax(1, keepdim=True)  # no graph keeps the copy
    rival = torch.where(rival == at, (at + 1) % logits.shape[1], rival)  # where all the others are -inf
    label, other = logits.gather(1, torch.cat([at, rival], 1)).unbind(1)
    return label - other


def predicted_margin(logits: Tensor) -> Tensor:
    """m̂_i = largest − second largest logit, shape (N,), differentiable; it needs no labels.

    0 <= m̂_i = m_i where the prediction is right, and m̂_i <= −m_i where it is wrong.
    """
    top = _checked(logits).topk(2, dim=1).values
    return top[:, 0] - top[:, 1]


def log_margin_moment(logits: Tensor, labels: Tensor) -> float:
    """log Q = logsumexp_i(−m_i) − log N, finite where Q itself overflows (a margin below −709)."""
    return _log_moment(_exact_margins(logits, labels))


def margin_moment(logits: Tensor, labels: Tensor) -> float:
    """Q = 1/N Σ_i exp(−m_i), in float64; inf where it exceeds 1.8e308 (see `log_margin_moment`)."""
    return _exp(log_margin_moment(logits, labels))


def moment(margin: Tensor) -> float:
    """1/N Σ_i exp(−m_i) of margins m (N,), robust ones for example, in float64; inf where it exceeds 1.8e308."""
    return _exp(_log_moment(margin.detach().double()))


def gamma_min(logits: Tensor, labels: Tensor) -> float:
    """γ_min = min_i m_i: positive when every sample is classified rightly and without a tie."""
    return _exact_margins(logits, labels).min().item()


def robust_margin(
    model: Callable[[Tensor], Any],
    x: Tensor,
    y: Tensor,
    eps: float,
    norm: str = "linf",
    steps: int = 3,
    step_size: float | None = None,
    clip: tuple[float, float] | None = None,
    pixels: Pixels | None = None,
) -> tuple[Tensor, Tensor]:
    """The smallest margin within ‖δ‖ <= eps, min_δ m(x_i + δ), estimated twice: (upper (N,), first_order (N,)).

    upper: the least margin among x and the iterates of projected gradient descent on m from x. It is never
    below the true minimum and never above m(x).
    first_order: m − eps·‖∇_x m‖_*, with the dual norm (L1 for "linf", L2 for "l2"). It is the minimum for
    the linearised network; for a nonlinear one an estimate, and no bound. `clip` does not enter it.

    The model is read in evaluation mode, and handed back with its modes, buffers and gradients as they were.

    Args:
        model: x -> logits (N, K), or (logits, features) as `metacal.Backbone` gives.
        x: inputs (N, ...), floating point.
        norm: "linf" or "l2" (over all of a sample's entries).
        step_size: of one PGD step; by default eps for one step, else 2.5·eps/steps.
        clip: the valid range of the inputs, which the perturbed ones are kept in; None: no limits.
        pixels: how inputs are made of pixels, in whose units eps, step_size and clip then are; None: in those of x.

    `moment` of either gives the robust moment Q_ε = 1/N Σ_i exp(−m_ε,i) (arXiv 2604.20614), from below with `upper`.
    """
    require(norm in ("linf", "l2"), f"norm must be 'linf' or 'l2', got {norm!r}")
    require(0 <= eps < math.inf, f"eps must be >= 0, got {eps}")
    require(isinstance(steps, int) and steps >= 1, f"steps must be an integer >= 1, got {steps}")
    require(step_size is None or step_size > 0, f"step_size must be > 0, got {step_size}")
    require(clip is None or clip[0] < clip[1], f"clip must be (low, high) with low < high, got {clip}")
    require(x.is_floating_point(), f"x must be floating point to be perturbed, got {x.dtype}")
    if step_size is None:
        step_size = eps if steps == 1 else 2.5 * eps / steps

    # Copies made here are ordinary tensors, also for a caller in inference mode.
    with torch.inference_mode(False), torch.enable_grad(), evaluation_mode(model):
        start, labels = x.detach().clone(), y.detach().clone()
        mean, std = to_inputs(pixels, start)
        pixel, centre = start * std + mean, torch.zeros_like(start)
        delta = centre
        upper: Tensor | None = None
        first_order: Tensor | None = None
        for step in range(steps + 1):
            delta = delta.detach().requires_grad_()
            margin = true_margin(_logits_of(model, start + delta / std), labels)
            upper = margin.detach() if upper is None else torch.minimum(upper, margin.detach())
            if step == steps:
                break
            (slope,) = torch.autograd.grad(margin.sum(), delta)
            if first_order is None:
                first_order = margin.detach() - eps * dual_norm(slope, norm).to(margin.dtype)
            delta = descend_in_ball(delta.detach(), slope, centre, eps, step_size, norm)
            if clip is not None:
                delta = (pixel + delta).clamp(*clip) - pixel
    assert upper is not None and first_order is not None
    return upper, first_order


def descend_in_ball(at: Tensor, slope: Tensor, start: Tensor, eps: float, step_size: float, norm: str) -> Tensor:
    """One step of steepest descent in the norm, and back into the ball around `start`."""
    if norm == "linf":
        return (at - step_size * slope.sign()).clamp(start - eps, start + eps)
    delta = at - step_size * slope / _lengths(slope) - start
    return start + delta * (eps / _lengths(delta)).clamp(max=1.0)


def dual_norm(slope: Tensor, norm: str) -> Tensor:
    """‖slope‖_* of every sample, (N,): L1 for "linf", L2 for "l2". Its derivative is 0 where the slope is."""
    flat = slope.flatten(1)
    return flat.abs().sum(1) if norm == "linf" else flat.norm(dim=1)


def _lengths(t: Tensor) -> Tensor:
    """L2 length of every sample, shaped to divide t; tiny in place of 0."""
    length = t.flatten(1).norm(dim=1).clamp(min=torch.finfo(t.dtype).tiny)
    return length.view(-1, *[1] * (t.ndim - 1))


@dataclass(frozen=True)
class EceCertificate:
    """value <= mean_miss <= upper always; lower <= value where gamma_min > 0. All are fractions, in float64.

    Attributes:
        value: ECE with `n_bins` equal-width bins.
        mean_miss: mean(1 − p_y).
        upper: (K − 1)·Q.
        lower: Q/K where γ_min > 0 (all samples right), else 0.
        q, gamma_min: the moment Q and the smallest margin.
        slack: what rounding, or probabilities that do not sum to 1, may take from the inequalities.
        ratio_miss, ratio_upper: bound over value, how loose they are: >= 1.
        ratio_lower: lower over value, in [0, 1].
        violated: whether an inequality fails by more than the slack: a bug in the code, as they are theorems.
    """

    value: float
    mean_miss: float
    upper: float
    lower: float
    q: float
    gamma_min: float
    slack: float
    ratio_miss: float = field(init=False)
    ratio_upper: float = field(init=False)
    ratio_lower: float = field(init=False)
    violated: bool = field(init=False)

    def __post_init__(self) -> None:
        def exceeds(a: float, b: float) -> bool:
            return a > b * (1 + 1e-9) + self.slack

        derived = {
            "ratio_miss": _ratio(self.mean_miss, self.value),
            "ratio_upper": _ratio(self.upper, self.value),
            "ratio_lower": _ratio(self.lower, self.value),
            "violated": exceeds(self.value, self.mean_miss)
            or exceeds(self.mean_miss, self.upper)
            or exceeds(self.lower, self.value),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


def ece_certificate(p: Predictions, n_bins: int = 15) -> EceCertificate:
    """Both sides of the margin bounds on ECE, and ECE itself.

        ECE <= mean(1 − p_y) <= (K − 1)·Q,  and  Q/K <= ECE  if γ_min > 0

    The first holds sample by sample (|a − c| <= 1 − p_y), whatever the bins; the second because
    1 − p_y <= Σ_{j≠y} exp(z_j − z_y); the third because then ECE = mean(1 − p_y) and 1 − p_y >= exp(−m)/K.
    For predictions made from probabilities the logits are log p.
    """
    slack, k = 1e-12, p.n_classes
    if p.logits is not None:
        margins = _exact_margins(p.logits, p.labels)
    else:
        parts = []
        for rows, probs in p.chunks():
            wide = probs.double()
            # given rows may sum to 1 only within rounding, and all three theorems need the sum
            slack = max(slack, 1e-12 + (wide.sum(1) - 1).abs().max().item())
            parts.append(true_margin(wide.log(), p.labels[rows]))
        margins = torch.cat(parts)
    q, smallest = moment(margins), margins.min().item()
    return EceCertificate(
        value=float(ece(p, n_bins=n_bins)),
        mean_miss=(-torch.expm1(p.log_likelihood.double())).mean().item(),
        upper=(k - 1) * q,
        lower=q / k if smallest > 0 else 0.0,
        q=q,
        gamma_min=smallest,
        slack=slack,
    )


# ------------------------------------------------------------------------------------------------ helpers


def _checked(logits: Tensor) -> Tensor:
    require(
        isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim == 2 and logits.shape[1] >= 2,
        "logits must be a floating-point tensor of shape (N, K) with K >= 2, got "
        + (f"{logits.dtype} of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"{type(logits)}"),
    )
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _check_labels(logits: Tensor, labels: Tensor, wait: bool = False) -> None:
    """Integers (N,) in 0..K−1. Their values are read on the CPU; on another device, for which to wait, if `wait`."""
    require(
        isinstance(labels, Tensor) and labels.shape == logits.shape[:1] and not labels.is_floating_point(),
        f"labels must be an integer tensor of shape ({len(logits)},), got "
        + (f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else f"{type(labels)}"),
    )
    if wait or labels.device.type == "cpu":
        outside = (labels < 0) | (labels >= logits.shape[1])
        if bool(outside.any()):
            row = int(outside.int().argmax())
            raise InputError(f"labels must be in 0..{logits.shape[1] - 1}, got {int(labels[row])} in row {row}")


def _exact_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The margins in float64, chunk by chunk: no second (N, K) array."""
    _checked(logits[:1])
    _check_labels(logits, labels, wait=True)
    rows = max(1, 2**20 // logits.shape[1])
    parts = zip(logits.detach().split(rows), labels.split(rows))
    return torch.cat([true_margin(z.double(), y) for z, y in parts])


def _logits_of(model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    out = logits_in(model(x))
    return logits_in(out[0]) if isinstance(out, tuple) else out


def _log_moment(margin: Tensor) -> float:
    return (torch.logsumexp(-margin, dim=0) - math.log(len(margin))).item()


def _exp(x: float) -> float:
    return math.exp(x) if x < 709.78 else math.inf


def _ratio(bound: float, value: float) -> float:
    if value > 0:
        return bound / value
    return 1.0 if bound == 0 else math.inf
