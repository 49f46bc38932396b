"""The post-hoc maps by name, the choice among them by cross-validation, and files of fitted ones."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metacal.calibration.arguments import require_predictions
from metacal.calibration.beta import BetaScaling
from metacal.calibration.fitted import FewErrorsWarning, Identity, Scaling, logits_of
from metacal.calibration.mixture import EnsembleTemperatureScaling
from metacal.calibration.scaling import HistogramBinning, IsotonicScaling, MatrixScaling, VectorScaling
from metacal.calibration.spline import SplineScaling
from metacal.calibration.temperature import TemperatureScaling
from metacal.errors import InputError, require, require_choice
from metacal.files import UNREADABLE, arrays_in, write_atomically
from metacal.folds import dealt
from metacal.predictions import Predictions

__all__ = [
    "AUTO",
    "SCALINGS",
    "Choice",
    "as_tensors",
    "choose_scaling",
    "cross_fitted",
    "fit_scaling",
    "load_scaling",
    "make_scaling",
    "name_of",
    "restored",
    "save_scaling",
]

SCALINGS: dict[str, Callable[[], Scaling]] = {
    "none": Identity,
    "temperature": TemperatureScaling,
    "ets": EnsembleTemperatureScaling,
    "spline": SplineScaling,
    "vector": VectorScaling,
    "beta": BetaScaling,
    "dirichlet": MatrixScaling,
    "histogram": HistogramBinning,
    "isotonic": IsotonicScaling,
}
"""From the simpler to the freer."""

AUTO = "auto"
"""The name of the choice among them by `choose_scaling`."""

_LEAST = -69.0776  # log 1e-30: what a label of probability 0 counts in the choice
FOLDS = 5


class Choice(NamedTuple):
    """What `choose_scaling` saw.

    Attributes:
        name: of the chosen map, in `SCALINGS`.
        nll: of each candidate, cross-validated, in nats.
        behind: of each candidate, by how much its NLL exceeds the least one: mean and standard error over predictions.
        scaling: the chosen map, fitted on all predictions.
    """

    name: str
    nll: dict[str, float]
    behind: dict[str, tuple[float, float]]
    scaling: Scaling


def make_scaling(method: str) -> Scaling:
    """The unfitted map of that name. Raises InputError for another name."""
    require_choice("method", method, SCALINGS)
    return SCALINGS[method]()


def fit_scaling(p: Predictions, method: str = AUTO, seed: int = 0) -> Scaling:
    """The map `method` of `SCALINGS` fitted on `p`, or "auto": the one that `choose_scaling` takes.

    Raises:
        InputError: for another name.
    """
    require_choice("method", method, [AUTO, *SCALINGS])
    return choose_scaling(p, seed=seed).scaling if method == AUTO else make_scaling(method).fit(p)


def choose_scaling(p: Predictions, methods: Sequence[str] | None = None, folds: int = FOLDS, seed: int = 0) -> Choice:
    """The simplest map whose cross-validated NLL on `p` is within one standard error of the least one.

    Every candidate is fitted on all folds but one and measured there. The standard error is that of the mean difference
    from the best candidate over the N predictions, which are the same for both. So a map must earn its freedom: on
    a split that says little the predictions stay as they are.

    Args:
        methods: names in `SCALINGS`, in any order; None: all, without "dirichlet" where N < K², too few for its
            matrix.
        folds: stratified by label; at most N.
        seed: of the folds.

    Raises:
        InputError: for unknown names, folds < 2, and fewer than two predictions.
    """
    require_predictions("p", p)
    for name in methods or ():
        require_choice("methods", name, SCALINGS)
    require(methods is None or len(methods) > 0, "methods must name at least one map")
    names = [name for name in SCALINGS if methods is None or name in methods]
    if methods is None and len(p) < p.n_classes**2:
        names.remove("dirichlet")
    losses = {name: -cross_fitted(p, name, folds, seed).log_likelihood.cpu().clamp(min=_LEAST) for name in names}
    nll = {name: float(loss.mean()) for name, loss in losses.items()}
    best = min(names, key=lambda name: nll[name])
    behind = {name: _mean_and_error(loss - losses[best]) for name, loss in losses.items()}
    chosen = next(name for name in names if behind[name][0] <= behind[name][1])
    return Choice(chosen, nll, behind, make_scaling(chosen).fit(p))


def cross_fitted(p: Predictions, method: str, folds: int = FOLDS, seed: int = 0) -> Predictions:
    """The predictions of `p`, each mapped by a fit on the folds that it is not in: what the map does to new data.

    Args:
        method: a name in `SCALINGS`, or "auto": chosen anew for each fold.
        folds: stratified by label; at most N.
        seed: of the folds.
    """
    require_choice("method", method, [AUTO, *SCALINGS])
    require(isinstance(folds, int) and folds >= 2, f"folds must be an integer >= 2, got {folds}")
    require(len(p) >= 2, f"cross-validation needs at least 2 predictions, got {len(p)}")
    if method == "none":
        return p
    fold = _folds(p.labels, min(folds, len(p)), seed).to(p.device)
    out = torch.empty(len(p), p.n_classes, dtype=torch.float64, device=p.device)
    for k in range(int(fold.max()) + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewErrorsWarning)  # of few errors the fit on all predictions warns
            scaling = fit_scaling(p[fold != k], method, seed)
        out[fold == k] = logits_of(scaling.apply(p[fold == k])).double()
    return Predictions.from_logits(out, p.labels)


def save_scaling(scaling: Scaling, path: str | os.PathLike[str]) -> None:
    """Write a fitted map of `SCALINGS` to an npz file of plain arrays, which `load_scaling` reads.

    Raises:
        InputError: for a map that is not fitted, or is none of these.
        RunError: when the file cannot be written.
    """
    arrays: dict[str, Any] = {"map": np.asarray(name_of(scaling)), **scaling.arrays()}
    write_atomically(Path(path), lambda file: np.savez_compressed(file, **arrays))


def load_scaling(path: str | os.PathLike[str]) -> Scaling:
    """The fitted map in a file that `save_scaling` wrote. Raises InputError for anything else."""
    path = Path(path)
    require(path.is_file(), f"map file not found: {path}")
    try:
        arrays = arrays_in(path)
    except UNREADABLE as error:
        raise InputError(f"{path} must be a map that save_scaling wrote: {error}") from error
    require("map" in arrays, f"{path} is no saved map; its arrays are: {', '.join(arrays) or 'none'}")
    try:
        return restored(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def as_tensors(scaling: Scaling) -> dict[str, Any]:
    """A fitted map as tensors and its name, of which `restored` makes it again."""
    return {"map": name_of(scaling), **{name: torch.as_tensor(array) for name, array in scaling.arrays().items()}}


def restored(arrays: dict[str, Any]) -> Scaling:
    """The fitted map of which `arrays` are the arrays, with its name in `SCALINGS` as "map"."""
    return make_scaling(str(arrays["map"])).restore(arrays)


def name_of(scaling: Scaling) -> str:
    """The name of a map in `SCALINGS`. Raises InputError for one that is not there."""
    name = next((name for name, kind in SCALINGS.items() if kind is type(scaling)), None)
    if name is None:
        raise InputError(f"{type(scaling).__name__} is none of the maps {', '.join(SCALINGS)}")
    return name


def _folds(labels: Tensor, folds: int, seed: int) -> Tensor:
    """The fold of each label, int64 (N,)."""
    return torch.from_numpy(dealt(labels.cpu().numpy(), folds, np.random.default_rng(seed % 2**64)))


def _mean_and_error(x: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(x.mean()), float(x.std() / len(x) ** 0.5)
