"""Forward-mode derivatives that reuse the values of a forward pass already made.

A forward pass with tangents computes every value again beside its tangent. In a bilevel step those values are
known: they are the activations of the training forward. `Recorder` notes what every operation returned in that
pass; under `Replayer` an operation that is called again *with the same inputs* returns what it returned then,
and only tangents are computed. Both sit below autograd (`TorchDispatchMode`), where a primal operation and the
arithmetic of its tangent look alike, and need not be told apart: the same function of the same memory has the
same value. This also replays dropout masks and leaves running statistics alone.

What makes it sound: every recorded tensor stays alive until the replay ends, so memory identifies a value;
parameters and buffers are identified through their copies; an operation that reads memory which is overwritten
*later* in the pass makes the recording unusable (`usable`), except for in-place operations whose derivative
reads their result only; a random operation without a match raises `Unmatched`. Then the caller takes a plain
forward-mode pass instead. Whatever else has no match (fused attention against its plain kernel) is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Recorder", "Replayer", "Unmatched"]

aten = torch.ops.aten

_RESULT_ONLY = {
    aten.relu_.default,
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.sub_.Tensor,
    aten.sub_.Scalar,
    aten.mul_.Scalar,
    aten.div_.Scalar,
    aten.bernoulli_.float,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.copy_.default,
}
"""In-place operations whose tangent needs no value that they overwrite."""

_VIEW, _IN_PLACE, _FUNCTION = range(3)
_kinds: dict[Any, int] = {}


class Unmatched(Exception):
    """A random operation of the replay was not in the recording."""


class Recorder(TorchDispatchMode):
    """Notes the results of all operations of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, deque[Any]] = {}
        self.memory: set[int] = set()
        self.read: dict[int, tuple[Tensor, int]] = {}
        self.sound = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == _VIEW:
            return func(*args, **kwargs)
        others = args
        if kind == _IN_PLACE:
            # an in-place write to anything but a recorded tensor (a counter among the buffers) is simply repeated
            if _base(args[0]) in self.memory:
                self.sound = self.sound and func in _RESULT_ONLY
            others = args[1:]
        for tensor in _tensors(others):
            base = _base(tensor)
            if base in self.memory:
                # only the first version read counts: any later write must be found out
                self.read.setdefault(base, (tensor, tensor._version))
        if kind == _IN_PLACE:
            return func(*args, **kwargs)
        key = _key(func, args, kwargs, {})
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self.memory.add(_base(tensor))
        # the very tensor, not an alias: made down here, an alias has a version counter of its own
        self.results.setdefault(key, deque()).append(result)
        return result

    @property
    def usable(self) -> bool:
        """Whether no value that an operation read was overwritten afterwards."""
        return self.sound and all(tensor._version == version for tensor, version in self.read.values())


class Replayer(TorchDispatchMode):
    """Returns recorded results where an operation is called with recorded inputs; computes the rest.

    copies: `(copy, original)` pairs of tensors; the copy stands in the replay where the original stood.
    """

    def __init__(self, recorder: Recorder, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.results, self.memory = recorder.results, recorder.memory
        self.originals = {
            _base(copy): (_base(original), int(original.storage_offset() - copy.storage_offset()))
            for copy, original in copies
        }
        self.hits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == _VIEW:
            return func(*args, **kwargs)
        if kind == _IN_PLACE:
            # recorded memory holds its final values already
            return args[0] if _base(args[0]) in self.memory else func(*args, **kwargs)
        found = self.results.get(_key(func, args, kwargs, self.originals))
        if found:
            self.hits += 1
            result = found.popleft()
            found.append(result)  # stays alive: its memory must not be given to a tangent
            return _aliases(result)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unmatched(str(func))
        return func(*args, **kwargs)


def _kind(func: Any) -> int:
    kind = _kinds.get(func)
    if kind is None:
        schema = func._schema
        if schema.is_mutable:
            kind = _IN_PLACE
        else:
            aliased = any(value.alias_info is not None for value in schema.returns)
            kind = _VIEW if aliased else _FUNCTION
        _kinds[func] = kind
    return kind


def _base(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _aliases(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, (list, tuple)):
        return type(result)(_aliases(value) for value in result)
    return result


def _key(func: Any, args: Any, kwargs: Any, originals: dict[int, tuple[int, int]]) -> Any:
    """A function and its arguments, tensors by the memory that they show."""
    return (func, _described(args, originals), *((name, _described(v, originals)) for name, v in kwargs.items()))


def _described(value: Any, originals: dict[int, tuple[int, int]]) -> Any:
    if isinstance(value, Tensor):
        base, shift = _base(value), 0
        if base in originals:
            base, shift = originals[base]
        return (base, value.storage_offset() + shift, tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_described(v, originals) for v in value)
    return value
