"""`MetaStep`: one training step of the backbone and of the gamma source that learns through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metacal.bilevel.engines import ENGINES, call
from metacal.bilevel.state import RandomState, Snapshot, buffers_of, preserved, restore_buffers
from metacal.bilevel.unrolled import HIGHER, check_unrollable, unrolled_gradient
from metacal.bilevel.updates import (
    check_supported,
    clips,
    kept_gradients,
    total_norm,
    transposed_clip,
    transposed_update,
)
from metacal.bilevel.window import TrainingStep, Window, settings_of
from metacal.calibration.surrogates import Outer, build_outer
from metacal.errors import InputError, require
from metacal.gamma import pool
from metacal.objective import Loss, Penalty, build_loss, build_penalties

__all__ = ["Last", "MetaStep", "NonFiniteError"]


class NonFiniteError(RuntimeError):
    """A loss, gradient or hypergradient that is infinite or not a number.

    `quantity` says which and `value` what it is, `found` holds all numbers of the `step` by name.
    """

    def __init__(self, name: str, found: dict[str, float], step: int) -> None:
        quantity, value = _QUANTITY.get(name, name), found[name]
        super().__init__(f"non-finite {quantity} ({value}) at step {step}")
        self.quantity, self.value, self.found, self.step = quantity, value, found, step


@dataclass
class Last:
    """What monitors may want of the last step, detached and on the device: reading it waits for nothing."""

    logits: Tensor
    labels: Tensor
    features: Tensor | None
    gamma: Tensor | None
    meta_logits: Tensor | None = None
    meta_labels: Tensor | None = None


class MetaStep:
    """One training step of the backbone and of what sets its gammas, for a loop of one's own.

        z, h = backbone(x);  γ = gamma_net(h);  g = ∇_θ [mean ℓ(z, y, γ) + Σ λ_j R_j]
        θ' = the optimizer's step with g, clipped
        dM/dφ of M = outer(backbone at θ'(φ) on the meta batch), through that very step;  φ' = meta_optimizer's step

    Args:
        backbone: returns `(logits, features)`, or logits alone if no source needs features.
        optimizer: the backbone's: SGD, Adam or AdamW of torch.optim for steps with an outer part; any otherwise.
        gamma_net: a gamma source of `metacal.gamma`, or None for a loss without gamma.
        meta_optimizer: any optimizer over gamma_net's parameters, or None if it has none.
        outer: name, weights by name or callable `(logits, labels) -> scalar`, as `build_outer` takes it.
        engine: "forward", "difference", "reverse" or "higher"; see `metacal.bilevel.engines` and `unrolled`.
        loss: name in `metacal.losses.LOSSES` or callable `(logits, labels[, gamma]) -> (N,)`.
        penalties: `{name: weight}` or `{name: (callable, weight)}`, see `metacal.objective`.
        clip_norm: limit on the norm of the whole gradient.
        autocast: dtype of the training forward, e.g. torch.bfloat16; the outer part keeps the parameters' precision.
        every: the outer part belongs to every so many-th step; other steps ignore their meta batch.
        nonfinite: "raise" `NonFiniteError` before the optimizer has changed anything, or "skip" the step and count it
            in `skipped`. A non-finite outer loss or hypergradient shows only after the backbone's step, which stays
            and counts; the gamma source stays as it was.
        engine_options: forward: `reuse` (True); difference: `relative` (2e-3), `central` (False); higher: `steps` (1),
            how many steps before each outer one are unrolled, at most `every`.

    Attributes: `epoch`, which the loop sets and gamma sources read; `count`, steps so far; `skipped`; `last`.
    The meta batch never reaches the backbone's `.grad`, its buffers or the random stream of the training.
    """

    def __init__(
        self,
        backbone: nn.Module,
        optimizer: Optimizer,
        gamma_net: nn.Module | None = None,
        meta_optimizer: Optimizer | None = None,
        outer: str | Callable[[Tensor, Tensor], Tensor] | Mapping[str, Any] = "sece",
        engine: str = "forward",
        *,
        loss: str | Loss = "focal",
        penalties: Mapping[str, float | tuple[Penalty, float]] | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        every: int = 1,
        nonfinite: str = "raise",
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        require(
            engine in ENGINES or engine == HIGHER,
            f"engine must be one of {', '.join([*ENGINES, HIGHER])}, got {engine!r}",
        )
        require(every >= 1, f"every must be >= 1, got {every}")
        require(nonfinite in ("raise", "skip"), f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
        require(clip_norm is None or clip_norm > 0, f"clip_norm must be > 0 or None, got {clip_norm}")
        self.backbone, self.optimizer = backbone, optimizer
        self.gamma_net, self.meta_optimizer = gamma_net, meta_optimizer
        self.meta_params = [] if gamma_net is None else [p for p in gamma_net.parameters() if p.requires_grad]
        require(
            meta_optimizer is None or bool(self.meta_params),
            "meta_optimizer must be None: gamma_net has no parameters to learn",
        )
        if meta_optimizer is not None:
            check_supported(optimizer)
            if engine == HIGHER:
                check_unrollable(optimizer)
        self.outer = outer if isinstance(outer, Outer) else build_outer(outer)
        self.loss = build_loss(loss, gamma_net is not None)
        self.penalties = build_penalties(penalties)
        self.clip_norm, self.autocast, self.every, self.nonfinite = clip_norm, autocast, every, nonfinite
        # a compiled model trains, its original is differentiated: compiled code has no forward or second derivative
        self._eager: nn.Module = getattr(backbone, "_orig_mod", backbone)
        named = [(name, p) for name, p in self._eager.named_parameters() if p.requires_grad]
        require(bool(named), "backbone must have a parameter that requires a gradient, it has none")
        self.params = [p for _, p in named]
        ours = {id(p) for p in self.params}
        require(
            all(id(p) in ours for group in optimizer.param_groups for p in group["params"] if p.requires_grad),
            "optimizer must hold parameters of the backbone only, it holds others",
        )
        self._unroll = engine == HIGHER
        names = [name for name, _ in named]
        options = dict(engine_options or {})
        self._steps = options.pop("steps", 1) if self._unroll else 1
        require(
            1 <= self._steps <= every,
            f"steps must be between 1 and every = {every}, so that windows do not overlap, got {self._steps}",
        )
        # the reference engine takes its training steps like the others, and unrolls them beside
        kind = ENGINES["forward" if self._unroll else engine]
        try:
            self._engine = kind(self.backbone, self._eager, names, self.params, **options)
        except TypeError:
            raise InputError(f"engine_options must be options of engine {engine!r}, got {options}") from None
        self._window: Window | None = None
        self.epoch: float = 0
        self.count = 0
        self.skipped = 0
        self.last: Last | None = None
        self._kept: Any = None
        self._checked = False

    @property
    def due(self) -> bool:
        """Whether the coming step has an outer part, and so needs a meta batch."""
        return self.meta_optimizer is not None and (self.count + 1) % self.every == 0

    def step(
        self, x: Tensor, y: Tensor, x_meta: Tensor | None = None, y_meta: Tensor | None = None
    ) -> dict[str, float]:
        """Train the backbone on `(x, y)` and, where the outer part is due, the gamma source on `(x_meta, y_meta)`.

        Returns loss (mean per-sample loss), grad_norm (before clipping), gamma_mean, `penalty/<name>` unweighted, and
        after an outer part outer and hypergradient_norm. A step, or the gamma source's part of one, that is skipped for
        a non-finite value returns what was found and `skipped: 1.0`. Without a meta batch this is the plain training
        step, operation by operation.
        """
        number, due = self.count, self.due
        self._remember(x, y)
        hypergradient, skipped = None, False
        try:
            found, hypergradient = self._advance([(x, y)], x_meta if due else None, y_meta)
        except BaseException as error:
            if self._window is not None:
                self._window.steps.pop()  # only steps that were taken are unrolled
            if not isinstance(error, NonFiniteError) or self.nonfinite == "raise":
                raise
            found, skipped = error.found, True
        finally:
            self._engine.release()
        self.count += 1
        if due:
            self._window = None
        if hypergradient is not None:
            bad = _non_finite(found, _OUTER)
            if bad is not None and self.nonfinite == "raise":
                raise NonFiniteError(bad, found, number)
            skipped = bad is not None
        if skipped:
            self.skipped += 1
            return {**found, "skipped": 1.0}
        if hypergradient is not None:
            assert self.meta_optimizer is not None
            for p, h in zip(self.meta_params, hypergradient):
                p.grad = h
            self.meta_optimizer.step()
            self.meta_optimizer.zero_grad(set_to_none=True)
            last = self.last
            assert last is not None and last.meta_logits is not None and last.meta_labels is not None
            self.outer.update(last.meta_logits, last.meta_labels)
        return found

    def hypergradient(
        self, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor], x_meta: Tensor, y_meta: Tensor
    ) -> list[Tensor]:
        """dM/dφ, one tensor per parameter of gamma_net, of the step that `step` would take. Changes nothing.

        With engine "higher" x and y may be sequences of batches: dM/dφ through one step on each, in their order.
        """
        require(bool(self.meta_params), "gamma_net must have parameters to learn, it has none")
        check_supported(self.optimizer)
        batches = [(x, y)] if isinstance(x, Tensor) and isinstance(y, Tensor) else [*zip(x, y)]
        require(
            len(batches) == 1 or (self._unroll and len(batches) > 1),
            f"x must be one batch, got {len(batches)}: only engine 'higher' takes a sequence",
        )
        last, window, carried = self.last, self._window, self._engine.state()
        self._window = None
        try:
            with preserved(self.optimizer, self._eager, self.gamma_net):
                found, hypergradient = self._advance(batches, x_meta, y_meta)
        finally:
            self._engine.release()
            self._engine.load_state(carried)
            self.last, self._window = last, window
        bad = _non_finite(found, _OUTER)
        if bad is not None:
            raise NonFiniteError(bad, found, self.count)
        assert hypergradient is not None
        return hypergradient

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the modules' and optimizers' own states."""
        return {
            "count": self.count,
            "skipped": self.skipped,
            "outer": self.outer.state_dict(),
            "engine": self._engine.state(),
            "window": None if self._window is None else self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.skipped = state["count"], state["skipped"]
        self.outer.load_state_dict(state["outer"])
        self._engine.load_state(state["engine"])
        window = state.get("window")
        if window is not None and self._steps > 1:
            self._window = Window.from_state(window, self.optimizer, self._eager, self.gamma_net)
        else:
            self._window = None

    # -- the step ---------------------------------------------------------------------------------------------

    def _remember(self, x: Tensor, y: Tensor) -> None:
        """Engine "higher" with several steps: start a window at its first step, and add this batch to it."""
        if self._steps == 1 or self.meta_optimizer is None:
            return
        if self.count % self.every == self.every - self._steps:
            self._window = Window(Snapshot(self.optimizer, self._eager, self.gamma_net))
        if self._window is not None:
            self._window.steps.append(
                TrainingStep(x, y, settings_of(self.optimizer), self.epoch, RandomState(x.device))
            )

    def _advance(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        x_meta: Tensor | None,
        y_meta: Tensor | None,
    ) -> tuple[dict[str, float], list[Tensor] | None]:
        """The step of the backbone; the hypergradient through it if there is a meta batch.

        Raises `NonFiniteError` before the step; the outer part's own numbers are for the caller to check.
        """
        for x, y in batches:
            _check_batch(x, y, "")
        if x_meta is None:
            found = [self._plain(x, y) for x, y in batches]
            return found[-1], None
        if y_meta is None:
            raise InputError("y_meta must be given with x_meta")
        _check_batch(x_meta, y_meta, "_meta")
        if self._unroll:
            settings = settings_of(self.optimizer)
            window = self._window or Window(None, [TrainingStep(x, y, settings, self.epoch) for x, y in batches])
            value, hypergradient, meta_logits = self._unrolled(window, x_meta, y_meta)
            found = [self._plain(x, y) for x, y in batches]
        else:
            if not self._checked:
                self._engine.check(batches[0][0][:2])
                self._checked = True
            found = [self._plain(*batches[0], keep=True)]
            value, hypergradient, meta_logits = self._outer_part(found[-1], x_meta, y_meta)
        assert self.last is not None
        self.last.meta_logits, self.last.meta_labels = meta_logits, y_meta
        found[-1].update(_read({"outer": value, "hypergradient_norm": total_norm(hypergradient)}))
        return found[-1], hypergradient

    def _plain(self, x: Tensor, y: Tensor, keep: bool = False) -> dict[str, float]:
        """The training step of the backbone. `keep`: an outer part follows, and what it needs is kept."""
        undo = _Undo(self._eager, self.gamma_net)
        mixed = torch.autocast(x.device.type, self.autocast) if self.autocast is not None else nullcontext()
        with mixed, _Layer(self._eager, getattr(self.gamma_net, "layer", None)) as layer:
            logits, features = self._engine.forward(x) if keep else call(self.backbone, x)
        seen = features if layer.name is None else layer.features(len(x))
        gamma = self._gamma(x, y, logits, seen, self.epoch, grad=keep)
        losses = self.loss(logits, y) if gamma is None else self.loss(logits, y, gamma.detach())
        terms = {"loss": losses.mean()}
        buffers = buffers_of(self._eager) if self.penalties else {}
        total = self._with_penalties(terms, self.backbone, x, y, logits, features)
        self.last = Last(
            logits.detach(),
            y,
            None if features is None else features.detach(),
            None if gamma is None else gamma.detach(),
        )

        self.optimizer.zero_grad(set_to_none=True)
        if keep:
            self._engine.backward(total, logits, penalised=bool(self.penalties))
        else:
            total.backward()
        if self.penalties:
            # a penalty's own forwards count for nothing in BatchNorm's statistics; autograd reads the buffers
            # until here
            restore_buffers(self._eager, buffers)
        if self.clip_norm is None:
            norm = total_norm([p.grad for p in self.params if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)

        # the one wait for the device before the step
        values = {**terms, "grad_norm": norm}
        if gamma is not None:
            values["gamma_mean"] = gamma.mean()
        found = _read(values)
        bad = _non_finite(found, tuple(found))
        if bad is not None:
            undo()
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(bad, found, self.count)
        if keep:
            clipped = None
            if self.clip_norm is not None and clips(found["grad_norm"], self.clip_norm):
                clipped = kept_gradients(self.optimizer, self.params)
            self._kept = (logits.detach(), y, gamma, transposed_update(self.optimizer, self.params), clipped)
            self._engine.keep()
        self.optimizer.step()
        return found

    def _outer_part(
        self, found: dict[str, float], x_meta: Tensor, y_meta: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """M at the new parameters, dM/dφ through the step just taken, and the meta batch's logits."""
        logits, y, gamma, transpose, clipped = self._kept
        self._kept = None
        # batch statistics as in training; the buffers and the random stream are not touched
        with self._engine.aside(x_meta.device):
            meta_logits = _full(call(self._eager, x_meta, buffers_of(self._eager))[0])
        value = self.outer(meta_logits, y_meta)
        cotangents: list[Tensor | None] = [None] * len(self.params)
        if value.requires_grad:
            cotangents = list(torch.autograd.grad(value, self.params, allow_unused=True))
        cotangents, factor = transpose(cotangents)
        if clipped is not None and self.clip_norm is not None:
            factor *= transposed_clip(clipped, found["grad_norm"], self.clip_norm, cotangents)
            del clipped
        product = self._engine.product(cotangents)

        # ∂/∂φ of 1/n Σ_i ⟨∂ℓ_i/∂z_i (γ_i), (J v)_i⟩: a backward through N × K numbers and the gamma source
        z = logits.to(product.dtype).requires_grad_()
        (slope,) = torch.autograd.grad(self.loss(z, y, gamma).mean(), z, create_graph=True)
        grads = torch.autograd.grad((slope * product).sum() * factor, self.meta_params, allow_unused=True)
        hypergradient = [torch.zeros_like(p) if g is None else g for p, g in zip(self.meta_params, grads)]
        return value.detach(), hypergradient, meta_logits.detach()

    def _unrolled(self, window: Window, x_meta: Tensor, y_meta: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """As `_outer_part`, by unrolling the steps of a window, whose last one is about to be taken."""
        require(
            getattr(self.gamma_net, "layer", None) is None,
            "gamma_net cannot read an inner layer with engine 'higher', use engine 'forward'",
        )
        kept: list[Tensor] = []

        def inner(model: nn.Module, i: int) -> Tensor:
            step = window.steps[i]
            x, y = step.x, step.y
            if step.random is not None:
                step.random.restore()
            logits, features = call(model, x)
            gamma = self._gamma(x, y, logits, features, step.epoch, grad=True)
            return self._with_penalties({"loss": self.loss(logits, y, gamma).mean()}, model, x, y, logits, features)

        def outer(model: nn.Module) -> Tensor:
            meta_logits = _full(call(model, x_meta)[0])
            kept.append(meta_logits.detach())
            return self.outer(meta_logits, y_meta)

        with preserved(self.optimizer, self._eager, self.gamma_net):
            if window.start is not None:
                window.start.restore()
            value, grads = unrolled_gradient(
                self._eager,
                self.optimizer,
                [step.settings for step in window.steps],
                inner,
                outer,
                self.meta_params,
                self.clip_norm,
            )
        return value, grads, kept[0]

    def _gamma(
        self, x: Tensor, y: Tensor, logits: Tensor, seen: Tensor | None, epoch: float, grad: bool
    ) -> Tensor | None:
        """The gammas of a training batch, a graph into φ if `grad`; the source observes the batch."""
        if self.gamma_net is None:
            return None
        seen = None if seen is None else seen.detach()
        context = {"logits": logits.detach(), "labels": y, "inputs": x, "epoch": epoch}
        with torch.set_grad_enabled(grad):
            observe = getattr(self.gamma_net, "observe", None)
            if observe is not None:
                observe(seen, **context)
            return self.gamma_net(seen, **context)

    def _with_penalties(
        self,
        terms: dict[str, Tensor],
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        logits: Tensor,
        features: Tensor | None,
    ) -> Tensor:
        """The inner objective; each penalty is added to `terms`, unweighted."""
        total = terms["loss"]
        for name, (penalty, weight) in self.penalties.items():
            terms[f"penalty/{name}"] = penalty(model, x, y, logits, features)
            total = total + weight * terms[f"penalty/{name}"]
        return total


_QUANTITY = {
    "grad_norm": "gradient norm",
    "hypergradient_norm": "hypergradient norm",
    "outer": "outer loss",
    "gamma_mean": "gamma",
}


_OUTER = ("outer", "hypergradient_norm")


def _non_finite(found: dict[str, float], names: Sequence[str]) -> str | None:
    """The first of `names` whose value is not finite."""
    return next((name for name in names if not math.isfinite(found[name])), None)


class _Undo:
    """Writes back the buffers that a training forward has changed, for a step that is not taken."""

    def __init__(self, *modules: nn.Module | None) -> None:
        self.saved = [(module, buffers_of(module)) for module in modules if module is not None]

    def __call__(self) -> None:
        for module, buffers in self.saved:
            restore_buffers(module, buffers)


class _Layer:
    """The output of one module during a forward pass, pooled to `(N, D)`; a name of None catches nothing."""

    def __init__(self, model: nn.Module, name: str | None) -> None:
        self.model, self.name = model, name
        self.output: Tensor | None = None

    def __enter__(self) -> _Layer:
        if self.name is not None:
            self._hook = self.model.get_submodule(self.name).register_forward_hook(self._catch)
        return self

    def __exit__(self, *error: object) -> None:
        if self.name is not None:
            self._hook.remove()

    def _catch(self, module: nn.Module, args: Any, output: object) -> None:
        self.output = pool(output.detach() if isinstance(output, Tensor) else output, self.name)

    def features(self, n: int) -> Tensor:
        """What was caught, for a batch of n."""
        require(self.output is not None, f"layer {self.name!r} is not run in the backbone's forward pass")
        assert self.output is not None
        require(
            len(self.output) == n,
            f"layer {self.name!r} must give one output per sample, got {len(self.output)} for {n} samples",
        )
        return self.output


def _full(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _read(values: dict[str, Tensor]) -> dict[str, float]:
    """Several 0-d tensors as floats, with one transfer."""
    return dict(zip(values, torch.stack([v.detach().double() for v in values.values()]).tolist()))


def _check_batch(x: Tensor, y: Tensor, suffix: str) -> None:
    require(
        y.dim() == 1 and y.dtype == torch.int64, f"y{suffix} must be int64 labels (N,), got {y.dtype} {tuple(y.shape)}"
    )
    require(
        len(x) == len(y) and len(y) > 0,
        f"x{suffix} and y{suffix} must hold the same number of samples, at least one, got {len(x)} and {len(y)}",
    )
