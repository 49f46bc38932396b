"""The hypergradient through the last K training steps, by one sweep from the last to the first.

A step s = (θ, m) → s' = U(s, g), with m the optimizer's state and g = ∇L(θ; γ(φ)), clipped. From cotangents
(λ_θ, λ_m) = (∇M(θ_K), 0) after the last step, each step backwards gives

    λ_g, λ_θ, λ_m  ←  transposes of the real step (`metacal.optim.through`) and of the clipping
    dM/dφ  +=  ∂/∂φ 1/n Σ_i ⟨ ∂ℓ_i/∂z_i (γ_i(φ)), J_i λ_g ⟩        at that step's θ, on its batch
    λ_θ    +=  H λ_g                                                H = ∇²L, with its γ, its masks and its penalties

and, with a discount ρ, λ_θ and λ_m times ρ. J λ_g and H λ_g come from the step's forward pass, made once more at its θ:
z₁ = J λ_g along the tape, and H λ_g = ∇_θ ⟨∂L/∂z, z₁⟩. γ reads the features and logits of each step as constants.
Kept between steps: θ, the optimizer's state, the batch and the gammas' small graph; one pass at a time is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from metacal.autodiff.tape import Tape
from metacal.bilevel.inner import Batch, Gradient, Inner
from metacal.bilevel.passes import Again, Recorded, added, double_vjp
from metacal.bilevel.window import Window, clipped_gradients, hypergradient_of
from metacal.errors import require
from metacal.optim.through import State, StepTaken, record_step, states, through
from metacal.optim.transpose import Cotangents, transposed_clip

__all__ = ["Horizon"]


@dataclass
class Moment:
    """A training step of the window. theta: where its gradient was taken, which under SAM is θ + ε. clipped: the
    gradient after clipping, where it was shortened from `norm`."""

    gradient: Gradient
    theta: list[Tensor]
    step: StepTaken
    clipped: Cotangents | None
    norm: float


class Horizon(Window):
    """The last K = `steps` training steps, or those since the window began. decay: ρ, the discount of a step."""

    def __init__(self, inner: Inner, optimizer: Optimizer, clip_norm: float | None, steps: int, decay: float) -> None:
        require(0 < decay <= 1, f"horizon_decay must be in (0, 1], got {decay}")
        super().__init__(inner, optimizer, Again(inner.network), clip_norm, steps)
        self.decay = decay

    def clear(self) -> None:
        self.moments: list[Moment] = []

    @property
    def empty(self) -> bool:
        return not self.moments

    @property
    def last(self) -> Gradient:
        return self.moments[-1].gradient

    def note(self, gradient: Gradient, norm: float) -> None:
        """Keep what the coming step reads. norm: of the gradient before clipping."""
        params = self.inner.network.params
        clipped = clipped_gradients(self.optimizer, params, norm, self.clip_norm)
        step = record_step(self.optimizer, params)
        self.moments.append(Moment(gradient, self.engine.old, step, clipped, norm))

    def sweep(self, u: Cotangents, meta_params: Sequence[Tensor]) -> list[Tensor]:
        params = self.inner.network.params
        total = [torch.zeros_like(p) for p in meta_params]
        theta, state = list(u), [State() for _ in params]
        after = states(self.optimizer, params)
        for i in reversed(range(len(self.moments))):
            moment = self.moments[i]
            pushed, theta, state = through(moment.step, after, theta, state)
            after = moment.step.state
            if moment.clipped is not None and self.clip_norm is not None:
                pushed = [None if g is None else g.clone() for g in pushed]
                factor = transposed_clip(moment.clipped, moment.norm, self.clip_norm, pushed)
                pushed = [None if g is None else g.mul_(factor) for g in pushed]
            jv, bent = self._products(moment, pushed, second=i > 0)
            gradient = moment.gradient
            part = hypergradient_of(self.inner, gradient.batch, gradient.logits, gradient.gamma, jv, meta_params)
            torch._foreach_add_(total, part)
            theta = [added(a, b) for a, b in zip(theta, bent)]
            if self.decay != 1:
                theta = [None if a is None else a * self.decay for a in theta]
                state = [{key: value * self.decay for key, value in entries.items()} for entries in state]
        return total

    def _products(self, moment: Moment, v: Cotangents, second: bool) -> tuple[Tensor, Cotangents]:
        """J v of the batch, and H v if `second`, at the moment's θ."""
        jvs: list[Tensor] = []
        bent: Cotangents = [None] * len(v)
        whole, start = moment.gradient.batch, 0
        for run in moment.gradient.runs:
            rows = slice(start, start + len(run.x))
            gamma = moment.gradient.gamma
            batch = whole
            if len(run.x) < len(whole.x):
                batch = replace(whole, x=run.x, y=whole.y[rows], start=start, total=len(whole.x))
            gamma = gamma if gamma is None or gamma.dim() == 0 else gamma[rows]
            jv, part = self._of_pass(run, moment.theta, batch, gamma, v, second)
            jvs.append(jv)
            share = len(run.x) / len(whole.x)
            bent = [added(a, None if b is None else share * b) for a, b in zip(bent, part)]
            start += len(run.x)
        return torch.cat(jvs), bent

    def _of_pass(
        self, run: Recorded, theta: list[Tensor], batch: Batch, gamma: Tensor | None, v: Cotangents, second: bool,
    ) -> tuple[Tensor, Cotangents]:  # fmt: skip
        inner = self.inner
        params = [p.detach().requires_grad_() for p in theta]
        with torch.enable_grad(), run.again(params):
            with Tape(params) as tape:
                z, features = inner.network.plainly(run.x)
            run.check(z)
            tape.close(z)
            loss = inner.losses(batch, z, None if gamma is None else gamma.detach()).mean()
            objective = inner.penalised(loss, batch, inner.network.model, z, features)
            along = None
            with suppress(NotImplementedError):  # no rule for an operation
                along, _ = tape.run(v)
                along = torch.zeros_like(z) if along is None else along
            jv = double_vjp(z, params, v) if along is None else along.detach()
            if not second:
                return jv, [None] * len(v)
            if along is not None and objective is loss:
                # the tangents are linear in v and have a graph in θ, so H v = ∇_θ ⟨∂L/∂z, J v⟩
                (slope,) = torch.autograd.grad(loss, z, create_graph=True)
                directional = (slope * along).sum()
            else:
                grads = torch.autograd.grad(objective, params, create_graph=True, allow_unused=True)
                terms = [(g * t).sum() for g, t in zip(grads, v) if g is not None and t is not None]
                directional = torch.stack(terms).sum() if terms else z.new_zeros(())
            if not directional.requires_grad:
                return jv, [None] * len(v)
            return jv, list(torch.autograd.grad(directional, params, allow_unused=True))
