"""The tape's derivatives against nested forward mode, and what it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autodiff.functions import FUNCTIONS, SPELLED_OUT, WORDS, Function, entries, inputs, line, recorded
from autodiff.nets import build
from reference import curvature as dense
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metacal.autodiff.plain import PlainNorms
from metacal.autodiff.tape import Tape
from metacal.curvature.products import Curvature


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


def _hooked(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    h = a * c
    h.register_hook(lambda d: -d)
    return h * h


REFUSED: dict[str, tuple[Function, str]] = {
    "unknown function": (lambda a, b, c: torch.special.i0(a * c), "special_i0: no rule"),
    "custom function": (lambda a, b, c: Square.apply(a * c) * c, r"not known \(made by SquareBackward"),
    "custom function at the end": (lambda a, b, c: Square.apply(a * c), "not known"),
    "hook on a gradient": (_hooked, "a hook may change the gradient"),
    "gradient by frequency": (lambda a, b, c: F.embedding(WORDS, b, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "random slopes": (lambda a, b, c: F.rrelu(a * c, training=True), "rrelu: no rule"),
    "rounded quotient": (lambda a, b, c: torch.div(a, c, rounding_mode="floor") + a, "rounded"),
    "matrix of one length": (lambda a, b, c: torch.linalg.matrix_norm(b * c) * c, "no rule"),
    "written through a view": (_written_through_a_view, "not known"),
    "operand by name": (lambda a, b, c: (a * c).mul_(other=c), "mul_"),
    "leaky relu of negative slope": (lambda a, b, c: F.leaky_relu(a * c, -0.1), "sign of its input"),
    "overwritten": (_overwritten_later, "overwritten"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_know_is_refused(name: str) -> None:
    params, v = inputs()
    f, reason = REFUSED[name]
    tape, _ = recorded(f, params)
    assert tape.failure is not None
    with pytest.raises(NotImplementedError, match=reason):
        tape.run(v)


def test_without_second_derivatives_there_is_another_way_with_the_same_result() -> None:
    model, x, y = build("attention")
    g = torch.Generator().manual_seed(0)
    with Curvature(model, x, y) as c:
        v = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in c.params]
        h, flat = dense.hessian(model, x, y), dense.flat(v)
        assert c.quadratic(v) == pytest.approx(float(flat @ h @ flat), rel=1e-9)
        assert c.quadratic_route == "Hessian product, tape"


@pytest.mark.parametrize("name", ["mlp tanh", "cnn tanh", "resnet in-place eval"])
def test_every_route_gives_the_same_products(name: str) -> None:
    model, x, y = build(name)
    g = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in dense.trainable(model)]
    products = []
    for route in ("tape", "reverse"):
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
