"""BulkSGD against explicit matrices of small networks, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from reference.curvature import ggn, hessian
from torch import nn

from metacal.errors import InputError
from metacal.optim.bulk_sgd import BulkSGD

SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.05, "dampening": 0.1},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True, "foreach": True},
    "maximize": {"maximize": True},
}


def problem(seed: int = 0, norm: bool = False):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(4)] if norm else []
    net = nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 3)).double()
    return net, torch.randn(12, 3, dtype=torch.float64), torch.randint(3, (12,))


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def backward(net, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()


def dense_vectors(net, x, y, matrix, k, loss="cross_entropy"):
    """(P, k) by a full eigendecomposition."""
    dense = hessian(net, x, y, loss) if matrix == "hessian" else ggn(net, x, loss)
    return torch.linalg.eigh(dense.detach())[1].flip(1)[:, :k]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_path_by_explicit_eigenvectors(k, matrix, settings):
    settings = SETTINGS[settings]
    net, x, y = problem()
    reference = copy.deepcopy(net)
    # no weight decay or momentum is taken from torch: SGD's direction by hand
    optimizer = BulkSGD(net.parameters(), 0.5, net, k=k, matrix=matrix, tol=1e-13, **settings)
    momentum, decay = settings.get("momentum", 0.0), settings.get("weight_decay", 0.0)
    buffer = None
    for _ in range(4):
        optimizer.prepare(x, y)
        before = flat(net.parameters())
        backward(net, optimizer, x, y)
        optimizer.step()
        moved = flat(net.parameters()) - before

        params = list(reference.parameters())
        v = dense_vectors(reference, x, y, matrix, k)
        g = flat(torch.autograd.grad(F.cross_entropy(reference(x), y), params))
        g = (-g if settings.get("maximize") else g) + decay * flat(params)
        buffer = g if buffer is None else momentum * buffer + (1 - settings.get("dampening", 0.0)) * g
        d = (g + momentum * buffer) if settings.get("nesterov") else buffer
        step = -0.5 * (d - v @ (v.T @ d))
        with torch.no_grad():
            for p, s in zip(params, step.split([p.numel() for p in params])):
                p += s.view(p.shape)
        # against the exact eigenvectors, and, to the last digits, against its own
        assert (v.T @ moved).norm() <= 1e-6 * moved.norm()
        own = torch.stack([flat(vector) for vector in optimizer.vectors])
        assert (own @ moved).norm() <= 1e-13 * moved.norm()
        torch.testing.assert_close(flat(net.parameters()), flat(params), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
def test_vectors_are_those_of_the_largest_algebraic_eigenvalues(matrix, loss):
    net, x, y = problem(3)
    optimizer = BulkSGD(net.parameters(), 0.1, net, k=3, matrix=matrix, loss=loss, tol=1e-13)
    optimizer.prepare(x, y)
    v = dense_vectors(net, x, y, matrix, 3, loss)
    own = torch.stack([flat(vector) for vector in optimizer.vectors], 1)
    torch.testing.assert_close((v.T @ own).abs(), torch.eye(3, dtype=v.dtype), rtol=0, atol=1e-6)
    dense = hessian(net, x, y, loss) if matrix == "hessian" else ggn(net, x, loss)
    expected = torch.linalg.eigvalsh(dense.detach()).flip(0)[:3]
    assert optimizer.eigenvalues == pytest.approx(expected.tolist(), rel=1e-9)
    assert optimizer.converged and optimizer.products >= 3


def test_groups_with_rates_of_their_own_in_another_order():
    net, x, y = problem()
    first, last = list(net[0].parameters()), list(net[2].parameters())
    groups = [{"params": last[::-1], "lr": 0.3, "momentum": 0.5}, {"params": first, "weight_decay": 0.1}]
    optimizer = BulkSGD(groups, 0.1, net, k=2, tol=1e-13)
    other = copy.deepcopy(net)
    theirs = [{**g, "params": p} for g, p in zip(groups, [list(other[2].parameters())[::-1], other[0].parameters()])]
    sgd = torch.optim.SGD(theirs, 0.1)
    v = dense_vectors(net, x, y, "hessian", 2)
    optimizer.prepare(x, y)
    before = flat(net.parameters())
    for n, o in ((net, optimizer), (other, sgd)):
        backward(n, o, x, y)
        o.step()
    moved, whole = flat(net.parameters()) - before, flat(other.parameters()) - before
    torch.testing.assert_close(moved, whole - v @ (v.T @ whole), rtol=1e-6, atol=1e-9)


def test_equals_sgd_where_the_gradient_has_no_part_in_the_span():
    # any direction orthogonal to the vectors, which stay the same for the three steps
    net, x, y = problem()
    other = copy.deepcopy(net)
    optimizer = BulkSGD(net.parameters(), 0.1, net, k=3, momentum=0.9)
    sgd = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    optimizer.prepare(x, y)
    for _ in range(3):
        grads = [torch.randn_like(p) for p in net.parameters()]
        optimizer.project(grads)
        for p, q, g in zip(net.parameters(), other.parameters(), grads):
            p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        sgd.step()
    torch.testing.assert_close(flat(net.parameters()), flat(other.parameters()), rtol=1e-12, atol=1e-13)


def test_a_gradient_in_the_span_moves_nothing():
    net, x, y = problem()
    optimizer = BulkSGD(net.parameters(), 1.0, net, k=3)
    optimizer.prepare(x, y)
    before = flat(net.parameters())
    for i, p in enumerate(net.parameters()):
        p.grad = sum(c * vector[i] for c, vector in zip((3.0, -2.0, 0.5), optimizer.vectors))
    optimizer.step()
    torch.testing.assert_close(flat(net.parameters()), before, rtol=0, atol=1e-14)


@given(seed=st.integers(0, 10**6), k=st.sampled_from([1, 3, 5]), left_out=st.sets(st.integers(0, 3), max_size=3))
def test_projection(seed, k, left_out):
    net, x, y = problem(seed % 7)
    optimizer = BulkSGD(net.parameters(), 0.1, net, k=k)
    optimizer.prepare(x, y)
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return [
            None if i in left_out else torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for i, p in enumerate(net.parameters())
        ]

    def kept(tensors):
        return flat([t for t in tensors if t is not None])

    a, b = draw(), draw()
    pa, pb = ([None if t is None else t.clone() for t in tensors] for tensors in (a, b))
    optimizer.project(pa)
    optimizer.project(pb)
    assert [t is None for t in pa] == [t is None for t in a]
    v = torch.stack([kept([t for i, t in enumerate(vector) if i not in left_out]) for vector in optimizer.vectors])
    assert (v @ kept(pa)).norm() <= 1e-6 * kept(a).norm()  # orthogonal
    assert kept(pa) @ kept(b) == pytest.approx((kept(a) @ kept(pb)).item(), abs=1e-9)  # symmetric
    again = [None if t is None else t.clone() for t in pa]
    optimizer.project(again)
    torch.testing.assert_close(kept(again), kept(pa), rtol=0, atol=1e-9)  # idempotent
    if not left_out:
        torch.testing.assert_close(kept(pa), kept(a) - v.T @ (v @ kept(a)), rtol=1e-12, atol=1e-12)


def test_projection_keeps_to_memory_layouts_and_float32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    net = net.to(memory_format=torch.channels_last)
    x, y = torch.randn(8, 3, 4, 4), torch.randint(3, (8,))
    optimizer = BulkSGD(net.parameters(), 0.5, net, k=3, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        before = flat(net.parameters()).double()
        optimizer.prepare(x, y)
        backward(net, optimizer, x, y)
        optimizer.step()
        moved = flat(net.parameters()).double() - before
        v = torch.stack([flat(vector) for vector in optimizer.vectors]).double()
        assert (v @ moved).norm() <= 2e-6 * moved.norm()  # θ itself rounds the displacement
        assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_without_gradient_stay():
    net, x, y = problem()
    optimizer = BulkSGD(net.parameters(), 0.5, net, k=2)
    optimizer.prepare(x, y)
    backward(net, optimizer, x, y)
    net[0].weight.grad = None
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert torch.equal(net[0].weight, before[0])
    moved = flat(net.parameters()) - flat(before)
    v = torch.stack([flat(vector) for vector in optimizer.vectors])
    assert moved.norm() > 1e-3 and (v @ moved).norm() <= 1e-12


def test_frozen_parameters():
    net, x, y = problem()
    net[0].weight.requires_grad_(False)
    optimizer = BulkSGD(net.parameters(), 0.5, net, k=2, tol=1e-13)
    before = net[0].weight.clone()
    optimizer.prepare(x, y)
    assert optimizer.vectors[0][0] is None
    v = dense_vectors(net, x, y, "hessian", 2)
    start = flat(list(net.parameters())[1:])
    backward(net, optimizer, x, y)
    optimizer.step()
    moved = flat(list(net.parameters())[1:]) - start
    assert torch.equal(net[0].weight, before) and (v.T @ moved).norm() <= 1e-6 * moved.norm()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
def test_preparing_changes_nothing_else(matrix, training):
    net, x, y = problem(norm=True)
    net.append(nn.Dropout(0.2))
    net.train(training)
    optimizer = BulkSGD(net.parameters(), 0.5, net, k=2, matrix=matrix)
    backward(net, optimizer, x, y)
    state = copy.deepcopy(net.state_dict())
    grads = [p.grad.clone() for p in net.parameters()]
    random = torch.get_rng_state()
    assert optimizer.prepare(x, y)
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(m.training is training for m in net.modules())


def test_the_mode_decides_which_matrix():
    net, x, y = problem(norm=True)
    for training in (True, False):
        net.train(training)
        optimizer = BulkSGD(net.parameters(), 0.5, net, k=1, tol=1e-13)
        optimizer.prepare(x, y)
        v = dense_vectors(copy.deepcopy(net), x, y, "hessian", 1)[:, 0]
        assert abs(flat(optimizer.vectors[0]) @ v).item() == pytest.approx(1, abs=1e-6)


def test_chunks_give_the_same_vectors():
    net, x, y = problem()
    a, b = (BulkSGD(net.parameters(), 0.5, net, k=2, tol=1e-12) for _ in range(2))
    a.prepare(x, y)
    b.prepare(x, y, chunk_size=5)
    for u, v in zip(a.vectors, b.vectors):
        assert abs(flat(u) @ flat(v)).item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("k", [1, 3])
def test_warm_starts_save_products(k):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)).double()
    x, y = torch.randn(100, 20, dtype=torch.float64), torch.randint(10, (100,))
    warm = BulkSGD(net.parameters(), 0.01, net, k=k, matrix="gauss_newton")
    cold_products = warm_products = 0
    for step in range(5):
        cold = BulkSGD(net.parameters(), 0.01, net, k=k, matrix="gauss_newton")
        cold.prepare(x, y)
        warm.prepare(x, y)
        if step:
            cold_products += cold.products
            warm_products += warm.products
        backward(net, warm, x, y)
        warm.step()
    assert warm_products < cold_products


def test_every():
    net, x, y = problem()
    optimizer = BulkSGD(net.parameters(), 0.1, net, k=2, every=3)
    computed, vectors = [], []
    for _ in range(7):
        assert optimizer.due is (len(computed) % 3 == 0)
        computed.append(optimizer.prepare(x, y))
        vectors.append(flat(optimizer.vectors[0]))
        backward(net, optimizer, x, y)
        optimizer.step()
    assert computed == [True, False, False, True, False, False, True]
    assert torch.equal(vectors[0], vectors[2]) and not torch.equal(vectors[2], vectors[3])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stop", [0, 2, 3])
def test_a_resumed_run_is_bit_identical(every, stop, tmp_path):
    settings = {"k": 2, "momentum": 0.9, "weight_decay": 0.01, "every": every}

    def advance(net, optimizer, x, y):
        optimizer.prepare(x, y)
        backward(net, optimizer, x, y)
        optimizer.step()

    def build():
        net, x, y = problem()
        net.append(nn.Dropout(0.1))
        return net, BulkSGD(net.parameters(), 0.1, net, **settings), x, y

    net, optimizer, x, y = build()
    torch.manual_seed(5)
    for step in range(6):
        if step == stop:
            saved = {"net": net.state_dict(), "opt": optimizer.state_dict(), "rng": torch.get_rng_state()}
            torch.save(saved, tmp_path / "s.pt")
        advance(net, optimizer, x, y)
    other, resumed, x, y = build()
    saved = torch.load(tmp_path / "s.pt", weights_only=True)
    other.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["opt"])
    torch.set_rng_state(saved["rng"])
    for _ in range(stop, 6):
        advance(other, resumed, x, y)
    assert torch.equal(flat(net.parameters()), flat(other.parameters()))
    assert torch.equal(flat(optimizer.vectors[0]), flat(resumed.vectors[0]))
    assert "model" not in str(saved["opt"].keys()) and all(isinstance(g, dict) for g in saved["opt"]["param_groups"])


def test_a_state_of_plain_sgd_and_one_of_another_k():
    net, x, y = problem()
    sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    backward(net, sgd, x, y)
    sgd.step()
    optimizer = BulkSGD(net.parameters(), 0.1, net, k=2, momentum=0.9, every=5)
    optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.due
    optimizer.prepare(x, y)
    other = BulkSGD(net.parameters(), 0.1, net, k=3)
    with pytest.raises(InputError, match=r"k = 3 vectors, got \[2\]"):
        other.load_state_dict(optimizer.state_dict())


def test_closures_schedules_hooks_and_copies(recwarn):
    net, x, y = problem()
    optimizer = BulkSGD(net.parameters(), 0.4, net, k=1)
    torch.optim.SGD(net.parameters(), 0.1)  # torch wraps SGD's step when it first makes one
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    expected = F.cross_entropy(net(x), y).item()
    optimizer.prepare(x, y)
    assert optimizer.step(closure).item() == expected
    assert calls == ["hook"]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.2 and not recwarn.list
    twin_net, twin = copy.deepcopy((net, optimizer))
    for n, o in ((net, optimizer), (twin_net, twin)):
        o.prepare(x, y)
        backward(n, o, x, y)
        o.step()
    assert twin.model is twin_net and torch.equal(flat(net.parameters()), flat(twin_net.parameters()))


def test_bad_input():
    net, x, y = problem()
    size = sum(p.numel() for p in net.parameters())
    for k in (0, -1, size, size + 5):
        with pytest.raises(InputError, match=f"k must be at least 1 and below the {size} trainable"):
            BulkSGD(net.parameters(), 0.1, net, k=k)
    assert BulkSGD(net.parameters(), 0.1, net, k=size - 1).k == size - 1
    for wrong, message in [
        ({"matrix": "hesian"}, "did you mean 'hessian'"),
        ({"loss": "focal"}, "loss must be one of"),
        ({"every": 0}, "every must be >= 1"),
        ({"tol": 0.0}, "tol must lie"),
        ({"max_products": 1}, "max_products must be > k"),
        ({"momentum": -0.1}, "momentum"),
        ({"lr": -0.1}, "learning rate"),
        ({"nesterov": True}, "Nesterov"),
        ({"model": F.relu}, "model must be"),
    ]:
        with pytest.raises(InputError, match=message):
            BulkSGD(net.parameters(), **{"lr": 0.1, "model": net, **wrong})
    with pytest.raises(InputError, match="2 of the model's are missing, 0 belong"):
        BulkSGD(net[0].parameters(), 0.1, net)
    with pytest.raises(InputError, match="0 of the model's are missing, 2 belong"):
        BulkSGD(net.parameters(), 0.1, net[0])
    optimizer = BulkSGD(net.parameters(), 0.1, net)
    backward(net, optimizer, x, y)
    with pytest.raises(InputError, match="prepare"):
        optimizer.step()
    with pytest.raises(InputError, match="labels must lie"):
        optimizer.prepare(x, y + 5)
    with pytest.raises(InputError, match="tensors must hold 4"):
        optimizer.project([x])
