"""Temperature scaling, shrunk.

    T = argmin  N · NLL(T) + 2 log(1 + (log T)² / (3 · 0.2²))

The second term is what keeps a small split from saying more than it knows. A split of 13 predictions without an error
has an NLL that falls for ever as T tends to 0, and the T of maximum likelihood then turns the first error on new data
into a loss of tens of nats. `scripts/small_splits.py` measures both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from metacal.calibration.fitted import Scaling, logits_of
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["PRIOR_SCALE", "TemperatureScaling", "scale_by"]

PRIOR_SCALE = 0.2
"""Of log T under the prior, Student's t with 3 degrees of freedom."""

_MOST = math.log(100.0)  # of |log T|
_NODES = 13  # values of log T between 0 and its bound, among which the minimum is first looked for
_HALF_CHI_SQUARE = 1.9207  # half the 95 % quantile of χ² with one degree of freedom


class TemperatureScaling(Scaling):
    """softmax(z / T) with the T in [0.01, 100] that minimises N · NLL(T) + 2 log(1 + (log T)² / (3 · 0.2²)), N · NLL(T)
    the negative log-likelihood of the fit split.

    That is the T of Guo et al. 2017 drawn towards 1 by a prior: log T has Student's t distribution with 3 degrees of
    freedom and scale 0.2, so that half of all networks have a T within a factor 1.17 of 1, and 95 % within 1.9. The
    pull is at most 5.8 nats a unit of log T (at T = 1.4 or 0.7) and falls off beyond, so that a T far from 1 is found
    where there is evidence for it: if the likelihood knows log T to a standard error σ, T moves by at most 5.8 σ of
    these. So a few hundred predictions with errors among them decide by themselves, and a split without errors hardly
    moves T. The NLL falls on the whole way from 1 to T: that of the fit split is never raised.

    Why a prior: cross-validation on a split without errors sees none in any of its folds and asks for T = 0 as well;
    pseudo-errors in a fixed proportion weigh the more, the more confident the network is.

    Args:
        shrink: False leaves out the prior: maximum likelihood, 0.01 on a split without errors.

    Attributes:
        temperature: T; 1.0 before a fit.
        interval: (low, high) of T, where the minimised sum is 1.92 above its least value: 95 % for large N.
        report: see `FitReport`.
    """

    saved = ("shrink", "temperature", "interval")

    def __init__(self, shrink: bool = True) -> None:
        self.shrink = shrink
        self.temperature = 1.0
        self.interval = (0.01, 100.0)

    def _fit(self, p: Predictions) -> None:
        z = logits_of(p)

        def loss(u: float) -> tuple[float, float, float]:
            """The sum to minimise at log T = -u, and its first two derivatives in u."""
            beta = math.exp(u)
            value, slope, curvature = (len(z) * x for x in _nll_slopes(z, p.labels, beta))
            slope, curvature = beta * slope, beta * slope + beta**2 * curvature
            if self.shrink:
                squares = u**2 + 3 * PRIOR_SCALE**2
                value += 2 * math.log(squares / (3 * PRIOR_SCALE**2))
                slope += 4 * u / squares
                curvature += 4 * (squares - 2 * u**2) / squares**2
            return value, slope, curvature

        u = _minimum(loss)
        least = loss(u)[0]
        ends = [_rise(loss, u, least + _HALF_CHI_SQUARE, end) for end in (_MOST, -_MOST)]
        low, high = (_from_log(-end) for end in ends)
        self.temperature, self.interval = _from_log(-u), (low, high)

    def _map(self, p: Predictions) -> Predictions:
        return scale_by(p, self.temperature)

    def scaled(self, z: Tensor) -> Tensor:
        """Logits whose softmax is that of z / T, as `scale_by` makes them."""
        return z if self.temperature == 1.0 else _divided(z, self.temperature)

    def calibrated(self, z: Tensor) -> Tensor:
        return torch.softmax(self.scaled(z).double(), 1)

    def formula(self) -> str:
        low, high = self.interval
        text = f"T = {self.temperature:.3f} [{low:.2f}, {high:.2f}]: logits divided by T, which was fitted to the NLL"
        return text + (", and drawn towards 1 as far as the split leaves it open" if self.shrink else "")


def scale_by(p: Predictions, temperature: float) -> Predictions:
    """The predictions softmax(z / T); of those made from probabilities, z = log p. Keeps every predicted class.

    The row's maximum is taken off before the division: a quotient can then not overflow, and logits that differ
    never become equal by rounding to the largest.
    """
    require(0 < temperature < math.inf, f"temperature must be > 0, got {temperature}")
    if temperature == 1.0:
        return p
    return Predictions.from_logits(_divided(logits_of(p), temperature), p.labels)


def _divided(z: Tensor, temperature: float) -> Tensor:
    return (z - z.amax(1, keepdim=True)) / temperature


def _from_log(log_temperature: float) -> float:
    return min(100.0, max(0.01, math.exp(log_temperature)))


def _nll_slopes(z: Tensor, labels: Tensor, beta: float) -> tuple[float, float, float]:
    """Mean NLL of softmax(β z), its derivative in β, mean (E_p[z] - z_y), and the second one, mean
    Var_p[z]; float64.
    """
    total = torch.zeros(3, dtype=torch.float64, device=z.device)
    step = max(1, (1 << 20) // z.shape[1])
    for start in range(0, len(z), step):
        part = z[start : start + step].double()
        y = labels[start : start + step, None]
        # Differences to the row's maximum are finite where a class is ruled out, once 0 · inf is kept out.
        part = (part - part.amax(1, keepdim=True)).clamp(min=-1e30)
        log_p = torch.log_softmax(beta * part, 1)
        p = log_p.exp()
        mean = (p * part).sum(1)
        variance = (p * (part - mean[:, None]).square()).sum(1)
        total[0] -= log_p.gather(1, y).sum()
        total[1] += (mean - part.gather(1, y).squeeze(1)).sum()
        total[2] += variance.sum()
    value, slope, curvature = (total / len(z)).tolist()
    return value, slope, curvature


Loss = Callable[[float], tuple[float, float, float]]
"""u -> value and first two derivatives."""


def _minimum(loss: Loss) -> float:
    """The least point of a smooth function on [-log 100, log 100] that falls from 0 to one side only; 0 if to none.

    The NLL has one minimum along u and the prior has one, at 0; their sum may have two. So nodes between 0 and the end
    are compared first, and then come Newton steps between the neighbours of the best one.
    """
    slope = loss(0.0)[1]
    if slope == 0:
        return 0.0
    end = -math.copysign(_MOST, slope)
    nodes = [end * i / (_NODES - 1) for i in range(_NODES)]
    values = [loss(u)[0] for u in nodes]
    best = min(range(_NODES), key=lambda i: (values[i], -i))  # the last one where the NLL has underflowed to 0
    before, after = nodes[max(0, best - 1)], nodes[min(_NODES - 1, best + 1)]
    if best == _NODES - 1 and loss(end)[1] * end <= 0:
        return end
    low, high = min(before, after), max(before, after)
    return _root(lambda u: loss(u)[1:], low, high, nodes[best])


def _rise(loss: Loss, u: float, level: float, end: float) -> float:
    """Where the function, least at u, has risen to `level` on the way to `end`; `end` if it does not."""
    if loss(end)[0] <= level:
        return end
    sign = math.copysign(1.0, end)
    curvature = loss(u)[2]
    step = sign * min(abs(end - u), math.sqrt(2 * _HALF_CHI_SQUARE / curvature) if curvature > 0 else math.inf)

    def above(x: float) -> tuple[float, float]:
        value, slope, _ = loss(x)
        return sign * (value - level), sign * slope

    return _root(above, min(u, end), max(u, end), u + step)


def _root(function: Callable[[float], tuple[float, float]], low: float, high: float, x: float) -> float:
    """Where a function rises through 0 between low and high, by Newton steps from x that fall back on bisection."""
    for _ in range(100):
        value, slope = function(x)
        if value > 0:
            high = x
        else:
            low = x
        new = x - value / slope if slope > 0 else math.inf
        if not low < new < high:
            new = (low + high) / 2
        if abs(new - x) <= 1e-12:
            return new
        x = new
    return x
