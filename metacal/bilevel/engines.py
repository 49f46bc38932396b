"""Ways to get J v = d/dε z(θ + εv) at ε = 0: the logits of the training batch along a direction in the parameters.

With u = ∇_{θ'} M and v = (∂U/∂g)ᵀ u the hypergradient is

    dM/dφ = ∂/∂φ 1/n Σ_i ⟨ ∂ℓ_i/∂z_i (γ_i(φ)), J_i v ⟩,

J at the *old* θ, before the step, on the training batch, with the dropout masks and buffers of the training pass. An
engine is one object per model; in every step that has an outer part it is used in this order:

    logits, features = engine.forward(x)      # the training forward, plain operations
    engine.backward(loss, logits)             # adds the gradient of the loss to .grad
    engine.keep()                             # before the optimizer overwrites θ
    optimizer.step()
    engine.product(v)                         # J v, (N, K); forgets the step

`engine.release()` forgets a step that does not reach its product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from metacal.bilevel.replay import Recorder, Replayer, Unmatched
from metacal.bilevel.state import RandomState, buffers_of, restore_buffers
from metacal.bilevel.tangents import FastTangents
from metacal.errors import InputError, require
from metacal.forward_mode import dual_level, plain_attention
from metacal.optim.transpose import Cotangents, total_norm

__all__ = ["ENGINES", "Difference", "Forward", "Mark", "Outputs", "Reverse", "Step", "call"]

Outputs = tuple[Tensor, Tensor | None]
"""Logits `(N, K)` and features `(N, D)`, or None from a model that returns logits only."""

Mark = tuple[Tensor | None, "RandomState | None", dict[str, Tensor]]
"""What a training forward started from: inputs, random streams and buffers."""


def call(model: nn.Module, x: Tensor, replaced: dict[str, Tensor] | None = None) -> Outputs:
    """The model's outputs, with parameters and buffers replaced by name for this call."""
    result = model(x) if replaced is None else functional_call(model, replaced, (x,))
    return (result[0], result[1]) if isinstance(result, tuple) else (result, None)


class Step:
    """What the engines share: the model's names for its parameters, and what one step must remember."""

    def __init__(self, trained: nn.Module, model: nn.Module, names: Sequence[str], params: Sequence[Tensor]) -> None:
        """trained: what the training forward calls, `model` or its compiled form; names and params: of `model`."""
        self.trained, self.model = trained, model
        self.names, self.params = list(names), list(params)
        self.old: list[Tensor] = []
        self.release()

    def release(self) -> None:
        self.x: Tensor | None = None
        self.random: RandomState | None = None
        self.buffers: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Outputs:
        """The training forward: the operations, buffers and random draws of a plain one."""
        self.remember(x)
        return call(self.trained, x)

    def check(self, x: Tensor) -> None:
        """Raise `InputError` if the engine cannot differentiate the model, before anything is changed."""

    def remember(self, x: Tensor) -> None:
        self.x = x
        self.random = RandomState(x.device)
        self.buffers = buffers_of(self.model)

    def mark(self) -> Mark:
        """What the last `forward` started from; with `resume` a batch taken in parts has one product for each."""
        return self.x, self.random, self.buffers

    def resume(self, mark: Mark) -> None:
        self.x, self.random, self.buffers = mark

    def leaves(self) -> list[Tensor]:
        """The tensors whose graph a training forward builds: θ, and a copy of it if the engine works on one."""
        return self.params

    def backward(self, loss: Tensor, logits: Tensor, penalised: bool = False) -> None:
        """Add the gradient of the loss to `.grad`. penalised: not only the logits carry θ into the loss."""
        loss.backward()

    def aside(self, device: torch.device) -> AbstractContextManager[None]:
        """A random stream apart for the meta forward, where a model draws only if it did in the training pass."""
        return RandomState.aside(device, seeded=self.random is None or self.random.moved())

    @torch.no_grad()
    def keep(self) -> None:
        """Copy θ, into memory that is kept from step to step."""
        if not self.old:
            self.old = [torch.empty_like(p) for p in self.params]
        torch._foreach_copy_(self.old, self.params)

    def product(self, v: Cotangents) -> Tensor:
        """J v at the old θ on the training batch, `(N, K)`."""
        raise NotImplementedError

    def state(self) -> float:
        """What the engine carries from step to step, for checkpoints."""
        return 0.0

    def load_state(self, state: float) -> None:
        """Go on from a `state`."""


class Forward(Step):
    """Forward mode: one pass of the logits with tangents. Exact, without a second graph.

    With `reuse` the pass takes its values from the training forward and computes tangents only, two forwards'
    worth of work instead of three (see `metacal.bilevel.replay`); it falls back to a plain pass where that
    would not be sound.
    """

    def __init__(
        self,
        trained: nn.Module,
        model: nn.Module,
        names: Sequence[str],
        params: Sequence[Tensor],
        reuse: bool = True,
    ) -> None:
        super().__init__(trained, model, names, params)
        self.reuse = reuse
        self.reused = 0  # operations whose values the last product took over

    def release(self) -> None:
        super().release()
        self.recorder: Recorder | None = None

    def forward(self, x: Tensor) -> Outputs:
        if not self.reuse or self.trained is not self.model or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        self.remember(x)
        self.recorder = Recorder()
        with self.recorder:
            return call(self.model, x)

    def product(self, v: Cotangents) -> Tensor:
        product = None
        if self.recorder is not None and self.recorder.usable:
            with suppress(Unmatched):
                product = self._product(v, self.recorder)
        if product is None:
            product = self._product(v, None)
        self.release()
        return product

    def check(self, x: Tensor) -> None:
        self.remember(x)
        self._product([p.detach() for p in self.params], None, self.params)
        self.release()

    @torch.no_grad()
    def _product(self, v: Cotangents, recorder: Recorder | None, at: Sequence[Tensor] | None = None) -> Tensor:
        """J v at θ = `at`, which is the old one unless given."""
        at = self.old if at is None else at
        x, random = self.x, self.random
        assert x is not None and random is not None
        replaced = {name: b.clone() for name, b in self.buffers.items()}
        mode: AbstractContextManager[object] = nullcontext()
        if recorder is not None:
            originals = [(replaced[name], b) for name, b in self.model.named_buffers()]
            mode = Replayer(recorder, [*zip(at, self.params), *originals])
        with random.replayed(), dual_level(), plain_attention():
            for name, value, tangent in zip(self.names, at, v):
                value = value.detach()
                replaced[name] = value if tangent is None else forward_ad.make_dual(value, tangent)
            try:
                with FastTangents(), mode:
                    logits, _ = call(self.model, x, replaced)
            except (NotImplementedError, RuntimeError) as error:
                if "forward AD" not in str(error) and "forward mode" not in str(error):
                    raise
                raise InputError(
                    "engine 'forward' cannot differentiate this model, use engine 'difference' or 'reverse': "
                    + str(error).splitlines()[0]
                ) from error
            self.reused = mode.hits if isinstance(mode, Replayer) else 0
            tangent = forward_ad.unpack_dual(logits).tangent
            return torch.zeros_like(logits) if tangent is None else tangent.clone()


class Difference(Step):
    """Difference quotient of the logits: one or, if `central`, two plain forwards.

        J v ≈ (z(θ + εv) − z(θ)) / ε     or     (z(θ + εv) − z(θ − εv)) / 2ε

    ε is such that the logits move by `relative` of their size (root mean squares), whatever the network's
    sensitivity, which no rule from ‖θ‖ and ‖v‖ knows: it is that of the last step, with a second try where that
    is off by more than a factor of three. z(θ) is that of the training pass. The error is of order ε for smooth
    networks; kinks of ReLU networks with batch statistics leave more.
    """

    def __init__(
        self,
        trained: nn.Module,
        model: nn.Module,
        names: Sequence[str],
        params: Sequence[Tensor],
        relative: float = 2e-3,
        central: bool = False,
    ) -> None:
        super().__init__(trained, model, names, params)
        require(relative > 0, f"relative must be > 0, got {relative}")
        self.relative, self.central = relative, central
        self.sensitivity = 0.0  # size of J v over that of v, at the last step

    def release(self) -> None:
        super().release()
        self.logits: Tensor | None = None

    def state(self) -> float:
        return self.sensitivity

    def load_state(self, state: float) -> None:
        self.sensitivity = state

    def backward(self, loss: Tensor, logits: Tensor, penalised: bool = False) -> None:
        self.logits = logits.detach()
        loss.backward()

    @torch.no_grad()
    def product(self, v: Cotangents) -> Tensor:
        logits, pairs = self.logits, [(old, t) for old, t in zip(self.old, v) if t is not None]
        assert logits is not None
        moved, tangents = [old for old, _ in pairs], [t for _, t in pairs]
        size = float(total_norm(tangents)) if pairs else 0.0
        if size == 0 or not math.isfinite(size):
            return torch.full_like(logits, 0.0 if size == 0 else math.nan)
        # the logits of a mixed-precision pass are too coarse to subtract from
        start = logits if logits.dtype == moved[0].dtype else self._logits()
        aim = self.relative * max(_rms(start), 1e-3)
        eps = 1e-3 * float(total_norm(moved)) / size
        if self.sensitivity > 0:
            eps = aim / (self.sensitivity * size)
        at = 0.0
        for attempt in range(3):
            torch._foreach_add_(moved, tangents, alpha=eps - at)
            at = eps
            product = (self._logits() - start) / eps
            self.sensitivity = _rms(product) / size
            if not 0 < self.sensitivity < math.inf or attempt == 2 or aim / 3 < eps * _rms(product) < 3 * aim:
                break
            eps = aim / (self.sensitivity * size)
        if self.central:
            torch._foreach_add_(moved, tangents, alpha=-2 * eps)
            product = (product + (start - self._logits()) / eps) / 2
        if not math.isfinite(self.sensitivity):
            self.sensitivity = 0.0
        self.release()
        return product

    def _logits(self) -> Tensor:
        assert self.x is not None and self.random is not None
        buffers = {name: b.clone() for name, b in self.buffers.items()}
        with self.random.replayed():
            return call(self.model, self.x, {**buffers, **dict(zip(self.names, self.old))})[0]


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


class Reverse(Step):
    """Double backward: g = Jᵀ ω is linear in the cotangent ω of the logits, so J v = ∂⟨g(ω), v⟩/∂ω. Exact.

    Keeps the graph of the backward pass, so the model must allow double backward; θ is copied before the
    forward, since the graph may not see the optimizer change it.
    """

    def release(self) -> None:
        super().release()
        self.grads: list[Tensor | None] = []
        self.cotangent: Tensor | None = None

    def forward(self, x: Tensor) -> Outputs:
        self.remember(x)
        super().keep()
        for old, p in zip(self.old, self.params):
            old.requires_grad_(p.requires_grad)
        # the graph that is kept holds these copies: the module's own buffers may change before it is used
        buffers = {name: b.clone() for name, b in self.buffers.items()}
        with plain_attention():
            outputs = call(self.model, x, {**buffers, **dict(zip(self.names, self.old))})
        restore_buffers(self.model, buffers)
        return outputs

    def keep(self) -> None:
        """Done in `forward`."""

    def leaves(self) -> list[Tensor]:
        return [*self.old, *self.params]

    def backward(self, loss: Tensor, logits: Tensor, penalised: bool = False) -> None:
        (cotangent,) = torch.autograd.grad(loss, logits, retain_graph=penalised)
        total: Sequence[Tensor | None] = [None] * len(self.params)
        if penalised:
            # a penalty may reach θ by the features, or by forwards of its own on the module's parameters
            both = torch.autograd.grad(loss, [*self.old, *self.params], retain_graph=True, allow_unused=True)
            total = [_sum(a, b) for a, b in zip(both[: len(self.old)], both[len(self.old) :])]
        self.cotangent = cotangent.detach().requires_grad_()
        self.grads = list(torch.autograd.grad(logits, self.old, self.cotangent, create_graph=True, allow_unused=True))
        for p, grad, whole in zip(self.params, self.grads, total):
            p.grad = whole if penalised else None if grad is None else grad.detach().clone()

    def product(self, v: Cotangents) -> Tensor:
        assert self.cotangent is not None
        pairs = [(g, t) for g, t in zip(self.grads, v) if g is not None and t is not None and g.requires_grad]
        product = None
        if pairs:
            (product,) = torch.autograd.grad(
                [g for g, _ in pairs], self.cotangent, [t for _, t in pairs], allow_unused=True
            )
        if product is None:
            product = torch.zeros_like(self.cotangent)
        self.release()
        return product.detach()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


ENGINES: dict[str, type[Step]] = {"forward": Forward, "difference": Difference, "reverse": Reverse}
