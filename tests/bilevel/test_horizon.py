"""The hypergradient through K steps: central differences of the whole trajectory, and `higher` unrolled over it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bilevel_problems import make_problem
from horizon_problems import OPTIMIZERS, ByLabel, batches_of, by_differences, by_sweep, error, optimizer_of, settled
from reference.hyper import central_differences
from torch.optim import SGD, Optimizer

from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import nll
from metacal.errors import InputError
from metacal.gamma import ScalarGamma
from metacal.optim import SAM, BulkSGD


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, clip_norm: float | None) -> None:
    problem, optimizer = settled("mlp", name)
    batches = batches_of(problem, 5)
    slopes = by_sweep(problem, optimizer, batches, clip_norm=clip_norm)
    assert error(slopes, by_differences(problem, optimizer, batches, clip_norm=clip_norm)) < 1e-6


@pytest.mark.parametrize("steps", [2, 10])
@pytest.mark.parametrize("net", ["cnn", "dropout", "attention", "residual", "tied", "frozen"])
def test_networks(net: str, steps: int) -> None:
    problem, optimizer = settled(net, "nesterov")
    batches = batches_of(problem, steps)
    slopes = by_sweep(problem, optimizer, batches)
    assert error(slopes, by_differences(problem, optimizer, batches)) < (1e-6 if net != "residual" else 1e-5)


def test_from_the_first_step_on() -> None:
    """The momentum's first step is another one than those after it."""
    for name in ("momentum", "adam", "muon"):
        problem = make_problem("mlp")
        problem.gamma_net = ByLabel()
        optimizer = optimizer_of(name, problem.backbone)
        batches = batches_of(problem, 3)
        assert error(by_sweep(problem, optimizer, batches), by_differences(problem, optimizer, batches)) < 1e-6


def test_against_unrolling_with_penalties() -> None:
    problem, optimizer = settled("cnn", "nesterov")
    batches = batches_of(problem, 4)
    penalties = {"margin_tail": 0.3, "soft_ece": 0.2}
    slopes = by_sweep(problem, optimizer, batches, penalties=penalties, clip_norm=0.2)
    meta = MetaStep(
        problem.backbone, optimizer, problem.gamma_net, None, outer="nll", engine="higher", every=4,
        engine_options={"steps": 4}, penalties=penalties, clip_norm=0.2,
    )  # fmt: skip
    torch.manual_seed(11)
    truth = meta.hypergradient([x for x, _ in batches], [y for _, y in batches], problem.x_meta, problem.y_meta)
    assert error(slopes, torch.cat([h.flatten() for h in truth])) < 1e-9


@pytest.mark.parametrize(
    ("penalty", "net"),
    [(p, "mlp") for p in ("margin_smoothness", "hessian_trace", "robust_kl")]
    + [("margin_smoothness", net) for net in ("cnn", "vit")],  # whose third derivatives PyTorch has wrong
)
def test_penalties_that_run_the_network(penalty: str, net: str) -> None:
    """Against the same step of a copy, by central differences: the others need parameters that `higher` has not."""
    problem, optimizer = settled(net, "momentum")
    problem.x, problem.x_meta = problem.x.sigmoid(), problem.x_meta.sigmoid()
    batches = batches_of(problem, 3)
    keys: dict[str, Any] = {"penalties": {penalty: 0.3}}
    slopes = by_sweep(problem, optimizer, batches, **keys)

    def value() -> float:
        backbone, inner = copy.deepcopy((problem.backbone, optimizer))
        meta = MetaStep(backbone, inner, problem.gamma_net, None, outer="nll", **keys)
        torch.manual_seed(11)
        for x, y in batches:
            meta.step(x, y)
        with torch.no_grad():
            return float(nll(backbone(problem.x_meta)[0], problem.y_meta))

    truth = central_differences(value, list(problem.gamma_net.parameters()))
    assert error(slopes, truth) < 1e-6
    if penalty == "margin_smoothness":
        unrolled = {"horizon": 1, "engine": "higher", "engine_options": {"steps": 3}}
        assert error(by_sweep(problem, optimizer, batches, **keys, **unrolled), truth) < 1e-6


@pytest.mark.parametrize("name", ["sam", "bulk"])
def test_optimizers_made_of_others(name: str) -> None:
    """SAM with no radius is its base; BulkSGD against the projected steps themselves, the projection held."""
    problem, base = settled("mlp", "momentum")
    batches = batches_of(problem, 3)
    if name == "sam":
        optimizer: Optimizer = SAM(base, rho=0.0)
        truth = by_differences(problem, base, batches)
    else:
        optimizer = BulkSGD(problem.backbone.parameters(), lr=0.1, model=problem.backbone, k=2, momentum=0.9, every=100)
        MetaStep(problem.backbone, optimizer, problem.gamma_net, None).step(problem.x, problem.y)
        truth = by_differences(problem, optimizer, batches)
    assert error(by_sweep(problem, optimizer, batches), truth) < 1e-6


def test_one_step_is_the_plain_step() -> None:
    problem, optimizer = settled("cnn", "momentum")
    batch = batches_of(problem, 1)
    torch.testing.assert_close(by_sweep(problem, optimizer, batch), by_sweep(problem, optimizer, batch, horizon=1))


def test_a_discount_counts_older_steps_less() -> None:
    """dM/dφ is a polynomial in ρ whose coefficients are the steps' shares: three values give a fourth one."""
    problem, optimizer = settled("mlp", "momentum")
    batches = batches_of(problem, 3)
    rhos = [1.0, 0.5, 0.25, 0.8]
    values = torch.stack([by_sweep(problem, optimizer, batches, horizon_decay=rho) for rho in rhos])
    powers = torch.tensor([[rho**j for j in range(3)] for rho in rhos]).double()
    shares = torch.linalg.solve(powers[:3], values[:3])
    torch.testing.assert_close(powers[3] @ shares, values[3])
    assert (shares.norm(dim=1) > 0).all()


def test_windows_in_training() -> None:
    """Every fourth step learns from the last three, and moves the source by what `hypergradient` says."""
    problem, optimizer = settled("dropout", "momentum")
    source = problem.gamma_net
    meta = MetaStep(
        problem.backbone, optimizer, source, SGD(source.parameters(), lr=1.0), outer="nll", every=4, horizon=3
    )
    batches = batches_of(problem, 4)
    torch.manual_seed(3)
    meta.step(*batches[0])
    assert meta.resting
    expected = meta.hypergradient(
        [x for x, _ in batches[1:]], [y for _, y in batches[1:]], problem.x_meta, problem.y_meta
    )
    before = source.score.detach().clone()
    for x, y in batches[1:]:
        assert torch.equal(source.score, before)
        values = meta.step(x, y, problem.x_meta, problem.y_meta)
        assert meta.resting == (y is batches[-1][1])
    assert values["hypergradient_norm"] > 0
    torch.testing.assert_close(before - source.score.detach(), expected[0])


def test_with_outer_rate_zero_the_path_is_plain_training() -> None:
    finals = []
    for horizon in (None, 3):
        problem, optimizer = settled("dropout", "momentum")
        source = problem.gamma_net
        outer = None if horizon is None else SGD(source.parameters(), lr=0.0)
        keys = {} if horizon is None else {"every": 3, "horizon": horizon}
        meta = MetaStep(problem.backbone, optimizer, source, outer, outer="nll", **keys)
        torch.manual_seed(3)
        for x, y in batches_of(problem, 7):
            meta.step(x, y, problem.x_meta, problem.y_meta)
        finals.append(torch.cat([p.detach().flatten() for p in problem.backbone.parameters()]))
    assert torch.equal(*finals)


def test_bad_arguments() -> None:
    problem, optimizer = settled("mlp", "momentum")
    other = torch.optim.RMSprop(problem.backbone.parameters())
    with pytest.raises(InputError, match="got RMSprop: set horizon=1"):
        MetaStep(problem.backbone, other, ScalarGamma(1.0).double(), None, every=2, horizon=2)
    for keys, match in [
        ({"horizon": 3, "every": 2}, "horizon must be between 1 and every = 2 steps, got 3"),
        ({"horizon": 2, "every": 2, "engine": "reverse"}, "horizon > 1 needs engine 'forward'"),
        ({"horizon": 2, "every": 2, "horizon_decay": 0.0}, "horizon_decay must be in"),
    ]:
        with pytest.raises(InputError, match=match):
            MetaStep(problem.backbone, optimizer, ScalarGamma(1.0).double(), None, **keys)
