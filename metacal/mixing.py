"""Mixup: training on convex combinations of two samples and of their losses (Zhang et al. 2018).

    weight = max(w, 1 - w),  w ~ Beta(alpha, alpha)
    x_mixed = weight · x + (1 - weight) · x_other,    ℓ = weight · ℓ(z, y) + (1 - weight) · ℓ(z, y_other)

with x_other the same batch in another order and z the logits at x_mixed:

    x_mixed, y, y_other, weight = mixup(x, y, alpha=0.2, generator=generator)
    loss = mixed_loss(focal, backbone(x_mixed)[0], y, y_other, weight, gamma).mean()

For losses that are linear in the target, such as cross-entropy, that is the loss against the mixed target
weight · e_y + (1 - weight) · e_{y_other}.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from metacal.devices import sent
from metacal.errors import require

__all__ = ["mixed_loss", "mixup"]


def mixup(x: Tensor, y: Tensor, alpha: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, float]:
    """A mixed batch: `(x_mixed, y, y_other, weight)`. Shapes `(N, ...)`, `(N,)` -> `(N, ...)`, `(N,)`, `(N,)`.

    One weight for the whole batch and partners by a random permutation of it, as the paper trains: a sample may be its
    own partner. The weight is the larger of the pair, in [1/2, 1]: the paper's mixtures with the two partners in
    this order, so that y is the label of the greater part. x and y are not changed.

    Args:
        x: floating-point inputs, as the network takes them.
        alpha: > 0, both parameters of the Beta distribution: 1 is uniform, and small ones leave most batches nearly
            unmixed.
        generator: on the CPU, whatever the device of x, so that the same draws are made on every device and none is
            waited for. All randomness comes from it.

    Raises `InputError` for anything else.
    """
    require(
        isinstance(alpha, (int, float)) and 0 < alpha < math.inf,
        f"alpha must be a number > 0 (without mixup leave it out), got {alpha!r}",
    )
    require(x.is_floating_point(), f"x must be floating-point, got {x.dtype}")
    require(
        x.dim() >= 1 and y.shape == x.shape[:1] and len(x) > 0,
        f"x and y must hold the same number of samples, at least one, got shapes {tuple(x.shape)} and {tuple(y.shape)}",
    )
    require(generator.device.type == "cpu", f"generator must be on the CPU, got {generator.device}")
    # torch draws from a Beta distribution with its global generator only
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    weight = float(np.random.default_rng(seed).beta(alpha, alpha))
    weight = max(weight, 1 - weight)
    order = sent(torch.randperm(len(x), generator=generator), x.device)
    return torch.lerp(x[order], x, weight), y, y[order], weight


def mixed_loss(
    loss: Callable[..., Tensor], logits: Tensor, y: Tensor, y_other: Tensor, weight: float, *rest: object
) -> Tensor:
    """weight · ℓ(logits, y, *rest) + (1 - weight) · ℓ(logits, y_other, *rest): `(N, K)`, `(N,)`, `(N,)` -> `(N,)`.

    loss: per-sample, of `metacal.losses` or `(logits (N, K), labels (N,), *rest) -> (N,)`; `rest` (a gamma) is the same
    for both labels. Raises `InputError` for a weight outside [0, 1].
    """
    require(0 <= weight <= 1, f"weight must be in [0, 1], got {weight}")
    return weight * loss(logits, y, *rest) + (1 - weight) * loss(logits, y_other, *rest)
