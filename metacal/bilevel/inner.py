"""The inner objective on a training batch: forward, gammas, penalties and the gradient.

    L(θ) = 1/n Σ_i ℓ(z_i(θ), y_i, γ_i) + Σ_j λ_j R_j(θ)

With weights w of the classes the mean is Σ_i w_{y_i} ℓ_i / Σ_i w_{y_i}. γ is a constant in ∇_θ L. `MetaStep` takes the
optimizer's step on that gradient and, where an outer part is due, goes on from the recorded passes.

A batch may be taken in parts, and of several ranks (`metacal.ranks`) each has its share: n_p of the n samples. A part
contributes n_p / n of its own means, so that the sum over parts and ranks is L and ∇_θ L of the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metacal import ranks
from metacal.batchnorm import synchronises
from metacal.bilevel.batch import Batch, Last, joined, last_of, mean_of, penalty_on, sum_gradients
from metacal.bilevel.passes import Engine, Pass, Recorded, unhooked
from metacal.bilevel.penalty_report import PenaltyReport
from metacal.errors import InputError, require
from metacal.gamma import pool
from metacal.losses import classes
from metacal.mixing import mixed_loss
from metacal.network import Network, coupling_layer
from metacal.objective import Loss, Term

__all__ = [
    "Batch",
    "Gradient",
    "Inner",
    "Last",
    "Mix",
    "check_batch",
    "prepared",
    "values_of",
]

Mix = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, float]]
"""`(x, y, step) -> (x_mixed, y, y_other, weight)`, as `metacal.mixing.mixup` gives."""


@dataclass
class Gradient:
    """What a gradient leaves: numbers to report, what monitors see, and for the outer part the recorded passes.

    logits, gamma: of the whole batch, without a graph, and with one into φ if the passes were recorded.
    """

    terms: dict[str, Tensor | float]
    last: Last
    batch: Batch
    logits: Tensor
    gamma: Tensor | None
    runs: list[Recorded]


class Inner:
    """The objective of the training batches of one network.

    Attributes: `details`, names of penalties whose share of the objective, gradient norm and time the next gradient
    that computes them also reports.
    """

    def __init__(
        self,
        network: Network,
        loss: Loss,
        source: nn.Module | None,
        penalties: Mapping[str, Term],
        autocast: torch.dtype | None = None,
        mix: Mix | None = None,
        class_weight: Tensor | None = None,
    ) -> None:
        self.network, self.loss, self.source, self.penalties = network, loss, source, dict(penalties)
        self.autocast, self.mix, self.class_weight = autocast, mix, class_weight
        self.details: set[str] = set()

    def batch(self, x: Tensor, y: Tensor, count: int, epoch: float) -> Batch:
        """The batch as it is trained on: mixed, where batches are. (x, y): this rank's share of it."""
        batch = Batch(x, y, count, epoch) if y.dim() == 1 else Batch(x, classes(y), count, epoch, soft=y)
        if ranks.size() > 1:
            rows = ranks.rows(len(x))
            batch = replace(batch, start=rows.start, total=rows.total, counts=rows.counts)
            require(batch.size > 0, "x and y must hold a sample on one rank at least, got none")
        if batch.soft is not None:
            require(self.mix is None, "y must be class indices (N,) where batches are mixed (mixup), got probabilities")
            require(self.class_weight is None, "y must be class indices (N,) with class_weight, got probabilities")
        if self.mix is not None:
            batch = self._mixed(batch)
        if self.class_weight is None:
            return batch
        y = batch.y
        check_labels(y, self.class_weight)
        of_samples = self.class_weight[y]
        if batch.other is not None:
            of_samples = batch.weight * of_samples + (1 - batch.weight) * self.class_weight[batch.other]
        mean = batch.mean(of_samples)
        ranks.sum_([mean])
        return replace(batch, class_weight=mean)

    def _mixed(self, batch: Batch) -> Batch:
        """A sample's partner may be another rank's."""
        assert self.mix is not None
        here = slice(batch.start, batch.start + len(batch.x))
        x, y = (ranks.gather_rows(t, batch.counts) for t in (batch.x, batch.y))
        x, y, other, weight = self.mix(x, y, batch.count)
        if batch.counts is not None:
            x, y, other = x[here], y[here], other[here]
        return replace(batch, x=x, y=y, other=other, weight=weight)

    # -- the terms -----------------------------------------------------------------------------------------------

    def losses(self, batch: Batch, logits: Tensor, gamma: Tensor | None) -> Tensor:
        """ℓ of each sample `(N,)`, a graph in the logits and in gamma.

        With class weights those of the whole batch are scaled to a mean of 1, so that the mean of these values, over
        parts of the batch too, is Σ_i w_{y_i} ℓ_i / Σ_i w_{y_i}.
        """
        more = () if gamma is None else (gamma,)
        if batch.other is None:
            values = self._of_labels(logits, batch.y if batch.soft is None else batch.soft, *more)
        else:
            values = mixed_loss(self._of_labels, logits, batch.y, batch.other, batch.weight, *more)
        return values if batch.class_weight is None else values / batch.class_weight

    def _of_labels(self, logits: Tensor, labels: Tensor, *more: Tensor) -> Tensor:
        """ℓ of each sample, times the weight of its class."""
        # a view: a hook that the loss registers on it is the loss's own, here and where the outer part calls it again
        values = self.loss(logits.view_as(logits), labels, *more)
        return values if self.class_weight is None else values * self.class_weight[labels].to(values.dtype)

    def gamma(
        self, batch: Batch, logits: Tensor, seen: Tensor | None, grad: bool, observe: bool = True
    ) -> Tensor | None:
        """The gammas of a batch, a graph into φ if `grad`; with `observe` the source takes note of the batch.

        seen: features, or what else the source looks at. They are constants here, as the logits are.
        """
        if self.source is None:
            return None
        seen = None if seen is None else seen.detach()
        context: dict[str, Any] = {"logits": logits.detach(), "labels": batch.y, "inputs": batch.x}
        context["epoch"] = batch.epoch
        if batch.total is not None:
            context |= {"start": batch.start, "total": batch.total}
        with torch.set_grad_enabled(grad):
            if observe:
                self._show(batch, seen, logits.detach())
            return self.source(seen, **context)

    def _show(self, batch: Batch, seen: Tensor | None, logits: Tensor) -> None:
        """Let the source take note of a whole batch, of which this rank has a share: a source's statistics must not
        depend on the parts."""
        watch = getattr(self.source, "observe", None)
        if watch is None:
            return
        labels: Tensor = batch.y
        inputs: Any = batch.x
        if batch.counts is not None:
            features = () if seen is None else (seen,)
            logits, labels, *gathered = ranks.gather_together([logits, labels, *features], batch.counts)
            seen = gathered[0] if gathered else None
            reads = getattr(self.source, "reads_inputs", False)
            inputs = ranks.gather_rows(inputs, batch.counts) if reads else None
        watch(seen, logits=logits, labels=labels, inputs=inputs, epoch=batch.epoch)

    def due(self, batch: Batch) -> dict[str, float]:
        """The penalties that enter the objective of a batch, with their weights there."""
        weights = {name: term.weight_at(batch.count, batch.epoch) for name, term in self.penalties.items()}
        return {name: weight for name, weight in weights.items() if weight != 0}

    def penalised(
        self,
        loss: Tensor,
        batch: Batch,
        model: nn.Module,
        logits: Tensor,
        features: Tensor | None,
        report: PenaltyReport | None = None,
    ) -> Tensor:
        """What a part of a batch adds to the inner objective: its mean loss and the penalties that are due, each told
        to `report`, times its share.

        model: what the penalties run.
        """
        total = loss
        apart = []  # penalties that count by another share
        for name, weight in self.due(batch).items():
            term = self.penalties[name]
            if hasattr(term.penalty, "step"):
                term.penalty.step = batch.count
            if hasattr(term.penalty, "offset"):
                term.penalty.offset = batch.start
            if report is not None and name in report.details and loss.is_cuda:
                torch.cuda.synchronize(loss.device)
            began = time.perf_counter()
            with unhooked(f"penalties[{name!r}]", logits, features):
                value, share = penalty_on(term.penalty, batch, model, logits, features)
            if share == batch.share:
                total = total + weight * value
            else:
                apart.append(weight * share * value)
            if report is not None:
                report.add(name, value, share, weight / term.every, began)
        total = total if batch.share == 1 else batch.share * total
        for value in apart:
            total = total + value
        return total

    # -- the gradient --------------------------------------------------------------------------------------------

    def gradient(
        self, whole: Batch, engine: Engine, record: bool, chunk: int | None = None, observe: bool = True
    ) -> Gradient:
        """Add ∇_θ L to `.grad`, which must be empty, over the batch in parts of at most `chunk` samples, of all ranks.

        record: keep passes and the gammas' graph for an outer part. observe: the gamma source takes note of the batch.
        """
        parts = whole.parts(chunk)
        if len(parts) > 1:
            _check_divisible(self.network.model, whole, chunk)
            if observe and getattr(self.source, "observe", None) is not None:
                self._observe(whole, parts)
                observe = False
        report = PenaltyReport(engine.leaves() if record else self.network.params, self.details)
        sums = None if whole.counts is None else ranks.GradientSums(self.network.params)
        runs, gammas, features = [], [], []
        loss: Tensor | None = None
        for batch in parts:
            run, layer = self._forward(batch.x, engine.record if record else partial(Pass, engine))
            seen = layer.features(run.features, len(batch.x))
            check_labels(batch.y, run.logits)
            if self.class_weight is not None:
                k = run.logits.shape[-1]
                require(
                    len(self.class_weight) == k,
                    f"class_weight must have one number for each of {k} logits, got {len(self.class_weight)}",
                )
            gamma = self.gamma(batch, run.logits, seen, record, observe)
            mean = mean_of(self.losses(batch, run.logits, None if gamma is None else gamma.detach()))
            total = self.penalised(mean, batch, self.network.trained, run.logits, run.features, report)
            # a model that speaks to other ranks itself must not be interrupted
            early = sums is not None and batch is parts[-1] and not synchronises(self.network.model)
            with sums if sums is not None and early else nullcontext():
                run.backward(total, penalised=bool(self.penalties))
            part = mean.detach() if batch.share == 1 else batch.share * mean.detach()
            loss = part if loss is None else loss + part
            runs.append(run)
            gammas.append(gamma)
            features.append(None if run.features is None else run.features.detach())
        logits, gamma = joined([run.logits for run in runs]), joined(gammas)
        assert logits is not None and loss is not None
        gamma_mean = [] if gamma is None else [whole.mean(gamma.detach())]
        if sums is not None:
            loss = loss.clone()
            sum_gradients(self.network.params, sums, [loss, *gamma_mean, *report.tensors()])
        terms: dict[str, Tensor | float] = {"loss": loss, **report.values(loss)}
        if gamma_mean:
            terms["gamma_mean"] = gamma_mean[0]
        self.details.difference_update(report.reported)
        last = last_of(whole, logits, joined(features), None if gamma is None else gamma.detach())
        return Gradient(terms, last, whole, logits, gamma, runs if record else [])

    def check(self, x: Tensor, y: Tensor) -> None:
        """Compute every penalty and its gradient once, each rank by itself."""
        y = classes(y)
        with ranks.alone():
            for term in self.penalties.values():
                if (look := getattr(term.penalty, "look", None)) is not None:
                    look(x)
                logits, features = self.network(x)
                value = term.penalty(self.network.trained, x, y, logits, features)
                if value.requires_grad:
                    torch.autograd.grad(value, self.network.params, allow_unused=True)

    def autocasting(self, x: Tensor) -> AbstractContextManager[Any]:
        """Mixed precision on the device of x, if asked for."""
        return torch.autocast(x.device.type, self.autocast) if self.autocast is not None else nullcontext()

    def _forward(self, x: Tensor, forward: Callable[[Tensor], Any]) -> tuple[Any, _Layer]:
        """`forward(x)`, in mixed precision if asked for, and the layer that the gamma source looks at."""
        with self.autocasting(x), _Layer(self.network.model, getattr(self.source, "layer", None)) as layer:
            return forward(x), layer

    @torch.no_grad()
    def _observe(self, whole: Batch, parts: Sequence[Batch]) -> None:
        """Show a batch in parts to the gamma source at once, by a pass of its own."""
        seen, logits = [], []
        for batch in parts:
            (z, features), layer = self._forward(batch.x, self.network)
            logits.append(z)
            seen.append(layer.features(features, len(z)))
        self._show(whole, joined(seen), torch.cat(logits))


@torch.no_grad()
def values_of(source: nn.Module, network: Network, x: Tensor, y: Tensor, epoch: float) -> Tensor:
    """What the source gives for samples in the network's present mode, `(N,)` or 0-d. Neither takes note of them."""
    with _Layer(network.model, getattr(source, "layer", None)) as layer:
        logits, features = network.aside(x)
    return source(layer.features(features, len(x)), logits=logits, labels=y, inputs=x, epoch=epoch)


def prepared(optimizer: Any, batch: Batch, chunk: int | None) -> dict[str, float]:
    """What an optimizer computes of a batch before its step (BulkSGD's eigenvectors), and what it tells."""
    if not (hasattr(optimizer, "prepare") and optimizer.prepare(batch.x, batch.y, chunk)):
        return {}
    return {
        "bulk_sgd/eigenvalue": optimizer.eigenvalues[0],
        "bulk_sgd/products": float(optimizer.products),
        "bulk_sgd/converged": float(optimizer.converged),
    }


def check_batch(x: Tensor, y: Tensor, suffix: str) -> None:
    """Raise `InputError` unless x and y are a batch; suffix: of their names."""
    soft = suffix == "" and y.dim() == 2 and y.is_floating_point()
    require(
        soft or (y.dim() == 1 and y.dtype == torch.int64),
        f"y{suffix} must be int64 labels (N,), got {y.dtype} {tuple(y.shape)}",
    )
    require(
        len(x) == len(y) and (len(y) > 0 or ranks.size() > 1),
        f"x{suffix} and y{suffix} must hold the same number of samples, at least one, got {len(x)} and {len(y)}",
    )


def check_labels(y: Tensor, logits: Tensor, name: str = "y") -> None:
    """Raise `InputError` for a label outside 0..K-1. On a GPU the look-up asserts that itself: no wait for it here."""
    if y.device.type == "cpu" and len(y):
        k = logits.shape[-1]
        low, high = (int(m) for m in y.aminmax())
        if low < 0 or high >= k:
            row = int(((y < 0) | (y >= k)).nonzero()[0])
            raise InputError(
                f"{name} must hold labels in 0..{k - 1}, one for each logit, {name}[{row}] is {int(y[row])}"
            )


def _check_divisible(model: nn.Module, batch: Batch, chunk: int | None) -> None:
    """The same gradient in parts as in one: not with statistics over the batch."""
    if (coupling := coupling_layer(model)) is not None:
        name, layer = coupling
        raise InputError(
            f"chunk must be >= the {len(batch.x)} samples of the batch, got {chunk}: {name} ({type(layer).__name__}) "
            "takes statistics over the batch, so a part of it gives another gradient; use GroupNorm, or one chunk"
        )


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

    def features(self, features: Tensor | None, n: int) -> Tensor | None:
        """What was caught, for a batch of n; the features without a name."""
        if self.name is None:
            return features
        require(self.output is not None, f"layer {self.name!r} is not run in the backbone's forward pass")
        assert self.output is not None
        require(
            len(self.output) == n,
            f"layer {self.name!r} must give one output per sample, got {len(self.output)} for {n} samples",
        )
        return self.output
