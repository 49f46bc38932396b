"""Penalties by name: built with checked options, called as the training step calls them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from metacal.errors import InputError
from metacal.models import Backbone
from metacal.penalties import PENALTIES, Pixels, build_penalty

NAMES = ["robust_kl", "margin_smoothness", "margin_tail", "hessian_trace", "gn_trace", "mbls"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backbone", [True, False])
def test_each_is_a_scalar_of_the_parameters(name, backbone, batch):
    torch.manual_seed(0)
    x, y = batch
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    net[-1].weight.data.mul_(100)  # distances that mbls minds
    model = Backbone(net) if backbone else net
    logits, features = model(x) if backbone else (model(x), None)
    buffers = [b.clone() for b in net.buffers()]
    value = PENALTIES[name]()(model, x, y, logits, features)
    assert value.shape == () and math.isfinite(value.item())
    value.backward()
    assert any(p.grad is not None and bool((p.grad != 0).any()) for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), buffers))


def test_options_reach_the_penalty(batch):
    x, y = batch
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    logits = model(x)

    def value(name, **options):
        return build_penalty(name, options)(model, x, y, logits, None).item()

    assert value("margin_tail", temperature=2.0) != value("margin_tail")
    assert value("margin_tail", clip=0.0) < value("margin_tail")
    plain, robust = value("margin_tail"), value("margin_tail", robust=True, eps=0.1)
    assert plain == pytest.approx(value("margin_tail", robust=True, eps=0.0)) and robust > plain
    assert value("robust_kl", eps=0.2, alpha=0.1) > value("robust_kl")
    pixels = Pixels(0.0, 1.0)
    assert value("robust_kl", pixels=pixels) == pytest.approx(value("robust_kl"))
    assert value("hessian_trace", probes=2) == pytest.approx(value("gn_trace", probes=2))  # exact, and linear
    assert value("hessian_trace", loss="mse") != value("hessian_trace")
    assert value("mbls", margin=0.0) > value("mbls")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hessian_trac", {}, "did you mean 'hessian_trace'"),
        ("robust_kl", {"epss": 1}, "penalty robust_kl has no option 'epss'.*did you mean 'eps'"),
        ("margin_smoothness", {"eps": 1}, "it has units, pixels"),
        ("robust_kl", {"eps": -1}, "eps must be >= 0"),
        ("robust_kl", {"pixels": [0, 1]}, "pixels must be None"),
        ("margin_tail", {"temperature": 0}, "temperature must be > 0"),
        ("margin_tail", {"robust": "yes"}, "robust must be true or false"),
        ("margin_tail", {"eps": -1.0}, "eps must be >= 0"),
        ("hessian_trace", {"probes": 0}, "probes must be an integer >= 1"),
        ("gn_trace", {"batch": -3}, "batch must be an integer >= 1"),
        ("gn_trace", {"loss": "nll"}, "loss must be one of"),
        ("mbls", {"margin": "x"}, "margin must be >= 0"),
    ],
)
def test_bad_names_and_options_are_named_before_any_work(name, options, message):
    with pytest.raises(InputError, match=message):
        build_penalty(name, options)
