"""The hypergradient through one training step, and what it shares with that through several (`horizon`).

A window keeps of a training step what its derivative needs, and then carries u = ∇_{θ'} M back through it:

    window.note(gradient, norm)               # with the clipped gradient in .grad, before the optimizer's step
    optimizer.step()
    window.sweep(u, meta_params)              # dM/dφ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from metacal.bilevel.inner import Batch, Gradient, Inner
from metacal.bilevel.passes import Engine
from metacal.optim.transpose import Cotangents, clips, kept_gradients, transposed_clip, transposed_update

__all__ = ["OneStep", "clipped_gradients", "hypergradient_of"]


def hypergradient_of(
    inner: Inner, batch: Batch, z: Tensor, gamma: Tensor | None, jv: Tensor, meta_params: Sequence[Tensor]
) -> list[Tensor]:
    """∂/∂φ of 1/n Σ_i ⟨∂ℓ_i/∂z_i (γ_i(φ)), J_i v⟩: a backward through N × K numbers and the gamma source.

    z, jv: logits and J v of the batch, `(N, K)`. gamma: a graph into `meta_params`.
    """
    z = z.to(jv.dtype).detach().requires_grad_()
    (slope,) = torch.autograd.grad(inner.losses(batch, z, gamma).mean(), z, create_graph=True)
    grads = torch.autograd.grad((slope * jv).sum(), meta_params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(meta_params, grads)]


def clipped_gradients(
    optimizer: Optimizer, params: Sequence[Tensor], norm: float, max_norm: float | None
) -> Cotangents | None:
    """The gradients in `.grad`, where clipping has shortened them from `norm`; they outlive the optimizer's step."""
    if max_norm is None or not clips(norm, max_norm):
        return None
    return kept_gradients(optimizer, params)


class OneStep:
    """The last step alone: v = (∂U/∂g)ᵀ u, J v at the θ before it."""

    steps = 1

    def __init__(self, inner: Inner, optimizer: Optimizer, engine: Engine, clip_norm: float | None) -> None:
        self.inner, self.optimizer, self.engine, self.clip_norm = inner, optimizer, engine, clip_norm
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self._gradient: Gradient | None = None
        self._back: Callable[[Cotangents], tuple[Cotangents, float]] | None = None

    @property
    def empty(self) -> bool:
        """Whether a checkpoint misses nothing here: a step and its outer part are one."""
        return True

    @property
    def draws(self) -> bool:
        """Whether the training pass drew random numbers."""
        assert self._gradient is not None
        return self._gradient.runs[0].streams.moved()

    def note(self, gradient: Gradient, norm: float) -> None:
        """Keep what the coming step reads. norm: of the gradient before clipping."""
        self._gradient, self._norm = gradient, norm
        self._clipped = clipped_gradients(self.optimizer, self.inner.network.params, norm, self.clip_norm)
        self._back = transposed_update(self.optimizer, self.inner.network.params)

    def sweep(self, u: Cotangents, meta_params: Sequence[Tensor]) -> list[Tensor]:
        """dM/dφ for u = ∇_{θ'} M. Uses u's memory."""
        gradient, back = self._gradient, self._back
        assert gradient is not None and back is not None
        v, factor = back(u)
        if self._clipped is not None and self.clip_norm is not None:
            factor *= transposed_clip(self._clipped, self._norm, self.clip_norm, v)
        jv = torch.cat([run.jv(v) for run in gradient.runs]) * factor
        return hypergradient_of(self.inner, gradient.batch, gradient.logits, gradient.gamma, jv, meta_params)
