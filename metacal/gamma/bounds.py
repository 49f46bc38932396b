"""Gammas of scores: smooth maps from the real line onto an interval."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.errors import require

__all__ = ["cap", "settle_", "uncap"]


def cap(score: Tensor, tau: float, gamma_max: float, gamma_min: float = 0.0) -> Tensor:
    """gamma of a score, between gamma_min and gamma_max, with a gradient everywhere.

        gamma_min = 0:  gamma_max · tanh(softplus(score / tau) / gamma_max)
        gamma_min < 0:  with s = score / tau,  gamma_max · tanh(s / gamma_max) where s >= 0, else with gamma_min

    The second form has gamma = s and two continuous derivatives at 0, so that gamma passes through 0 undisturbed.
    """
    if gamma_min == 0:
        return gamma_max * torch.tanh(F.softplus(score / tau) / gamma_max)
    s = score / tau
    bound = torch.where(s >= 0, gamma_max, gamma_min)
    return bound * torch.tanh(s / bound)


def uncap(gamma: float, tau: float, gamma_max: float, gamma_min: float = 0.0) -> float:
    """The score that `cap` maps to gamma."""
    require(tau > 0, f"tau must be > 0, got {tau}")
    require(gamma_max > 0, f"gamma_max must be > 0, got {gamma_max}")
    require(gamma_min <= 0, f"gamma_min must be <= 0, got {gamma_min}")
    require(
        gamma_min < gamma < gamma_max,
        f"gamma_init must be between {gamma_min:g} and gamma_max = {gamma_max}, both exclusive, got {gamma}",
    )
    bound = gamma_max if gamma >= 0 else gamma_min
    s = bound * math.atanh(gamma / bound)
    if gamma_min < 0:
        return tau * s
    # log(expm1(s)), written so that it does not overflow for large s
    return tau * (s + math.log(-math.expm1(-s)))


MARGIN = 0.02  # of gamma to its bounds, as a part of the range from 0 to the bound
LEAST = 0.1  # gamma above a bound of 0, where softplus has a slope still and the loss is nearly cross-entropy


@torch.no_grad()
def settle_(score: Tensor, tau: float, gamma_max: float, gamma_min: float = 0.0) -> None:
    """Keep a score, in place, where gamma can leave its bounds again: between those of two gammas just within them.

    Adam's steps are as long where the slope of `cap` has vanished as elsewhere: a score that is pushed on at a bound
    for a hundred steps would need a hundred to come back (an integrator winds up in the same way).
    """
    low = LEAST if gamma_min == 0 else (1 - MARGIN) * gamma_min
    score.clamp_(uncap(low, tau, gamma_max, gamma_min), uncap((1 - MARGIN) * gamma_max, tau, gamma_max, gamma_min))
