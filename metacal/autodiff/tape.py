"""First and second derivatives of the logits along a direction, carried along a forward pass already made.

`Tape` watches one ordinary forward pass with gradients enabled and notes, for every function whose result requires
grad, how it carries jets (`jets`). `Tape.run(v)` then gives z₁ = J v, and with `second` z₂ = d²z/dε² along θ + εv,
without calling the network: the values are those of the pass, so J v costs two forward passes instead of three, and
z₂ two more. With gradients enabled the run can itself be differentiated: ∇_θ(u·z₁) = H v needs first-order reverse
rules only.

Nothing is missed silently: autograd's own bookkeeping says which results depend on the parameters, and one that does
without a rule here (`RULES`), or whose inputs were overwritten, makes the tape unusable, with the reason in `failure`.
A tape that is `spelled_out` has normalisations, attention and dropout computed by plain arithmetic (`plain`), whose
parts have rules. It runs with graphs up to z₂ too, for one reverse pass: third-order derivatives of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from metacal.autodiff.jets import RULES, ZERO, Jet, Operand, Push, overwrites
from metacal.autodiff.plain import PLAIN

__all__ = ["Tape"]


@dataclass
class Step:
    push: Push
    inputs: list[int]
    outs: list[int]
    shapes: list[torch.Size]
    last: list[int]  # slots that no later step reads


class Tape(TorchFunctionMode):
    """Inside `with Tape(params) as tape: z = model(x)`, the pass is noted; `tape.close(z)` ends it.

    fixed: tensors that do not move along with the parameters, even if they require grad.
    """

    def __init__(self, params: Sequence[Tensor], *, fixed: Sequence[Tensor] = (), spelled_out: bool = False) -> None:
        super().__init__()
        self.failure: str | None = None
        self._plain = PLAIN if spelled_out else {}
        self._slots: Any = WeakTensorKeyDictionary()
        self._steps: list[Step] = []
        self._count = 0
        self._result = -1
        for p in params:
            self._note(p)
        for x in fixed:
            self._slots[x] = (None, x._version)

    def _note(self, tensor: Tensor) -> int:
        self._slots[tensor] = (self._count, tensor._version)
        self._count += 1
        return self._count - 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.failure is not None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in self._plain:
            try:
                with self:
                    return self._plain[func](*args, **kwargs)
            except NotImplementedError:
                pass
        # looked up before the call, which may work in place
        seen = {id(t): self._operand(t) for t in _tensors((*args, *kwargs.values()))}
        if overwrites(func, args, kwargs):
            seen[id(args[0])] = replace(seen[id(args[0])], tensor=args[0].clone(), version=0)
        out = func(*args, **kwargs)
        if any(t.requires_grad for t in _tensors((out,))):
            try:
                self._add(func, _wrapped(args, seen), {k: _wrapped(a, seen) for k, a in kwargs.items()}, out, seen)
            except (NotImplementedError, LookupError, TypeError, ValueError, AttributeError) as error:
                self.failure = f"{getattr(func, '__name__', func)}: {error}"
        return out

    def _operand(self, t: Tensor) -> Operand:
        slot, version = self._slots.get(t, (-1, None))  # -1: depends on the parameters in a way that was not noted
        if not t.requires_grad:
            slot = None
        elif version != t._version:
            slot = -1
        return Operand(t, t._version, slot)

    def _add(self, func: Any, args: Any, kwargs: Any, out: Any, seen: dict[int, Operand]) -> None:
        inputs = [o.slot for o in seen.values() if o.slot is not None]
        if -1 in inputs:
            raise NotImplementedError("an input depends on the parameters in a way that is not known")
        if func not in RULES:
            raise NotImplementedError("no rule for its derivatives")
        push = RULES[func](args, kwargs, out)
        outs = list(_tensors((out,)))
        self._steps.append(Step(push, inputs, [self._note(t) for t in outs], [t.shape for t in outs], []))

    def close(self, z: Tensor) -> Tape:
        """End the recording with the result z, and keep only what z depends on. Call it outside the `with` block."""
        end = self._operand(z)
        if self.failure is None and (end.slot is None or end.slot < 0):
            self.failure = "the logits depend on the parameters in a way that is not known"
        self._slots = None
        if self.failure is not None:
            self._steps = []
            return self
        assert end.slot is not None
        self._result = end.slot
        needed, kept = {end.slot}, []
        for step in reversed(self._steps):
            if needed.intersection(step.outs):
                step.last = [s for s in set(step.inputs) if s not in needed]
                needed.update(step.inputs)
                kept.append(step)
        self._steps = kept[::-1]
        return self

    def run(self, v: Sequence[Tensor | None], second: bool = False) -> Jet:
        """(z₁, z₂) along v, like the parameters; z₂ only if `second`; None is zero.

        Raises NotImplementedError (a RuntimeError) if the tape is unusable.
        """
        if self.failure is not None:
            raise NotImplementedError(self.failure)
        jets: dict[int, Jet] = {i: (a, None) for i, a in enumerate(v)}

        def of(x: Operand) -> Jet:
            return ZERO if x.slot is None else jets[x.slot]

        for step in self._steps:
            first, other = step.push(of, second)
            for i, (out, shape) in enumerate(zip(step.outs, step.shapes)):
                jets[out] = _shaped(first, i, shape), _shaped(other, i, shape) if second else None
            for slot in step.last:
                jets.pop(slot, None)
        return jets[self._result]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _wrapped(value: Any, seen: dict[int, Operand]) -> Any:
    if isinstance(value, Tensor):
        return seen[id(value)]
    if isinstance(value, (list, tuple)):
        return tuple(_wrapped(v, seen) for v in value)
    return value


def _shaped(part: Any, i: int, shape: torch.Size) -> Tensor | None:
    """The i-th result's part."""
    t = part[i] if isinstance(part, (list, tuple)) else part
    return t if t is None or t.shape == shape else t.expand(shape)
