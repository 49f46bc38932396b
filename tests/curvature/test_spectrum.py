"""Lanczos on matrices with known spectra and on small networks, against dense eigenvalues."""

from __future__ import annotations

import pytest
import torch
from autodiff.nets import DEPENDENT, NETS, build
from hypothesis import given
from hypothesis import strategies as st
from reference import curvature as dense

from metacal.curvature import (
    Curvature,
    extreme_eigenpairs,
    gn_sharpness,
    hessian_sharpness,
    top_eigenpairs,
)
from metacal.curvature.lanczos import MAX_BASIS, lanczos
from metacal.errors import InputError


def symmetric(values: list[float], seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=torch.float64))
    return q * torch.tensor(values, dtype=torch.float64) @ q.T


def start(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


spectra = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=1, max_size=12)


@given(spectra, st.sampled_from(["largest", "smallest", "magnitude"]), st.integers(0, 50))
def test_any_spectrum(values: list[float], which: str, seed: int) -> None:
    a = symmetric(values, seed)
    true = torch.linalg.eigvalsh(a)
    best = float({"largest": true[-1], "smallest": true[0], "magnitude": true.abs().max()}[which])
    for tol in (1e-3, 1e-9):
        (pair, *_), products = lanczos(lambda v: a @ v, start(len(values), seed), which=which, tol=tol)
        got = abs(pair.value) if which == "magnitude" else pair.value
        assert pair.converged and products <= len(values)
        assert true[0] - 1e-9 <= pair.value <= true[-1] + 1e-9
        # without any premise: some eigenvalue lies within the residual
        assert float((true - pair.value).abs().min()) <= pair.residual + 1e-9
        assert float((a @ pair.vector - pair.value * pair.vector).norm()) == pytest.approx(pair.residual, abs=1e-8)
    assert got == pytest.approx(best, rel=1e-7, abs=1e-7)


def test_repeated_eigenvalues_and_the_zero_matrix() -> None:
    a = symmetric([3.0, 3.0, 3.0, 1.0, 0.0])
    pairs, _ = lanczos(lambda v: a @ v, start(5), k=3, tol=1e-6)
    assert [p.value for p in pairs] == pytest.approx([3.0, 3.0, 3.0], abs=1e-8)
    basis = torch.stack([p.vector for p in pairs])
    assert torch.allclose(basis @ basis.T, torch.eye(3, dtype=torch.float64), atol=1e-8)
    pairs, products = lanczos(lambda v: 0 * v, start(5))
    assert pairs[0].value == 0 and pairs[0].converged and products == 1


def test_a_long_run_restarts_and_still_arrives() -> None:
    values = [float(v) for v in torch.linspace(0, 1, 300)]  # no gap at all: slow on purpose
    a = symmetric(values)
    pairs, products = lanczos(lambda v: a @ v, start(300), k=2, tol=1e-5, max_products=1000)
    assert products > MAX_BASIS and all(p.converged for p in pairs)
    assert [p.value for p in pairs] == pytest.approx(values[:-3:-1], rel=1e-5)


def test_both_ends_in_one_run_and_through_a_restart() -> None:
    a = symmetric([float(v) for v in torch.linspace(-2, 1, 200)])
    pairs, products = lanczos(lambda v: a @ v, start(200), which="both", tol=1e-4, max_products=500)
    assert products > MAX_BASIS
    assert [p.value for p in pairs] == pytest.approx([1.0, -2.0], rel=1e-4)


def test_running_out_of_products_is_said_and_the_bound_holds() -> None:
    a = symmetric([float(v) for v in torch.linspace(0, 1, 100)])
    (pair,), products = lanczos(lambda v: a @ v, start(100), tol=1e-8, max_products=5)
    assert products == 5 and not pair.converged
    assert float((torch.linalg.eigvalsh(a) - pair.value).abs().min()) <= pair.residual + 1e-12
    assert pair.bound > 1e-8 * pair.value


def test_magnitude_waits_for_the_other_end() -> None:
    a = symmetric([1.0, 0.9, -1.05, 0.2, 0.1, -0.3, 0.0, 0.05])
    (pair,), _ = lanczos(lambda v: a @ v, start(8), which="magnitude", tol=1e-3)
    assert pair.value == pytest.approx(-1.05, rel=1e-3)


def test_products_of_no_symmetric_matrix_are_refused() -> None:
    a = symmetric([3.0, 2.0, 1.0, 0.5]) + torch.triu(torch.ones(4, 4, dtype=torch.float64), 1)
    with pytest.raises(InputError, match="symmetric"):
        lanczos(lambda v: a @ v, start(4), tol=1e-6)
    with pytest.raises(InputError, match="non-finite"):
        lanczos(lambda v: v * float("nan"), start(4))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("name", NETS)
def test_sharpness_of_networks(name: str, loss: str) -> None:
    model, x, y = build(name)
    gn = torch.linalg.eigvalsh(dense.ggn(model, x, loss))
    h = torch.linalg.eigvalsh(dense.hessian(model, x, y, loss))
    rough = gn_sharpness(model, x, y, tol=1e-2, loss=loss)
    assert rough.converged and rough.bound <= 1e-2 * rough.value
    # in a crowded spectrum the rough run may stop at the second eigenvalue; some eigenvalue it is always
    assert float((gn - rough.value).abs().min()) <= rough.residual
    assert 0.9 * float(gn[-1]) <= rough.value <= float(gn[-1]) * (1 + 1e-9)
    e = gn_sharpness(model, x, y, tol=1e-5, loss=loss)
    assert e.converged and e.value == pytest.approx(float(gn[-1]), rel=1e-5)
    largest = hessian_sharpness(model, x, y, tol=1e-5, which="magnitude", loss=loss)
    assert largest.value == pytest.approx(float(h[h.abs().argmax()]), rel=1e-5)
    assert hessian_sharpness(model, x, y, tol=1e-5, which="algebraic", loss=loss).value == pytest.approx(
        float(h[-1]), rel=1e-5
    )
    top, bottom = extreme_eigenpairs(model, x, y, tol=1e-4, loss=loss)
    assert top.value == pytest.approx(float(h[-1]), rel=1e-4)
    assert bottom.value == pytest.approx(float(h[0]), rel=1e-4, abs=1e-4 * float(h[-1]))
    assert largest.route == e.route == "tape"


def test_eigenvectors_are_eigenvectors() -> None:
    model, x, y = build("mlp tanh")
    g = dense.ggn(model, x)
    for e in top_eigenpairs(model, x, y, 4, tol=1e-6):
        v = dense.flat(e.vector)
        assert [t.shape for t in e.vector] == [p.shape for p in model.parameters()]
        assert float(v.norm()) == pytest.approx(1)
        assert float((g @ v - e.value * v).norm()) == pytest.approx(e.residual, abs=1e-10)


@pytest.mark.parametrize("matrix", ["gn", "hessian"])
def test_top_eigenpairs(matrix: str) -> None:
    model, x, y = build("attention")
    full = dense.ggn(model, x) if matrix == "gn" else dense.hessian(model, x, y)
    true = torch.linalg.eigvalsh(full).flip(0)
    pairs = top_eigenpairs(model, x, y, 5, matrix=matrix, tol=1e-5)
    assert [e.value for e in pairs] == pytest.approx(true[:5].tolist(), rel=1e-5)


def test_a_warm_start_saves_products() -> None:
    model, x, y = build("mlp tanh", n=30)
    cold = gn_sharpness(model, x, y, tol=1e-4)
    warm = gn_sharpness(model, x, y, tol=1e-4, start=cold.vector)
    assert warm.products < cold.products
    assert warm.value == pytest.approx(cold.value, rel=2e-4)


def test_a_start_orthogonal_to_the_top_vector_does_not_stop_below_it() -> None:
    model, x, y = build("mlp tanh", n=30)
    top, second = top_eigenpairs(model, x, y, 2, tol=1e-8)
    e = gn_sharpness(model, x, y, tol=1e-2, start=second.vector)
    assert top.value > 1.05 * second.value  # else the test shows nothing
    assert e.value == pytest.approx(top.value, rel=2e-2) or e.bound < 1e-2 * e.value


@pytest.mark.parametrize("name", [n for n in NETS if n not in DEPENDENT])
def test_chunks_change_nothing(name: str) -> None:
    model, x, y = build(name)
    one = gn_sharpness(model, x, y, tol=1e-6)
    two = gn_sharpness(model, x, y, tol=1e-6, chunk_size=4)
    assert two.value == pytest.approx(one.value, rel=1e-10) and two.products == one.products


def test_float32_reaches_its_tolerance() -> None:
    model, x, y = build("cnn tanh", n=20)
    true = float(torch.linalg.eigvalsh(dense.ggn(model, x))[-1])
    e = gn_sharpness(model.float(), x.float(), y, tol=1e-3)
    assert e.converged and e.value == pytest.approx(true, rel=1e-3)


def test_a_zero_gradient_still_has_a_start() -> None:
    model, x, y = build("linear", n=4)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    x, y = torch.cat([x] * 4), torch.arange(4).repeat_interleave(4)  # every input with every label
    with Curvature(model, x, y) as c:
        assert max(float(g.abs().max()) for g in c.gradient()) < 1e-12
    true = float(torch.linalg.eigvalsh(dense.ggn(model, x))[-1])
    assert gn_sharpness(model, x, y, tol=1e-4).value == pytest.approx(true, rel=1e-4)


@pytest.mark.parametrize("name", ["cnn batchnorm eval", "cnn tanh"])
def test_a_quarter_of_the_examples_gives_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metacal.curvature.blocks.CACHE_BLOCK", 2)
    model, x, y = build(name, n=12)
    g, h = dense.ggn(model, x), dense.hessian(model, x, y)
    with Curvature(model, x, y) as c:
        v = [torch.ones_like(p) for p in c.params]
        whole = dense.flat(c.gn(v))
        with c.quarter() as apart:
            assert apart
            rows = [0, 1, 8, 9]
            share = dense.ggn(model, x[rows]) * len(rows) / len(x)
            assert torch.allclose(dense.flat(c.gn(v)), share @ dense.flat(v), atol=1e-12)
        assert torch.equal(dense.flat(c.gn(v)), whole)
    gn = gn_sharpness(model, x, y, tol=1e-6)
    assert gn.converged and gn.value == pytest.approx(float(torch.linalg.eigvalsh(g)[-1]), rel=1e-6)
    top = hessian_sharpness(model, x, y, tol=1e-6)
    values = torch.linalg.eigvalsh(h)
    assert top.converged and top.value == pytest.approx(float(values[values.abs().argmax()]), rel=1e-6)
