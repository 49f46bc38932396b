"""A learned gamma that is a function of the prediction itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.errors import require
from metacal.gamma.bounds import cap, settle_, uncap
from metacal.gamma.learned import ScalarOptions
from metacal.gamma.options import Around
from metacal.options import option

__all__ = ["CurveGamma", "CurveOptions"]


@dataclass
class CurveOptions(ScalarOptions):
    """`CurveGamma`."""

    units: int = option(16, "width of the curve's hidden layer", low=1)

    def build(self, around: Around) -> nn.Module:
        return CurveGamma(self.init, self.tau, self.max, self.min, units=self.units)


class CurveGamma(nn.Module):
    """A gamma that is a small smooth function of how sure the network is, and of how right.

        x = 2 (c, H / log K, p_y) - 1,    o = w2ᵀ tanh(W1 x + b1) + b2,    gamma = cap(o)  as in `GammaNet`

    with the confidence c = max_k p_k, the entropy H of p = softmax(logits) and the probability p_y of the label, all
    three in [0, 1] and constants. w2 starts at zero and b2 where gamma = gamma_init. It needs no features, so that any
    classifier will do, and has 5 `units` + 1 parameters.
    """

    def __init__(
        self,
        gamma_init: float = ScalarOptions.init,
        tau: float = ScalarOptions.tau,
        gamma_max: float = ScalarOptions.max,
        gamma_min: float = ScalarOptions.min,
        *,
        units: int = CurveOptions.units,
    ) -> None:
        super().__init__()
        require(units >= 1, f"units must be >= 1, got {units}")
        self.tau, self.gamma_max, self.gamma_min = tau, gamma_max, gamma_min
        self.first = nn.Linear(3, units)
        self.last = nn.Linear(units, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, uncap(gamma_init, tau, gamma_max, gamma_min))

    def forward(self, features: Tensor | None = None, *, logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        """gamma `(N,)` for logits `(N, K)` and labels `(N,)`."""
        p = F.softmax(logits.detach().to(self.last.weight.dtype), dim=1)
        entropy = torch.special.entr(p).sum(1) / math.log(p.shape[1])
        x = torch.stack([p.amax(1), entropy, p.gather(1, labels.unsqueeze(1)).squeeze(1)], dim=1)
        score = self.last(torch.tanh(self.first(2 * x - 1))).squeeze(1)
        return cap(score, self.tau, self.gamma_max, self.gamma_min)

    def settle(self) -> None:
        """The same for the constant b2, around which the rest of the score is bounded; see `bounds.settle_`."""
        settle_(self.last.bias, self.tau, self.gamma_max, self.gamma_min)
