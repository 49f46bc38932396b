"""The signal-to-noise ratio of the hypergradient, and what is said of an outer problem that goes wrong."""

from __future__ import annotations

import copy

import torch
from bilevel_problems import make_problem

from metacal.bilevel import MetaStep
from metacal.bilevel.signal import Signal
from metacal.gamma import ScalarGamma
from metacal.training.outer_notes import OuterNotes


def test_the_ratio_is_that_of_the_averages() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(3, generator=generator).double() + 2 for _ in range(40)]
    signal = Signal()
    ratios = [float(signal.add([h[:1], h[1:]])) for h in drawn]
    assert ratios[0] == float("inf")
    all_of = torch.stack(drawn[:20])  # the first ones weigh alike
    mean, square = all_of.mean(0), all_of.square().sum(1).mean()
    assert abs(ratios[19] - float(mean.norm() / (square - mean.norm() ** 2).sqrt())) < 1e-12
    again = Signal()
    again.load_state_dict(copy.deepcopy(signal.state_dict()))
    assert float(again.add([drawn[0][:1], drawn[0][1:]])) == float(signal.add([drawn[0][:1], drawn[0][1:]]))


def test_noise_is_a_coin_toss_and_a_direction_is_none() -> None:
    generator = torch.Generator().manual_seed(1)
    noise, directed = Signal(), Signal()
    below = 0
    for _ in range(600):
        h = torch.randn(1, generator=generator)
        below += float(noise.add([h])) < Signal.COIN_TOSS
        ratio = float(directed.add([h + 0.5]))
    assert below > 0.9 * 600 * 0.95 and ratio > Signal.COIN_TOSS


def test_a_step_reports_its_ratio_and_the_gap() -> None:
    problem = make_problem("mlp")
    source = ScalarGamma().double()
    optimizer = torch.optim.SGD(problem.backbone.parameters(), lr=0.1)
    step = MetaStep(problem.backbone, optimizer, source, torch.optim.SGD(source.parameters(), lr=0.0), outer="nll")
    values = [step.step(problem.x, problem.y, problem.x_meta, problem.y_meta) for _ in range(3)]
    assert step.last is not None and step.last.meta_logits is not None
    confidence, predicted = step.last.meta_logits.softmax(1).max(1)
    gap = confidence.mean() - (predicted == problem.y_meta).double().mean()
    assert abs(values[-1]["meta_gap"] - float(gap)) < 1e-6
    assert values[-1]["hypergradient_snr"] > 0
    assert step.state_dict()["signal"]["count"] == 3


def test_each_thing_is_said_once() -> None:
    def after(steps: int, **values: float) -> list[str]:
        notes = OuterNotes(ScalarGamma(gamma_max=20.0))
        return [text for _ in range(steps) for text in notes.add(values)]

    stuck = {"meta_gap": 0.1, "gamma_mean": 3.0, "hypergradient_snr": 0.1}
    frozen, toss = after(200, **stuck)
    assert "stands still at 3" in frozen and "10.0 points overconfident" in frozen and "coin toss" in toss
    assert after(200, **(stuck | {"meta_gap": 0.001})) == []  # nothing is left to mend
    (cap,) = after(30, **(stuck | {"gamma_mean": 19.9}))
    assert "gamma.max=20" in cap
    assert after(200, loss=1.0) == []
