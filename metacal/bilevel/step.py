"""`MetaStep`: one training step of the backbone and of the gamma source that learns through it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metacal.autodiff.derivatives import naming_reentrant_checkpoints
from metacal.bilevel.build import build_window, check_parameters, check_parts, on_backbone
from metacal.bilevel.engines import ENGINES
from metacal.bilevel.inner import Batch, Gradient, Inner, Last, Mix, check_batch, prepared
from metacal.bilevel.reading import OUTER, Ledger, NonFiniteError, StepReport
from metacal.bilevel.signal import Signal
from metacal.bilevel.state import Gate, Snapshot, Undo, held_on, on_device, preserved, state_tensors
from metacal.bilevel.tangent import TANGENT
from metacal.bilevel.unrolled import HIGHER
from metacal.bilevel.window import OneStep
from metacal.calibration.differentiable import confidences
from metacal.calibration.surrogates import Outer, build_outer
from metacal.errors import InputError, require, require_choice
from metacal.network import Network, on_copies
from metacal.objective import Loss, Penalty, Term, build_loss, build_penalties
from metacal.optim.transpose import check_sparse, check_step_hooks, check_supported, total_norm

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
        engine: "forward", "difference" or "reverse" (`metacal.bilevel.engines`); "tangent", for a gamma_net of few
            parameters, which looks back over all steps with the discount `horizon_decay`; "higher" (`unrolled`).
        loss: name in `metacal.losses.LOSSES` or callable `(logits, labels[, gamma]) -> (N,)`.
        penalties: `{name: weight}` of `metacal.penalties.PENALTIES`, `{name: (callable, weight)}` or
            `{name: metacal.objective.Term}`.
        clip_norm: limit on the norm of the whole gradient.
        autocast: dtype of the training forward, e.g. torch.bfloat16; the outer part keeps the parameters' precision.
        outer_autocast: the meta forward and the J v of engine "forward" have it too; gradients and sums do not.
        every: the outer part belongs to every so many-th step; other steps ignore their meta batch.
        nonfinite: "raise" `NonFiniteError` before the optimizer has changed anything, or "skip" the step and count it
            in `skipped`. A non-finite outer loss or hypergradient shows only after the backbone's step, which stays
            and counts; the gamma source stays as it was. On a GPU, which is not waited for, the error comes one step
            later, names the step that it was, and both have been taken; a skipped step is undone there.
        engine_options: forward: `reuse` (True); difference: `relative` (2e-3), `central` (False); higher: `steps` (1),
            how many steps before each outer one are unrolled, at most `every`.
        chunk: take a larger batch in parts of so many samples, one step on the gradient of the whole: the same step
            in less memory. Only with engine "forward", and without penalties that are no mean over samples.
        horizon: K, the outer part differentiates through the last K steps before it, at most `every`. The gammas read
            each step's features and logits as constants. Needs engine "forward".
        horizon_decay: ρ in (0, 1], a discount on older steps: what reaches φ through j further steps counts ρ^j.
        mix: `(x, y, step) -> (x_mixed, y, y_other, weight)` for training batches: the loss is then
            weight · ℓ(y) + (1 − weight) · ℓ(y_other), while sources, penalties and `last` have y as the labels.
        class_weight: one number > 0 for each class: the mean of the loss is then Σ_i w_{y_i} ℓ_i / Σ_i w_{y_i}, as
            cross_entropy(weight=…) of PyTorch has it. Penalties and the outer objective stay as they are.

    Attributes: `epoch`, may be fractional, which the loop sets and gamma sources read; `count`, steps so far;
    `skipped`; `last`.
    It takes all arguments itself, since it is the one object that a loop of one's own makes.
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
        outer_autocast: bool = False,
        every: int = 1,
        nonfinite: str = "raise",
        engine_options: Mapping[str, Any] | None = None,
        chunk: int | None = None,
        mix: Mix | None = None,
        horizon: int = 1,
        horizon_decay: float = 1.0,
        class_weight: Sequence[float] | Tensor | None = None,
    ) -> None:
        require_choice("engine", engine, (*ENGINES, TANGENT, HIGHER))
        require_choice("nonfinite", nonfinite, ("raise", "skip"))
        require(every >= 1, f"every must be >= 1, got {every}")
        require(clip_norm is None or clip_norm > 0, f"clip_norm must be > 0 or None, got {clip_norm}")
        self.backbone, self.optimizer = backbone, optimizer
        self.gamma_net, self.meta_optimizer = gamma_net, meta_optimizer
        self.clip_norm, self.every, self.nonfinite, self.chunk = clip_norm, every, nonfinite, chunk
        self.network = Network(backbone)
        self.params = self.network.params
        self.meta_params = [] if gamma_net is None else [p for p in gamma_net.parameters() if p.requires_grad]
        check_parameters(self.network, optimizer, gamma_net, meta_optimizer, engine)
        self.outer = outer if isinstance(outer, Outer) else build_outer(outer)
        terms = build_penalties(penalties)
        per_sample, weights = build_loss(loss, gamma_net), on_backbone(self.network, class_weight)
        self.inner = Inner(self.network, per_sample, gamma_net, terms, autocast, mix, weights)
        self.penalties = self.inner.penalties
        check_parts(self.inner, engine, meta_optimizer, chunk)
        self.window = build_window(
            self.inner, optimizer, engine, engine_options, every, horizon, horizon_decay, chunk, clip_norm,
            self.meta_params,
        )  # fmt: skip
        self.engine = self.window.engine
        self.engine.outer_autocast = outer_autocast and autocast is not None
        self.epoch: float = 0
        self.count = 0
        self.signal = Signal()
        self.last: Last | None = None
        self._taken = self._tried = False  # whether a step, and an outer part, has gone through
        self._ledger = Ledger(nonfinite == "skip")

    @property
    def due(self) -> bool:
        """Whether the coming step has an outer part, and so needs a meta batch."""
        return self.meta_optimizer is not None and (self.count + 1) % self.every == 0

    @property
    def _in_window(self) -> bool:
        """Whether the coming step is among the last ones before an outer part that it is differentiated through."""
        return self.count % self.every >= self.every - self.window.steps

    @property
    def resting(self) -> bool:
        """Whether a checkpoint can be made here: a window of several steps that is under way is in none."""
        return self.window.empty

    @property
    def skipped(self) -> int:
        """Steps that were left out so far. On a GPU this waits for it."""
        return self._ledger.skipped

    def conclude(self) -> None:
        """Wait for the last step, and raise the error that the next one would raise of it."""
        self._ledger.conclude()

    def check(self, x: Tensor, y: Tensor) -> None:
        """Compute every penalty and its gradient once on `(x, y)`, a few samples, and change nothing.

        Raises what a penalty raises for a network or inputs that it cannot work on (`InputError`).
        """
        with preserved(self.optimizer, self.network.model, self.gamma_net):
            self.inner.check(x, y)

    def detail(self) -> None:
        """Let each penalty, the next time that it is computed, report more than its value: see `step`.

        The gradient norm costs a backward pass of the penalty.
        """
        self.inner.details.update(self.inner.penalties)

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor, x_meta: Tensor | None = None, y_meta: Tensor | None = None) -> StepReport:
        """Train the backbone on `(x, y)` and, where the outer part is due, the gamma source on `(x_meta, y_meta)`.

        Returns numbers by name, which on a GPU are fetched when one of them is looked at (`StepReport`): loss (mean
        per-sample loss), grad_norm (before clipping), gamma_mean, `penalty/<name>` unweighted, and after an outer part
        outer, hypergradient_norm, its signal-to-noise ratio hypergradient_snr (`signal.Signal`) and meta_gap, the mean
        confidence less the accuracy of the meta batch. After `detail`: `penalty/<name>_share`, its weighted value over
        the whole objective; `penalty/<name>_grad_norm`, of its weighted gradient; `time/penalty_<name>_ms`. A step, or
        the gamma source's part of one, that is skipped for a non-finite value returns what was found and
        `skipped: 1.0`, which on a GPU is there, and 0, for other steps too. Without a meta batch this is the plain
        training step, operation by operation.

        Raises `InputError` for input, networks and optimizers that it cannot work on, before anything has moved.
        """
        number, due = self.count, self.due
        # an outer part may find something that it cannot differentiate, after the optimizer's step
        safe = due and x_meta is not None and (self.engine.may_refuse or not self._tried)
        before = Snapshot(self.optimizer, self.network.model, self.gamma_net) if safe else None
        self._begin()
        hypergradient, skipped = None, False
        try:
            report, hypergradient = self._advance([(x, y)], x_meta if due else None, y_meta)
        except BaseException as error:
            if before is not None and not isinstance(error, NonFiniteError):
                before.restore()
            if not isinstance(error, NonFiniteError) or self.nonfinite == "raise":
                raise
            report, skipped = StepReport(error.found), True
        self.count += 1
        self._taken |= not skipped
        if due:
            self.window.clear()
        if hypergradient is not None:
            self._tried = True
            try:
                self._ledger.require_finite(report, OUTER, number)
            except NonFiniteError:
                if self.nonfinite == "raise":
                    raise
                skipped = True
        if skipped:
            return self._ledger.skip(report)
        if hypergradient is not None:
            report |= self._learn(hypergradient)
        return self._ledger.close(report)

    def _begin(self) -> None:
        """Decide whether the coming step waits for its numbers; if not, and steps may be skipped, what undoes it."""
        skips = self.nonfinite == "skip"
        on_cpu = self.network.params[0].device.type == "cpu"
        at_once = on_cpu or (skips and not self._undoable())
        self._ledger.open(at_once, () if at_once or not skips else self._gates())
        # the first outer part proves that its pass can be repeated, before that is relied on
        self.engine.unproven = self._ledger.checks if self._tried and not at_once else None

    def _undoable(self) -> bool:
        """Whether all that a step changes lies in tensors on the device, which exist already."""
        device = self.network.params[0].device
        one_step = isinstance(self.window, OneStep)  # a longer window would hold the step that was not
        return (
            self._taken
            and (self._tried or not self.due)
            and held_on(device, self.optimizer)
            and (self.meta_optimizer is None or (one_step and held_on(device, self.meta_optimizer)))
            and self.outer.bank is None
        )

    def _gates(self) -> list[Gate]:
        """For what the training batch changes, and for what the meta batch does."""
        modules = [module for module in (self.network.model, self.gamma_net) if module is not None]
        training = [*self.network.params, *(b for m in modules for b in m.buffers()), *state_tensors(self.optimizer)]
        outer = [*self.meta_params, *self.signal.tensors]
        if self.meta_optimizer is not None:
            outer += state_tensors(self.meta_optimizer)
        return [Gate(training), Gate(outer)]

    def hypergradient(
        self, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor], x_meta: Tensor, y_meta: Tensor
    ) -> list[Tensor]:
        """dM/dφ, one tensor per parameter of gamma_net, of the step that `step` would take. Changes nothing.

        With a horizon, or with engine "higher", x and y may be sequences of batches: dM/dφ through one step on each, in
        their order.
        """
        require(bool(self.meta_params), "gamma_net must have parameters to learn, it has none")
        check_supported(self.optimizer)
        batches = [(x, y)] if isinstance(x, Tensor) and isinstance(y, Tensor) else [*zip(x, y)]
        require(
            len(batches) == 1 or (len(batches) > 1 and not isinstance(self.window, OneStep)),
            f"x must be one batch, got {len(batches)}: a sequence needs a horizon > 1 or engine 'higher'",
        )
        last, carried, details, window = self.last, self.engine.state(), self.inner.details, self.window
        self.inner.details, self.window = set(), copy.copy(window)
        self._ledger.open(at_once=True)
        self.engine.unproven = None
        self.window.clear()
        try:
            with preserved(self.optimizer, self.network.model, self.gamma_net):
                report, hypergradient = self._advance(batches, x_meta, y_meta)
        finally:
            self.engine.load_state(carried)
            self.last, self.inner.details, self.window = last, details, window
        self._ledger.require_finite(report, OUTER, self.count)
        assert hypergradient is not None
        return hypergradient

    @naming_reentrant_checkpoints()
    def _advance(
        self, batches: Sequence[tuple[Tensor, Tensor]], x_meta: Tensor | None, y_meta: Tensor | None
    ) -> tuple[StepReport, list[Tensor] | None]:
        """The step of the backbone; the hypergradient through it if there is a meta batch.

        Raises `NonFiniteError` before the step; the outer part's own numbers are for the caller to check.
        """
        for x, y in batches:
            check_batch(x, y, "")
        if x_meta is not None:
            if y_meta is None:
                raise InputError("y_meta must be given with x_meta")
            check_batch(x_meta, y_meta, "_meta")
        kept = x_meta is not None or (self.meta_optimizer is not None and self.window.steps > 1 and self._in_window)
        for i, (x, y) in enumerate(batches):
            report = self._train(x, y, kept, self.count + i)
        if x_meta is None or y_meta is None:
            return report, None
        value, hypergradient, *meta = self.window.outer_part(self.outer, x_meta, y_meta, self.meta_params)
        assert self.last is not None
        self.last.meta_logits, self.last.meta_labels = meta
        report |= {"outer": value, "hypergradient_norm": total_norm(hypergradient)}
        return report, hypergradient

    def _train(self, x: Tensor, y: Tensor, kept: bool, count: int) -> StepReport:
        """θ' = U(θ, g) with g = ∇_θ L, clipped. Returns what was found; `kept`: the step belongs to the window.

        Raises `NonFiniteError`, and whatever a term refuses, with everything as it was.
        """
        undo = Undo(x.device, self.network.model, self.gamma_net)
        if kept:
            check_step_hooks(self.optimizer)
            self.window.begin(x, y, count, self.epoch)
        try:
            batch = self.inner.batch(x, y, count, self.epoch)
            gradient, report = self._gradient(batch, kept and self.window.records)
            self._ledger.require_finite(report, [name for name in report if not name.endswith("_share")], count)
            report |= prepared(self.optimizer, batch, self.chunk)
            if kept:
                self.window.note(gradient, report["grad_norm"] if self._ledger.at_once else report.raw["grad_norm"])
        except BaseException as error:
            # a step that is left out has drawn its random numbers, as it would have in any case
            undo(streams=not isinstance(error, NonFiniteError))
            if kept:
                self.window.drop()
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self.optimizer.step()
        self.last = gradient.last
        return report

    def _gradient(self, batch: Batch, record: bool) -> tuple[Gradient, StepReport]:
        """The clipped gradient in `.grad`, and all numbers of it.

        SAM's is that of a second pass, at parameters moved along the first gradient; the first one moves the buffers.
        """
        optimizer: Any = self.optimizer
        perturbs = hasattr(optimizer, "perturb")
        optimizer.zero_grad(set_to_none=True)
        gradient = self.inner.gradient(batch, self.engine, record and not perturbs, self.chunk)
        check_sparse(optimizer, dict(zip(self.network.names, self.params)))
        if perturbs:
            optimizer.perturb()
            try:
                optimizer.zero_grad(set_to_none=True)
                with on_copies(self.network.model):
                    second = self.inner.gradient(batch, self.engine, record, self.chunk, observe=False)
                gradient = replace(second, terms=gradient.terms, last=gradient.last)
                if record:
                    self.engine.hold()
            finally:
                optimizer.restore()
        elif record:
            self.engine.hold()
        if self.clip_norm is None:
            norm = total_norm([p.grad for p in self.params if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)
        return gradient, StepReport({**gradient.terms, "grad_norm": norm})

    def _learn(self, hypergradient: list[Tensor]) -> dict[str, Tensor]:
        """The gamma source's own step, and the outer objective's note of the meta batch. Returns what was found."""
        assert self.meta_optimizer is not None and self.last is not None
        for p, h in zip(self.meta_params, hypergradient):
            p.grad = h
        self.meta_optimizer.step()
        self.meta_optimizer.zero_grad(set_to_none=True)
        if (settle := getattr(self.gamma_net, "settle", None)) is not None:
            settle()
        assert self.last.meta_logits is not None and self.last.meta_labels is not None
        logits, labels = self.last.meta_logits, self.last.meta_labels
        self.outer.update(logits, labels)
        confidence, correct = confidences(logits, labels)
        gap = (confidence - correct).mean()
        return {"hypergradient_snr": self.signal.add(hypergradient), "meta_gap": gap}

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the modules' and optimizers' own states."""
        return {
            "count": self.count,
            "skipped": self.skipped,
            "outer": self.outer.state_dict(),
            "engine": self.engine.state(),
            "details": sorted(self.inner.details),
            "window": self.window.state_dict(),
            "signal": self.signal.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, on whatever device its tensors are."""
        device = self.params[0].device
        self.count = state["count"]
        self._ledger.load(state["skipped"])
        self.outer.load_state_dict(on_device(state["outer"], device))
        self.engine.load_state(state["engine"])
        self.inner.details = set(state.get("details", ()))
        self.window.load_state_dict(state.get("window"))
        if "signal" in state:  # a checkpoint of an older version has none
            self.signal.load_state_dict(on_device(state["signal"], device))
