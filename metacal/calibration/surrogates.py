"""The objectives of the outer loop: differentiable surrogates of the calibration error, and sums of them.

The surrogates themselves, functions `(logits (N, K), labels (N,), **keys) -> 0-d tensor`, are those of
`metacal.calibration.differentiable` and public here too. `build_outer` makes an objective of them; `MemoryBank`
is the one thing with state.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from metacal.calibration.differentiable import (
    BANDWIDTHS,
    BATCH_PENALTIES,
    FIRST_ORDER,
    SURROGATES,
    Bank,
    Surrogate,
    batch_bandwidth,
    brier,
    check_batch,
    confidence_gap,
    confidences,
    dece,
    effective_neighbours,
    mdca,
    mmce,
    nll,
    sece,
    skce,
    soft_ece,
)
from metacal.errors import InputError, require
from metacal.options import check_options, option, options_of

__all__ = [
    "BANDWIDTHS",
    "BATCH_PENALTIES",
    "FIRST_ORDER",
    "SURROGATES",
    "MemoryBank",
    "Outer",
    "ProperTerm",
    "ReferencePoints",
    "batch_bandwidth",
    "brier",
    "build_outer",
    "confidence_gap",
    "dece",
    "effective_neighbours",
    "mdca",
    "mmce",
    "nll",
    "sece",
    "skce",
    "soft_ece",
]


class MemoryBank:
    """The detached (confidence, correctness) of the last `size` batches: further reference points of `sece`.

    `bank.add(logits, labels)` after a step, `sece(logits, labels, bank=bank.reference())` in the next.
    """

    def __init__(self, size: int) -> None:
        require(size >= 1, f"size must be >= 1 (batches), got {size}")
        self.size = size
        self._batches: deque[Bank] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._batches)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Remember a batch, in place of the oldest one when `size` are held."""
        confidence, correct = confidences(*check_batch(logits, labels))
        self._batches.append((confidence.detach(), correct))

    def reference(self) -> Bank | None:
        """Confidence (B,) and correctness (B,) of all that is held; None when nothing is."""
        if not self._batches:
            return None
        confidence, correct = zip(*self._batches)
        return torch.cat(confidence), torch.cat(correct)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python only, oldest batch first."""
        return {"size": self.size, "batches": [list(batch) for batch in self._batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require(
            state["size"] == self.size,
            f"size must be that of the saved bank, {state['size']}, got {self.size}",
        )
        self._batches = deque(((c, a) for c, a in state["batches"]), maxlen=self.size)


@dataclass
class Outer:
    """The outer objective Σ_t weight_t · term_t, a callable `(logits, labels) -> 0-d tensor`.

    A call changes nothing. `update` feeds the memory bank, if there is one: call it once a meta batch, after
    the step. The bank is all that a checkpoint needs.
    """

    parts: dict[str, tuple[float, Surrogate, dict[str, Any]]]
    bank: MemoryBank | None = None

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = sum(self.parts[name][0] * value for name, value in self.terms(logits, labels).items())
        assert isinstance(total, Tensor)
        return total

    def terms(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Each term by its name, not weighted."""
        out = {}
        for name, (_, term, keys) in self.parts.items():
            if self.bank is not None and name == "sece":  # the one term that takes further reference points
                keys = {**keys, "bank": self.bank.reference()}
            out[name] = term(logits, labels, **keys)
        return out

    def update(self, logits: Tensor, labels: Tensor) -> None:
        if self.bank is not None:
            self.bank.add(logits, labels)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.bank is None else {"bank": self.bank.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.bank is not None:
            self.bank.load_state_dict(state["bank"])


@dataclass
class ReferencePoints:
    """What `sece` compares a confidence with."""

    reference_points: str = option(
        "samples", "of sece: the meta batch alone, or also a bank of earlier ones", choices=("samples", "bank")
    )
    bank_batches: int = option(8, "meta batches that the bank remembers", low=1)


@dataclass
class ProperTerm:
    """A proper score beside the objective, which keeps it from being met by predictions that say little."""

    proper: str = option("none", "a proper score that is added to the objective", choices=("none", "nll", "brier"))
    proper_weight: float = option(1.0, "its weight, beside 1 of an objective by its name", low=0)

    def added(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The terms of `weights` and the proper one.

        Raises `InputError` where it is among them already.
        """
        if self.proper == "none":
            return dict(weights)
        require(self.proper not in weights, f"meta.proper={self.proper} is in meta.objective already: give it once")
        return {**weights, self.proper: self.proper_weight}


def build_outer(
    spec: str | Surrogate | Mapping[str, float | Mapping[str, Any]],
    *,
    reference_points: str = ReferencePoints.reference_points,
    bank_size: int = ReferencePoints.bank_batches,
    **keys: Any,
) -> Outer:
    """The outer objective from its specification.

    Args:
        spec: a name in `SURROGATES`; a callable (logits, labels) -> 0-d tensor; or names to weights, as in
            `{"sece": 1.0, "nll": 0.1}`, where a weight may carry keys of that term alone:
            `{"sece": {"weight": 1.0, "bandwidth": 0.05}}`. Terms of weight 0 are not computed.
        reference_points: of `sece`: "samples", or "bank", which adds the last `bank_size` batches that
            `Outer.update` was given.
        keys: go to every term that has an option of that name; each must suit one at least.

    Raises `InputError`, before any training, for unknown names and for values that a term refuses.
    """
    check_options(ReferencePoints(reference_points))
    if callable(spec):
        require(
            not keys and reference_points == "samples",
            f"a callable outer objective takes no keys, got {[*keys] or reference_points!r}: bind them to it",
        )
        return Outer({getattr(spec, "__name__", "outer"): (1.0, spec, {})})
    weights: Mapping[str, Any] = {spec: 1.0} if isinstance(spec, str) else spec
    require(
        isinstance(weights, Mapping) and len(weights) > 0,
        f"outer must be a name, a callable or a mapping of names to weights, got {spec!r}",
    )
    parts = {name: _term(name, value, keys) for name, value in weights.items()}
    known = {key for name in weights for key in options_of(SURROGATES[name])}
    for key in sorted(keys.keys() - known):
        raise InputError(f"outer takes {_suggest(key, known)}, got {key!r}")
    parts = {name: part for name, part in parts.items() if part[0] > 0}
    require(len(parts) > 0, f"outer must have a term of weight > 0, got {dict(weights)}")
    if reference_points == "samples":
        return Outer(parts)
    require("sece" in parts, f"reference_points='bank' is for sece, got {sorted(parts)}")
    return Outer(parts, MemoryBank(bank_size))


def _term(name: str, value: Any, keys: Mapping[str, Any]) -> tuple[float, Surrogate, dict[str, Any]]:
    """(weight, surrogate, its options) of one entry of an outer objective, tried out; `keys` where it gives none."""
    require(name in SURROGATES, f"outer must be made of {_suggest(name, SURROGATES)}, got {name!r}")
    term = SURROGATES[name]
    allowed = options_of(term)
    given = dict(value) if isinstance(value, Mapping) else {"weight": value}
    weight = given.pop("weight", 1.0)
    require(
        isinstance(weight, Real) and not isinstance(weight, bool) and 0 <= float(weight) < math.inf,
        f"weight of {name} must be a number >= 0, got {weight!r}",
    )
    for key in given:
        require(key in allowed, f"{name} takes {_suggest(key, allowed)}, got {key!r}")
    options = {key: value for key, value in keys.items() if key in allowed} | given
    try:  # let it check them now, on a batch of two
        term(torch.zeros(2, 2), torch.tensor([0, 1]), **options)
    except Exception as error:
        raise InputError(f"{name} cannot work with {options}: {error}") from error
    return float(weight), term, options


def _suggest(name: str, valid: Any) -> str:
    """The valid names as a phrase, the nearest one to `name` first."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    listed = ", ".join(names) or "no keys"
    return f"{listed} (did you mean {close[0]!r}?)" if close else listed
