"""The training steps that engine "higher" unrolls together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from metacal.bilevel.state import RandomState, Snapshot

__all__ = ["TrainingStep", "Window", "settings_of"]

_SETTINGS = ("lr", "momentum", "dampening", "weight_decay")


def settings_of(optimizer: Optimizer) -> dict[str, list[float]]:
    """What a schedule may change from step to step, one value for each parameter group."""
    groups = optimizer.param_groups
    return {key: [float(group[key]) for group in groups] for key in _SETTINGS if all(key in group for group in groups)}


@dataclass
class TrainingStep:
    """A batch and what its step read beside the parameters: settings of the optimizer, epoch, random state before.

    random: None for the state that the streams are in when the step is unrolled.
    """

    x: Tensor
    y: Tensor
    settings: dict[str, list[float]]
    epoch: float
    random: RandomState | None = None


@dataclass
class Window:
    """Steps taken since `start`, which is the state before the first of them, None for the present one."""

    start: Snapshot | None = None
    steps: list[TrainingStep] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: tensors and plain Python."""
        return {
            "start": None if self.start is None else self.start.state_dict(),
            "steps": [
                {
                    # a batch may be a view of a whole data set, which would be saved with it
                    "x": step.x.clone(),
                    "y": step.y.clone(),
                    "settings": step.settings,
                    "epoch": step.epoch,
                    "random": None if step.random is None else step.random.state(),
                }
                for step in self.steps
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], optimizer: Optimizer, *modules: nn.Module | None) -> Window:
        """The window that gave this `state_dict`, of the same optimizer and modules."""
        start = None if state["start"] is None else Snapshot.from_state(state["start"], optimizer, *modules)
        device = optimizer.param_groups[0]["params"][0].device
        window = cls(start)
        for step in state["steps"]:
            x, y = step["x"].to(device), step["y"].to(device)
            random = None if step["random"] is None else RandomState.from_state(step["random"], device)
            window.steps.append(TrainingStep(x, y, step["settings"], step["epoch"], random))
        return window
