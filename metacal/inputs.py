"""What a network is called with, one tensor or several as the arguments of its forward, and the logits it returns.

A batch of tokens and their mask is `Inputs({"input_ids": ids, "attention_mask": mask})`, which `call` gives to the
network as `net(input_ids=ids, attention_mask=mask)`; with numbers as keys, `net(first, second)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metacal.errors import require

__all__ = [
    "LABEL_KEYS",
    "Inputs",
    "at_a_time",
    "call",
    "cat",
    "held_logits",
    "logits_in",
    "named_tensors",
    "pair_in",
    "placed",
    "tensors_of",
]

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
"""The names by which a batch or a sample that is a dictionary may hold its labels."""


class Inputs:
    """Several tensors `(N, ...)`, the arguments of a network for N samples.

    It has as much of a tensor as a training needs, each with the tensor's meaning along the first dimension, which is
    all that its `shape` has. It is never floating point: what perturbs or mixes inputs refuses it.

    Args:
        tensors: by name, or by number for arguments without a name.
    """

    def __init__(self, tensors: Mapping[str | int, Tensor]) -> None:
        self.tensors = dict(tensors)
        sizes = {key: len(t) if t.ndim else None for key, t in self.tensors.items()}
        require(len(set(sizes.values())) == 1, f"inputs must hold equally many samples, got {sizes}")

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, rows: Any) -> Inputs:
        return self.each(lambda t: t[rows])

    def __repr__(self) -> str:
        return f"Inputs({', '.join(f'{key}: {tuple(t.shape)}' for key, t in self.tensors.items())})"

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self)])

    @property
    def ndim(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(t.dtype for t in self.tensors.values())

    @property
    def _version(self) -> tuple[int, ...]:  # as a tensor counts changes in place
        return tuple(t._version for t in self.tensors.values())

    def is_floating_point(self) -> bool:
        return False

    def each(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """`function` of every tensor."""
        return Inputs({key: function(t) for key, t in self.tensors.items()})

    def split(self, size: int) -> list[Inputs]:
        return [self[i : i + size] for i in range(0, len(self), size)]

    def index_select(self, dim: int, index: Tensor) -> Inputs:
        return self.each(lambda t: t.index_select(dim, index))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Inputs:
        return self.each(lambda t: t.to(device, non_blocking=non_blocking))

    def contiguous(self) -> Inputs:
        return self.each(Tensor.contiguous)

    def clone(self) -> Inputs:
        return self.each(Tensor.clone)

    def pin_memory(self) -> Inputs:
        return self.each(Tensor.pin_memory)


def tensors_of(x: Tensor | Inputs) -> list[Tensor]:
    """The tensors that the inputs of a network consist of."""
    return list(x.tensors.values()) if isinstance(x, Inputs) else [x]


def at_a_time(x: Tensor | Inputs, most: int = 1024) -> int:
    """How many samples like those of `x` (N, ...) a network is run on at a time.

    `most` of small ones, or as many as hold 2^23 numbers together, which makes 55 images of 224 x 224 pixels: what the
    layers make of them must fit into memory too. A whole number, such as a token, becomes a vector and counts as 256.
    """
    numbers = 0
    for t in tensors_of(x):
        as_is = t.is_floating_point() or t.dtype in (torch.uint8, torch.bool)
        numbers += t[:1].numel() * (1 if as_is else 256)
    return max(1, min(most, (1 << 23) // max(1, numbers)))


def call(net: Callable[..., Any], x: Tensor | Inputs) -> Any:
    """`net` of a batch."""
    if not isinstance(x, Inputs):
        return net(x)
    by_place = [x.tensors[key] for key in sorted(key for key in x.tensors if isinstance(key, int))]
    return net(*by_place, **{key: t for key, t in x.tensors.items() if isinstance(key, str)})


def held_logits(result: Any) -> Any:
    """The logits of an output that holds them under that name, as those of many model libraries do; else the output."""
    return result if isinstance(result, Tensor) else getattr(result, "logits", result)


def logits_in(result: Any) -> Any:
    """Logits (N, K) of an output that is or holds them; what is no tensor as it is.

    One logit z a sample, (N,) or (N, 1), stands for two classes and becomes (0, z), whose softmax is the sigmoid of z.
    """
    logits = held_logits(result)
    one = isinstance(logits, Tensor) and (logits.ndim == 1 or (logits.ndim == 2 and logits.shape[1] == 1))
    if not one:
        return logits
    z = logits.reshape(-1, 1)
    return torch.cat([torch.zeros_like(z), z], 1)


def cat(parts: Sequence[Any]) -> Any:
    """The samples of several batches as one: tensors, or all `Inputs`."""
    if not isinstance(parts[0], Inputs):
        return torch.cat(list(parts))
    return Inputs({key: torch.cat([part.tensors[key] for part in parts]) for key in parts[0].tensors})


def placed(x: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> Any:
    """A tensor or `Inputs` on `device`, what is floating point in `dtype`; None: as it is."""
    if isinstance(x, Inputs):
        return x.each(lambda t: placed(t, device, dtype))
    return x.to(device, dtype if x.is_floating_point() else None)


def named_tensors(x: Any) -> Mapping[str | int, Any] | None:
    """What a dictionary, or a tuple or list of arrays, holds for a network, by name or number; None for one array."""
    if isinstance(x, Inputs):
        return x.tensors
    if isinstance(x, Mapping):
        return x
    several = isinstance(x, (tuple, list)) and len(x) > 1 and all(getattr(v, "ndim", 0) > 0 for v in x)
    return dict(enumerate(x)) if several else None


def pair_in(value: Any) -> tuple[Any, Any] | None:
    """The inputs and labels in a batch or a sample; None where it has none.

    It is a tuple or list that begins with the two, or a dictionary with the labels under one of `LABEL_KEYS`, whose
    other entries are the inputs: one of them alone is the input itself.
    """
    if isinstance(value, (tuple, list)):
        return (value[0], value[1]) if len(value) >= 2 else None
    if not isinstance(value, Mapping):
        return None
    key = next((key for key in LABEL_KEYS if key in value), None)
    others = {name: entry for name, entry in value.items() if name != key}
    if key is None or not others:
        return None
    return (next(iter(others.values())) if len(others) == 1 else others), value[key]
