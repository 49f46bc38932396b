"""J v, G v and H v against dense float64 matrices, by every route, in chunks, and with nothing left behind."""

from __future__ import annotations

import copy
import doctest
from collections.abc import Sequence

import pytest
import torch
from autodiff.nets import DEPENDENT, NETS, K, build, build_training
from reference import curvature as dense
from torch import Tensor, nn

from metacal.autodiff import derivatives
from metacal.autodiff.kinds import elementwise
from metacal.autodiff.rules import RULES
from metacal.curvature import Curvature, ggn_product, gn_sharpness, gn_trace, hessian_product, hessian_trace
from metacal.errors import InputError


def vector_like(params: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g, dtype=torch.float64) for p in params]


def close(a: Sequence[Tensor], b: Tensor, tol: float = 1e-9) -> bool:
    return float((dense.flat(a) - b).norm()) <= tol * float(b.norm())


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("name", NETS)
def test_every_route_agrees_with_the_dense_matrices(name: str, loss: str) -> None:
    model, x, y = build(name)
    params = dense.trainable(model)
    g, h, j = dense.ggn(model, x, loss), dense.hessian(model, x, y, loss), dense.jacobian(model, x)
    v = vector_like(params)
    flat = dense.flat(v)
    for route in ("auto", "tape", "reverse"):
        with Curvature(model, x, y, loss=loss, route=route) as c:
            assert close(c.gn(v), g @ flat)
            assert torch.allclose(c.jv(v), j @ flat, rtol=1e-9, atol=1e-9)
            assert c.gn_route == route or route == "auto"
    with Curvature(model, x, y, loss=loss) as c:
        assert close(c.hessian(v), h @ flat)
        quadratic = c.residual_quadratic(v)
        assert quadratic[0] == pytest.approx(float(flat @ h @ flat), rel=1e-9)
        assert quadratic[1] == pytest.approx(float(flat @ g @ flat), rel=1e-9)
        w = torch.randn(len(x), K, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        assert close(c.jtu(w), torch.einsum("nkp,nk->p", j, w))
        expected = dense.mean_loss(model(x), y, loss)
        assert close(c.gradient(), dense.flat(torch.autograd.grad(expected, params)))
        assert c.loss_value == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("name", ["mlp tanh", "cnn groupnorm", "attention"])
def test_the_hessian_reference_itself_agrees_with_differences_of_gradients(name: str) -> None:
    model, x, y = build(name, n=3)
    by_differences = dense.hessian_by_differences(model, x, y)
    assert torch.allclose(dense.hessian(model, x, y), by_differences, atol=1e-7)


@pytest.mark.parametrize("name", [n for n in NETS if n not in DEPENDENT])
def test_chunks_and_order_change_nothing(name: str) -> None:
    model, x, y = build(name, n=7)
    v = vector_like(dense.trainable(model))
    whole_g, whole_h = ggn_product(model, x, y, v), hessian_product(model, x, y, v)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    for size in (1, 3, 7, 100):
        with Curvature(model, x[order], y[order], chunk_size=size) as c:
            assert close(c.gn(v), dense.flat(whole_g), 1e-12)
            assert close(c.hessian(v), dense.flat(whole_h), 1e-12)
            assert close(c.gn(v), dense.flat(whole_g), 1e-12)


@pytest.mark.parametrize("name", sorted(DEPENDENT))
def test_batchnorm_in_training_mode_is_not_split(name: str) -> None:
    model, x, y = build(name)
    v = vector_like(dense.trainable(model))
    with pytest.raises(InputError, match="chunk_size=2 < 6 examples changes the result"):
        ggn_product(model, x, y, v, chunk_size=2)


def test_number_of_threads_changes_nothing_beyond_rounding() -> None:
    model, x, y = build("cnn batchnorm eval")
    v = vector_like(dense.trainable(model))
    one = dense.flat(hessian_product(model, x, y, v))
    torch.set_num_threads(2)
    try:
        two = hessian_product(model, x, y, v)
    finally:
        torch.set_num_threads(1)
    assert close(two, one, 1e-12)


@pytest.mark.parametrize("name", ["cnn batchnorm train", "resnet in-place train", "attention"])
def test_the_network_is_left_as_it_was(name: str) -> None:
    model, x, y = build(name)
    model.register_buffer("counter", torch.zeros(1))
    before, rng, mode = copy.deepcopy(model.state_dict()), torch.get_rng_state(), model.training
    v = vector_like(dense.trainable(model))
    with Curvature(model, x, y) as c:
        c.gn(v), c.hessian(v), c.gradient()
    with Curvature(model, x, y, route="reverse") as c:
        c.gn(v)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert model.training is mode and torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_only_trainable_parameters_count() -> None:
    model, x, y = build("mlp tanh")
    model[1].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    params = dense.trainable(model)
    v = vector_like(params)
    assert close(ggn_product(model, x, y, v), dense.ggn(model, x) @ dense.flat(v))
    assert close(hessian_product(model, x, y, v), dense.hessian(model, x, y) @ dense.flat(v))


def test_unused_parameters_give_zeros() -> None:
    _, x, y = build("mlp tanh")

    class Ignoring(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    wrapped = Ignoring(build("mlp tanh")[0])
    v = vector_like(dense.trainable(wrapped))
    for product in (ggn_product, hessian_product):
        out = product(wrapped, x, y, v)
        assert float(out[0].abs().sum()) == 0 and float(out[1].abs().sum()) > 0


def test_works_inside_no_grad_and_inference_mode_and_autocast() -> None:
    model, x, y = build("mlp tanh")
    v = vector_like(dense.trainable(model))
    expected = dense.flat(ggn_product(model, x, y, v))
    expected_h = dense.hessian(model, x, y) @ dense.flat(v)
    with torch.no_grad():
        assert close(ggn_product(model, x, y, v), expected, 1e-12)
    with torch.inference_mode():
        made_here = x.clone(), y.clone(), [t.clone() for t in v]
        assert close([t.clone() for t in hessian_product(model, *made_here)], expected_h)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert close(ggn_product(model, x, y, v), expected, 1e-12)


def test_saturated_probabilities_stay_finite() -> None:
    model, x, y = build("mlp tanh")
    with torch.no_grad():
        model[5].weight.mul_(1e4)
    v = vector_like(dense.trainable(model))
    assert all(bool(torch.isfinite(t).all()) for t in ggn_product(model, x, y, v) + hessian_product(model, x, y, v))


def test_a_step_of_the_optimizer_invalidates_the_recorded_graph() -> None:
    model, x, y = build("mlp tanh")
    v = vector_like(dense.trainable(model))
    c = Curvature(model, x, y)
    c.gn(v)
    with torch.no_grad():
        model[1].weight.add_(0.1)
    with pytest.raises(InputError, match="parameters changed"):
        c.gn(v)


class Twofold(torch.autograd.Function):
    """Identity, with a derivative of its own making."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g.clone()


class OnceOnly(torch.autograd.Function):
    """Square without double backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * x * g


class Through(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, K)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(torch.tanh(self.body(x))))


def test_a_route_that_lies_is_noticed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build("mlp tanh")
    v = vector_like(dense.trainable(model))
    wrong = elementwise(lambda a: (1.2 * (1 - a * a), None), by_result=True)
    for tanh in (torch.tanh, Tensor.tanh):
        monkeypatch.setitem(RULES, tanh, wrong)
    with Curvature(model, x, y) as c:
        assert close(c.gn(v), dense.ggn(model, x) @ dense.flat(v))
        assert c.gn_route == "reverse"
    with pytest.raises(InputError, match="disagrees with the reverse pass"):
        ggn_product(model, x, y, v, route="tape")


def test_without_a_rule_reverse_passes_take_over() -> None:
    _, x, y = build("mlp tanh")
    model = Through(Twofold)
    v = vector_like(dense.trainable(model))
    with Curvature(model, x, y) as c:
        assert close(c.gn(v), dense.ggn(model, x) @ dense.flat(v)) and c.gn_route == "reverse"
        assert close(c.hessian(v), dense.hessian(model, x, y) @ dense.flat(v)) and c.hessian_route == "reverse"


def test_a_network_with_no_route_at_all_is_a_clear_error() -> None:
    _, x, y = build("mlp tanh")
    model = Through(OnceOnly)
    v = vector_like(dense.trainable(model))
    with pytest.raises(InputError, match=r"no route to J v works.*OnceOnlyBackward.*no second derivative"):
        ggn_product(model, x, y, v)
    with pytest.raises(InputError, match="no route to J v works"):
        gn_sharpness(model, x, y)
    with pytest.raises(InputError, match="no route to H v works"):
        hessian_product(model, x, y, v)


def test_large_batches_of_a_convolutional_network_are_kept_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metacal.curvature.blocks.CACHE_BLOCK", 3)
    for name, blocks in (("cnn batchnorm eval", 3), ("cnn batchnorm train", 1)):
        model, x, y = build(name, n=7)
        v = vector_like(dense.trainable(model))
        with Curvature(model, x, y) as c:
            assert close(c.gn(v), dense.ggn(model, x) @ dense.flat(v))
            assert close(c.hessian(v), dense.hessian(model, x, y) @ dense.flat(v))
            assert len(c._kept) == blocks


def test_the_formulas_examples() -> None:
    tried = doctest.testmod(derivatives)
    assert tried.attempted > 8 and tried.failed == 0


@pytest.mark.parametrize("name", ["weight norm", "spectral norm", "orthogonal", "reflections"])
def test_parametrised_layers(name: str) -> None:
    model, x, y = build_training(name)
    model.eval()
    params = dense.trainable(model)
    v = vector_like(params)
    g, flat = dense.ggn(model, x), dense.flat(v)
    if name == "weight norm":  # PyTorch has its double backward wrong
        h = dense.hessian_by_differences(model, x, y)
    else:
        h = dense.hessian(model, x, y)
    for route in ("tape", "reverse"):
        with Curvature(model, x, y, route=route) as c:
            assert close(c.gn(v), g @ flat) and close(c.hessian(v), h @ flat, 1e-7)
    assert gn_trace(model, x, y, exact=True).value == pytest.approx(float(g.trace()), rel=1e-9)
    assert abs(gn_trace(model, x, y, probes=64).value - float(g.trace())) < 0.2 * float(g.trace())


def test_embeddings_dense_and_sparse() -> None:
    ids, y = torch.tensor([[1, 2, 2], [0, 4, 1], [3, 3, 0], [2, 4, 4]]), torch.tensor([0, 1, 2, 3])

    def net(bag: bool, sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        table = nn.EmbeddingBag(5, 6, sparse=sparse) if bag else nn.Embedding(5, 6, sparse=sparse)
        layers = [table] if bag else [table, Mean()]
        return nn.Sequential(*layers, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, K)).double()

    model = net(False, False)
    v = vector_like(dense.trainable(model))
    g, h = dense.ggn(model, ids), dense.hessian(model, ids, y)
    for bag in (False, True):
        for sparse in (False, True):
            model = net(bag, sparse)
            assert close(ggn_product(model, ids, y, v), g @ dense.flat(v))
            assert close(hessian_product(model, ids, y, v), h @ dense.flat(v))
            assert gn_trace(model, ids, y, exact=True).value == pytest.approx(float(g.trace()), rel=1e-9)
            assert hessian_trace(model, ids, y, exact=True).value == pytest.approx(float(h.trace()), rel=1e-9)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
