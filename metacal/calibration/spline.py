"""A monotone spline of the top confidence."""

from __future__ import annotations

import torch
from torch import Tensor

from metacal.calibration.fitted import logits_of
from metacal.calibration.shrunk import (
    BIAS_SCALE,
    LEAST_LOGIT,
    WEIGHT_SCALE,
    AfterTemperature,
    minimise_nll,
    minus_log_prior,
)
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["SplineScaling"]


class SplineScaling(AfterTemperature):
    """logit c' = g(logit c): an increasing cubic spline g of the top confidence c after temperature scaling.

    The other classes keep their proportions: p_k' = p_k (1 − c') / (1 − c). The predicted class stays unless c' falls
    below the second probability. g has its knots at quantiles of logit c in the split, is linear beyond them, and has
    at each knot the slope 2 / (1/s + 1/s') of the chords s, s' beside it (Fritsch & Butland 1984), by which it rises
    wherever its values at the knots do. The chords' log slopes have priors around 0 (scale 0.1) and the value
    at the middle knot one around the identity (0.2 nats); fitted by the NLL in float64 by L-BFGS from the identity,
    which is kept unless the NLL falls.

    As in Gupta et al. 2021 (arXiv 2006.12800) a spline recalibrates the top confidence; they fit the spline to
    cumulative sums and differentiate it, which may leave [0, 1] and need not rise.

    Args:
        n_knots: at most; equal quantiles count once.
        shrink: False: no temperature scaling before, and no priors.

    Attributes:
        before: the temperature scaling.
        knots, values: of logit c and g, float64 (n_knots,) or fewer; `report`: see `FitReport`.
    """

    shown = "an increasing cubic of the logit of the top softmax(z / T)"
    saved = ("shrink", "before", "n_knots", "knots", "values")

    def __init__(self, n_knots: int = 6, shrink: bool = True) -> None:
        require(isinstance(n_knots, int) and n_knots >= 2, f"n_knots must be an integer >= 2, got {n_knots}")
        super().__init__(shrink)
        self.n_knots = n_knots
        self.knots: Tensor | None = None
        self.values: Tensor | None = None

    def _fit_after(self, p: Predictions) -> None:
        z, top, logit = _top_logit(logits_of(self.before._map(p)))
        knots = torch.quantile(logit.cpu(), torch.linspace(0, 1, self.n_knots, dtype=torch.float64)).to(z.device)
        knots = knots[torch.cat([knots.new_ones(1), knots.diff()]) > 1e-6]
        scale = torch.full_like(knots, WEIGHT_SCALE)
        scale[0] = BIAS_SCALE

        def scores(parameters: Tensor) -> Tensor:
            change = _spline(logit, knots, _values(knots, parameters)) - logit
            return z.scatter_add(1, top, change[:, None])

        def penalty(parameters: Tensor) -> Tensor:
            return minus_log_prior(parameters / scale).sum() * (self.shrink / len(p))

        parameters = minimise_nll(scores, penalty, torch.zeros_like(knots), p.labels)
        self.knots, self.values = knots, _values(knots, parameters)

    def _scores(self, z: Tensor) -> Tensor:
        assert self.knots is not None and self.values is not None
        z, top, logit = _top_logit(z)
        change = _spline(logit, self.knots.to(z.device), self.values.to(z.device)) - logit
        return z.scatter_add(1, top, change[:, None])


def _top_logit(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p up to a constant per row (N, K), the predicted class (N, 1), and logit c, at most 10^4, (N,); float64."""
    top = z.argmax(1, keepdim=True)
    z = z.double()
    z = (z - z.gather(1, top)).clamp(min=LEAST_LOGIT)
    return z, top, -z.scatter(1, top, -torch.inf).logsumexp(1)


def _values(knots: Tensor, parameters: Tensor) -> Tensor:
    """The spline at its knots: parameters are its shift at the middle one, then the log slopes of the chords."""
    rises = torch.cat([knots.new_zeros(1), (parameters[1:].exp() * knots.diff()).cumsum(0)])
    middle = len(knots) // 2
    return knots[middle] + parameters[0] + rises - rises[middle]


def _spline(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """The cubic through (knots, values), continued by lines; with one knot, of slope 1."""
    if len(knots) == 1:
        return x + (values - knots)
    widths = knots.diff()
    chords = values.diff() / widths
    inner = 2 / (1 / chords[1:] + 1 / chords[:-1])
    slopes = torch.cat([chords[:1], inner, chords[-1:]])
    i = ((x[:, None] > knots).sum(1) - 1).clamp(0, len(widths) - 1)  # the few knots, in operations that ONNX has
    inside = x.clamp(knots[0], knots[-1])
    t, h = (inside - knots[i]) / widths[i], widths[i]
    cubic = (
        (1 + 2 * t) * (1 - t).square() * values[i]
        + t * (1 - t).square() * h * slopes[i]
        + t.square() * (3 - 2 * t) * values[i + 1]
        + t.square() * (t - 1) * h * slopes[i + 1]
    )
    return cubic + (x - inside) * torch.where(x < knots[0], slopes[0], slopes[-1])
