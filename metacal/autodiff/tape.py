"""First and second derivatives of the logits along a direction, carried along a forward pass already made.

`Tape` watches one ordinary forward pass with gradients enabled and notes, for every function whose result requires
grad, how it carries jets (`jets`, `rules`). `Tape.run(v)` then gives z₁ = J v, and with `second` z₂ = d²z/dε² along
θ + εv, without calling the network: the values are those of the pass, so J v costs two forward passes instead of
three, and z₂ two more. With gradients enabled the run can itself be differentiated: ∇_θ(u·z₁) = H v needs first-order
reverse rules only.

The pass is the one that would have been made without a tape, bit for bit and with the same random numbers. It may be
followed by `backward()` and by an optimizer's step in place: given the old parameters, `run` goes on from them.

Nothing is missed silently: autograd's own bookkeeping says which results depend on the parameters, and one that does
without a rule here (`RULES`), or whose inputs were overwritten, makes the tape unusable, with the reason in `failure`.
What `no_grad` and `detach` hide from a backward pass stands still here too. A tape that is `spelled_out` has
normalisations computed by plain arithmetic (`plain`), and runs with graphs up to z₂ too, for one reverse pass:
third-order derivatives of the network.

`carried` makes a pass whose first derivatives are carried along at once, so that neither tape nor graph keeps a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from metacal.autodiff.cuts import Alterations
from metacal.autodiff.exposed import EXPOSED, opened
from metacal.autodiff.jets import Jet, Operand, Push, Run, like, tensors
from metacal.autodiff.plain import NORMS
from metacal.autodiff.rules import RULES, needs_old_value

__all__ = ["Tape", "carried"]


@dataclass(frozen=True)
class _Result:
    """What is known of a result without keeping it."""

    slot: int
    shape: torch.Size
    dtype: torch.dtype

    def fitted(self, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        part = part if part.dtype == self.dtype else part.to(self.dtype)
        return part if part.shape == self.shape else part.expand(self.shape)


@dataclass(frozen=True)
class _Autocast:
    """Mixed precision as it was at a call, and has to be when its jet is made."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> _Autocast:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)


@dataclass
class _Step:
    push: Push
    inputs: list[int]
    results: list[_Result | None]  # of each tensor among the results; None: it does not depend on the parameters
    autocast: _Autocast
    last: list[int] = field(default_factory=list)  # slots that no later step reads

    def take(self, run: Run) -> None:
        """Put the jets of the results into the run."""
        first, other = self.push(run)
        for i, result in enumerate(self.results):
            if result is not None:
                a, b = (_part(jet, i) for jet in (first, other))
                run.jets[result.slot] = result.fitted(a), result.fitted(b) if run.second else None


class Tape(TorchFunctionMode):
    """Inside `with Tape(params) as tape: z = model(x)`, the pass is noted; `tape.close(z)` ends it.

    fixed: tensors that do not move along with the parameters, even if they require grad. along: see `carried`.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        fixed: Sequence[Tensor] = (),
        spelled_out: bool = False,
        along: Sequence[Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.failure: str | None = None
        self.overwritten = False  # whether `failure` is that a value was, which a second pass may be spared
        self._run = None if along is None else Run(along, False, params, None)
        self._alterations = Alterations()
        self._forms = {**EXPOSED, **NORMS} if spelled_out else EXPOSED
        self._open: list[Any] = []  # functions whose parts are being noted: one that calls itself has no parts
        self._params = list(params)
        self._slots: Any = WeakTensorKeyDictionary()
        self._operands: list[weakref.ref[Operand]] = []
        self._steps: list[_Step] = []
        self._ends: list[Any] = []
        self._count = 0
        self._end: tuple[_Result, torch.device] | None = None
        for p in params:
            self._note(p)
        for x in fixed:
            self._slots[x] = (None, x._version)

    # -- recording ---------------------------------------------------------------------------------------------------

    def _note(self, tensor: Tensor) -> int:
        self._slots[tensor] = (self._count, tensor._version)
        self._count += 1
        return self._count - 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.failure is None:
            self._watch(func, (*args, *kwargs.values()))
        if self.failure is not None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        form = self._forms.get(func) or (None if func in RULES else opened(func))
        if form is None and func not in RULES:
            return self._called_without_rule(func, args, kwargs)
        given = {id(t): t for t in tensors((*args, *kwargs.values()))}
        if not any(t.requires_grad for t in given.values()):
            return func(*args, **kwargs)
        if form is None:
            return self._called(func, args, kwargs, given)
        if func in self._open:
            return self._called_without_rule(func, args, kwargs)
        self._open.append(func)
        try:
            with self:
                return form(*args, **kwargs)
        finally:
            self._open.pop()

    def _watch(self, func: Any, values: Sequence[Any]) -> None:
        self._alterations.see(func, values)
        if self._alterations.how is not None:
            self.failure = f"a hook may change the gradient: the model {self._alterations.how}"

    def _called_without_rule(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if any(t.requires_grad for t in tensors((out,))):
            given = {id(t): t for t in tensors((*args, *kwargs.values()))}
            moves = any(t.requires_grad for t in given.values())
            if moves and any(t.requires_grad and self._is_new(t, given) for t in tensors((out,))):
                self.failure = f"{getattr(func, '__name__', func)}: no rule for its derivatives"
        return out

    def _called(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], given: dict[int, Tensor]) -> Any:
        """A function with a rule, noted if its result is new and depends on the parameters."""
        # looked up before the call, which may work in place
        seen = {key: self._operand(t) for key, t in given.items()}
        if needs_old_value(func, args):
            seen[id(args[0])] = self._kept(args[0].clone(), seen[id(args[0])].slot)
        out = func(*args, **kwargs)
        result = args[0] if func is Tensor.__setitem__ else out
        if any(t.requires_grad and self._is_new(t, given) for t in tensors((result,))):
            try:
                self._add(func, args, kwargs, result, seen)
            except (NotImplementedError, LookupError, TypeError, ValueError, AttributeError) as error:
                self.failure = f"{getattr(func, '__name__', func)}: {error}"
        return out

    def _is_new(self, t: Tensor, given: dict[int, Tensor]) -> bool:
        """Whether t is more than an argument handed back as it was."""
        return id(t) not in given or self._slots.get(t, (None, None))[1] != t._version

    def _operand(self, t: Tensor) -> Operand:
        slot, version = self._slots.get(t, (-1, None))  # -1: depends on the parameters in a way that was not noted
        if not t.requires_grad:
            slot = None
        elif version != t._version and not t.is_leaf:
            slot = -1
        return self._kept(t, slot)

    def _kept(self, t: Tensor, slot: int | None) -> Operand:
        operand = Operand(t, t._version, slot)
        self._operands.append(weakref.ref(operand))
        return operand

    def _add(self, func: Any, args: Any, kwargs: Any, out: Any, seen: dict[int, Operand]) -> None:
        for o in seen.values():
            if o.slot == -1:
                raise NotImplementedError(f"an input depends on the parameters in a way that is not known{_maker(o)}")
        inputs = [o.slot for o in seen.values() if o.slot is not None]
        results = {id(t): self._kept(t, self._note(t) if t.requires_grad else None) for t in tensors((out,))}
        push = RULES[func](
            _wrapped(args, seen), {k: _wrapped(a, seen) for k, a in kwargs.items()}, _wrapped(out, results)
        )
        known = [_result(o) for o in (results[id(t)] for t in tensors((out,)))]
        step = _Step(push, inputs, known, _Autocast.now(next(tensors((out,))).device.type))
        if self._run is None:
            self._steps.append(step)
            return
        with torch.no_grad():
            step.take(self._run)
        self._operands = []
        for o in results.values():
            if o.slot is not None:  # a jet lives as long as its value
                self._ends.append(weakref.ref(o.tensor, partial(_forget, self._run.jets, o.slot)))

    def close(self, z: Tensor) -> Tape:
        """End the recording with the result z, and keep only what z depends on. Call it outside the `with` block."""
        if self.failure is None:
            end = self._operand(z)
            self._end = _result(end), z.device
            if end.slot is None or end.slot < 0:
                self.failure = f"the logits depend on the parameters in a way that is not known{_maker(end)}"
        self._slots = None
        if self.failure is not None:
            self._steps = []
            return self
        needed, steps = {end.slot}, []
        for step in reversed(self._steps):
            made = {r.slot for r in step.results if r is not None}
            if needed & made:
                step.last = [s for s in set(step.inputs) if s not in needed]
                needed.update(step.inputs)
                steps.append(step)
        self._steps = steps[::-1]
        # whatever a rule will read must still be what it was
        operands = (ref() for ref in self._operands)
        if any(o is not None and not o.intact for o in operands):
            self.failure, self._steps = "a value that a derivative needs was overwritten in place", []
            self.overwritten = True
        self._operands = []
        return self

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, v: Sequence[Tensor | None], second: bool = False, at: Sequence[Tensor] | None = None) -> Jet:
        """(z₁, z₂) along v, like the parameters; z₂ only if `second`; None is zero.

        at: the parameters' values during the pass, if they have been changed since.

        Raises NotImplementedError (a RuntimeError) if the tape is unusable.
        """
        if self.failure is not None or self._end is None:
            raise NotImplementedError(self.failure or "the tape was not closed")
        run = Run(v, second, self._params, at)
        with ExitStack() as contexts:
            now: _Autocast | None = None
            for step in self._steps:
                if step.autocast != now:
                    contexts.close()
                    now = step.autocast
                    if now != _Autocast.now(now.device):
                        contexts.enter_context(now.context())
                step.take(run)
                for slot in step.last:
                    run.jets.pop(slot, None)
        return run.jets[self._end[0].slot]

    def jv(self, v: Sequence[Tensor | None], at: Sequence[Tensor] | None = None) -> Tensor:
        """J v, shaped like z, without a graph. See `run`."""
        with torch.no_grad():
            return self._filled(self.run(v, at=at)[0])

    def carried_to(self, z: Tensor) -> Tensor:
        """J v of the result z of a `carried` pass.

        Raises NotImplementedError where an operation has no rule, and for what changes gradients and no value.
        """
        assert self._run is not None
        self.close(z)
        if self.failure is not None or self._end is None:
            raise NotImplementedError(self.failure)
        return self._filled(self._run.jets[self._end[0].slot][0])

    def _filled(self, first: Tensor | None) -> Tensor:
        if first is not None:
            return first
        assert self._end is not None
        result, device = self._end
        return torch.zeros(result.shape, dtype=result.dtype, device=device)


@contextmanager
def carried(params: Sequence[Tensor], v: Sequence[Tensor | None]) -> Iterator[Tape]:
    """A tape that carries the first derivatives along v with the pass itself: `tape.carried_to(z)` is J v.

    The graph is made for autograd's bookkeeping alone and stores no value, so that nothing of the pass stays in memory.

    Raises NotImplementedError where the pass asks for a gradient itself.
    """
    tape = Tape(params, along=v)
    tape._watch(None, params)  # hooks of the caller, which the ones below hide
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_dropped, _refused), tape:
        yield tape


def _forget(jets: dict[int, Jet], slot: int, _: object) -> None:
    jets.pop(slot, None)


def _dropped(value: Tensor) -> None:
    """In place of a value that a backward pass would read."""


def _refused(value: None) -> Tensor:
    raise NotImplementedError("the pass takes a gradient of its own")


def _maker(o: Operand) -> str:
    """Which function made a tensor, as far as autograd tells."""
    return f" (made by {o.tensor.grad_fn.name()})" if o.tensor.grad_fn is not None else ""


def _result(o: Operand) -> Any:
    return None if o.slot is None else _Result(o.slot, o.tensor.shape, o.tensor.dtype)


def _wrapped(value: Any, operands: dict[int, Operand]) -> Any:
    if isinstance(value, Tensor):
        return operands[id(value)]
    if isinstance(value, (list, tuple)):
        return like(value, [_wrapped(v, operands) for v in value])
    return value


def _part(parts: Any, i: int) -> Tensor | None:
    """The i-th result's part."""
    return parts[i] if isinstance(parts, (list, tuple)) else parts
