"""`MetaStep`: one training step of the backbone and of the gamma source that learns through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metacal.bilevel.engines import ENGINES, Mark, call
from metacal.bilevel.inner import Inner, Kept, Last, Mix, NonFiniteError, check_batch, non_finite, read
from metacal.bilevel.state import RandomState, Snapshot, buffers_of, preserved
from metacal.bilevel.unrolled import HIGHER, check_unrollable, unrolled_gradient
from metacal.bilevel.window import TrainingStep, Window, settings_of
from metacal.calibration.surrogates import Outer, build_outer
from metacal.errors import InputError, require
from metacal.objective import Loss, Penalty, Term, build_loss, build_penalties
from metacal.optim.transpose import Cotangents, check_supported, total_norm, transposed_clip

__all__ = ["Last", "MetaStep", "NonFiniteError"]


class MetaStep:
    """One training step of the backbone and of what sets its gammas, for a loop of one's own.

        z, h = backbone(x);  γ = gamma_net(h);  g = ∇_θ [mean ℓ(z, y, γ) + Σ λ_j R_j]
        θ' = the optimizer's step with g, clipped
        dM/dφ of M = outer(backbone at θ'(φ) on the meta batch), through that very step;  φ' = meta_optimizer's step

    Args:
        backbone: returns `(logits, features)`, or logits alone if no source needs features.
        optimizer: the backbone's. Steps with an outer part know SGD, Adam and AdamW of torch.optim, and Muon, SAM and
            BulkSGD of metacal.optim, SAM's perturbation and BulkSGD's projection held constant; other steps any.
        gamma_net: a gamma source of `metacal.gamma`, or None for a loss without gamma.
        meta_optimizer: any optimizer over gamma_net's parameters, or None if it has none.
        outer: name, weights by name or callable `(logits, labels) -> scalar`, as `build_outer` takes it.
        engine: "forward", "difference", "reverse" or "higher"; see `metacal.bilevel.engines` and `unrolled`.
        loss: name in `metacal.losses.LOSSES` or callable `(logits, labels[, gamma]) -> (N,)`.
        penalties: `{name: weight}` of `metacal.penalties.PENALTIES`, `{name: (callable, weight)}` or
            `{name: metacal.objective.Term}`.
        clip_norm: limit on the norm of the whole gradient.
        autocast: dtype of the training forward, e.g. torch.bfloat16; the outer part keeps the parameters' precision.
        every: the outer part belongs to every so many-th step; other steps ignore their meta batch.
        nonfinite: "raise" `NonFiniteError` before the optimizer has changed anything, or "skip" the step and count it
            in `skipped`. A non-finite outer loss or hypergradient shows only after the backbone's step, which stays
            and counts; the gamma source stays as it was.
        engine_options: forward: `reuse` (True); difference: `relative` (2e-3), `central` (False); higher: `steps` (1),
            how many steps before each outer one are unrolled, at most `every`.
        chunk: take a larger batch in parts of so many samples, one step on the gradient of the whole: the same step
            in less memory. Only with engine "forward", and without penalties that are no mean over samples.
        mix: `(x, y, step) -> (x_mixed, y, y_other, weight)` for training batches: the loss is then
            weight · ℓ(y) + (1 − weight) · ℓ(y_other), while sources, penalties and `last` have y as the labels.

    Attributes: `epoch`, may be fractional, which the loop sets and gamma sources read; `count`, steps so far;
    `skipped`; `last`.
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
        penalties: Mapping[str, float | tuple[Penalty, float] | Term] | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        every: int = 1,
        nonfinite: str = "raise",
        engine_options: Mapping[str, Any] | None = None,
        chunk: int | None = None,
        mix: Mix | None = None,
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
        self.clip_norm, self.every, self.nonfinite, self.chunk = clip_norm, every, nonfinite, chunk
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
        require(
            mix is None or (chunk is None and not self._unroll),
            "mix does not go with chunk or engine 'higher': leave one of them out",
        )
        if chunk is not None:
            require(chunk >= 1, f"chunk must be >= 1 or None, got {chunk}")
            require(
                engine == "forward" or meta_optimizer is None, f"chunk needs engine 'forward', got engine {engine!r}"
            )
            for name, term in self.penalties.items():
                require(
                    not getattr(term.penalty, "batchwise", False),
                    f"penalties[{name!r}] is no mean over samples, so a batch cannot be taken in chunks, "
                    f"got chunk {chunk}",
                )
            options.setdefault("reuse", False)  # what to reuse would be the activations of the whole batch
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
        self._inner = Inner(
            self.backbone,
            self._eager,
            self.params,
            optimizer,
            gamma_net,
            self.loss,
            self.penalties,
            self._engine,
            clip_norm,
            autocast,
            chunk,
            mix,
        )
        self._window: Window | None = None
        self.epoch: float = 0
        self.count = 0
        self.skipped = 0
        self.last: Last | None = None
        self._kept: Kept | None = None
        self._checked = False

    @property
    def due(self) -> bool:
        """Whether the coming step has an outer part, and so needs a meta batch."""
        return self.meta_optimizer is not None and (self.count + 1) % self.every == 0

    def check(self, x: Tensor, y: Tensor) -> None:
        """Compute every penalty and its gradient once on `(x, y)`, a few samples, and change nothing.

        Raises what a penalty raises for a network or inputs that it cannot work on (`InputError`).
        """
        with preserved(self.optimizer, self._eager, self.gamma_net):
            self._inner.check(x, y)

    def detail(self) -> None:
        """Let each penalty, the next time that it is computed, report more than its value: see `step`.

        The gradient norm costs a backward pass of the penalty.
        """
        self._inner.details.update(self.penalties)

    def step(
        self, x: Tensor, y: Tensor, x_meta: Tensor | None = None, y_meta: Tensor | None = None
    ) -> dict[str, float]:
        """Train the backbone on `(x, y)` and, where the outer part is due, the gamma source on `(x_meta, y_meta)`.

        Returns loss (mean per-sample loss), grad_norm (before clipping), gamma_mean, `penalty/<name>` unweighted, and
        after an outer part outer and hypergradient_norm. After `detail`: `penalty/<name>_share`, its weighted value
        over the whole objective; `penalty/<name>_grad_norm`, of its weighted gradient; `time/penalty_<name>_ms`. A
        step, or the gamma source's part of one, that is skipped for a non-finite value returns what was found and
        `skipped: 1.0`. Without a meta batch this is the plain training step, operation by operation.
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
            bad = non_finite(found, _OUTER)
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
        details, self._inner.details = self._inner.details, set()
        self._window = None
        try:
            with preserved(self.optimizer, self._eager, self.gamma_net):
                found, hypergradient = self._advance(batches, x_meta, y_meta)
        finally:
            self._engine.release()
            self._engine.load_state(carried)
            self.last, self._window, self._inner.details = last, window, details
        bad = non_finite(found, _OUTER)
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
            "details": sorted(self._inner.details),
            "window": None if self._window is None else self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.skipped = state["count"], state["skipped"]
        self.outer.load_state_dict(state["outer"])
        self._engine.load_state(state["engine"])
        self._inner.details = set(state.get("details", ()))
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
            check_batch(x, y, "")
        if x_meta is None:
            found = [self._plain(x, y) for x, y in batches]
            return found[-1], None
        if y_meta is None:
            raise InputError("y_meta must be given with x_meta")
        check_batch(x_meta, y_meta, "_meta")
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
        found[-1].update(read({"outer": value, "hypergradient_norm": total_norm(hypergradient)}))
        return found[-1], hypergradient

    def _plain(self, x: Tensor, y: Tensor, keep: bool = False) -> dict[str, float]:
        """The training step of the backbone. `keep`: an outer part follows, and what it needs is kept."""
        found, self.last, self._kept = self._inner.step(x, y, self.count, self.epoch, keep)
        return found

    def _outer_part(
        self, found: dict[str, float], x_meta: Tensor, y_meta: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """M at the new parameters, dM/dφ through the step just taken, and the meta batch's logits."""
        kept, self._kept = self._kept, None
        assert kept is not None
        # batch statistics as in training; the buffers and the random stream are not touched
        with self._engine.aside(x_meta.device):
            meta_logits = _full(call(self._eager, x_meta, buffers_of(self._eager))[0])
        value = self.outer(meta_logits, y_meta)
        cotangents: list[Tensor | None] = [None] * len(self.params)
        if value.requires_grad:
            cotangents = list(torch.autograd.grad(value, self.params, allow_unused=True))
        cotangents, factor = kept.transpose(cotangents)
        if kept.clipped is not None and self.clip_norm is not None:
            factor *= transposed_clip(kept.clipped, found["grad_norm"], self.clip_norm, cotangents)
            kept.clipped = None
        if len(kept.marks) == 1:
            product = self._engine.product(cotangents)
        else:
            product = torch.cat([self._product_of_part(mark, cotangents) for mark in kept.marks])

        # ∂/∂φ of 1/n Σ_i ⟨∂ℓ_i/∂z_i (γ_i), (J v)_i⟩: a backward through N × K numbers and the gamma source
        z = kept.logits.to(product.dtype).detach().requires_grad_()
        (slope,) = torch.autograd.grad(kept.losses(z, kept.gamma).mean(), z, create_graph=True)
        grads = torch.autograd.grad((slope * product).sum() * factor, self.meta_params, allow_unused=True)
        hypergradient = [torch.zeros_like(p) if g is None else g for p, g in zip(self.meta_params, grads)]
        return value.detach(), hypergradient, meta_logits.detach()

    def _product_of_part(self, mark: Mark, cotangents: Cotangents) -> Tensor:
        self._engine.resume(mark)
        return self._engine.product(cotangents)

    def _unrolled(self, window: Window, x_meta: Tensor, y_meta: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """As `_outer_part`, by unrolling the steps of a window, whose last one is about to be taken."""
        require(
            getattr(self.gamma_net, "layer", None) is None,
            "gamma_net cannot read an inner layer with engine 'higher', use engine 'forward'",
        )
        kept: list[Tensor] = []
        first = self.count - (0 if self._window is None else len(self._window.steps) - 1)

        def inner(model: nn.Module, i: int) -> Tensor:
            step = window.steps[i]
            x, y = step.x, step.y
            if step.random is not None:
                step.random.restore()
            logits, features = call(model, x)
            gamma = self._inner.gamma(x, y, logits, features, step.epoch, grad=True)
            count = first + i
            loss = self.loss(logits, y, gamma).mean()
            return self._inner.penalised(loss, model, x, y, logits, features, count, step.epoch)

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


_OUTER = ("outer", "hypergradient_norm")


def _full(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
