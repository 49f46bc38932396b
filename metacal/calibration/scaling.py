"""Post-hoc calibration: maps of the scores fitted on a held-out split, never on the data that the model
trained on.

    scaled = TemperatureScaling().fit(validation).apply(test)

`fit(p)` returns the object itself with `report` (samples of the fit, NLL and ECE of that split before and
after); `apply(p)` returns new Predictions. Which maps keep the predicted class:

    TemperatureScaling    keeps it, always
    VectorScaling         may change it
    MatrixScaling         may change it
    HistogramBinning      may change it (one-versus-rest, rows normalised)
    IsotonicScaling       may change it (one-versus-rest, rows normalised)

The first three take logits; of Predictions made from probabilities they take log p, which is a logit up to
a constant per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metacal.calibration import binning
from metacal.calibration.measures import ece, nll
from metacal.errors import require
from metacal.predictions import Predictions

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FitReport",
    "HistogramBinning",
    "IsotonicScaling",
    "MatrixScaling",
    "TemperatureScaling",
    "VectorScaling",
]

_TINY = 1e-30  # a probability of exactly 0 gets the logit -69


class FitReport(NamedTuple):
    """What a fit did on its own split: N, and NLL (nats) and ECE (15 bins) before and after."""

    n: int
    nll_before: float
    nll_after: float
    ece_before: float
    ece_after: float


class _Scaling:
    """What the five maps share: a fit that reports, and a refusal to apply before it."""

    report: FitReport | None = None
    _n_classes: int | None = None

    def fit(self, p: Predictions) -> Self:
        """Fit on `p`; returns self. Refitting starts afresh."""
        self._n_classes = p.n_classes
        self._fit(p)
        after = self._map(p)
        self.report = FitReport(len(p), nll(p), nll(after), ece(p), ece(after))
        return self

    def apply(self, p: Predictions) -> Predictions:
        """The predictions with mapped scores, same labels. Raises InputError before `fit` or for another K."""
        name = type(self).__name__
        require(self._n_classes is not None, f"{name} must be fitted before it is applied")
        require(
            p.n_classes == self._n_classes, f"p must have the {self._n_classes} classes of the fit, got {p.n_classes}"
        )
        return self._map(p)

    def _fit(self, p: Predictions) -> None:
        raise NotImplementedError

    def _map(self, p: Predictions) -> Predictions:
        raise NotImplementedError


class TemperatureScaling(_Scaling):
    """softmax(z / T) with the T in [0.01, 100] that minimises the NLL of the fit split. Guo et al. 2017.

    In β = 1/T the NLL is convex with derivative mean_i (E_p[z] - z_y), so its root is bracketed and found by
    Newton steps that fall back on bisection of log β, in float64. T = 1 is kept unless the NLL falls. On a split
    without errors the NLL falls without end, and T is 0.01.

    Attributes:
        temperature: T; 1.0 before a fit.
        report: see `FitReport`.
    """

    def __init__(self) -> None:
        self.temperature = 1.0

    def _fit(self, p: Predictions) -> None:
        z = _logits(p)
        self.temperature = 1.0
        before = _nll_slopes(z, p.labels, 1.0)[0]
        beta = _decreasing_root(lambda b: _nll_slopes(z, p.labels, b)[1:], 1e-2, 1e2)
        if _nll_slopes(z, p.labels, beta)[0] < before:
            self.temperature = min(100.0, max(0.01, 1 / beta))

    def _map(self, p: Predictions) -> Predictions:
        if self.temperature == 1.0:
            return p
        return Predictions.from_logits(_logits(p) / self.temperature, p.labels)


class VectorScaling(_Scaling):
    """softmax(w ∘ z + b), w and b (K,), by the NLL plus `penalty` (mean (w - 1)² + mean b²). Guo et al.
    2017.

    The problem is convex and solved in float64 by L-BFGS from the identity, which is kept unless the NLL
    falls.

    Attributes:
        weight, bias: w and b, float64 (K,); `report`: see `FitReport`.
    """

    def __init__(self, penalty: float = 1e-4) -> None:
        require(penalty >= 0, f"penalty must be >= 0, got {penalty}")
        self.penalty = penalty
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def _fit(self, p: Predictions) -> None:
        z = _finite_logits(p)
        start = torch.stack([z.new_ones(p.n_classes), z.new_zeros(p.n_classes)])

        def scores(parameters: Tensor) -> Tensor:
            return z * parameters[0] + parameters[1]

        def penalty(parameters: Tensor) -> Tensor:
            return self.penalty * (parameters - start).square().sum() / p.n_classes

        self.weight, self.bias = _minimise_nll(scores, penalty, start, p.labels)

    def _map(self, p: Predictions) -> Predictions:
        assert self.weight is not None and self.bias is not None
        z = _finite_logits(p)
        return Predictions.from_logits(z * self.weight.to(z.device) + self.bias.to(z.device), p.labels)


class MatrixScaling(_Scaling):
    """Dirichlet calibration softmax(W log p + b), W (K, K), b (K,), regularised off the diagonal and on the
    intercept.

    Minimises NLL + `off_diagonal` Σ_{i≠j} W_ij² / (K (K - 1)) + `intercept` Σ b² / K: ODIR of Kull et al.
    2019 (arXiv 1910.12656). The problem is convex and solved in float64 by L-BFGS from the identity, which
    is kept unless the NLL falls. Needs more than K samples a class to be of use; choose the weights by NLL
    on data that the fit has not seen.

    Attributes:
        weight, bias: W and b, float64; `report`: see `FitReport`.
    """

    def __init__(self, off_diagonal: float = 1e-2, intercept: float = 1e-2) -> None:
        for name, value in (("off_diagonal", off_diagonal), ("intercept", intercept)):
            require(value >= 0, f"{name} must be >= 0, got {value}")
        self.off_diagonal, self.intercept = off_diagonal, intercept
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def _fit(self, p: Predictions) -> None:
        k = p.n_classes
        log_p = torch.log_softmax(_finite_logits(p), 1)
        eye = torch.eye(k, dtype=torch.float64, device=p.device)

        def scores(parameters: Tensor) -> Tensor:
            return log_p @ parameters[:k].t() + parameters[k]

        def penalty(parameters: Tensor) -> Tensor:
            off = (parameters[:k] * (1 - eye)).square().sum() / (k * (k - 1))
            return self.off_diagonal * off + self.intercept * parameters[k].square().sum() / k

        fitted = _minimise_nll(scores, penalty, torch.cat([eye, eye.new_zeros(1, k)]), p.labels)
        self.weight, self.bias = fitted[:k], fitted[k]

    def _map(self, p: Predictions) -> Predictions:
        assert self.weight is not None and self.bias is not None
        log_p = torch.log_softmax(_finite_logits(p), 1)
        scores = log_p @ self.weight.to(log_p.device).t() + self.bias.to(log_p.device)
        return Predictions.from_logits(scores, p.labels)


class HistogramBinning(_Scaling):
    """One versus rest: p_k is replaced by class k's share among the fit's samples in the same bin of p_k;
    rows normalised.

    Zadrozny & Elkan 2001. Equal-width bins; a bin without samples of the fit leaves p_k as it is, and so
    does a row of which nothing is left. Predictions take few distinct values: the ranking by confidence
    suffers, and NLL is inf where a label's share was 0.

    Attributes:
        shares: float64 (M, K), NaN where the fit had no sample; `report`: see `FitReport`.
    """

    def __init__(self, n_bins: int = 15) -> None:
        binning.check_bins(n_bins)
        self.n_bins = n_bins
        self.shares: Tensor | None = None

    def _fit(self, p: Predictions) -> None:
        k, m = p.n_classes, self.n_bins
        column = torch.arange(k, device=p.device)
        count = torch.zeros(m * k, dtype=torch.int64, device=p.device)
        for _, probs in p.chunks():
            cells = binning.bin_index(probs, m) * k + column
            count += torch.bincount(cells.reshape(-1), minlength=m * k)
        _, hits = binning.class_sums(p, m)
        self.shares = hits.double() / count.view(m, k).cpu()

    def _map(self, p: Predictions) -> Predictions:
        assert self.shares is not None
        shares, column = self.shares.to(p.device), torch.arange(p.n_classes, device=p.device)

        def mapped(probs: Tensor) -> Tensor:
            found = shares[binning.bin_index(probs, self.n_bins), column]
            return torch.where(found.isnan(), probs, found)

        return _one_versus_rest(p, mapped)


class IsotonicScaling(_Scaling):
    """One versus rest: an increasing step function of p_k per class, by scikit-learn's IsotonicRegression;
    rows normalised.

    Zadrozny & Elkan 2002. A row of which nothing is left keeps its probabilities. NLL is inf where a
    label's step is 0.

    Attributes:
        functions: the K fitted regressions; `report`: see `FitReport`.
    """

    def __init__(self) -> None:
        self.functions: list[Callable[[np.ndarray], np.ndarray]] = []

    def _fit(self, p: Predictions) -> None:
        from sklearn.isotonic import IsotonicRegression

        probs, labels = p.probs.double().cpu().numpy(), p.labels.cpu().numpy()
        self.functions = []
        for k in range(p.n_classes):
            regression = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
            regression.fit(probs[:, k], (labels == k).astype(np.float64))
            self.functions.append(regression.predict)

    def _map(self, p: Predictions) -> Predictions:
        def mapped(probs: Tensor) -> Tensor:
            columns = probs.cpu().numpy().T
            out = np.stack([f(column) for f, column in zip(self.functions, columns, strict=True)], 1)
            return torch.from_numpy(out).to(probs.device)

        return _one_versus_rest(p, mapped)


def _logits(p: Predictions) -> Tensor:
    return p.probs.clamp(min=_TINY).log() if p.logits is None else p.logits


def _finite_logits(p: Predictions) -> Tensor:
    """Logits in float64; that of a class ruled out is finite, since 0 · inf or a sign change would spoil
    the row.
    """
    return torch.nan_to_num(_logits(p).double(), neginf=-1e4)


def _one_versus_rest(p: Predictions, mapped: Callable[[Tensor], Tensor]) -> Predictions:
    out = torch.empty(len(p), p.n_classes, dtype=torch.float64, device=p.device)
    for rows, probs in p.chunks():
        probs = probs.double()
        new = mapped(probs)
        total = new.sum(1, keepdim=True)
        out[rows] = torch.where(total > 0, new / total, probs)
    return Predictions.from_probabilities(out, p.labels)


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


def _decreasing_root(slopes: Callable[[float], tuple[float, float]], low: float, high: float) -> float:
    """Where a convex function's slope vanishes on [low, high], or the end towards which it falls."""
    if slopes(low)[0] >= 0:
        return low
    if slopes(high)[0] <= 0:
        return high
    x = 1.0
    for _ in range(100):
        slope, curvature = slopes(x)
        if slope > 0:
            high = x
        else:
            low = x
        step = x - slope / curvature if curvature > 0 else -1.0
        new = step if low < step < high else (low * high) ** 0.5
        if abs(new - x) <= 1e-12 * x:
            return new
        x = new
    return x


def _minimise_nll(
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
    found = parameters.detach()
    with torch.no_grad():
        after = float(torch.nn.functional.cross_entropy(scores(found), labels))
        before = float(torch.nn.functional.cross_entropy(scores(start), labels))
    return found if after < before else start
