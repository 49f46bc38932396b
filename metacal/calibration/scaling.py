"""Post-hoc calibration: maps of the scores fitted on a held-out split, never on the data that the model
trained on.

    scaled = TemperatureScaling().fit(validation).apply(test)

`fit(p)` returns the object itself with `report` (samples of the fit and how many of them are wrong, NLL and ECE of
that split before and after), and warns where fewer than 10 are wrong; `apply(p)` returns new Predictions. Which maps
keep the predicted class:

    TemperatureScaling    keeps it, always
    VectorScaling         may change it
    MatrixScaling         may change it
    HistogramBinning      may change it (one-versus-rest, rows normalised)
    IsotonicScaling       may change it (one-versus-rest, rows normalised)

The first three take logits; of Predictions made from probabilities they take log p, which is a logit up to
a constant per row.

A split may be too small for a map. So the last four begin with temperature scaling, itself shrunk (see there), and
depart from it by as much as the split gives evidence for: parameters have a prior, and the share of a bin or level
counts the temperature-scaled probability as 60 predictions more. As N grows all that vanishes. `shrink=False` is the
textbook's map, without temperature scaling before it and without a prior.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from metacal.calibration import binning
from metacal.calibration.fitted import FitReport, logits_of
from metacal.calibration.shrunk import (
    BIAS_SCALE,
    LEAST_LOGIT,
    OFF_DIAGONAL_SCALE,
    PSEUDO_COUNT,
    WEIGHT_SCALE,
    AfterTemperature,
    log_probabilities,
    minimise_nll,
    minus_log_prior,
)
from metacal.calibration.temperature import TemperatureScaling, scale_by
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = [
    "FitReport",
    "HistogramBinning",
    "IsotonicScaling",
    "MatrixScaling",
    "TemperatureScaling",
    "VectorScaling",
    "scale_by",
]


class VectorScaling(AfterTemperature):
    """softmax(w ∘ z / T + b), w and b (K,), by the NLL plus `penalty` (mean (w - 1)² + mean b²). Guo et al.
    2017.

    T is that of `TemperatureScaling`, and priors draw w to 1 (scale 0.1) and b to 0 (0.2 nats). Solved in float64 by
    L-BFGS from w = 1, b = 0, which are kept unless the NLL falls; convex but for the priors.

    Args:
        penalty: as above, for any N.
        shrink: False: T = 1 and no priors.

    Attributes:
        before: the temperature scaling.
        weight, bias: w and b, float64 (K,); `report`: see `FitReport`.
    """

    shown = "softmax(w ∘ z / T + b)"
    saved = ("shrink", "before", "weight", "bias")

    def __init__(self, penalty: float = 1e-4, shrink: bool = True) -> None:
        require(penalty >= 0, f"penalty must be >= 0, got {penalty}")
        super().__init__(shrink)
        self.penalty = penalty
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def _fit_after(self, p: Predictions) -> None:
        z = self._scaled(logits_of(p))
        start = torch.stack([z.new_ones(p.n_classes), z.new_zeros(p.n_classes)])

        def scores(parameters: Tensor) -> Tensor:
            return z * parameters[0] + parameters[1]

        def penalty(parameters: Tensor) -> Tensor:
            change = parameters - start
            total = self.penalty * change.square().sum() / p.n_classes
            if self.shrink:
                prior = minus_log_prior(change[0] / WEIGHT_SCALE) + minus_log_prior(change[1] / BIAS_SCALE)
                total = total + prior.sum() / len(p)
            return total

        self.weight, self.bias = minimise_nll(scores, penalty, start, p.labels)

    def _map(self, p: Predictions) -> Predictions:
        return Predictions.from_logits(self._scores(logits_of(p)), p.labels)

    def calibrated(self, z: Tensor) -> Tensor:
        return torch.softmax(self._scores(z), 1)

    def _scores(self, z: Tensor) -> Tensor:
        """From logits before the temperature."""
        assert self.weight is not None and self.bias is not None
        return self._scaled(z) * self.weight.to(z.device) + self.bias.to(z.device)

    def _scaled(self, z: Tensor) -> Tensor:
        """z / T in float64; a class that is ruled out at 10^4 below the row's largest, and none beyond ±10^30.

        Not `scale_by`, which shifts rows: w ∘ z depends on what is added to a row.
        """
        scaled = z.double().clamp(-1e30, 1e30) / self.before.temperature
        return torch.where(z == -torch.inf, scaled.amax(1, keepdim=True) + LEAST_LOGIT, scaled)


class MatrixScaling(AfterTemperature):
    """Dirichlet calibration softmax(W log p + b), p after temperature scaling, W (K, K), b (K,), regularised off the
    diagonal and on the intercept.

    Minimises NLL + `off_diagonal` Σ_{i≠j} W_ij² / (K (K - 1)) + `intercept` Σ b² / K: ODIR of Kull et al.
    2019 (arXiv 1910.12656), under priors that draw W to the identity (scale 0.1, off the diagonal 0.05 / √(K - 1)) and
    b to 0 (0.2 nats). Solved in float64 by L-BFGS from the identity, which is kept unless the NLL falls; convex but
    for the priors. Needs more than K samples a class to be of use; choose the weights by NLL on data that the fit has
    not seen.

    Args:
        off_diagonal, intercept: as above, for any N.
        shrink: False: no temperature scaling before, and no priors.

    Attributes:
        before: the temperature scaling.
        weight, bias: W and b, float64; `report`: see `FitReport`.
    """

    shown = "softmax(W log p + b), p = softmax(z / T)"
    saved = ("shrink", "before", "weight", "bias")

    def __init__(self, off_diagonal: float = 1e-2, intercept: float = 1e-2, shrink: bool = True) -> None:
        for name, value in (("off_diagonal", off_diagonal), ("intercept", intercept)):
            require(value >= 0, f"{name} must be >= 0, got {value}")
        super().__init__(shrink)
        self.off_diagonal, self.intercept = off_diagonal, intercept
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def _fit_after(self, p: Predictions) -> None:
        k = p.n_classes
        log_p = log_probabilities(logits_of(self.before._map(p)))
        eye = torch.eye(k, dtype=torch.float64, device=p.device)
        start = torch.cat([eye, eye.new_zeros(1, k)])
        scale = torch.full_like(start, OFF_DIAGONAL_SCALE / (k - 1) ** 0.5)
        scale[:k].fill_diagonal_(WEIGHT_SCALE)
        scale[k] = BIAS_SCALE

        def scores(parameters: Tensor) -> Tensor:
            return log_p @ parameters[:k].t() + parameters[k]

        def penalty(parameters: Tensor) -> Tensor:
            off = (parameters[:k] * (1 - eye)).square().sum() / (k * (k - 1))
            total = self.off_diagonal * off + self.intercept * parameters[k].square().sum() / k
            if self.shrink:
                total = total + minus_log_prior((parameters - start) / scale).sum() / len(p)
            return total

        fitted = minimise_nll(scores, penalty, start, p.labels)
        self.weight, self.bias = fitted[:k], fitted[k]

    def _scores(self, z: Tensor) -> Tensor:
        assert self.weight is not None and self.bias is not None
        return log_probabilities(z) @ self.weight.to(z.device).t() + self.bias.to(z.device)


class HistogramBinning(AfterTemperature):
    """One versus rest: p_k is replaced by class k's share among the fit's samples in the same bin of p_k;
    rows normalised.

    Zadrozny & Elkan 2001. Equal-width bins of temperature-scaled probabilities. Of a bin with n samples of the fit,
    h of them of the class, the share is (h + 60 p_k) / (n + 60), so that a bin without samples leaves p_k as it is,
    and no share is 0 that p_k is not. A row of which nothing is left keeps its probabilities.

    Args:
        n_bins: M.
        shrink: False: h / n of unscaled probabilities. Predictions then take few distinct values: the ranking by
            confidence suffers, and NLL is inf where a label's share is 0.

    Attributes:
        before: the temperature scaling.
        shares: h / n, float64 (M, K), NaN where the fit had no sample; `counts`: n, float64 (M, K).
        report: see `FitReport`.
    """

    shown = "class shares in bins of softmax(z / T)"
    saved = ("shrink", "before", "n_bins", "shares", "counts")

    def __init__(self, n_bins: int = 15, shrink: bool = True) -> None:
        binning.check_bins(n_bins)
        super().__init__(shrink)
        self.n_bins = n_bins
        self.shares: Tensor | None = None
        self.counts: Tensor | None = None

    def _fit_after(self, p: Predictions) -> None:
        p, k, m = self.before._map(p), p.n_classes, self.n_bins
        column = torch.arange(k, device=p.device)
        count = torch.zeros(m * k, dtype=torch.int64, device=p.device)
        for _, probs in p.chunks():
            cells = binning.bin_index(probs, m) * k + column
            count += torch.bincount(cells.reshape(-1), minlength=m * k)
        _, hits = binning.class_sums(p, m)
        self.counts = count.view(m, k).double().cpu()
        self.shares = hits.double() / self.counts

    def _map(self, p: Predictions) -> Predictions:
        return _one_versus_rest(
            self.before._map(p), lambda probs: self._of(probs, binning.bin_index(probs, self.n_bins))
        )

    def calibrated(self, z: Tensor) -> Tensor:
        probs = self.before.calibrated(z)
        inner = binning.bin_edges(self.n_bins, z.device)[1:-1]
        return _normalised(self._of(probs, (probs[:, :, None] > inner).sum(2)), probs)

    def _of(self, probs: Tensor, index: Tensor) -> Tensor:
        """What becomes of probabilities that lie in the bins of `index` (N, K)."""
        assert self.shares is not None and self.counts is not None
        cell = index, torch.arange(probs.shape[1], device=probs.device)
        shares, counts = self.shares.to(probs.device)[cell], self.counts.to(probs.device)[cell]
        share = torch.where(shares.isnan(), probs, shares)
        return _towards(probs, share, counts) if self.shrink else share


class IsotonicScaling(AfterTemperature):
    """One versus rest: an increasing step function of p_k per class, by scikit-learn's IsotonicRegression;
    rows normalised.

    Zadrozny & Elkan 2002. With L distinct levels of the step function f fitted to N temperature-scaled predictions,
    n = N / L to a level on average, p_k becomes (n f(p_k) + 60 p_k) / (n + 60), which increases as f does. A row of
    which nothing is left keeps its probabilities.

    Args:
        shrink: False: f(p_k) of unscaled probabilities. NLL is then inf where a label's step is 0.

    Attributes:
        before: the temperature scaling.
        knots: the ends of all steps, p and f(p), float64 (2, S), those of class 0 first; f is linear between them.
        sizes: how many of them are of each class, int64 (K,).
        counts: n of each, float64 (K,); `report`: see `FitReport`.
    """

    shown = "an increasing step function of each class's softmax(z / T)"
    saved = ("shrink", "before", "knots", "sizes", "counts")

    def __init__(self, shrink: bool = True) -> None:
        super().__init__(shrink)
        self.knots: Tensor | None = None
        self.sizes: Tensor | None = None
        self.counts: Tensor | None = None

    def _fit_after(self, p: Predictions) -> None:
        from sklearn.isotonic import IsotonicRegression

        p = self.before._map(p)
        probs, labels = p.probs.double().cpu().numpy(), p.labels.cpu().numpy()
        knots, counts = [], []
        for k in range(p.n_classes):
            regression = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
            levels = regression.fit_transform(probs[:, k], (labels == k).astype(np.float64))
            knots.append(np.stack([regression.X_thresholds_, regression.y_thresholds_]))
            counts.append(len(p) / len(np.unique(levels)))
        self.knots = torch.from_numpy(np.concatenate(knots, 1))
        self.sizes = torch.tensor([of_class.shape[1] for of_class in knots])
        self.counts = torch.tensor(counts, dtype=torch.float64)

    def _map(self, p: Predictions) -> Predictions:
        assert self.counts is not None and self.knots is not None and self.sizes is not None
        counts = self.counts.to(p.device)
        functions = [of_class.numpy() for of_class in self.knots.cpu().split(self.sizes.tolist(), 1)]

        def mapped(probs: Tensor) -> Tensor:
            columns = probs.cpu().numpy().T
            steps = np.stack([np.interp(column, x, y) for (x, y), column in zip(functions, columns, strict=True)], 1)
            share = torch.from_numpy(steps).to(probs.device)
            return _towards(probs, share, counts) if self.shrink else share

        return _one_versus_rest(self.before._map(p), mapped)

    def calibrated(self, z: Tensor) -> Tensor:
        """By a comparison with every knot, N K S of them, since exporters know no search in a table."""
        assert self.counts is not None and self.knots is not None and self.sizes is not None
        probs = self.before.calibrated(z)
        columns = []
        for of_class, p in zip(self.knots.split(self.sizes.tolist(), 1), probs.unbind(1)):
            x, y = of_class.to(z.device)
            inside = torch.minimum(torch.maximum(p, x[0]), x[-1])
            i = ((inside[:, None] >= x).sum(1) - 1).clamp(0, max(0, len(x) - 2))
            after = (i + 1).clamp(max=len(x) - 1)
            width = (x[after] - x[i]).clamp(min=torch.finfo(x.dtype).tiny)
            columns.append(y[i] + (y[after] - y[i]) * (inside - x[i]) / width)
        share = torch.stack(columns, 1)
        mapped = _towards(probs, share, self.counts.to(z.device)) if self.shrink else share
        return _normalised(mapped, probs)


def _towards(probs: Tensor, share: Tensor, count: Tensor) -> Tensor:
    """A share of `count` predictions and the probability, as a share of 60 more, together."""
    return (count * share + PSEUDO_COUNT * probs) / (count + PSEUDO_COUNT)


def _one_versus_rest(p: Predictions, mapped: Callable[[Tensor], Tensor]) -> Predictions:
    out = torch.empty(len(p), p.n_classes, dtype=torch.float64, device=p.device)
    for rows, probs in p.chunks():
        probs = probs.double()
        out[rows] = _normalised(mapped(probs), probs)
    return Predictions.from_probabilities(out, p.labels)


def _normalised(new: Tensor, probs: Tensor) -> Tensor:
    """Rows of `new` that sum to 1; of a row of which nothing is left the one of `probs`."""
    total = new.sum(1, keepdim=True)
    return torch.where(total > 0, new / total, probs)
