"""J v and H v of a training step at its own θ, from its forward pass made once more.

H is the Hessian of the whole inner objective with its gammas, masks and penalties: z₁ = J v along the tape, and
H v = ∇_θ ⟨∂L/∂z, z₁⟩. With penalties that θ reaches by other ways than the logits, or where the tape lacks a rule, H v
is the second of two backward passes, at about twice the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from metacal.autodiff.plain import PlainNorms
from metacal.autodiff.tape import Tape
from metacal.bilevel.batch import Batch, mean_of, sum_cotangents
from metacal.bilevel.inner import Gradient, Inner
from metacal.bilevel.passes import Recorded, added, double_vjp
from metacal.optim.transpose import Cotangents

__all__ = ["products"]


def products(
    inner: Inner,
    gradient: Gradient,
    theta: Sequence[Tensor],
    v: Cotangents,
    second: bool = True,
    also: Tensor | None = None,
) -> tuple[Tensor, Cotangents]:
    """(J v of the batch `(N, K)`, H v if `second`) of the step that left `gradient`, at its parameters `theta`.

    Of several ranks J v is of this one's samples, and H v of all. also: cotangents of the logits `(N, K)`, whose Jᵀ
    also is added to H v.
    """
    jvs: list[Tensor] = []
    total: Cotangents = [None] * len(v)
    whole, start = gradient.batch, 0
    for run in gradient.runs:
        rows = slice(start, start + len(run.x))
        gamma = gradient.gamma
        batch = whole
        if len(run.x) < len(whole.x):
            batch = whole.part(run.x, start)
        gamma = gamma if gamma is None or gamma.dim() == 0 else gamma[rows]
        more = None if also is None else also[rows]
        jv, part = _of_pass(inner, run, theta, batch, gamma, v, second, more)
        jvs.append(jv)
        total = [added(a, b) for a, b in zip(total, part)]
        start += len(run.x)
    return torch.cat(jvs), sum_cotangents(total, theta) if second else total


def _of_pass(
    inner: Inner, run: Recorded, theta: Sequence[Tensor], batch: Batch, gamma: Tensor | None, v: Cotangents,
    second: bool, also: Tensor | None,
) -> tuple[Tensor, Cotangents]:  # fmt: skip
    params = [p.detach().requires_grad_() for p in theta]
    with torch.enable_grad(), run.again(params):
        with Tape(params) as tape:
            z, features = inner.network.plainly(run.x)
        run.check(z)
        tape.close(z)
        loss = mean_of(inner.losses(batch, z, None if gamma is None else gamma.detach()))
        of_logits = all(getattr(inner.penalties[name].penalty, "of_logits", False) for name in inner.due(batch))
        # one that has a gradient in the inputs is differentiated three times
        with nullcontext() if of_logits else PlainNorms():
            objective = inner.penalised(loss, batch, inner.network.model, z, features)
        along = None
        with suppress(NotImplementedError):  # no rule for an operation
            along, _ = tape.run(v)
            along = torch.zeros_like(z) if along is None else along
        jv = double_vjp(z, params, v) if along is None else along.detach()
        if not second:
            return jv, [None] * len(v)
        if along is not None and of_logits:
            # the tangents are linear in v and have a graph in θ, so H v = ∇_θ ⟨∂L/∂z, J v⟩
            (slope,) = torch.autograd.grad(objective, z, create_graph=True)
            directional = (slope * along).sum()
        else:
            grads = torch.autograd.grad(objective, params, create_graph=True, allow_unused=True)
            terms = [(g * t).sum() for g, t in zip(grads, v) if g is not None and t is not None]
            directional = torch.stack(terms).sum() if terms else z.new_zeros(())
        if also is not None:
            directional = directional + (z * also).sum()
        if not directional.requires_grad:
            return jv, [None] * len(v)
        return jv, list(torch.autograd.grad(directional, params, allow_unused=True))
