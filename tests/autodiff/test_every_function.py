"""No tensor method is carried wrongly: with all kinds of arguments, it is refused or agrees with double backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from metacal.autodiff.tape import Tape

STATE = {  # they change what the tensor is, not what it holds, or draw random numbers without a way to set them
    "backward", "detach_", "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
    "resize_", "set_", "share_memory_", "module_load", "rename_", "apply_", "map_", "map2_", "random_", "bernoulli_",
    "normal_", "uniform_", "exponential_", "cauchy_", "geometric_", "log_normal_", "record_stream", "pin_memory",
}  # fmt: skip
METHODS = sorted(n for n in dir(Tensor) if not n.startswith("_") and n not in STATE)
INDEX = torch.tensor([[0, 1, 2, 0]] * 3)  # writes places twice


def arguments(x: Tensor) -> list[tuple[Any, ...]]:
    some = torch.tensor([0, 2])
    return [
        (), (0,), (1,), (2.0,), (0.3,), (0, 1), (1, 0), (-1, 1), (2, 0), ((3, 4),), (4, 3), (0, 2, 1), (1, 1, 2),
        (0, 0, 1), (x * 0.5 + 1,), (x.t(),), (x[0],), (x[:, 0],), (x[0] * 2, x[1]), (x, x * 2), (x > 0, 0.5),
        (x > 0, x), (some,), (0, some), (0, some, x[:2]), (0, INDEX), (0, INDEX, x), (INDEX, 0),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_method() -> None:
    kept = set()
    for name in METHODS:
        for i in range(len(arguments(torch.ones(3, 4)))):
            g = torch.Generator().manual_seed(i)
            p, v = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(2))
            p.requires_grad_()

            def f(p: Tensor, name: str = name, i: int = i) -> Tensor:
                x = p * 1.3 + p.square() * 0.2
                out = getattr(x, name)(*arguments(x)[i])
                outs = [out] if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else []
                moved = [
                    t.reshape(-1) for t in outs if isinstance(t, Tensor) and t.dtype == p.dtype and t.requires_grad
                ]
                return torch.cat([*moved, x.reshape(-1)])

            try:
                z = f(p)
                w = torch.zeros_like(z, requires_grad=True)
                (pulled,) = torch.autograd.grad(z, p, w, create_graph=True)
                (jv,) = torch.autograd.grad(pulled, w, v)
            except Exception:  # arguments that this method does not take, or no second derivative
                continue
            with Tape([p]) as tape:
                again = f(p)
            if tape.close(again).failure is not None:
                continue
            kept.add(name)
            assert torch.equal(again.nan_to_num(), z.nan_to_num()), (name, i)
            assert torch.allclose(tape.jv([v]), jv, rtol=1e-8, atol=1e-9, equal_nan=True), (name, i)
    assert len(kept) > 200
