"""Losses and sources other than focal and the gamma-net, learned through the bilevel step."""

from __future__ import annotations

import copy

import pytest
import torch
from bilevel_problems import K, Problem, make_problem
from reference.hyper import central_differences
from torch import nn
from torch.optim import SGD, Adam

from metacal import losses
from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import dece
from metacal.gamma import AdaFocal, LearnedSmoothing, ScalarGamma

SOURCES = {
    "one smoothing": ("label_smoothing", lambda: LearnedSmoothing(init=0.3)),
    "one smoothing per class": ("label_smoothing", lambda: LearnedSmoothing(True, K, init=0.3)),
    "one gamma": ("focal", lambda: ScalarGamma(2.0)),
    "dual focal": ("dual_focal", lambda: ScalarGamma(2.0)),
    "inverse focal": ("inverse_focal", lambda: ScalarGamma(2.0)),
}


def step_of(problem: Problem, loss: str, source: nn.Module, engine: str = "forward") -> MetaStep:
    optimizer = SGD(problem.backbone.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    return MetaStep(problem.backbone, optimizer, source, None, outer=dece, engine=engine, loss=losses.LOSSES[loss])


@pytest.mark.parametrize("engine", ["forward", "reverse", "higher"])
@pytest.mark.parametrize("name", SOURCES)
def test_hypergradient_by_central_differences(name: str, engine: str) -> None:
    loss, make = SOURCES[name]
    problem, source = make_problem("mlp"), make().double()
    with torch.no_grad():
        source.score.add_(torch.linspace(-0.4, 0.5, max(source.score.numel(), 1)).view_as(source.score))
    meta = step_of(problem, loss, source, engine)
    meta.step(problem.x, problem.y)  # so that the momentum is not zero

    def value() -> float:
        """The outer objective after one step of a copy, with the loss written out."""
        backbone, optimizer = copy.deepcopy((problem.backbone, meta.optimizer))
        third = source(None, labels=problem.y).detach().expand(len(problem.y))
        p, y = backbone(problem.x)[0].softmax(1), problem.y
        p_y = p[torch.arange(len(y)), y]
        if loss == "label_smoothing":
            target = (1 - third[:, None]) * torch.eye(K).double()[y] + third[:, None] / K
            terms = -(target * p.log()).sum(1)
        elif loss == "dual_focal":
            below = torch.stack(
                [max([q for q in row if q < row[k]], default=row.new_zeros(())) for row, k in zip(p, y)]
            )
            terms = -((1 - p_y + below) ** third) * p_y.log()
        else:
            terms = -((1 - p_y if loss == "focal" else 1 + p_y) ** third) * p_y.log()
        optimizer.zero_grad()
        terms.mean().backward()
        optimizer.step()
        with torch.no_grad():
            return float(dece(backbone(problem.x_meta)[0], problem.y_meta))

    truth = central_differences(value, list(source.parameters()))
    (found,) = meta.hypergradient(*problem.batches)
    assert truth.norm() > 1e-6
    assert (found.flatten() - truth).norm() < 1e-6 * truth.norm()


@pytest.mark.parametrize("per_class", [False, True])
def test_the_outer_loop_moves_the_smoothing(per_class: bool) -> None:
    problem = make_problem("mlp")
    source = LearnedSmoothing(per_class, K).double()
    optimizer = SGD(problem.backbone.parameters(), lr=0.2)
    meta = MetaStep(
        problem.backbone,
        optimizer,
        source,
        Adam(source.parameters(), lr=0.1),
        outer={"nll": 1.0, "dece": 0.5},
        loss=losses.label_smoothing,
    )
    start = source.score.detach().clone()
    for _ in range(5):
        found = meta.step(*problem.batches)
    assert found["hypergradient_norm"] > 0
    assert (source.score != start).all()
    alpha = meta.last.gamma
    assert ((alpha > 0) & (alpha < 1)).all()
    assert alpha.shape == ((len(problem.y),) if per_class else ())


def test_a_step_with_adafocal_is_plain_training_with_its_gammas() -> None:
    problem = make_problem("mlp")
    source = AdaFocal(n_bins=3)
    source.gammas.copy_(torch.tensor([-1.5, 0.5, 4.0]))
    twin = copy.deepcopy(problem.backbone)
    gamma = source(None, logits=twin(problem.x)[0], labels=problem.y)
    assert len(gamma.unique()) > 1
    meta = step_of(problem, "adafocal", source)
    found = meta.step(problem.x, problem.y)
    loss = losses.adafocal(twin(problem.x)[0], problem.y, gamma).mean()
    optimizer = SGD(twin.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    loss.backward()
    optimizer.step()
    assert found["loss"] == pytest.approx(loss.item())
    for p, q in zip(problem.backbone.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
