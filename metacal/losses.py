"""Per-sample losses: logits `(N, K)` and labels `(N,)` in, one value per sample `(N,)` out.

Every function works in float32 at least: half-precision logits are raised to float32 before the logarithm, and
the values are returned in that precision, so a mean over the batch does not saturate. Float64 stays float64.
Labels are class indices in 0..K-1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.errors import InputError, require

__all__ = [
    "LOSSES",
    "PROBABILITY_FLOOR",
    "brier",
    "cross_entropy",
    "focal",
    "label_smoothing",
    "mse",
]

PROBABILITY_FLOOR = 1e-6
"""Smallest 1 - p that `focal` raises to a power."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p_y, in nats. Shapes `(N, K)`, `(N,)` -> `(N,)`."""
    return -_log_probability(_checked(logits, labels), labels)


def focal(logits: Tensor, labels: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Focal loss -(1 - p_y)^gamma log p_y (Lin et al. 2017). Shapes `(N, K)`, `(N,)`, gamma scalar or `(N,)` -> `(N,)`.

    1 - p_y is taken from log p_y by expm1, which keeps its digits near p = 1, and is floored at
    `PROBABILITY_FLOOR`: without the floor the gradient is NaN at p = 1 for gamma < 1, and so is the mixed
    derivative in the logits and gamma. Value, gradient and mixed derivative are finite for every finite logit gap
    and gamma >= 0; gamma = 0 gives the value and the gradient of cross-entropy exactly.

    A tensor gamma is differentiated like any input: detach it where gamma is to be a constant.
    Raises `InputError` for a negative number; the entries of a tensor are not read (that would wait for the device).
    """
    log_p = _log_probability(_checked(logits, labels), labels)
    if isinstance(gamma, Tensor):
        require(
            gamma.dim() == 0 or gamma.shape == labels.shape,
            f"gamma must be a number or have one value per sample {tuple(labels.shape)}, "
            f"got shape {tuple(gamma.shape)}",
        )
        gamma = gamma.to(log_p.dtype)
    else:
        require(gamma >= 0, f"gamma must be >= 0, got {gamma}")
    miss = torch.clamp(-torch.expm1(log_p), min=PROBABILITY_FLOOR)
    return -(miss**gamma) * log_p


def label_smoothing(logits: Tensor, labels: Tensor, smoothing: float = 0.05) -> Tensor:
    """Cross-entropy against the target (1 - α) e_y + α / K, α = `smoothing` (Müller et al. 2019). -> `(N,)`, in nats.

    The mass α is spread over all K classes, the true one included (α / K, not α / (K - 1)). Raises `InputError` for
    α outside [0, 1].
    """
    require(0 <= smoothing <= 1, f"smoothing must be in [0, 1], got {smoothing}")
    log_p = F.log_softmax(_checked(logits, labels), dim=-1)
    true = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -(1 - smoothing) * true - smoothing * log_p.mean(dim=-1)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum_k (p_k - 1[k = y])^2, in [0, 2] (Brier 1950). Shapes `(N, K)`, `(N,)` -> `(N,)`."""
    logits = _checked(logits, labels)
    probs = F.softmax(logits, dim=-1)
    return (probs - F.one_hot(labels, logits.shape[-1])).square().sum(dim=-1)


def mse(logits: Tensor, labels: Tensor) -> Tensor:
    """1/K sum_k (z_k - 1[k = y])^2: squared error of the logits against one-hot. `(N, K)`, `(N,)` -> `(N,)`."""
    logits = _checked(logits, labels)
    return (logits - F.one_hot(labels, logits.shape[-1])).square().mean(dim=-1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "brier": brier,
    "cross_entropy": cross_entropy,
    "focal": focal,
    "label_smoothing": label_smoothing,
    "mse": mse,
}
"""Losses by the name that a configuration gives. Only `focal` takes a gamma."""


def _checked(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits in float32 or better, once the shapes and types are right."""
    if logits.dim() != 2:
        raise InputError(f"logits must have shape (N, K), got {tuple(logits.shape)}")
    if labels.shape != logits.shape[:1]:
        raise InputError(
            f"labels must have shape ({logits.shape[0]},) like the logits' rows, got {tuple(labels.shape)}"
        )
    if labels.dtype != torch.int64:
        raise InputError(f"labels must be int64 class indices, got {labels.dtype}")
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """log p_y of each row."""
    return F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
