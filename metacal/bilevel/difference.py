"""J v by a difference of logits: the engine for networks that can be run and not differentiated twice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metacal import ranks
from metacal.autodiff.cuts import Cuts
from metacal.bilevel.passes import Engine, Recorded
from metacal.bilevel.reading import Check
from metacal.devices import full_float32
from metacal.errors import InputError, require
from metacal.network import Network
from metacal.optim.transpose import Cotangents, total_norm

__all__ = ["CHECKED", "Difference"]

CHECKED = 64  # so many products at most from one check to the next


class Difference(Engine):
    """Difference quotient of the logits: one or, if `central`, two plain forwards.

        J v ≈ (z(θ + εv) − z(θ)) / ε     or     (z(θ + εv) − z(θ − εv)) / 2ε

    ε is such that the logits move by `relative` of their size (root mean squares), whatever the network's
    sensitivity, which no rule from ‖θ‖ and ‖v‖ knows: it is that of the last step, with a second try where that
    is off by more than a factor of three. z(θ) is that of the training pass. The error is of order ε for smooth
    networks; kinks of ReLU networks with batch statistics leave more. On a GPU, which is not waited for, the steps
    after the first have one try.
    """

    def __init__(self, network: Network, relative: float = 2e-3, central: bool = False) -> None:
        super().__init__(network)
        require(relative > 0, f"relative must be > 0, got {relative}")
        self.relative, self.central = relative, central
        self.sensitivity: float | Tensor = 0.0  # size of J v over that of v, at the last step
        self.products = 0  # so far

    def record(self, x: Tensor) -> Recorded:
        return _Compared(self, x)

    @property
    def may_refuse(self) -> bool:
        number = self.products + 1
        return number % CHECKED == 0 or number & (number - 1) == 0

    def state(self) -> list[float]:
        return [float(self.sensitivity), self.products]

    def load_state(self, state: float | list[float]) -> None:
        # a checkpoint of an older version has the sensitivity alone
        self.sensitivity, products = (state, 0) if isinstance(state, float) else state
        self.products = int(products)


class _Compared(Recorded):
    """All its passes in full float32: they differ by `relative` of their size, a few times what TF32 leaves off."""

    engine: Difference

    def forward(self) -> tuple[Tensor, Tensor | None]:
        with full_float32():
            return super().forward()

    def repeated(self, params: list[Tensor]) -> Tensor:
        with full_float32():
            return super().repeated(params)

    @torch.no_grad()
    def jv(self, v: Cotangents) -> Tensor:
        engine = self.engine
        pairs = [(p, t) for p, t in zip(engine.old, v) if t is not None]
        self.moved, self.tangents = [p for p, _ in pairs], [t for _, t in pairs]
        self.at: float | Tensor = 0.0
        if engine.unproven is not None and pairs and not engine.may_refuse:
            return self._jv_on_device(engine.unproven)
        engine.sensitivity = float(engine.sensitivity)
        size = float(total_norm(self.tangents)) if pairs else 0.0
        if size == 0 or not math.isfinite(size):
            return torch.full_like(self.logits, 0.0 if size == 0 else math.nan)
        theta = [p.clone() for p in engine.old] if engine.may_refuse else None
        start = self._start()
        product, eps = self._quotient(start, size)
        if theta is not None:
            self._verify(product, v, eps, [p.requires_grad_() for p in theta])
        engine.products += 1
        if engine.central:
            product = (product + (start - self._logits_at(-eps)) / eps) / 2
        if not math.isfinite(engine.sensitivity):
            engine.sensitivity = 0.0
        return product

    def _start(self) -> Tensor:
        """z(θ): that of the training pass, unless it was too coarse to subtract from."""
        return self.repeated(self.engine.old) if self.logits.dtype != self.moved[0].dtype else self.logits

    def _quotient(self, start: Tensor, size: float) -> tuple[Tensor, float]:
        """(z(θ + εv) − z(θ)) / ε and its ε. size: of v."""
        engine = self.engine
        aim = engine.relative * max(float(_rms(start)), 1e-3)
        sensitivity = float(engine.sensitivity)
        eps = 1e-3 * float(total_norm(self.moved)) / size
        if sensitivity > 0:
            eps = aim / (sensitivity * size)
        for attempt in range(3):
            product = (self._logits_at(eps) - start) / eps
            change = float(_rms(product))
            engine.sensitivity = sensitivity = change / size
            if not 0 < sensitivity < math.inf or aim / 3 < eps * change < 3 * aim:
                break
            if attempt < 2:
                eps = aim / (sensitivity * size)
        require(
            not eps * change > 100 * aim,
            _UNREPEATABLE,
        )
        return product, eps

    def _jv_on_device(self, unproven: list[Check]) -> Tensor:
        """The same with ε on the device, from the sensitivity of the last step."""
        engine = self.engine
        size = total_norm(self.tangents)
        start = self._start()
        engine.products += 1
        aim = engine.relative * _rms(start).clamp(min=1e-3)
        last = engine.sensitivity
        known = last if isinstance(last, Tensor) else torch.full_like(size, last)  # 0: nothing is known
        eps = torch.where(known > 0, aim / known, 1e-3 * total_norm(self.moved)) / size
        product = (self._logits_at(eps) - start) / eps
        change = _rms(product)
        unproven.append((~(eps * change > 100 * aim), lambda: InputError(_UNREPEATABLE)))
        if engine.central:
            product = (product + (start - self._logits_at(-eps)) / eps) / 2
        sensitivity = change / size
        engine.sensitivity = torch.where(torch.isfinite(sensitivity) & (sensitivity > 0), sensitivity, known)
        return torch.where(size > 0, product, torch.where(size == 0, 0.0, math.nan))

    def _logits_at(self, eps: float | Tensor) -> Tensor:
        """z(θ + εv), of the pass repeated there."""
        if isinstance(eps, Tensor):
            torch._foreach_add_(self.moved, torch._foreach_mul(self.tangents, eps - self.at))
        else:
            torch._foreach_add_(self.moved, self.tangents, alpha=float(eps - self.at))
        self.at = eps
        return self.repeated(self.engine.old)

    def _verify(self, product: Tensor, v: Cotangents, eps: float, theta: list[Tensor]) -> None:
        """⟨w, J v⟩ = ⟨Jᵀw, v⟩, whose right side is a backward pass: autograd Functions may bring their own derivative.

        A product that is off by kinks or by the logits' curvature is told from such a function by shorter, central
        quotients, which end up right.
        """
        signs = torch.ones_like(product)
        signs.view(-1)[::2] = -1
        w = product + signs * _rms(product)  # not J v itself, to which an error may be orthogonal
        right = [(g * t).sum() for g, t in zip(self._pulled_back(w, theta), v) if g is not None and t is not None]
        pulled_back = torch.stack(right).sum() if right else product.new_zeros(())

        def agrees(jv: Tensor, tolerance: float) -> bool:
            dots = _over_ranks((w * jv).sum(), pulled_back, w.square().sum(), jv.square().sum())
            left, pulled, w2, jv2 = dots.tolist()
            return not abs(left - pulled) > tolerance * math.sqrt(w2 * jv2)

        def central(step: float) -> Tensor:
            return (self._logits_at(step) - self._logits_at(-step)) / (2 * step)

        tolerance = max(10 * self.engine.relative, 1e-3 if product.dtype == torch.float32 else 1e-6)
        require(
            agrees(product, tolerance)
            or (agrees(product, 0.3) and any(agrees(central(eps / 10**k), tolerance) for k in range(4))),
            "a difference of the model's logits disagrees with its backward pass (a function whose backward is not "
            "its derivative?): use engine 'forward'",
        )

    def _pulled_back(self, w: Tensor, theta: list[Tensor]) -> Cotangents:
        """Jᵀw, by the pass made once more with a graph.

        Raises `InputError` where the pass hides something from the logits, or is not what it was.
        """
        with torch.enable_grad(), Cuts() as cuts:
            z = self.repeated(theta)
        require(
            not cuts.reach(z),
            "model detaches values that its logits depend on (detach, no_grad or .data), which a difference of logits "
            "cannot leave out: use engine 'forward'",
        )
        require(
            cuts.altered is None,
            f"model {cuts.altered}, which a difference of logits cannot see: use engine 'forward'",
        )
        self.check(z)
        with self.network.holding(theta):
            return list(torch.autograd.grad(z, theta, w, allow_unused=True))


_UNREPEATABLE = (
    "model gives logits that move by more than a change of its parameters explains: its forward depends on something "
    "that cannot be repeated, use engine 'reverse'"
)


def _over_ranks(*values: Tensor) -> Tensor:
    """The sums over ranks of 0-d tensors, `(n,)`."""
    together = torch.stack([value.double() for value in values])
    ranks.sum_([together])
    return together


def _rms(x: Tensor) -> Tensor:
    """Root mean square, over ranks."""
    if ranks.size() == 1:
        return x.square().mean().sqrt()
    square, count = _over_ranks(x.square().sum(), x.new_tensor(x.numel())).unbind()
    return (square / count).sqrt().to(x.dtype)
