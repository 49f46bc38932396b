"""Do two methods differ? Tests for any measure, paired over seeds and over test samples.

    counts = draw_counts(len(p), n=128, seed=0)                  # resamples of the test samples, one set for all runs
    a = sample(["ece"], runs_of_a, counts)["ece"]                # Sampled: of each run, and of each run and resample
    b = sample(["ece"], runs_of_b, counts)["ece"]
    difference(a, b, paired=True)                                # Difference(difference=…, low, high, p_value)

What is tested. A method's score is the expected value of the measure over training seeds and over test sets of this
size; the null hypothesis is that two methods score alike. Two things blur the difference of the means over S seeds:

* training: every seed gives another model. With d_s the difference of the two methods at seed s, this adds
  s²/S, s² = Var_s(d_s), known with S - 1 degrees of freedom. The noise of the test samples that is each model's own is
  in it as well, since it is different at every seed;
* the test samples, which all runs share: what they add to every d_s alike does not average out over seeds and cannot be
  seen in s². It is c = the mean over s ≠ t of Cov*(d_s*, d_t*), from resamples of the samples that are the same for
  all runs, and so known with (nearly) n - 1 degrees of freedom.

The variance of the mean difference is V = s²/S + c: neither part is counted twice. As the first is badly known when
seeds are few, d/√V is held against the mean of the two t quantiles, weighted by their shares of V (Cochran & Cox 1950),
whose error rate stays near or below the nominal one whatever the shares: with 3 seeds that matter it is a t
test with 2 degrees of freedom, and where seeds do not matter a bootstrap test of the test samples.

With many methods of the same seeds, two degrees of freedom a comparison throw away what the other methods tell about
the noise. `moderated` puts each method's variance between its own and that of all: the residuals of the layout
y_gs = method + seed + noise give s_g², and s̃_g² = (d₀ s₀² + (S - 1) s_g²)/(d₀ + S - 1) with d₀ + S - 1 degrees of
freedom, where d₀ says how alike the methods' variances are (Smyth 2004). Then s²/S becomes (s̃_a² + s̃_b²)/S.

The resamples go through the measure itself, so that nothing here asks for a mean over samples: ECE and its kin serve as
well. Where a calibration error is near 0 its kink makes the bootstrap's variance too large, by a factor of 1 to 2, and
the test cautious. Its upward bias, which depends on the spread of the confidences, is part of the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metacal.calibration import MEASURES
from metacal.calibration.measure import by_blocks, counted_together
from metacal.errors import require, require_choice
from metacal.predictions import Predictions

__all__ = [
    "MANY",
    "Difference",
    "Moderated",
    "Sampled",
    "difference",
    "draw_counts",
    "holm",
    "moderated",
    "sample",
    "sample_one",
    "stack",
]

MANY = 8
"""From so many methods with the same seeds on, `metacal compare` uses `moderated` variances."""

Array = NDArray[np.float64]


class Sampled(NamedTuple):
    """One measure of the S runs of a method.

    Attributes:
        values: of each run on all test samples, (S,).
        resampled: of each run on each of R resamples of the test samples, (S, R); the resamples are the
            same for all runs, of this method and of others.
    """

    values: Array
    resampled: Array

    @property
    def mean(self) -> float:
        return float(self.values.mean())


class Difference(NamedTuple):
    """mean(first) - mean(second), its interval, and the two-sided p-value of "no difference".

    Attributes:
        seed_share: the share of the variance that comes from seeds, in [0, 1]; NaN where one of the two has a single
            run, so that seeds could not be taken into account and the statement is about these runs only.
    """

    difference: float
    low: float
    high: float
    p_value: float
    seed_share: float


class Moderated(NamedTuple):
    """What seeds do to the runs of G methods, each method's variance helped by all others'.

    Attributes:
        variances: s̃_g² of a run, the effect that a seed has on all methods taken out, (G,).
        df: its degrees of freedom, min(d₀ + S - 1, (G - 1)(S - 1)).
        prior_df: d₀: 0, every method for itself; infinite, one variance for all.
    """

    variances: Array
    df: float
    prior_df: float


def draw_counts(n_samples: int, n: int = 128, seed: int = 0) -> Tensor:
    """How often each of n resamples, drawn with replacement, holds each of N samples: uint8 (N, n)."""
    require(n_samples >= 1, f"n_samples must be >= 1, got {n_samples}")
    require(n >= 2, f"n must be >= 2, got {n}")
    generator = torch.Generator().manual_seed(seed)
    counts = torch.empty(n_samples, n, dtype=torch.uint8)
    for i in range(n):
        drawn = torch.randint(n_samples, (n_samples,), generator=generator)
        # More than 255 copies of one sample have a probability below 10^-500.
        counts[:, i] = torch.bincount(drawn, minlength=n_samples)
    return counts


def sample(
    measures: Sequence[str] | Mapping[str, Mapping[str, Any]], runs: Sequence[Predictions], counts: Tensor
) -> dict[str, Sampled]:
    """Each measure of the runs of one method, on all samples and on the resamples `counts` (N, R) of `draw_counts`.

    `measures` are names in `metacal.calibration.MEASURES`, or name -> options such as {"ece": {"n_bins": 10}}.
    """
    require(len(runs) > 0, "runs must hold the predictions of at least one run, got none")
    each = [sample_one(measures, p, counts) for p in runs]
    return {name: stack([one[name] for one in each]) for name in each[0]}


def sample_one(
    measures: Sequence[str] | Mapping[str, Mapping[str, Any]], p: Predictions, counts: Tensor
) -> dict[str, Sampled]:
    """`sample` of a single run: values (1,), resampled (1, R)."""
    options = dict(measures) if isinstance(measures, Mapping) else {name: {} for name in measures}
    for name in options:
        require_choice("measures", name, MEASURES)
    require(len(p) == len(counts), f"every run must have the {len(counts)} samples of the resamples, got {len(p)}")
    p = p.to("cpu")
    step = max(1, (1 << 19) // len(p))  # resamples at a time: a few megabytes of float64
    records = [MEASURES[name] for name in options]
    form = counted_together(list(zip(records, options.values(), strict=True)), p)
    parts = by_blocks(records, lambda part: form(part.double()), counts.split(step, dim=1))
    resampled = torch.cat(parts, 1).numpy()
    return {
        name: Sampled(np.array([MEASURES[name](p, **keys)]), of_one[None])
        for (name, keys), of_one in zip(options.items(), resampled, strict=True)
    }


def stack(parts: Sequence[Sampled]) -> Sampled:
    """The runs of several `Sampled` as one."""
    return Sampled(np.concatenate([p.values for p in parts]), np.concatenate([p.resampled for p in parts]))


def moderated(values: Array) -> Moderated:
    """The variances over seeds of G methods with S runs each, of the same seeds; `values` is (G, S).

    With r the residuals of the two-way layout, s_g² = G/(G - 1) Σ_s r_gs²/(S - 1). That their logarithms scatter more
    than χ² of S - 1 degrees of freedom does, ψ'((S - 1)/2), says that methods differ: ψ'(d₀/2) is the excess
    (Smyth 2004, section 6.2). The excess is known badly, and too little of it makes bold tests; so its standard error
    is added. Among equal variances d₀ is then near 4 for 31 methods with three seeds and grows with G.

    Raises:
        InputError: fewer than 3 methods or 2 seeds, or values that are not finite.
    """
    from scipy.special import digamma, polygamma

    values = np.asarray(values, dtype=float)
    require(values.ndim == 2, f"values must be (G, S), got {values.ndim} dimensions")
    g, s = values.shape
    require(g >= 3 and s >= 2, f"values must have at least 3 methods and 2 seeds, got {g} and {s}")
    require(bool(np.isfinite(values).all()), "values must be finite")
    residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    d = s - 1
    variances = (residuals**2).sum(1) / d * g / (g - 1)
    if variances.max() <= 0:
        return Moderated(variances, float(d * (g - 1)), math.inf)
    # Methods that seeds do not move have no logarithm: a floor far below the rest stands in.
    logs = np.log(np.maximum(variances, 1e-5 * (np.median(variances) or variances.max())))
    chance, fourth = float(polygamma(1, d / 2)), float(polygamma(3, d / 2))
    error = math.sqrt(2 * chance**2 / (g - 1) + fourth / g)
    prior = 2 * _inverse_trigamma(max(0.0, float(logs.var(ddof=1)) - chance) + error)
    centre = logs.mean() - digamma(d / 2) + math.log(d / 2) + digamma(prior / 2) - math.log(prior / 2)
    pooled = (prior * math.exp(centre) + d * variances) / (prior + d)
    return Moderated(pooled, min(prior + d, float(d * (g - 1))), prior)


def difference(
    first: Sampled,
    second: Sampled,
    paired: bool = True,
    level: float = 0.95,
    seed_variance: tuple[float, float, float] | None = None,
) -> Difference:
    """mean(first) - mean(second) with its interval and p-value; see the head of this module.

    Test samples are always paired: `first` and `second` come from the same resamples.

    Args:
        paired: run s of the one and run s of the other have the same seed. False: seeds are independent, and each
            method's variance over its seeds adds up with degrees of freedom of its own (as in Welch's test).
        level: of the interval.
        seed_variance: (of first, of second, degrees of freedom) from `moderated`, in place of that of these runs.

    Raises:
        InputError: other resamples, or `paired` with unequal numbers of runs.
    """
    require(0 < level < 1, f"level must lie in (0, 1), got {level}")
    r = first.resampled.shape[1]
    require(
        r == second.resampled.shape[1], f"second must have the {r} resamples of first, got {second.resampled.shape[1]}"
    )
    s1, s2 = len(first.values), len(second.values)
    require(not paired or s1 == s2, f"paired runs must be equally many, got {s1} and {s2}")
    d = first.mean - second.mean
    if not (np.isfinite(first.resampled).all() and np.isfinite(second.resampled).all() and math.isfinite(d)):
        return Difference(d, math.nan, math.nan, math.nan, math.nan)
    if s1 == 1 or s2 == 1:
        # Variation over seeds cannot be seen: what is left is that of the test samples, for these very runs.
        change = first.resampled.mean(0) - second.resampled.mean(0)
        return _test(d, [(float(change.var(ddof=1)), r - 1)], 0, level)
    if paired:
        change = first.resampled - second.resampled
        seeds = [(float((first.values - second.values).var(ddof=1)) / s1, float(s1 - 1))]
        shared = _mean_covariance(change)
    else:
        seeds = [(float(g.values.var(ddof=1)) / len(g.values), len(g.values) - 1.0) for g in (first, second)]
        a, b = (g.resampled - g.resampled.mean(1, keepdims=True) for g in (first, second))
        across = float((a.mean(0) * b.mean(0)).sum()) / (r - 1)
        shared = _mean_covariance(a) + _mean_covariance(b) - 2 * across
    if seed_variance is not None:
        one, other, df = seed_variance
        seeds = [(one / s1 + other / s2, df)]
    return _test(d, [*seeds, (max(0.0, shared), r - 1)], len(seeds), level)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment of m p-values: the j-th smallest times m - j + 1, made monotone, at most 1; NaN stays NaN.

    Rejecting where the adjusted value is below α keeps the chance of any false rejection below α. Holm 1979.
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, highest = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[i] = highest
    return adjusted


def _inverse_trigamma(y: float) -> float:
    """x > 0 with ψ'(x) = y > 0, by bisection of its logarithm; ψ' falls from infinity to 0."""
    from scipy.special import polygamma

    low, high = math.log(1e-3), math.log(1e6)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if polygamma(1, math.exp(middle)) > y else (low, middle)
    return math.exp(high)


def _mean_covariance(x: Array) -> float:
    """The mean over s ≠ t of the covariance of rows s and t of x (S, R)."""
    s, r = x.shape
    centred = x - x.mean(1, keepdims=True)
    everything, squares = float((centred.sum(0) ** 2).sum()), float((centred**2).sum())
    return (everything - squares) / (s * (s - 1) * (r - 1))


def _test(d: float, parts: Sequence[tuple[float, float]], n_seed_parts: int, level: float) -> Difference:
    """The test of d with the variance Σ v of `parts` (v, degrees of freedom), the first of which come from seeds."""
    variance = sum(v for v, _ in parts)
    seed_share = math.nan if not n_seed_parts else 0.0
    if variance == 0:  # neither seeds nor samples make a difference
        return Difference(d, d, d, 1.0 if d == 0 else 0.0, seed_share)
    if n_seed_parts:
        seed_share = sum(v for v, _ in parts[:n_seed_parts]) / variance
    root = math.sqrt(variance)
    half = root * _quantile(parts, (1 - level) / 2)
    return Difference(d, d - half, d + half, _p_value(abs(d) / root, parts), seed_share)


def _quantile(parts: Sequence[tuple[float, float]], tail: float) -> float:
    """The upper `tail` quantile of t, the mean over `parts` (v, degrees of freedom) with weights v."""
    from scipy.special import stdtrit

    return float(sum(-v * stdtrit(df, tail) for v, df in parts) / sum(v for v, _ in parts))


def _p_value(t: float, parts: Sequence[tuple[float, float]]) -> float:
    """The two-sided level at which |d|/√V equals the quantile, by bisection of its logarithm; at least 10^-16."""
    low, high = math.log(1e-16), 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _quantile(parts, math.exp(middle) / 2) > t else (low, middle)
    return math.exp(high)
