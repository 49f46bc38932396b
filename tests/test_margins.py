"""Margins against closed forms, and the theorems about calibration that they carry."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from metacal.errors import InputError
from metacal.margins import (
    ece_certificate,
    gamma_min,
    log_margin_moment,
    margin_moment,
    predicted_margin,
    robust_margin,
    true_margin,
)
from metacal.predictions import Predictions

LOGITS = torch.tensor([[3.0, 1.0, 2.5], [0.0, 4.0, 1.0], [2.0, 2.0, -1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1])


def test_margins_by_hand():
    torch.testing.assert_close(true_margin(LOGITS, LABELS), torch.tensor([0.5, -3.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(predicted_margin(LOGITS), torch.tensor([0.5, 3.0, 0.0], dtype=torch.float64))
    q = (math.exp(-0.5) + math.exp(3) + 1) / 3
    assert margin_moment(LOGITS, LABELS) == pytest.approx(q)
    assert log_margin_moment(LOGITS, LABELS) == pytest.approx(math.log(q))
    assert gamma_min(LOGITS, LABELS) == -3.0


def test_the_margin_is_differentiable():
    logits = LOGITS[:2].clone().requires_grad_()
    (grad,) = torch.autograd.grad(true_margin(logits, LABELS[:2]).sum(), logits)
    torch.testing.assert_close(grad, torch.tensor([[1.0, 0, -1], [0, -1, 1]], dtype=torch.float64))


@given(st.integers(1, 20), st.integers(2, 6), st.integers(0, 10**6))
def test_true_and_predicted_margin_agree_where_the_prediction_is_right(n, k, seed):
    g = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(n, k, generator=g), torch.randint(k, (n,), generator=g)
    m, hat = true_margin(logits, labels), predicted_margin(logits)
    right = logits.argmax(1) == labels
    assert (hat >= 0).all() and torch.equal(m[right], hat[right]) and (hat[~right] <= -m[~right]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_moment_does_not_overflow_before_it_must(dtype):
    logits = torch.tensor([[0.0, 200.0], [0.0, 200.0]], dtype=dtype)
    labels = torch.zeros(2, dtype=torch.long)
    assert margin_moment(logits, labels) == pytest.approx(math.exp(200))
    assert margin_moment(10 * logits, labels) == math.inf
    assert log_margin_moment(10 * logits, labels) == pytest.approx(2000)


def test_the_moment_is_the_same_in_chunks():
    logits, labels = torch.randn(5000, 1000), torch.randint(1000, (5000,))
    expected = true_margin(logits.double(), labels).neg().exp().mean().item()
    assert margin_moment(logits, labels) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------- robust


def linear(seed: int = 0, n: int = 6, d: int = 5, k: int = 3):
    torch.manual_seed(seed)
    return nn.Linear(d, k).double(), torch.randn(n, d, dtype=torch.float64), torch.randint(k, (n,))


@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("l2", 2)])
def test_a_linear_binary_model_has_the_exact_robust_margin(norm, order):
    model, x, y = linear(k=2)
    upper, first = robust_margin(model, x, y, eps=0.1, norm=norm, steps=5)
    weight = model.weight[0] - model.weight[1]
    exact = true_margin(model(x), y) - 0.1 * weight.norm(p=order)
    torch.testing.assert_close(first, exact.detach())
    torch.testing.assert_close(upper, exact.detach())


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_upper_estimate_lies_between_the_minimum_of_a_search_and_the_margin(norm, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    x, y, eps = torch.randn(8, 2, dtype=torch.float64), torch.randint(3, (8,)), 0.3
    upper, _ = robust_margin(model, x, y, eps, norm=norm, steps=steps)
    clean = true_margin(model(x), y).detach()
    square = torch.cartesian_prod(*[torch.linspace(-eps, eps, 61, dtype=torch.float64)] * 2)
    ball = square if norm == "linf" else square[square.norm(dim=1) <= eps]
    points = (x[:, None] + ball).flatten(0, 1)
    least = true_margin(model(points), y.repeat_interleave(len(ball))).view(8, -1).min(1).values.detach()
    assert (upper <= clean).all() and (upper < clean).any()
    assert (upper >= least - 0.02).all()  # 0.02: the grid of the search


def test_eps_zero_gives_the_margin_itself():
    model, x, y = linear()
    upper, first = robust_margin(model, x, y, eps=0.0)
    clean = true_margin(model(x), y).detach()
    assert torch.equal(upper, clean) and torch.equal(first, clean)


def test_perturbed_inputs_stay_valid_and_in_the_ball():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(x.detach().clone())
            return x.flatten(1) @ torch.ones(12, 3).cumsum(1)

    for norm in ("linf", "l2"):
        seen.clear()
        x = torch.rand(4, 3, 2, 2)
        robust_margin(Spy(), x, torch.tensor([0, 1, 2, 0]), eps=0.2, norm=norm, steps=4, clip=(0.0, 1.0))
        assert len(seen) == 5
        for at in seen:
            delta = (at - x).flatten(1)
            assert at.min() >= 0 and at.max() <= 1
            assert (delta.abs().amax(1) if norm == "linf" else delta.norm(dim=1)).max() <= 0.2 + 1e-6


def test_model_gradients_buffers_and_modes_are_untouched():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 3))
    model[2].eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    for grad in (None, torch.ones(3)):
        model[4].bias.grad = grad
        with torch.no_grad():
            one = robust_margin(model, x, y, 0.1)
        with torch.inference_mode():
            two = robust_margin(model, x, y, 0.1)
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and not one[0].requires_grad
        assert model[4].bias.grad is grad and model[0].weight.grad is None and x.grad is None
    assert [m.training for m in model] == [True, True, False, True, True] and model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_modes_return_when_the_model_fails():
    model = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        robust_margin(model, torch.randn(2, 5), torch.tensor([0, 1]), 0.1)
    assert model.training


def test_a_backbones_logits_are_taken():
    model, x, y = linear()
    torch.testing.assert_close(robust_margin(lambda t: (model(t), t), x, y, 0.1)[0], robust_margin(model, x, y, 0.1)[0])


# -------------------------------------------------------------------------------------------- certificates


@st.composite
def predictions(draw):
    n, k = draw(st.integers(1, 60)), draw(st.integers(2, 8))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = draw(st.sampled_from([0.01, 1.0, 5.0, 30.0])) * torch.randn(n, k, generator=g, dtype=torch.float64)
    labels = torch.randint(k, (n,), generator=g)
    if draw(st.booleans()):
        labels = logits.argmax(1)
    return logits, labels


@given(predictions(), st.sampled_from([1, 15, 100]))
def test_theorems_on_random_logits(data, n_bins):
    logits, labels = data
    k = logits.shape[1]
    p = Predictions.from_logits(logits, labels)
    c = ece_certificate(p, n_bins=n_bins)
    q = margin_moment(logits, labels)
    miss = (1 - logits.softmax(1).gather(1, labels[:, None])).mean().item()
    slack = 1e-12
    assert c.mean_miss == pytest.approx(miss, abs=1e-12) and c.upper == pytest.approx((k - 1) * q)
    assert c.value <= miss + slack and miss <= (k - 1) * q * (1 + 1e-9) + slack
    if gamma_min(logits, labels) > 0:
        assert c.lower == pytest.approx(q / k)
        assert q / k <= c.value * (1 + 1e-9) + slack
        assert c.value == pytest.approx(miss, abs=1e-12)
    else:
        assert c.lower == 0
    assert (not c.violated and c.ratio_miss >= 1 - 1e-6 and 0 <= c.ratio_lower <= 1 + 1e-6) or c.value < 1e-6


@given(predictions())
def test_probabilities_give_the_certificate_of_their_logits(data):
    logits, labels = data
    if logits.abs().max() > 40:
        return  # where 1 − p rounds to 0 the logits cannot be had back
    a = ece_certificate(Predictions.from_logits(logits, labels))
    b = ece_certificate(Predictions.from_probabilities(logits.softmax(1), labels))
    assert not b.violated
    assert b.value == pytest.approx(a.value, abs=1e-9) and b.q == pytest.approx(a.q, rel=1e-6)


def test_probabilities_of_zero_and_one():
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    right = ece_certificate(Predictions.from_probabilities(probs, torch.tensor([0, 1])))
    assert (right.value, right.upper, right.lower, right.gamma_min) == (0.0, 0.0, 0.0, math.inf)
    assert not right.violated and right.ratio_upper == 1.0
    wrong = ece_certificate(Predictions.from_probabilities(probs, torch.tensor([0, 0])))
    assert wrong.value == 0.5 and wrong.upper == math.inf and not wrong.violated


def test_rounded_rows_do_not_count_as_violations():
    torch.manual_seed(0)
    logits = torch.randn(200, 10)
    for labels in (logits.argmax(1), torch.randint(10, (200,))):
        probs = logits.softmax(1).half()
        assert not ece_certificate(Predictions.from_probabilities(probs, labels)).violated


def test_a_false_certificate_is_recognised():
    honest = ece_certificate(Predictions.from_logits(LOGITS, LABELS))
    fields = {n: getattr(honest, n) for n in ("value", "mean_miss", "upper", "lower", "q", "gamma_min", "slack")}
    for change in ({"value": 1.1}, {"upper": 0.1}, {"lower": 0.9}):
        assert type(honest)(**{**fields, **change}).violated
    assert not honest.violated


def test_theorems_hold_along_the_training_of_a_small_net():
    torch.manual_seed(0)
    x = torch.randn(120, 6)
    y = (x @ torch.randn(6, 4)).argmax(1)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    smallest = []
    for _ in range(200):
        p = Predictions.from_logits(net(x).detach(), y)
        certificate = ece_certificate(p)
        assert not certificate.violated
        smallest.append(certificate.gamma_min)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert smallest[0] < 0 < smallest[-1]  # both theorems were put to the test
    assert certificate.lower > 0


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eps": -0.1}, "eps must be >= 0, got -0.1"),
        ({"eps": math.nan}, "eps must be >= 0"),
        ({"norm": "l1"}, "norm must be 'linf' or 'l2', got 'l1'"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"step_size": 0.0}, "step_size must be > 0, got 0.0"),
        ({"clip": (1.0, 0.0)}, "clip must be"),
    ],
)
def test_bad_arguments_of_robust_margin_are_named(keys, message):
    model, x, y = linear()
    with pytest.raises(InputError, match=message):
        robust_margin(model, x, y, **{"eps": 0.1, **keys})
    with pytest.raises(InputError, match="x must be floating point"):
        robust_margin(model, x.long(), y, 0.1)


def test_bad_logits_and_labels_are_named():
    for f in (true_margin, margin_moment, gamma_min):
        with pytest.raises(InputError, match="logits must be"):
            f(LOGITS.long(), LABELS)
        with pytest.raises(InputError, match="labels must be"):
            f(LOGITS, LABELS[:2])
    with pytest.raises(InputError, match="K >= 2"):
        predicted_margin(LOGITS[:, :1])
