"""One way to run a network: its logits and features, with everything else left as it was.

A forward pass can change more than its output: buffers (in place, or assigned anew), plain attributes of modules, the
random streams of PyTorch, Python and numpy, and the attention kernel that the caller chose. `Network.aside` runs the
network on copies of all that state and puts the originals back; `Streams` rewinds the random streams. So a pass that
measures leaves no trace, and a pass that must repeat another one starts from where that one did. Whether it did repeat
it is checked on the logits (`check_repeated`): no list of what a forward pass may read can be complete.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from metacal.errors import InputError, require
from metacal.inputs import call, logits_in

__all__ = [
    "ModuleState",
    "Network",
    "Outputs",
    "Streams",
    "check_repeated",
    "coupling_layer",
    "logits_of",
    "on_copies",
    "outputs_of",
    "plain",
    "plain_attention",
    "repeats",
]

Outputs = tuple[Tensor, Tensor | None]
"""Logits `(N, K)` and features `(N, D)`, or None from a network that returns logits only."""


def plain(model: nn.Module) -> nn.Module:
    """The network behind a compiled one, which has no forward-mode and no second derivatives."""
    return getattr(model, "_orig_mod", model)


def outputs_of(result: Any) -> Outputs:
    """What a network returned, as logits and features.

    Raises `InputError` for anything but a tensor, an object with `logits`, or a pair (logits, features or None).
    """
    result = logits_in(result)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        return logits_in(result[0]), result[1]
    if not isinstance(result, Tensor):
        kind = f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, (tuple, list)) else "")
        raise InputError(f"model must return logits (N, K) or (logits, features), it returned {kind}")
    return result, None


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Logits (N, K) of a run aside, with their graph, float32 at least.

    Raises `InputError` for outputs that are no logits of these N samples.
    """
    z, _ = Network(model).aside(x)
    require(
        z.ndim == 2 and len(z) == len(x) and z.shape[1] >= 2,
        f"model must return logits (N, K) with N = {len(x)} and K >= 2, they have shape {tuple(z.shape)}",
    )
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


class Network:
    """A model and its trainable parameters, by name.

    Attributes: `model`, uncompiled; `trained`, what a training pass calls: the model, or its compiled form; `names`,
    `params` of the parameters that require a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trained, self.model = model, plain(model)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.params: list[Tensor] = [p for _, p in named]

    def __call__(self, x: Tensor) -> Outputs:
        """A training pass: buffers, attributes and random streams move as in any other."""
        return outputs_of(call(self.trained, x))

    @contextmanager
    def holding(self, params: list[Tensor]) -> Iterator[None]:
        """Other values of the trainable parameters, for passes and for backward passes that run parts of one again."""
        values = {id(p): value for p, value in zip(self.params, params)}
        places = [
            (m._parameters, name, p)
            for m in self.model.modules()
            for name, p in m._parameters.items()
            if id(p) in values
        ]
        for holder, name, p in places:
            holder[name] = values[id(p)]  # type: ignore[assignment]
        try:
            yield
        finally:
            for holder, name, p in places:
                holder[name] = p

    def plainly(self, x: Tensor) -> Outputs:
        """A pass of the uncompiled model, by operations that have second derivatives; state moves as in any other."""
        with plain_attention():
            return outputs_of(call(self.model, x))

    def aside(self, x: Tensor, state: ModuleState | None = None) -> Outputs:
        """The same, leaving buffers and attributes alone; from `state` where given. Random streams do move."""
        with on_copies(self.model, state):
            return self.plainly(x)


def coupling_layer(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The first layer by which the examples of a batch depend on each other now, with its name, or None."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            return name, module
    return None


# -- state of modules ----------------------------------------------------------------------------------------------

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_PLAIN_CLASSES = "torch.nn.modules"  # these change nothing but buffers
_LONGEST = 1000  # of a list or dictionary that is copied: a longer one is a table, such as a vocabulary, and no state


def _stateful(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(holder, key, value) of all buffers and of the plain attributes of modules that are not PyTorch's own."""
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None:
                yield m._buffers, name, buffer
        if not type(m).__module__.startswith(_PLAIN_CLASSES):
            attributes = vars(m)
            for name in attributes.keys() - _INTERNAL:
                yield attributes, name, attributes[name]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that a forward pass may change. What carries a graph, and objects of unknown kinds, stay themselves."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        result: Any = value if value.requires_grad else value.clone()
    elif isinstance(value, torch.Generator):
        result = value.clone_state()
    elif isinstance(value, (np.ndarray, random.Random, np.random.Generator, np.random.RandomState)):
        result = copy.deepcopy(value)
    elif type(value) in (list, set, deque) and len(value) <= _LONGEST:
        result = type(value)(_copied(v, memo) for v in value)
        if type(value) is deque:
            result = deque(result, value.maxlen)
    elif type(value) is dict and len(value) <= _LONGEST:
        result = {k: _copied(v, memo) for k, v in value.items()}
    else:
        result = value
    memo[id(value)] = result
    return result


class ModuleState:
    """Buffers and plain attributes of a module and of all within it, as they are now.

    Seen: tensors, numbers and strings, generators, and lists, sets and dictionaries of these with up to 1,000 entries.
    Attributes that hold other objects are put back, their insides are not known.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.copies: dict[int, Any] = {}  # by the id of the object, which is kept alive here
        self.values = [(holder, key, v, _copied(v, self.copies)) for holder, key, v in _stateful(module)]

    def replace(self, copies: Mapping[int, Any]) -> None:
        """Other values to restore, by the id of the objects that are to hold them."""
        self.copies.update(copies)
        self.values = [(holder, key, v, self.copies[id(v)]) for holder, key, v, _ in self.values]

    def restore(self, settings: bool = True) -> None:
        """Write everything back, into the objects that held it; numbers, strings and flags only with `settings`."""
        known: dict[int, set[str]] = {}
        for holder, key, _, _ in self.values:
            known.setdefault(id(holder), set()).add(key)
        for m in self.module.modules():
            attributes = vars(m)
            if not type(m).__module__.startswith(_PLAIN_CLASSES):
                for name in attributes.keys() - _INTERNAL - known.get(id(attributes), set()):
                    del attributes[name]
        for holder, key, value, copied in self.values:
            _write(value, copied)
            if settings or copied is not value:
                holder[key] = value


@torch.no_grad()
def _write(value: Any, copied: Any) -> None:
    """Give a mutable object the contents of its copy."""
    if copied is value:
        return
    if isinstance(value, Tensor):
        value.copy_(copied)
    elif isinstance(value, torch.Generator):
        value.set_state(copied.get_state())
    elif isinstance(value, np.ndarray):
        value[...] = copied
    elif isinstance(value, random.Random):
        value.setstate(copied.getstate())
    elif isinstance(value, np.random.RandomState):
        value.set_state(copied.get_state())
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = copied.bit_generator.state
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(copied)
    else:  # a list or deque
        value.clear()
        value.extend(copied)


@contextmanager
def on_copies(module: nn.Module, state: ModuleState | None = None) -> Iterator[None]:
    """Copies in place of buffers and plain attributes for the block, of the present ones or of those of `state`.

    Unlike writing old values back, this harms no graph that has saved a buffer.
    """
    memo: dict[int, Any] = {}
    present = [(holder, key, value) for holder, key, value in _stateful(module)]
    start = present if state is None else [(holder, key, copied) for holder, key, _, copied in state.values]
    attributes = [(vars(m), vars(m).keys() - _INTERNAL) for m in module.modules()]
    for holder, key, value in start:
        holder[key] = _copied(value, memo)
    try:
        yield
    finally:
        for holder, names in attributes:
            for name in holder.keys() - _INTERNAL - names:
                del holder[name]
        for holder, key, value in present:
            holder[key] = value


# -- random streams ------------------------------------------------------------------------------------------------


class Streams:
    """The default random streams as they were when this was made: PyTorch's on the CPU and on one device, Python's
    and numpy's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.python = random.getstate()
        self.numpy: Any = np.random.get_state(legacy=False)

    def state(self) -> dict[str, Any]:
        """For checkpoints: tensors and plain Python."""
        key = self.numpy["state"]
        return {
            "cpu": self.cpu,
            "cuda": self.cuda,
            "python": self.python,
            "numpy": {
                "key": torch.from_numpy(key["key"].astype(np.int64)),
                "pos": int(key["pos"]),
                "has_gauss": int(self.numpy["has_gauss"]),
                "gauss": float(self.numpy["gauss"]),
            },
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Streams:
        """What gave this `state`; a stream that `device` or the state does not have stays as it is now."""
        streams = cls(device)
        # generators take their states from the CPU, wherever a checkpoint was mapped to
        if state["cpu"] is not None:
            streams.cpu = state["cpu"].cpu()
        if state["cuda"] is not None and streams.cuda is not None:
            streams.cuda = state["cuda"].cpu()
        if state.get("python") is not None:
            version, key, gauss = state["python"]
            streams.python = (version, tuple(key), gauss)
        if state.get("numpy") is not None:
            words = state["numpy"]
            key = {"key": words["key"].cpu().numpy().astype(np.uint32), "pos": words["pos"]}
            streams.numpy = {**streams.numpy, "state": key, "has_gauss": words["has_gauss"], "gauss": words["gauss"]}
        return streams

    def restore(self) -> None:
        """Rewind the streams to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = Streams(self.device)
        return (
            not torch.equal(now.cpu, self.cpu)
            or (now.cuda is not None and self.cuda is not None and not torch.equal(now.cuda, self.cuda))
            or now.python != self.python
            or now.numpy["state"]["pos"] != self.numpy["state"]["pos"]
            or not np.array_equal(now.numpy["state"]["key"], self.numpy["state"]["key"])
            or now.numpy["has_gauss"] != self.numpy["has_gauss"]
        )

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw again, inside, what was drawn after this state; the streams outside are not moved."""
        now = Streams(self.device)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    @staticmethod
    @contextmanager
    def aside(device: torch.device, seed: int | None = None, seeded: bool = True) -> Iterator[None]:
        """Streams of their own, inside, seeded by `seed` or by what the present one would draw next; outside nothing
        moves.

        Seeding costs as much as a small layer: a caller who knows that nothing will be drawn can leave it out.
        """
        now = Streams(device)
        if seeded:
            seed = int(torch.randint(2**62, ())) if seed is None else seed
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            now.restore()


def repeats(
    repeated: Tensor, recorded: Tensor, tolerance: float, remedy: str
) -> tuple[Tensor, Callable[[], InputError]]:
    """Whether a pass that had to repeat another one gave its logits, up to rounding, a 0-d bool on their device; and
    the error for where it did not.

    tolerance: on the norm of the difference, relative to that of the recorded logits.
    """
    gap = (repeated.detach().double() - recorded.detach().double()).norm()
    size = recorded.detach().double().norm()
    return gap <= tolerance * size + 1e-30, lambda: InputError(
        f"model gave other logits when its pass was repeated (by {float(gap / size):.1e} of their size): its forward "
        "depends on something besides inputs, parameters, buffers, plain attributes and the random streams of torch, "
        f"Python and numpy; {remedy}"
    )


def check_repeated(repeated: Tensor, recorded: Tensor, tolerance: float, remedy: str) -> None:
    """Raise the error of `repeats` now."""
    well, error = repeats(repeated, recorded, tolerance, remedy)
    if not well:
        raise error()


# -- attention ----------------------------------------------------------------------------------------------------


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as plain matrix products: the fused kernels have no forward-mode and no second derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
