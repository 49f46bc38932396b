"""Simulated runs of methods that are alike, and how often the tests between methods tell them apart.

The tests of `metacal.report.significance` hold these rates to their bounds; `scripts/error_rates.py` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from metacal.predictions import Predictions
from metacal.report.significance import Moderated, Sampled, difference, draw_counts, holm, moderated, sample

Variances = Callable[[np.ndarray], Moderated]


def pooled(values: np.ndarray) -> Moderated:
    """One variance for all methods, the mean of theirs: what `moderated` is compared with."""
    g, s = values.shape
    freedom = float((g - 1) * (s - 1))
    residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    return Moderated(np.full(g, (residuals**2).sum() / freedom), freedom, math.inf)


def many_nulls(
    experiments: int, g: int, s: int, spread: float = 0.0, first: float = 1.0, variances: Variances = moderated
) -> dict[str, float]:
    """Equal methods on normal values with seed effects; standard deviations exp(spread · normal), of the first `first`.

    How often some of the g - 1 others is found to differ from the first at 5 % after Holm, the rate of single
    tests at 5 %, and how often the truly best (any given one) loses its mark to the best of the data.
    """
    r = np.random.default_rng(0)
    family = single = lost = 0.0
    none = np.zeros((s, 2))
    for _ in range(experiments):
        deviation = np.exp(spread * r.normal(size=(g, 1)))
        deviation[0] *= first
        values = r.normal(size=(g, s)) * deviation + r.normal(size=s)
        m = variances(values)

        def p(i: int, j: int, values=values, m=m) -> float:
            known = (m.variances[i], m.variances[j], m.df)
            return difference(Sampled(values[i], none), Sampled(values[j], none), seed_variance=known).p_value

        found = [p(i, 0) for i in range(1, g)]
        single += np.mean([x < 0.05 for x in found])
        family += min(holm(found)) < 0.05
        best = int(values.mean(1).argmin())
        others = [i for i in range(g) if i != best]
        lost += best != 0 and holm([p(i, best) for i in others])[others.index(0)] < 0.05
    return {"family": family / experiments, "single": single / experiments, "lost": lost / experiments}


def power(
    experiments: int, g: int, s: int, spread: float = 0.0, first: float = 1.0, variances: Variances = moderated
) -> float:
    """As `many_nulls`, with a second method six standard errors from the first: how often it is found after Holm."""
    r = np.random.default_rng(0)
    none = np.zeros((s, 2))
    hits = 0
    for _ in range(experiments):
        deviation = np.exp(spread * r.normal(size=(g, 1)))
        deviation[0] *= first
        values = r.normal(size=(g, s)) * deviation + r.normal(size=s)
        values[1] += 6 * math.sqrt(float((deviation[0] ** 2 + deviation[1] ** 2).sum()) / s)
        m = variances(values)
        p_values = [
            difference(
                Sampled(values[i], none),
                Sampled(values[0], none),
                seed_variance=(m.variances[i], m.variances[0], m.df),
            ).p_value
            for i in range(1, g)
        ]
        hits += holm(p_values)[0] < 0.05
    return hits / experiments


def two_methods(
    g: torch.Generator,
    n: int,
    seeds: int,
    over_seeds: float = 0.0,
    of_method: float = 0.0,
    of_run: float = 0.0,
    gap: float = 0.0,
) -> list[list[Predictions]]:
    """Runs of two methods on new test samples, overconfident by a factor near 1.5 on the logits.

    What differs between runs: the factor (`over_seeds`, the standard deviation of its logarithm), noise on the logits
    that a method's runs share (`of_method`) or that is a run's own (`of_run`). The second method's factor is larger by
    exp(`gap`); with gap 0 the two are drawn alike, so that every measure's null hypothesis holds.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    z = 1.5 * normal(n, 4)
    labels = torch.multinomial(torch.softmax(z, 1), 1, generator=g).squeeze(1)
    methods = []
    for extra in (0.0, gap):
        common = z + of_method * normal(n, 4)
        factors = 1.5 * torch.exp(over_seeds * normal(seeds) + extra)
        methods.append([Predictions.from_logits(f * (common + of_run * normal(n, 4)), labels) for f in factors])
    return methods


def rejections(measures: list[str], experiments: int, n: int, seeds: int, **how: float) -> dict[str, float]:
    g = torch.Generator().manual_seed(1)
    found = dict.fromkeys(measures, 0)
    for i in range(experiments):
        first, second = two_methods(g, n, seeds, **how)
        counts = draw_counts(n, 64, seed=i)
        a, b = sample(measures, first, counts), sample(measures, second, counts)
        for name in measures:
            found[name] += difference(a[name], b[name]).p_value < 0.05
    return {name: count / experiments for name, count in found.items()}


NULLS = {
    "seeds": {"seeds": 3, "over_seeds": 0.2},
    "samples": {"seeds": 3, "of_method": 0.7},
    "samples, one run": {"seeds": 1, "of_run": 0.7},
    "samples, each run its own": {"seeds": 3, "of_run": 0.7},
    "both": {"seeds": 3, "over_seeds": 0.1, "of_method": 0.5, "of_run": 0.5},
}


def alike(experiments: int, seeds: int, over_seeds: float, own: float, shared: float) -> float:
    """Rejections at 5 % on normal values: variances over seeds, of each run's own samples, of what all runs share."""
    g = np.random.default_rng(0)
    rejected = 0
    for _ in range(experiments):
        d = g.normal(size=seeds) * math.sqrt(over_seeds + own) + g.normal() * math.sqrt(shared)
        resampled = g.normal(size=(seeds, 128)) * math.sqrt(own) + g.normal(size=128) * math.sqrt(shared)
        none = Sampled(np.zeros(seeds), np.zeros((seeds, 128)))
        rejected += difference(Sampled(d, d[:, None] + resampled), none).p_value < 0.05
    return rejected / experiments
