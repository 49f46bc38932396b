"""What a measure is: one record of its function, the forms that repeat or stream it, and how it is shown.

    MEASURES["mean_miss"] = Measure(lambda p: float((1 - p.log_likelihood.exp()).mean()), "Mean miss", best="min")

is all that reports, comparisons, the bootstrap and monitors need to know of a new one; `weighted` makes its bootstrap
fast and `streamed` lets `CalibrationAccumulator` compute it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from metacal.predictions import Predictions

__all__ = [
    "Counted",
    "Measure",
    "Streamed",
    "Sums",
    "Weighted",
    "by_blocks",
    "counted_together",
    "row_dots",
    "sparse_product",
]

Result = TypeVar("Result")

Counted = Callable[[Tensor], Tensor]
"""Counts (N, R) float64, how often each of R resamples holds each of N samples -> the measure of each, float64 (R,).

The bootstrap gives the samples in ascending confidence, and counts whose columns are adjacent in memory (the transpose
of a contiguous (R, N)): running sums over the samples are several times faster that way.
"""


def sparse_product(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """x (N, R) -> A x (M, R) for the sparse A (M, N) = `shape` that has these values, float64, at these places.

    Equal places add up.
    """
    from scipy.sparse import csr_array  # here: to import it takes long, and only the bootstrap asks

    matrix = csr_array((values.numpy(), (rows.numpy(), columns.numpy())), shape)
    return lambda x: torch.from_numpy(matrix @ np.ascontiguousarray(x.numpy()))


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """Σ_j x_ij y_ij, (R,) of two (R, V), in one pass."""
    return torch.from_numpy(np.einsum("ij,ij->i", x.numpy(), y.numpy()))


Sums = Callable[[Predictions, int], Mapping[str, Tensor]]
"""(predictions, n_bins) -> sums over the samples by name, which add when samples do."""


@dataclass(frozen=True)
class Streamed:
    """A measure as a function of sums over the samples.

    Attributes:
        sums: the functions that give them; those that several measures share are computed once.
        value: all the sums by name, `count` (M,) of `bin_sums` among them -> the measure.
    """

    sums: tuple[Sums, ...]
    value: Callable[[Mapping[str, Tensor]], float]


@dataclass(frozen=True)
class Weighted:
    """The measure of resamples as a formula on sums that measures of its kind have in common; calling it gives the
    `Counted` form.

    Attributes:
        sums: (p on the CPU, **options of the sums) -> (counts (N, R) -> sums); those that several measures share, with
            the same options, are computed once.
        value: (*sums, **the other options) -> the measure of each resample, float64 (R,).
    """

    sums: Callable[..., Callable[[Tensor], tuple[Any, ...]]]
    value: Callable[..., Tensor]

    def options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those of the sums, and those of the value."""
        named = inspect.signature(self.sums).parameters
        of_sums = {key: value for key, value in options.items() if key in named}
        return of_sums, {key: value for key, value in options.items() if key not in named}

    def __call__(self, p: Predictions, **options: Any) -> Counted:
        of_sums, of_value = self.options(options)
        sums = self.sums(p, **of_sums)
        return lambda w: self.value(*sums(w), **of_value)


@dataclass(frozen=True)
class Measure:
    """A measure of predictions; calling it calls its function.

    Attributes:
        function: (p, **options) -> float. With an option `n_bins`, reports and comparisons give it their own.
        title: in tables, to which "%" is added when `percent`.
        digits: behind the decimal point, after the factor of 100 when `percent`.
        percent: show fractions times 100.
        best: "min" or "max": which end is good; None if neither is.
        weighted: (p on the CPU, **options) -> the `Counted` form, by which the bootstrap evaluates resamples together;
            None, or a None that it returns, means that every resample is measured by itself. See `Weighted`.
        streamed: the measure of a stream; None if it needs all samples at once.
        classes_only: it depends on the predicted classes alone, which one temperature for all leaves as they are.
        watched: logged at every validation of a run.
        compared: a column of `metacal compare` unless other measures are asked for.
    """

    function: Callable[..., float]
    title: str
    digits: int = 4
    percent: bool = False
    best: str | None = None
    weighted: Callable[..., Counted | None] | None = None
    streamed: Streamed | None = None
    classes_only: bool = False
    watched: bool = False
    compared: bool = False

    def __call__(self, p: Any, *arguments: Any, **options: Any) -> float:
        return float(self.function(p, *arguments, **options))

    def options(self, n_bins: int) -> dict[str, Any]:
        """The options of the function for a report in `n_bins` bins: none if it has no bins."""
        return {"n_bins": n_bins} if "n_bins" in inspect.signature(self.function).parameters else {}

    def counted(self, p: Predictions, **options: Any) -> Counted:
        """The measure of resamples of `p`, given by their counts; weighted if there is such a form."""
        form = None if self.weighted is None else self.weighted(p.to("cpu"), **options)
        if form is not None:
            return form

        def one_by_one(counts: Tensor) -> Tensor:
            rows = (torch.arange(len(p)).repeat_interleave(column.long()).to(p.device) for column in counts.t())
            return torch.tensor([self(p[r], **options) for r in rows], dtype=torch.float64)

        return one_by_one


def counted_together(measures: Sequence[tuple[Measure, Mapping[str, Any]]], p: Predictions) -> Counted:
    """M measures of `p`, each with its options, as one form: counts (N, R) -> (M, R)."""
    sums: dict[Any, Callable[[Tensor], tuple[Any, ...]]] = {}
    formulas: list[tuple[Any, Callable[..., Tensor]]] = []  # the key of its sums, and the value of these
    for i, (measure, options) in enumerate(measures):
        form = measure.weighted
        if isinstance(form, Weighted):
            of_sums, of_value = form.options(options)
            key = (form.sums, *sorted(of_sums.items()))
            if key not in sums:
                sums[key] = form.sums(p.to("cpu"), **of_sums)
            formulas.append((key, functools.partial(form.value, **of_value)))
        else:
            sums[i] = _alone(measure.counted(p, **options))
            formulas.append((i, lambda value: value))

    def together(w: Tensor) -> Tensor:
        of_these = {key: form(w) for key, form in sums.items()}
        return torch.stack([value(*of_these[key]) for key, value in formulas])

    return together


def by_blocks(
    measures: Iterable[Measure], function: Callable[[Tensor], Result], blocks: Iterable[Tensor]
) -> list[Result]:
    """The function, which evaluates these measures, of every block of resamples, in their order.

    By as many threads as torch has, at most 4 so that few blocks are in memory at once. The operations on one are too
    small to gain by torch's own threads, whose number is 1 meanwhile. A measure without a counted form is somebody's
    function, which may count on the modes of this thread, such as its default device: then there is no other thread.
    """
    if not all(measure.weighted for measure in measures):
        return list(map(function, blocks))
    left, without_graph = iter(blocks), torch.no_grad()(function)
    with _one_thread_each() as n_threads, ThreadPoolExecutor(at_once := min(n_threads, 4)) as threads:
        results: list[Result] = []
        while some := list(itertools.islice(left, at_once)):
            results += threads.map(without_graph, some)
        return results


_lock, _under_way, _before = threading.Lock(), 0, 1


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """For the block, torch works in one thread; yields how many it has else. The number is the whole process's, and
    blocks may overlap in several threads: the first sets it, and the last resets it.
    """
    global _under_way, _before
    with _lock:
        if _under_way == 0:
            _before = torch.get_num_threads()
            torch.set_num_threads(1)
        _under_way += 1
    try:
        yield _before
    finally:
        with _lock:
            _under_way -= 1
            if _under_way == 0:
                torch.set_num_threads(_before)


def _alone(form: Counted) -> Callable[[Tensor], tuple[Tensor]]:
    return lambda w: (form(w),)
