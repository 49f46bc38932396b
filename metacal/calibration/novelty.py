"""Out-of-distribution scores: how well a model's predictions tell the data that it knows from others.

novelty(inside, outside)["energy"]          # Separation(auroc=0.93, fpr=0.31)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from metacal.calibration.arguments import require_predictions
from metacal.calibration.ranking import pair_order, value_counts
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["OOD_SCORES", "Separation", "novelty", "separation"]

TPR = 0.95


class Separation(NamedTuple):
    """AUROC of known against other data, and the share of others that pass where 95 % of the known ones do."""

    auroc: float
    fpr: float


def _energy(p: Predictions) -> Tensor | None:
    """log Σ_k exp z_k, minus the energy of Liu et al. 2020; None without logits."""
    return None if p.logits is None else torch.logsumexp(p.logits.double(), 1)


def _entropy(p: Predictions) -> Tensor:
    """Σ_k p_k log p_k, minus the entropy in nats."""
    return torch.cat([torch.special.xlogy(probs.double(), probs.double()).sum(1) for _, probs in p.chunks()])


OOD_SCORES: dict[str, Callable[[Predictions], Tensor | None]] = {
    "max_probability": lambda p: p.confidence,
    "energy": _energy,
    "entropy": _entropy,
}
"""Score by name, (N,), larger for what is known: the top probability (Hendrycks & Gimpel 2017), minus the energy, minus
the entropy."""


def novelty(inside: Predictions, outside: Predictions) -> dict[str, Separation]:
    """`Separation` by every score of `OOD_SCORES` that the predictions have; the labels of `outside` are not looked at.

    Raises:
        InputError: for other numbers of classes.
    """
    require_predictions("inside", inside)
    require_predictions("outside", outside)
    k = inside.n_classes
    require(outside.n_classes == k, f"outside must have the {k} classes of inside, got {outside.n_classes}")
    out = {}
    for name, score in OOD_SCORES.items():
        known, other = score(inside), score(outside)
        if known is not None and other is not None:
            out[name] = separation(known, other)
    return out


def separation(known: Tensor, other: Tensor) -> Separation:
    """AUROC = P(s > s') + P(s = s') / 2 for a score s of `known` (N,) and s' of `other` (M,); and P(s' >= t), t the
    largest threshold with P(s >= t) >= 0.95.
    """
    known, other = known.double().cpu(), other.double().cpu()
    scores, order = torch.cat([known, other]).sort()
    auroc = float(pair_order(*value_counts(scores, order < len(known))))
    passing = math.ceil(TPR * len(known) - 1e-9)
    threshold = known.sort(descending=True).values[passing - 1]
    return Separation(auroc, float((other >= threshold).double().mean()))
