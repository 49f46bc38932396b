"""Predictions: class scores with their labels, checked once, from which every measure is computed.

    p = Predictions.from_logits(logits, labels)          # logits (N, K), labels (N,)
    p = Predictions.from_probabilities(probs, labels)    # rows sum to one
    p.confidence, p.predicted, p.correct                 # max_k p_k, argmax_k p_k, 1[argmax = label]

The caller says which kind of scores they are; nothing is guessed from their range. What is summed is float64,
whatever the input's type, so that sums do not saturate and a value lies on the side of an edge where arithmetic
puts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metacal.errors import InputError, require
from metacal.files import UNREADABLE, arrays_in, write_atomically

__all__ = ["Predictions"]

# Rows of probabilities must sum to 1 within this. Half types round every entry by 2^-11 or 2^-8 of itself;
# float64 rows are often a float32 softmax that was converted, so they get float32's care, not float64's.
_ROW_SUM_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}

_SHORT = 64  # classes up to which a block of rows is transposed first


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """N predictions over K classes and their labels; made by `from_logits`, `from_probabilities` or `load`.

    Attributes:
        labels: the classes y, int64 (N,).
        confidence: c = max_k p_k, float64 (N,), in (0, 1].
        correct: 1[predicted = label], bool (N,).
        predicted: argmax_k p_k, int64 (N,); the lowest index wins a tie.
        log_likelihood: log p_y in nats, float64 (N,); -inf where p_y is 0.
        logits: the logits as given, (N, K), at least float32; None if made from probabilities.
        probs: the probabilities (N, K). As given if made from probabilities (at least float32), else softmax of
            the logits in float64. That is computed when first asked for and kept; the measures read `chunks()`.

    All tensors lie on the device of the scores. Scores in float32 or float64 are not copied: do not write into them.
    """

    labels: Tensor
    confidence: Tensor
    correct: Tensor
    logits: Tensor | None = None
    _probs: Tensor | None = field(default=None)
    _log_likelihood: Tensor | None = field(default=None)

    @classmethod
    def from_logits(cls, logits: Any, labels: Any) -> Predictions:
        """Predictions with p = softmax(logits): logits (N, K), labels (N,) in 0..K-1; tensors, arrays or nested lists.

        A logit of -inf is a class ruled out (p = 0) and is allowed beside a finite one. Raises InputError that names
        the first bad row for NaN, +inf, or a row without a finite logit.
        """
        scores, _ = _scores(logits, "logits")
        y = _labels(labels, scores)
        confidence, log_likelihood = torch.empty(2, len(y), dtype=torch.float64, device=y.device)
        correct = torch.empty_like(y, dtype=torch.bool)
        for rows in _slices(scores):
            z, label = scores[rows], y[rows]
            top, correct[rows] = _top(z, label)
            if not bool(torch.isfinite(top).all()):
                _raise_bad_logits(z, rows.start)
            # Less the row's maximum first: beside a logit of 1e17, log K is lost in rounding.
            below = z.double() - top.double()[:, None]
            lse = torch.logsumexp(below, 1)
            confidence[rows] = (-lse).exp_()
            log_likelihood[rows] = below.gather(1, label[:, None]).squeeze(1) - lse
        return cls(y, confidence, correct, logits=scores, _log_likelihood=log_likelihood)

    @classmethod
    def from_probabilities(cls, probs: Any, labels: Any) -> Predictions:
        """Predictions with probs (N, K) as they are, labels (N,) in 0..K-1; tensors, arrays or nested lists.

        Rows are not renormalised, and a binary problem needs both columns. Raises InputError that names the first row
        which is not a probability vector: NaN, a negative entry, or a sum away from 1 by more than 1e-5 (float64),
        1e-4 (float32), 5e-3 (float16) or 2e-2 (bfloat16).
        """
        scores, given = _scores(probs, "probs")
        tolerance = _ROW_SUM_TOLERANCE.get(given, _ROW_SUM_TOLERANCE[scores.dtype])
        y = _labels(labels, scores)
        top, correct, total = _tops_and_sums(scores, y)
        if not bool(top.amin() > 0):  # a NaN or a negative entry in some row, or a zero with a sign, which does no harm
            strange = ~(top > 0)
            unsigned = scores[strange].add_(0.0)
            if not bool(unsigned.amin() >= 0):
                _raise_bad_probabilities(scores, tolerance)
            top[strange], correct[strange] = _top(unsigned, y[strange])
        least, most = (float(end) for end in total.aminmax())
        if not max(1 - least, most - 1) <= tolerance:
            _raise_bad_probabilities(scores, tolerance)
        confidence = top.double().clamp_(max=1.0)
        return cls(y, confidence, correct, _probs=scores)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Predictions:
        """Read an npz file with arrays `labels` and either `logits` or `probs`. Raises InputError for
        anything else.
        """
        path = Path(path)
        require(path.is_file(), f"predictions file not found: {path}")
        what = f"{path} must be an npz file with arrays logits or probs, and labels"
        try:
            arrays = arrays_in(path, ("logits", "probs", "labels"))
        except UNREADABLE as error:
            raise InputError(f"{what}: {error}") from error
        require("" not in arrays, f"{what}: it holds a single array")
        names = ", ".join(arrays) or "none"
        scores = [name for name in ("logits", "probs") if name in arrays]
        require(
            len(scores) == 1 and "labels" in arrays,
            f"{path} must hold labels and exactly one of logits and probs; its arrays are: {names}",
        )
        make = cls.from_logits if scores[0] == "logits" else cls.from_probabilities
        try:
            return make(arrays[scores[0]], arrays["labels"])
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an npz file that `load` reads: `labels` and `logits`, or `probs` if there are no logits.

        The file is complete or absent: it is written beside its place and then moved there.

        Raises:
            RunError: when it cannot be written.
        """
        name, scores = ("probs", self.probs) if self.logits is None else ("logits", self.logits)
        arrays: dict[str, Any] = {name: scores.cpu().numpy(), "labels": self.labels.cpu().numpy()}
        write_atomically(Path(path), lambda file: np.savez_compressed(file, **arrays))

    @property
    def n_classes(self) -> int:
        """K, the width of the scores, whether or not every class occurs."""
        return self._scores.shape[1]

    @property
    def device(self) -> torch.device:
        return self.labels.device

    @property
    def probs(self) -> Tensor:
        return self._softmax if self._probs is None else self._probs

    @cached_property
    def predicted(self) -> Tensor:
        return torch.cat([self._scores[rows].argmax(1) for rows in _slices(self._scores)])

    @cached_property
    def log_likelihood(self) -> Tensor:
        if self._log_likelihood is not None:
            return self._log_likelihood
        p_y = self._scores.gather(1, self.labels[:, None]).squeeze(1)
        return p_y.double().clamp_(max=1.0).log_()

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, probabilities of these rows), a few megabytes at a time, so that no (N, K) copy is
        made.

        The dtype is float64 if made from logits, else as given (float32 or float64).
        """
        scores = self._scores
        for rows in _slices(scores):
            yield rows, scores[rows] if self.logits is None else torch.softmax(scores[rows].double(), 1)

    def __getitem__(self, index: Tensor | slice) -> Predictions:
        """The predictions at `index`: a slice, or a tensor of positions (repeats allowed) or a mask.
        Nothing is rechecked.
        """
        require(
            isinstance(index, Tensor | slice),
            f"index must be a slice or a tensor, got {type(index).__name__}",
        )
        out = self._each(lambda t: t[index])
        require(len(out) > 0, "the index leaves no predictions, at least 1 is needed")
        return out

    def in_units(self, unit: float) -> Predictions:
        """The same with confidence and log-likelihood rounded to whole multiples of `unit`, a power of 2, and the
        log-likelihood at least -10^6 nats.

        Float64 sums of multiples of 2^-30 are exact below 2^23: they have the same bits in whatever order and batches
        the samples come.
        """
        rounded = ((t / unit).round_() * unit for t in (self.confidence, self.log_likelihood.clamp(min=-1e6)))
        confidence, log_likelihood = rounded
        return replace(self, confidence=confidence, _log_likelihood=log_likelihood)

    def to(self, device: torch.device | str) -> Predictions:
        """The same predictions on another device."""
        return self._each(lambda t: t.to(device))

    def _each(self, f: Callable[[Tensor], Tensor]) -> Predictions:
        fields = (self.labels, self.confidence, self.correct, self.logits, self._probs, self._log_likelihood)
        return Predictions(*(None if t is None else f(t) for t in fields))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.labels.shape[0]

    def __repr__(self) -> str:
        kind = "probabilities" if self.logits is None else "logits"
        return f"Predictions({len(self)} samples, {self.n_classes} classes, from {kind}, on {self.device})"

    @property
    def _scores(self) -> Tensor:
        scores = self._probs if self.logits is None else self.logits
        assert scores is not None
        return scores

    @cached_property
    def _softmax(self) -> Tensor:
        return torch.cat([p for _, p in self.chunks()])


def _slices(scores: Tensor) -> Iterator[slice]:
    """Row slices of about 2^17 entries, which stay in the processor's cache, or 2^24 where kernel launches cost."""
    n, k = scores.shape
    step = max(1, (1 << 17 if scores.device.type == "cpu" else 1 << 24) // k)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _top(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """max_k x_{i,k} (n,), NaN where the row has one, and 1[argmax_k x_{i,k} = label], bool (n,), of x (n, K).

    The lowest index wins a tie.
    """
    if x.device.type != "cpu":
        index = x.argmax(1)
    elif x.shape[1] > _SHORT:
        index = torch.from_numpy(x.numpy().argmax(1))  # several times faster than torch's
    else:
        return _top_of_columns(x, np.ascontiguousarray(x.numpy().T), labels)
    return x.gather(1, index[:, None]).squeeze(1), index == labels


def _tops_and_sums(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_top` of all rows, and Σ_k p_{i,k} (n,). A row with a NaN or a sign has a top that is NaN or not > 0.

    The bits of numbers >= 0, read as unsigned integers, are in the numbers' order, and those of a NaN or of anything
    with a sign lie above them: the one search for the largest sees every entry that is no probability.
    """
    total = torch.empty(len(labels), dtype=scores.dtype, device=scores.device)
    bits = None if scores.device.type != "cpu" else scores.numpy().view(f"u{scores.itemsize}")
    if bits is not None and scores.shape[1] > _SHORT:
        index = torch.empty_like(labels)
        for rows in _slices(scores):
            bits[rows].argmax(1, out=index.numpy()[rows])
            torch.sum(scores[rows], 1, out=total[rows])
        return scores.gather(1, index[:, None]).squeeze(1), index == labels, total
    top, correct = torch.empty_like(total), torch.empty_like(labels, dtype=torch.bool)
    for rows in _slices(scores):
        p = scores[rows]
        if bits is None:
            largest, correct[rows] = _top(p, labels[rows])
            top[rows] = torch.where(p.amin(1) >= 0, largest, torch.nan)
            total[rows] = p.sum(1)
        else:
            columns = np.ascontiguousarray(bits[rows].T)
            top[rows], correct[rows] = _top_of_columns(p, columns, labels[rows])
            torch.sum(torch.from_numpy(columns.view(scores.numpy().dtype)), 0, out=total[rows])
    return top, correct, total


def _top_of_columns(x: Tensor, columns: np.ndarray, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`_top` of short rows, given as columns (K, n) too, or as their bits: along the samples reductions are fast.

    A label hits if it reaches the maximum and no earlier class does. Ties are rare: they are counted over all rows, and
    only if there is one are the indices of the maxima computed, which takes longer than all the rest.
    """
    largest = columns.max(0)
    top = torch.from_numpy(largest.view(x.numpy().dtype))
    if np.count_nonzero(columns == largest) > len(largest):
        return top, torch.from_numpy(columns.argmax(0)) == labels
    return top, x.gather(1, labels[:, None]).squeeze(1) == top


def _as_tensor(x: Any, rule: str) -> Tensor:
    if isinstance(x, Tensor):
        return x
    try:
        return torch.as_tensor(np.asarray(x))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{rule}, got {type(x).__name__}: {error}") from None


def _scores(x: Any, name: str) -> tuple[Tensor, torch.dtype]:
    """`x` as a detached (N, K) tensor, float32 or float64, and the type it came in. MPS lacks float64: to the CPU."""
    x = _as_tensor(x, f"{name} must be a numeric array of shape (N, K)").detach()
    given, shape = x.dtype, tuple(x.shape)
    hint = "; for a binary problem give both columns" if x.ndim == 1 or shape[1:] == (1,) else ""
    require(x.ndim == 2 and shape[1] >= 2, f"{name} must have shape (N, K) with K >= 2, got {shape}{hint}")
    require(shape[0] > 0, f"{name} must have at least 1 row, got shape {shape}")
    require(not (x.is_complex() or x.dtype == torch.bool), f"{name} must be real numbers, got {x.dtype}")
    if x.device.type == "mps":
        x = x.cpu()
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float() if x.is_floating_point() else x.double()
    return x, given


def _labels(labels: Any, scores: Tensor) -> Tensor:
    """`labels` as int64 (N,) in 0..K-1 on the device of `scores`."""
    labels = _as_tensor(labels, "labels must be an integer array of shape (N,)")
    n, k = scores.shape
    hint = " (class indices, not one-hot rows)" if labels.ndim == 2 else ""
    require(tuple(labels.shape) == (n,), f"labels must have shape ({n},), got {tuple(labels.shape)}{hint}")
    integral = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    require(integral, f"labels must be integers in 0..{k - 1}, got {labels.dtype}")
    labels = labels.detach().to(device=scores.device, dtype=torch.int64)
    low, high = labels.aminmax()
    if int(low) < 0 or int(high) >= k:
        row = int(((labels < 0) | (labels >= k)).nonzero()[0])
        raise InputError(f"labels must be in 0..{k - 1}, got {int(labels[row])} in row {row}")
    return labels


def _raise_bad_logits(z: Tensor, start: int) -> None:
    row = int((~torch.isfinite(z.amax(1))).nonzero()[0])
    values = z[row]
    what = "NaN" if values.isnan().any() else "+inf" if (values == torch.inf).any() else "only -inf"
    raise InputError(f"logits must be finite (-inf rules a class out), got {what} in row {start + row}")


def _raise_bad_probabilities(probs: Tensor, tolerance: float) -> None:
    """Name the first bad row, or the worst where a sum at the very tolerance fails in float32 and not in float64."""
    worst, farthest = 0, 0.0
    for rows in _slices(probs):
        p = probs[rows]
        away = (p.double().sum(1) - 1).abs()
        bad = ~(p.amin(1) >= 0) | ~(away <= tolerance)
        if bool(bad.any()):
            worst = rows.start + int(bad.int().argmax())
            break
        if float(away.amax()) > farthest:
            worst, farthest = rows.start + int(away.argmax()), float(away.amax())
    values = probs[worst]
    if bool(values.isnan().any()):
        what = "NaN"
    elif bool((values < 0).any()):
        what = f"the negative entry {float(values.amin()):.6g}"
    else:
        what = f"a sum of {float(values.double().sum()):.6g}"
    raise InputError(
        f"probs must have rows >= 0 that sum to 1 (within {tolerance:g}), got {what} in row {worst};"
        " logits go to from_logits, as in metacal.Predictions.from_logits(logits, labels)"
    )
