"""A recorded forward pass of a training batch, which can be asked for J v at its own θ after the optimizer's step.

With u = ∇_{θ'} M and v = (∂U/∂g)ᵀ u the hypergradient is

    dM/dφ = ∂/∂φ 1/n Σ_i ⟨ ∂ℓ_i/∂z_i (γ_i(φ)), J_i v ⟩,     J_i v = d/dε z_i(θ + εv) at ε = 0,

J at the *old* θ, on the training batch, with the dropout masks and buffers of the training pass. The engines differ in
how they get J v, and are used alike:

    run = engine.record(x)                    # a Pass: the training forward, its values those of a plain one
    run.backward(loss)                        # adds the gradient of the loss to .grad
    engine.hold()                             # before the optimizer overwrites θ
    optimizer.step()
    run.jv(v)                                 # (N, K)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from metacal.autodiff.derivatives import jv_by_reverse, recorded_gradient
from metacal.autodiff.graph import has_hooks
from metacal.autodiff.tape import Tape, carried
from metacal.bilevel.reading import Check
from metacal.errors import InputError, require
from metacal.network import ModuleState, Network, Streams, on_copies, plain_attention, repeats
from metacal.optim.transpose import Cotangents

__all__ = [
    "Again",
    "Engine",
    "Forward",
    "Pass",
    "Recorded",
    "Reverse",
    "added",
    "check_unhooked",
    "double_vjp",
    "unhooked",
]


class Engine:
    """Makes passes of one network. `old` is the memory for copies of θ, kept from step to step.

    outer_autocast: passes in mixed precision are good enough for J v, whose products are then in it too.
    unproven: where checks of repeated passes go for whoever reads them later; None: they are made at once.
    draws: whether the last pass drew random numbers, as the first one may.
    """

    unproven: list[Check] | None = None
    outer_autocast = False
    draws = True

    def __init__(self, network: Network) -> None:
        self.network = network
        self.old: list[Tensor] = []

    def record(self, x: Tensor) -> Recorded:
        raise NotImplementedError

    def leaves(self) -> list[Tensor]:
        """The tensors whose graph a pass builds: θ, and a copy of it if the engine works on one."""
        return self.network.params

    @torch.no_grad()
    def hold(self) -> None:
        """Copy θ."""
        if not self.old:
            self.old = [torch.empty_like(p) for p in self.network.params]
        torch._foreach_copy_(self.old, self.network.params)

    @property
    def may_refuse(self) -> bool:
        """Whether the coming product looks closer at the network than others do, and may raise `InputError`."""
        return False

    def state(self) -> Any:
        """What goes from step to step, for checkpoints."""
        return 0.0

    def load_state(self, state: Any) -> None:
        """Go on from a `state`."""


class Pass:
    """A training forward.

    Attributes: `logits` (N, K), `features` (N, D) or None, with their graphs until `backward`.
    """

    def __init__(self, engine: Engine, x: Tensor) -> None:
        self.engine, self.network, self.x = engine, engine.network, x
        self.logits, self.features = self.forward()

    def forward(self) -> tuple[Tensor, Tensor | None]:
        return self.network(self.x)

    def backward(self, loss: Tensor, penalised: bool = False) -> None:
        """Add the gradient of the loss to `.grad`. penalised: not only the logits carry θ into the loss."""
        self.logits = self.logits.detach()
        loss.backward()


class Recorded(Pass):
    """A training forward that can be asked for J v, and what it started from: streams, buffers and attributes."""

    unfused = False

    def __init__(self, engine: Engine, x: Tensor) -> None:
        self.version = x._version
        self.mixed = torch.is_autocast_enabled(x.device.type)
        self.state = ModuleState(engine.network.model)
        self.streams = Streams(x.device)
        super().__init__(engine, x)
        names = self.network.names
        check_unhooked(names * (len(engine.leaves()) // len(names)), engine.leaves())

    def forward(self) -> tuple[Tensor, Tensor | None]:
        compiled = self.network.trained is not self.network.model
        self.unfused = self.engine.draws and self.x.device.type != "cpu" and not compiled
        with self._attention():
            result = super().forward()
        self.engine.draws = self.streams.moved()
        return result

    def backward(self, loss: Tensor, penalised: bool = False) -> None:
        with self._attention():  # of what is checkpointed
            super().backward(loss, penalised)

    def _attention(self) -> AbstractContextManager[None]:
        """As it will be repeated, where masks are drawn: fused kernels on a GPU draw those of attention otherwise."""
        return plain_attention() if self.unfused else nullcontext()

    def jv(self, v: Cotangents) -> Tensor:
        """J v at the θ that was held, `(N, K)`; None in v is zero."""
        raise NotImplementedError

    def repeated(self, params: list[Tensor]) -> Tensor:
        """The logits of the same pass at other parameters: same masks, same buffers; nothing moves."""
        with self.again(params):
            return self.network.plainly(self.x)[0]

    @contextmanager
    def again(self, params: list[Tensor]) -> Iterator[None]:
        """Parameters, random streams, buffers and attributes as this pass found them; afterwards all is as it was."""
        require(
            self.x._version == self.version,
            "model changes its input in place, so that its pass cannot be repeated: copy the input in its forward, "
            "or use engine 'reverse'",
        )
        with self.streams.replayed(), self.network.holding(params), on_copies(self.network.model, self.state):
            yield

    def check(self, repeated: Tensor) -> None:
        """Raise `InputError` unless these are the logits of this pass, up to rounding."""
        recorded = self.logits
        exact = self.network.trained is self.network.model and not self.mixed
        # a compiled or mixed-precision pass is repeated by other operations, and a GPU's float32 may be TF32
        coarse = not exact or recorded.dtype in (torch.float16, torch.bfloat16)
        single = 1e-3 if recorded.device.type == "cpu" else 1e-2
        tolerance = 0.1 if coarse else 1e-9 if recorded.dtype == torch.float64 else single
        check = repeats(repeated, recorded, tolerance, "use engine 'reverse' with one inner step")
        if self.engine.unproven is not None:
            self.engine.unproven.append(check)
        elif not check[0]:
            raise check[1]()


def check_unhooked(names: Sequence[str], params: Sequence[Tensor]) -> None:
    """Raise `InputError` for a parameter whose gradient goes through a hook, maybe registered in the forward.

    On the parameter, or on the node of the graph that adds to its `.grad`, which lasts as long as somebody holds it.
    """
    for name, p in zip(names, params):
        on_tensor = p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        require(
            not (on_tensor or has_hooks(get_gradient_edge(p).node)),
            f"backbone parameter {name} has a gradient hook, which no engine can differentiate: remove it, or change "
            "the loss instead of its gradient",
        )


@contextmanager
def unhooked(who: str, *values: Tensor | None) -> Iterator[None]:
    """Raise `InputError` if the block registers a hook on the gradient of one of the values."""
    before = [len(t._backward_hooks or ()) for t in values if t is not None]
    yield
    require(
        before == [len(t._backward_hooks or ()) for t in values if t is not None],
        f"{who} registers a hook on the logits or features that it is given, which would change the gradient of the "
        "loss: register it on a view of its own (view_as)",
    )


def double_vjp(z: Tensor, params: Sequence[Tensor], v: Cotangents) -> Tensor:
    """J v as the derivative of g = Jᵀw, which is linear in w. z must have its graph.

    Raises `InputError` where an operation has no second derivative.
    """
    w = torch.zeros_like(z, requires_grad=True)
    used = [(p, t) for p, t in zip(params, v) if t is not None]
    with _naming_what_lacks():
        g = recorded_gradient(z, [p for p, _ in used], w)
        return jv_by_reverse(g, w, [t for _, t in used], last=True)


@contextmanager
def _naming_what_lacks() -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise InputError(
            "the hypergradient needs a rule for every operation of the model, or its second derivative, which is "
            f"missing ({str(error).splitlines()[0]}): use plain operations in its place, or engine 'difference'"
        ) from error


class Forward(Engine):
    """Derivatives carried along the recorded pass, by a rule for each operation (`metacal.autodiff`). Exact.

    Where an operation has no rule, and for passes that were compiled or in mixed precision, the pass is repeated at the
    old θ with the derivatives carried along at once, which keeps no activations; without a rule it is repeated and
    differentiated twice. reuse: false always repeats.
    """

    def __init__(self, network: Network, reuse: bool = True) -> None:
        super().__init__(network)
        self.reuse = reuse

    def record(self, x: Tensor) -> Recorded:
        return _Taped(self, x)


class _Taped(Recorded):
    engine: Forward

    def forward(self) -> tuple[Tensor, Tensor | None]:
        self.tape: Tape | None = None
        too_coarse = self.mixed and not self.engine.outer_autocast
        if not self.engine.reuse or too_coarse or self.network.trained is not self.network.model:
            return super().forward()
        with Tape(self.network.params) as tape:
            logits, features = self.network(self.x)
        self.tape = tape.close(logits)
        return logits, features

    def jv(self, v: Cotangents) -> Tensor:
        tape = self.tape
        with suppress(NotImplementedError):  # no rule for an operation, or a value that was overwritten
            if tape is not None:
                return tape.jv(v, at=self.engine.old)
        params = [p.detach().requires_grad_() for p in self.engine.old]
        with suppress(NotImplementedError):
            if tape is None or tape.failure is None or tape.overwritten:
                return self._carried(params, v)
        with torch.enable_grad():
            z = self.repeated(params)
        self.check(z)
        with torch.enable_grad(), self.network.holding(params):  # checkpointed parts run again
            return double_vjp(z, params, v)

    def _carried(self, params: list[Tensor], v: Cotangents) -> Tensor:
        """The pass repeated, with J v carried along."""
        with carried(params, v) as tape:
            z = self.repeated(params)
        jv = tape.carried_to(z)
        self.check(z)
        return jv


class Reverse(Engine):
    """Double backward: g = Jᵀ ω is linear in the cotangent ω of the logits, so J v = ∂⟨g(ω), v⟩/∂ω. Exact.

    Repeats nothing, so that it takes every model that allows double backward. It keeps the graph of the backward pass;
    the pass is made on a copy of θ, since that graph may not see the optimizer change it.
    """

    def record(self, x: Tensor) -> Recorded:
        super().hold()
        for old in self.old:
            old.requires_grad_()
        return _Doubled(self, x)

    def hold(self) -> None:
        """Done before the pass."""

    def leaves(self) -> list[Tensor]:
        return [*self.old, *self.network.params]


class _Doubled(Recorded):
    engine: Reverse

    def forward(self) -> tuple[Tensor, Tensor | None]:
        with self.network.holding(self.engine.old):
            self.output, features = self.network.plainly(self.x)
        # a cotangent that is taken at the output itself has been through the output's hooks
        return self.output.view_as(self.output) if self.output._backward_hooks else self.output, features

    def backward(self, loss: Tensor, penalised: bool = False) -> None:
        with self.network.holding(self.engine.old):
            self._backward(loss, penalised)

    def _backward(self, loss: Tensor, penalised: bool) -> None:
        logits, old, params = self.logits, self.engine.old, self.network.params
        self.logits = logits.detach()
        (cotangent,) = torch.autograd.grad(loss, logits, retain_graph=True)
        total: Sequence[Tensor | None] = [None] * len(params)
        if penalised:
            # a penalty may reach θ by the features, or by forwards of its own on the module's parameters
            both = torch.autograd.grad(loss, [*old, *params], retain_graph=True, allow_unused=True)
            total = [added(a, b) for a, b in zip(both[: len(old)], both[len(old) :])]
        self.cotangent = cotangent.detach().requires_grad_()
        with _naming_what_lacks():
            self.grads = recorded_gradient(self.output, old, self.cotangent)
        del self.output
        for p, grad, whole in zip(params, self.grads, total):
            p.grad = whole if penalised else None if grad is None else grad.detach().clone()

    def jv(self, v: Cotangents) -> Tensor:
        with self.network.holding(self.engine.old), _naming_what_lacks():
            return jv_by_reverse(self.grads, self.cotangent, v, last=True)


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, where None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b if b.layout is torch.sparse_coo else b + a  # torch adds a sparse tensor to a dense one


class Again(Engine):
    """Passes to be made once more at their θ, of which `hold` makes a new copy each time: for several steps."""

    def record(self, x: Tensor) -> Recorded:
        return Recorded(self, x)

    @torch.no_grad()
    def hold(self) -> None:
        self.old = [p.detach().clone() for p in self.network.params]
