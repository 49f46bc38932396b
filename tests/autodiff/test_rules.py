"""Each function's rule against reverse passes alone, and a recorded pass against one that is not."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from autodiff.functions import (
    EQUAL,
    FIRST,
    FUNCTIONS,
    MORE,
    SPELLED_OUT,
    Function,
    entries,
    inputs,
    line,
    recorded,
)
from torch import Tensor

from metacal.autodiff.norms import _BatchTangent
from metacal.autodiff.plain import PlainNorms
from metacal.network import plain_attention

ALL = {**FUNCTIONS, **SPELLED_OUT, **MORE, **FIRST, **{name: f for name, (f, _) in EQUAL.items()}}


def seeded(f: Function, plain: bool = False) -> Function:
    """With the same random numbers at every call, and of operations that reverse passes can differentiate twice."""

    def same(*params: Tensor) -> Tensor:
        torch.manual_seed(0)
        with ExitStack() as contexts:
            if plain:
                contexts.enter_context(plain_attention())
                contexts.enter_context(PlainNorms())
            return f(*params)

    return same


@pytest.mark.parametrize("name", ALL)
def test_a_recorded_pass_is_an_ordinary_one(name: str) -> None:
    params, _ = inputs()
    torch.manual_seed(0)
    plain, after = ALL[name](*params), torch.rand(2)
    torch.manual_seed(0)
    tape, z = recorded(ALL[name], params)
    assert tape.failure is None and torch.equal(z, plain) and torch.equal(torch.rand(2), after)


@pytest.mark.parametrize("name", [*MORE, *FIRST])
def test_derivatives_along_a_direction(name: str) -> None:
    params, v = inputs()
    f = {**MORE, **FIRST}[name]
    tape, z = recorded(seeded(f), params)
    first, second = line(seeded(f, plain=True), params, v)
    assert tape.failure is None
    assert torch.allclose(tape.jv(v).reshape(-1), first, rtol=1e-10, atol=1e-12)
    if name in MORE:
        z1, z2 = tape.run(v, second=True)
        assert torch.allclose(entries(z1, z), first, rtol=1e-10, atol=1e-12)
        assert torch.allclose(entries(z2, z), second, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", EQUAL)
def test_derivatives_that_reverse_passes_lack(name: str) -> None:
    params, v = inputs()
    f, same = EQUAL[name]
    (tape, z), first = recorded(f, params), line(same, params, v)[0]
    assert torch.allclose(z, same(*params)) and torch.allclose(tape.jv(v).reshape(-1), first, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*MORE, *FIRST])
def test_a_run_can_be_differentiated(name: str) -> None:
    """∇_θ ⟨u, z₁⟩ is the product of the Hessian of ⟨u, z⟩ with v (what is detached stands still in both)."""
    params, v = inputs(1)
    f = {**MORE, **FIRST}[name]
    tape, z = recorded(seeded(f), params)
    u = torch.linspace(-1, 2, z.numel(), dtype=torch.float64).view_as(z)
    z1 = tape.run(v)[0]
    assert z1 is not None
    found = _gradient((u * z1).sum(), params)
    slopes = _gradient((u * seeded(f, plain=True)(*params)).sum(), params, graph=True)
    for a, b in zip(found, _gradient(torch.stack([(g * t).sum() for g, t in zip(slopes, v)]).sum(), params)):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def _gradient(t: Tensor, params: list[Tensor], graph: bool = False) -> list[Tensor]:
    """Zero where there is none."""
    if not t.requires_grad:
        return [torch.zeros_like(p) for p in params]
    grads = torch.autograd.grad(t, params, create_graph=graph, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)]


def test_the_tangent_of_a_batch_normalisation_has_derivatives() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 2, 2), (3, 2, 2), (2,), (2,), (2,)]
    given = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in sizes]
    assert torch.autograd.gradcheck(lambda *t: _BatchTangent.apply(*t, 0.3), given)
    assert torch.autograd.gradgradcheck(lambda *t: _BatchTangent.apply(*t, 0.3), given)
