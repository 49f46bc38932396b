"""Conformal prediction sets: sets of classes that hold the label with a chosen probability.

    sets = ConformalSets("aps", alpha=0.1).fit(val)
    sets.of(test)                        # bool (N, K): the classes in each set
    sets.measure(test)                   # coverage with its interval, mean size

With scores s of n validation predictions and q their ceil((n + 1)(1 − α))-th smallest, a set holds the classes of which
the score is at most q. If validation and test predictions are exchangeable, it holds the label with a probability of at
least 1 − α, over draws of both, and of at most 1 − α + 1/(n + 1) where no scores are equal; whatever the model is
(Vovk et al. 2005). A map that was fitted on the same validation split is not exchangeable with it: fit it elsewhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from metacal.calibration.arguments import require_predictions
from metacal.calibration.binning import wilson_interval
from metacal.errors import require, require_choice
from metacal.predictions import Predictions

__all__ = ["SCORES", "ConformalSets", "Coverage", "share_interval"]

SCORES = ("thr", "aps", "raps")

_UNIT = 2.0**-40  # of sums of probabilities: the sum of a whole row is 1, whatever the order of its summands


class Coverage(NamedTuple):
    """How prediction sets did: the share of labels in them, its 95 % interval, and the mean number of classes."""

    coverage: float
    low: float
    high: float
    size: float
    n: int


class ConformalSets:
    """Sets that hold the label with probability >= 1 − α, fitted on validation predictions.

    The score of class k, p sorted from the largest on, r_k the rank of k (1 for the largest):

    - thr: 1 − p_k (Sadinle et al. 2019): the smallest sets on average, too small for hard samples.
    - aps: Σ_{j: r_j < r_k} p_j + u p_k (Romano et al. 2020): larger where the model is unsure.
    - raps: aps + `penalty` · max(0, r_k − `free`) (Angelopoulos et al. 2021): without the long tails of aps.

    Args:
        score: thr, aps or raps.
        alpha: α in (0, 1), the share of labels that may be missed.
        penalty, free: of raps.
        randomised: u is uniform in [0, 1), drawn for every row, without which aps covers more than it must; False: 1.
        seed: of these.

    Attributes:
        threshold: q; inf where the split is too small for α, so that every set holds all classes.
    """

    def __init__(
        self,
        score: str = "thr",
        alpha: float = 0.1,
        *,
        penalty: float = 0.01,
        free: int = 5,
        randomised: bool = True,
        seed: int = 0,
    ) -> None:
        require_choice("score", score, SCORES)
        require(0 < alpha < 1, f"alpha must lie in (0, 1), got {alpha}")
        require(penalty >= 0, f"penalty must be >= 0, got {penalty}")
        require(free >= 0, f"free must be >= 0, got {free}")
        self.score, self.alpha, self.penalty, self.free = score, alpha, penalty, free
        self.randomised, self.seed = randomised, seed
        self.threshold = math.nan
        self.n_classes: int | None = None

    def fit(self, p: Predictions) -> ConformalSets:
        """Take the threshold from validation predictions; returns self."""
        require_predictions("p", p)
        scores = self._scores(p, stream=0).gather(1, p.labels[:, None]).squeeze(1)
        k = math.ceil((len(p) + 1) * (1 - self.alpha) - 1e-9)  # 10 · (1 − 0.1) is 9, whatever its rounding
        self.threshold = math.inf if k > len(p) else float(scores.kthvalue(k).values)
        self.n_classes = p.n_classes
        return self

    def of(self, p: Predictions) -> Tensor:
        """Which classes are in the set of each prediction, bool (N, K). Raises InputError before `fit`."""
        require_predictions("p", p)
        require(self.n_classes is not None, "the sets must be fitted before they are made")
        require(
            p.n_classes == self.n_classes, f"p must have the {self.n_classes} classes of the fit, got {p.n_classes}"
        )
        return self._scores(p, stream=1) <= self.threshold

    def measure(self, p: Predictions) -> Coverage:
        """The sets of `p` held against its labels."""
        sets = self.of(p)
        hits = int(sets.gather(1, p.labels[:, None]).sum())
        return Coverage(hits / len(p), *share_interval(hits, len(p)), float(sets.sum(1).double().mean()), len(p))

    def _scores(self, p: Predictions, stream: int) -> Tensor:
        """Of every class, float64 (N, K); val and test draw from streams of their own, or they would depend."""
        probs = p.probs.double()
        if self.score == "thr":
            return 1 - probs
        ordered, order = torch.sort(probs, dim=1, descending=True, stable=True)
        u: Tensor | float = 1.0
        if self.randomised:
            generator = torch.Generator().manual_seed(2 * self.seed + stream)
            u = torch.rand(len(p), 1, dtype=torch.float64, generator=generator).to(p.device)
        scores = ordered.cumsum(1) - (1 - u) * ordered
        if self.score == "raps":
            rank = torch.arange(1, p.n_classes + 1, dtype=torch.float64, device=p.device)
            scores = scores + self.penalty * (rank - self.free).clamp(min=0)
        scores = (scores / _UNIT).round() * _UNIT
        return torch.empty_like(scores).scatter_(1, order, scores)


def share_interval(hits: int, n: int) -> tuple[float, float]:
    """`wilson_interval` of one binomial share, at 95 %, as numbers."""
    require(0 <= hits <= n and n > 0, f"hits must lie in 0..n with n > 0, got {hits} of {n}")
    low, high = wilson_interval(torch.tensor(hits), torch.tensor(n))
    return float(low), float(high)
