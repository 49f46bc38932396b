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
from metacal.calibration.measure import Measure, by_blocks, counted_together
from metacal.calibration.measures import MEASURES
from metacal.errors import require
from metacal.names import MeasureName
from metacal.predictions import Predictions

__all__ = ["Comparison", "Interval", "bootstrap", "bootstrap_all", "bootstrap_sets", "compare"]

MeasureLike = MeasureName | Measure | Callable[..., float]


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
    measure: MeasureLike,
    p: Predictions,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    **options: Any,
) -> Interval:
    """Percentile interval of `measure` over `n` resamples of the N predictions.

    Args:
        measure: a name in `MEASURES` or one of its functions, evaluated for all resamples together; or any
            function from Predictions to a number, called once a resample.
        n: resamples, at least 1.
        seed: of the generator that draws them; the same seed gives the same interval.
        level: the share of resamples inside the interval, in (0, 1).
        options: passed to the measure, e.g. `n_bins=10`.
    """
    require_predictions("p", p)
    _check(n, level)
    return _intervals([_resolve(measure, options)], [p], n, seed, level)[0][0]


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
    return bootstrap_sets(measures, [p], n, seed, level)[0]


def bootstrap_sets(
    measures: Mapping[str, Mapping[str, Any]] | Sequence[str],
    sets: Sequence[Predictions],
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> list[dict[str, Interval]]:
    """`bootstrap_all` of each of `sets`, predictions of equal N as of one model before and after scaling: the resamples
    are drawn once.
    """
    _check(n, level)
    options = dict(measures) if isinstance(measures, Mapping) else {name: {} for name in measures}
    records = [_resolve(name, dict(keys)) for name, keys in options.items()]
    return [dict(zip(options, of_set, strict=True)) for of_set in _intervals(records, sets, n, seed, level)]


def compare(
    p1: Predictions,
    p2: Predictions,
    measure: MeasureLike,
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
    record, options = _resolve(measure, options)
    value = record(p1, **options) - record(p2, **options)
    first, second = _resampled([(record, options)], (p1, p2), n, seed)
    differences = (first - second)[0]
    low, _, high = _interval(value, differences, level)
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return Comparison(value, low, high, min(1.0, 2 * (tail + 1) / (n + 1)))


def _check(n: int, level: float) -> None:
    require(isinstance(n, int) and n >= 1, f"n must be an integer >= 1, got {n!r}")
    require(0 < level < 1, f"level must be in (0, 1), got {level}")


def _resolve(measure: str | MeasureLike, options: dict[str, Any]) -> tuple[Measure, dict[str, Any]]:
    """The record and its options; a `functools.partial` with keywords only is taken apart."""
    if isinstance(measure, functools.partial):
        partial: functools.partial[float] = measure
        if not partial.args:
            measure, options = partial.func, {**partial.keywords, **options}
    if isinstance(measure, str):
        require(measure in MEASURES, f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
        return MEASURES[measure], options
    require(callable(measure), f"measure must be a name or a function, got {type(measure).__name__}")
    if isinstance(measure, Measure):
        return measure, options
    known = next((record for record in MEASURES.values() if record.function is measure), None)
    return known or Measure(measure, getattr(measure, "__name__", "measure")), options


def _intervals(
    measures: Sequence[tuple[Measure, dict[str, Any]]], sets: Sequence[Predictions], n: int, seed: int, level: float
) -> list[list[Interval]]:
    """For each of the sets an interval of each measure."""
    if not measures:
        return [[] for _ in sets]
    return [
        [
            _interval(measure(p, **options), resampled, level)
            for (measure, options), resampled in zip(measures, of_set, strict=True)
        ]
        for p, of_set in zip(sets, _resampled(measures, sets, n, seed), strict=True)
    ]


def _resampled(
    measures: Sequence[tuple[Measure, dict[str, Any]]], sets: Sequence[Predictions], n: int, seed: int
) -> list[Tensor]:
    """M measures, each with its options, on the same n resamples of each of the sets, whose N are equal: float64 (M, n)
    for each set.
    """
    # In ascending confidence, in which most measures want them, and which each would make for itself.
    orders = [p.confidence.argsort() for p in sets]
    forms = [counted_together(measures, p[order]) for p, order in zip(sets, orders, strict=True)]

    def measured(drawn: Tensor) -> list[Tensor]:
        counts = _counts(drawn).numpy().T
        # numpy takes columns twice as fast as torch.
        return [form(torch.from_numpy(counts.take(order.cpu(), 1)).t()) for order, form in zip(orders, forms)]

    blocks = by_blocks([record for record, _ in measures], measured, _draws(len(sets[0]), n, seed))
    return [torch.cat(of_set, 1) for of_set in zip(*blocks, strict=True)]


def _draws(n_samples: int, n: int, seed: int) -> Iterator[Tensor]:
    """n resamples as rows of indices (r, N): at most 2^18 indices and 128 resamples at a time, so that what is made of
    them stays in the processor's cache.
    """
    generator = torch.Generator().manual_seed(seed)
    step = min(128, max(1, (1 << 18) // n_samples))
    for start in range(0, n, step):
        yield torch.randint(n_samples, (min(step, n - start), n_samples), generator=generator)


def _counts(drawn: Tensor) -> Tensor:
    """How often each resample holds each sample: float64 (N, r) from indices (r, N); a column is adjacent in memory."""
    r, n = drawn.shape
    flat = drawn + n * torch.arange(r)[:, None]
    return torch.bincount(flat.reshape(-1), minlength=r * n).view(r, n).double().t()


def _interval(value: float, resampled: Tensor, level: float) -> Interval:
    tail = (1 - level) / 2
    ordered = resampled.sort().values
    # torch.quantile interpolates between infinities to NaN; nearest ranks do not, and n is large.
    low, high = (float(ordered[round(q * (len(ordered) - 1))]) for q in (tail, 1 - tail))
    return Interval(low, value, high)
