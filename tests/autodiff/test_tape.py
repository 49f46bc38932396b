"""The tape's derivatives against nested forward mode, and what it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature.nets import build
from reference import curvature as dense
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metacal.autodiff.plain import PlainNorms
from metacal.autodiff.tape import Tape
from metacal.curvature.products import Curvature

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

# functions of a matrix a (3, 4), a matrix b (4, 4) and a vector c (4,), each through rules of its own
FUNCTIONS: dict[str, Function] = {
    "linear": lambda a, b, c: F.linear(a @ b, b, c),
    "linear by name": lambda a, b, c: F.linear(input=a * c, weight=b, bias=c),
    "product of three": lambda a, b, c: (a * c) @ (b * c) * a,
    "sums": lambda a, b, c: 2 - torch.add(a @ b, a, alpha=3).sub(c, alpha=0.5) + c - (1 + a),
    "numbers": lambda a, b, c: 3 * (a * a) / 4 - (-a) * c,
    "in place": lambda a, b, c: (a * c).add_(a).sub_(c),
    "in-place sum of a constant": lambda a, b, c: torch.zeros(3, 4, dtype=a.dtype).add_(a * c),
    "in-place relu": lambda a, b, c: torch.relu_((a * c) @ b),
    "tanh": lambda a, b, c: torch.tanh(a * c) @ b,
    "sigmoid": lambda a, b, c: torch.sigmoid(a * c).mul(a),
    "silu": lambda a, b, c: F.silu(3 * a * c),
    "gelu": lambda a, b, c: F.gelu(a * c),
    "softplus": lambda a, b, c: F.softplus(a * c, beta=2.0, threshold=1.0),
    "leaky relu": lambda a, b, c: F.leaky_relu(a * c, 0.2) * c,
    "shapes": lambda a, b, c: (a * c).reshape(2, 6).t().transpose(0, 1).flatten().view(3, 4)[:, :2].unsqueeze(0),
    "means": lambda a, b, c: ((a * c).mean(0, keepdim=True) * c.sum()).squeeze(0).expand(2, 4).reshape(-1),
    "cat": lambda a, b, c: torch.cat([a * c, torch.ones_like(a), b * c], 0) * c,
    "pad": lambda a, b, c: F.pad(a * c, (1, 2), value=5.0),
    "convolution": lambda a, b, c: F.conv2d((a * c).view(1, 1, 3, 4), b[:2, :2].view(1, 1, 2, 2), c[:1], padding=1),
    "max pooling": lambda a, b, c: F.max_pool2d((a @ b).view(1, 1, 3, 4), 2, 1),
    "average pooling": lambda a, b, c: F.avg_pool2d((a * c).view(1, 1, 3, 4), 2),
    "dropout that is off": lambda a, b, c: F.dropout(a * c, 0.5, training=False),
    "normalisation": lambda a, b, c: F.batch_norm(a @ b, torch.ones(4).to(a), 2 * torch.ones(4).to(a), c, 1 + 0 * c),
    "normalisation, no scale": lambda a, b, c: F.batch_norm(a * c, torch.ones(4).to(a), torch.ones(4).to(a)),
    "detached": lambda a, b, c: (a * c).detach() * a + torch.zeros_like(a),
    "silu, in place": lambda a, b, c: F.silu(3 * a * c, inplace=True) @ b,
    "gelu by tanh": lambda a, b, c: F.gelu(3 * a * c, approximate="tanh"),
    "hardtanh": lambda a, b, c: F.hardtanh(a * c, -0.5, 0.7) * c,
    "relu6": lambda a, b, c: F.relu6(9 * a * c) * c,
    "exp": lambda a, b, c: torch.exp(a * c),
    "root": lambda a, b, c: torch.rsqrt(1 + (a * c).square()),
    "powers": lambda a, b, c: (a * c) ** 3 + torch.pow(a, 2) * c,
    "softmax": lambda a, b, c: (a * c).softmax(1) @ F.softmax(b, dim=0),
    "in-place product": lambda a, b, c: (a * c).mul_(b[:3]).mul_(2.0),
    "several results": lambda a, b, c: torch.stack([*(a * c).chunk(2, 1), (a @ b).split(2, 1)[0]]) * c[:2],
    "unbind": lambda a, b, c: (a * c).unbind(1)[2] @ b[:3],
    "transposed": lambda a, b, c: (a * c).T.mT @ b.mT,
    "max pooling of one image": lambda a, b, c: F.max_pool2d((a @ b).view(1, 3, 4), 2, 1),
    "convolution of one image": lambda a, b, c: F.conv2d((a * c).view(1, 3, 4), b[:2, :2].view(2, 1, 1, 2), c[:2]),
    "comparison": lambda a, b, c: a * c * (a > 0),
}


# what a tape knows if it is spelled out
SPELLED_OUT: dict[str, Function] = {
    "batch": lambda a, b, c: F.batch_norm(a @ b, None, None, c, b[0], True),
    "batch of images": lambda a, b, c: F.batch_norm((a * c).view(3, 2, 2), None, None, c[:2], None, True),
    "running statistics": lambda a, b, c: F.batch_norm(a * c, torch.ones(4).to(a), 2 * torch.ones(4).to(a), c, b[0]),
    "layer": lambda a, b, c: F.layer_norm(a @ b, (4,), c, b[1], 0.1),
    "groups": lambda a, b, c: F.group_norm(a @ b, 2, c, b[1], 0.1),
    "root mean square": lambda a, b, c: F.rms_norm(a @ b, (4,), c),
    "weight": lambda a, b, c: F.linear(a, torch._weight_norm(b, c.view(4, 1), 0)),
    "weight, one length": lambda a, b, c: F.linear(a, torch._weight_norm(b, c[0], -1)),
    "attention": lambda a, b, c: F.scaled_dot_product_attention((a * c)[None], b[None], (b * c)[None]),
    "attention, other scale": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], b[None], scale=2.0),
    "dropout": lambda a, b, c: F.dropout(a * c, 0.3) @ b,
    "dropout, in place": lambda a, b, c: F.dropout(a @ b, 0.3, inplace=True) * c,
    "dropout of channels": lambda a, b, c: F.dropout1d(a @ b, 0.3) * c,
}


def inputs(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    shapes = (3, 4), (4, 4), (4,)
    params, v = ([torch.randn(s, generator=g, dtype=torch.float64) for s in shapes] for _ in range(2))
    return [p.requires_grad_() for p in params], v


def recorded(f: Function, params: list[Tensor], **options: Any) -> tuple[Tape, Tensor]:
    with Tape(params, **options) as tape:
        z = f(*params)
    return tape.close(z), z


def line(f: Function, params: list[Tensor], v: list[Tensor]) -> tuple[Tensor, Tensor]:
    """First and second derivative along v by reverse over reverse of every entry."""

    def along(e: Tensor) -> Tensor:
        return f(*[p.detach() + e * a for p, a in zip(params, v)]).reshape(-1)

    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    first, second = [], []
    for entry in along(e):
        if not entry.requires_grad:
            first.append(torch.zeros(()).to(entry))
            second.append(torch.zeros(()).to(entry))
            continue
        (d,) = torch.autograd.grad(entry, e, create_graph=True, retain_graph=True)
        first.append(d.detach())
        dd = torch.autograd.grad(d, e, retain_graph=True, allow_unused=True)[0] if d.requires_grad else None
        second.append(torch.zeros_like(d) if dd is None else dd)
    return torch.stack(first), torch.stack(second)


def entries(t: Tensor | None, z: Tensor) -> Tensor:
    return torch.zeros_like(z).detach().reshape(-1) if t is None else t.detach().reshape(-1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules(name: str) -> None:
    params, v = inputs()
    tape, z = recorded(FUNCTIONS[name], params)
    first, second = line(FUNCTIONS[name], params, v)
    assert tape.failure is None
    z1, z2 = tape.run(v, second=True)
    assert torch.allclose(entries(z1, z), first, rtol=1e-12, atol=1e-13)
    assert torch.allclose(entries(z2, z), second, rtol=1e-12, atol=1e-12)
    assert torch.allclose(entries(tape.run(v)[0], z), first, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_run_can_be_differentiated(name: str) -> None:
    """∇_θ ⟨u, z₁⟩ is the product of the Hessian of ⟨u, z⟩ with v (what is detached stands still in both)."""
    params, v = inputs(1)
    tape, z = recorded(FUNCTIONS[name], params)
    u = torch.linspace(-1, 2, z.numel(), dtype=torch.float64).view_as(z)
    z1 = tape.run(v)[0]
    assert z1 is not None
    product: list[Any] = [None] * 3
    if z1.requires_grad:
        product = list(torch.autograd.grad((u * z1).sum(), params, allow_unused=True))
    again = [p.detach().requires_grad_() for p in params]
    grads = torch.autograd.grad((u * FUNCTIONS[name](*again)).sum(), again, create_graph=True, allow_unused=True)
    inner = sum((g * a).sum() for g, a in zip(grads, v) if g is not None)
    true: list[Any] = [None] * 3
    if isinstance(inner, Tensor) and inner.requires_grad:
        true = list(torch.autograd.grad(inner, again, allow_unused=True))
    for got, want, p in zip(product, true, params):
        got, want = (torch.zeros_like(p) if t is None else t for t in (got, want))
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [*FUNCTIONS, *SPELLED_OUT])
def test_second_derivatives_can_be_differentiated(name: str) -> None:
    """∇_θ ⟨u, z₂⟩, the third derivative of the function, against reverse passes alone."""
    f = {**FUNCTIONS, **SPELLED_OUT}[name]
    params, v = inputs(2)
    torch.manual_seed(0)
    tape, z = recorded(f, params, spelled_out=True)
    torch.manual_seed(0)
    assert torch.allclose(z, f(*params), rtol=1e-12, atol=1e-13)
    u = torch.linspace(-1, 2, z.numel(), dtype=torch.float64).view_as(z)
    z1, z2 = tape.run(v, second=True)

    torch.manual_seed(0)
    with PlainNorms(), sdpa_kernel(SDPBackend.MATH):
        value = (u * f(*params)).sum()
    for part in (z1, z2):
        value = torch.stack([(g * a).sum() for g, a in zip(slopes(value, params), v)]).sum()
        found = (u * part).sum() if part is not None else torch.zeros_like(value)
        assert float(found.detach()) == pytest.approx(float(value.detach()), rel=1e-9, abs=1e-10)
        for got, want in zip(slopes(found, params), slopes(value, params)):
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-10)


def slopes(t: Tensor, params: list[Tensor]) -> list[Tensor]:
    """The gradient with its graph, zero where there is none."""
    if not t.requires_grad:
        return [torch.zeros_like(p) for p in params]
    grads = torch.autograd.grad(t, params, create_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)]


def test_inputs_that_require_grad_stand_still_if_told_to() -> None:
    params, v = inputs()
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    f = lambda a, b, c: torch.tanh(x * c) @ b  # noqa: E731
    assert recorded(f, params)[0].failure is not None
    tape, z = recorded(f, params, fixed=[x])
    first, second = line(f, params, v)
    z1, z2 = tape.run(v, second=True)
    assert torch.allclose(entries(z1, z), first) and torch.allclose(entries(z2, z), second)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * d


def _written_through_a_view(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros(3, 4, dtype=a.dtype)
    out[:, :4].add_(a * c)
    return out * c


def _overwritten_later(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    h = a * c
    z = h * h
    with torch.no_grad():
        h.zero_()
    return z


REFUSED: dict[str, tuple[Function, str]] = {
    "unknown function": (lambda a, b, c: (a * c).sin(), "sin: no rule"),
    "custom function": (lambda a, b, c: Square.apply(a * c) * c, "not known"),
    "custom function at the end": (lambda a, b, c: Square.apply(a * c), "not known"),
    "written through a view": (_written_through_a_view, "not known"),
    "several results": (lambda a, b, c: (a * c).max(1)[0], "no rule"),
    "statistics of the batch": (lambda a, b, c: F.batch_norm(a, None, None, c, c, True), "statistics of a batch"),
    "division": (lambda a, b, c: a / c, "division by a constant"),
    "dropout": (lambda a, b, c: F.dropout(a * c, 0.5), "mask"),
    "division of a constant": (lambda a, b, c: 2 / a, "no rule"),
    "operand by name": (lambda a, b, c: (a * c).mul_(other=c), "mul_"),
    "leaky relu of negative slope": (lambda a, b, c: F.leaky_relu(a * c, -0.1), "sign of its input"),
    "overwritten": (_overwritten_later, "overwritten"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_know_is_refused(name: str) -> None:
    params, v = inputs()
    f, reason = REFUSED[name]
    tape, _ = recorded(f, params)
    with pytest.raises(NotImplementedError, match=reason):
        tape.run(v, second=True)


def test_networks_without_a_tape_go_another_way_with_the_same_result() -> None:
    model, x, y = build("attention")
    g = torch.Generator().manual_seed(0)
    with Curvature(model, x, y) as c:
        v = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in c.params]
        h, flat = dense.hessian(model, x, y), dense.flat(v)
        assert c.quadratic(v) == pytest.approx(float(flat @ h @ flat), rel=1e-9)
        assert c.quadratic_route == "Hessian product, reverse"
        c.gn(v)
        assert c.gn_route == "double-vjp"


@pytest.mark.parametrize("name", ["mlp tanh", "cnn tanh", "resnet in-place eval"])
def test_every_route_gives_the_same_products(name: str) -> None:
    model, x, y = build(name)
    g = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in dense.trainable(model)]
    products = []
    for route in ("tape", "double-vjp", "forward"):
        with Curvature(model, x, y, route=route) as c:
            products.append((dense.flat(c.gn(v)), dense.flat(c.hessian(v)), c.quadratic(v)))
            assert c.gn_route == route and (c.hessian_route == "tape") == (route == "tape")
            assert ("tape" in str(c.quadratic_route)) == (route == "tape")
    for gn, hessian, quadratic in products[1:]:
        assert torch.allclose(gn, products[0][0], rtol=1e-9, atol=1e-12)
        assert torch.allclose(hessian, products[0][1], rtol=1e-9, atol=1e-12)
        assert quadratic == pytest.approx(products[0][2], rel=1e-9)


def test_frozen_parameters_do_not_move() -> None:
    model, x, y = build("cnn batchnorm eval")
    for i in (0, 1):
        for p in model[i].parameters():  # type: ignore[index]
            p.requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    with Curvature(model, x, y) as c:
        v = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in c.params]
        assert torch.allclose(dense.flat(c.hessian(v)), dense.hessian(model, x, y) @ dense.flat(v), atol=1e-12)
        assert c.hessian_route == "tape"


def test_a_tape_keeps_the_network_usable() -> None:
    """No state stays on the parameters, and a second pass is independent of the first."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)).double()
    x, params = torch.randn(4, 3, dtype=torch.float64), list(model.parameters())
    before = [set(vars(p)) for p in params]
    with Tape(params) as tape:
        z = model(x)
    tape.close(z)
    assert [set(vars(p)) for p in params] == before
    first = tape.run([torch.ones_like(p) for p in params])[0]
    model(x).sum().backward()
    assert torch.equal(first, tape.run([torch.ones_like(p) for p in params])[0])
