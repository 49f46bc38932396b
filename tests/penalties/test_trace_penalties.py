"""hessian_trace and gn_trace as penalties: every route unbiased in value and gradient, against dense matrices.

All estimators are quadratic in their signs, so their mean over the rows of a Hadamard matrix, whose columns are
orthogonal, is their exact expectation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autodiff.nets import NETS, K, build
from reference import curvature as dense
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from metacal.autodiff.plain import PlainNorms
from metacal.curvature.forms import quadratic_by_reverse, quadratic_by_tape
from metacal.curvature.problem import Problem
from metacal.curvature.sampling import Probe
from metacal.errors import InputError
from metacal.models import Backbone
from metacal.penalties import PENALTIES, TracePenalty, gn_trace, hessian_trace

CLOSED = {"linear", "mlp tanh", "mlp deep tanh", "mlp gelu", "mlp relu", "mlp mixed"}
PIECEWISE = {"cnn batchnorm eval", "resnet in-place eval"}
LAYERS = {*PIECEWISE, "cnn tanh", "cnn groupnorm"}  # for Tr G


def trace_and_route(which, model, x, y, probes=1, seed=0, loss="cross_entropy"):
    """The penalty's value, and the route that it took."""
    penalty = TracePenalty(which, probes, seed=seed, loss=loss)
    return penalty(model, x, y), penalty.route


def matrix(which: str, model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy") -> Tensor:
    return dense.hessian(model, x, y, loss) if which == "hessian" else dense.ggn(model, x, loss)


def hadamard(size: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


class Enumerated:
    """Stands in for `Probe.signs` and `Probe.rows`: slices of one row of a Hadamard matrix, in the order of calls.

    Signs that are drawn for each sample may be the same for all of them: samples enter separately.
    """

    def __init__(self, size: int, samples: int | None) -> None:
        self.rows, self.samples = hadamard(size), samples
        self.row = 0
        self.places: dict[int, int] = {}
        self.used = 0

    def __call__(self, probe: Any, index: int, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        width = shape[1] if self.samples is not None else shape[0]
        if place not in self.places:
            self.places[place] = self.used
            self.used += width
        at = self.places[place]
        signs = self.rows[self.row, at : at + width].to(like.dtype)
        assert len(signs) == width, "the Hadamard matrix is too small"
        return signs if self.samples is None else signs.expand(shape)


def expectation(f: Callable[[], Tensor], model: nn.Module, size: int, samples: int | None, patch: Any) -> Any:
    """Exact mean of the value and of the gradient in θ."""
    signs = Enumerated(size, samples)
    patch.setattr(Probe, "signs", lambda *args: signs(*args))
    patch.setattr(Probe, "rows", lambda *args: signs(*args))
    params = dense.trainable(model)
    total, slope = 0.0, torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    for row in range(len(signs.rows)):
        signs.row = row
        value = f()
        grads = torch.autograd.grad(value, params, allow_unused=True)
        slope += dense.flat([torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)])
        total += value.item()
    return total / len(signs.rows), slope / len(signs.rows)


def check_slope(slope: Tensor, exact: Callable[[], Tensor], model: nn.Module, h: float = 5e-6) -> None:
    """⟨slope, d⟩ against fourth-order central differences of the exact trace, along a random d."""
    params = dense.trainable(model)
    d = torch.randn(slope.shape, generator=torch.Generator().manual_seed(0), dtype=slope.dtype)
    parts = dense.unflat(d, params)

    def at(shift: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(params, parts, alpha=shift)
        found = float(exact().trace())
        with torch.no_grad():
            torch._foreach_add_(params, parts, alpha=-shift)
        return found

    expected = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    assert float(slope @ d) == pytest.approx(expected, rel=1e-6, abs=1e-7)


# -- every route, exactly -------------------------------------------------------------------------------------------


def _cases() -> list[Any]:
    dear = {"attention", "cnn groupnorm", "cnn batchnorm train", "cnn tanh"}
    cases = [(name, which) for name in NETS for which in ("hessian", "gn")]
    slow = [(n, w) for n, w in cases if n in dear and not (w == "gn" and n in LAYERS)]
    slow += [("resnet in-place train", "hessian")]
    return [pytest.param(*case, marks=pytest.mark.slow if case in slow else ()) for case in cases]


@pytest.mark.parametrize(("name", "which"), _cases())
def test_value_and_gradient_are_unbiased(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build(name, n=4)
    _, route = trace_and_route(which, model, x, y)
    size = sum(p.numel() for p in dense.trainable(model))
    if name in CLOSED:
        assert route == "closed form"
        size, samples = (32, 4)
    elif name in (LAYERS if which == "gn" else PIECEWISE):
        assert route == "layers"
        size, samples = (K, 4)
    else:
        assert route == "jets"
        samples = None
    value, slope = expectation(lambda: trace_and_route(which, model, x, y)[0], model, size, samples, monkeypatch)
    assert value == pytest.approx(float(matrix(which, model, x, y).trace()), rel=1e-9)
    check_slope(slope, lambda: matrix(which, model, x, y), model)


@pytest.mark.parametrize("which", ["hessian", "gn"])
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "mlp tanh",
        "mlp deep tanh",
        "tied",
        pytest.param("resnet in-place train", marks=pytest.mark.slow),
        pytest.param("cnn groupnorm", marks=pytest.mark.slow),
    ],
)
def test_mean_squared_error(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build(name, n=4)
    route = trace_and_route(which, model, x, y, loss="mse")[1]
    size = {"closed form": 32, "layers": K}.get(route, sum(p.numel() for p in dense.trainable(model)))
    samples = None if route == "jets" else 4
    value, slope = expectation(
        lambda: trace_and_route(which, model, x, y, loss="mse")[0], model, size, samples, monkeypatch
    )
    assert value == pytest.approx(float(matrix(which, model, x, y, "mse").trace()), rel=1e-9)
    check_slope(slope, lambda: matrix(which, model, x, y, "mse"), model)


@pytest.mark.parametrize("which", ["hessian", "gn"])
@pytest.mark.parametrize("name", NETS)
def test_jets_and_reverse_agree_with_the_dense_matrix(name: str, which: str, check_gradient) -> None:
    model, x, y = build(name, n=4)
    params = dense.trainable(model)
    g = torch.Generator().manual_seed(1)
    v = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in params]
    exact = float(dense.flat(v) @ matrix(which, model, x, y) @ dense.flat(v))
    problem = Problem.of(model, x, y)
    routes = (quadratic_by_tape, quadratic_by_reverse)
    for route in routes:
        assert float(route(problem, v, which == "hessian").detach()) == pytest.approx(exact, rel=1e-9)
    jets, reverse = (
        torch.autograd.grad(route(problem, v, which == "hessian"), params, allow_unused=True) for route in routes
    )
    for a, b in zip(jets, reverse):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["linear", "mlp tanh", "mlp relu", "resnet in-place eval"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_as_many_probes_as_columns_are_exact(name: str, loss: str) -> None:
    model, x, y = build(name)
    probes = K - 1 if loss == "cross_entropy" else K
    params = dense.trainable(model)
    for which in ("hessian", "gn"):
        value = trace_and_route(which, model, x, y, probes, loss=loss)[0]
        assert value.item() == pytest.approx(float(matrix(which, model, x, y, loss).trace()), rel=1e-9)
        grads = torch.autograd.grad(value, params, allow_unused=True)
        slope = dense.flat([torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)])
        check_slope(slope, lambda which=which: matrix(which, model, x, y, loss), model)


@pytest.mark.parametrize("which", ["hessian", "gn"])
@pytest.mark.parametrize(
    ("name", "probes"), [("mlp tanh", 1), ("mlp deep tanh", 2), ("cnn batchnorm eval", 1), ("tied", 2)]
)
def test_seeded_draws_are_unbiased_within_their_standard_errors(name: str, which: str, probes: int) -> None:
    model, x, y = build(name)
    params = dense.trainable(model)
    values, slopes = [], []
    d = dense.unflat(torch.randn(sum(p.numel() for p in params), dtype=torch.float64), params)
    for seed in range(40):
        value = trace_and_route(which, model, x, y, probes, seed)[0]
        values.append(value.item())
        grads = torch.autograd.grad(value, params, allow_unused=True)
        slopes.append(sum(float((g * t).sum()) for g, t in zip(grads, d) if g is not None))

    def exact(shift: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(params, d, alpha=shift)
        found = float(matrix(which, model, x, y).trace())
        with torch.no_grad():
            torch._foreach_add_(params, d, alpha=-shift)
        return found

    for draws, truth in ((values, exact(0.0)), (slopes, (exact(1e-5) - exact(-1e-5)) / 2e-5)):
        t = torch.tensor(draws, dtype=torch.float64)
        assert abs(float(t.mean()) - truth) < 4 * float(t.std()) / len(t) ** 0.5


# -- what decides the route -------------------------------------------------------------------------------------------


def test_a_perceptrons_given_logits_are_enough() -> None:
    model, x, y = build("mlp tanh")
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    logits = model(x)
    params = list(model.parameters())
    for f in (hessian_trace, gn_trace):
        calls.clear()
        given = f(model, x, y, logits=logits)
        assert calls == []
        own = f(model, x, y)
        assert len(calls) == 1
        torch.testing.assert_close(given, own)
        for a, b in zip(*(torch.autograd.grad(v, params, retain_graph=True) for v in (given, own))):
            torch.testing.assert_close(a, b)
    part = hessian_trace(model, x, y, batch=3, logits=logits)
    torch.testing.assert_close(part, hessian_trace(model, x[:3], y[:3]))


def test_logits_that_will_not_do_are_computed_again() -> None:
    model, x, y = build("mlp tanh")
    expected = hessian_trace(model, x, y)
    for logits in (model(x).detach(), model(x).bfloat16()):
        torch.testing.assert_close(hessian_trace(model, x, y, logits=logits), expected)


@pytest.mark.parametrize("name", ["mlp tanh", "resnet in-place train"])
def test_logits_of_copies_of_the_parameters_give_the_same_estimate(name: str) -> None:
    model, x, y = build(name)
    copies = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    state = {**copies, **{n: b.clone() for n, b in model.named_buffers()}}
    logits = torch.func.functional_call(model, state, (x,))
    torch.testing.assert_close(hessian_trace(model, x, y, logits=logits), hessian_trace(model, x, y))


def test_mixed_precision_around_it_changes_nothing() -> None:
    for name in ("mlp tanh", "resnet in-place train"):
        model, x, y = build(name)
        model, x = model.float(), x.float()
        expected = hessian_trace(model, x, y)
        with torch.autocast("cpu", torch.bfloat16):
            found = hessian_trace(model, x, y, logits=model(x))
        torch.testing.assert_close(found, expected)


# Up to 64 numbers each: as many rows of signs are gone through as the next power of two has.


class Doubled(nn.Module):
    """A weight that is used in two layers of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(torch.tanh(self.first(x)))))


class Normal(nn.Module):
    """An operation that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.head = nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.special.ndtr(self.norm(self.first(x) @ x.new_ones(5, 6))[:, :5]))


class Rewrites(nn.Module):
    """Reads a tensor after it was changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.mul_(2.0)
        return self.head(torch.tanh(h) * x[:, :5])


class TwoFaced(nn.Module):
    """The last layer's weight occurs below as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x) @ self.head.weight.t()))


def _normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.RMSNorm(4), nn.Linear(4, K))


class _Normal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.ndtr(x)


def _normed_normal() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(6, 4)), _Normal(), nn.RMSNorm(4), nn.Linear(4, K))


class NativeNorm(nn.Module):
    """Normalisation by a function that is not torch.nn.functional's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.layer_norm(self.first(x), (5,)))


def test_a_wrong_third_derivative_is_refused() -> None:
    model = NativeNorm().double()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(K, (4,))
    with pytest.raises(InputError, match="graph node NativeLayerNorm"):
        hessian_trace(model, x, y)


UNUSUAL = {
    Doubled: "jets",
    Normal: "reverse",
    Rewrites: "jets",
    TwoFaced: "jets",
    _normed: "jets",
    _normed_normal: "reverse",
}


@pytest.mark.parametrize(
    ("make", "which"),
    [
        *((make, "hessian") for make in UNUSUAL if make is not _normed_normal),
        *((make, "gn") for make in (Normal, Rewrites, _normed)),
        *(pytest.param(make, "gn", marks=pytest.mark.slow) for make in (Doubled, TwoFaced)),
        *(pytest.param(_normed_normal, which, marks=pytest.mark.slow) for which in ("hessian", "gn")),
    ],
)
def test_unusual_networks(make, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = make().double()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(K, (4,))
    found = trace_and_route(which, model, x, y)[1]
    assert found == UNUSUAL[make] or (which == "gn" and found == "layers")
    size = sum(p.numel() for p in dense.trainable(model))
    samples = 4 if found == "layers" else None
    value, slope = expectation(lambda: trace_and_route(which, model, x, y)[0], model, size, samples, monkeypatch)

    def exact() -> Tensor:
        # PyTorch has the double backward of weight normalisation wrong: spell it out for the dense Hessian as well
        with PlainNorms():
            return matrix(which, model, x, y)

    assert value == pytest.approx(float(exact().trace()), rel=1e-9)
    check_slope(slope, exact, model)
    if which == "hessian":
        assert value == pytest.approx(float(dense.hessian_by_differences(model, x, y).trace()), rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "mlp tanh",
        "tied",
        pytest.param("cnn tanh", marks=pytest.mark.slow),
        pytest.param("resnet in-place train", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("frozen", ["first", "last", "biases"])
def test_frozen_parameters_do_not_count(name: str, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build(name, n=4)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    if frozen == "biases":
        for m in layers:
            if m.bias is not None:
                m.bias.requires_grad_(False)
    else:
        layers[0 if frozen == "first" else -1].requires_grad_(False)
    route = trace_and_route("hessian", model, x, y)[1]
    size = 32 if route == "closed form" else sum(p.numel() for p in dense.trainable(model))
    value, slope = expectation(
        lambda: hessian_trace(model, x, y), model, size, 4 if route == "closed form" else None, monkeypatch
    )
    assert value == pytest.approx(float(matrix("hessian", model, x, y).trace()), rel=1e-9)
    check_slope(slope, lambda: matrix("hessian", model, x, y), model)


class Pair(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.net(x), None


@pytest.mark.parametrize("name", ["mlp tanh", "resnet in-place eval", "resnet in-place train", "cnn groupnorm"])
def test_backbones_and_pairs_give_what_their_net_gives(name: str) -> None:
    model, x, y = build(name)
    for f in (hessian_trace, gn_trace):
        expected = f(model, x, y, seed=2)
        for wrapped in (Backbone(model), Pair(model)):
            torch.testing.assert_close(f(wrapped, x, y, seed=2), expected)


# -- what it leaves alone, and what it depends on ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp tanh", "cnn batchnorm train", "cnn batchnorm eval", "cnn groupnorm"])
def test_networks_are_left_as_they_were(name: str, untouched) -> None:
    model, x, y = build(name)
    for f in (hessian_trace, gn_trace):
        untouched(lambda f=f: f(model, x, y), model)
    x, y = x, y
    with torch.no_grad():
        assert hessian_trace(model, x, y).requires_grad


def test_dropout_draws_from_a_stream_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Dropout(0.5), nn.Linear(30, K)).double()
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(K, (5,))
    state = torch.get_rng_state()
    first = hessian_trace(model, x, y, seed=1, step=3, logits=model(x))
    torch.set_rng_state(state)
    logits = model(x)
    after = torch.get_rng_state()
    again = hessian_trace(model, x, y, seed=1, step=3, logits=logits)
    assert torch.equal(torch.get_rng_state(), after) and torch.equal(first, again)
    assert not torch.equal(first, hessian_trace(model, x, y, seed=1, step=4, logits=logits))


def test_signs_follow_seed_and_step_alone() -> None:
    model, x, y = build("mlp tanh")
    penalty = PENALTIES["hessian_trace"](seed=5)
    assert isinstance(penalty, TracePenalty)
    penalty.step = 7
    value = penalty(model, x, y, model(x), None)
    assert penalty.route == "closed form"
    fresh = TracePenalty("hessian", seed=5, step=7)
    torch.manual_seed(99)
    assert torch.equal(value, fresh(model, x, y, model(x), None))
    assert torch.equal(value, hessian_trace(model, x, y, seed=5, step=7, logits=model(x)))
    assert not torch.equal(value, hessian_trace(model, x, y, seed=5, step=8))
    assert not torch.equal(value, hessian_trace(model, x, y, seed=6, step=7))


def test_parts_of_a_batch_add_up_where_signs_are_in_parameter_space() -> None:
    model, x, y = build("tied", n=7)
    whole = hessian_trace(model, x, y, seed=3)
    parts = 3 * hessian_trace(model, x[:3], y[:3], seed=3) + 4 * hessian_trace(model, x[3:], y[3:], seed=3)
    torch.testing.assert_close(parts / 7, whole)


def test_saturated_probabilities_leave_the_gradient_finite() -> None:
    model, x, y = build("mlp tanh")
    with torch.no_grad():
        model[-1].weight.mul_(1e4)
    for probes in (1, 3):
        value = hessian_trace(model, x, y, probes)
        grads = torch.autograd.grad(value, list(model.parameters()))
        assert bool(torch.isfinite(value)) and all(bool(torch.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"probes": 0}, "probes must be an integer >= 1, got 0"),
        ({"probes": 1.5}, "probes must be an integer >= 1"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"loss": "focal"}, "loss must be one of cross_entropy, mse"),
        ({"batch": 0}, "batch must be an integer >= 1"),
    ],
)
@pytest.mark.parametrize("f", [hessian_trace, gn_trace])
def test_bad_options_are_named(f, keys, message) -> None:
    model, x, y = build("mlp tanh")
    with pytest.raises(InputError, match=message):
        f(model, x, y, **keys)


def test_bad_models_and_batches_are_named() -> None:
    model, x, y = build("mlp tanh")
    with pytest.raises(InputError, match="same number of samples"):
        hessian_trace(model, x, y[:-1])
    with pytest.raises(InputError, match="logits must be those of x"):
        hessian_trace(model, x, y, logits=model(x[:2]))
    with pytest.raises(InputError, match="no trainable parameter"):
        hessian_trace(model.requires_grad_(False), x, y)
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module"):
        gn_trace(F.relu, x, y)


class Once(torch.autograd.Function):
    """Square without a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Once.apply(self.first(x)))


@pytest.mark.parametrize("f", [hessian_trace, gn_trace])
def test_what_has_no_trace_is_said_in_a_sentence(f) -> None:
    x, y = torch.randn(4, 6), torch.randint(K, (4,))
    with pytest.raises(InputError, match=r"_trace needs .*graph node torch::autograd::Error"):
        f(Squared(), x, y)
    for model in (nn.Linear(6, K), nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, K))):
        with pytest.raises(InputError, match="_trace is nan for this batch"):
            f(model, x * torch.nan, y)
    model = nn.Linear(6, K, dtype=torch.complex64)
    with pytest.raises(InputError, match=r"float32 or all float64, got \['torch.complex64'\]"):
        f(model, x.to(torch.complex64), y)


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(sparse: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=sparse), nn.Tanh(), nn.Linear(4, K)).double()
    ids, y = torch.tensor([[1, 2], [0, 4], [3, 3]]), torch.tensor([0, 1, 2])
    dense_model = nn.Sequential(nn.EmbeddingBag(5, 4), *model[1:]).double()
    dense_model.load_state_dict(model.state_dict())
    for f in (hessian_trace, gn_trace):
        values = [f(m, ids, y) for m in (model, dense_model)]
        torch.testing.assert_close(*values)
        grads = [torch.autograd.grad(v, list(m.parameters())) for v, m in zip(values, (model, dense_model))]
        for a, b in zip(*grads):
            torch.testing.assert_close(a.to_dense() if a.is_sparse else a, b)


def test_dropout_as_it_is_on_a_gpu_changes_no_route() -> None:
    class Dropout(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.native_dropout(x, 0.5, self.training)[0]  # which is what torch.dropout calls there

    estimates = []
    for dropout in (nn.Dropout(0.5), Dropout()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), dropout, nn.Flatten(), nn.Linear(12, 3))
        penalty = TracePenalty("hessian")
        estimates.append((float(penalty(net, torch.randn(6, 2, 4, 4), torch.arange(6) % 3).detach()), penalty.route))
    assert estimates[0] == estimates[1] and estimates[0][1] == "layers"
