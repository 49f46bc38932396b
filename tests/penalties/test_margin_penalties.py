"""margin_tail, its robust form, margin_smoothness, mbls: values by hand, gradients by differences, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from autodiff.nets import build
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from metacal.errors import InputError
from metacal.margins import robust_margin, true_margin
from metacal.penalties import Pixels, build_penalty, margin_smoothness, margin_tail, mbls, robust_margin_tail

PIXELS = Pixels((0.4, 0.6), (0.25, 0.2))


def logits_with(margin: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([[margin, 0.0, -1e6]], dtype=dtype, requires_grad=True)


# -- the tail ---------------------------------------------------------------------------------------------------


def test_values_by_hand():
    z = torch.tensor([[2.0, 1.0, -1.0], [0.0, 3.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([0, 2])  # margins 1 and −2
    assert margin_tail(z, y).item() == pytest.approx((math.exp(-1) + math.exp(2)) / 2)
    assert margin_tail(z, y, 4.0).item() == pytest.approx((math.exp(-0.25) + math.exp(0.5)) / 2)
    assert margin_tail(z, y, clip=1.0).item() == pytest.approx((math.exp(-1) + math.e * (1 + 2 - 1)) / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("margin", [-1e4, -200.0, 0.0, 1e4])
def test_value_and_gradient_are_finite_far_out(margin: float, dtype: torch.dtype):
    z = logits_with(margin, dtype)
    value = margin_tail(z, torch.tensor([0]))
    (slope,) = torch.autograd.grad(value, z)
    assert bool(torch.isfinite(value)) and bool(torch.isfinite(slope).all())
    s = -z[0, 0].item()
    expected = math.exp(5) * (1 + s - 5) if s > 5 else math.exp(s)
    assert value.item() == pytest.approx(expected, rel=1e-6)
    assert slope[0, 0].item() == pytest.approx(-math.exp(min(s, 5)), rel=1e-2)
    assert value.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)


def test_without_a_clip_it_is_the_exponential_moment():
    z, y = torch.randn(50, 4, dtype=torch.float64) * 10, torch.randint(4, (50,))
    exact = (-true_margin(z, y) / 3).exp().mean().item()
    assert margin_tail(z, y, 3.0, clip=math.inf).item() == pytest.approx(exact, rel=1e-12)
    assert margin_tail(z, y, 3.0).item() <= exact


@given(st.floats(0, 8), st.floats(-1e-7, 1e-7))
def test_value_and_slope_are_continuous_at_the_clip(clip: float, offset: float):
    z, at = logits_with(-clip - offset), logits_with(-clip)
    y = torch.tensor([0])
    near, here = (margin_tail(t, y, clip=clip) for t in (z, at))
    assert near.item() == pytest.approx(here.item(), rel=1e-6)
    slopes = [torch.autograd.grad(v, t)[0][0, 0].item() for v, t in ((near, z), (here, at))]
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-6)


@given(st.integers(2, 20), st.integers(1, 19), st.integers(0, 999))
def test_parts_of_a_batch_add_up(n: int, cut: int, seed: int):
    cut = min(cut, n - 1)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 3, generator=g, dtype=torch.float64) * 20
    y = torch.randint(3, (n,), generator=g)
    for f in (margin_tail, mbls):
        parts = cut * f(z[:cut], y[:cut]) + (n - cut) * f(z[cut:], y[cut:])
        assert f(z, y).item() == pytest.approx(parts.item() / n, rel=1e-10, abs=1e-12)
    order = torch.randperm(n, generator=g)
    assert margin_tail(z[order], y[order]).item() == pytest.approx(margin_tail(z, y).item(), rel=1e-10)


def test_mbls_by_hand():
    z = torch.tensor([[15.0, 3.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    assert mbls(z).item() == pytest.approx((2 + 5) / 2)
    assert mbls(z, margin=1.0).item() == pytest.approx((11 + 14 + 0 + 1) / 2)


# -- penalties on the input gradient --------------------------------------------------------------------------------


def test_gradients_in_the_parameters(net, batch, check_gradient):
    x, y = batch
    check_gradient(lambda: margin_smoothness(net, x, y), net)
    check_gradient(lambda: robust_margin_tail(net, x, y, 0.05, 2.0, "linf"), net)
    check_gradient(lambda: robust_margin_tail(net, x, y, 0.3, 1.0, "l2", PIXELS), net)


def test_smoothness_against_single_samples(net, batch):
    x, y = batch
    if net.training and any(isinstance(m, nn.BatchNorm2d) for m in net.modules()):
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(true_margin(net(at), y).sum(), at)  # ours: samples share their statistics
        expected = slope.square().sum().item() / len(x)
    else:
        total = 0.0
        for xi, yi in zip(x, y):
            at = xi[None].clone().requires_grad_()
            (slope,) = torch.autograd.grad(true_margin(net(at), yi[None]).sum(), at)
            total += slope.square().sum().item()
        expected = total / len(x)
    assert margin_smoothness(net, x, y).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_robust_tail_is_the_tail_of_the_first_order_margin(net, batch, norm):
    net.eval()
    x, y = batch
    _, first = robust_margin(net, x, y, 0.1, norm)
    two = torch.stack([first, torch.zeros_like(first)], 1)  # logits with these margins
    expected = margin_tail(two, torch.zeros(len(y), dtype=torch.long), 1.5)
    assert robust_margin_tail(net, x, y, 0.1, 1.5, norm).item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_pixels_make_eps_a_distance_of_pixels(net, batch, norm):
    x, y = batch

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, pixel: Tensor) -> Tensor:
            mean, std = (torch.tensor(t, dtype=pixel.dtype).view(1, 2, 1, 1) for t in PIXELS)
            return self.net((pixel - mean) / std)

    mean, std = (torch.tensor(t, dtype=x.dtype).view(1, 2, 1, 1) for t in PIXELS)
    inside = robust_margin_tail(Normalised(), x, y, 0.1, norm=norm)
    outside = robust_margin_tail(net, (x - mean) / std, y, 0.1, norm=norm, pixels=PIXELS)
    assert outside.item() == pytest.approx(inside.item(), rel=1e-9)
    smooth = margin_smoothness(net, (x - mean) / std, y, PIXELS)
    assert smooth.item() == pytest.approx(margin_smoothness(Normalised(), x, y).item(), rel=1e-9)
    for name, keys in (("margin_smoothness", {}), ("margin_tail", {"robust": True, "norm": norm})):
        plain = build_penalty(name, keys)(net, x, y)
        assert build_penalty(name, {**keys, "units": "inputs", "pixels": PIXELS})(net, x, y) == plain
        assert build_penalty(name, {**keys, "pixels": PIXELS})(net, x, y) != plain
    net.eval()
    found = robust_margin(net, (x - mean) / std, y, 0.1, norm, pixels=PIXELS, clip=(0.05, 0.95))
    for one, other in zip(found, robust_margin(Normalised(), x, y, 0.1, norm, clip=(0.05, 0.95)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_vanishing_input_gradient_does_no_harm(check_gradient):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        model[1].bias.fill_(-100.0)  # every unit is off
    x, y = torch.rand(3, 4, dtype=torch.float64), torch.tensor([0, 1, 0])
    for norm in ("linf", "l2"):
        check_gradient(lambda norm=norm: robust_margin_tail(model, x, y, 0.1, norm=norm), model)
    assert margin_smoothness(model, x, y).item() == 0


def test_attention_is_differentiated_twice(check_gradient):
    model, x, y = build("attention")
    check_gradient(lambda: margin_smoothness(model, x, y), model)


def test_networks_are_left_as_they_were(net, batch, untouched):
    x, y = batch
    untouched(lambda: margin_smoothness(net, x, y), net)
    untouched(lambda: robust_margin_tail(net, x, y), net)
    assert not x.requires_grad


# -- refusals -----------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """Attention by a fused kernel called by name, which has no second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class OnceModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


@pytest.mark.parametrize("layer", [Fused, OnceModule])
def test_a_missing_second_derivative_is_named_at_once(layer, batch):
    model = nn.Sequential(nn.Conv2d(2, 2, 1), layer(), nn.Flatten(), nn.Linear(72, 3)).double()
    with pytest.raises(InputError, match="margin_smoothness needs a second derivative"):
        margin_smoothness(model, *batch)


@pytest.mark.parametrize("f", [margin_smoothness, robust_margin_tail])
def test_integer_inputs_are_refused(f):
    model = nn.Embedding(5, 3)
    with pytest.raises(InputError, match="x must be floating point"):
        f(model, torch.tensor([1, 2]), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be > 0"),
        ({"temperature": math.nan}, "temperature must be > 0"),
        ({"clip": -1.0}, "clip must be >= 0"),
        ({"eps": -0.1}, "eps must be >= 0, got -0.1"),
        ({"norm": "l1"}, "norm must be one of linf, l2"),
        ({"pixels": (0.5, 0.5)}, "pixels must be None"),
        ({"pixels": Pixels((0.5, 0.5), (0.1, 0.0))}, "pixels.std must be > 0"),
        ({"pixels": Pixels((0.5,), (0.1, 0.2))}, "of one length"),
        ({"pixels": Pixels((0.5,) * 3, (0.1,) * 3)}, "3 channels"),
    ],
)
def test_bad_options_are_named(keys, message, batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    with pytest.raises(InputError, match=message):
        robust_margin_tail(model, *batch, **keys)
    if set(keys) & {"temperature", "clip"}:
        with pytest.raises(InputError, match=message):
            margin_tail(model(batch[0]), batch[1], **keys)


def test_bad_batches_are_named(batch):
    x, y = batch
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    with pytest.raises(InputError, match="same number of samples"):
        margin_smoothness(model, x, y[:2])
    with pytest.raises(InputError, match="integer labels"):
        margin_smoothness(model, x, y.double())
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module"):
        margin_smoothness(lambda t: t, x, y)
    with pytest.raises(InputError, match="model must return logits"):
        margin_smoothness(nn.Conv2d(2, 2, 1).double(), x, y)
    with pytest.raises(InputError, match="margin must be >= 0"):
        mbls(model(x), y, margin=-1)
