"""What a training step tells of its penalties."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from metacal.optim.transpose import total_norm

__all__ = ["PenaltyReport"]


class PenaltyReport:
    """The penalties of one gradient: their values, and for those in `details` share, gradient norm and time.

    Weights are averages over steps, whatever `every` is. The time is that of the penalty's own forward and of a
    backward pass for it alone, which for penalties on the logits is more than they add to the common one.
    """

    def __init__(self, leaves: Sequence[Tensor], details: set[str]) -> None:
        self.leaves, self.details = leaves, set(details)
        self.value: dict[str, Tensor] = {}
        self.weighted: dict[str, Tensor] = {}
        self.grads: dict[str, list[Tensor]] = {}
        self.seconds: dict[str, float] = {}

    @property
    def reported(self) -> list[str]:
        """In the order of the penalties, which is that of all ranks."""
        return [name for name in self.value if name in self.details]

    def add(self, name: str, value: Tensor, share: float, weight: float, began: float) -> None:
        """share: with which the value counts in that of the whole batch."""
        part = share * value.detach()
        self.value[name] = part + self.value[name] if name in self.value else part
        self.weighted[name] = weight * self.value[name]
        if name not in self.details:
            return
        slopes: Sequence[Tensor | None] = [None] * len(self.leaves)
        if value.requires_grad:
            factor = torch.full_like(value, weight * share)  # before the pass, which other ranks' values may enter
            slopes = torch.autograd.grad(value, self.leaves, factor, retain_graph=True, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(self.leaves, slopes)]
        if value.is_cuda:
            torch.cuda.synchronize(value.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        self.grads[name] = [a + b for a, b in zip(self.grads[name], grads)] if name in self.grads else grads

    def tensors(self) -> list[Tensor]:
        """All that has to be added up where several ranks have parts of the batch."""
        return [*self.value.values(), *self.weighted.values(), *[g for name in self.reported for g in self.grads[name]]]

    def values(self, loss: Tensor) -> dict[str, Tensor | float]:
        """`penalty/<name>` unweighted, `…_share` of the objective, `…_grad_norm` weighted, `time/penalty_…_ms`."""
        terms: dict[str, Tensor | float] = {f"penalty/{name}": value for name, value in self.value.items()}
        whole = loss.detach() + sum(self.weighted.values()) if self.weighted else loss
        for name in self.reported:
            terms[f"penalty/{name}_share"] = self.weighted[name] / whole
            terms[f"penalty/{name}_grad_norm"] = total_norm(self.grads[name])
            terms[f"time/penalty_{name}_ms"] = 1e3 * self.seconds[name]
        return terms
