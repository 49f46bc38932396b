"""A training batch at its step, whole or in part, and what several ranks make of their parts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from metacal import ranks
from metacal.batchnorm import synchronises
from metacal.errors import require
from metacal.optim.transpose import Cotangents

__all__ = ["Batch", "Last", "joined", "last_of", "mean_of", "penalty_on", "sum_cotangents", "sum_gradients"]


@dataclass(frozen=True)
class Batch:
    """A training batch at its step, or a part of one: of a batch in chunks, or this rank's share of one.

    soft: the probabilities (N, K) of the classes that the loss is given in the place of y, their most probable class.
    other, weight: of a mixed batch, the other labels and the weight of the first. start, total: the place of its first
    sample in the whole batch, and how many that has; None: it is the whole. class_weight: the mean of the samples'
    class weights over the whole batch; None: there are none. counts: how many samples of the whole each rank has; None:
    this is the only rank.
    """

    x: Tensor
    y: Tensor
    count: int
    epoch: float
    soft: Tensor | None = None
    other: Tensor | None = None
    weight: float = 1.0
    start: int = 0
    total: int | None = None
    class_weight: Tensor | None = None
    counts: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """n, the samples of the whole batch."""
        return len(self.x) if self.total is None else self.total

    @property
    def share(self) -> float:
        """Of the whole batch that this part is."""
        return len(self.x) / self.size

    def parts(self, size: int | None) -> list[Batch]:
        """At most `size` samples each; None: the whole."""
        if size is None or size >= len(self.x):
            return [self]
        starts = range(0, len(self.x), size)
        return [self.part(x, start) for start, x in zip(starts, self.x.split(size))]

    def part(self, x: Tensor, start: int) -> Batch:
        """The samples of `x`, which begin at `start` of this."""
        rows = slice(start, start + len(x))
        soft = None if self.soft is None else self.soft[rows]
        return replace(self, x=x, y=self.y[rows], soft=soft, start=self.start + start, total=self.size)

    def mean(self, values: Tensor) -> Tensor:
        """What this part adds to the mean over the whole batch of values `(n_p,)`, or of one number for all."""
        if self.share == 1:
            return values.mean()
        return values.sum() / self.size if values.dim() else self.share * values


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts of a batch as one tensor; None, and a number that holds for every sample, as they are."""
    first = parts[0]
    if len(parts) == 1 or first is None or first.dim() == 0:
        return first
    return torch.cat([p for p in parts if p is not None])


@dataclass
class Last:
    """What monitors may want of the last step, detached and on the device: reading it waits for nothing.

    Of all ranks, but for the features, which are those of this rank's samples.
    """

    logits: Tensor
    labels: Tensor
    features: Tensor | None
    gamma: Tensor | None
    meta_logits: Tensor | None = None
    meta_labels: Tensor | None = None


def last_of(batch: Batch, logits: Tensor, features: Tensor | None, gamma: Tensor | None) -> Last:
    """What is known of a batch, of which this rank has a share."""
    if batch.counts is None:
        return Last(logits, batch.y, features, gamma)
    gammas = () if gamma is None or gamma.dim() == 0 else (gamma,)
    logits, labels, *gathered = ranks.gather_together([logits, batch.y, *gammas], batch.counts)
    return Last(logits, labels, features, gathered[0] if gathered else gamma)


def mean_of(values: Tensor) -> Tensor:
    """The mean over the samples of a part; 0, with its graph, where a rank has none."""
    return values.mean() if len(values) else values.sum()


def penalty_on(
    penalty: Any, batch: Batch, model: nn.Module, logits: Tensor, features: Tensor | None
) -> tuple[Tensor, float]:
    """R on a part of a batch and the weight with which it counts: the sum over parts and ranks of their products is
    R of the whole batch, and that of the gradients ∇R.

    A mean over samples counts by its number of samples. What is no mean is computed by every rank from the logits of
    all, and counts R times 1/R; the gather between has the true transpose, so that derivatives of any order add up.

    Raises `InputError` for a penalty that is no mean over samples and no function of the logits.
    """
    x, y = batch.x, batch.y
    if batch.counts is None:
        return penalty(model, x, y, logits, features), batch.share
    first = getattr(penalty, "batch", None)  # of the first so many samples of a batch alone
    if getattr(penalty, "batchwise", False) and first is None:
        require(
            getattr(penalty, "of_logits", False),
            f"a penalty of several ranks must be a mean over samples or a function of the logits and labels, "
            f"{type(penalty).__name__} says that it is neither (batchwise, not of_logits): use one rank",
        )
        logits = ranks.gather_rows(logits, batch.counts, summed=True)
        return penalty(model, x, ranks.gather_rows(y, batch.counts), logits, None), 1 / len(batch.counts)
    require(
        (first is None and min(batch.counts) > 0) or getattr(penalty, "of_logits", False) or not synchronises(model),
        f"batch must have samples on every rank for penalty {type(penalty).__name__}, since the model's synchronised "
        f"batch normalisation needs all ranks in each pass, got {batch.counts}",
    )
    size = batch.size if first is None else min(first, batch.size)
    n = min(max(size - batch.start, 0), len(x))
    if n == 0:
        return 0 * logits.sum(), 0.0
    if n < len(x):
        return penalty(model, x[:n], y[:n], None, None), n / size
    return penalty(model, x, y, logits, features), n / size


def sum_gradients(params: Sequence[Tensor], sums: ranks.GradientSums, numbers: Sequence[Tensor]) -> None:
    """Replace `.grad` of the parameters, and the 0-d tensors `numbers`, by their sums over ranks, in place.

    sums: of these parameters, some of which may be under way. A parameter that had a part in no rank's loss keeps None:
    an optimizer leaves it alone.
    """
    lacking = [i for i, p in enumerate(params) if p.grad is None]
    present = params[0].new_ones(len(params))  # on how many ranks
    for i in lacking:
        params[i].grad = torch.zeros_like(params[i])
        present[i] = 0
    sums.finish()
    ranks.sum_([present, *numbers])
    on_any = present.tolist() if lacking else []  # for which a GPU is waited, once
    for i in lacking:
        if not on_any[i]:
            params[i].grad = None


def sum_cotangents(cotangents: Cotangents, params: Sequence[Tensor]) -> Cotangents:
    """Their sum over ranks; None is zero. One rank: themselves."""
    if ranks.size() == 1:
        return cotangents
    total = [torch.zeros_like(p) if t is None else t for t, p in zip(cotangents, params)]
    ranks.sum_(total)
    return list(total)
