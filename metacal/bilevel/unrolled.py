"""The reference: k >= 1 training steps unrolled by the `higher` library (Grefenstette et al. 2019).

Keeps the graph of everything, so it is the dearest engine, for tests and comparisons. `higher` 0.2.1 computes torch's
SGD (momentum, Nesterov, dampening, weight decay) exactly; its Adam puts epsilon elsewhere and its SGD ignores
`maximize`, so these are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from metacal import ranks
from metacal.autodiff.plain import PlainNorms
from metacal.bilevel.inner import Gradient, Inner
from metacal.bilevel.passes import Engine, check_unhooked
from metacal.bilevel.state import Snapshot, preserved
from metacal.bilevel.window import OuterPart, full
from metacal.errors import require, require_packages
from metacal.inputs import call
from metacal.network import Streams, outputs_of, plain_attention

__all__ = ["HIGHER", "TrainingStep", "Unroller", "Window", "check_unrollable", "unrolled_gradient"]


HIGHER = "higher"


def check_unrollable(optimizer: Optimizer) -> None:
    """Raise `InputError` unless `higher` is installed and takes the same steps as this optimizer."""
    require(
        type(optimizer) is SGD,
        f"optimizer must be SGD with engine 'higher' (that library computes another {type(optimizer).__name__}), "
        "use engine 'forward'",
    )
    require(
        not any(group["maximize"] for group in optimizer.param_groups),
        "optimizer must not set maximize with engine 'higher' (that library ignores it), use engine 'forward'",
    )
    require_packages("engine 'higher'", "higher")


def unrolled_gradient(
    model: nn.Module,
    optimizer: Optimizer,
    settings: Sequence[Mapping[str, Sequence[float]]],
    inner: Callable[[nn.Module, int], Tensor],
    outer: Callable[[nn.Module], Tensor],
    params: Sequence[Tensor],
    clip_norm: float | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Value and gradient in `params` of `outer(model after as many steps as there are settings)`.

    settings: of the optimizer at each step, by name, one value for each parameter group. inner: `(model, i) ->
    loss` of the i-th step, a graph into `params`. The model, its buffers and its optimizer stay as they are; the
    random stream moves as the steps move it, and is put back for what `outer` draws.
    """
    import higher

    def clip(grads: list[Tensor | None]) -> list[Tensor | None]:
        if clip_norm is None:
            return grads
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads if g is not None]))
        scale = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        return [None if g is None else g * scale for g in grads]

    device = next(model.parameters()).device
    context: Any = higher.innerloop_ctx(model, optimizer, copy_initial_weights=True)
    with plain_attention(), PlainNorms(), context as (functional, steps):
        for i, override in enumerate(settings):
            steps.step(inner(functional, i), override=override, grad_callback=clip)
        with Streams.aside(device):
            value = outer(functional)
        grads = torch.autograd.grad(value, params, allow_unused=True)
    return value.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads)]


# -- windows of training steps -------------------------------------------------------------------------------------

_SETTINGS = ("lr", "momentum", "dampening", "weight_decay")


def settings_of(optimizer: Optimizer) -> dict[str, list[float]]:
    """What a schedule may change from step to step, one value for each parameter group."""
    groups = optimizer.param_groups
    return {key: [float(group[key]) for group in groups] for key in _SETTINGS if all(key in group for group in groups)}


@dataclass
class TrainingStep:
    """A batch and what its step read beside the parameters: settings of the optimizer, its number, the epoch, and the
    random streams before it."""

    x: Tensor
    y: Tensor
    settings: dict[str, list[float]]
    count: int
    epoch: float
    random: Streams


@dataclass
class Window:
    """Steps taken since `start`, the state before the first of them."""

    start: Snapshot
    steps: list[TrainingStep] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: tensors and plain Python."""
        return {
            "start": self.start.state_dict(),
            "steps": [
                {
                    # a batch may be a view of a whole data set, which would be saved with it
                    "x": step.x.clone(),
                    "y": step.y.clone(),
                    "settings": step.settings,
                    "count": step.count,
                    "epoch": step.epoch,
                    "random": step.random.state(),
                }
                for step in self.steps
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], optimizer: Optimizer, *modules: nn.Module | None) -> Window:
        """The window that gave this `state_dict`, of the same optimizer and modules."""
        device = optimizer.param_groups[0]["params"][0].device
        window = cls(Snapshot.from_state(state["start"], optimizer, *modules))
        for step in state["steps"]:
            x, y, random = step["x"].to(device), step["y"].to(device), Streams.from_state(step["random"], device)
            window.steps.append(TrainingStep(x, y, step["settings"], step["count"], step["epoch"], random))
        return window


class Unroller:
    """A `window.Window` whose steps are taken once more by the library, from a snapshot before the first of them.

    Attributes: `window`, None between windows. engine: of the training steps, which are taken like any others.
    """

    records = False

    def __init__(
        self, inner: Inner, optimizer: Optimizer, engine: Engine, clip_norm: float | None, every: int, steps: int
    ) -> None:
        require(
            1 <= steps <= every,
            f"steps must be between 1 and every = {every}, so that windows do not overlap, got {steps}",
        )
        self.inner, self.optimizer, self.engine, self.clip_norm = inner, optimizer, engine, clip_norm
        self.steps = steps
        self.window: Window | None = None

    empty = True  # its state goes into checkpoints

    def clear(self) -> None:
        self.window = None

    def begin(self, x: Tensor, y: Tensor, count: int, epoch: float) -> None:
        if self.window is None:
            self.window = Window(Snapshot(self.optimizer, self.inner.network.model, self.inner.source))
        step = TrainingStep(x, y, settings_of(self.optimizer), count, epoch, Streams(x.device))
        self.window.steps.append(step)

    def drop(self) -> None:
        if self.window is not None:
            self.window.steps.pop()

    def note(self, gradient: Gradient, norm: float | Tensor) -> None:
        """Nothing is read of the step itself, which is made again from its batch: hooks on its gradient are not."""
        check_unhooked(self.inner.network.names, self.inner.network.params)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.window is None else self.window.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.window = None
        if state is not None:
            self.window = Window.from_state(dict(state), self.optimizer, self.inner.network.model, self.inner.source)

    def outer_part(
        self, outer: Callable[[Tensor, Tensor], Tensor], x_meta: Tensor, y_meta: Tensor, meta_params: Sequence[Tensor]
    ) -> OuterPart:
        """M, dM/dφ, the meta logits and labels, through the steps begun."""
        require(ranks.size() == 1, "engine 'higher' is for one rank, use engine 'forward'")
        inner, window = self.inner, self.window
        assert window is not None
        require(
            getattr(inner.source, "layer", None) is None,
            "gamma_net cannot read an inner layer with engine 'higher', use engine 'forward'",
        )
        meta: list[Tensor] = []

        def loss(model: nn.Module, i: int) -> Tensor:
            step = window.steps[i]
            step.random.restore()
            batch = inner.batch(step.x, step.y, step.count, step.epoch)
            logits, features = outputs_of(call(model, batch.x))
            gamma = inner.gamma(batch, logits, features, grad=True)
            return inner.penalised(inner.losses(batch, logits, gamma).mean(), batch, model, logits, features)

        def value_of(model: nn.Module) -> Tensor:
            z = full(outputs_of(call(model, x_meta))[0])
            meta.append(z.detach())
            return outer(z, y_meta)

        model = inner.network.model
        with preserved(self.optimizer, model, inner.source):
            window.start.restore(settings=False)  # what the user has set since then holds
            overrides = [step.settings for step in window.steps]
            value, grads = unrolled_gradient(
                model, self.optimizer, overrides, loss, value_of, meta_params, self.clip_norm
            )
        return value, grads, meta[0], y_meta
