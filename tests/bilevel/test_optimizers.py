"""The bilevel step through the optimizers of `metacal.optim`: hypergradients and paths, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bilevel_problems import make_problem
from reference.hyper import central_differences, focal
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from metacal.bilevel import MetaStep
from metacal.errors import InputError
from metacal.gamma import GammaNet
from metacal.optim import SAM, BulkSGD, Muon, muon_groups
from metacal.optim.sam import ascent

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "muon": lambda m: Muon(muon_groups(m, lr=0.05, rest_lr=0.02), momentum=0.9),
    "muon_sgd": lambda m: Muon(
        muon_groups(m, lr=0.05, weight_decay=0.1, rest="sgd", rest_lr=0.1, rest_options={"momentum": 0.9}),
        nesterov=False,
    ),
    "sam": lambda m: SAM(SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), rho=0.1),
    "asam": lambda m: SAM(SGD(m.parameters(), lr=0.1, momentum=0.9), rho=0.5, adaptive=True),
    "sam_adamw": lambda m: SAM(AdamW(m.parameters(), lr=0.02, weight_decay=0.1), rho=0.1),
    "sam_muon": lambda m: SAM(Muon(muon_groups(m, lr=0.05, rest_lr=0.02)), rho=0.1),
    "bulk_sgd": lambda m: BulkSGD(m.parameters(), 0.1, m, k=2, momentum=0.9, weight_decay=0.01, tol=1e-6),
    "bulk_sgd_gn": lambda m: BulkSGD(m.parameters(), 0.1, m, k=1, matrix="gauss_newton", tol=1e-6),
}


def step_value(problem: Any, optimizer: Optimizer, moves: list[Tensor] | None) -> float:
    """The outer loss after one step of copies; SAM's perturbation `moves` and BulkSGD's vectors are given."""
    backbone, optimizer = copy.deepcopy((problem.backbone, optimizer))
    x, y, x_meta, y_meta = problem.batches
    params = [p for group in optimizer.param_groups for p in group["params"]]
    start = [p.detach().clone() for p in params]
    if moves is not None:
        with torch.no_grad():
            torch._foreach_add_(params, moves)
    logits, features = backbone(x)
    gamma = problem.gamma_net(features.detach(), logits=logits.detach(), labels=y, inputs=x, epoch=0).detach()
    optimizer.zero_grad()
    focal(logits, y, gamma).mean().backward()
    with torch.no_grad():
        for p, value in zip(params, start):
            p.copy_(value)
    optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(backbone(x_meta)[0], y_meta))


def perturbation(problem: Any, optimizer: SAM) -> list[Tensor]:
    """SAM's displacement at the present gammas."""
    x, y, *_ = problem.batches
    backbone = copy.deepcopy(problem.backbone)
    logits, features = backbone(x)
    gamma = problem.gamma_net(features.detach(), logits=logits.detach(), labels=y, inputs=x, epoch=0).detach()
    order = {name: i for i, (name, _) in enumerate(problem.backbone.named_parameters())}
    grads = torch.autograd.grad(focal(logits, y, gamma).mean(), list(backbone.parameters()))
    names = {p: name for name, p in problem.backbone.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return ascent(
        [p.detach() for p in params], [grads[order[names[p]]] for p in params], optimizer.rho, optimizer.adaptive
    )


@pytest.mark.parametrize("engine", ["forward", "reverse"])
@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_hypergradient_is_that_of_the_step_taken(name: str, net: str, engine: str) -> None:
    problem = make_problem(net)
    if net == "cnn" and name.startswith("bulk"):
        problem.backbone.eval()  # the matrix is of batch statistics otherwise, whose curvature BulkSGD also takes
    optimizer = OPTIMIZERS[name](problem.backbone)
    settle = MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll")
    for _ in range(2):
        settle.step(problem.x, problem.y)
    meta = MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll", engine=engine)

    weights = [p.detach().clone() for p in problem.backbone.parameters()]
    found = torch.cat([h.flatten() for h in meta.hypergradient(*problem.batches)])
    assert all(torch.equal(p, w) for p, w in zip(problem.backbone.parameters(), weights))

    buffers = {key: b.clone() for key, b in problem.backbone.named_buffers()}
    with torch.no_grad():
        problem.gamma_net.observe(problem.backbone(problem.x)[1])
        for key, b in problem.backbone.named_buffers():
            b.copy_(buffers[key])
    moves = perturbation(problem, optimizer) if isinstance(optimizer, SAM) else None
    if isinstance(optimizer, BulkSGD):
        optimizer.prepare(problem.x, problem.y)
    expected = central_differences(lambda: step_value(problem, optimizer, moves), meta.meta_params)
    assert float(expected.norm()) > 1e-8
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_engines_agree_with_penalties_and_clipping(name: str, clip_norm: float | None) -> None:
    found = []
    for engine in ("forward", "reverse"):
        problem = make_problem("mlp")
        meta = MetaStep(
            problem.backbone,
            OPTIMIZERS[name](problem.backbone),
            problem.gamma_net,
            None,
            outer="nll",
            engine=engine,
            clip_norm=clip_norm,
            penalties={"margin_tail": 0.1, "hessian_trace": 0.01, "margin_smoothness": 0.1},
        )
        meta.step(problem.x, problem.y)
        found.append(torch.cat([h.flatten() for h in meta.hypergradient(*problem.batches)]))
    assert float(found[0].norm()) > 0
    assert torch.allclose(found[0], found[1], rtol=1e-8, atol=1e-12)


def whole(net: str = "mlp", n: int = 12) -> tuple[Any, Tensor, Tensor]:
    problem = make_problem(net)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, *problem.x.shape[1:], generator=generator, dtype=torch.float64)
    return problem, x, torch.randint(0, 3, (n,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, 11])
def test_a_batch_in_parts_makes_the_step_of_the_whole(chunk: int) -> None:
    runs = []
    for size in (None, chunk):
        problem, x, y = whole()
        optimizer = SGD(problem.backbone.parameters(), lr=0.3, momentum=0.9)
        meta_optimizer = torch.optim.Adam(problem.gamma_net.parameters(), lr=0.05)
        meta = MetaStep(
            problem.backbone,
            optimizer,
            problem.gamma_net,
            meta_optimizer,
            outer="nll",
            chunk=size,
            penalties={"norm": (lambda model, x, y, z, h: z.square().sum(1).mean(), 0.1)},
        )
        found = [meta.step(x, y, problem.x_meta, problem.y_meta) for _ in range(4)]
        runs.append((found, [*problem.backbone.parameters(), *problem.gamma_net.parameters()], meta.last))
    for a, b in zip(runs[0][0], runs[1][0]):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-9), key
    for p, q in zip(runs[0][1], runs[1][1]):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
    assert torch.allclose(runs[0][2].logits, runs[1][2].logits) and runs[1][2].gamma.shape == (12,)
    assert not any(run[2].logits.requires_grad or run[2].gamma.requires_grad for run in runs)


def test_parts_are_refused_where_they_change_the_gradient() -> None:
    problem, x, y = whole("cnn")
    optimizer = SGD(problem.backbone.parameters(), lr=0.1)
    meta = MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll", chunk=5)
    with pytest.raises(InputError, match=r"chunk must be >= the 12 samples.*BatchNorm"):
        meta.step(x, y)
    MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll", chunk=12).step(x, y)
    problem.backbone.eval()
    meta.step(x, y)
    norm = next(m for m in problem.backbone.modules() if isinstance(m, nn.BatchNorm2d))
    norm.running_mean = norm.running_var = None  # statistics of the batch in either mode
    with pytest.raises(InputError, match=r"chunk must be >= the 12 samples.*BatchNorm"):
        meta.step(x, y)

    def batchwise(model: nn.Module, x: Tensor, y: Tensor, z: Tensor, h: Tensor | None) -> Tensor:
        return z.mean()

    batchwise.batchwise = True  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="is no mean over samples"):
        MetaStep(problem.backbone, optimizer, problem.gamma_net, chunk=5, penalties={"p": (batchwise, 1.0)})
    meta_optimizer = SGD(problem.gamma_net.parameters(), lr=0.1)
    with pytest.raises(InputError, match="chunk needs engine 'forward'"):
        MetaStep(problem.backbone, optimizer, problem.gamma_net, meta_optimizer, engine="reverse", chunk=5)


def test_sam_moves_batch_statistics_and_the_gamma_source_once() -> None:
    problem = make_problem("cnn")
    other = copy.deepcopy(problem)
    sam = SAM(SGD(problem.backbone.parameters(), lr=0.1), rho=0.1)
    MetaStep(problem.backbone, sam, problem.gamma_net, None, outer="nll").step(problem.x, problem.y)
    plain = SGD(other.backbone.parameters(), lr=0.1)
    MetaStep(other.backbone, plain, other.gamma_net, None, outer="nll").step(other.x, other.y)
    for modules in ((problem.backbone, other.backbone), (problem.gamma_net, other.gamma_net)):
        for (name, b), (_, c) in zip(modules[0].named_buffers(), modules[1].named_buffers()):
            assert torch.equal(b, c), name
    assert not torch.equal(next(problem.backbone.parameters()), next(other.backbone.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_taken_leaves_everything(name: str) -> None:
    problem = make_problem("mlp")
    optimizer = OPTIMIZERS[name](problem.backbone)
    meta = MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll", nonfinite="skip")
    meta.step(problem.x, problem.y)
    weights = [p.detach().clone() for p in problem.backbone.parameters()]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    assert meta.step(problem.x * float("nan"), problem.y)["skipped"] == 1.0
    assert all(torch.equal(p, w) for p, w in zip(problem.backbone.parameters(), weights))
    for a, b in zip(state.values(), optimizer.state_dict()["state"].values()):
        for key in a:
            assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key]))


def test_penalties_of_a_detailed_step() -> None:
    problem = make_problem("mlp")
    kinds: dict[str, Any] = {
        "size": (lambda model, x, y, z, h: z.square().mean(), 0.5),
        "weights": (lambda model, x, y, z, h: sum(p.square().sum() for p in model.parameters()), 0.1),
    }
    meta = MetaStep(problem.backbone, SGD(problem.backbone.parameters(), lr=0.1), problem.gamma_net, penalties=kinds)
    logits = problem.backbone(problem.x)[0]
    value = 0.5 * logits.square().mean()
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(problem.backbone.parameters()))]).norm()
    meta.detail()
    found = meta.step(problem.x, problem.y)
    assert found["penalty/size"] == pytest.approx(2 * value.item(), rel=1e-12)
    assert found["penalty/size_grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    total = found["loss"] + 0.5 * found["penalty/size"] + 0.1 * found["penalty/weights"]
    assert found["penalty/weights_share"] == pytest.approx(0.1 * found["penalty/weights"] / total, rel=1e-12)
    assert found["time/penalty_size_ms"] > 0
    assert "penalty/size_share" not in meta.step(problem.x, problem.y)


def test_a_mixed_batch_has_the_hypergradient_of_its_mixed_loss() -> None:
    problem = make_problem("mlp")
    x, y, x_meta, y_meta = problem.batches
    order, weight = torch.roll(torch.arange(len(y)), 1), 0.3
    mixed, other = weight * x + (1 - weight) * x[order], y[order]
    optimizer = SGD(problem.backbone.parameters(), lr=0.3)
    mix = lambda x, y, step: (mixed, y, other, weight)  # noqa: E731
    meta = MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll", mix=mix)
    found = torch.cat([h.flatten() for h in meta.hypergradient(x, y, x_meta, y_meta)])
    with torch.no_grad():
        problem.gamma_net.observe(problem.backbone(mixed)[1])

    def value() -> float:
        backbone, sgd = copy.deepcopy((problem.backbone, optimizer))
        logits, features = backbone(mixed)
        gamma = problem.gamma_net(features.detach()).detach()
        loss = weight * focal(logits, y, gamma) + (1 - weight) * focal(logits, other, gamma)
        loss.mean().backward()
        sgd.step()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(backbone(x_meta)[0], y_meta))

    expected = central_differences(value, meta.meta_params)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    with pytest.raises(InputError, match="mix does not go with chunk"):
        MetaStep(problem.backbone, optimizer, problem.gamma_net, None, mix=mix, chunk=3)


@pytest.mark.parametrize("input", ["features", "noise", "random"])
def test_a_batch_in_parts_has_the_gammas_of_the_whole(input: str) -> None:
    """Noise is drawn for the whole batch, of which a part takes its rows."""
    slopes = []
    for chunk in (None, 4):
        problem = make_problem("mlp")
        with torch.random.fork_rng():
            torch.manual_seed(3)
            source = GammaNet(problem.backbone.in_features, hidden=2, gamma_init=2.0, input=input).double()
            nn.init.normal_(source.last.weight)
        meta = MetaStep(
            problem.backbone, SGD(problem.backbone.parameters(), lr=0.1), source, None, outer="nll", chunk=chunk
        )
        slopes.append(torch.cat([h.flatten() for h in meta.hypergradient(*problem.batches)]))
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-14)
