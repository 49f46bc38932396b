"""Differentiable surrogates of the calibration error: the objectives of the outer loop.

Each is a function `(logits (N, K), labels (N,), **keys) -> 0-d tensor`, computed from p = softmax(logits),
the confidence c_i = p_{i,ŷ_i} at ŷ_i = argmax_k logits_{i,k} (the lowest index wins a tie) and the
correctness a_i = 1[ŷ_i = y_i], a constant. Values are fractions (`nll`: nats).

They work under autograd and under `torch.func` (`grad`, `jvp`, `vmap`), for a batch of one, and for batches
that are all right or all wrong: value and gradient are never NaN unless the logits are. bfloat16 and half
logits are taken to float32. `MemoryBank` is the one thing here with state.

`sece`, `mmce` and `skce` are sums over all pairs of samples. Their gradient in c is formed together with
their value, in float64 and without an N × N matrix: in O(N log N) for the Laplacian kernel of `mmce` and
`skce`, and over the pairs within the kernel's reach for `sece`. They can be differentiated once; a second
derivative raises an error.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.calibration._pairs import PairSum, kernel_rule, sece_rule
from metacal.errors import InputError, require

__all__ = [
    "SURROGATES",
    "MemoryBank",
    "Outer",
    "brier",
    "build_outer",
    "confidence_gap",
    "dece",
    "effective_neighbours",
    "mmce",
    "nll",
    "sece",
    "skce",
    "soft_ece",
]

Surrogate = Callable[..., Tensor]
Bank = tuple[Tensor, Tensor]


# ---------------------------------------------------------------------------------------------- input


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The pair with logits in float32 or float64 and integer labels, or an `InputError`."""
    require(
        isinstance(logits, Tensor) and logits.ndim == 2 and logits.is_floating_point(),
        f"logits must be a floating-point tensor of shape (N, K), got {_described(logits)}",
    )
    n, k = logits.shape
    require(n > 0 and k > 1, f"logits must have N >= 1 rows and K >= 2 columns, got shape {(n, k)}")
    require(
        isinstance(labels, Tensor)
        and labels.shape == (n,)
        and not labels.is_floating_point()
        and labels.dtype is not torch.bool,
        f"labels must be an integer tensor of shape ({n},), got {_described(labels)}",
    )
    # A look at the values would make a GPU wait, and is impossible for a label that vmap runs over.
    if labels.device.type == "cpu" and not torch._C._functorch.is_batchedtensor(labels):
        low, high = labels.aminmax()
        require(
            low.item() >= 0 and high.item() < k,
            f"labels must lie in 0..{k - 1}, got values from {low.item()} to {high.item()}",
        )
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits, labels.long()


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def _confidence(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence c (N,), differentiable, and correctness a (N,) of the same dtype, constant."""
    predicted = logits.argmax(dim=1)
    # Gathering (not amax) sends the gradient of a tie to the class that was predicted.
    confidence = logits.log_softmax(dim=1).gather(1, predicted[:, None]).squeeze(1).exp()
    return confidence, (predicted == labels).to(logits.dtype)


def _positive(**values: float) -> None:
    for name, value in values.items():
        require(0 < value < math.inf, f"{name} must be > 0, got {value}")


def _norm(norm: str) -> None:
    require(norm in ("l1", "l2"), f"norm must be 'l1' or 'l2', got {norm!r}")


def _safe_sqrt(square: Tensor) -> Tensor:
    """√x with value and gradient 0 at x = 0 (where the inner mask keeps 0·∞ out of the gradient)."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


# ---------------------------------------------------------------------------------------------- surrogates


def sece(
    logits: Tensor,
    labels: Tensor,
    bandwidth: float = 0.01,
    self_term: bool = True,
    norm: str = "l1",
    bank: Bank | None = None,
) -> Tensor:
    """Smooth expected calibration error of Meta-Regularization (arXiv 2303.15057).

        SECE = 1/N Σ_i |ã_i − c_i|,  ã_i = Σ_j K(c_i − c_j) a_j / Σ_j K(c_i − c_j),  K(u) = exp(−u²/(2h²))

    The gradient flows through every c, inside the kernel too. It is exact, and of first order only.

    Args:
        bandwidth: h, in units of confidence.
        self_term: True lets j = i count, as published: as h → 0 the value then tends to mean |a − c|, a
            reward for mere confidence. False leaves it out. The ratio is then taken relative to the nearest
            other reference, so that an isolated sample gets that one's correctness (the formula's limit),
            never 0/0; with no other reference at all (a batch of one, no bank) value and gradient are 0.
        norm: "l1" as above, "l2": sqrt(1/N Σ_i (ã_i − c_i)²).
        bank: confidence (B,) and correctness (B,) of earlier samples (`MemoryBank`): constants, further j.

    Biased upwards for small N·h: see docs/surrogates.md for the size, and `effective_neighbours`.
    """
    _positive(bandwidth=bandwidth)
    _norm(norm)
    logits, labels = _checked(logits, labels)
    c, a = _confidence(logits, labels)
    if bank is None:
        bank_c = bank_a = c.detach().new_zeros(0)
    else:
        bank_c, bank_a = (t.detach().to(c) for t in bank)
        require(
            bank_c.ndim == 1 and bank_c.shape == bank_a.shape,
            f"bank must be two tensors of shape (B,), got {tuple(bank_c.shape)} and {tuple(bank_a.shape)}",
        )
    return PairSum.apply(sece_rule(bandwidth, self_term, norm), c, a, bank_c, bank_a)[0]


def mmce(logits: Tensor, labels: Tensor, bandwidth: float = 0.4, weighted: bool = False) -> Tensor:
    """Maximum mean calibration error (Kumar, Sarawagi & Jain 2018), sqrt of the V-statistic.

        MMCE² = 1/N² Σ_ij e_i e_j k(c_i, c_j),  e = c − a,  k(u, v) = exp(−|u − v|/bandwidth)

    weighted: e_i is weighted by 1/(number of right samples) or 1/(number of wrong ones) in place of 1/N, so
    that the few wrong samples of an accurate model count as much; a group that is absent adds nothing.
    The gradient at MMCE = 0 is taken as 0.
    """
    _laplace_bandwidth(bandwidth)
    logits, labels = _checked(logits, labels)
    return PairSum.apply(kernel_rule(bandwidth, weighted, False), *_confidence(logits, labels))[0]


def skce(logits: Tensor, labels: Tensor, bandwidth: float = 0.4) -> Tensor:
    """Unbiased estimate of the squared kernel calibration error of the confidence (Widmann et al. 2019).

        SKCE = 1/(N(N−1)) Σ_{i≠j} e_i e_j k(c_i, c_j),  e = c − a,  k(u, v) = exp(−|u − v|/bandwidth)

    May be negative; its mean over batches does not depend on their size. A batch of one gives 0.
    """
    _laplace_bandwidth(bandwidth)
    logits, labels = _checked(logits, labels)
    return PairSum.apply(kernel_rule(bandwidth, False, True), *_confidence(logits, labels))[0]


def _laplace_bandwidth(bandwidth: float) -> None:
    require(0.002 <= bandwidth < math.inf, f"bandwidth must be >= 0.002, got {bandwidth}")


def _soft_bins(c: Tensor, a: Tensor, n_bins: int, temperature: float, norm: str) -> Tensor:
    """Σ_m S_m/N |A_m − C_m| (or its l2 form) with memberships softmax_m(−(c − centre_m)²/temperature)."""
    centres = (torch.arange(n_bins, dtype=c.dtype, device=c.device) + 0.5) / n_bins
    members = (-(c[:, None] - centres).square() / temperature).softmax(dim=1)
    gaps = (members * (a - c)[:, None]).sum(0)  # S_m (A_m − C_m), which needs no division
    if norm == "l1":
        return gaps.abs().sum() / len(c)
    mass = members.sum(0)
    # |gap_m| <= mass_m, so an empty bin's term tends to 0: the floor only keeps 0/0 out of it.
    return _safe_sqrt((gaps * (gaps / mass.clamp(min=torch.finfo(c.dtype).tiny))).sum() / len(c))


def dece(
    logits: Tensor, labels: Tensor, n_bins: int = 15, t_a: float = 100.0, t_b: float = 0.01, norm: str = "l1"
) -> Tensor:
    """Differentiable ECE of Meta-Calibration (Bohdal, Yang & Hospedales 2023).

        DECE = Σ_m S_m/N |A_m − C_m|,  S_m = Σ_i u_im,  u_i = softmax_m((m c_i − Σ_{l<m} l/M) / t_b),
        accuracy a_i = relu(2 − rank_i),  rank_i = 1 + Σ_{k≠y_i} sigmoid(t_a (p_{i,k} − p_{i,y_i}))

    Unlike the others it has a gradient in the accuracy. Its soft bins u are those of `soft_ece` at
    temperature 2·t_b/M (the square completed).
    """
    require(n_bins >= 1, f"n_bins must be >= 1, got {n_bins}")
    _positive(t_a=t_a, t_b=t_b)
    _norm(norm)
    logits, labels = _checked(logits, labels)
    c, _ = _confidence(logits, labels)
    p = logits.softmax(dim=1)
    above = torch.sigmoid(t_a * (p - p.gather(1, labels[:, None])))
    rank = above.sum(1) + 0.5  # k = y adds sigmoid(0) = 1/2, which makes 1
    return _soft_bins(c, torch.relu(2 - rank), n_bins, 2 * t_b / n_bins, norm)


def soft_ece(logits: Tensor, labels: Tensor, n_bins: int = 15, temperature: float = 0.01, norm: str = "l2") -> Tensor:
    """Soft-binned ECE, SB-ECE (Karandikar et al. 2021), with their default of the l2 norm.

        (Σ_m S_m/N |A_m − C_m|^q)^(1/q),  S_m = Σ_i u_im,  u_i = softmax_m(−(c_i − (m − ½)/M)² / temperature)

    A_m and C_m are the means of a and c under u_{·m}; q = 1 or 2.
    """
    require(n_bins >= 1, f"n_bins must be >= 1, got {n_bins}")
    _positive(temperature=temperature)
    _norm(norm)
    logits, labels = _checked(logits, labels)
    return _soft_bins(*_confidence(logits, labels), n_bins, temperature, norm)


def confidence_gap(logits: Tensor, labels: Tensor, squared: bool = False) -> Tensor:
    """|mean c − mean a|, ECE with a single bin, or its square. The gradient of the former at 0 is 0."""
    logits, labels = _checked(logits, labels)
    c, a = _confidence(logits, labels)
    gap = (c - a).mean()
    return gap.square() if squared else gap.abs()


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood, 1/N Σ_i −log p_{i,y_i}, in nats."""
    return F.cross_entropy(*_checked(logits, labels))


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean Brier score, 1/N Σ_i Σ_k (p_{i,k} − 1[k = y_i])², in [0, 2]."""
    logits, labels = _checked(logits, labels)
    p = logits.softmax(dim=1)
    # Σ_k (p_k − 1[k=y])² without the one-hot matrix
    return (p.square().sum(1) - 2 * p.gather(1, labels[:, None]).squeeze(1) + 1).mean()


SURROGATES: dict[str, Surrogate] = {
    f.__name__: f for f in (sece, dece, soft_ece, mmce, skce, nll, brier, confidence_gap)
}


@torch.no_grad()
def effective_neighbours(logits: Tensor, bandwidth: float = 0.01, bank: Bank | None = None) -> float:
    """How many samples stand behind one ã_i of `sece`: the mean over i of (Σ_j K_ij)² / Σ_j K_ij²."""
    _positive(bandwidth=bandwidth)
    logits, _ = _checked(logits, logits.new_zeros(len(logits), dtype=torch.long))
    c = logits.softmax(dim=1).amax(dim=1)
    r = c if bank is None else torch.cat([c, bank[0].to(c)])
    sizes = []
    for block in c.split(max(1, 2**20 // len(r))):
        kernel = ((block[:, None] - r) / bandwidth).square().mul_(-0.5).exp_()
        sizes.append(kernel.sum(1).square() / kernel.square().sum(1))
    return torch.cat(sizes).mean().item()


# ------------------------------------------------------------------------------------- the outer objective


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
        confidence, correct = _confidence(*_checked(logits, labels))
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
