"""Batches from the host's memory to the device, the next one on its way while the device works on the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from metacal.devices import sent
from metacal.inputs import tensors_of

__all__ = ["one_ahead", "prefetched"]

T = TypeVar("T")
Batch = tuple[Any, ...]  # of tensors, `Inputs` and None


def prefetched(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`, in their order.

    On a GPU each is copied on a stream of its own, one batch ahead, and the stream that works waits for that copy
    alone.
    """
    if device.type != "cuda":
        yield from (_sent(batch, device) for batch in batches)
        return
    copying = torch.cuda.Stream(device)

    def copies() -> Iterator[tuple[Batch, torch.cuda.Event]]:
        for batch in batches:
            with torch.cuda.stream(copying):
                copy = _sent(batch, device), copying.record_event()
            yield copy

    for batch, done in one_ahead(copies()):
        working = torch.cuda.current_stream(device)
        working.wait_event(done)
        for t in (t for part in batch if part is not None for t in tensors_of(part)):
            t.record_stream(working)  # else their memory, which is the copying stream's, could be used again too early
        yield batch


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The items, each handed out when the next one has been made."""
    held: deque[T] = deque()
    for item in items:
        held.append(item)
        if len(held) > 1:
            yield held.popleft()
    yield from held


def _sent(batch: Batch, device: torch.device) -> Batch:
    return tuple(None if part is None else sent(part, device) for part in batch)
