"""The hypergradient against central differences of the whole step, and against unrolling, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from bilevel_problems import NETS, Problem, make_problem
from reference.hyper import central_differences, outer_value
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from metacal import losses
from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import nll
from metacal.gamma import ScalarGamma

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.3),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "nesterov_bare": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "nesterov_groups": lambda p: SGD(
        [
            {"params": p[:2], "nesterov": True},
            {"params": p[2:4]},
            {"params": p[4:], "nesterov": True, "maximize": True},
        ],
        lr=0.05,
        momentum=0.9,
    ),
    "dampening": lambda p: SGD(p, lr=0.2, momentum=0.8, dampening=0.3, weight_decay=0.01),
    "groups": lambda p: SGD([{"params": p[::2], "lr": 0.3}, {"params": p[1::2]}], lr=0.05, momentum=0.5),
    "sgd_maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: Adam(p, lr=0.02),
    "adam_l2": lambda p: Adam(p, lr=0.02, weight_decay=0.1, eps=1e-3),
    "amsgrad": lambda p: Adam(p, lr=0.02, amsgrad=True, betas=(0.8, 0.9)),
    "adam_maximize": lambda p: Adam(p, lr=0.02, maximize=True, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, lr=0.02, weight_decay=0.2),
    "adamw_groups": lambda p: AdamW([{"params": p[:2], "lr": 0.05, "amsgrad": True}, {"params": p[2:]}], lr=0.01),
}
UNROLLED = ("sgd", "momentum", "nesterov", "nesterov_bare", "dampening", "groups")


def settle(problem: Problem, optimizer: Optimizer, steps: int, clip_norm: float | None) -> MetaStep:
    """A bilevel step that has trained the backbone for some steps, and whose gamma-net knows the coming batch."""
    meta = MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll", clip_norm=clip_norm)
    torch.manual_seed(5)
    for _ in range(steps):
        meta.step(problem.x, problem.y)
    return meta


def hypergradient(meta: MetaStep, problem: Problem, engine: str, **options: object) -> Tensor:
    meta = MetaStep(
        meta.backbone,
        meta.optimizer,
        meta.gamma_net,
        None,
        outer="nll",
        engine=engine,
        clip_norm=meta.clip_norm,
        engine_options=options,
    )
    torch.manual_seed(11)
    return torch.cat([h.flatten() for h in meta.hypergradient(*problem.batches)])


def reference(meta: MetaStep, problem: Problem) -> Tensor:
    """By central differences; the gamma-net first sees the training batch, as it does in the step."""
    buffers = {name: b.clone() for name, b in problem.gamma_net.named_buffers()}
    torch.manual_seed(11)
    with torch.no_grad():
        training = {name: b.clone() for name, b in problem.backbone.named_buffers()}
        problem.gamma_net.observe(problem.backbone(problem.x)[1])
        for name, b in problem.backbone.named_buffers():
            b.copy_(training[name])

    def value() -> float:
        torch.manual_seed(11)
        return outer_value(
            problem.backbone,
            meta.optimizer,
            problem.gamma_net,
            [(problem.x, problem.y)],
            problem.x_meta,
            problem.y_meta,
            nll,
            meta.clip_norm,
        )

    slopes = central_differences(value, list(problem.gamma_net.parameters()))
    with torch.no_grad():
        for name, b in problem.gamma_net.named_buffers():
            b.copy_(buffers[name])
    return slopes


def error(found: Tensor, truth: Tensor) -> float:
    assert truth.norm() > 1e-9
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, clip_norm: float | None) -> None:
    problem = make_problem("mlp")
    optimizer = OPTIMIZERS[name](list(problem.backbone.parameters()))
    meta = settle(problem, optimizer, 3, clip_norm)
    truth = reference(meta, problem)
    assert error(hypergradient(meta, problem, "forward"), truth) < 1e-6
    assert error(hypergradient(meta, problem, "reverse"), truth) < 1e-6
    if name in UNROLLED:
        assert error(hypergradient(meta, problem, "higher"), truth) < 1e-6


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_of_the_optimizer(name: str, kernel: str) -> None:
    """The multi-tensor steps, which torch takes by itself on a GPU, may use the gradient as scratch memory."""
    problem = make_problem("mlp")
    optimizer = OPTIMIZERS[name](list(problem.backbone.parameters()))
    for group in optimizer.param_groups:
        group[kernel] = True
    meta = settle(problem, optimizer, 3, 0.05)
    truth = reference(meta, problem)
    assert error(hypergradient(meta, problem, "forward"), truth) < 1e-6
    assert error(hypergradient(meta, problem, "reverse"), truth) < 1e-6


@pytest.mark.parametrize("steps", [0, 1, 49])
@pytest.mark.parametrize("name", ["momentum", "dampening", "adam", "adam_l2", "amsgrad", "adamw"])
def test_first_second_and_fiftieth_step(name: str, steps: int) -> None:
    problem = make_problem("mlp", seed=1)
    optimizer = OPTIMIZERS[name](list(problem.backbone.parameters()))
    for group in optimizer.param_groups:
        # Adam's first step is the gradient's sign up to eps: at 1e-8 there is no slope to difference
        group.update(eps=1e-2) if "eps" in group else None
    meta = settle(problem, optimizer, steps, None)
    assert error(hypergradient(meta, problem, "forward"), reference(meta, problem)) < 1e-6


@pytest.mark.parametrize("net", NETS)
def test_networks(net: str) -> None:
    problem = make_problem(net)
    params = [p for p in problem.backbone.parameters() if p.requires_grad]
    meta = settle(problem, OPTIMIZERS["nesterov"](params), 2, 0.2)
    truth = reference(meta, problem)
    for engine in ("forward", "reverse"):
        assert error(hypergradient(meta, problem, engine), truth) < 1e-6, engine
    assert error(hypergradient(meta, problem, "forward", reuse=False), truth) < 1e-6
    if net != "tied":  # that library loses ties between parameters
        assert error(hypergradient(meta, problem, "higher"), truth) < 1e-6
    assert error(hypergradient(meta, problem, "difference", relative=1e-6), truth) < 1e-4
    assert error(hypergradient(meta, problem, "difference", relative=1e-5, central=True), truth) < 1e-6


@pytest.mark.parametrize("net", ["cnn", "attention"])
def test_adamw_networks(net: str) -> None:
    problem = make_problem(net)
    meta = settle(problem, OPTIMIZERS["adamw"](list(problem.backbone.parameters())), 4, None)
    assert error(hypergradient(meta, problem, "forward"), reference(meta, problem)) < 1e-6


def test_two_unrolled_steps() -> None:
    """A gamma that does not look at the features, which are constants in an unrolled step."""
    problem = make_problem("mlp")
    gamma = ScalarGamma(2.0).double()
    optimizer = SGD(problem.backbone.parameters(), lr=0.3, momentum=0.9)
    batches = [(problem.x, problem.y), (problem.x_meta.flip(0), problem.y_meta.flip(0))]
    meta = MetaStep(problem.backbone, optimizer, gamma, None, outer="nll", engine="higher")
    xs, ys = [x for x, _ in batches], [y for _, y in batches]
    (found,) = meta.hypergradient(xs, ys, problem.x_meta, problem.y_meta)
    truth = central_differences(
        lambda: outer_value(problem.backbone, optimizer, gamma, batches, problem.x_meta, problem.y_meta, nll),
        list(gamma.parameters()),
    )
    assert error(found.flatten(), truth) < 1e-6


def test_windows_of_several_steps_are_unrolled_together() -> None:
    problem = make_problem("mlp")
    gamma = ScalarGamma(2.0).double()
    optimizer = SGD(problem.backbone.parameters(), lr=0.3, momentum=0.9)
    meta_optimizer = SGD(gamma.parameters(), lr=1.0)
    meta = MetaStep(
        problem.backbone,
        optimizer,
        gamma,
        meta_optimizer,
        outer="nll",
        engine="higher",
        every=3,
        engine_options={"steps": 2},
    )
    meta.step(problem.x, problem.y)
    (expected,) = meta.hypergradient([problem.x] * 2, [problem.y] * 2, problem.x_meta, problem.y_meta)
    before = gamma.score.detach().clone()
    meta.step(*problem.batches)
    assert torch.equal(gamma.score, before)
    meta.step(*problem.batches)
    torch.testing.assert_close(before - gamma.score.detach(), expected)


def test_a_window_is_unrolled_with_the_settings_and_the_epoch_that_each_step_had() -> None:
    """As two steps of a copy of the backbone, with a learning rate and an epoch of their own."""

    class Epochs(ScalarGamma):
        def forward(self, features: Tensor | None = None, *, epoch: float = 0, **_: object) -> Tensor:
            return super().forward() * (1 + epoch)

    problem = make_problem("mlp")
    gamma = Epochs(2.0).double()
    optimizer = SGD(problem.backbone.parameters(), lr=0.3, momentum=0.9)
    start = copy.deepcopy((problem.backbone, optimizer))
    settings = [(0.3, 0.9, 0), (0.1, 0.5, 1)]

    def value() -> float:
        backbone, opt = copy.deepcopy(start)
        for lr, momentum, epoch in settings:
            opt.param_groups[0].update(lr=lr, momentum=momentum)
            opt.zero_grad()
            losses.focal(backbone(problem.x)[0], problem.y, gamma(epoch=epoch).detach()).mean().backward()
            opt.step()
        with torch.no_grad():
            return float(nll(backbone(problem.x_meta)[0], problem.y_meta))

    truth = central_differences(value, list(gamma.parameters()))
    meta = MetaStep(
        problem.backbone,
        optimizer,
        gamma,
        SGD(gamma.parameters(), lr=1.0),
        outer="nll",
        engine="higher",
        every=2,
        engine_options={"steps": 2},
    )
    before = gamma.score.detach().clone()
    for lr, momentum, epoch in settings:
        optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        meta.epoch = epoch
        meta.step(*problem.batches)
    assert error((before - gamma.score.detach()).flatten(), truth) < 1e-6


def test_penalties_are_in_the_step_but_not_in_the_cross_derivative() -> None:
    """R changes g, and so clipping and Adam's shape, though ∂R/∂φ = 0."""
    problem = make_problem("mlp")
    optimizer = Adam(problem.backbone.parameters(), lr=0.02)

    def penalty(model: nn.Module) -> Tensor:
        return 0.7 * torch.stack([p.square().sum() for p in model.parameters()]).sum()

    truth = None
    for engine in ("forward", "reverse"):
        meta = MetaStep(
            problem.backbone,
            optimizer,
            problem.gamma_net,
            None,
            outer="nll",
            engine=engine,
            clip_norm=0.3,
            penalties={"weights": (lambda model, x, y, logits, features: penalty(model) / 0.7, 0.7)},
        )
        if truth is None:
            meta.step(problem.x, problem.y)
            problem.gamma_net.observe(problem.backbone(problem.x)[1])
            truth = central_differences(
                lambda: outer_value(
                    problem.backbone,
                    optimizer,
                    problem.gamma_net,
                    [(problem.x, problem.y)],
                    problem.x_meta,
                    problem.y_meta,
                    nll,
                    0.3,
                    penalty,
                ),
                list(problem.gamma_net.parameters()),
            )
            frozen = {name: b.clone() for name, b in problem.gamma_net.named_buffers()}
            problem.gamma_net.observe = None  # its statistics are those of the reference
        found = torch.cat([h.flatten() for h in meta.hypergradient(*problem.batches)])
        assert all(torch.equal(b, frozen[name]) for name, b in problem.gamma_net.named_buffers())
        assert error(found, truth) < 1e-6
