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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from metacal import ranks
from metacal.bilevel.inner import Gradient, Inner
from metacal.bilevel.passes import Again, added
from metacal.bilevel.second_order import products
from metacal.bilevel.window import Window, clipped_gradients, hypergradient_of
from metacal.errors import require
from metacal.optim.through import State, StepTaken, check_through, discounted, record_step, states, through
from metacal.optim.transpose import Cotangents

__all__ = ["Horizon"]


@dataclass
class Moment:
    """A training step of the window. theta: where its gradient was taken, which under SAM is θ + ε. clipped: the
    gradient after clipping, where it was shortened from `norm`."""

    gradient: Gradient
    theta: list[Tensor]
    step: StepTaken
    clipped: Cotangents | None
    norm: float | Tensor


class Horizon(Window):
    """The last K = `steps` training steps, or those since the window began. decay: ρ, the discount of a step."""

    def __init__(self, inner: Inner, optimizer: Optimizer, clip_norm: float | None, steps: int, decay: float) -> None:
        require(0 < decay <= 1, f"horizon_decay must be in (0, 1], got {decay}")
        check_through(optimizer)
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

    def note(self, gradient: Gradient, norm: float | Tensor) -> None:
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
            pushed = self.through_clip(moment.clipped, moment.norm, pushed)
            gradient = moment.gradient
            jv, bent = products(self.inner, gradient, moment.theta, pushed, second=i > 0)
            part = hypergradient_of(self.inner, gradient.batch, gradient.logits, gradient.gamma, jv, meta_params)
            torch._foreach_add_(total, part)
            theta = [added(a, b) for a, b in zip(theta, bent)]
            if self.decay != 1:
                theta, state = discounted(theta, state, self.decay)
        ranks.sum_(total)
        return total
