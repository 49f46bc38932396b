"""Batch sharpness, preconditioned sharpness and the margin bound, against dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from autodiff.nets import DEPENDENT, NETS, K, build
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import curvature as dense
from torch import nn

from metacal.curvature import (
    batch_sharpness,
    gn_norm_certificate,
    preconditioned_sharpness,
    preconditioner_of,
)
from metacal.errors import InputError


@pytest.mark.parametrize("name", NETS)
def test_batch_sharpness(name: str) -> None:
    model, x, y = build(name, n=9)
    batches = [(x[i : i + 3], y[i : i + 3]) for i in (0, 3, 6)]
    values = []
    for xb, yb in batches:
        g = dense.flat(torch.autograd.grad(dense.mean_loss(model(xb), yb, "cross_entropy"), dense.trainable(model)))
        values.append(float(g @ dense.hessian(model, xb, yb) @ g / (g @ g)))
    e = batch_sharpness(model, batches)
    t = torch.tensor(values, dtype=torch.float64)
    assert e.value == pytest.approx(float(t.mean()), rel=1e-9) and e.draws == 3
    assert e.stderr == pytest.approx(float(t.std()) / math.sqrt(3), rel=1e-6)


def test_batch_sharpness_bad_input_and_zero_gradients() -> None:
    model, x, y = build("mlp tanh")
    with pytest.raises(InputError, match="at least one mini-batch"):
        batch_sharpness(model, [])
    with pytest.raises(InputError, match="must yield"):
        batch_sharpness(model, [x])  # type: ignore[list-item]
    one = batch_sharpness(model, [(x, y)])
    assert math.isnan(one.stderr) and math.isfinite(one.value)
    with torch.no_grad():
        model[5].weight.zero_()
        model[5].bias.copy_(torch.tensor([2000.0, 0, 0, 0]))
    with pytest.raises(InputError, match="exactly zero in all 1"):
        batch_sharpness(model, [(x, torch.zeros_like(y))])


@pytest.mark.parametrize("name", ["mlp tanh", "cnn batchnorm train", "attention"])
def test_preconditioned_sharpness_with_a_list(name: str) -> None:
    model, x, y = build(name)
    params = dense.trainable(model)
    g = torch.Generator().manual_seed(3)
    p = [torch.rand(t.shape, generator=g, dtype=torch.float64) + 0.1 for t in params]
    scale = dense.flat(p).rsqrt()
    true = torch.linalg.eigvalsh(scale[:, None] * dense.hessian(model, x, y) * scale)[-1]
    e = preconditioned_sharpness(model, x, y, p, tol=1e-5)
    assert e.converged and e.value == pytest.approx(float(true), rel=1e-5)
    warm = preconditioned_sharpness(model, x, y, p, tol=1e-4, start=e.vector)
    assert warm.products <= e.products and warm.value == pytest.approx(e.value, rel=2e-4)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_preconditioner_is_what_the_optimizer_divides_by(kind: type, amsgrad: bool) -> None:
    """From the step itself: with β₁ = 0 the step is lr · g / P."""
    model, x, y = build("mlp tanh")
    optimizer = kind(model.parameters(), lr=1e-3, betas=(0.0, 0.9), weight_decay=0.0, amsgrad=amsgrad)
    for _ in range(3):
        optimizer.zero_grad()
        dense.mean_loss(model(x), y, "cross_entropy").backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    p = preconditioner_of(model, optimizer)
    for a, b, g, d in zip(before, model.parameters(), [q.grad for q in model.parameters()], p):
        assert torch.allclose((a - b.detach()) / 1e-3 * d, g, atol=1e-9)
    scale = dense.flat(p).rsqrt()
    true = torch.linalg.eigvalsh(scale[:, None] * dense.hessian(model, x, y) * scale)[-1]
    assert preconditioned_sharpness(model, x, y, optimizer, tol=1e-4).value == pytest.approx(float(true), rel=1e-4)


def test_preconditioner_bad_input() -> None:
    model, x, y = build("mlp tanh")
    params = list(model.parameters())
    with pytest.raises(InputError, match="take a step first"):
        preconditioned_sharpness(model, x, y, torch.optim.Adam(params))
    with pytest.raises(InputError, match="Adam or AdamW optimizer, got SGD"):
        preconditioned_sharpness(model, x, y, torch.optim.SGD(params, lr=0.1))
    with pytest.raises(InputError, match="does not hold the model's parameter"):
        preconditioned_sharpness(model, x, y, torch.optim.Adam(build("mlp tanh")[0].parameters()))
    bad = [torch.ones_like(p) for p in params]
    bad[0][0, 0] = 0
    with pytest.raises(InputError, match="positive and finite"):
        preconditioned_sharpness(model, x, y, bad)
    with pytest.raises(InputError, match="must hold 6 tensors"):
        preconditioned_sharpness(model, x, y, bad[:2])


# -- λ_max(G) ≤ 2(K-1) mean(‖J_i‖² e^{-m̂_i}) ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NETS if n not in DEPENDENT])
def test_certificate_against_dense_jacobians(name: str) -> None:
    model, x, y = build(name)
    z = model(x).detach()
    top = z.topk(2).values
    norms = torch.linalg.matrix_norm(dense.jacobian(model, x), ord=2) ** 2
    c = gn_norm_certificate(model, x, y, tol=1e-6, chunk_size=4)
    assert c.value == pytest.approx(float(torch.linalg.eigvalsh(dense.ggn(model, x))[-1]), rel=1e-6)
    assert c.bound == pytest.approx(float(2 * (K - 1) * (norms * (top[:, 1] - top[:, 0]).exp()).mean()), rel=1e-9)
    own = z.gather(1, y[:, None])[:, 0]
    margin = own - z.scatter(1, y[:, None], -math.inf).amax(1)
    assert c.loose == pytest.approx(float(2 * (K - 1) * norms.max() * (-margin).exp().mean()), rel=1e-9)
    assert c.value <= c.bound <= c.loose and c.ratio == pytest.approx(c.value / c.bound)


@settings(max_examples=30)
@given(
    st.integers(2, 6),
    st.integers(1, 8),
    st.floats(0.05, 30),
    st.sampled_from([nn.Tanh, nn.ReLU]),
    st.integers(0, 10**6),
)
def test_certificate_is_never_violated(k: int, n: int, scale: float, act: type, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), act(), nn.Linear(4, k)).double()
        with torch.no_grad():
            model[2].weight.mul_(scale)
            model[2].bias.mul_(scale)
        x, y = torch.randn(n, 3, dtype=torch.float64), torch.randint(0, k, (n,))
    c = gn_norm_certificate(model, x, y, tol=1e-4)
    assert c.value <= c.bound * (1 + 1e-9) and c.bound <= c.loose * (1 + 1e-9)


def test_certificate_holds_along_training() -> None:
    model, x, y = build("mlp tanh", n=24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(60):
        optimizer.zero_grad()
        dense.mean_loss(model(x), y, "cross_entropy").backward()
        optimizer.step()
        if step % 10 == 0:
            c = gn_norm_certificate(model, x, y)
            assert 0 < c.value <= c.bound <= c.loose


def test_certificate_refuses_coupled_examples() -> None:
    model, x, y = build("cnn batchnorm train")
    with pytest.raises(InputError, match="per-example Jacobian is meaningless"):
        gn_norm_certificate(model, x, y)
