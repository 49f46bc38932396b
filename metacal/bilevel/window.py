"""The training steps that an outer part is differentiated through: what is kept of them, and dM/dφ.

A window keeps of each training step what its derivative needs, and then carries u = ∇_{θ'} M back through it:

    window.begin(x, y, count, epoch)          # before the step's forward
    window.note(gradient, norm)               # with the clipped gradient in .grad, before the optimizer's step
    optimizer.step()
    window.outer_part(outer, x_meta, y_meta, meta_params)     # M, dM/dφ

`OneStep` is here, several steps are in `horizon`, and the reference library's way is in `unrolled`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from metacal import ranks
from metacal.bilevel.batch import Batch, sum_cotangents
from metacal.bilevel.inner import Gradient, Inner, check_labels
from metacal.bilevel.passes import Engine
from metacal.network import Streams
from metacal.optim.transpose import Cotangents, clips, kept_gradients, transposed_clip, transposed_update

__all__ = ["OneStep", "OuterPart", "Window", "clipped_gradients", "full", "hypergradient_of"]


def hypergradient_of(
    inner: Inner, batch: Batch, z: Tensor, gamma: Tensor | None, jv: Tensor, meta_params: Sequence[Tensor]
) -> list[Tensor]:
    """∂/∂φ of 1/n Σ_i ⟨∂ℓ_i/∂z_i (γ_i(φ)), J_i v⟩: a backward through N × K numbers and the gamma source.

    Of several ranks it is this one's part of the sum. z, jv: logits and J v of the batch, `(N, K)`. gamma: a graph into
    `meta_params`.
    """
    z = z.to(jv.dtype).detach().requires_grad_()
    (slope,) = torch.autograd.grad(batch.mean(inner.losses(batch, z, gamma)), z, create_graph=True)
    grads = torch.autograd.grad((slope * jv).sum(), meta_params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(meta_params, grads)]


def clipped_gradients(
    optimizer: Optimizer, params: Sequence[Tensor], norm: float | Tensor, max_norm: float | None
) -> Cotangents | None:
    """The gradients in `.grad`, where clipping has shortened them from `norm`; they outlive the optimizer's step."""
    if max_norm is None or not clips(norm, max_norm):
        return None
    return kept_gradients(optimizer, params)


Outer = Callable[[Tensor, Tensor], Tensor]
OuterPart = tuple[Tensor, list[Tensor], Tensor, Tensor]
"""M, dM/dφ like the parameters, and the logits and labels of the meta batch, of all ranks."""


class Window:
    """What windows share that are swept back from u = ∇_{θ'} M. `engine` makes the passes of its training steps."""

    def __init__(self, inner: Inner, optimizer: Optimizer, engine: Engine, clip_norm: float | None, steps: int) -> None:
        self.inner, self.optimizer, self.engine = inner, optimizer, engine
        self.clip_norm, self.steps = clip_norm, steps
        self.clear()

    records = True
    """Whether passes are recorded by `engine`."""

    def clear(self) -> None:
        """Forget the steps."""
        raise NotImplementedError

    @property
    def last(self) -> Gradient:
        """Of the last step."""
        raise NotImplementedError

    def sweep(self, u: Cotangents, meta_params: Sequence[Tensor]) -> list[Tensor]:
        """dM/dφ for u = ∇_{θ'} M. May use u's memory."""
        raise NotImplementedError

    def through_clip(self, clipped: Cotangents | None, norm: float | Tensor, v: Cotangents) -> Cotangents:
        """∂(clipped g)/∂g v, which is symmetric; clipped: the gradient after clipping, None where it was not."""
        if clipped is None or self.clip_norm is None:
            return v
        v = [None if g is None else g.clone() for g in v]
        factor = transposed_clip(clipped, norm, self.clip_norm, v)
        return [None if g is None else g.mul_(factor) for g in v]

    def begin(self, x: Tensor, y: Tensor, count: int, epoch: float) -> None:
        """A step is about to be taken."""

    def drop(self) -> None:
        """It was not."""

    def outer_part(self, outer: Outer, x_meta: Tensor, y_meta: Tensor, meta_params: Sequence[Tensor]) -> OuterPart:
        """M at the new parameters, with batch statistics as in training; nothing moves, random streams included.

        Every rank computes the same M of all ranks' logits, and u of its own by them.
        """
        network = self.inner.network
        # a stream of its own, seeded only where the model draws at all
        mixed = self.inner.autocasting(x_meta) if self.engine.outer_autocast else nullcontext()
        with mixed, Streams.aside(x_meta.device, seeded=self.last.runs[0].streams.moved()):
            z = full(network.aside(x_meta)[0])
        check_labels(y_meta, z, "y_meta")
        counts = ranks.rows(len(z)).counts
        z, labels = ranks.gather_rows(z, counts), ranks.gather_rows(y_meta, counts)
        value = outer(z, labels)
        u: Cotangents = [None] * len(network.params)
        if value.requires_grad:
            slopes = torch.autograd.grad(value, network.params, allow_unused=True)
            u = [g.to_dense() if g is not None and g.layout is torch.sparse_coo else g for g in slopes]
        u = sum_cotangents(u, network.params)
        return value.detach(), self.sweep(u, meta_params), z.detach(), labels

    def state_dict(self) -> dict[str, Any] | None:
        """A checkpoint is made where a window is empty."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.clear()


def full(logits: Tensor) -> Tensor:
    """Float32 at least."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class OneStep(Window):
    """The last step alone: v = (∂U/∂g)ᵀ u, J v at the θ before it."""

    empty = True  # a step and its outer part are one

    def clear(self) -> None:
        self._gradient: Gradient | None = None
        self._back: Callable[[Cotangents], tuple[Cotangents, float]] | None = None

    @property
    def last(self) -> Gradient:
        assert self._gradient is not None
        return self._gradient

    def note(self, gradient: Gradient, norm: float | Tensor) -> None:
        """Keep what the coming step reads. norm: of the gradient before clipping."""
        self._gradient, self._norm = gradient, norm
        self._clipped = clipped_gradients(self.optimizer, self.inner.network.params, norm, self.clip_norm)
        self._back = transposed_update(self.optimizer, self.inner.network.params)

    def sweep(self, u: Cotangents, meta_params: Sequence[Tensor]) -> list[Tensor]:
        gradient, back = self.last, self._back
        assert back is not None
        factor: float | Tensor
        v, factor = back(u)  # a number, unless clipping makes it one on the device
        if self._clipped is not None and self.clip_norm is not None:
            factor *= transposed_clip(self._clipped, self._norm, self.clip_norm, v)
        jv = torch.cat([run.jv(v) for run in gradient.runs]) * factor
        part = hypergradient_of(self.inner, gradient.batch, gradient.logits, gradient.gamma, jv, meta_params)
        ranks.sum_(part)
        return part
