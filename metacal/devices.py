"""Moving tensors to a device without waiting for what it is doing."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sent"]


def sent(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. A copy to a GPU is queued there behind what it has to do, and the host goes on.

    That takes pinned memory: of other memory the host waits until it was read.
    """
    if device.type == "cuda" and t.device.type == "cpu":
        t = t.pin_memory()
    return t.to(device, non_blocking=True)
