"""How sure the outer problem is of its direction: the hypergradient's mean against its scatter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["WINDOW", "Signal", "averaging_rate"]


WINDOW = 50
"""Outer steps that are looked back on, about."""


def averaging_rate(count: int) -> float:
    """Of the `count`-th value in an exponential average over `WINDOW` ones.

    The first ones are averaged plainly, so that none of them counts for more than its share.
    """
    return max(1 / count, 2 / (WINDOW + 1))


class Signal:
    """The signal-to-noise ratio of the hypergradients h_t of the last outer steps, about `WINDOW` of them.

        m = E h,  s = E |h|²,  both exponential averages (`averaging_rate`)
        ratio = |m| / sqrt(s - |m|²)

    Of W independent hypergradients that point anywhere it is about W^(-1/2); one parameter whose ratio is below
    2 W^(-1/2) has a sign that its scatter explains (two standard errors): `COIN_TOSS`.
    """

    COIN_TOSS = 2 / math.sqrt(WINDOW)

    def __init__(self) -> None:
        self.mean: list[Tensor] = []
        self.square: Tensor | None = None
        self.count = 0

    @torch.no_grad()
    def add(self, hypergradient: Sequence[Tensor]) -> Tensor:
        """Take note of one; returns the ratio, a 0-d tensor on its device: inf until the second."""
        self.count += 1
        rate = averaging_rate(self.count)
        square = torch.stack([h.double().square().sum() for h in hypergradient]).sum()
        if self.square is None:
            self.mean, self.square = [h.detach().clone() for h in hypergradient], square
        else:
            torch._foreach_lerp_(self.mean, list(hypergradient), rate)
            self.square.lerp_(square, rate)
        signal = torch.stack([m.double().square().sum() for m in self.mean]).sum()
        return (signal / (self.square - signal).clamp(min=0)).sqrt()

    @property
    def tensors(self) -> list[Tensor]:
        """What `add` changes on the device."""
        return self.mean if self.square is None else [*self.mean, self.square]

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "square": self.square, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.square, self.count = list(state["mean"]), state["square"], state["count"]
