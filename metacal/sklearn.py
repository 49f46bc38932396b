"""`metacal.fit` as a scikit-learn classifier, for pipelines, cross-validation and grids.

from metacal.sklearn import CalibratedClassifier

classifier = make_pipeline(StandardScaler(), CalibratedClassifier(method="focal", epochs=20, random_state=0))
cross_val_score(classifier, X, y, scoring="neg_log_loss")
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from metacal.errors import require
from metacal.models import Backbone
from metacal.models.small import mlp
from metacal.names import DEFAULT_METHOD, MethodName, OptimizerName
from metacal.training.fit import fit

__all__ = ["CalibratedClassifier"]


class CalibratedClassifier(ClassifierMixin, BaseEstimator):
    """A network for calibrated probabilities of feature vectors, trained by `metacal.fit`.

    A stratified tenth of the training data is set aside to choose the epoch and to fit the temperature, and another for
    methods that learn their gammas, so a class needs some ten samples to be known to all of them. Features are used as
    they are: scale them in a pipeline.

    Args:
        module: a `torch.nn.Module` from (n, n_features) to logits (n, n_classes), which each `fit` copies; a function
            `(n_features, n_classes) -> module`; None: one hidden layer of 64 units.
        method: a name in `configs/method/`, as for `metacal.fit`.
        epochs, batch_size: of the training.
        optimizer: a name in `configs/optimizer/`; None: that of the method.
        lr, weight_decay: of the optimizer; None: its defaults.
        overrides: further keys, as for `metacal.fit`.
        device: auto, cpu, cuda, ...
        random_state: of initial weights, of what is set aside and of the order of samples: an int, a
            `numpy.random.RandomState`, or None for numpy's global generator.

    They are many because scikit-learn's grids set each of them by its name.

    Attributes:
        classes_: the labels (n_classes,), sorted, in the order of `predict_proba`.
        n_features_in_, feature_names_in_: of the training data.
        model_: the `metacal.CalibratedModel` with the weights of the best epoch, which saves and exports.
        history_: what each validation measured.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        method: MethodName = DEFAULT_METHOD,
        epochs: int = 30,
        batch_size: int = 128,
        optimizer: OptimizerName | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        overrides: Sequence[str] = (),
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.module = module
        self.method = method
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.overrides = overrides
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> CalibratedClassifier:
        """Train on features X (n, n_features) with labels y (n,) of any type.

        Raises:
            InputError: a ValueError, for what `metacal.fit` cannot use, and a module with another number of outputs.
        """
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        n_classes = len(self.classes_)
        require(n_classes >= 2, f"y must have at least 2 classes, got 1 class: {self.classes_[0]!r}")
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        network = self._network(n_classes, seed)
        outputs = Backbone(network).n_classes
        require(outputs == n_classes, f"module has {outputs} outputs, and y has {n_classes} classes")
        result = fit(
            network,
            (X, labels),
            method=self.method,
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=seed,
            optimizer=self.optimizer,
            lr=self.lr,
            weight_decay=self.weight_decay,
            overrides=list(self.overrides),
            device=self.device,
            progress=False,
        )
        self.model_, self.history_ = result.calibrated, result.history
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Calibrated probabilities (n, n_classes), in the order of `classes_`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False)
        return self.model_.predict_proba(X, ranged=False).cpu().numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms (n, n_classes)."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label (n,) of each row."""
        predicted = self.predict_proba(X).argmax(1)
        return self.classes_[predicted]

    def _network(self, n_classes: int, seed: int) -> nn.Module:
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        make = self.module if self.module is not None else _small
        require(callable(make), f"module must be a torch.nn.Module, a function or None, got {make!r}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make(self.n_features_in_, n_classes)


def _small(n_features: int, n_classes: int) -> nn.Module:
    return mlp(n_classes, (n_features,), hidden=(64,))
