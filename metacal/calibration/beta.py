"""Beta calibration of every class's probability."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from metacal.calibration.fitted import logits_of
from metacal.calibration.shrunk import (
    BIAS_SCALE,
    LEAST_LOGIT,
    WEIGHT_SCALE,
    AfterTemperature,
    log_probabilities,
    minimise_nll,
    minus_log_prior,
)
from metacal.predictions import Predictions

__all__ = ["BetaScaling"]


class BetaScaling(AfterTemperature):
    """One versus rest: σ(a_k log p_k − b_k log(1 − p_k) + c_k) with a, b > 0, p after temperature scaling; rows
    normalised. Kull, Silva Filho & Flach 2017.

    The likelihood ratio of two Beta distributions: it bends the two ends of a probability differently (a is the slope
    near 0, b near 1), and is the identity at a = b = 1, c = 0. Where there are two classes, both have one curve, that
    of the paper. All classes are fitted together, by the NLL of the normalised rows under priors that draw log a and
    log b to 0 (scale 0.1) and c to 0 (0.2 nats), in float64 by L-BFGS from the identity, which is kept unless the NLL
    falls. It may change the predicted class.

    Args:
        shrink: False: no temperature scaling before, and no priors.

    Attributes:
        before: the temperature scaling.
        parameters: log a, log b and c, float64 (3, K); of two classes those of class 1, (3, 1).
        report: see `FitReport`.
    """

    shown = "σ(a log p − b log(1 − p) + c) of each class, p = softmax(z / T)"
    saved = ("shrink", "before", "parameters")

    def __init__(self, shrink: bool = True) -> None:
        super().__init__(shrink)
        self.parameters: Tensor | None = None

    def _fit_after(self, p: Predictions) -> None:
        log_p = log_probabilities(logits_of(self.before._map(p)))
        log_not = _log_complements(log_p)
        k = p.n_classes
        start = log_p.new_zeros(3, 1 if k == 2 else k)
        scale = log_p.new_tensor([WEIGHT_SCALE, WEIGHT_SCALE, BIAS_SCALE])[:, None]

        def penalty(parameters: Tensor) -> Tensor:
            return minus_log_prior(parameters / scale).sum() * (self.shrink / len(p))

        self.parameters = minimise_nll(lambda parameters: _scores(parameters, log_p, log_not), penalty, start, p.labels)

    def _scores(self, z: Tensor) -> Tensor:
        assert self.parameters is not None
        log_p = log_probabilities(z)
        return _scores(self.parameters.to(log_p.device), log_p, _log_complements(log_p))


def _scores(parameters: Tensor, log_p: Tensor, log_not: Tensor) -> Tensor:
    """log of the calibrated probabilities, before rows are normalised, (N, K)."""
    log_a, log_b, c = parameters
    if log_p.shape[1] == 2:  # 1 − σ(a log p − b log(1 − p) + c) is the curve of 1 − p with a and b exchanged, and −c
        log_a, log_b, c = torch.cat([log_b, log_a]), torch.cat([log_a, log_b]), torch.cat([-c, c])
    return F.logsigmoid(log_a.exp() * log_p - log_b.exp() * log_not + c)


def _log_complements(log_p: Tensor) -> Tensor:
    """log(1 − p_k) (N, K), at least −10^4: of the largest p as the sum of the others, which rounding does not touch."""
    top = log_p.argmax(1, keepdim=True)
    others = log_p.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    small = torch.log1p(-log_p.exp().clamp(max=0.5))  # beside the largest, none exceeds 1/2
    return small.scatter(1, top, others).clamp(min=LEAST_LOGIT)
