"""Several processes that work as one: what they tell each other, and how much of it.

Each of R ranks has n_r rows of a batch of N = Σ n_r, in the order of the ranks. Everything that a step computes is a
sum over rows, Σ_r Σ_i, or a function of rows that all ranks are shown, so two messages are enough: a sum over ranks
(`sum_`) and all rows on every rank (`gather_rows`). They are explicit: no wrapper around the model, nothing in `.grad`
that a step has not asked for.

Without a process group of torch.distributed, and within `alone`, there is one rank, and every function here returns
what it was given without touching it. Every rank must call every function that speaks (all but `size`, `rank`,
`is_first`, `share`, `alone` and the two counters) in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from metacal.errors import InputError, require

__all__ = [
    "GradientSums",
    "Rows",
    "alone",
    "average_",
    "barrier",
    "broadcast_object",
    "bytes_sent",
    "gather_integers",
    "gather_objects",
    "gather_rows",
    "gather_together",
    "is_first",
    "messages_sent",
    "rank",
    "require_same",
    "rows",
    "share",
    "size",
    "sum_",
    "summed",
]

T = TypeVar("T")

BUCKET = 2**23
"""Bytes of one message of a sum, about: large enough that its latency does not count, small beside a model."""

_alone = 0
_bytes = 0
_messages = 0


# -- who is there ------------------------------------------------------------------------------------------------------


def size() -> int:
    """R, the number of ranks that work together here."""
    return 1 if _alone or not (dist.is_available() and dist.is_initialized()) else dist.get_world_size()


def rank() -> int:
    """0..R-1."""
    return 0 if size() == 1 else dist.get_rank()


def is_first() -> bool:
    """Whether this process is the one that writes and prints, within `alone` too."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def alone() -> Iterator[None]:
    """Within it this process works by itself, as if there were no others, which need not do the same."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def share(n: int) -> slice:
    """The rows of a batch of n that are this rank's: contiguous, in the order of ranks, n // R or one more of them.

    A rank may have none. Every row is some rank's, and no row is two ranks'.
    """
    each, more = divmod(n, size())
    start = rank() * each + min(rank(), more)
    return slice(start, start + each + (rank() < more))


@dataclass(frozen=True)
class Rows:
    """Which rows of a batch are this rank's. counts: n_r of all ranks."""

    counts: tuple[int, ...]
    rank: int

    @property
    def start(self) -> int:
        """The place of this rank's first row."""
        return sum(self.counts[: self.rank])

    @property
    def total(self) -> int:
        """N."""
        return sum(self.counts)

    @property
    def here(self) -> slice:
        return slice(self.start, self.start + self.counts[self.rank])


def rows(n: int) -> Rows:
    """The rows of a batch of which this rank has n."""
    return Rows(tuple(count for (count,) in gather_integers(n)), rank())


# -- sums --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sum_(tensors: Sequence[Tensor]) -> None:
    """Replace every tensor by its sum over ranks, the same bits on all of them. Dense; all ranks have the same shapes.

    Those of one dtype and device travel together, in messages of about `BUCKET` bytes that are all under way at once.
    """
    if size() == 1:
        return
    under_way = [_sent(bucket) for bucket in _buckets(tensors)]
    for message in under_way:
        _received(*message)


def _sent(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Any]:
    """A message that is summed on its way."""
    flat = torch.cat([t.reshape(-1) for t in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1).contiguous()
    _count(flat)
    return tensors, flat, dist.all_reduce(flat, async_op=True)


def _received(tensors: Sequence[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        if part.data_ptr() != t.data_ptr():
            t.copy_(part.view_as(t))


class GradientSums:
    """Sums of gradients over ranks that set out while the backward pass is still under way.

        with GradientSums(params) as sums:
            loss.backward()
        sums.finish()  # every `.grad` is now that of all ranks

    A message holds parameters in the reverse of their order, which is about that in which the pass reaches them. It
    leaves when all of its gradients are there and the ones before it have left, so that all ranks send them in the same
    order, whatever their graphs are.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.buckets = _buckets(list(reversed(params)))
        self.place = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.missing = [len(bucket) for bucket in self.buckets]
        self.under_way: list[tuple[Sequence[Tensor], Tensor, Any]] = []

    def __enter__(self) -> GradientSums:
        self.hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.place]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _arrived(self, p: Tensor) -> None:
        self.missing[self.place[p]] -= 1
        while len(self.under_way) < len(self.buckets) and self.missing[len(self.under_way)] == 0:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        grads = [p.grad for p in self.buckets[len(self.under_way)] if p.grad is not None]
        require(
            all(g.layout is torch.strided for g in grads),
            "gradients must be dense where several ranks add them up: make the model's Embedding with sparse=False",
        )
        self.under_way.append(_sent(grads))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not left, and wait for all. Every parameter must have a gradient."""
        while len(self.under_way) < len(self.buckets):
            self._send()
        for message in self.under_way:
            _received(*message)


def average_(tensors: Sequence[Tensor]) -> None:
    """Replace every tensor by its mean over ranks."""
    if size() > 1:
        sum_(tensors)
        for t in tensors:
            t.div_(size())


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in messages: of one dtype and device each, and as large as `BUCKET` allows."""
    buckets: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], int] = {}  # the last bucket of each kind
    room: dict[int, int] = {}
    for t in tensors:
        if t.numel() == 0:
            continue
        kind, need = (t.dtype, t.device), t.numel() * t.element_size()
        last = filling.get(kind)
        if last is None or room[last] < need:
            buckets.append([])
            last = filling[kind] = len(buckets) - 1
            room[last] = BUCKET
        buckets[last].append(t)
        room[last] -= need
    return buckets


# -- rows --------------------------------------------------------------------------------------------------------------


def gather_rows(t: Tensor, counts: Sequence[int] | None = None, summed: bool = False) -> Tensor:
    """The rows of all ranks, `(N, …)` from each rank's `(n_r, …)`, in the order of ranks; n_r may differ and be 0.

    Derivatives of every order go back to this rank's own rows. Of a function f of the result,

        summed = False   the gradient is ∂f/∂rows as this rank computed it. Exact where every rank computes the same f
                         of the same rows and f is the objective; it needs no message. For first derivatives only.
        summed = True    the gradient is that of Σ_r f_r in this rank's rows: the true transpose, one message.
                         Exact to every order where the ranks' f_r add up to the objective.

    Args:
        counts: n_r of all ranks, `Rows.counts`, where they are known; else they are asked for.
    """
    if size() == 1:
        return t
    layout = rows(len(t)) if counts is None else Rows(tuple(counts), rank())
    return _Gathered.apply(t, layout, summed)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Rows, summed: bool) -> Tensor:
        ctx.layout, ctx.summed = layout, summed
        return _all_rows(t, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = _Summed.apply(grad) if ctx.summed else grad
        return whole[ctx.layout.here], None, None


def summed(t: Tensor) -> Tensor:
    """The sum over ranks, for a network that computes with it: linear, and its own transpose, one message each.

    Derivatives of every order are those of Σ_r f_r in this rank's t. One function to a mode of torch, as it is to a
    tape of derivatives along a direction.
    """
    if has_torch_function((t,)):
        return handle_torch_function(summed, (t,), t)
    return t if size() == 1 else _Summed.apply(t)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        total = t.clone(memory_format=torch.contiguous_format)
        sum_([total])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Summed.apply(grad)


@torch.no_grad()
def gather_together(tensors: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
    """The rows of all ranks of several tensors `(n_r, …)` of any types, without graphs, in one message."""
    if size() == 1:
        return [t.detach() for t in tensors]
    layout = rows(len(tensors[0])) if counts is None else Rows(tuple(counts), rank())
    parts = [t.detach().reshape(len(t), math.prod(t.shape[1:])).contiguous().view(torch.uint8) for t in tensors]
    whole = _all_rows(torch.cat(parts, 1), layout).split([part.shape[1] for part in parts], 1)
    own = [w.clone(memory_format=torch.contiguous_format) for w in whole]
    return [w.view(t.dtype).view(len(w), *t.shape[1:]) for w, t in zip(own, tensors)]


def _all_rows(t: Tensor, layout: Rows) -> Tensor:
    """Messages of one gather have one size, that of the longest."""
    most = max(layout.counts)
    message = t.new_zeros(most, *t.shape[1:])
    message[: len(t)] = t.detach()
    flags = message.dtype == torch.bool  # which no backend sends
    message = message.byte() if flags else message
    parts = [torch.empty_like(message) for _ in layout.counts]
    if message.numel():
        _count(message)
        dist.all_gather(parts, message)
    whole = torch.cat([part[:n] for part, n in zip(parts, layout.counts)])
    return whole.bool() if flags else whole


# -- numbers and objects -----------------------------------------------------------------------------------------------


def gather_integers(*values: int) -> list[list[int]]:
    """The integers of every rank, in the order of ranks: the quickest way to agree, since no object is packed."""
    if size() == 1:
        return [list(values)]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    mine = torch.tensor(values, device=device)
    parts = [torch.empty_like(mine) for _ in range(size())]
    _count(mine)
    dist.all_gather(parts, mine)
    return [part.tolist() for part in parts]


def gather_objects(value: T) -> list[T]:
    """What every rank gave, in the order of ranks: small Python values."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    _count(None)
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T) -> T:
    """What rank 0 gave; what the others gave does not count."""
    if size() == 1:
        return value
    box = [value]
    _count(None)
    dist.broadcast_object_list(box, src=0)
    return box[0]


def require_same(value: T, name: str) -> T:
    """The value, if all ranks gave an equal one; else `InputError`, on every rank."""
    values = gather_objects(value)
    for other, theirs in enumerate(values):
        if theirs != values[0]:
            raise InputError(f"{name} must be the same on all ranks, got {values[0]!r} on 0 and {theirs!r} on {other}")
    return value


def barrier() -> None:
    """Wait until all ranks are here."""
    if size() > 1:
        _count(None)
        dist.barrier()


# -- how much was said -------------------------------------------------------------------------------------------------


def bytes_sent() -> int:
    """Bytes of tensors that this rank has put into messages: those of a sum or a gather once, whatever the backend's
    way to carry them. A ring moves 2 (R − 1) / R of a sum over each link, and R − 1 of a gather."""
    return _bytes


def messages_sent() -> int:
    """How many messages that were, those of `gather_objects`, `broadcast_object` and `barrier` included."""
    return _messages


def _count(t: Tensor | None) -> None:
    global _bytes, _messages
    _bytes += 0 if t is None else t.numel() * t.element_size()
    _messages += 1
