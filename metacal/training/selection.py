"""Which epoch a run selects, by what its validations measured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

from metacal.calibration import FewErrorsWarning, TemperatureScaling
from metacal.calibration.measures import values_of
from metacal.predictions import Predictions

__all__ = ["scaled_values", "score"]


def scaled_values(select: str, p: Predictions, n_bins: int) -> dict[str, float]:
    """``val/nll_scaled`` or ``val/ece_scaled`` where `select` asks for it, else nothing.

    The temperature is fitted on `p` itself. It is one number, which improves the NLL of its own N samples by about
    1/(2N) nats: alike at every epoch, so that this does not choose between them.
    """
    if not select.endswith("_scaled"):
        return {}
    name = select.removesuffix("_scaled")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewErrorsWarning)  # of few wrong predictions, at every validation
        scaled = TemperatureScaling().fit(p).apply(p)
    return {f"val/{select}": values_of(scaled, [name], n_bins)[name]}


def score(select: str, epoch: int, values: Mapping[str, float]) -> float:
    """What the selected epoch has the least of, of the `values` that a validation measured after `epoch`.

    A value that is not a number is the worst.
    """
    if select == "last":
        return -float(epoch)
    value = values[f"val/{select}"] * (-1 if select == "accuracy" else 1)
    return math.inf if math.isnan(value) else value
