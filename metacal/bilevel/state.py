"""Random streams and state that a meta computation must leave as it found them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["RandomState", "Snapshot", "buffers_of", "preserved", "restore_buffers"]


class RandomState:
    """The default generators of the CPU and of one device, as they were when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def state(self) -> dict[str, Tensor | None]:
        """For checkpoints."""
        return {"cpu": self.cpu, "cuda": self.cuda}

    @classmethod
    def from_state(cls, state: dict[str, Tensor | None], device: torch.device) -> RandomState:
        """What gave this `state`; a stream that `device` or the state does not have stays as it is now."""
        random = cls(device)
        # generators take their states from the CPU, wherever a checkpoint was mapped to
        if (cpu := state["cpu"]) is not None:
            random.cpu = cpu.cpu()
        if (cuda := state["cuda"]) is not None and random.cuda is not None:
            random.cuda = cuda.cpu()
        return random

    def restore(self) -> None:
        """Rewind the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = RandomState(self.device)
        return not torch.equal(now.cpu, self.cpu) or (
            now.cuda is not None and self.cuda is not None and not torch.equal(now.cuda, self.cuda)
        )

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw again, inside, what was drawn after this state; the streams outside are not moved."""
        now = RandomState(self.device)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    @staticmethod
    @contextmanager
    def aside(device: torch.device, seeded: bool = True) -> Iterator[None]:
        """A stream of its own, inside, seeded by what the present one would draw next; outside nothing moves.

        Seeding costs as much as a small layer: a caller who knows that nothing will be drawn can leave it out.
        """
        now = RandomState(device)
        if seeded:
            torch.manual_seed(int(torch.randint(2**62, ())))
        try:
            yield
        finally:
            now.restore()


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


@torch.no_grad()
def restore_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Write saved values back into the buffers."""
    for name, buffer in module.named_buffers():
        buffer.copy_(saved[name])


class Snapshot:
    """Copies of parameters, buffers, optimizer state and random streams, and the gradients themselves."""

    def __init__(self, optimizer: Optimizer, *modules: nn.Module | None) -> None:
        self.optimizer = optimizer
        self.modules = [module for module in modules if module is not None]
        params: list[Tensor] = [p for module in self.modules for p in module.parameters()]
        known = {id(p) for p in params}
        params += [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        self.params = params
        self.random = RandomState(params[0].device)
        self.values = [p.detach().clone() for p in params]
        self.grads = [p.grad for p in params]
        self.buffers = [buffers_of(module) for module in self.modules]
        self.state = {
            p: {key: (value, value.clone() if isinstance(value, Tensor) else value) for key, value in entries.items()}
            for p, entries in optimizer.state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints, without the gradients: tensors and plain Python, parameters by their position."""
        return {
            "values": self.values,
            "buffers": self.buffers,
            "optimizer": {
                i: {key: copy for key, (_, copy) in self.state[p].items()}
                for i, p in enumerate(self.params)
                if p in self.state
            },
            "random": self.random.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], optimizer: Optimizer, *modules: nn.Module | None) -> Snapshot:
        """The snapshot that gave this `state_dict`, of the same optimizer and modules."""
        snapshot = cls(optimizer, *modules)
        snapshot.values, snapshot.buffers = state["values"], state["buffers"]
        snapshot.state = {}
        for i, entries in state["optimizer"].items():
            p = snapshot.params[i]
            # no tensor of the optimizer has held these, so they come back in tensors of their own
            snapshot.state[p] = {
                key: (value.to(p.device, copy=True), value) if isinstance(value, Tensor) else (value, value)
                for key, value in entries.items()
            }
        snapshot.random = RandomState.from_state(state["random"], snapshot.random.device)
        return snapshot

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, into the tensors that held it."""
        for p, value, grad in zip(self.params, self.values, self.grads):
            p.copy_(value)
            p.grad = grad
        for module, saved in zip(self.modules, self.buffers):
            restore_buffers(module, saved)
        for p in list(self.optimizer.state):
            if p not in self.state:
                del self.optimizer.state[p]
        for p, entries in self.state.items():
            for value, copy in entries.values():
                if isinstance(value, Tensor):
                    value.copy_(copy)
            self.optimizer.state[p] = {key: value for key, (value, _) in entries.items()}
        self.random.restore()


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
