"""The hypergradient by tangents dθ/dφ that are carried along with the training, for sources of few parameters.

With s = (θ, m) the state of a training step s' = U(s, g) and T_j = ds/dφ_j, one tangent for each of φ's d parameters,

    g_j   =  H T_j  +  ∂g/∂φ_j                 at the step's θ, on its batch: one pass made once more
    T_j'  =  ∂U/∂s (ρ T_j)  +  ∂U/∂g g_j        by the transposes of the transposes (`metacal.optim.through.along`)

and dM/dφ_j = ⟨∇_θ M, T_j⟩ at any step. The discount ρ forgets: at ρ = 1 the tangents sum up the sensitivities of all
steps since the start, which near the edge of stability is noise; ρ looks back over about 1/(1 − ρ) steps. Kept: d
copies of θ and of the optimizer's state. Every training step costs d products, whether it has an outer part or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from metacal.bilevel.inner import Gradient, Inner
from metacal.bilevel.passes import Again
from metacal.bilevel.second_order import products
from metacal.bilevel.window import Window, clipped_gradients
from metacal.errors import require
from metacal.optim.through import State, StepTaken, along, check_through, discounted, record_step, states
from metacal.optim.transpose import Cotangents

__all__ = ["TANGENT", "Tangent"]

TANGENT = "tangent"
MOST = 128  # parameters of a source, beyond which a reverse sweep is far cheaper


class Tangent(Window):
    """Tangents along `meta_params`, φ. decay: ρ. Every training step belongs to it: `every` of `MetaStep`."""

    empty = True  # the tangents are in the checkpoint

    def __init__(
        self,
        inner: Inner,
        optimizer: Optimizer,
        clip_norm: float | None,
        every: int,
        decay: float,
        meta_params: Sequence[Tensor],
    ) -> None:
        require(0 < decay <= 1, f"horizon_decay must be in (0, 1], got {decay}")
        count = sum(p.numel() for p in meta_params)
        require(
            count <= MOST,
            f"engine 'tangent' is for a gamma_net of at most {MOST} parameters, got {count}: use engine 'forward' with "
            "a horizon",
        )
        check_through(optimizer)
        self.meta_params, self.decay = meta_params, decay
        super().__init__(inner, optimizer, Again(inner.network), clip_norm, steps=max(2, every))
        none: Cotangents = [None] * len(inner.network.params)
        self.theta: list[Cotangents] = [none] * count
        self.state: list[list[State]] = [[State() for _ in none] for _ in range(count)]
        # of a step under way, for each j: g_j, and the tangents that it starts from, discounted
        self.pending: tuple[StepTaken, list[tuple[Cotangents, Cotangents, list[State]]]] | None = None
        self._last: Gradient | None = None

    def clear(self) -> None:
        """Nothing: tangents outlive an outer part."""

    @property
    def last(self) -> Gradient:
        assert self._last is not None
        return self._last

    def begin(self, x: Tensor, y: Tensor, count: int, epoch: float) -> None:
        self._advance()

    def drop(self) -> None:
        self.pending = None

    def note(self, gradient: Gradient, norm: float | Tensor) -> None:
        """g_j of the coming step. norm: of the gradient before clipping."""
        params = self.inner.network.params
        clipped = clipped_gradients(self.optimizer, params, norm, self.clip_norm)
        tangents = []
        for theta, state, also in zip(self.theta, self.state, self._direct(gradient)):
            theta, state = discounted(theta, state, self.decay)
            _, bent = products(self.inner, gradient, self.engine.old, theta, also=also)
            tangents.append((self.through_clip(clipped, norm, bent), theta, state))
        self.pending, self._last = (record_step(self.optimizer, params), tangents), gradient

    def _direct(self, gradient: Gradient) -> list[Tensor]:
        """∂/∂φ_j of the cotangent of the logits, ∂L/∂z (γ(φ)), each `(N, K)`: its Jᵀ is ∂g/∂φ_j."""
        z = gradient.logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = gradient.batch.mean(self.inner.losses(gradient.batch, z, gradient.gamma))
            (slope,) = torch.autograd.grad(loss, z, create_graph=True)
            w = torch.zeros_like(slope, requires_grad=True)
            by_phi = torch.autograd.grad(
                slope, self.meta_params, w, create_graph=True, allow_unused=True, materialize_grads=True
            )
            entries = [entry for g in by_phi for entry in g.flatten()]
            return [
                torch.autograd.grad(entry, w, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
                if entry.requires_grad
                else torch.zeros_like(w)
                for entry in entries
            ]

    @torch.no_grad()
    def _advance(self) -> None:
        """The tangents after the last step, once the optimizer has taken it."""
        if self.pending is None:
            return
        step, tangents = self.pending
        self.pending = None
        after = states(self.optimizer, self.inner.network.params)
        moved = [along(step, after, g, theta, state) for g, theta, state in tangents]
        self.theta, self.state = [theta for theta, _ in moved], [state for _, state in moved]

    def sweep(self, u: Cotangents, meta_params: Sequence[Tensor]) -> list[Tensor]:
        """⟨u, T_j⟩ for each j, in the shapes of φ."""
        self._advance()
        products_ = []
        for theta in self.theta:
            terms = [(a.double() * b.double()).sum() for a, b in zip(u, theta) if a is not None and b is not None]
            products_.append(torch.stack(terms).sum() if terms else torch.zeros((), device=self.last.logits.device))
        flat, pieces, start = torch.stack([p.double() for p in products_]), [], 0
        for p in meta_params:
            pieces.append(flat[start : start + p.numel()].view_as(p).to(p))
            start += p.numel()
        return pieces

    def state_dict(self) -> dict[str, Any]:
        self._advance()
        return {"theta": self.theta, "state": self.state}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.pending = None
        if state is not None:
            params = self.inner.network.params
            self.theta = [[None if t is None else t.to(p) for t, p in zip(theta, params)] for theta in state["theta"]]
            self.state = [
                [{key: value.to(p) for key, value in entries.items()} for entries, p in zip(states_, params)]
                for states_ in state["state"]
            ]
