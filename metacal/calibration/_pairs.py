"""Sums over all pairs of confidences, with their gradient: the engine of `sece`, `mmce` and `skce`.

A *rule* is `(c (N,), *constants) -> (value, ∂value/∂c (N,))` on plain tensors, and `PairSum.apply(rule, c,
*constants)` is the value as a differentiable function of c, for autograd and `torch.func`. Computing the
gradient along with the value, in blocks, spares the N × N matrices that autograd would keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["PairSum", "kernel_rule", "sece_rule"]

Rule = Callable[..., tuple[Tensor, Tensor]]


class PairSum(torch.autograd.Function):
    """`apply(rule, c, *constants)` with rule(c, *constants) -> (value, ∂value/∂c), both computed at once."""

    @staticmethod
    def forward(rule: Rule, c: Tensor, *constants: Tensor) -> tuple[Tensor, Tensor]:
        # float64 costs no more here than float32 (the exponential dominates) and keeps TF32, autocast and
        # cancellation out of the sums. Only MPS has no float64.
        wide = c.dtype if c.device.type == "mps" else torch.float64
        with torch.autocast(c.device.type, enabled=False):
            value, gradient = rule(c.to(wide), *(t.to(wide) for t in constants))
        return value.to(c.dtype), gradient.to(c.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        gradient = output[1]
        ctx.mark_non_differentiable(gradient)
        ctx.save_for_backward(inputs[1], gradient)
        ctx.save_for_forward(gradient)
        ctx.constants = len(inputs) - 2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        c, gradient = ctx.saved_tensors
        return None, _FirstOrderOnly.apply(cotangent * gradient, c), *([None] * ctx.constants)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * tangent).sum(), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], rule: Rule, *tensors: Tensor) -> tuple[Any, Any]:
        rows = []
        for i in range(info.batch_size):
            at = [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims[1:])]
            rows.append(PairSum.apply(rule, *at))
        values, gradients = zip(*rows)
        return (torch.stack(values), torch.stack(gradients)), (0, 0)


class _FirstOrderOnly(torch.autograd.Function):
    """The identity in `gradient`, whose dependence on c is not recorded: differentiating that is refused.

    Without it a second derivative would lack this part, and be wrong in silence.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, c: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        if ctx.needs_input_grad[1]:
            raise RuntimeError(_ONCE)
        return cotangent, None

    @staticmethod
    def jvp(ctx: Any, gradient: Tensor | None, c: Tensor | None) -> Tensor | None:
        if c is not None:
            raise RuntimeError(_ONCE)
        return gradient


_ONCE = "sece, mmce and skce can be differentiated once only; soft_ece, dece, nll and brier twice"


def sece_rule(bandwidth: float | Tensor, self_term: bool, norm: str) -> Rule:
    """Value and gradient of SECE, for rows of c in sorted order against the references that they can feel.

    Let s_i be the derivative of the value in ã_i − c_i, b_j the correctness of reference r_j, and
    K'_ij = K_ij (c_i − r_j)/h². Then the derivative of the value in c_i is
    s_i (−1 − Σ_j K'_ij (b_j − ã_i) / Σ_j K_ij)  +  Σ_l s_l K'_li (a_i − ã_l) / Σ_j K_lj,
    its first part with c_i as the centre, its second with c_i as a reference of the others.
    """

    def rule(c: Tensor, a: Tensor, bank_c: Tensor, bank_a: Tensor) -> tuple[Tensor, Tensor]:
        n, m = len(c), len(c) + len(bank_c)
        on_cpu = c.device.type == "cpu"  # elsewhere nothing is looked at, which would be waited for
        finite = torch.isfinite(c).all()  # else there is no order to look anything up in
        if on_cpu and not finite:
            return c.sum() * math.nan, c * math.nan
        if m == 1 and not self_term:
            return c.new_zeros(()), torch.zeros_like(c)
        order = torch.cat([c, bank_c]).argsort(stable=True)
        r, b = torch.cat([c, bank_c])[order], torch.cat([a, bank_a])[order]
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(m, device=c.device))[:n]
        places = places.sort().values  # where the samples stand among the references
        x = r[places]
        radius, nearest = _reach(r, places, bandwidth, self_term)
        rows = 128 if on_cpu else max(128, 2**24 // m)
        starts = range(0, n, rows)
        lows, highs = _windows(r, x, radius, rows) if on_cpu else ([0] * len(starts), [m] * len(starts))

        smooth = torch.empty_like(x)  # ã_i
        slope = torch.empty_like(x)  # its derivative in c_i as the centre
        felt = torch.zeros_like(r)  # Σ_l s_l ∂ã_l/∂r_j for every reference j
        for i, lo, hi in zip(starts, lows, highs):
            at, by = x[i : i + rows], b[lo:hi]
            u = (at[:, None] - r[lo:hi]) / bandwidth
            log_kernel = u.square().mul_(-0.5)
            if not self_term:
                log_kernel += (nearest[i : i + rows, None] / bandwidth).square() / 2
                log_kernel[torch.arange(len(at), device=c.device), places[i : i + rows] - lo] = -math.inf
            kernel = log_kernel.exp_()
            mass = kernel.sum(1)
            mean = kernel @ by / mass
            slopes = kernel.mul_(u).div_(bandwidth * mass[:, None])  # K'_ij / Σ_j K_ij
            s = (mean - at).sign() if norm == "l1" else mean - at
            plain, smoothed = torch.stack([s, s * mean]) @ slopes
            felt[lo:hi] += by * plain - smoothed
            smooth[i : i + rows] = mean
            slope[i : i + rows] = mean * slopes.sum(1) - slopes @ by
        gap = smooth - x
        if norm == "l1":
            value, s, scale = gap.abs().mean(), gap.sign(), torch.ones_like(x[0]) / n
        else:
            value, s = gap.square().mean().sqrt(), gap
            scale = torch.where(value > 0, 1 / (n * value), 0.0)
        gradient = torch.empty_like(c)
        gradient[order[places]] = scale * (felt[places] + s * (slope - 1))
        if not on_cpu:
            value, gradient = torch.where(finite, value, math.nan), torch.where(finite, gradient, math.nan)
        return value, gradient

    return rule


def _reach(r: Tensor, places: Tensor, bandwidth: float | Tensor, self_term: bool) -> tuple[Tensor, Tensor]:
    """How far the references of every sample lie that show in its sums, and how far the nearest other one; (N,).

    Pairs further apart than that have a kernel below eps/M of the row's largest one. Without the self term the largest
    is that of the nearest other reference, however far; with it, the distance to that one is not needed and 0.
    """
    x = r[places]
    reach = bandwidth * math.sqrt(2 * math.log(len(r) / torch.finfo(r.dtype).eps))
    if self_term:
        return torch.ones_like(x) * reach, torch.zeros_like(x)
    gaps = torch.cat([r.new_full((1,), math.inf), r.diff(), r.new_full((1,), math.inf)])
    nearest = torch.minimum(gaps[places], gaps[places + 1])
    return (nearest.square() + reach**2).sqrt(), nearest


def _windows(r: Tensor, x: Tensor, radius: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """For every block of `rows` samples, the first reference within reach of one of them, and one past the last."""
    starts = range(0, len(x), rows)
    low = torch.stack([(x - radius)[i : i + rows].amin() for i in starts])
    high = torch.stack([(x + radius)[i : i + rows].amax() for i in starts])
    return torch.searchsorted(r, low).tolist(), torch.searchsorted(r, high, right=True).tolist()


def _laplace_sums(c: Tensor, u: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Σ_j k(c_i, c_j) u_j and Σ_j ∂_1 k(c_i, c_j) u_j for k = exp(−|c_i − c_j|/scale), in O(N log N).

    Left of c_i the kernel factors into exp(−c_i/scale)·exp(c_j/scale), so running sums do; right of it
    likewise. Equal confidences are neither (k = 1, ∂k = 0), whatever their order.
    """
    order = c.argsort(stable=True)
    x, v = c[order], u[order]
    grow = ((x - 0.5) / scale).exp()  # centred: within e^(±250) for the smallest scale allowed
    zero = v.new_zeros(1)
    plain, growing = torch.cat([zero, v.cumsum(0)]), torch.cat([zero, (v * grow).cumsum(0)])
    falling = torch.cat([zero, (v / grow).flip(0).cumsum(0)]).flip(0)
    first, last = torch.searchsorted(x, x), torch.searchsorted(x, x, right=True)
    left, right = growing[first] / grow, falling[last] * grow
    total, slope = torch.empty_like(c), torch.empty_like(c)
    total[order] = left + right + (plain[last] - plain[first])
    slope[order] = (right - left) / scale
    return total, slope


def kernel_rule(bandwidth: float, weighted: bool, unbiased: bool) -> Rule:
    """Value and gradient of MMCE = √(Σ_ij w_i w_j e_i e_j k_ij), or of SKCE: the mean over i ≠ j, no root."""

    def rule(c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        n = len(c)
        if unbiased and n == 1:
            return c.new_zeros(()), torch.zeros_like(c)
        w = torch.full_like(c, 1 / n)
        if weighted:
            right = a.sum()
            w = torch.where(a > 0, 1 / right.clamp(min=1), 1 / (n - right).clamp(min=1))
        u = w * (c - a)
        total, slope = _laplace_sums(c, u, bandwidth)
        if unbiased:
            total = total - u
        square, gradient = (u * total).sum(), 2 * (w * total + u * slope)
        if unbiased:
            return square * (n / (n - 1)), gradient * (n / (n - 1))
        positive = square > 0  # the kernel is positive definite: only rounding gets elsewhere
        root = torch.where(positive, square, 1.0).sqrt()
        value = torch.where(positive, root, torch.where(square.isnan(), square, 0.0))
        return value, torch.where(positive, gradient / (2 * root), 0.0)

    return rule
