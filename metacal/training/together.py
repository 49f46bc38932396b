"""What several ranks that train one run agree on: their data and weights, and the step after which they stop."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from metacal import ranks
from metacal.data import Batches, Data
from metacal.errors import require
from metacal.launch import on_signals, orphaned

__all__ = ["require_alike", "require_rows", "stop_on_signals"]


def require_rows(train: Batches, meta: Batches | None) -> None:
    """Raise `InputError` unless every batch has a sample for each rank."""
    for key, batches in (("data.batch_size", train), ("data.meta_batch_size", meta)):
        least = ranks.size() if batches is None else batches.smallest_batch()
        require(
            least >= ranks.size(),
            f"{key} must give each of {ranks.size()} ranks a sample of every batch, and the smallest has {least}",
        )


def require_alike(data: Data, backbone: nn.Module) -> None:
    """All ranks have the same data and the same network.

    Raises:
        InputError: on every rank.
    """
    for split, fingerprint in {"test": data.fingerprint, **data.fingerprints}.items():
        ranks.require_same(fingerprint, f"the {split.replace('_', ' ')} split (its fingerprint)")
    digest = hashlib.blake2b(digest_size=8)
    for t in backbone.state_dict().values():
        digest.update(t.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    ranks.require_same(digest.hexdigest(), "the initial weights (their digest)")


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C or SIGTERM only asks to stop after the current step; a second Ctrl-C interrupts.

    The block gets a function that says whether somebody has asked. With several ranks each of them calls it after every
    step, and it says whether any was asked, or has lost the process that had started it.
    """
    asked: list[int] = []

    def ask(number: int, previous: Mapping[int, Any]) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, previous[signal.SIGINT])

    def stop() -> bool:
        return any(answer for (answer,) in ranks.gather_integers(int(bool(asked) or orphaned())))

    with on_signals(ask):
        yield stop
