"""Gammas that nothing learns: one number, one for each part of the training, or one of two by the sample."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.errors import require
from metacal.gamma.options import Around, SourceOptions
from metacal.options import option

__all__ = ["FLSD", "FLSDOptions", "FixedGamma", "FixedOptions", "StepGamma", "StepOptions", "flsd_gamma"]


@dataclass
class FixedOptions(SourceOptions):
    """`FixedGamma`."""

    value: float = option(3.0, "the gamma", low=0)

    def build(self, around: Around) -> nn.Module:
        return FixedGamma(self.value)


@dataclass
class FLSDOptions(SourceOptions):
    """`FLSD`."""

    def build(self, around: Around) -> nn.Module:
        return FLSD()


@dataclass
class StepOptions(SourceOptions):
    """`StepGamma`, with fractions of the training in place of epochs."""

    milestones: list[float] = option(factory=list, help="fractions of the training at which gamma changes")
    values: list[float] = option(factory=list, help="the gammas, one more than milestones")

    def check(self, prefix: str = "") -> None:
        super().check(prefix)
        require(
            len(self.values) == len(self.milestones) + 1 and all(v >= 0 for v in self.values),
            f"{prefix}values must hold one number >= 0 more than {prefix}milestones, got "
            f"{list(self.values)} and {list(self.milestones)}",
        )

    def build(self, around: Around) -> nn.Module:
        # rounded, so that a whole epoch is not missed by an ulp
        return StepGamma([round(m * around.epochs, 9) for m in self.milestones], self.values)


def flsd_gamma(logits: Tensor, labels: Tensor) -> Tensor:
    """FLSD-53 (Mukhoti et al. 2020): gamma = 5 where p_y < 0.2, else 3. Shapes `(N, K)`, `(N,)` -> `(N,)`, detached."""
    logits = logits.detach()
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    p = F.softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return torch.where(p < 0.2, 5.0, 3.0).to(logits.dtype)


class FixedGamma(nn.Module):
    """One gamma for every sample, never changed."""

    value: Tensor

    def __init__(self, value: float = FixedOptions.value) -> None:
        super().__init__()
        FixedOptions(value).check()
        self.register_buffer("value", torch.tensor(float(value)), persistent=False)

    def forward(self, features: Tensor | None = None, **_: object) -> Tensor:
        return self.value


class StepGamma(nn.Module):
    """A gamma that changes with the epoch: `values[0]` at first, `values[i]` from epoch `milestones[i - 1]` on.

    milestones: increasing epochs, whole or not (`metacal train` makes them of the fractions `gamma.milestones`);
    values: one more than milestones, each >= 0.
    """

    def __init__(self, milestones: Sequence[float], values: Sequence[float]) -> None:
        super().__init__()
        require(
            len(values) == len(milestones) + 1,
            f"values must have one entry more than milestones ({len(milestones)}), got {len(values)}",
        )
        require(
            all(a < b for a, b in itertools.pairwise(milestones)),
            f"milestones must increase, got {list(milestones)}",
        )
        require(all(v >= 0 for v in values), f"values must be >= 0, got {list(values)}")
        self.milestones = tuple(milestones)
        self.values = tuple(float(v) for v in values)

    def forward(
        self, features: Tensor | None = None, *, logits: Tensor | None = None, epoch: float = 0, **_: object
    ) -> Tensor:
        value = self.values[sum(epoch >= m for m in self.milestones)]
        device = None if logits is None else logits.device
        return torch.full((), value, device=device)  # filled there: a copy to a GPU would be waited for


class FLSD(nn.Module):
    """Sample-dependent schedule FLSD-53 of `flsd_gamma`: 5 where the true class has p < 0.2, else 3."""

    def forward(self, features: Tensor | None = None, *, logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        return flsd_gamma(logits, labels)
