"""Gammas that follow the calibration of held-out predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.calibration.binning import bin_edges, reliability_bins
from metacal.errors import require
from metacal.gamma.options import Around, SourceOptions
from metacal.options import option
from metacal.predictions import Predictions

__all__ = ["AdaFocal", "AdaFocalOptions"]


@dataclass
class AdaFocalOptions(SourceOptions):
    """`AdaFocal`."""

    n_bins: int = option(15, "bins of the confidence", low=1)
    rate: float = option(1.0, "how fast gammas follow the calibration error", above=0)
    init: float = option(1.0, "gamma at the start", above=0)

    follows: ClassVar[bool] = True

    def build(self, around: Around) -> nn.Module:
        return AdaFocal(self.n_bins, self.rate, self.init)


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
        n_bins: int = AdaFocalOptions.n_bins,
        rate: float = AdaFocalOptions.rate,
        gamma_init: float = AdaFocalOptions.init,
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
