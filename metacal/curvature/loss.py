"""The loss whose curvature is measured, as a function of the logits: value, gradient, Hessian and its roots.

For N examples and K classes, logits z (N, K), p = softmax(z), q = log p_y, d = e_y - p, S_ce = diag(p) - p pᵀ:

    cross-entropy       ℓ = -q                          ∂ℓ/∂z = -d                      S = S_ce
    label smoothing     ℓ = -(1-α) q - α/K Σ_k log p_k   ∂ℓ/∂z = p - (1-α) e_y - α/K     S = S_ce
    focal               ℓ = f(q) = -(1-p_y)^γ q          ∂ℓ/∂z = f'(q) d                 S = f''(q) d dᵀ - f'(q) S_ce
    mse                 ℓ = 1/K ‖z - e_y‖²               ∂ℓ/∂z = 2/K (z - e_y)           S = 2/K · I

f' <= 0, but f'' is negative where the label is improbable: S of a focal loss may be indefinite, and so may its
Gauss-Newton matrix. Such an S has no root: what needs one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from metacal import losses
from metacal.errors import require
from metacal.losses import PROBABILITY_FLOOR

__all__ = [
    "LOSSES",
    "FactorColumns",
    "Focal",
    "LabelSmoothing",
    "LogitLoss",
    "check_loss",
    "factor_rank",
    "logit_factor",
    "logit_gradient",
    "logit_hessian",
    "logit_pullback",
    "logit_trace",
    "loss_of_rows",
    "mean_loss",
]

LOSSES = ("cross_entropy", "mse")
"""Those that are given by their names."""


@dataclass(frozen=True, eq=False)
class Focal:
    """The focal loss of `metacal.losses.focal`; gamma: >= 0, a number or one for each example `(N,)`, a constant."""

    gamma: float | Tensor


@dataclass(frozen=True, eq=False)
class LabelSmoothing:
    """`metacal.losses.label_smoothing`; alpha: in [0, 1], a number or one for each example `(N,)`, a constant."""

    alpha: float | Tensor


LogitLoss = str | Focal | LabelSmoothing
"""A name of `LOSSES`, or a loss with its numbers."""


def check_loss(loss: Any, x: Tensor) -> LogitLoss:
    """The loss with its numbers on the device of the examples x.

    Raises `InputError` for anything else, and for numbers out of range or not one for each example.
    """
    if not isinstance(loss, (Focal, LabelSmoothing)):
        require(
            isinstance(loss, str) and loss in LOSSES,
            f"loss must be one of {', '.join(LOSSES)}, got {loss!r}; with numbers it is "
            "metacal.curvature.Focal(gamma) or LabelSmoothing(alpha)",
        )
        return loss
    name, high = ("gamma", math.inf) if isinstance(loss, Focal) else ("alpha", 1.0)
    value = getattr(loss, name)
    value = value.detach().to(x.device) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    require(
        value.ndim == 0 or value.shape == (len(x),),
        f"{name} must be a number or one for each of {len(x)} examples, got shape {tuple(value.shape)}",
    )
    least, most = (float(v) for v in value.double().aminmax())
    require(
        least >= 0 and most <= high and math.isfinite(most),
        f"{name} must be " + (">= 0" if high > 1 else "in [0, 1]") + f", got values from {least:g} to {most:g}",
    )
    checked: dict[str, Any] = {name: value if value.ndim else float(value)}
    return replace(loss, **checked)


def loss_of_rows(loss: LogitLoss, rows: slice | Tensor) -> LogitLoss:
    """The loss of some of the examples."""
    if isinstance(loss, str):
        return loss
    ((name, value),) = vars(loss).items()
    if not (isinstance(value, Tensor) and value.ndim):
        return loss
    chosen: dict[str, Any] = {name: value[rows]}
    return replace(loss, **chosen)


def mean_loss(z: Tensor, y: Tensor, loss: LogitLoss) -> Tensor:
    """L, the mean over the examples."""
    if isinstance(loss, Focal):
        return losses.focal(z, y, loss.gamma).mean()
    if isinstance(loss, LabelSmoothing):
        return losses.label_smoothing(z, y, loss.alpha).mean()
    return (losses.mse if loss == "mse" else losses.cross_entropy)(z, y).mean()


def logit_gradient(z: Tensor, y: Tensor, loss: LogitLoss) -> Tensor:
    """∂ℓ/∂z = N·∂L/∂z for logits (n, K). Differentiable in z."""
    target = torch.zeros_like(z).scatter_(1, y[:, None], 1.0)
    if isinstance(loss, Focal):
        first, _ = _slopes(z, y, loss.gamma)
        return first[:, None] * (target - z.softmax(1))
    if isinstance(loss, LabelSmoothing):
        alpha = _column(loss.alpha, z)
        return z.softmax(1) - (1 - alpha) * target - alpha / z.shape[1]
    if loss == "cross_entropy":
        return z.softmax(1) - target
    return (z - target) * (2.0 / z.shape[1])


def logit_hessian(z: Tensor, y: Tensor, w: Tensor, loss: LogitLoss) -> Tensor:
    """S_n w_n for each example, (n, K) → (n, K); the 1/N of the mean is left to the caller."""
    if loss == "mse":
        return w * (2.0 / z.shape[1])
    p = z.softmax(1)
    product = p * (w - (p * w).sum(1, keepdim=True))
    if not isinstance(loss, Focal):
        return product
    first, second = _slopes(z, y, loss.gamma)
    d = torch.zeros_like(z).scatter_(1, y[:, None], 1.0) - p
    return (second * (d * w).sum(1))[:, None] * d - first[:, None] * product


def _slopes(z: Tensor, y: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """f'(q) and f''(q) of the focal loss at q = log p_y, (n,) each; with r = 1 - p_y, floored as the loss floors it:

    f' = -r^γ + γ r^(γ-1) p q,    f'' = γ r^(γ-1) p (2 + q) - γ (γ-1) r^(γ-2) p² q
    """
    q = z.log_softmax(1).gather(1, y[:, None]).squeeze(1)
    p, r = q.exp(), -torch.expm1(q)
    moves = r >= PROBABILITY_FLOOR
    r = r.clamp(min=PROBABILITY_FLOOR)
    if isinstance(gamma, Tensor):
        gamma = gamma.to(z.dtype)
    slope = torch.where(moves, gamma * r ** (gamma - 1) * p, 0.0)
    bend = torch.where(moves, gamma * (gamma - 1) * r ** (gamma - 2) * p.square(), 0.0)
    return slope * q - r**gamma, slope * (2 + q) - bend * q


def _column(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number for each example, to go with (n, K)."""
    return value.to(like.dtype)[:, None] if isinstance(value, Tensor) else value


def _require_root(loss: LogitLoss) -> None:
    require(
        not isinstance(loss, Focal),
        "this needs a root of the loss's Hessian in the logits, which for a focal loss may be indefinite and has none: "
        "use loss='cross_entropy', or a measure by products (sharpness, traces with probes)",
    )


def logit_factor(z: Tensor, e: Tensor, loss: LogitLoss) -> Tensor:
    """A square root of S applied to e, (n, K) → (n, K): E over signs of the result's outer product is S_n.

    Cross-entropy: √p∘e - p(√p·e). The root comes from log_softmax/2, which survives where p underflows. Raises
    `InputError` for a focal loss.
    """
    _require_root(loss)
    if loss == "mse":
        return e * math.sqrt(2.0 / z.shape[1])
    log_p = z.log_softmax(1)
    root = (0.5 * log_p).exp()
    return root * e - log_p.exp() * (root * e).sum(1, keepdim=True)


class FactorColumns(Sequence[Tensor]):
    """Columns C_c (n, K) with Σ_c C_c C_cᵀ = S_n exactly: as few as its rank, K - 1 or (mse) K, made when asked for.

    Cross-entropy: the Cholesky factor of a multinomial covariance, closed form. With the tail mass
    t_k = Σ_{j≥k} p_j, column k is √(p_k t_{k+1}/t_k) at row k and -p_i/t_{k+1} times that at rows i > k.
    All ratios are taken between logarithms. Raises `InputError` for a focal loss.
    """

    def __init__(self, z: Tensor, loss: LogitLoss) -> None:
        _require_root(loss)
        self.z, self.loss = z, loss
        self._log_p = z.log_softmax(1)
        self._log_tail = self._log_p.flip(1).logcumsumexp(1).flip(1)

    def __len__(self) -> int:
        return factor_rank(self.z.shape[1], self.loss)

    def __getitem__(self, c: Any) -> Any:
        if isinstance(c, slice):
            return [self[i] for i in range(*c.indices(len(self)))]
        if not 0 <= c < len(self):
            raise IndexError(c)
        column = torch.zeros_like(self.z)
        if self.loss == "mse":
            column[:, c] = math.sqrt(2.0 / self.z.shape[1])
            return column
        log_p, log_tail = self._log_p, self._log_tail
        scale = (0.5 * (log_p[:, c] + log_tail[:, c + 1] - log_tail[:, c])).exp()
        column[:, c] = scale
        column[:, c + 1 :] = -scale[:, None] * (log_p[:, c + 1 :] - log_tail[:, c + 1, None]).exp()
        return column


def factor_rank(k: int, loss: LogitLoss) -> int:
    """How many `FactorColumns` there are for K classes."""
    return k if loss == "mse" else k - 1


def logit_pullback(z: Tensor, w: Tensor, loss: LogitLoss, diagonal: bool) -> Tensor:
    """Wᵀ S_n W for logits z (n, K) and W (K, w): the `diagonal` (n, w), or all of it (n, w, w). Differentiable.

    In O(K w) and O(K w²) an example, with no K × K matrix. Cross-entropy: it is the covariance of the rows of W under
    p, Σ_k p_k d_k d_kᵀ - d̄ d̄ᵀ, taken about the row of the largest probability. Every term is then as small as the
    probability of the other classes, so that nothing cancels where that is next to nothing. Raises `InputError` for a
    focal loss.
    """
    _require_root(loss)
    n, k = z.shape
    if loss == "mse":
        whole = (w.square().sum(0) if diagonal else w.T @ w) * (2.0 / k)
        return whole.expand(n, *whole.shape)
    w = w - w.mean(0)  # S 1 = 0
    others, top, mass = _others(z)
    first, moment = w[top], others @ w
    mean = moment - mass * first
    if diagonal:
        return others @ w.square() - 2 * first * moment + mass * first.square() - mean.square()
    cross = first[:, :, None] * moment[:, None]
    square = (w.T * others[:, None]) @ w + mass[:, :, None] * first[:, :, None] * first[:, None]
    return square - cross - cross.transpose(1, 2) - mean[:, :, None] * mean[:, None]


def logit_trace(z: Tensor, loss: LogitLoss) -> Tensor:
    """tr S_n, (n,), with as many digits where one probability is nearly 1. Raises `InputError` for a focal loss."""
    _require_root(loss)
    if loss == "mse":
        return torch.full_like(z[:, 0], 2.0)
    others, _, mass = _others(z)
    return (others * (1 - others)).sum(1) + mass[:, 0] * (1 - mass[:, 0])


def _others(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p with 0 in place of the largest (n, K), where that is (n,), and the sum of the others (n, 1)."""
    top = z.detach().argmax(1)
    others = z.softmax(1).scatter(1, top[:, None], 0.0)
    return others, top, others.sum(1, keepdim=True)
