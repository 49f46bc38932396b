"""What a measure may be called with: a `Predictions`, or probabilities and labels as everybody types them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import numpy as np

from metacal.errors import InputError, require
from metacal.predictions import Predictions

__all__ = ["MeasureFunction", "require_predictions", "takes_arrays"]

Options = ParamSpec("Options")


class MeasureFunction(Protocol[Options]):
    """A measure as its callers see it."""

    __name__: str

    @overload
    def __call__(self, p: Predictions, *arguments: Options.args, **options: Options.kwargs) -> float: ...

    @overload
    def __call__(self, probs: Any, labels: Any, *arguments: Options.args, **options: Options.kwargs) -> float: ...


def takes_arrays(function: Callable[Concatenate[Predictions, Options], float]) -> MeasureFunction[Options]:
    """The measure f(p, …), which can then be called as f(probs, labels, …) too.

    Two arrays are always probabilities (N, K) and labels (N,), checked as by `Predictions.from_probabilities`. Nothing
    is taken for logits because of its values: those go through `Predictions.from_logits`, as the errors say.
    """
    name = function.__name__

    @functools.wraps(function)
    def measure(p: Any, *arguments: Any, **options: Any) -> float:
        if isinstance(p, Predictions):
            require("labels" not in options, f"{name} of a Predictions takes no labels: it holds its own")
            return function(p, *arguments, **options)
        if "labels" not in options:
            require(
                len(arguments) > 0,
                f"{name} takes a Predictions, or probabilities (N, K) and labels (N,), got {type(p).__name__} alone; "
                "for logits give metacal.Predictions.from_logits(logits, labels)",
            )
            options["labels"], *arguments = arguments  # type: ignore[assignment]
        return function(_predictions(name, p, options.pop("labels")), *arguments, **options)

    return measure  # type: ignore[return-value]


def _predictions(name: str, probs: Any, labels: Any) -> Predictions:
    try:
        dimensions = np.ndim(probs), np.ndim(labels)
    except ValueError:  # rows of unequal length, which from_probabilities describes
        dimensions = (2, 1)
    require(dimensions != (1, 2), f"{name} takes probabilities (N, K) first and labels (N,) second, got them reversed")
    try:
        return Predictions.from_probabilities(probs, labels)
    except InputError as error:
        raise InputError(f"{name} of two arrays takes probabilities (N, K) and labels (N,): {error}") from None


def require_predictions(name: str, p: Any) -> None:
    """Raise `InputError` unless the argument `name` is a `Predictions`, with how to make one."""
    require(
        isinstance(p, Predictions),
        f"{name} must be a Predictions, got {type(p).__name__}: metacal.Predictions.from_probabilities(probs, labels)"
        " makes one, or from_logits(logits, labels)",
    )
