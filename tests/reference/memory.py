"""The memory of tensors that a computation makes, counted and not measured: the same on every machine."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes, `peak`, that storages made within the block had at the end of any operation.

    What an operation's kernel takes and gives back before its end is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._given: dict[int, StorageWeakRef] = {}  # alive, since another storage may get a dead one's address
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._given = {key: given for key, given in self._given.items() if not given.expired()}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._given.setdefault(storage._cdata, StorageWeakRef(storage))
        out = func(*args, **(kwargs or {}))
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        for storage in _storages(out):
            if storage._cdata not in self._given:
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
