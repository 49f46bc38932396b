"""Moving tensors to a device without waiting for what it is doing, and what it computes in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

__all__ = ["full_float32", "sent"]


def sent(t: Any, device: torch.device) -> Any:
    """The tensor, or the `Inputs`, on `device`.

    A copy to a GPU is queued there behind what it has to do, and the host goes on. That takes pinned memory: of other
    memory the host waits until it was read.
    """
    if device.type == "cuda" and t.device.type == "cpu":
        t = t.pin_memory()
    return t.to(device, non_blocking=True)


@contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 in float32 for the block, where passes are subtracted or compared.

    A GPU rounds the factors of a convolution to 11 bits (TF32) unless it is told not to, and those of a matrix product
    where it is told to.
    """
    changed = [setting for setting in _float32_settings() if setting[1] != setting[2]]
    for put, _, full in changed:
        put(full)
    try:
        yield
    finally:
        for put, before, _ in changed:
            put(before)


def _float32_settings() -> list[tuple[Callable[[Any], None], Any, Any]]:
    """What sets a precision, to what it is set, and what rounds nothing."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        return [
            (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "highest"),
            (partial(setattr, cudnn, "allow_tf32"), cudnn.allow_tf32, False),
        ]
    except RuntimeError:  # they were set by the names that torch has since 2.9, which do not go with the older ones
        parts = (matmul, cudnn.conv, cudnn.rnn)
        return [(partial(setattr, part, "fp32_precision"), part.fp32_precision, "ieee") for part in parts]
