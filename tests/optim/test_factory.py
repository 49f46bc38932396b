from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from metacal import Backbone
from metacal.errors import InputError
from metacal.optim import backbone_optimizer, build_optimizer, parameter_groups
from metacal.optim.basic import slow_head


def test_norm_and_bias_may_go_without_weight_decay():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    (everything,) = parameter_groups(net, 0.1)
    assert len(everything["params"]) == 6
    decayed, free = parameter_groups(net, 0.1, decay_norm_and_bias=False)
    assert decayed["weight_decay"] == 0.1 and {p.ndim for p in decayed["params"]} == {2}
    assert free["weight_decay"] == 0 and {p.ndim for p in free["params"]} == {1}


def test_frozen_parameters_stay_out():
    net = nn.Linear(3, 4)
    net.bias.requires_grad_(False)
    (group,) = parameter_groups(net, 0.0)
    assert group["params"] == [net.weight]
    net.weight.requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        parameter_groups(net, 0.0)


@pytest.mark.parametrize("decay_norm_and_bias", [True, False])
def test_a_slow_head_is_a_scale_of_the_logits_under_sgd(decay_norm_and_bias):
    torch.manual_seed(0)
    x, y = torch.randn(20, 3).double(), torch.arange(20) % 4
    slow = Backbone(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double())
    scaled = copy.deepcopy(slow)
    slow_head(slow.head, 1 / 16)
    options = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.02, "decay_norm_and_bias": decay_norm_and_bias}
    for net, scale, head_lr in ((slow, 1.0, 1 / 16), (scaled, 0.25, 1.0)):
        optimizer = backbone_optimizer(net, "sgd", head_lr=head_lr, **options)
        for _ in range(30):
            optimizer.zero_grad()
            cross_entropy(scale * net(x)[0], y).backward()
            optimizer.step()
    torch.testing.assert_close(slow(x)[0], 0.25 * scaled(x)[0], rtol=0, atol=1e-13)


def test_the_rate_of_a_head_needs_a_head():
    net = Backbone(nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert backbone_optimizer(net, "sam", base="adam", lr=0.1, head_lr=0.25).param_groups[1]["lr"] == 0.025
    with pytest.raises(InputError, match=r"optimizer\.head_lr must be 1 under muon, whose head has rest_lr, got 0\.25"):
        backbone_optimizer(net, "muon", head_lr=0.25)
    with pytest.raises(InputError, match=r"head_lr must be 1 for a model without a `head`, got 0\.25"):
        backbone_optimizer(nn.Linear(3, 2), "sgd", head_lr=0.25)
    with pytest.raises(InputError, match=r"optimizer\.head_lr needs a model, got 0\.25"):
        build_optimizer("sgd", net.parameters(), 0.1, head_lr=0.25)
    with pytest.raises(InputError, match=r"optimizer\.head_lr must be > 0, got 0"):
        backbone_optimizer(net, "sgd", head_lr=0)


def test_names_and_settings():
    p = [nn.Parameter(torch.zeros(2))]
    sgd = build_optimizer("sgd", p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    assert isinstance(sgd, torch.optim.SGD)
    assert {k: sgd.defaults[k] for k in ("lr", "momentum", "nesterov", "weight_decay")} == {
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.01,
    }
    adamw = build_optimizer("adamw", p, 1e-3, betas=[0.8, 0.9], eps=1e-6, amsgrad=True)
    assert type(adamw) is torch.optim.AdamW and adamw.defaults["betas"] == (0.8, 0.9) and adamw.defaults["amsgrad"]
    assert type(build_optimizer("adam", p, 1e-3)) is torch.optim.Adam
    with pytest.raises(InputError, match="did you mean 'adamw'"):
        build_optimizer("adamww", p, 0.1)
    with pytest.raises(InputError, match=r"optimizer\.lr must be >= 0"):
        build_optimizer("sgd", p, -0.1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": np.float64(0.9), "weight_decay": np.float32(0.1)}),
        ("adamw", {"betas": (np.float32(0.9), 0.99), "eps": np.float64(1e-8)}),
        ("muon", {"momentum": np.float64(0.9), "rest_lr": np.float32(0.1)}),
        ("sam", {"rho": torch.tensor(0.1), "base": "adam"}),
        ("bulk_sgd", {"k": np.int64(2), "tolerance": np.float32(0.01)}),
    ],
)
@pytest.mark.parametrize("rate", [np.float32(0.1), torch.tensor(0.1)])
def test_options_may_be_numbers_of_numpy_or_tensors(name, options, rate):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = backbone_optimizer(net, name, lr=rate, **options)
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    if name == "bulk_sgd":
        optimizer.prepare(x, y)
    nn.functional.cross_entropy(net(x), y).backward()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(net.parameters(), before))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"lr": torch.tensor(-0.1)}, r"optimizer\.lr must be >= 0, got -0\.1"),
        ("sgd", {"momentun": 0.9}, "optimizer sgd has no option 'momentun' .did you mean 'momentum'"),
        ("sgd", {"nesterov": True, "momentum": 0.0}, r"optimizer\.nesterov=true needs momentum > 0"),
        ("sam", {"base": "gd"}, "base must be one of sgd, adam, adamw, muon, got 'gd'"),
        ("bulk_sgd", {"k": 1.5}, r"optimizer\.k must be an integer >= 1, got 1\.5"),
        ("adam", {"betas": [0.9]}, r"optimizer\.betas must be two numbers in \[0, 1\), got \[0\.9\]"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(InputError, match=message):
        backbone_optimizer(nn.Linear(3, 2), name, **options)
