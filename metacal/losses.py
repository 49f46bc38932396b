"""Per-sample losses: logits `(N, K)` and labels `(N,)` in, one value per sample `(N,)` out.

Every function works in float32 at least: half-precision logits are raised to float32 before the logarithm, and
the values are returned in that precision, so a mean over the batch does not saturate. Float64 stays float64.
Labels are class indices in 0..K-1. The losses in `SOFT` also take probabilities q `(N, K)` of the classes, whose rows
sum to 1: where a loss is ℓ(y) for a class y, it is then Σ_k q_k ℓ(k), but for `brier` and `mse`, which take q in the
place of the one-hot row. What a loss takes beside them, a gamma or a smoothing, is a number, a 0-d tensor
or one value per sample `(N,)`; as a tensor it is differentiated like any input: detach it where it is to be a constant.
Numbers out of range raise `InputError`; the entries of a tensor are not read, since that would wait for the device.
Value, gradient and mixed derivative (in the logits and such a tensor) are finite for every finite logit gap, but for
the square in `mse`. A logit of -inf rules its class out: p = 0, and it takes no part; the loss is inf where that class
is the label, or where smoothing asks for some of it.

`LOSSES` has them by name, and takes any function like them. One with an argument `gamma` gets the gammas of a source,
one with `smoothing` the α of a source that learns it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.errors import InputError, require
from metacal.options import Option, check_options

__all__ = [
    "LOSSES",
    "PROBABILITY_FLOOR",
    "SIGNED",
    "SOFT",
    "TAKEN",
    "adafocal",
    "brier",
    "classes",
    "confidence_penalty",
    "cross_entropy",
    "dual_focal",
    "focal",
    "inverse_focal",
    "label_smoothing",
    "mse",
    "signed_focal",
    "takes",
]

PROBABILITY_FLOOR = 1e-6
"""Smallest number that `focal` and its kin raise to a power."""

_LARGE = 1 << 24  # logits from which on memory counts for more than the number of kernels


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p_y, in nats. Shapes `(N, K)`, `(N,)` -> `(N,)`."""
    logits = _checked(logits, labels, soft=True)
    return _expected(lambda log_p: -log_p, _log_probability(logits, labels), labels)


def focal(logits: Tensor, labels: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Focal loss -(1 - p_y)^gamma log p_y (Lin et al. 2017). Shapes `(N, K)`, `(N,)`, gamma >= 0 -> `(N,)`.

    1 - p_y is taken from log p_y by expm1, which keeps its digits near p = 1, and is floored at
    `PROBABILITY_FLOOR`: without the floor the gradient is NaN at p = 1 for gamma < 1, and so is the mixed
    derivative in the logits and gamma. gamma = 0 gives the value and the gradient of cross-entropy exactly.
    """
    logits = _checked(logits, labels, soft=True)
    log_p = _log_probability(logits, labels)
    gamma = _beside(_per_sample("gamma", gamma, logits[:, 0]), labels)
    return _expected(lambda log_p: _modulated(log_p, lambda log_p: _miss(log_p) ** gamma), log_p, labels)


def dual_focal(logits: Tensor, labels: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Dual focal loss -(1 - p_y + p_j)^gamma log p_y (Tao et al. 2023). Shapes `(N, K)`, `(N,)`, gamma >= 0 -> `(N,)`.

    p_j is the largest probability among the classes less probable than y, max {p_k : p_k < p_y}, and 0 where there is
    none. The gradient flows through it, of several equal ones through the first. Which classes are less probable is
    read from the logits, where a tie of probabilities by rounding is none. The base of the power is floored as in
    `focal`.
    """
    logits = _checked(logits, labels)
    log_p = _log_probability(logits, labels)
    gap = _next_below(logits, labels) - _of_label(logits, labels)
    below = (log_p + torch.where(gap < 0, gap, -math.inf)).exp()
    gamma = _per_sample("gamma", gamma, log_p)
    return _modulated(log_p, lambda log_p: torch.clamp(below - torch.expm1(log_p), min=PROBABILITY_FLOOR) ** gamma)


def inverse_focal(logits: Tensor, labels: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Inverse focal loss -(1 + p_y)^gamma log p_y (Wang et al. 2021). Shapes `(N, K)`, `(N,)`, gamma >= 0 -> `(N,)`.

    Weighs samples up where the focal loss weighs them down: for networks that are to be scaled afterwards, or that are
    underconfident. The weight (1 + p_y)^gamma ends at e^80, about 2^115, beyond which float32 would overflow.
    -log p_y keeps its digits near p = 1, where that weight makes much of it.
    """
    logits = _checked(logits, labels)
    gamma = _per_sample("gamma", gamma, logits[:, 0])
    log_p = _log_probability(logits, labels, gamma != 0)  # gamma = 0 is cross-entropy, bit for bit
    return _modulated(log_p, lambda log_p: _raised(log_p, gamma))


def adafocal(logits: Tensor, labels: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """The loss of AdaFocal (Ghosh et al. 2022): `focal` where gamma >= 0, `inverse_focal` with -gamma where gamma < 0.

        -(1 - p_y)^gamma log p_y   or   -(1 + p_y)^|gamma| log p_y

    Shapes `(N, K)`, `(N,)`, gamma of either sign -> `(N,)`. The gammas come from `metacal.gamma.AdaFocal`. Both sides
    meet at gamma = 0, cross-entropy, where the derivative in gamma is that from above.
    """
    logits = _checked(logits, labels)
    if not isinstance(gamma, Tensor):
        require(math.isfinite(gamma), f"gamma must be finite, got {gamma}")
        return focal(logits, labels, gamma) if gamma >= 0 else inverse_focal(logits, labels, -gamma)
    gamma = _entries("gamma", gamma, logits[:, 0])
    up = gamma < 0
    log_p = _log_probability(logits, labels, up)
    above, below = torch.where(up, -gamma, 0.0), torch.where(up, 0.0, gamma)
    return _modulated(log_p, lambda log_p: torch.where(up, _raised(log_p, above), _miss(log_p) ** below))


def signed_focal(logits: Tensor, labels: Tensor, gamma: float | Tensor = 0.0) -> Tensor:
    """Focal loss for a gamma of either sign, smooth in it. Shapes `(N, K)`, `(N,)`, any gamma -> `(N,)`.

        -(1 - p_y)^a (1 + p_y)^b log p_y,  a = γ S(γ),  b = a - γ,  S(u) = 1/2 + (15 u - 10 u³ + 3 u⁵) / 16 on [-1, 1]

    S goes from 0 at u <= -1 to 1 at u >= 1 with two continuous derivatives. So this is `focal` where γ >= 1,
    cross-entropy at γ = 0 and `inverse_focal` with -γ where γ <= -1: gammas that are learned pass through 0 without the
    kink of `adafocal`. Negative gammas are for underconfidence: they weigh up samples that are right already, and
    (unlike (1 - p)^γ) stay bounded as p -> 1.
    """
    logits = _checked(logits, labels, soft=True)
    log_p = _log_probability(logits, labels)
    if not isinstance(gamma, Tensor):
        require(math.isfinite(gamma), f"gamma must be finite, got {gamma}")
        gamma = log_p.new_full((), gamma)
    gammas: Tensor = _beside(_entries("gamma", gamma, logits[:, 0]), labels)
    u = gammas.clamp(-1.0, 1.0)
    above = gammas * (0.5 + (15 * u - 10 * u**3 + 3 * u**5) / 16)
    below = above - gammas

    def of_class(log_p: Tensor) -> Tensor:
        return _modulated(log_p, lambda log_p: _miss(log_p) ** above * _raised(log_p, below))

    return _expected(of_class, log_p, labels)


def label_smoothing(
    logits: Tensor,
    labels: Tensor,
    smoothing: Annotated[
        float | Tensor, Option("the alpha of alpha/K, at the start where it is learned", low=0, high=1)
    ] = 0.05,
) -> Tensor:
    """Cross-entropy against the target (1 - α) e_y + α / K, α = `smoothing` (Müller et al. 2019). -> `(N,)`, in nats.

    The mass α in [0, 1] is spread over all K classes, the true one included (α / K, not α / (K - 1)). It can be learned
    by an outer loop, one for all or one per class: `metacal.gamma.LearnedSmoothing`.
    """
    log_p = F.log_softmax(_checked(logits, labels, soft=True), dim=-1)
    true = _expected(lambda log_p: log_p, _of_label(log_p, labels), labels)
    if isinstance(smoothing, Tensor):
        smoothing = _entries("smoothing", smoothing, true)
    else:
        check_options(label_smoothing, smoothing=smoothing)
    return -_times(1 - smoothing, true) - _times(smoothing, log_p.mean(dim=-1))


def confidence_penalty(
    logits: Tensor, labels: Tensor, beta: Annotated[float, Option("weight of the entropy", low=0)] = 0.1
) -> Tensor:
    """Cross-entropy less the entropy of the prediction, -log p_y - β H(p) (Pereyra et al. 2017). -> `(N,)`, in nats.

    H(p) = -Σ_k p_k log p_k, β = `beta` >= 0. May be negative.
    """
    check_options(confidence_penalty, beta=beta)
    log_p = F.log_softmax(_checked(logits, labels, soft=True), dim=-1)
    true = _expected(lambda log_p: log_p, _of_label(log_p, labels), labels)
    # p log p tends to 0 with p: a class that is ruled out has no share, and no 0 · inf.
    ruled_out = log_p == -math.inf
    return -true + beta * (log_p.exp() * log_p.masked_fill(ruled_out, 0.0)).sum(dim=-1)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum_k (p_k - 1[k = y])^2, in [0, 2] (Brier 1950). Shapes `(N, K)`, `(N,)` -> `(N,)`."""
    logits = _checked(logits, labels, soft=True)
    return _less_rows(F.softmax(logits, dim=-1), labels).square().sum(dim=-1)


def mse(logits: Tensor, labels: Tensor) -> Tensor:
    """1/K sum_k (z_k - 1[k = y])^2: squared error of the logits against one-hot. `(N, K)`, `(N,)` -> `(N,)`."""
    logits = _checked(logits, labels, soft=True)
    return _less_rows(logits, labels).square().mean(dim=-1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "adafocal": adafocal,
    "brier": brier,
    "confidence_penalty": confidence_penalty,
    "cross_entropy": cross_entropy,
    "dual_focal": dual_focal,
    "focal": focal,
    "inverse_focal": inverse_focal,
    "label_smoothing": label_smoothing,
    "mse": mse,
    "signed_focal": signed_focal,
}
"""Losses by the name that a configuration gives, each with the options of its annotated arguments."""

SIGNED = ("adafocal", "signed_focal")
"""Losses whose gamma may be negative."""

SOFT = ("brier", "confidence_penalty", "cross_entropy", "focal", "label_smoothing", "mse", "signed_focal")
"""Losses that take probabilities of the classes as labels."""

TAKEN = ("gamma", "smoothing")
"""Names of the argument of a loss that a source of `metacal.gamma` gives."""


def takes(loss: Callable[..., Tensor]) -> str | None:
    """The argument that a source gives to this loss, one of `TAKEN`; None where there is none."""
    arguments = inspect.signature(loss).parameters
    return next((name for name in TAKEN if name in arguments), None)


def classes(labels: Tensor) -> Tensor:
    """Class indices (N,) of labels: of probabilities (N, K) the most probable class."""
    return labels.argmax(-1) if labels.dim() == 2 else labels


def _checked(logits: Tensor, labels: Tensor, soft: bool = False) -> Tensor:
    """The logits in float32 or better, once the shapes and types are right.

    soft: labels may be probabilities of the classes.
    """
    if logits.dim() != 2:
        raise InputError(f"logits must have shape (N, K), got {tuple(logits.shape)}")
    if labels.dim() == 2 and labels.is_floating_point():
        require(soft, f"labels that are probabilities of the classes go with the losses {', '.join(SOFT)} only")
        require(
            labels.shape == logits.shape,
            f"labels that are probabilities must have the shape of the logits {tuple(logits.shape)}, got "
            f"{tuple(labels.shape)}",
        )
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if labels.shape != logits.shape[:1]:
        raise InputError(
            f"labels must have shape ({logits.shape[0]},) like the logits' rows, got {tuple(labels.shape)}"
        )
    if labels.dtype != torch.int64:
        raise InputError(f"labels must be int64 class indices, got {labels.dtype}")
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _expected(loss: Callable[[Tensor], Tensor], log_p: Tensor, labels: Tensor) -> Tensor:
    """`loss` of log p_y (N,); of all log p (N, K) Σ_k q_k of it for probabilities q, where a class without a share
    has none.
    """
    if labels.dim() == 1:
        return loss(log_p)
    possible = log_p.masked_fill((labels == 0) & (log_p == -math.inf), 0.0)
    return (labels.to(log_p.dtype) * loss(possible)).sum(-1)


def _beside(value: float | Tensor, labels: Tensor) -> Any:
    """A number for each sample, in the shape of the labels' classes where these are probabilities."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) and value.dim() == 1 and labels.dim() == 2 else value


def _less_rows(x: Tensor, labels: Tensor) -> Tensor:
    """x - 1[k = y], without the matrix of ones and zeros; x less the probabilities where labels are such."""
    if labels.dim() == 2:
        return x - labels.to(x.dtype)
    return x.scatter_add(-1, labels.unsqueeze(-1), x.new_full((len(x), 1), -1.0))


def _log_probability(logits: Tensor, labels: Tensor, near_one: bool | Tensor = False) -> Tensor:
    """log p_y of each row (N,); log p of every class (N, K) where labels are probabilities.

    With m the maximum and s = Σ_{k≠y} e^{z_k - m}, of large arrays it is (z_y - m) - log(e^{z_y - m} + s), whose mixed
    derivative takes autograd four arrays as large as the logits; of small ones log_softmax, which takes six, and one
    kernel in place of eight.

    near_one: the rows whose log p keeps its digits near p = 1, where the sum is 1 + s and loses s below 1e-16 (float32:
    6e-8): there it is -log1p(s / e^{z_y - m}).
    """
    small = labels.dim() == 2 or logits.numel() < _LARGE
    log_p = _of_label(F.log_softmax(logits, dim=-1), labels) if small else None
    if log_p is not None and near_one is False:
        return log_p
    top = logits.detach().amax(dim=-1, keepdim=True)
    others = (logits - top).scatter(-1, labels.unsqueeze(-1), -math.inf).exp().sum(dim=-1)
    label = _of_label(logits, labels) - top.squeeze(-1)
    if log_p is None:
        log_p = label - (label.exp() + others).log()
    if near_one is False:
        return log_p
    near_one = (log_p > -0.1) & near_one  # elsewhere an exponential might overflow, and nothing is lost
    return torch.where(near_one, -torch.log1p(others / torch.where(near_one, label, 0.0).exp()), log_p)


def _next_below(logits: Tensor, labels: Tensor) -> Tensor:
    """max {z_k : z_k < z_y} of each row (N,), with its gradient, of the first where several are equal; some z_k >= z_y
    where there is none."""
    with torch.no_grad():
        less = logits < logits.gather(-1, labels.unsqueeze(-1))
        place = torch.where(less, logits, -math.inf).argmax(dim=-1)
    return _of_label(logits, place)


def _of_label(x: Tensor, labels: Tensor) -> Tensor:
    """x_y of each row (N,); x where labels are probabilities."""
    return x if labels.dim() == 2 else x.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _miss(log_p: Tensor) -> Tensor:
    """1 - p from log p, at least `PROBABILITY_FLOOR`."""
    return torch.clamp(-torch.expm1(log_p), min=PROBABILITY_FLOOR)


def _modulated(log_p: Tensor, weight: Callable[[Tensor], Tensor]) -> Tensor:
    """-w log p, with the weight as a function of log p.

    The weight is 1 at p = 0 for all of the family, so that the loss and its gradient are cross-entropy's there, where
    w' log p would be 0 · inf.
    """
    impossible = log_p == -math.inf
    possible = log_p.masked_fill(impossible, 0.0)
    return -torch.where(impossible, log_p, weight(possible) * possible)


def _raised(log_p: Tensor, gamma: float | Tensor) -> Tensor:
    """(1 + p)^gamma from log p, at most e^80: gamma log(1 + p) is what overflows when raised."""
    return torch.exp(torch.clamp(gamma * torch.log1p(log_p.exp()), max=80.0))


def _times(weight: float | Tensor, log_p: Tensor) -> Tensor:
    """weight · log p, which is 0 where the weight is 0, also for log p = -inf."""
    if not isinstance(weight, Tensor):
        return weight * log_p if weight else torch.zeros_like(log_p)
    return weight * torch.where((weight == 0) & (log_p == -math.inf), 0.0, log_p)


def _per_sample(name: str, value: float | Tensor, like: Tensor) -> float | Tensor:
    """`value` if it is a number >= 0 or a tensor of `_entries`."""
    if isinstance(value, Tensor):
        return _entries(name, value, like)
    require(0 <= value < math.inf, f"{name} must be >= 0, got {value}")
    return value


def _entries(name: str, value: Tensor, like: Tensor) -> Tensor:
    """`value` in the type of `like`, with one entry or one per sample."""
    require(
        value.dim() == 0 or value.shape == like.shape,
        f"{name} must be a number or have one value per sample {tuple(like.shape)}, got shape {tuple(value.shape)}",
    )
    return value.to(like.dtype)
