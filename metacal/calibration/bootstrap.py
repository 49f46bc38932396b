"""Percentile intervals of a measure, and the paired comparison of two models on one test set.

    bootstrap("ece", p)                 # Interval(low=0.031, value=0.036, high=0.044)
    compare(p1, p2, "ece")              # Comparison(difference=0.012, low=0.004, high=0.019, p_value=0.006)

Resamples are drawn with replacement from a generator seeded with `seed`: two calls with one seed and one N
see the same resamples, which is what makes a comparison paired.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metacal.calibration.arguments import require_predictions
from metacal.calibration.measures import MEASURES
from metacal.calibration.weighted import Counted, weighted
from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["Comparison", "Interval", "bootstrap", "bootstrap_all", "compare"]

Measure = str | Callable[..., float]
Job = tuple[Callable[..., float], dict[str, Any], Predictions]


class Interval(NamedTuple):
    """The measure's value on all samples and the percentile interval of its resamples.

    Percentiles are not recentred. A measure with a bias that grows as samples get fewer (ece, sece, kce
    near 0) is larger on resamples than on the whole, and its `value` may then lie low in the interval, or
    below it.
    """

    low: float
    value: float
    high: float


class Comparison(NamedTuple):
    """measure(p1) - measure(p2), its percentile interval, and the two-sided p-value of "no difference"."""

    difference: float
    low: float
    high: float
    p_value: float


def bootstrap(
    measure: Measure,
    p: Predictions,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    **options: Any,
) -> Interval:
    """Percentile interval of `measure` over `n` resamples of the N predictions.

    Args:
        measure: a name or function of `metacal.calibration`, evaluated for all resamples together; or any
            function from Predictions to a number, called once a resample.
        n: resamples, at least 1.
        seed: of the generator that draws them; the same seed gives the same interval.
        level: the share of resamples inside the interval, in (0, 1).
        options: passed to the measure, e.g. `n_bins=10`.
    """
    require_predictions("p", p)
    _check(n, level)
    function, options = _resolve(measure, options)
    value = float(function(p, **options))
    return _interval(value, _resampled([(function, options, p)], n, seed)[0], level)


def bootstrap_all(
    measures: Mapping[str, Mapping[str, Any]] | Sequence[str],
    p: Predictions,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Interval]:
    """`bootstrap` of several named measures on the same resamples, drawn once: name -> Interval.

    `measures` are names, or name -> options such as {"ece": {"n_bins": 10}}. Each interval is the one that `bootstrap`
    gives for the same n and seed.
    """
    require_predictions("p", p)
    _check(n, level)
    options = dict(measures) if isinstance(measures, Mapping) else {name: {} for name in measures}
    jobs = [(*_resolve(name, dict(keys)), p) for name, keys in options.items()]
    values = [float(function(p, **keys)) for function, keys, _ in jobs]
    resampled = _resampled(jobs, n, seed) if jobs else []
    return {name: _interval(v, r, level) for name, v, r in zip(options, values, resampled, strict=True)}


def compare(
    p1: Predictions,
    p2: Predictions,
    measure: Measure,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    **options: Any,
) -> Comparison:
    """The difference measure(p1) - measure(p2) of two models on the same samples in the same order, by
    paired resamples.

    Each resample is measured for both. The p-value is twice the smaller share of resampled differences on
    one side of 0, both counts and n raised by one so that it is never 0, and at most 1. Raises InputError
    if the labels differ.
    """
    require_predictions("p1", p1)
    require_predictions("p2", p2)
    _check(n, level)
    require(len(p1) == len(p2), f"p2 must have the samples of p1, got {len(p2)} for {len(p1)}")
    differ = (p1.labels.cpu() != p2.labels.cpu()).nonzero()
    require(
        len(differ) == 0, f"p2 must have the labels of p1, they differ in row {int(differ[0]) if len(differ) else 0}"
    )
    function, options = _resolve(measure, options)
    value = float(function(p1, **options)) - float(function(p2, **options))
    first, second = _resampled([(function, options, p1), (function, options, p2)], n, seed)
    differences = first - second
    low, _, high = _interval(value, differences, level)
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return Comparison(value, low, high, min(1.0, 2 * (tail + 1) / (n + 1)))


def _check(n: int, level: float) -> None:
    require(isinstance(n, int) and n >= 1, f"n must be an integer >= 1, got {n!r}")
    require(0 < level < 1, f"level must be in (0, 1), got {level}")


def _resolve(measure: Measure, options: dict[str, Any]) -> tuple[Callable[..., float], dict[str, Any]]:
    """The function and its options; a `functools.partial` with keywords only is taken apart."""
    if isinstance(measure, functools.partial):
        partial: functools.partial[float] = measure
        if not partial.args:
            measure, options = partial.func, {**partial.keywords, **options}
    if isinstance(measure, str):
        require(measure in MEASURES, f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
        return MEASURES[measure], options
    require(callable(measure), f"measure must be a name or a function, got {type(measure).__name__}")
    return measure, options


def _resampled(jobs: Sequence[Job], n: int, seed: int) -> list[Tensor]:
    """The measure of each job on the same n resamples: float64 (n,), one for each job, whose N are equal."""
    forms = [_counted(function, options, p) for function, options, p in jobs]
    out: list[list[Tensor]] = [[] for _ in jobs]
    for drawn in _draws(len(jobs[0][2]), n, seed):
        counts = _counts(drawn) if any(forms) else None
        for values, form, (function, options, p) in zip(out, forms, jobs, strict=True):
            if form is not None and counts is not None:
                values.append(form(counts))
            else:
                rows = drawn.to(p.device).unbind()
                values.append(torch.tensor([float(function(p[r], **options)) for r in rows], dtype=torch.float64))
    return [torch.cat(values) for values in out]


def _counted(function: Callable[..., float], options: dict[str, Any], p: Predictions) -> Counted | None:
    """The form of a named measure that takes all resamples at once, on the CPU; None for any other function."""
    name = getattr(function, "__name__", "")
    return weighted(name, p.to("cpu"), **options) if MEASURES.get(name) is function else None


def _draws(n_samples: int, n: int, seed: int) -> Iterator[Tensor]:
    """n resamples as rows of indices (r, N): at most 2^20 indices and 128 resamples at a time, to bound
    memory.
    """
    generator = torch.Generator().manual_seed(seed)
    step = min(128, max(1, (1 << 20) // n_samples))
    for start in range(0, n, step):
        yield torch.randint(n_samples, (min(step, n - start), n_samples), generator=generator)


def _counts(drawn: Tensor) -> Tensor:
    """How often each resample holds each sample: float64 (N, r) from indices (r, N)."""
    r, n = drawn.shape
    flat = drawn * r + torch.arange(r)[:, None]
    return torch.bincount(flat.reshape(-1), minlength=n * r).view(n, r).double()


def _interval(value: float, resampled: Tensor, level: float) -> Interval:
    tail = (1 - level) / 2
    ordered = resampled.sort().values
    # torch.quantile interpolates between infinities to NaN; nearest ranks do not, and n is large.
    low, high = (float(ordered[round(q * (len(ordered) - 1))]) for q in (tail, 1 - tail))
    return Interval(low, value, high)
