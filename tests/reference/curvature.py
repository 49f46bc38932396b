"""Slow and obvious float64 curvature: dense Jacobians and Hessians of small networks, in the network's present mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def trainable(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(v: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in v])


def unflat(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [a.reshape(p.shape) for a, p in zip(v.split([p.numel() for p in like]), like)]


def mean_loss(z: Tensor, y: Tensor, loss: str) -> Tensor:
    if loss == "mse":
        return F.mse_loss(z, F.one_hot(y, z.shape[1]).to(z.dtype))
    return F.cross_entropy(z, y)


def _rows(scalars: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """One gradient a scalar, (len(scalars), P)."""
    rows = []
    for s in scalars:
        grads = torch.autograd.grad(s, params, retain_graph=True, allow_unused=True)
        rows.append(flat([torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)]))
    return torch.stack(rows)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """∂z/∂θ, (N, K, P)."""
    params = trainable(model)
    z = model(x)
    return _rows(list(z.reshape(-1)), params).reshape(*z.shape, -1)


def logit_hessians(z: Tensor, loss: str) -> Tensor:
    """S_n, (N, K, K)."""
    if loss == "mse":
        return torch.eye(z.shape[1], dtype=z.dtype).mul(2 / z.shape[1]).expand(len(z), -1, -1)
    p = z.softmax(1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


def ggn(model: nn.Module, x: Tensor, loss: str = "cross_entropy") -> Tensor:
    """1/N Σ J_nᵀ S_n J_n, (P, P)."""
    j = jacobian(model, x)
    s = logit_hessians(model(x).detach(), loss)
    return torch.einsum("nkp,nkl,nlq->pq", j, s, j) / len(x)


def hessian(model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy") -> Tensor:
    """∇² of the mean loss, (P, P), one reverse pass a row over a recorded gradient."""
    params = trainable(model)
    with sdpa_kernel(SDPBackend.MATH):
        grads = torch.autograd.grad(mean_loss(model(x), y, loss), params, create_graph=True, allow_unused=True)
    entries = []
    for g, p in zip(grads, params):
        entries += list((torch.zeros_like(p) if g is None else g).reshape(-1))
    rows = []
    for e in entries:
        if e.requires_grad:
            rows.append(_rows([e], params)[0])
        else:
            rows.append(torch.zeros(len(entries), dtype=e.dtype))
    return torch.stack(rows)


def hessian_by_differences(
    model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy", h: float = 1e-5
) -> Tensor:
    """∇² by central differences of the gradient: independent of any double backward. Error about 1e-8."""
    params = trainable(model)
    at = [p.detach().clone() for p in params]
    rows = []
    for i in range(flat(at).numel()):
        sides = []
        for sign in (1, -1):
            moved = flat(at)
            moved[i] += sign * h
            with torch.no_grad():
                for p, value in zip(params, unflat(moved, at)):
                    p.copy_(value)
            sides.append(_rows([mean_loss(model(x), y, loss)], params)[0])
        rows.append((sides[0] - sides[1]) / (2 * h))
    with torch.no_grad():
        for p, value in zip(params, at):
            p.copy_(value)
    return torch.stack(rows)
