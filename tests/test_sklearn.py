"""`CalibratedClassifier` is a scikit-learn estimator: its own checks, pipelines, grids, labels of any type."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import metacal
import metacal.training.fit as home
from metacal.config import Config
from metacal.config.compose import compose
from metacal.errors import InputError
from metacal.sklearn import CalibratedClassifier

X, CODES = make_blobs(240, n_features=2, centers=3, cluster_std=2.0, random_state=0)
NAMES = np.array(["eel", "cat", "dog"])[CODES]
KEYS: dict[str, Any] = {"method": "focal", "epochs": 3, "optimizer": "adam", "lr": 0.05, "random_state": 0}


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes longer than such a training, and most of these are made from the same words."""
    monkeypatch.setattr(home, "compose", _remembered)


_KNOWN: dict[tuple[str, ...], Config] = {}


def _remembered(words: Sequence[str]) -> Config:
    if tuple(words) not in _KNOWN:
        _KNOWN[tuple(words)] = compose(words)
    return copy.deepcopy(_KNOWN[tuple(words)])


@parametrize_with_checks([CalibratedClassifier(method="cross_entropy", epochs=4, optimizer="adam", lr=0.05)])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    """All of them apply; two are skipped by scikit-learn itself, without pandas and without SCIPY_ARRAY_API."""
    check(estimator)


def net(n_features: int, n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_features, 8), nn.Tanh(), nn.Linear(8, n_classes))


def test_labels_modules_and_seeds() -> None:
    torch.manual_seed(0)
    module = net(2, 3)
    before = copy.deepcopy(module.state_dict())
    for given in (None, net, module):
        first = CalibratedClassifier(given, **KEYS)
        assert first.fit(X, NAMES) is first and first.classes_.tolist() == ["cat", "dog", "eel"]
        second = clone(first).fit(X, NAMES)
        p = first.predict_proba(X)
        assert p.shape == (240, 3) and np.array_equal(p, second.predict_proba(X)), "a seed gives one model"
        assert np.array_equal(first.predict(X), first.classes_[p.argmax(1)]) and first.score(X, NAMES) > 0.5
        np.testing.assert_allclose(np.exp(first.predict_log_proba(X)), p, rtol=1e-6)
        assert np.array_equal(pickle.loads(pickle.dumps(first)).predict_proba(X), p)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values())), "it was copied"
    numbers = CalibratedClassifier(**KEYS).fit(X, 10 * CODES - 5)
    assert set(numbers.predict(X)) <= {-5, 5, 15} and np.isfinite(numbers.predict_proba(1e6 * X)).all()
    assert isinstance(first.model_, metacal.CalibratedModel) and len(first.history_) == 3
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    CalibratedClassifier(**KEYS).fit(X, NAMES)
    assert torch.equal(torch.rand(1), expected), "torch's generator is somebody else's"


def test_pipelines_and_searches() -> None:
    pipeline = make_pipeline(StandardScaler(), CalibratedClassifier(**KEYS))
    scores = cross_val_score(pipeline, X, NAMES, scoring="neg_log_loss", cv=3, error_score="raise")
    assert (scores > -1.0).all()
    search = GridSearchCV(pipeline, {"calibratedclassifier__lr": [1e-6, 0.05]}, cv=2, scoring="neg_log_loss")
    assert search.fit(X, NAMES).best_params_ == {"calibratedclassifier__lr": 0.05}
    assert log_loss(NAMES, search.predict_proba(X)) < 1.0
    with pytest.raises(ValueError, match="Invalid parameter"):
        pipeline.set_params(calibratedclassifier__speed=3)


def test_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame, labels = pandas.DataFrame(X, columns=["a", "b"]), pandas.Series(NAMES, dtype="category")
    classifier = CalibratedClassifier(**KEYS).fit(frame, labels)
    assert classifier.feature_names_in_.tolist() == ["a", "b"] and classifier.n_features_in_ == 2
    assert set(classifier.predict(frame)) <= set(NAMES)
    with pytest.raises(ValueError, match="feature names"):
        classifier.predict(frame[["b", "a"]])


def test_what_cannot_be_used() -> None:
    for module, keys, message in (
        (3, {}, "module must be a torch.nn.Module, a function or None, got 3"),
        (net(2, 4), {}, "module has 4 outputs, and y has 3 classes"),
        (None, {"method": "focl"}, "method must be one of .*did you mean 'focal'"),
        (None, {"epochs": 0}, "epochs must be >= 1, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            CalibratedClassifier(module, **KEYS | keys).fit(X, NAMES)
    with pytest.raises(InputError, match="y must have at least 2 classes, got 1 class: "):
        CalibratedClassifier(**KEYS).fit(X, np.zeros(240))
