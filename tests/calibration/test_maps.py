"""The maps beyond temperature against scipy and scikit-learn, their choice by cross-validation, and their files."""

from __future__ import annotations

import importlib.util
import math
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import CubicHermiteSpline
from scipy.optimize import minimize
from scipy.special import expit, log_softmax
from sklearn import datasets
from sklearn.linear_model import LogisticRegression

from metacal.calibration import (
    SCALINGS,
    BetaScaling,
    EnsembleTemperatureScaling,
    SplineScaling,
    TemperatureScaling,
    choose_scaling,
    cross_fitted,
    fit_scaling,
    load_scaling,
    nll,
    save_scaling,
)
from metacal.errors import InputError
from metacal.predictions import Predictions

pytestmark = pytest.mark.filterwarnings("ignore:.*the scaling rests on")  # small on purpose


def split(n: int = 400, k: int = 4, seed: int = 0, scale: float = 2.0, flips: float = 0.1) -> Predictions:
    """Overconfident logits, and labels some of which are drawn at random."""
    rng = np.random.default_rng(seed)
    z = scale * rng.normal(size=(n, k))
    labels = np.array([rng.choice(k, p=np.exp(row)) for row in log_softmax(z / 2, 1)])
    random = rng.random(n) < flips
    labels[random] = rng.integers(0, k, random.sum())
    return Predictions.from_logits(z, labels)


def test_mixture_weights_are_the_maximum_that_scipy_finds() -> None:
    for seed, shrink in ((0, False), (1, False), (2, True)):
        p = split(seed=seed)
        ets = EnsembleTemperatureScaling(shrink).fit(p)
        t = TemperatureScaling(shrink).fit(p).temperature
        z, y = p.logits.numpy(), p.labels.numpy()
        parts = np.stack([np.exp(log_softmax(z / t, 1)), np.exp(log_softmax(z, 1)), np.full_like(z, 1 / 4)])
        of_label = parts[:, np.arange(len(y)), y].T

        def loss(w: np.ndarray, of_label: np.ndarray = of_label, shrink: bool = shrink) -> float:
            return -np.log(of_label @ w).sum() - (60 * np.log(w[0]) if shrink else 0)

        best = minimize(
            loss, [0.4, 0.3, 0.3], bounds=[(1e-9, 1)] * 3, constraints={"type": "eq", "fun": lambda w: w.sum() - 1}
        )
        w = ets.weights.numpy()
        assert w.min() >= 0 and w.sum() == pytest.approx(1, abs=1e-14)
        assert loss(w) <= best.fun + 1e-6
        np.testing.assert_allclose(ets.apply(p).probs.numpy(), np.tensordot(w, parts, 1), rtol=1e-12)
        assert torch.equal(ets.apply(p).predicted, p.predicted)


def test_the_beta_map_of_two_classes_is_a_logistic_regression_on_log_p_and_log_not_p() -> None:
    p = split(k=2)
    beta = BetaScaling(shrink=False).fit(p)
    probs = p.probs.numpy()[:, 1]
    inputs = np.stack([np.log(probs), -np.log1p(-probs)], 1)
    regression = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(inputs, p.labels.numpy())
    assert regression.coef_.min() > 0  # else the paper sets one to 0
    a, b, c = beta.parameters[:, 0].numpy()
    np.testing.assert_allclose([math.exp(a), math.exp(b), c], [*regression.coef_[0], *regression.intercept_], rtol=1e-4)
    np.testing.assert_allclose(beta.apply(p).probs.numpy(), regression.predict_proba(inputs), atol=1e-5)


def test_the_beta_map_of_more_classes_is_the_minimum_that_scipy_finds() -> None:
    p = split(k=3)
    log_p, y = log_softmax(p.logits.numpy(), 1), p.labels.numpy()

    def probs(x: np.ndarray) -> np.ndarray:
        a, b, c = x.reshape(3, 3)
        q = expit(np.exp(a) * log_p - np.exp(b) * np.log1p(-np.exp(log_p)) + c)
        return q / q.sum(1, keepdims=True)

    best = minimize(lambda x: -np.log(probs(x)[np.arange(len(y)), y]).mean(), np.zeros(9), tol=1e-12)
    beta = BetaScaling(shrink=False).fit(p)
    assert nll(beta.apply(p)) == pytest.approx(best.fun, abs=1e-8)
    np.testing.assert_allclose(beta.apply(p).probs.numpy(), probs(beta.parameters.numpy().ravel()), rtol=1e-10)


def test_the_spline_is_the_cubic_of_scipy_and_moves_the_top_class_only() -> None:
    p = split()
    spline = SplineScaling(shrink=False).fit(p)
    x, y = spline.knots.numpy(), spline.values.numpy()
    chords = np.diff(y) / np.diff(x)
    slopes = [chords[0], *2 / (1 / chords[1:] + 1 / chords[:-1]), chords[-1]]
    c = p.confidence.numpy()
    logit = np.log(c / (1 - c))
    expected = expit(CubicHermiteSpline(x, y, slopes)(logit))
    mapped = spline.apply(p)
    top = p.predicted[:, None]
    np.testing.assert_allclose(mapped.probs.gather(1, top).squeeze(1).numpy(), expected, rtol=1e-10)
    others = p.probs.scatter(1, top, 0)
    new = mapped.probs.scatter(1, top, 0)
    torch.testing.assert_close(new / new.sum(1, keepdim=True), others / others.sum(1, keepdim=True))
    beyond = Predictions.from_logits(
        torch.tensor([[x[-1] + 3.0, 0.0], [x[-1] + 4.0, 0.0]], dtype=torch.float64), [0, 0]
    )
    one = SplineScaling().restore({**spline.arrays(), "n_classes": 2}).map_logits(beyond.logits)
    slope = float((one[1, 0] - one[1, 1]) - (one[0, 0] - one[0, 1]))
    assert slope == pytest.approx(slopes[-1])  # a line beyond the last knot


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.booleans())
def test_a_spline_rises_and_no_map_raises_the_nll_of_its_own_split(seed: int, n: int, shrink: bool) -> None:
    p = split(n, 3, seed)
    spline = SplineScaling(shrink=shrink).fit(p)
    assert bool((spline.values.diff() > 0).all())
    grid = torch.linspace(-20, 20, 500, dtype=torch.float64)[grid_above(0.0)]
    logits = torch.stack([grid, *[torch.full_like(grid, -math.log(2))] * 2], 1)
    mapped = spline.map_logits(logits)
    assert bool(((mapped[:, 0] - mapped[:, 1]).diff() > -1e-9).all())
    for make in (SplineScaling, BetaScaling, EnsembleTemperatureScaling):
        assert nll(make(shrink=shrink).fit(p).apply(p)) <= nll(p) + 1e-7


def grid_above(low: float) -> torch.Tensor:
    return torch.linspace(-20, 20, 500, dtype=torch.float64) > low


def test_every_map_is_kept_bit_for_bit_in_a_file(tmp_path: Path) -> None:
    p, q = split(), split(seed=1)
    for name in SCALINGS:
        scaling = fit_scaling(p, name)
        save_scaling(scaling, tmp_path / f"{name}.npz")
        loaded = load_scaling(tmp_path / f"{name}.npz")
        assert type(loaded) is type(scaling) and loaded.report == scaling.report
        assert loaded.describe() == scaling.describe()
        assert torch.equal(loaded.apply(q).probs, scaling.apply(q).probs)
        assert torch.equal(scaling.predict_proba(q.logits), scaling.apply(q).probs)
        torch.testing.assert_close(scaling.map_logits(q.logits).softmax(1).double(), scaling.apply(q).probs)
        with pytest.raises(InputError, match="4 classes of the fit, got 3"):
            loaded.predict_proba(q.logits[:, :3])
    p.save(tmp_path / "p.npz")
    with pytest.raises(InputError, match="is no saved map; its arrays are: logits, labels"):
        load_scaling(tmp_path / "p.npz")
    np.savez(tmp_path / "half.npz", map="temperature", temperature=2.0)
    with pytest.raises(InputError, match="the map has no shrink"):
        load_scaling(tmp_path / "half.npz")
    with pytest.raises(InputError, match="must be fitted before it is saved"):
        save_scaling(TemperatureScaling(), tmp_path / "none.npz")


def test_the_choice_is_the_simplest_within_one_standard_error() -> None:
    p = split(300, flips=0.0)
    choice = choose_scaling(p, ["isotonic", "temperature", "none", "vector"])
    assert list(choice.nll) == ["none", "temperature", "vector", "isotonic"]  # from the simpler to the freer
    losses = {name: -cross_fitted(p, name).log_likelihood for name in choice.nll}
    best = min(losses, key=lambda name: float(losses[name].mean()))
    for name, loss in losses.items():
        assert choice.nll[name] == pytest.approx(float(loss.mean()))
        d = (loss - losses[best]).numpy()
        assert choice.behind[name] == pytest.approx((d.mean(), d.std(ddof=1) / math.sqrt(300)), abs=1e-15)
    assert choice.name == next(name for name, (mean, error) in choice.behind.items() if mean <= error)
    choice = choose_scaling(p, ["temperature", "none", "isotonic"])
    assert choice.name == "temperature"  # the truth is T = 2
    assert choice.scaling.temperature == TemperatureScaling().fit(p).temperature
    p = split(1500, flips=0.0, seed=5)
    calibrated = Predictions.from_logits(p.logits / 2, p.labels)
    assert choose_scaling(calibrated, ["none", "temperature", "ets", "beta"]).name == "none"
    biased = Predictions.from_logits(p.logits + torch.tensor([3.0, 0, 0, 0]), p.labels)
    assert choose_scaling(biased, ["none", "temperature", "vector", "dirichlet"]).name in ("vector", "dirichlet")
    assert "dirichlet" not in choose_scaling(p[:10]).nll  # fewer than K² predictions
    with pytest.raises(InputError, match=r"methods must be one of .*, got 'tempratur'.*did you mean 'temperature'"):
        choose_scaling(p, ["tempratur"])
    with pytest.raises(InputError, match="at least 2 predictions, got 1"):
        choose_scaling(p[:1])


def test_folds_hold_out_what_they_predict_and_every_class_alike() -> None:
    p = split(103)
    out = cross_fitted(p, "temperature", folds=5, seed=3)
    ratios = (p.logits - p.logits.amax(1, keepdim=True)) / out.logits
    temperature = ratios.nan_to_num(0).amax(1)  # of each row
    values = temperature.unique()
    groups = [(temperature - v).abs() < 1e-9 for v in values]
    folds = []
    while groups:  # rounding gives neighbours of one temperature
        rows = groups.pop()
        if not any(bool((rows & fold).any()) for fold in folds):
            folds.append(rows)
    assert sorted(int(f.sum()) for f in folds) == [20, 20, 21, 21, 21]
    for fold in folds:
        assert float(temperature[fold][0]) == pytest.approx(TemperatureScaling().fit(p[~fold]).temperature, rel=1e-9)
        for k in range(4):
            of_class = int((p.labels == k).sum())
            assert abs(int((p.labels[fold] == k).sum()) - of_class / 5) < 1
    assert torch.equal(cross_fitted(p, "temperature", seed=3).logits, out.logits)


def test_no_map_spoils_a_small_table() -> None:
    """A few of the tables of scripts/small_splits.py, which has them all."""
    file = Path(__file__).parents[2] / "scripts" / "small_splits.py"
    spec = importlib.util.spec_from_file_location("small_splits", file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    x, y = datasets.load_wine(return_X_y=True)
    for case, (model, n) in enumerate(script.CASES):
        if model.startswith("logistic"):
            table = script.measure("wine", model, n, x, y, case)
            for name, value in table.scaled.items():
                assert name == "T, ML" or value <= table.plain + script.LARGEST, (table, name)


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    """Whatever byte is wrong: of predictions as of a map."""
    p = Predictions.from_logits(torch.randn(60, 3), torch.arange(60) % 3)
    for load, write in (
        (Predictions.load, p.save),
        (load_scaling, partial(save_scaling, fit_scaling(p, "vector"))),
    ):
        file = tmp_path / "file.npz"
        write(file)
        whole = file.read_bytes()
        for i in range(0, len(whole), 5):
            file.write_bytes(whole[:i] + bytes([whole[i] ^ 255]) + whole[i + 1 :])
            with suppress(InputError):
                load(file)
