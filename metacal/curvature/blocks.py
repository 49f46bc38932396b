"""How many examples are worked on at a time where nobody asked for chunks."""

from __future__ import annotations

import torch
from torch import nn

from metacal.curvature.layers import examples_depend
from metacal.curvature.problem import Problem

__all__ = ["cache_block", "n_classes"]

CACHE_BLOCK = 64
LOGITS = 1 << 22  # entries of the logits of a block


def cache_block(problem: Problem, share: int = 1) -> int | None:
    """Examples to work on at a time where nobody asked for chunks, or None for all at once.

    Convolutions on a CPU run faster on blocks that fit the caches (measured on ResNet-20 and 512 images: half to two
    thirds of the time of all at once), and logits of many classes are many numbers: `LOGITS` at a time. Only where
    examples are independent; inside `problem.math()`.
    """
    size, n = CACHE_BLOCK // share, len(problem)
    if n <= size or problem.randomness != "refuse" or examples_depend(problem) is not None:
        return None
    convolutional = any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in problem.model.modules())
    rows = max(1, LOGITS // (share * n_classes(problem)))
    block = min(rows, size) if convolutional and problem.x.device.type == "cpu" else rows
    return block if block < n else None


def n_classes(problem: Problem) -> int:
    """K."""
    with torch.no_grad():
        return problem.logits(x=problem.x[:1]).shape[1]
