"""Ensemble temperature scaling: a mixture of the scaled, the unscaled and the uniform prediction."""

from __future__ import annotations

import torch
from torch import Tensor

from metacal.calibration.fitted import Scaling, logits_of
from metacal.calibration.shrunk import PSEUDO_COUNT
from metacal.calibration.temperature import TemperatureScaling
from metacal.predictions import Predictions

__all__ = ["EnsembleTemperatureScaling"]

_GAP = 1e-8  # nats of log-likelihood, of the whole split, that the weights may lack


class EnsembleTemperatureScaling(Scaling):
    """w_1 softmax(z / T) + w_2 softmax(z) + w_3 / K with w >= 0, Σ w = 1. Zhang et al. 2020 (arXiv 2003.07329).

    T is that of `TemperatureScaling`; then w maximises Σ_i log p_i(y_i) + 60 log w_1, as if 60 predictions more spoke
    for plain temperature scaling. The problem is convex, and is solved to 3 · 10^-8 nats. Every predicted class stays.
    The uniform part bounds the loss of a confident mistake, which a temperature alone cannot.

    Args:
        shrink: False: T by maximum likelihood, and no predictions more.

    Attributes:
        before: the temperature scaling.
        weights: w, float64 (3,); `report`: see `FitReport`.
    """

    saved = ("shrink", "before", "weights")

    def __init__(self, shrink: bool = True) -> None:
        self.shrink = shrink
        self.before = TemperatureScaling(shrink)
        self.weights: Tensor | None = None

    def _fit(self, p: Predictions) -> None:
        self.before = TemperatureScaling(self.shrink)
        self.before._fit(p)
        of_label = torch.stack([part.gather(1, p.labels[:, None]).squeeze(1) for part in self._parts(logits_of(p))], 1)
        counts = of_label.new_tensor([PSEUDO_COUNT if self.shrink else 0, 0, 0])
        self.weights = _mixture_weights(of_label.cpu(), counts.cpu())

    def _map(self, p: Predictions) -> Predictions:
        return Predictions.from_probabilities(self.calibrated(logits_of(p)), p.labels)

    def calibrated(self, z: Tensor) -> Tensor:
        assert self.weights is not None
        scaled, plain, uniform = (w * part for w, part in zip(self.weights.to(z.device), self._parts(z)))
        return scaled + plain + uniform

    def formula(self) -> str:
        assert self.weights is not None
        scaled, plain, uniform = self.weights.tolist()
        t = self.before.temperature
        return f"{scaled:.3f} softmax(z / {t:.3f}) + {plain:.3f} softmax(z) + {uniform:.3f} / K"

    def _parts(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = z.double()
        z = z - z.amax(1, keepdim=True)
        plain = torch.softmax(z, 1)
        scaled = torch.softmax(z / self.before.temperature, 1)
        return scaled, plain, torch.full_like(plain, 1 / z.shape[1])


def _mixture_weights(likelihoods: Tensor, counts: Tensor) -> Tensor:
    """argmax over the simplex of Σ_i log (A w)_i + Σ_j c_j log w_j: A = `likelihoods` (N, J), c = `counts` (J,).

    Newton steps along the path of Σ_j (c_j + μ) log w_j, μ from 1 downwards: its end at μ lacks at most J μ of the
    maximum.
    """
    n_parts = likelihoods.shape[1]
    w = likelihoods.new_full((n_parts,), 1 / n_parts)
    mu = 1.0
    while mu >= _GAP:
        weight = counts + mu

        def value(w: Tensor, weight: Tensor = weight) -> Tensor:
            return (likelihoods @ w).log().sum() + (weight * w.log()).sum()

        for _ in range(50):
            ratios = likelihoods / (likelihoods @ w)[:, None]
            slope = ratios.sum(0) + weight / w
            hessian = ratios.t() @ ratios + (weight / w.square()).diag()
            # The step along which the quadratic model rises most, among those that keep Σ w = 1.
            towards, across = torch.linalg.solve(hessian, torch.stack([slope, torch.ones_like(w)], 1)).unbind(1)
            step = towards - across * (towards.sum() / across.sum())
            rise = float(slope @ step)
            if rise <= 1e-3 * mu:
                break
            size = min(1.0, 0.99 / max(1e-300, float((-step / w).max())))
            while value(w + size * step) < value(w) + 1e-4 * size * rise and size > 1e-12:
                size /= 2
            w = w + size * step
        mu /= 10
    return w / w.sum()
