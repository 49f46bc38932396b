"""The measures that are a mean over the samples: accuracy and error, mean confidence, and the proper scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metacal.calibration.arguments import takes_arrays
from metacal.calibration.binned import bin_sums
from metacal.calibration.measure import Counted, Measure, Streamed
from metacal.predictions import Predictions

__all__ = ["SCORES", "accuracy", "brier", "confidence", "error", "nll"]


@takes_arrays
def accuracy(p: Predictions) -> float:
    """The share of correct predictions, mean a."""
    return int(p.correct.sum()) / len(p)


@takes_arrays
def error(p: Predictions) -> float:
    """The share of wrong predictions, 1 - mean a."""
    return (len(p) - int(p.correct.sum())) / len(p)


@takes_arrays
def confidence(p: Predictions) -> float:
    """The mean confidence, mean c. Above the accuracy it says that the model is overconfident on the whole."""
    return float(p.confidence.mean())


@takes_arrays
def nll(p: Predictions) -> float:
    """Negative log-likelihood, mean -log p_y in nats, by log-softmax if there are logits; inf where some
    p_y is 0.
    """
    return float(-p.log_likelihood.mean()) + 0.0  # + 0.0: a perfect one scores 0, not -0


@takes_arrays
def brier(p: Predictions) -> float:
    """Brier score, mean Σ_k (p_k - 1[k = y])², in [0, 2]."""
    return float(_brier_terms(p).mean())


def _brier_terms(p: Predictions) -> Tensor:
    """Σ_k (p_k - 1[k = y])² of each sample, float64 (N,)."""
    out = torch.empty_like(p.confidence)
    for rows, probs in p.chunks():
        # p_y is taken out of the sum of squares and put back as (1 - p_y)²; each part is small when p is
        # near one-hot.
        others = probs.double().scatter(1, p.labels[rows, None], 0.0)
        p_y = probs.gather(1, p.labels[rows, None]).squeeze(1).double()
        out[rows] = others.square_().sum(1) + (1 - p_y).square_()
    return out


def _record(
    function: Callable[..., float], title: str, digits: int, terms: Callable[[Predictions], Tensor], **keys: Any
) -> Measure:
    """Of a measure that is the mean of `terms`, (N,) of N predictions."""

    def weighted(p: Predictions) -> Counted:
        v = terms(p).double()
        infinite = v.isinf()
        if not bool(infinite.any()):
            return lambda w: v @ w / len(p)
        v, lost = v.masked_fill(infinite, 0.0), infinite.double()
        # A sample at infinity counts where it was drawn; 0 · inf would spoil the other resamples.
        return lambda w: torch.where(lost @ w > 0, torch.inf, v @ w / len(p))

    return Measure(function, title, digits, weighted=weighted, **keys)


def _mean_of(name: str, terms: Callable[[Predictions], Tensor]) -> Streamed:
    """The mean of terms (N,), whose sum is kept as `name`."""
    return Streamed(
        (bin_sums, lambda p, n_bins: {name: terms(p).sum()}), lambda s: float(s[name]) / int(s["count"].sum()) + 0.0
    )


SCORES: dict[str, Measure] = {
    "accuracy": _record(
        accuracy,
        "Accuracy",
        2,
        lambda p: p.correct,
        percent=True,
        best="max",
        streamed=Streamed((bin_sums,), lambda s: int(s["correct"].sum()) / int(s["count"].sum())),
        classes_only=True,
        watched=True,
        compared=True,
    ),
    "error": _record(
        error,
        "Error",
        2,
        lambda p: ~p.correct,
        percent=True,
        best="min",
        streamed=Streamed((bin_sums,), lambda s: int((s["count"] - s["correct"]).sum()) / int(s["count"].sum())),
        classes_only=True,
    ),
    "nll": _record(
        nll,
        "NLL",
        4,
        lambda p: -p.log_likelihood,
        best="min",
        streamed=_mean_of("nll_sum", lambda p: -p.log_likelihood),
        watched=True,
        compared=True,
    ),
    "brier": _record(
        brier,
        "Brier",
        4,
        _brier_terms,
        best="min",
        streamed=_mean_of("brier_sum", _brier_terms),
        watched=True,
        compared=True,
    ),
    "confidence": _record(
        confidence,
        "Confidence",
        2,
        lambda p: p.confidence,
        percent=True,
        streamed=Streamed((bin_sums,), lambda s: float(s["confidence_sum"].sum()) / int(s["count"].sum())),
        watched=True,
    ),
}
