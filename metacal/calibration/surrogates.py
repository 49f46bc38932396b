"""The objectives of the outer loop: differentiable surrogates of the calibration error, and sums of them.

The surrogates themselves, functions `(logits (N, K), labels (N,), **keys) -> 0-d tensor`, are those of
`metacal.calibration.differentiable` and public here too. `build_outer` makes an objective of them; `MemoryBank`
is the one thing with state.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metacal.calibration.differentiable import (
    BATCH_PENALTIES,
    SURROGATES,
    Bank,
    Surrogate,
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

__all__ = [
    "BATCH_PENALTIES",
    "SURROGATES",
    "MemoryBank",
    "Outer",
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


def build_outer(
    spec: str | Surrogate | Mapping[str, float | Mapping[str, Any]],
    *,
    reference_points: str = "samples",
    bank_size: int = 8,
    **keys: Any,
) -> Outer:
    """The outer objective from its specification.

    Args:
        spec: a name in `SURROGATES`; a callable (logits, labels) -> 0-d tensor; or names to weights, as in
            `{"sece": 1.0, "nll": 0.1}`, where a weight may carry keys of that term alone:
            `{"sece": {"weight": 1.0, "bandwidth": 0.05}}`. Terms of weight 0 are not computed.
        reference_points: of `sece`: "samples", or "bank", which adds the last `bank_size` batches that
            `Outer.update` was given.
        keys: go to every term that has an argument of that name; each must suit one at least.

    Raises `InputError`, before any training, for unknown names and for values that a term refuses.
    """
    require(
        reference_points in ("samples", "bank"),
        f"reference_points must be 'samples' or 'bank', got {reference_points!r}",
    )
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
    parts: dict[str, tuple[float, Surrogate, dict[str, Any]]] = {}
    unused = set(keys)
    for name, value in weights.items():
        require(name in SURROGATES, f"outer must be made of {_suggest(name, SURROGATES)}, got {name!r}")
        term = SURROGATES[name]
        allowed = set(inspect.signature(term).parameters) - {"logits", "labels", "bank"}
        own = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight = own.pop("weight", 1.0)
        require(
            isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight < math.inf,
            f"weight of {name} must be a number >= 0, got {weight!r}",
        )
        for key in own:
            require(key in allowed, f"{name} takes {_suggest(key, allowed)}, got {key!r}")
        unused -= allowed
        own = {k: v for k, v in keys.items() if k in allowed} | own
        try:  # the terms check their own keys: let them do it now, on a batch of two
            term(torch.zeros(2, 2), torch.tensor([0, 1]), **own)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{name} cannot work with {own}: {error}") from error
        if weight > 0:
            parts[name] = (float(weight), term, own)
    for key in sorted(unused):
        names = {k for name in weights for k in inspect.signature(SURROGATES[name]).parameters}
        raise InputError(f"outer takes {_suggest(key, names - {'logits', 'labels', 'bank'})}, got {key!r}")
    require(len(parts) > 0, f"outer must have a term of weight > 0, got {dict(weights)}")
    bank = None
    if reference_points == "bank":
        require("sece" in parts, f"reference_points='bank' is for sece, got {sorted(parts)}")
        bank = MemoryBank(bank_size)
    return Outer(parts, bank)


def _suggest(name: str, valid: Any) -> str:
    """The valid names as a phrase, the nearest one to `name` first."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    listed = ", ".join(names) or "no keys"
    return f"{listed} (did you mean {close[0]!r}?)" if close else listed
