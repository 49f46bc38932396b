from __future__ import annotations

import pytest
import torch
from torch import nn

from metacal.errors import InputError
from metacal.optim import build_optimizer, parameter_groups


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
