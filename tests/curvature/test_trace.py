"""Tr G and Tr H: exact forms against dense matrices, sampled ones unbiased within their own standard errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from autodiff.nets import DEPENDENT, NETS, K, build
from hypothesis import given
from hypothesis import strategies as st
from reference import curvature as dense
from torch import Tensor, nn

from metacal.curvature import gn_sharpness, gn_trace, hessian_trace
from metacal.curvature.layers import capture, per_example_gram
from metacal.curvature.loss import FactorColumns, logit_factor, logit_pullback, logit_trace
from metacal.curvature.problem import Problem
from metacal.curvature.sampling import signs_at
from metacal.errors import InputError

CLOSED = {"linear", "mlp tanh", "mlp deep tanh", "mlp gelu", "mlp relu", "mlp mixed"}
MULTILINEAR = {"cnn batchnorm eval", "resnet in-place eval"}
ACTIVATION = {"cnn tanh"}


# Each takes as many products as it has parameters: the squared error on them is for the slow tests.
DIAGONAL = {"cnn groupnorm", "cnn batchnorm train", "resnet in-place train", "attention"}


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        pytest.param(name, loss, marks=pytest.mark.slow if loss == "mse" and name in DIAGONAL else ())
        for name in NETS
        for loss in ("cross_entropy", "mse")
    ],
)
def test_exact_traces(name: str, loss: str) -> None:
    model, x, y = build(name)
    g = gn_trace(model, x, y, exact=True, loss=loss)
    assert g.value == pytest.approx(float(dense.ggn(model, x, loss).trace()), rel=1e-9) and g.stderr == 0
    h = hessian_trace(model, x, y, exact=True, loss=loss)
    assert h.value == pytest.approx(float(dense.hessian(model, x, y, loss).trace()), rel=1e-9) and h.stderr == 0
    if name in CLOSED:
        assert h.method.startswith("closed form")
    elif name in MULTILINEAR:
        assert h.method.startswith("Tr H = Tr G")
    else:
        assert h.method.startswith("diagonal")


def test_the_method_is_the_least_noisy_that_the_network_allows() -> None:
    for name in NETS:
        method = hessian_trace(*build(name)).method
        if name in ACTIVATION:
            assert method.startswith("activation space")
        elif name in DEPENDENT:
            assert "batch form" in method and "BatchNorm" in method
        elif name not in CLOSED | MULTILINEAR:
            assert method.startswith("Tr G + Hutchinson")


SAMPLED = [
    ("mlp tanh", 1),
    ("mlp tanh", 3),
    ("mlp deep tanh", 1),
    ("cnn tanh", 1),
    pytest.param("cnn groupnorm", 2, marks=pytest.mark.slow),
    pytest.param("resnet in-place train", 2, marks=pytest.mark.slow),
    pytest.param("attention", 2, marks=pytest.mark.slow),
    pytest.param("tied", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("which", ["gn", "hessian"])
@pytest.mark.parametrize(("name", "probes"), SAMPLED)
def test_estimates_are_unbiased_within_their_standard_errors(name: str, which: str, probes: int) -> None:
    model, x, y = build(name)
    estimate, matrix = (gn_trace, dense.ggn(model, x)) if which == "gn" else (hessian_trace, dense.hessian(model, x, y))
    draws = [estimate(model, x, y, probes=probes, seed=s) for s in range(100)]
    values = torch.tensor([d.value for d in draws])
    claimed = math.sqrt(sum(d.stderr**2 for d in draws) / len(draws))
    assert abs(float(values.mean() - matrix.trace())) < 4 * float(values.std()) / math.sqrt(len(draws))
    assert claimed == pytest.approx(float(values.std()), rel=0.35)


@pytest.mark.parametrize("name", ["mlp tanh", "mlp deep tanh", "cnn tanh", "attention", "tied"])
def test_chunks_change_nothing_even_where_sampled(name: str) -> None:
    model, x, y = build(name, n=7)
    for estimate in (gn_trace, hessian_trace):
        whole = estimate(model, x, y, probes=2, seed=3)
        part = estimate(model, x, y, probes=2, seed=3, chunk_size=3)
        assert part.value == pytest.approx(whole.value, rel=1e-10)
        assert part.stderr == pytest.approx(whole.stderr, rel=1e-8)


@pytest.mark.parametrize(
    "name",
    [
        *("mlp tanh", "mlp deep tanh", "tied"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cnn tanh", "attention")),
    ],
)
def test_neither_chunks_nor_the_order_of_examples_change_an_exact_trace(name: str) -> None:
    model, x, y = build(name, n=7)
    for estimate in (gn_trace, hessian_trace):
        exact = estimate(model, x, y, exact=True)
        order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
        assert estimate(model, x[order], y[order], exact=True, chunk_size=3).value == pytest.approx(
            exact.value, rel=1e-10
        )


def test_seeds_fix_the_value_and_the_global_generator_is_not_read() -> None:
    model, x, y = build("cnn groupnorm")
    state = torch.get_rng_state()
    first = hessian_trace(model, x, y, seed=5)
    torch.manual_seed(99)
    assert hessian_trace(model, x, y, seed=5) == first and hessian_trace(model, x, y, seed=6) != first
    torch.set_rng_state(state)


@given(st.lists(st.floats(-300, 300), min_size=2, max_size=6), st.integers(0, 1000))
def test_factor_of_the_logit_hessian(row: list[float], seed: int) -> None:
    z = torch.tensor([row], dtype=torch.float64)
    s = dense.logit_hessians(z, "cross_entropy")[0]
    columns = torch.cat(list(FactorColumns(z, "cross_entropy")))
    assert len(columns) == len(row) - 1
    assert torch.allclose(columns.T @ columns, s, atol=1e-12)
    eye = torch.eye(len(row), dtype=torch.float64)
    root = torch.cat([logit_factor(z, e[None], "cross_entropy") for e in eye])
    assert torch.allclose(root.T @ root, s, atol=1e-12)


@given(
    st.lists(st.floats(-40, 40), min_size=2, max_size=6),
    st.integers(0, 1000),
    st.sampled_from(["cross_entropy", "mse"]),
)
def test_logit_hessian_through_a_layer_without_the_matrix(row: list[float], seed: int, loss: str) -> None:
    """Also in float32, with digits where the others' probability is 1e-17."""
    z = torch.tensor([row], dtype=torch.float64)
    w = torch.randn(len(row), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 5
    columns = torch.cat(list(FactorColumns(z, loss)))
    through = columns @ w
    full = (through.T @ through)[None]
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
        scale = float(full.diagonal(dim1=1, dim2=2).max())
        got = logit_pullback(z.to(dtype), w.to(dtype), loss, False).double()
        torch.testing.assert_close(got, full, rtol=tol, atol=tol * scale)
        diagonal = logit_pullback(z.to(dtype), w.to(dtype), loss, True).double()
        torch.testing.assert_close(diagonal, full.diagonal(dim1=1, dim2=2), rtol=tol, atol=tol * scale)
        trace = columns.square().sum()[None]
        torch.testing.assert_close(
            logit_trace(z.to(dtype), loss).double(), trace, rtol=1e-4 if tol > 1e-6 else 1e-9, atol=0
        )


@pytest.mark.parametrize("k", [3, 12])
@pytest.mark.parametrize("hidden", [1, 2, 3])
def test_exact_traces_of_perceptrons_with_fewer_and_more_classes_than_units(hidden: int, k: int) -> None:
    torch.manual_seed(0)
    sizes = [4, *[5] * hidden, k]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())][:-1]
    model, x, y = nn.Sequential(*layers).double(), torch.randn(7, 4).double(), torch.randint(k, (7,))
    for loss in ("cross_entropy", "mse"):
        g, h = (f(model, x, y, exact=True, loss=loss) for f in (gn_trace, hessian_trace))
        assert g.value == pytest.approx(float(dense.ggn(model, x, loss).trace()), rel=1e-10)
        assert h.value == pytest.approx(float(dense.hessian(model, x, y, loss).trace()), rel=1e-10)


def test_factor_survives_underflow_with_a_finite_gradient() -> None:
    z = torch.tensor([[0.0, -2000.0, 300.0]], requires_grad=True)
    out = logit_factor(z, torch.ones_like(z), "cross_entropy")
    (g,) = torch.autograd.grad(out.sum(), z)
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(g).all())


def test_signs_are_balanced_uncorrelated_and_local() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    a, b = signs_at((4000, 10), 0, (1, 0), like), signs_at((4000, 10), 0, (1, 1), like)
    assert set(a.unique().tolist()) == {-1.0, 1.0}
    for t in (a, a * b, a[1:] * a[:-1], a[:, 1:] * a[:, :-1]):
        assert abs(float(t.mean())) < 4 / math.sqrt(t.numel())
    assert torch.equal(signs_at((100, 10), 50, (1, 0), like), a[50:150])


# -- per-example gradients, layer by layer ---------------------------------------------------------------------


def gram_of_jacobian(model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    rows = torch.einsum("nkp,nck->ncp", dense.jacobian(model, x), w)
    return rows @ rows.transpose(1, 2)


CONVOLUTIONS = {
    "strided": {"kernel_size": 3, "stride": 2},
    "asymmetric": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1, "bias": False},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": "same"},
    "same, even kernel": {"kernel_size": 4, "padding": "same", "dilation": 2},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "reflect valid": {"kernel_size": 3, "padding": "valid", "padding_mode": "reflect"},
    "pointwise": {"kernel_size": 1, "stride": 2},
    "whole image": {"kernel_size": 6},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("columns", [1, 3])
def test_convolutions(name: str, columns: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, **CONVOLUTIONS[name])
    model = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(K))
    x = torch.randn(5, 4, 6, 6, dtype=torch.float64)
    model(x.float())
    model.double()
    check_gram(model, x, columns)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("wide", [False, True])
def test_linear_over_positions_both_ways(columns: int, wide: bool) -> None:
    torch.manual_seed(0)
    d = 40 if wide else 3  # 4 positions: the Gram form pays for wide layers, the explicit one for narrow ones
    model = nn.Sequential(
        nn.Linear(d, d), nn.LayerNorm(d), nn.Tanh(), nn.Linear(d, d), nn.Flatten(), nn.Linear(4 * d, K)
    )
    check_gram(model.double(), torch.randn(5, 4, d, dtype=torch.float64), columns)


@pytest.mark.parametrize("name", [n for n in NETS if n not in DEPENDENT])
def test_networks_and_their_covered_layers(name: str) -> None:
    model, x, _ = build(name)
    check_gram(model, x, 2)
    problem = Problem.of(model, x, torch.zeros(len(x), dtype=torch.long))
    with problem.math():
        captured = capture(problem)
    expected = {"attention": ["position"], "tied": ["shared.weight", "shared.bias"]}.get(name, [])
    assert captured.others == expected


def check_gram(model: nn.Module, x: Tensor, columns: int) -> None:
    w = torch.randn(len(x), columns, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    problem = Problem.of(model, x, torch.zeros(len(x), dtype=torch.long))
    with problem.math():
        got = per_example_gram(capture(problem), w)
    assert torch.allclose(got, gram_of_jacobian(model, x, w), rtol=1e-9, atol=1e-12)


class Overwriting(nn.Module):
    """Overwrites a layer's input after the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, K)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        h = self.first(x)
        x.zero_()
        return self.head(torch.tanh(h))


def test_an_overwritten_input_is_no_silent_error() -> None:
    model = Overwriting()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        check_gram(model, torch.randn(5, 6, dtype=torch.float64), 1)


class SequenceFirst(nn.Module):
    """Works on (T, N, D) inside: with T = N the shapes alone would not give it away."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, K)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.transpose(0, 1))).sum(0))


def test_a_sequence_first_layer_with_as_many_steps_as_examples() -> None:
    torch.manual_seed(0)
    model = SequenceFirst()
    check_gram(model, torch.randn(5, 5, 3, dtype=torch.float64), 2)


class NoVmap(nn.Module):
    """A plain parameter behind data-dependent Python: vmap cannot follow, the loop over examples can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, K)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().sum()) < 0:
            raise AssertionError
        return self.head(x * self.scale)


def test_where_vmap_fails_a_loop_does_the_same() -> None:
    torch.manual_seed(0)
    check_gram(NoVmap(), torch.randn(4, 6, dtype=torch.float64), 2)


class CustomBatchCentring(nn.Module):
    """Couples the examples without being a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, K)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        return z - z.mean(0)


def test_coupled_examples_are_noticed_whatever_couples_them() -> None:
    torch.manual_seed(0)
    model, x, y = CustomBatchCentring(), torch.randn(6, 6, dtype=torch.float64), torch.randint(0, K, (6,))
    e = gn_trace(model, x, y, exact=True)
    assert "an example's logits change" in e.method
    with pytest.raises(InputError, match="changes the result, since an example's logits change"):
        gn_sharpness(model, x, y, chunk_size=2)
    assert e.value == pytest.approx(float(dense.ggn(model, x).trace()), rel=1e-9)


def test_exact_is_refused_where_it_is_out_of_reach() -> None:
    model, x, y = build("attention")
    big = nn.Sequential(nn.Linear(6, 900), nn.LayerNorm(900), nn.Linear(900, K)).double()
    with pytest.raises(InputError, match="exact=True needs one product a parameter"):
        hessian_trace(big, x[:, 0].repeat(1, 2), y, exact=True)
    with pytest.raises(InputError, match="probes must be at least 1, got 0"):
        gn_trace(model, x, y, probes=0)


def test_frozen_layers_do_not_count() -> None:
    model, x, y = build("mlp tanh")
    model[1].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    assert gn_trace(model, x, y, exact=True).value == pytest.approx(float(dense.ggn(model, x).trace()), rel=1e-9)
    h = hessian_trace(model, x, y, exact=True)
    assert h.value == pytest.approx(float(dense.hessian(model, x, y).trace()), rel=1e-9)


def test_functional_activations_are_seen_in_the_graph() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, K)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.sigmoid(self.b(torch.tanh(self.a(x)))))

    torch.manual_seed(0)
    model, x, y = Functional().double(), torch.randn(5, 6, dtype=torch.float64), torch.randint(0, K, (5,))
    h = hessian_trace(model, x, y, exact=True)
    assert h.method == "closed form, exact"
    assert h.value == pytest.approx(float(dense.hessian(model, x, y).trace()), rel=1e-9)
