"""Tangents carried forward give what the reverse sweep over the same steps gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bilevel_problems import make_problem
from horizon_problems import OPTIMIZERS, batches_of, by_differences, by_sweep, error, optimizer_of, settled
from torch import Tensor
from torch.optim import SGD, Optimizer

from metacal.bilevel import MetaStep
from metacal.errors import InputError
from metacal.gamma import GammaNet, ScalarGamma
from metacal.optim import SAM, BulkSGD


def by_tangents(problem: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]], **keys: Any) -> Tensor:
    return by_sweep(problem, optimizer, batches, engine="tangent", horizon=1, **keys)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, clip_norm: float | None) -> None:
    problem, optimizer = settled("mlp", name)
    batches = batches_of(problem, 4)
    tangents = by_tangents(problem, optimizer, batches, clip_norm=clip_norm)
    assert error(tangents, by_sweep(problem, optimizer, batches, clip_norm=clip_norm)) < 1e-9


@pytest.mark.parametrize("net", ["cnn", "dropout", "attention", "tied", "frozen"])
def test_networks_and_the_discount(net: str) -> None:
    problem, optimizer = settled(net, "nesterov")
    batches = batches_of(problem, 3)
    tangents = by_tangents(problem, optimizer, batches, horizon_decay=0.8)
    assert error(tangents, by_sweep(problem, optimizer, batches, horizon_decay=0.8)) < 1e-9


def test_from_the_first_step_on_with_penalties() -> None:
    for name in ("momentum", "adam", "muon"):
        problem = make_problem("mlp")
        problem.gamma_net = settled("mlp", "sgd")[0].gamma_net
        optimizer = optimizer_of(name, problem.backbone)
        batches = batches_of(problem, 3)
        tangents = by_tangents(problem, optimizer, batches)
        assert error(tangents, by_differences(problem, optimizer, batches)) < 1e-6
        penalties = {"margin_tail": 0.3, "soft_ece": 0.2}
        tangents = by_tangents(problem, optimizer, batches, penalties=penalties)
        assert error(tangents, by_sweep(problem, optimizer, batches, penalties=penalties)) < 1e-9


@pytest.mark.parametrize("name", ["sam", "bulk"])
def test_optimizers_made_of_others(name: str) -> None:
    problem, base = settled("mlp", "momentum")
    if name == "sam":
        optimizer: Optimizer = SAM(base, rho=0.05)
    else:
        optimizer = BulkSGD(problem.backbone.parameters(), lr=0.1, model=problem.backbone, k=2, momentum=0.9, every=100)
        MetaStep(problem.backbone, optimizer, problem.gamma_net, None).step(problem.x, problem.y)
    batches = batches_of(problem, 3)
    assert error(by_tangents(problem, optimizer, batches), by_sweep(problem, optimizer, batches)) < 1e-8


def training(problem: Any) -> tuple[MetaStep, torch.optim.Optimizer]:
    source = ScalarGamma(tau=0.1).double()
    optimizer = SGD(problem.backbone.parameters(), lr=0.1, momentum=0.9)
    meta_optimizer = torch.optim.SGD(source.parameters(), lr=0.0)
    step = MetaStep(
        problem.backbone, optimizer, source, meta_optimizer, outer="nll", engine="tangent", every=2, horizon_decay=0.9
    )
    return step, optimizer


def test_looks_back_over_the_outer_steps_and_a_checkpoint_carries_the_tangents() -> None:
    problem = make_problem("mlp")
    batches = batches_of(problem, 6)
    step, optimizer = training(problem)
    sweep = MetaStep(
        *copy.deepcopy((problem.backbone, optimizer, step.gamma_net)), None, outer="nll", every=6, horizon=6,
        horizon_decay=0.9,
    )  # fmt: skip
    truth = sweep.hypergradient([x for x, _ in batches], [y for _, y in batches], problem.x_meta, problem.y_meta)
    for x, y in batches[:3]:
        step.step(x, y, problem.x_meta, problem.y_meta)
    assert step.resting
    kept = copy.deepcopy((problem.backbone.state_dict(), optimizer.state_dict(), step.state_dict()))

    def norm_after_the_rest() -> float:
        values = [step.step(x, y, problem.x_meta, problem.y_meta) for x, y in batches[3:]]
        return values[-1]["hypergradient_norm"]

    norm = norm_after_the_rest()
    assert norm == pytest.approx(float(truth[0].abs()), rel=1e-9)
    problem.backbone.load_state_dict(kept[0])
    step, optimizer = training(problem)
    optimizer.load_state_dict(kept[1])
    step.load_state_dict(kept[2])
    assert norm_after_the_rest() == norm


def test_a_source_of_many_parameters_is_refused() -> None:
    problem = make_problem("mlp")
    source = GammaNet(5, hidden=64)
    optimizer = SGD(problem.backbone.parameters(), lr=0.1)
    with pytest.raises(InputError, match="at most 128 parameters, got 449: use engine 'forward' with a horizon"):
        MetaStep(problem.backbone, optimizer, source, SGD(source.parameters(), lr=0.1), outer="nll", engine="tangent")
