"""What a measure is: one record of its function, the forms that repeat or stream it, and how it is shown.

    MEASURES["mean_miss"] = Measure(lambda p: float((1 - p.log_likelihood.exp()).mean()), "Mean miss", best="min")

is all that reports, comparisons, the bootstrap and monitors need to know of a new one; `weighted` makes its bootstrap
fast and `streamed` lets `CalibrationAccumulator` compute it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metacal.predictions import Predictions

__all__ = ["Counted", "Measure", "Streamed", "Sums", "sparse_product"]

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
class Measure:
    """A measure of predictions; calling it calls its function.

    Attributes:
        function: (p, **options) -> float. With an option `n_bins`, reports and comparisons give it their own.
        title: in tables, to which "%" is added when `percent`.
        digits: behind the decimal point, after the factor of 100 when `percent`.
        percent: show fractions times 100.
        best: "min" or "max": which end is good; None if neither is.
        weighted: (p on the CPU, **options) -> the `Counted` form, by which the bootstrap evaluates resamples together;
            None, or a None that it returns, means that every resample is measured by itself.
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
