"""A second device made of the CPU's memory, on which every wait of the host is seen.

`FAR` behaves as a GPU does for whoever writes programs for it: its tensors hold values that only its own operations
reach, they do not mix with host tensors of more than one number, and reading one is a copy. So a program that runs on
it with `Waits` recording none would queue its work on a GPU without once waiting for it. Not seen: streams, since here
all is done when it is asked for, and what a kernel library waits for inside (`_WAITING` names those that are known).
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from reference.frames import line_of_package

__all__ = ["FAR", "Waits"]

_setup_privateuseone_for_python_backend("far")
torch.far.get_amp_supported_dtype = lambda: [torch.bfloat16]
FAR = torch.device("far:0")

_aten = torch.ops.aten
_WAITING = {
    "_local_scalar_dense": "reads a number",
    "equal": "reads a number",
    "is_nonzero": "reads a number",
    "nonzero": "has a result of unknown size",
    "masked_select": "has a result of unknown size",
    "_unique": "has a result of unknown size",
    "_unique2": "has a result of unknown size",
    "unique_dim": "has a result of unknown size",
    "unique_consecutive": "has a result of unknown size",
    "bincount": "has a result of unknown size",
    "_linalg_eigh": "asks the solver for its success",
    "_linalg_svd": "asks the solver for its success",
    "linalg_eigh": "asks the solver for its success",
    "linalg_inv_ex": "asks the solver for its success",
}


class _Far(Tensor):
    """A tensor on `FAR`; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Far:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=FAR,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"far {self.inner!r}"

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("tensors of a device cannot be arrays: use Tensor.cpu() first")

    def __deepcopy__(self, memo: Any) -> Tensor:
        copy = self.detach().clone()
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy


class Waits(TorchDispatchMode):
    """Within it, tensors can be made on `FAR`. While `watching`, each wait is counted in `seen`, under what and where.

    where: the line of the package that asked.
    """

    current: Waits | None = None

    def __init__(self) -> None:
        super().__init__()
        self.watching = False
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Waits:
        Waits.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Waits.current = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def note(self, what: str) -> None:
        if self.watching:
            self.seen[f"{line_of_package(traceback.extract_stack()) or 'a test'} {what}"] += 1


def _note(what: str) -> None:
    if Waits.current is not None:
        Waits.current.note(what)


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == FAR.type


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = list(_tensors((args, kwargs)))
    given = {id(t.inner): t for t in flat if isinstance(t, _Far)}
    name = func.overloadpacket.__name__
    if name == "_to_copy":
        return _copied(func, args, kwargs, bool(given))
    if name == "copy_" and isinstance(args[0], _Far) != isinstance(args[1], _Far):
        if not _asynchronous(kwargs, args[2] if len(args) > 2 else False):
            _note("copies between host and device")
    elif given:
        if len(given) < len(flat) and any(t.dim() > 0 and not isinstance(t, _Far) for t in flat):
            raise RuntimeError(f"{func} got tensors of the host and of the device")
        if name in ("index", "index_put", "index_put_") and any(t.dtype == torch.bool for t in _tensors(args[1])):
            _note("looks up by a mask")
        if name in _WAITING:
            _note(_WAITING[name])
        if name == "native_batch_norm_backward" and args[2] is None and any(args[-1][1:]):
            raise RuntimeError("CUDA's kernel makes gradients of scale and shift like the scale, and got none")
    far = bool(given) or _is_far(kwargs.get("device"))
    if far and "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu", "pin_memory": False}
    inner_args, inner_kwargs = _mapped((args, kwargs), lambda t: t.inner if isinstance(t, _Far) else t)
    out = func(*inner_args, **inner_kwargs)
    # results are on the device; those of operations in place are the tensors that they were given
    return _mapped(out, lambda t: given[id(t)] if id(t) in given else _Far(t)) if far else out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The function's values in place of tensors, within lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(v, function) for v in value])
    return {key: _mapped(v, function) for key, v in value.items()} if isinstance(value, dict) else value


def _asynchronous(kwargs: dict[str, Any], given: bool = False) -> bool:
    return bool(kwargs.get("non_blocking", given))


def _copied(func: Any, args: Any, kwargs: dict[str, Any], from_far: bool) -> Tensor:
    """`_to_copy`: between the two memories, or to another dtype in one of them."""
    device = kwargs.get("device")
    to_far = from_far if device is None else _is_far(device)
    if from_far != to_far and not _asynchronous(kwargs):
        _note("copies to the host" if from_far else "copies from the host")
    inner = args[0].inner if from_far else args[0]
    out = func(inner, **{k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")})
    return _Far(out) if to_far else out
