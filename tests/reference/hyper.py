"""The whole bilevel step, written plainly, and its derivative by central differences. Float64, slow, obvious."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def focal(logits: Tensor, labels: Tensor, gamma: Tensor) -> Tensor:
    """-(1 - p)^gamma log p, term by term."""
    p = torch.softmax(logits, dim=1)[torch.arange(len(labels)), labels]
    return -((1 - p) ** gamma) * torch.log(p)


def outer_value(
    backbone: nn.Module,
    optimizer: Optimizer,
    gamma_net: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    x_meta: Tensor,
    y_meta: Tensor,
    outer: Callable[[Tensor, Tensor], Tensor],
    clip_norm: float | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
) -> float:
    """M after one step of a copy of the backbone on each batch. The gamma source must have observed the batches."""
    backbone, optimizer = copy.deepcopy((backbone, optimizer))
    for x, y in batches:
        logits, features = backbone(x)
        gamma = gamma_net(features.detach(), logits=logits.detach(), labels=y, inputs=x, epoch=0).detach()
        loss = focal(logits, y, gamma).mean()
        if penalty is not None:
            loss = loss + penalty(backbone)
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(backbone.parameters(), clip_norm)
        optimizer.step()
    torch.manual_seed(int(torch.randint(2**62, ())))  # the meta pass has a random stream of its own
    with torch.no_grad():
        return float(outer(backbone(x_meta)[0], y_meta))


def central_differences(value: Callable[[], float], params: list[Tensor], eps: float = 2e-5) -> Tensor:
    """d value / d params, one entry after the other, by (f(ε) − f(−ε)) / 2ε."""
    slopes = []
    for p in params:
        flat = p.detach().view(-1)
        for i in range(flat.numel()):
            start = flat[i].item()
            flat[i] = start + eps
            above = value()
            flat[i] = start - eps
            slopes.append((above - value()) / (2 * eps))
            flat[i] = start
    return torch.tensor(slopes, dtype=torch.float64)
