"""Maps that start from temperature scaling and depart from it under priors, and how they are fitted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metacal.calibration.fitted import Scaling, logits_of
from metacal.calibration.temperature import TemperatureScaling
from metacal.predictions import Predictions

__all__ = [
    "BIAS_SCALE",
    "LEAST_LOGIT",
    "OFF_DIAGONAL_SCALE",
    "PSEUDO_COUNT",
    "WEIGHT_SCALE",
    "AfterTemperature",
    "log_probabilities",
    "minimise_nll",
    "minus_log_prior",
]

# The scales of the priors, which are Student's with 3 degrees of freedom as that of log T: of a weight's departure from
# the identity (on scores already divided by T), of one off the diagonal times √(K - 1), and of a bias in nats.
WEIGHT_SCALE, OFF_DIAGONAL_SCALE, BIAS_SCALE = 0.1, 0.05, 0.2
PSEUDO_COUNT = 60  # predictions that the temperature-scaled probability counts for, in every bin, level or mixture
LEAST_LOGIT = -1e4  # below the row's largest, of a class that is ruled out: 0 · inf would spoil the row


class AfterTemperature(Scaling):
    """A map that starts from temperature scaling, `before`, or from the predictions themselves without `shrink`."""

    def __init__(self, shrink: bool) -> None:
        self.shrink = shrink
        self.before = TemperatureScaling()

    def _fit(self, p: Predictions) -> None:
        self.before = TemperatureScaling()
        if self.shrink:
            self.before._fit(p)
        self._fit_after(p)

    def formula(self) -> str:
        return f"{super().formula()}, T = {self.before.temperature:.3f}"

    def _fit_after(self, p: Predictions) -> None:
        """Fit what comes after `before`; `p` is as it was given."""
        raise NotImplementedError

    def _map(self, p: Predictions) -> Predictions:
        return Predictions.from_logits(self._scores(logits_of(self.before._map(p))), p.labels)

    def calibrated(self, z: Tensor) -> Tensor:
        return torch.softmax(self._scores(self.before.scaled(z)), 1)

    def _scores(self, z: Tensor) -> Tensor:
        """Logits of the calibrated probabilities, float64 (N, K), from those after `before`."""
        raise NotImplementedError


def minus_log_prior(x: Tensor) -> Tensor:
    """Of Student's t with 3 degrees of freedom, 0 at 0."""
    return 2 * torch.log1p(x.square() / 3)


def log_probabilities(z: Tensor) -> Tensor:
    """log softmax(z) in float64, at least -10^4."""
    z = z.double()
    return torch.log_softmax(z - z.amax(1, keepdim=True), 1).clamp(min=LEAST_LOGIT)


def minimise_nll(
    scores: Callable[[Tensor], Tensor],
    penalty: Callable[[Tensor], Tensor],
    start: Tensor,
    labels: Tensor,
) -> Tensor:
    """argmin of mean NLL + penalty over the parameters, by L-BFGS; `start` unless the NLL falls."""
    parameters = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [parameters],
        max_iter=200,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(scores(parameters), labels) + penalty(parameters)
        loss.backward()
        return loss.item()

    with torch.enable_grad():
        optimizer.step(closure)
    fitted = parameters.detach()
    with torch.no_grad():
        after = float(torch.nn.functional.cross_entropy(scores(fitted), labels))
        before = float(torch.nn.functional.cross_entropy(scores(start), labels))
    return fitted if after < before else start
