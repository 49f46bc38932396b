"""Everything that a step may change, so that it can be undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metacal.network import ModuleState, Streams

__all__ = ["Gate", "Snapshot", "Undo", "held_on", "on_device", "preserved", "state_tensors"]


class Undo:
    """Puts back what a forward pass has moved, for a step that is not taken: buffers, attributes, random streams."""

    def __init__(self, device: torch.device, *modules: nn.Module | None) -> None:
        self.states = [ModuleState(module) for module in modules if module is not None]
        self.streams = Streams(device)

    def __call__(self, streams: bool = True, settings: bool = True) -> None:
        for state in self.states:
            state.restore(settings)
        if streams:
            self.streams.restore()


class Snapshot:
    """Copies of parameters, module state, optimizer state and random streams, and the gradients themselves."""

    def __init__(self, optimizer: Optimizer, *modules: nn.Module | None) -> None:
        self.optimizer = optimizer
        self.modules = [module for module in modules if module is not None]
        params: list[Tensor] = [p for module in self.modules for p in module.parameters()]
        known = {id(p) for p in params}
        params += [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        self.params = params
        self.undo = Undo(params[0].device, *self.modules)
        self.values = [p.detach().clone() for p in params]
        self.grads = [p.grad for p in params]
        self.state = {
            p: {key: (value, value.clone() if isinstance(value, Tensor) else value) for key, value in entries.items()}
            for p, entries in optimizer.state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints, without the gradients: tensors and plain Python, parameters by their position."""
        return {
            "values": self.values,
            "buffers": [
                {name: state.copies.get(id(b), b) for name, b in module.named_buffers()}
                for module, state in zip(self.modules, self.undo.states)
            ],
            "optimizer": {
                i: {key: copy for key, (_, copy) in self.state[p].items()}
                for i, p in enumerate(self.params)
                if p in self.state
            },
            "random": self.undo.streams.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], optimizer: Optimizer, *modules: nn.Module | None) -> Snapshot:
        """The snapshot that gave this `state_dict`, of the same optimizer and modules."""
        snapshot = cls(optimizer, *modules)
        snapshot.values = state["values"]
        for module, held, buffers in zip(snapshot.modules, snapshot.undo.states, state["buffers"]):
            held.replace({id(b): buffers[name] for name, b in module.named_buffers()})
        snapshot.state = {}
        for i, entries in state["optimizer"].items():
            p = snapshot.params[i]
            # no tensor of the optimizer has held these, so they come back in tensors of their own
            snapshot.state[p] = {
                key: (value.to(p.device, copy=True), value) if isinstance(value, Tensor) else (value, value)
                for key, value in entries.items()
            }
        snapshot.undo.streams = Streams.from_state(state["random"], snapshot.undo.streams.device)
        return snapshot

    @torch.no_grad()
    def restore(self, settings: bool = True) -> None:
        """Put everything back, into the tensors that held it; plain settings of modules only where asked."""
        for p, value, grad in zip(self.params, self.values, self.grads):
            p.copy_(value)
            p.grad = grad
        for p in list(self.optimizer.state):
            if p not in self.state:
                del self.optimizer.state[p]
        for p, entries in self.state.items():
            for value, copy in entries.values():
                if isinstance(value, Tensor):
                    value.copy_(copy)
            self.optimizer.state[p] = {key: value for key, (value, _) in entries.items()}
        self.undo(settings=settings)


@contextmanager
def preserved(optimizer: Optimizer, *modules: nn.Module | None) -> Iterator[None]:
    """Leave parameters, buffers, gradients, optimizer state and random streams at the end as they were at the start."""
    snapshot = Snapshot(optimizer, *modules)
    for p in snapshot.params:
        p.grad = None  # the old tensor is kept aside: a backward would otherwise add to it
    try:
        yield
    finally:
        snapshot.restore()


class Gate:
    """Tensors that a step is about to change in place, and what they held, so that the device itself can undo it."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.before = [t.detach().clone() for t in tensors]

    @torch.no_grad()
    def keep_if(self, well: Tensor) -> None:
        """Where `well`, a 0-d bool, is false, all tensors get back what they held."""
        for tensor, before in zip(self.tensors, self.before):
            tensor.copy_(torch.where(well, tensor, before))


def on_device(state: Any, device: torch.device) -> Any:
    """A state of tensors and plain Python whose tensors, wherever it was read to, are on `device`."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: on_device(value, device) for key, value in state.items()}
    return [on_device(value, device) for value in state] if isinstance(state, (list, tuple)) else state


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]


def held_on(device: torch.device, optimizer: Optimizer) -> bool:
    """Whether all of an optimizer's state lies in tensors on `device`: Adam counts its steps on the host by default."""
    values = [v for entries in optimizer.state.values() for v in entries.values() if v is not None]
    return all(isinstance(v, Tensor) and v.device == device for v in values)
