"""Differentiable surrogates of the calibration error, as functions of a batch.

Each is a function `(logits (N, K), labels (N,), **keys) -> 0-d tensor`, computed from p = softmax(logits),
the confidence c_i = p_{i,ŷ_i} at ŷ_i = argmax_k logits_{i,k} (the lowest index wins a tie) and the
correctness a_i = 1[ŷ_i = y_i], a constant. Values are fractions (`nll`: nats).

They work under autograd and under `torch.func` (`grad`, `jvp`, `vmap`), for a batch of one, and for batches
that are all right or all wrong: value and gradient are never NaN unless the logits are. bfloat16 and half
logits are taken to float32.

`sece`, `mmce` and `skce` are sums over all pairs of samples. Their gradient in c is formed together with
their value, in float64 and without an N × N matrix: in O(N log N) for the Laplacian kernel of `mmce` and
`skce`, and over the pairs within the kernel's reach for `sece`. They can be differentiated once; a second
derivative raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.calibration._pairs import PairSum, kernel_rule, sece_rule
from metacal.calibration.kernel import LAPLACE_SCALE
from metacal.errors import require
from metacal.options import Option, check_options

__all__ = [
    "BANDWIDTHS",
    "BATCH_PENALTIES",
    "FIRST_ORDER",
    "SURROGATES",
    "Bank",
    "Surrogate",
    "batch_bandwidth",
    "brier",
    "check_batch",
    "confidence_gap",
    "confidences",
    "dece",
    "effective_neighbours",
    "mdca",
    "mmce",
    "nll",
    "sece",
    "skce",
    "soft_ece",
]

Surrogate = Callable[..., Tensor]
"""`(logits (N, K), labels (N,), **keys) -> 0-d tensor`."""

Bank = tuple[Tensor, Tensor]
"""Confidence (B,) and correctness (B,) of earlier samples."""

SECE_BANDWIDTH = 0.01

Bandwidth = Annotated[float, Option("of the Laplacian kernel, in units of confidence", low=0.002)]
Norm = Annotated[str, Option("of the gaps between confidence and accuracy", choices=("l1", "l2"))]
Adaptive = Annotated[bool, Option("the kernel's or bins' width follows the size of the batch")]
Bins = Annotated[int, Option("soft bins of the confidence", low=1)]


# ---------------------------------------------------------------------------------------------- input


def check_batch(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
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


def confidences(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence c (N,), differentiable, and correctness a (N,) of the same dtype, constant."""
    predicted = logits.argmax(dim=1)
    # Gathering (not amax) sends the gradient of a tie to the class that was predicted.
    confidence = logits.log_softmax(dim=1).gather(1, predicted[:, None]).squeeze(1).exp()
    return confidence, (predicted == labels).to(logits.dtype)


def _safe_sqrt(square: Tensor) -> Tensor:
    """√x with value and gradient 0 at x = 0 (where the inner mask keeps 0·∞ out of the gradient)."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


BANDWIDTHS = (0.005, 0.2)
"""Least and largest of `batch_bandwidth`."""


def batch_bandwidth(c: Tensor) -> float:
    """h = 1.06 s N^(-1/5) of confidences c (N,) with standard deviation s, within `BANDWIDTHS`.

    The normal reference rule of kernel estimates (Silverman 1986): h falls with N so slowly that N h, the neighbours
    that a confidence is compared with, still grows. With h fixed at .01 a batch of a few hundred compares each sample
    with itself and a handful of others, and the gradient of SECE is noise: docs/surrogates.md.
    """
    return float(_batch_bandwidth(c))


def _batch_bandwidth(c: Tensor) -> Tensor:
    """The same as a 0-d tensor, float64, for which a GPU is not waited."""
    return (1.06 * c.double().std(correction=0) * len(c) ** -0.2).clamp(*BANDWIDTHS)


# ---------------------------------------------------------------------------------------------- surrogates


def sece(
    logits: Tensor,
    labels: Tensor,
    bandwidth: Annotated[float, Option("h of the kernel, in units of confidence", above=0)] = SECE_BANDWIDTH,
    self_term: Annotated[bool, Option("whether a sample counts among its own neighbours")] = True,
    norm: Norm = "l1",
    bank: Bank | None = None,
    adaptive: Adaptive = False,
) -> Tensor:
    """Smooth expected calibration error of Meta-Regularization (arXiv 2303.15057).

        SECE = 1/N Σ_i |ã_i − c_i|,  ã_i = Σ_j K(c_i − c_j) a_j / Σ_j K(c_i − c_j),  K(u) = exp(−u²/(2h²))

    The gradient flows through every c, inside the kernel too. It is exact, and of first order only.

    Args:
        bandwidth: h, in units of confidence. adaptive: in its place `batch_bandwidth`, by the size of the batch.
        self_term: True lets j = i count, as published: as h → 0 the value then tends to mean |a − c|, a
            reward for mere confidence. False leaves it out. The ratio is then taken relative to the nearest
            other reference, so that an isolated sample gets that one's correctness (the formula's limit),
            never 0/0; with no other reference at all (a batch of one, no bank) value and gradient are 0.
        norm: "l1" as above, "l2": sqrt(1/N Σ_i (ã_i − c_i)²).
        bank: confidence (B,) and correctness (B,) of earlier samples (`MemoryBank`): constants, further j.

    Biased upwards for small N·h: see docs/surrogates.md for the size, and `effective_neighbours`.
    """
    check_options(sece, bandwidth=bandwidth, self_term=self_term, norm=norm, adaptive=adaptive)
    logits, labels = check_batch(logits, labels)
    c, a = confidences(logits, labels)
    if bank is None:
        bank_c = bank_a = c.detach().new_zeros(0)
    else:
        bank_c, bank_a = (t.detach().to(c) for t in bank)
        require(
            bank_c.ndim == 1 and bank_c.shape == bank_a.shape,
            f"bank must be two tensors of shape (B,), got {tuple(bank_c.shape)} and {tuple(bank_a.shape)}",
        )
    h = _batch_bandwidth(torch.cat([c.detach(), bank_c])) if adaptive else bandwidth
    return PairSum.apply(sece_rule(h, self_term, norm), c, a, bank_c, bank_a)[0]


def mmce(
    logits: Tensor,
    labels: Tensor,
    bandwidth: Bandwidth = LAPLACE_SCALE,
    weighted: Annotated[bool, Option("whether right and wrong samples weigh alike")] = False,
) -> Tensor:
    """Maximum mean calibration error (Kumar, Sarawagi & Jain 2018), sqrt of the V-statistic.

        MMCE² = 1/N² Σ_ij e_i e_j k(c_i, c_j),  e = c − a,  k(u, v) = exp(−|u − v|/bandwidth)

    weighted: e_i is weighted by 1/(number of right samples) or 1/(number of wrong ones) in place of 1/N, so
    that the few wrong samples of an accurate model count as much; a group that is absent adds nothing.
    The gradient at MMCE = 0 is taken as 0.
    """
    check_options(mmce, bandwidth=bandwidth, weighted=weighted)
    logits, labels = check_batch(logits, labels)
    return PairSum.apply(kernel_rule(bandwidth, weighted, False), *confidences(logits, labels))[0]


def skce(logits: Tensor, labels: Tensor, bandwidth: Bandwidth = LAPLACE_SCALE) -> Tensor:
    """Unbiased estimate of the squared kernel calibration error of the confidence (Widmann et al. 2019).

        SKCE = 1/(N(N−1)) Σ_{i≠j} e_i e_j k(c_i, c_j),  e = c − a,  k(u, v) = exp(−|u − v|/bandwidth)

    May be negative; its mean over batches does not depend on their size. A batch of one gives 0.
    """
    check_options(skce, bandwidth=bandwidth)
    logits, labels = check_batch(logits, labels)
    return PairSum.apply(kernel_rule(bandwidth, False, True), *confidences(logits, labels))[0]


def _soft_bins(c: Tensor, a: Tensor, n_bins: int, temperature: float | Tensor, norm: str) -> Tensor:
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
    logits: Tensor,
    labels: Tensor,
    n_bins: Bins = 15,
    t_a: Annotated[float, Option("steepness of the soft rank", above=0)] = 100.0,
    t_b: Annotated[float, Option("width of the soft bins' edges", above=0)] = 0.01,
    norm: Norm = "l1",
) -> Tensor:
    """Differentiable ECE of Meta-Calibration (Bohdal, Yang & Hospedales 2023).

        DECE = Σ_m S_m/N |A_m − C_m|,  S_m = Σ_i u_im,  u_i = softmax_m((m c_i − Σ_{l<m} l/M) / t_b),
        accuracy a_i = relu(2 − rank_i),  rank_i = 1 + Σ_{k≠y_i} sigmoid(t_a (p_{i,k} − p_{i,y_i}))

    Unlike the others it has a gradient in the accuracy. Its soft bins u are those of `soft_ece` at
    temperature 2·t_b/M (the square completed).
    """
    check_options(dece, n_bins=n_bins, t_a=t_a, t_b=t_b, norm=norm)
    logits, labels = check_batch(logits, labels)
    c, _ = confidences(logits, labels)
    p = logits.softmax(dim=1)
    above = torch.sigmoid(t_a * (p - p.gather(1, labels[:, None])))
    rank = above.sum(1) + 0.5  # k = y adds sigmoid(0) = 1/2, which makes 1
    return _soft_bins(c, torch.relu(2 - rank), n_bins, 2 * t_b / n_bins, norm)


def soft_ece(
    logits: Tensor,
    labels: Tensor,
    n_bins: Bins = 15,
    temperature: Annotated[float, Option("width of the soft bins", above=0)] = 0.01,
    norm: Norm = "l2",
    adaptive: Adaptive = False,
) -> Tensor:
    """Soft-binned ECE, SB-ECE (Karandikar et al. 2021), with their default of the l2 norm.

        (Σ_m S_m/N |A_m − C_m|^q)^(1/q),  S_m = Σ_i u_im,  u_i = softmax_m(−(c_i − (m − ½)/M)² / temperature)

    A_m and C_m are the means of a and c under u_{·m}; q = 1 or 2. adaptive: 2 h² in place of the
    temperature, h = `batch_bandwidth`.
    """
    check_options(soft_ece, n_bins=n_bins, temperature=temperature, norm=norm, adaptive=adaptive)
    logits, labels = check_batch(logits, labels)
    c, a = confidences(logits, labels)
    width = 2 * _batch_bandwidth(c.detach()) ** 2 if adaptive else temperature
    return _soft_bins(c, a, n_bins, width, norm)


def confidence_gap(
    logits: Tensor, labels: Tensor, squared: Annotated[bool, Option("the square of the gap")] = False
) -> Tensor:
    """|mean c − mean a|, ECE with a single bin, or its square. The gradient of the former at 0 is 0."""
    logits, labels = check_batch(logits, labels)
    c, a = confidences(logits, labels)
    gap = (c - a).mean()
    return gap.square() if squared else gap.abs()


def mdca(logits: Tensor, labels: Tensor) -> Tensor:
    """Multi-class difference in confidence and accuracy (Hebbalaguppe et al. 2022): every class, in a single bin.

        MDCA = 1/K Σ_k |1/N Σ_i p_{i,k} − 1/N Σ_i 1[y_i = k]|

    Reads all the probabilities, not just the largest. At most 2/K. The gradient of a class whose gap is 0 is 0.
    """
    logits, labels = check_batch(logits, labels)
    shares = torch.full_like(logits[:, 0], 1 / len(logits))
    frequency = torch.zeros_like(logits[0]).scatter_add(0, labels, shares)
    return (logits.softmax(dim=1).mean(0) - frequency).abs().mean()


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood, 1/N Σ_i −log p_{i,y_i}, in nats."""
    return F.cross_entropy(*check_batch(logits, labels))


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean Brier score, 1/N Σ_i Σ_k (p_{i,k} − 1[k = y_i])², in [0, 2]."""
    logits, labels = check_batch(logits, labels)
    p = logits.softmax(dim=1)
    # Σ_k (p_k − 1[k=y])² without the one-hot matrix
    return (p.square().sum(1) - 2 * p.gather(1, labels[:, None]).squeeze(1) + 1).mean()


SURROGATES: dict[str, Surrogate] = {
    f.__name__: f for f in (sece, dece, soft_ece, mmce, skce, mdca, nll, brier, confidence_gap)
}
"""The surrogates by name, as an outer objective gives them, each with the options of its annotated arguments."""

FIRST_ORDER: tuple[Surrogate, ...] = (sece, mmce, skce)
"""Those that can be differentiated once only."""

BATCH_PENALTIES: dict[str, Surrogate] = {
    "confidence_gap": confidence_gap,
    "dece": dece,
    "mdca": mdca,
    "mmce": mmce,
    "mmce_weighted": partial(mmce, weighted=True),
    "sece": sece,
    "skce": skce,
    "soft_ece": soft_ece,
}
"""What can be added to a training loss, by name: calibration errors `(logits, labels, **keys) -> scalar`.

None is a mean over samples: a batch has another value than the mean over its parts. Kumar et al. 2018 train with
"mmce_weighted".
"""


@torch.no_grad()
def effective_neighbours(logits: Tensor, bandwidth: float = SECE_BANDWIDTH, bank: Bank | None = None) -> float:
    """How many samples stand behind one ã_i of `sece`: the mean over i of (Σ_j K_ij)² / Σ_j K_ij²."""
    check_options(sece, bandwidth=bandwidth)
    logits, _ = check_batch(logits, logits.new_zeros(len(logits), dtype=torch.long))
    c = logits.softmax(dim=1).amax(dim=1)
    r = c if bank is None else torch.cat([c, bank[0].to(c)])
    sizes = []
    for block in c.split(max(1, 2**20 // len(r))):
        kernel = ((block[:, None] - r) / bandwidth).square().mul_(-0.5).exp_()
        sizes.append(kernel.sum(1).square() / kernel.square().sum(1))
    return torch.cat(sizes).mean().item()
