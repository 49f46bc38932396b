"""What every post-hoc map shares: a fit that says what it rests on, and arrays by which it can be kept."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metacal.calibration.arguments import require_predictions
from metacal.calibration.measures import ece, nll
from metacal.errors import InputError, require
from metacal.predictions import Predictions

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FEW_ERRORS", "FewErrorsWarning", "FitReport", "Identity", "Scaling", "logits_of"]

FEW_ERRORS = 10
"""With fewer wrong predictions in its split a fit warns."""

_TINY = 1e-30  # a probability of exactly 0 gets the logit -69


class FitReport(NamedTuple):
    """What a fit did on its own split: N, NLL (nats) and ECE (15 bins) before and after.

    `wrong` is the number of wrong predictions among the N, before the map.
    """

    n: int
    nll_before: float
    nll_after: float
    ece_before: float
    ece_after: float
    wrong: int

    @property
    def caution(self) -> str:
        """A sentence on a fit that rests on few errors; empty where they are enough."""
        if self.wrong >= FEW_ERRORS:
            return ""
        count = f"{self.wrong or 'no'} wrong prediction{'' if self.wrong == 1 else 's'} among {self.n}"
        return f"the scaling rests on {count}: what it does to new data is uncertain, and a larger split would tell"


class FewErrorsWarning(UserWarning):
    """A map was fitted on fewer than `FEW_ERRORS` wrong predictions."""


class Scaling:
    """A map of predictions fitted on a held-out split: `fit(p)`, then `apply(q)`. What all the maps share.

    Attributes:
        saved: the attributes that a fitted map consists of: numbers, tuples of numbers, tensors, other maps.
        shown: the map in a line.
    """

    saved: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[str] = ""
    report: FitReport | None = None
    _n_classes: int | None = None

    def fit(self, p: Predictions) -> Self:
        """Fit on `p`; returns self. Refitting starts afresh. `FewErrorsWarning` below 10 wrong ones."""
        require_predictions("p", p)
        self._n_classes = p.n_classes
        self._fit(p)
        after = self._map(p)
        wrong = len(p) - int(p.correct.sum())
        self.report = FitReport(len(p), nll(p), nll(after), ece(p), ece(after), wrong)
        if self.report.caution:
            warnings.warn(f"{type(self).__name__}: {self.report.caution}", FewErrorsWarning, stacklevel=2)
        return self

    def apply(self, p: Predictions) -> Predictions:
        """The predictions with mapped scores, same labels. Raises InputError before `fit` or for another K."""
        require_predictions("p", p)
        name = type(self).__name__
        require(self._n_classes is not None, f"{name} must be fitted before it is applied")
        require(
            p.n_classes == self._n_classes, f"p must have the {self._n_classes} classes of the fit, got {p.n_classes}"
        )
        return self._map(p)

    def predict_proba(self, logits: Any) -> Tensor:
        """Calibrated probabilities (N, K) of logits (N, K) without labels, on their device.

        Raises:
            InputError: before `fit`, for another K, and for what `Predictions.from_logits` refuses.
        """
        return self.apply(_unlabelled(logits)).probs

    def map_logits(self, logits: Any) -> Tensor:
        """Logits (N, K) whose softmax is `predict_proba` of the given ones."""
        return logits_of(self.apply(_unlabelled(logits)))

    def describe(self) -> str:
        """In words: the map, what it was fitted on, and the caution if that is little. After a fit."""
        assert self.report is not None
        text = f"{self.formula()}. Fitted on {self.report.n:,} validation predictions, {self.report.wrong:,} of them"
        text += " wrong."
        caution = self.report.caution
        return text + (f" {caution[0].upper()}{caution[1:]}." if caution else "")

    def formula(self) -> str:
        """The map in a line, for the foot of a table."""
        return f"{type(self).__name__}: {self.shown}"

    def arrays(self) -> dict[str, np.ndarray]:
        """The fitted map as arrays by name, of which `restore` makes it again.

        Raises:
            InputError: before `fit`.
        """
        require(self._n_classes is not None, f"{type(self).__name__} must be fitted before it is saved")
        out = {"n_classes": np.asarray(self._n_classes)} | self._arrays()
        return out if self.report is None else out | {"report": np.asarray(self.report, dtype=np.float64)}

    def restore(self, arrays: Mapping[str, Any]) -> Self:
        """Make this map the one that gave `arrays`; returns self.

        Raises:
            InputError: when one of them is missing.
        """
        self._restore(arrays)
        self._n_classes = int(_taken("n_classes", arrays))
        if "report" in arrays:
            report = FitReport(*np.asarray(arrays["report"]).tolist())
            self.report = report._replace(n=int(report.n), wrong=int(report.wrong))
        return self

    def _arrays(self) -> dict[str, np.ndarray]:
        out: dict[str, np.ndarray] = {}
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, Scaling):
                out |= {f"{name}.{key}": array for key, array in value._arrays().items()}
            else:
                out[name] = value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        return out

    def _restore(self, arrays: Mapping[str, Any]) -> None:
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, Scaling):
                start = f"{name}."
                value._restore({key.removeprefix(start): a for key, a in arrays.items() if key.startswith(start)})
                continue
            array = np.asarray(_taken(name, arrays))
            if isinstance(value, tuple):
                setattr(self, name, tuple(array.tolist()))
            else:
                setattr(self, name, torch.from_numpy(array.copy()) if array.ndim else array.item())

    def _fit(self, p: Predictions) -> None:
        raise NotImplementedError

    def _map(self, p: Predictions) -> Predictions:
        raise NotImplementedError

    def calibrated(self, z: Tensor) -> Tensor:
        """Probabilities (N, K), float64, of finite logits z (N, K), in operations that exporters can trace.

        Those of `predict_proba`, which checks its input and works through it in parts.
        """
        raise NotImplementedError


class Identity(Scaling):
    """Predictions as they are: what every other map has to beat."""

    shown = "the predictions as they are"

    def _fit(self, p: Predictions) -> None:
        pass

    def _map(self, p: Predictions) -> Predictions:
        return p

    def calibrated(self, z: Tensor) -> Tensor:
        return torch.softmax(z.double(), 1)


def logits_of(p: Predictions) -> Tensor:
    """Logits as given, or log p of predictions made from probabilities; (N, K)."""
    return p.probs.clamp(min=_TINY).log() if p.logits is None else p.logits


def _unlabelled(logits: Any) -> Predictions:
    """Logits as predictions whose labels mean nothing."""
    shape = np.shape(logits)
    return Predictions.from_logits(logits, torch.zeros(shape[0] if shape else 0, dtype=torch.int64))


def _taken(name: str, arrays: Mapping[str, Any]) -> Any:
    if name not in arrays:
        raise InputError(f"the map has no {name}; it has {', '.join(arrays) or 'nothing'}")
    return arrays[name]
