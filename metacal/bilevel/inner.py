"""The training step of the backbone: forward, gammas, penalties, backward, clipping and the optimizer's step.

`MetaStep` takes it and, where an outer part is due, goes on from what it has `Kept`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metacal.bilevel.engines import Mark, Step, call
from metacal.bilevel.penalty_report import PenaltyReport
from metacal.bilevel.state import buffers_of, restore_buffers
from metacal.curvature.problem import coupling_layer
from metacal.errors import InputError, require
from metacal.gamma import pool
from metacal.mixing import mixed_loss
from metacal.objective import Loss, Term
from metacal.optim.sam import unchanged_buffers
from metacal.optim.transpose import Cotangents, clips, kept_gradients, total_norm, transposed_update

__all__ = ["Inner", "Kept", "Last", "Mix", "NonFiniteError", "check_batch", "non_finite", "read"]

Mix = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, float]]
"""`(x, y, step) -> (x_mixed, y, y_other, weight)`, as `metacal.mixing.mixup` gives."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or hypergradient that is infinite or not a number.

    `quantity` says which and `value` what it is, `found` holds all numbers of the `step` by name.
    """

    def __init__(self, name: str, found: dict[str, float], step: int) -> None:
        quantity, value = _QUANTITY.get(name, name), found[name]
        super().__init__(f"non-finite {quantity} ({value}) at step {step}")
        self.quantity, self.value, self.found, self.step = quantity, value, found, step


_QUANTITY = {
    "grad_norm": "gradient norm",
    "hypergradient_norm": "hypergradient norm",
    "outer": "outer loss",
    "gamma_mean": "gamma",
}


@dataclass
class Last:
    """What monitors may want of the last step, detached and on the device: reading it waits for nothing."""

    logits: Tensor
    labels: Tensor
    features: Tensor | None
    gamma: Tensor | None
    meta_logits: Tensor | None = None
    meta_labels: Tensor | None = None


@dataclass
class Kept:
    """What the outer part needs of a training step: losses(logits, gamma) is what φ enters, a graph in gamma.

    transpose: of the optimizer's step; clipped: the gradients after clipping, where it shortened them; marks: of the
    parts that the batch was taken in.
    """

    logits: Tensor
    gamma: Tensor | None
    losses: Callable[[Tensor, Tensor | None], Tensor]
    transpose: Callable[[Cotangents], tuple[Cotangents, float]]
    clipped: Cotangents | None
    marks: list[Mark]


class Inner:
    """One training step at a time; `penalties`, `loss` and the rest are `MetaStep`'s arguments.

    Attributes: `details`, names of penalties whose share of the objective, gradient norm and time the next step that
    computes them also reports.
    """

    def __init__(
        self,
        backbone: nn.Module,
        eager: nn.Module,
        params: Sequence[Tensor],
        optimizer: Optimizer,
        source: nn.Module | None,
        loss: Loss,
        penalties: Mapping[str, Term],
        engine: Step,
        clip_norm: float | None,
        autocast: torch.dtype | None,
        chunk: int | None,
        mix: Mix | None,
    ) -> None:
        self.backbone, self.eager, self.params, self.optimizer = backbone, eager, list(params), optimizer
        self.source, self.loss, self.penalties, self.engine = source, loss, dict(penalties), engine
        self.clip_norm, self.autocast, self.chunk, self.mix = clip_norm, autocast, chunk, mix
        self._other: tuple[Tensor, float] | None = None  # of a mixed batch: the other labels, the weight of the first
        self.details: set[str] = set()

    def step(self, x: Tensor, y: Tensor, count: int, epoch: float, keep: bool) -> tuple[dict[str, float], Last, Any]:
        """The step on `(x, y)`, number `count`. Returns what it found, `Last` and, with `keep`, a `Kept`.

        Raises `NonFiniteError` with parameters, buffers and the optimizer's state as they were.
        """
        self._other = None
        if self.mix is not None:
            x, y, other, weight = self.mix(x, y, count)
            self._other = (other, weight)
        undo = _Undo(self.eager, self.source)
        try:
            return self._step(x, y, count, epoch, keep)
        except BaseException:  # a penalty that refuses its input, a number that is not finite: no step was taken
            undo()
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def _step(self, x: Tensor, y: Tensor, count: int, epoch: float, keep: bool) -> tuple[dict[str, float], Last, Any]:
        optimizer: Any = self.optimizer
        perturbs = hasattr(optimizer, "perturb")
        terms, last, passed = self._gradients(x, y, count, epoch, keep and not perturbs)
        if perturbs:
            # SAM: the gradient that counts is that of a second pass, at parameters moved along the first one. The
            # running statistics are those of the pass at θ.
            with unchanged_buffers(self.eager):
                optimizer.perturb()
                try:
                    _, _, passed = self._gradients(x, y, count, epoch, keep, observe=False)
                    if keep:
                        self.engine.keep()
                finally:
                    optimizer.restore()
        if self.clip_norm is None:
            norm = total_norm([p.grad for p in self.params if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)

        # the one wait for the device before the step
        found = read({**terms, "grad_norm": norm})
        bad = non_finite(found, [name for name in found if not name.endswith("_share")])
        if bad is not None:
            raise NonFiniteError(bad, found, count)
        if hasattr(optimizer, "prepare") and optimizer.prepare(x, y, self.chunk):
            found |= {
                "bulk_sgd/eigenvalue": optimizer.eigenvalues[0],
                "bulk_sgd/products": float(optimizer.products),
                "bulk_sgd/converged": float(optimizer.converged),
            }
        kept = None
        if keep:
            clipped = None
            if self.clip_norm is not None and clips(found["grad_norm"], self.clip_norm):
                clipped = kept_gradients(self.optimizer, self.params)
            logits, gamma, marks = passed
            transpose = transposed_update(self.optimizer, self.params)
            kept = Kept(logits, gamma, lambda z, g: self.losses(z, y, g), transpose, clipped, marks)
            if not perturbs:
                self.engine.keep()
        self.optimizer.step()
        return found, last, kept

    def check(self, x: Tensor, y: Tensor) -> None:
        """Compute every penalty and its gradient once."""
        for term in self.penalties.values():
            logits, features, _ = self._forward(x, keep=False)
            value = term.penalty(self.backbone, x, y, logits, features)
            if value.requires_grad:
                torch.autograd.grad(value, self.params, allow_unused=True)

    def losses(self, logits: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        """The loss of each sample `(N,)`, of the present step's mixture where batches are mixed."""
        rest = () if gamma is None else (gamma,)
        if self._other is None:
            return self.loss(logits, y, *rest)
        other, weight = self._other
        return mixed_loss(self.loss, logits, y, other, weight, *rest)

    def gamma(
        self,
        x: Tensor,
        y: Tensor,
        logits: Tensor,
        seen: Tensor | None,
        epoch: float,
        grad: bool,
        observe: bool = True,
    ) -> Tensor | None:
        """The gammas of a training batch, a graph into φ if `grad`; with `observe` the source takes note of it."""
        if self.source is None:
            return None
        seen = None if seen is None else seen.detach()
        context = {"logits": logits.detach(), "labels": y, "inputs": x, "epoch": epoch}
        with torch.set_grad_enabled(grad):
            watch = getattr(self.source, "observe", None)
            if observe and watch is not None:
                watch(seen, **context)
            return self.source(seen, **context)

    def penalised(
        self,
        loss: Tensor,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        logits: Tensor,
        features: Tensor | None,
        count: int,
        epoch: float,
        report: PenaltyReport | None = None,
        start: int = 0,
    ) -> Tensor:
        """The inner objective: the mean loss and the penalties that are due, each told to `report`.

        start: the place of the first of these samples in the batch.
        """
        total = loss
        for name, term in self.penalties.items():
            weight = term.weight_at(count, epoch)
            if weight == 0:
                continue
            if hasattr(term.penalty, "step"):
                term.penalty.step = count
            if hasattr(term.penalty, "offset"):
                term.penalty.offset = start
            if report is not None and name in report.details and loss.is_cuda:
                torch.cuda.synchronize(loss.device)
            began = time.perf_counter()
            value = term.penalty(model, x, y, logits, features)
            total = total + weight * value
            if report is not None:
                report.add(name, value, weight / term.every, began)
        return total

    def _gradients(
        self, x: Tensor, y: Tensor, count: int, epoch: float, keep: bool, observe: bool = True
    ) -> tuple[dict[str, Tensor], Last, tuple[Tensor, Tensor | None, list[Mark]]]:
        """Set `.grad` to the gradient of the inner objective, over the batch in parts of at most `chunk` samples.

        Returns the numbers to report, `Last`, and the logits, gammas (a graph into φ with `keep`) and marks.
        """
        parts = [(x, y)] if self.chunk is None else [*zip(x.split(self.chunk), y.split(self.chunk))]
        if len(parts) > 1:
            _check_divisible(self.eager, len(x), self.chunk)
            if observe and hasattr(self.source, "observe"):
                self._observe(parts, epoch)
                observe = False
        self.optimizer.zero_grad(set_to_none=True)
        report = PenaltyReport(self.engine.leaves(), self.details)
        outputs: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        marks, loss, start = [], torch.zeros(()), 0
        for x_i, y_i in parts:
            share = len(x_i) / len(x)
            logits, features, seen = self._forward(x_i, keep)
            gamma = self.gamma(x_i, y_i, logits, seen, epoch, grad=keep, observe=observe)
            mean = self.losses(logits, y_i, None if gamma is None else gamma.detach()).mean()
            buffers = buffers_of(self.eager) if self.penalties else {}
            report.share = share
            total = self.penalised(mean, self.backbone, x_i, y_i, logits, features, count, epoch, report, start)
            if share < 1:
                mean, total = share * mean, share * total
            if keep:
                self.engine.backward(total, logits, penalised=bool(self.penalties))
            else:
                total.backward()
            if self.penalties:
                # a penalty's own forwards count for nothing in BatchNorm's statistics; autograd reads the buffers
                # until here
                restore_buffers(self.eager, buffers)
            loss = mean.detach() if share == 1 else loss.to(mean.device) + mean.detach()
            start += len(x_i)
            marks.append(self.engine.mark())
            outputs.append((logits.detach(), None if features is None else features.detach(), gamma))
        whole, features, gamma = (_joined([o[i] for o in outputs]) for i in range(3))
        assert whole is not None
        terms = {"loss": loss, **report.values(loss)}
        if gamma is not None:
            terms["gamma_mean"] = gamma.mean()
        self.details -= report.reported
        last = Last(whole, y, features, None if gamma is None else gamma.detach())
        return terms, last, (whole, gamma, marks)

    def _forward(self, x: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits, features, and what the gamma source looks at."""
        mixed = torch.autocast(x.device.type, self.autocast) if self.autocast is not None else nullcontext()
        with mixed, _Layer(self.eager, getattr(self.source, "layer", None)) as layer:
            logits, features = self.engine.forward(x) if keep else call(self.backbone, x)
        return logits, features, features if layer.name is None else layer.features(len(x))

    @torch.no_grad()
    def _observe(self, parts: Sequence[tuple[Tensor, Tensor]], epoch: float) -> None:
        """Show the whole batch to the gamma source at once: its statistics must not depend on the parts."""
        source: Any = self.source
        found = [self._forward(x, keep=False) for x, _ in parts]
        logits, seen = (_joined([f[i] for f in found]) for i in (0, 2))
        x, y = (torch.cat([part[i] for part in parts]) for i in range(2))
        source.observe(seen, logits=logits, labels=y, inputs=x, epoch=epoch)


def non_finite(found: Mapping[str, float], names: Sequence[str]) -> str | None:
    """The first of `names` whose value is not finite."""
    return next((name for name in names if not math.isfinite(found[name])), None)


def read(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Several 0-d tensors as floats, with one transfer."""
    device = next(iter(values.values())).device
    return dict(zip(values, torch.stack([v.detach().double().to(device) for v in values.values()]).tolist()))


def check_batch(x: Tensor, y: Tensor, suffix: str) -> None:
    """Raise `InputError` unless x and y are a batch; suffix: of their names."""
    require(
        y.dim() == 1 and y.dtype == torch.int64, f"y{suffix} must be int64 labels (N,), got {y.dtype} {tuple(y.shape)}"
    )
    require(
        len(x) == len(y) and len(y) > 0,
        f"x{suffix} and y{suffix} must hold the same number of samples, at least one, got {len(x)} and {len(y)}",
    )


def _check_divisible(model: nn.Module, n: int, chunk: int | None) -> None:
    """The same gradient in parts as in one: not with statistics over the batch."""
    if (found := coupling_layer(model)) is not None:
        name, layer = found
        raise InputError(
            f"chunk must be >= the {n} samples of the batch, got {chunk}: {name} ({type(layer).__name__}) takes "
            "statistics over the batch, so a part of it gives another gradient; use GroupNorm, or one chunk"
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts of a batch as one tensor; None, and a number that holds for every sample, as they are."""
    first = parts[0]
    if len(parts) == 1 or first is None or first.dim() == 0:
        return first
    return torch.cat([p for p in parts if p is not None])


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
