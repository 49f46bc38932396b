"""The reference: k >= 1 training steps unrolled by the `higher` library (Grefenstette et al. 2019).

Keeps the graph of everything, so it is the dearest engine and the only one that sees more than one step.
`higher` 0.2.1 computes torch's SGD (momentum, Nesterov, dampening, weight decay) exactly; its Adam puts epsilon
elsewhere and its SGD ignores `maximize`, so these are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from metacal.bilevel.state import RandomState
from metacal.errors import InputError, require
from metacal.forward_mode import plain_attention

__all__ = ["HIGHER", "check_unrollable", "unrolled_gradient"]


HIGHER = "higher"


def check_unrollable(optimizer: Optimizer) -> None:
    """Raise `InputError` unless `higher` is installed and takes the same steps as this optimizer."""
    require(
        type(optimizer) is SGD,
        f"optimizer must be SGD with engine 'higher' (that library computes another {type(optimizer).__name__}), "
        "use engine 'forward'",
    )
    require(
        not any(group["maximize"] for group in optimizer.param_groups),
        "optimizer must not set maximize with engine 'higher' (that library ignores it), use engine 'forward'",
    )
    try:
        import higher  # noqa: F401
    except ImportError:
        raise InputError(
            "engine 'higher' needs the package higher (pip install higher), use engine 'forward'"
        ) from None


def unrolled_gradient(
    model: nn.Module,
    optimizer: Optimizer,
    settings: Sequence[Mapping[str, Sequence[float]]],
    inner: Callable[[nn.Module, int], Tensor],
    outer: Callable[[nn.Module], Tensor],
    params: Sequence[Tensor],
    clip_norm: float | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Value and gradient in `params` of `outer(model after as many steps as there are settings)`.

    settings: of the optimizer at each step, by name, one value for each parameter group. inner: `(model, i) ->
    loss` of the i-th step, a graph into `params`. The model, its buffers and its optimizer stay as they are; the
    random stream moves as the steps move it, and is put back for what `outer` draws.
    """
    import higher

    def clip(grads: list[Tensor | None]) -> list[Tensor | None]:
        if clip_norm is None:
            return grads
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads if g is not None]))
        scale = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        return [None if g is None else g * scale for g in grads]

    device = next(model.parameters()).device
    context: Any = higher.innerloop_ctx(model, optimizer, copy_initial_weights=True)
    with plain_attention(), context as (functional, steps):
        for i, override in enumerate(settings):
            steps.step(inner(functional, i), override=override, grad_callback=clip)
        with RandomState.aside(device):
            value = outer(functional)
        grads = torch.autograd.grad(value, params, allow_unused=True)
    return value.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads)]
