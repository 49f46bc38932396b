"""SAM against its definition written out, in float64."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from metacal.errors import InputError
from metacal.network import on_copies
from metacal.optim.sam import SAM, ascent

BASES = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
}


def problem(norm: bool = False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(5)] if norm else []
    net = nn.Sequential(nn.Linear(3, 5), *middle, nn.Tanh(), nn.Linear(5, 4)).double()
    batches = [(torch.randn(6, 3, dtype=torch.float64), torch.randint(4, (6,))) for _ in range(5)]
    return net, batches


def closure_of(net, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    return closure


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def path_by_hand(base, rho, adaptive, steps=5):
    """Two gradients a step, the perturbation from one flat vector, the base's step."""
    net, batches = problem()
    optimizer = BASES[base](net.parameters())
    params = list(net.parameters())
    for x, y in batches[:steps]:
        grads = torch.autograd.grad(F.cross_entropy(net(x), y), params)
        g = torch.cat([t.flatten() for t in grads])
        theta = torch.cat([p.detach().flatten() for p in params])
        scale = theta.abs() if adaptive else torch.ones_like(theta)
        moved = theta + rho * scale**2 * g / (scale * g).norm()
        functional = dict(
            zip(
                [n for n, _ in net.named_parameters()],
                [m.view(p.shape).requires_grad_() for m, p in zip(moved.split([p.numel() for p in params]), params)],
            )
        )
        loss = F.cross_entropy(torch.func.functional_call(net, functional, (x,)), y)
        for p, grad in zip(params, torch.autograd.grad(loss, list(functional.values()))):
            p.grad = grad
        optimizer.step()
    return values(net)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_two_step_definition(base, adaptive):
    net, batches = problem()
    optimizer = SAM(BASES[base](net.parameters()), rho=0.3, adaptive=adaptive)
    for x, y in batches:
        expected = F.cross_entropy(net(x), y).item()
        assert optimizer.step(closure_of(net, optimizer, x, y)).item() == expected  # the loss at θ
    for ours, reference in zip(values(net), path_by_hand(base, 0.3, adaptive)):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("base", BASES)
def test_the_halves_by_hand_equal_the_closure_bit_for_bit(base):
    net, batches = problem()
    other = copy.deepcopy(net)
    whole, halves = SAM(BASES[base](net.parameters())), SAM(BASES[base](other.parameters()))
    for x, y in batches:
        whole.step(closure_of(net, whole, x, y))
        closure_of(other, halves, x, y)()
        halves.perturb()
        closure_of(other, halves, x, y)()
        halves.restore()
        halves.step()
    assert all(map(torch.equal, values(net), values(other)))


@pytest.mark.parametrize("base", BASES)
def test_without_perturbation_the_path_is_the_base_s(base):
    net, batches = problem()
    other = copy.deepcopy(net)
    sam, plain = SAM(BASES[base](net.parameters()), rho=0.0), BASES[base](other.parameters())
    for x, y in batches:
        sam.step(closure_of(net, sam, x, y))
        plain.step(closure_of(other, plain, x, y))
    assert all(map(torch.equal, values(net), values(other)))


@given(
    seed=st.integers(0, 10**6),
    rho=st.floats(1e-3, 10),
    exponent=st.sampled_from([-300, -160, -20, 0, 20, 200]),
    adaptive=st.booleans(),
)
def test_length_and_direction_of_the_perturbation(seed, rho, exponent, adaptive):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(3, 2), (4,), ()]]
    grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10.0**exponent for p in params]
    moves = ascent(params, grads, rho, adaptive)
    # ‖T⁻¹ε‖ = ρ, and T⁻¹ε points along T g
    lengths = [p.abs() if adaptive else torch.ones_like(p) for p in params]
    inner = torch.cat([(e / t).flatten() for e, t in zip(moves, lengths)])
    along = torch.cat([(t * (g / 10.0**exponent)).flatten() for g, t in zip(grads, lengths)])
    assert inner.norm().item() == pytest.approx(rho, rel=1e-9)
    assert torch.dot(inner, along).item() == pytest.approx(rho * along.norm().item(), rel=1e-9)


def test_a_small_perturbation_raises_the_loss_most():
    net, batches = problem()
    x, y = batches[0]
    optimizer = SAM(BASES["sgd"](net.parameters()), rho=1e-4)
    loss = closure_of(net, optimizer, x, y)()
    slope = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
    optimizer.perturb()
    # first order: the loss rises by ρ‖g‖, the most that any displacement of length ρ can do
    assert (F.cross_entropy(net(x), y) - loss).item() == pytest.approx(1e-4 * slope, rel=1e-3)
    optimizer.restore()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_restore_is_exact(dtype, adaptive):
    torch.manual_seed(1)
    params = [nn.Parameter((torch.randn(50) * 10.0 ** torch.randint(-8, 8, (50,))).to(dtype)) for _ in range(3)]
    before = [p.detach().clone() for p in params]
    for p in params[:2]:
        p.grad = torch.randn(50).to(dtype)
    grads = [p.grad.clone() for p in params[:2]]
    optimizer = SAM(torch.optim.SGD(params, lr=0.1), rho=0.7, adaptive=adaptive)
    optimizer.perturb()
    assert optimizer.perturbed
    assert not torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])
    assert torch.equal(params[2], before[2])  # no gradient
    optimizer.restore()
    assert not optimizer.perturbed and all(map(torch.equal, params, before))
    assert torch.equal(params[0].grad, grads[0]) and torch.equal(params[1].grad, grads[1])


@pytest.mark.parametrize("adaptive", [False, True])
def test_zero_gradient_or_none_moves_nothing(adaptive):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2))
    optimizer = SAM(torch.optim.SGD([p, q], lr=0.1), adaptive=adaptive)
    optimizer.perturb()  # no gradient at all
    optimizer.restore()
    p.grad, q.grad = torch.zeros(3), torch.zeros(2)
    optimizer.perturb()
    assert torch.equal(p, torch.ones(3)) and torch.equal(q, torch.zeros(2))
    optimizer.restore()


def test_adaptive_perturbation_with_parameters_all_zero():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    optimizer = SAM(torch.optim.SGD([p], lr=0.1), adaptive=True)
    optimizer.perturb()
    assert torch.equal(p, torch.zeros(3))


@pytest.mark.parametrize("pass_", [1, 2])
def test_an_exception_in_the_closure_leaves_theta(pass_):
    net, batches = problem(norm=True)
    optimizer = SAM(BASES["adamw"](net.parameters()), rho=0.5)
    work, calls, before = closure_of(net, optimizer, *batches[0]), [], values(net)

    def closure():
        calls.append(1)
        if len(calls) == pass_:
            raise KeyboardInterrupt
        return work()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert all(map(torch.equal, values(net), before)) and not optimizer.perturbed and not optimizer.state


def test_statistics_move_once_a_step():
    net, batches = problem(norm=True)
    other = copy.deepcopy(net)
    optimizer = SAM(BASES["sgd"](net.parameters()), rho=0.5)
    for i, (x, y) in enumerate(batches, 1):
        other.load_state_dict(net.state_dict())
        other(x)  # one plain pass at θ
        optimizer.step(closure_of(net, optimizer, x, y), model=net)
        assert torch.equal(net[1].running_mean, other[1].running_mean)
        assert torch.equal(net[1].running_var, other[1].running_var)
        assert net[1].num_batches_tracked.item() == i
    optimizer.step(closure_of(net, optimizer, *batches[0]))
    assert net[1].num_batches_tracked.item() == len(batches) + 2  # without the model there is nothing to hold


def test_statistics_do_not_change_the_path():
    net, batches = problem(norm=True)
    other = copy.deepcopy(net)
    a, b = (SAM(BASES["sgd"](n.parameters()), rho=0.5) for n in (net, other))
    for x, y in batches:
        a.step(closure_of(net, a, x, y), model=net)
        b.step(closure_of(other, b, x, y))
    assert all(map(torch.equal, values(net), values(other)))


def test_buffers_come_back_after_an_exception():
    net, batches = problem(norm=True)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ZeroDivisionError), on_copies(net):
        net(batches[0][0])
        raise ZeroDivisionError
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_groups_state_and_hooks_are_the_base_s():
    net, batches = problem()
    base = BASES["adamw"](net[0].parameters())
    optimizer = SAM(base, rho=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.5})
    assert optimizer.param_groups is base.param_groups and len(base.param_groups) == 2
    optimizer.param_groups[0]["lr"] = 0.25
    assert base.param_groups[0]["lr"] == 0.25 and optimizer.defaults["lr"] == 0.01
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    optimizer.step(closure_of(net, optimizer, *batches[0]))
    assert calls == ["hook"]
    assert optimizer.state is base.state and len(base.state) == 4
    assert "lr: 0.25" in repr(optimizer)
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("on_base", [False, True])
def test_schedulers(on_base, recwarn):
    net, batches = problem()
    optimizer = SAM(torch.optim.SGD(net.parameters(), lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.base if on_base else optimizer, 1, gamma=0.5)
    rates = []
    for x, y in batches:
        optimizer.step(closure_of(net, optimizer, x, y))
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates == [1, 0.5, 0.25, 0.125, 0.0625]
    assert not recwarn.list  # torch warns of a schedule that steps before its optimizer


@pytest.mark.parametrize("base", BASES)
def test_state_goes_round(base, tmp_path):
    net, batches = problem()
    optimizer = SAM(BASES[base](net.parameters()), rho=0.2)
    for x, y in batches[:2]:
        optimizer.step(closure_of(net, optimizer, x, y))
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.pt")
    other, _ = problem()
    resumed = SAM(BASES[base](other.parameters()), rho=0.2)
    saved = torch.load(tmp_path / "s.pt", weights_only=True)
    other.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["optimizer"])
    for x, y in batches[2:]:
        optimizer.step(closure_of(net, optimizer, x, y))
        resumed.step(closure_of(other, resumed, x, y))
    assert all(map(torch.equal, values(net), values(other)))


def test_a_copy_is_independent():
    net, batches = problem()
    optimizer = SAM(BASES["sgd"](net.parameters()), rho=0.2, adaptive=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net2, optimizer2 = copy.deepcopy((net, optimizer))
    before = values(net)
    optimizer2.step(closure_of(net2, optimizer2, *batches[0]))
    assert all(map(torch.equal, values(net), before))
    optimizer.step(closure_of(net, optimizer, *batches[0]))
    assert all(map(torch.equal, values(net), values(net2)))


def test_bad_input():
    p = nn.Parameter(torch.ones(2))
    base = torch.optim.SGD([p], lr=0.1)
    for rho in (-0.1, math.nan, math.inf, "0.1"):
        with pytest.raises(InputError, match="rho must be >= 0"):
            SAM(base, rho=rho)
    for wrong in (nn.Linear(2, 2), [p], SAM(base), torch.optim.LBFGS([p])):
        with pytest.raises(InputError, match="base must be"):
            SAM(wrong)
    optimizer = SAM(base)
    with pytest.raises(InputError, match="without perturb"):
        optimizer.restore()
    p.grad = torch.ones(2)
    optimizer.perturb()
    with pytest.raises(InputError, match="called twice"):
        optimizer.perturb()
    with pytest.raises(InputError, match="while perturbed"):
        optimizer.step()
    optimizer.restore()
    optimizer.step()
