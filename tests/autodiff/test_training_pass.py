"""J v of a training pass, after its backward and a step of the optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from autodiff.nets import TRAINING, build_training
from torch import Tensor, nn

from metacal.autodiff.plain import PlainNorms
from metacal.autodiff.tape import Tape
from metacal.network import plain_attention


def by_double_backward(model: nn.Module, x: Tensor, v: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """J v as the derivative in w of ⟨Jᵀw, v⟩, with the gradients and logits of the pass."""
    params = list(model.parameters())
    torch.manual_seed(0)
    with plain_attention(), PlainNorms():
        z = model(x)
    w = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, params, w, create_graph=True, allow_unused=True)
    dot = torch.stack([(g * t).sum() for g, t in zip(pulled, v) if g is not None]).sum()
    return torch.autograd.grad(dot, w)[0]


@pytest.mark.parametrize("name", TRAINING)
def test_jv_at_the_old_parameters(name: str) -> None:
    model, x, y = build_training(name)
    params = list(model.parameters())
    g = torch.Generator().manual_seed(1)
    v = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in params]
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    expected = by_double_backward(model, x.clone(), v)

    def again() -> tuple[Tensor, Tensor]:
        model.load_state_dict(buffers, strict=False)
        torch.manual_seed(0)
        return model(x.clone()), torch.rand(2)

    plain = again()
    with Tape(params) as tape:
        z, after = again()
    tape.close(z)
    assert tape.failure is None
    assert torch.equal(z, plain[0]) and torch.equal(after, plain[1])
    F.cross_entropy(z, y).backward()
    old = [p.detach().clone() for p in params]
    torch.optim.SGD(params, lr=0.5).step()
    assert torch.allclose(tape.jv(v, at=old), expected, rtol=1e-9, atol=1e-10)
    assert torch.allclose(tape.jv(v, at=old), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["batch norm", "layer norm", "encoder with dropout", "weight norm"])
def test_mixed_precision_is_that_of_the_pass(name: str) -> None:
    model, x, _ = build_training(name)
    model, x = model.float(), x.float()
    params = list(model.parameters())
    v = [torch.randn_like(p) for p in params]
    exact = by_double_backward(model, x, v)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(x)
    torch.manual_seed(0)
    with Tape(params) as tape, torch.autocast("cpu", dtype=torch.bfloat16):
        z = model(x)
    tape.close(z)
    jv = tape.jv(v, at=[p.detach().clone() for p in params])
    assert torch.equal(z, plain) and jv.dtype == z.dtype == torch.bfloat16
    assert float((jv - exact).norm()) < 0.05 * float(exact.norm())


def test_a_tape_keeps_what_the_graph_keeps() -> None:
    """Of a residual network with normalisation no activation stays that autograd does not save itself."""
    model, x, _ = build_training("residual, in place", n=32)
    saved: set[int] = set()
    params = list(model.parameters())

    def note(t: Tensor) -> Tensor:
        saved.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), Tape(params) as tape:
        z = model(x)
    operands = list(tape._operands)
    tape.close(z)
    held = [o.tensor for o in (ref() for ref in operands) if o is not None]
    assert len(held) >= 10
    assert all(t.untyped_storage().data_ptr() in saved for t in held if t.numel() > 1000)
