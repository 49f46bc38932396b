"""J v by a difference of logits: the engine for networks that can be run and not differentiated twice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metacal.autodiff.cuts import Cuts
from metacal.autodiff.graph import nodes_of
from metacal.bilevel.passes import Engine, Recorded
from metacal.errors import require
from metacal.network import Network
from metacal.optim.transpose import Cotangents, total_norm

__all__ = ["Difference"]


class Difference(Engine):
    """Difference quotient of the logits: one or, if `central`, two plain forwards.

        J v ≈ (z(θ + εv) − z(θ)) / ε     or     (z(θ + εv) − z(θ − εv)) / 2ε

    ε is such that the logits move by `relative` of their size (root mean squares), whatever the network's
    sensitivity, which no rule from ‖θ‖ and ‖v‖ knows: it is that of the last step, with a second try where that
    is off by more than a factor of three. z(θ) is that of the training pass. The error is of order ε for smooth
    networks; kinks of ReLU networks with batch statistics leave more.
    """

    def __init__(self, network: Network, relative: float = 2e-3, central: bool = False) -> None:
        super().__init__(network)
        require(relative > 0, f"relative must be > 0, got {relative}")
        self.relative, self.central = relative, central
        self.sensitivity = 0.0  # size of J v over that of v, at the last step
        self.checked = False

    def record(self, x: Tensor) -> Recorded:
        return _Compared(self, x)

    def state(self) -> float:
        return self.sensitivity

    def load_state(self, state: float) -> None:
        self.sensitivity = state


class _Compared(Recorded):
    engine: Difference

    def forward(self) -> tuple[Tensor, Tensor | None]:
        if self.engine.checked or self.mixed or self.network.trained is not self.network.model:
            return self.network(self.x)
        with Cuts() as cuts:
            outputs = self.network(self.x)
        require(
            not cuts.reach(outputs[0]),
            "model detaches values that its logits depend on (detach, no_grad or .data), which a difference of logits "
            "cannot leave out: use engine 'forward'",
        )
        return outputs

    @torch.no_grad()
    def jv(self, v: Cotangents) -> Tensor:
        engine, old = self.engine, self.engine.old
        pairs = [(p, t) for p, t in zip(old, v) if t is not None]
        moved, tangents = [p for p, _ in pairs], [t for _, t in pairs]
        size = float(total_norm(tangents)) if pairs else 0.0
        if size == 0 or not math.isfinite(size):
            return torch.full_like(self.logits, 0.0 if size == 0 else math.nan)
        start = self._start(moved[0].dtype)
        aim = engine.relative * max(_rms(start), 1e-3)
        eps = 1e-3 * float(total_norm(moved)) / size
        if engine.sensitivity > 0:
            eps = aim / (engine.sensitivity * size)
        at = 0.0
        for attempt in range(3):
            torch._foreach_add_(moved, tangents, alpha=eps - at)
            at = eps
            product = (self.repeated(old) - start) / eps
            engine.sensitivity = _rms(product) / size
            if not 0 < engine.sensitivity < math.inf or aim / 3 < eps * _rms(product) < 3 * aim:
                break
            if attempt < 2:
                eps = aim / (engine.sensitivity * size)
        require(
            not eps * _rms(product) > 100 * aim,
            "model gives logits that move by more than a change of its parameters explains: its forward depends on "
            "something that cannot be repeated, use engine 'reverse'",
        )
        if not engine.checked:
            self._verify(product, v)
        if engine.central:
            torch._foreach_add_(moved, tangents, alpha=-2 * eps)
            product = (product + (start - self.repeated(old)) / eps) / 2
        if not math.isfinite(engine.sensitivity):
            engine.sensitivity = 0.0
        return product

    def _start(self, dtype: torch.dtype) -> Tensor:
        """z(θ): that of the training pass, unless it was too coarse to subtract from; the first one is repeated."""
        self.graph: Tensor | None = None
        coarse = self.logits.dtype != dtype
        if self.engine.checked and not coarse:
            return self.logits
        if self.engine.checked:
            return self.repeated(self.engine.old)
        self.leaves = [p.clone().requires_grad_() for p in self.engine.old]
        with torch.enable_grad():
            self.graph = self.repeated(self.leaves)
        self.check(self.graph)
        return self.graph.detach() if coarse else self.logits

    def _verify(self, product: Tensor, v: Cotangents) -> None:
        """⟨w, J v⟩ = ⟨Jᵀw, v⟩, whose right side is a backward pass: autograd Functions may bring their own derivative.

        Without such functions the tolerance leaves room for kinks, which no difference sees right.
        """
        assert self.graph is not None
        own = any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes_of(self.graph))
        tolerance = max(10 * self.engine.relative, 1e-3 if product.dtype == torch.float32 else 1e-6) if own else 0.3
        signs = torch.ones_like(product)
        signs.view(-1)[::2] = -1
        for w in (product, signs * product.square().mean().sqrt()):
            with self.network.holding(self.leaves):
                grads = torch.autograd.grad(self.graph, self.leaves, w, allow_unused=True, retain_graph=True)
            right = sum(float((g * t).sum()) for g, t in zip(grads, v) if g is not None and t is not None)
            gap = abs(float((w * product).sum()) - right)
            require(
                not gap > tolerance * float(w.norm() * product.norm()),
                "a difference of the model's logits disagrees with its backward pass (a function whose backward is not "
                "its derivative?): use engine 'forward'",
            )
        self.graph, self.leaves = None, []
        self.engine.checked = True


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
