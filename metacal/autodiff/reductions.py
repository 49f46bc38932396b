"""Rules for functions that reduce dimensions or choose entries: variances, norms, maxima, pooling, sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metacal.autodiff.jets import ZERO, Jet, Operand, Part, Push, Rule, Run, bare, bound, each, total
from metacal.autodiff.kinds import by_reverse_passes
from metacal.autodiff.plain import mean_square

__all__ = [
    "chosen_by_pooling",
    "extreme",
    "maximum",
    "maximum_or_entries",
    "mean_square_rule",
    "norm",
    "selected",
    "standard_deviation",
    "variance",
    "vector_norm",
    "with_mean",
]


def mean_square_rule(args: Any, kwargs: Any, out: Any) -> Push:
    x, dims = args

    def push(run: Run) -> Jet:
        x1, x2 = run.jet(x)
        if x1 is None:
            return ZERO
        first = 2 * (run.value(x) * x1).mean(dims, keepdim=True)
        if not run.second:
            return first, None
        moved = mean_square(x1, dims)
        return first, 2 * (moved if x2 is None else moved + (run.value(x) * x2).mean(dims, keepdim=True))

    return push


def _over(x: Operand, args: Any, kwargs: Any) -> tuple[tuple[int, ...], bool, float]:
    """Dimensions, whether they stay, and the degrees of freedom of a variance, however it was called."""
    args = (None, *args) if args and isinstance(args[0], bool) else args
    given = dict(kwargs)
    correction = given.pop("correction", None)
    dim, unbiased, keepdim = bound("dim unbiased keepdim", args, given, unbiased=True, keepdim=False)
    if correction is None:
        correction = 1 if unbiased or unbiased is None else 0
    dims = tuple(range(x.tensor.ndim)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else tuple(dim)
    count = 1
    for d in dims:
        count *= x.tensor.shape[d]
    return dims, keepdim, max(count - correction, 0)


def _variance_jet(run: Run, x: Operand, dims: tuple[int, ...], keepdim: bool, freedom: float) -> Jet:
    """2 Σ (x − μ) x₁ / f and 2 Σ ((x₁ − μ₁) x₁ + (x − μ) x₂) / f for f degrees of freedom."""
    x1, x2 = run.jet(x)
    if x1 is None:
        return ZERO
    value = run.value(x)
    if not value.is_floating_point():
        raise NotImplementedError("no rule for complex numbers")
    centre = value - value.mean(dims, keepdim=True)
    first = (centre * x1).sum(dims, keepdim=keepdim) * (2 / freedom)
    if not run.second:
        return first, None
    moved = (x1 - x1.mean(dims, keepdim=True)) * x1
    moved = moved if x2 is None else moved + centre * x2
    return first, moved.sum(dims, keepdim=keepdim) * (2 / freedom)


def variance(args: Any, kwargs: Any, out: Operand) -> Push:
    x, *more = args
    over = _over(x, more, kwargs)
    return lambda run: _variance_jet(run, x, *over)


def standard_deviation(args: Any, kwargs: Any, out: Operand) -> Push:
    x, *more = args
    over = _over(x, more, kwargs)
    return lambda run: _root_jet(run.value(out), _variance_jet(run, x, *over), run.second)


def with_mean(single: Rule) -> Rule:
    """For `torch.var_mean` and `torch.std_mean`."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        spread = single(args, kwargs, out[0])
        x, *more = args
        dims, keepdim, _ = _over(x, more, kwargs)
        x = bare(x)

        def push(run: Run) -> Jet:
            mean = each(lambda d: d.mean(dims, keepdim=keepdim), run.jet(x))
            first, second = spread(run)
            return (first, mean[0]), (second, mean[1])

        return push

    return rule


def _root_jet(root: Tensor, jet: Jet, second: bool) -> Jet:
    """Of r = √q from the jet of q: q₁/2r and (q₂ − 2r₁²)/2r; zero where r is, as autograd has it."""
    q1, q2 = jet
    if q1 is None:
        return ZERO
    inverse = torch.where(root == 0, 0.0, 0.5 / root)
    first = q1 * inverse
    return first, (0 if q2 is None else q2) * inverse - 2 * first.square() * inverse if second else None


def vector_norm(args: Any, kwargs: Any, out: Operand) -> Push:
    x, order, dim, keepdim, dtype = bound("x ord dim keepdim dtype", args, kwargs, ord=2, keepdim=False)
    if order != 2 or dtype is not None or x.tensor.is_complex():
        return by_reverse_passes(torch.linalg.vector_norm)(args, kwargs, out)
    dims = tuple(range(x.tensor.ndim)) if dim is None else dim

    def push(run: Run) -> Jet:
        x1, x2 = run.jet(x)
        if x1 is None:
            return ZERO
        value = run.value(x)
        first = (value * x1).sum(dims, keepdim=keepdim)
        second = None
        if run.second:
            second = 2 * (x1.square() if x2 is None else x1.square() + value * x2).sum(dims, keepdim=keepdim)
        return _root_jet(run.value(out), (2 * first, second), run.second)

    return push


def norm(args: Any, kwargs: Any, out: Operand) -> Push:
    """`torch.linalg.norm`: of a vector, if it is not told which."""
    x, order, dim, keepdim, dtype = bound("A ord dim keepdim dtype", args, kwargs, keepdim=False)
    if order is None:
        return vector_norm((x, 2, dim, keepdim, dtype), {}, out)
    return by_reverse_passes(torch.linalg.norm)(args, kwargs, out)


def selected(names: str) -> Rule:
    """Entries along `dim`, with their places as second result; names: of the arguments."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        given = dict(zip(names.split(), bound(names, args, kwargs, dim=-1)))
        x, dim, places = given["input"], given["dim"], out[1]
        reduced = places.tensor.ndim < x.tensor.ndim
        x = bare(x)

        def push(run: Run) -> Jet:
            at = run.value(places)
            if reduced:
                return each(lambda d: (d.gather(dim, at.unsqueeze(dim)).squeeze(dim), None), run.jet(x))
            return each(lambda d: (d.gather(dim, at), None), run.jet(x))

        return push

    return rule


def chosen_by_pooling(dims: int) -> Rule:
    """The second result holds places in the flattened last `dims` dimensions of the input."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        x, places = bare(args[0] if args else kwargs["input"]), out[1]

        def push(run: Run) -> Jet:
            at = run.value(places)
            flat = at.flatten(-dims)
            return each(lambda d: (d.flatten(-dims).gather(-1, flat).view(at.shape), None), run.jet(x))

        return push

    return rule


def extreme(reduce: Callable[..., Tensor]) -> Rule:
    """`torch.amax` or `amin`: the mean over the entries that attain it, as autograd has it."""

    def rule(args: Any, kwargs: Any, out: Operand) -> Push:
        x, dim, keepdim = bound("input dim keepdim", args, kwargs, keepdim=False)
        dims = tuple(range(x.tensor.ndim)) if dim is None or dim == () else dim

        def push(run: Run) -> Jet:
            value = run.value(x).detach()
            where = (value == reduce(value, dims, keepdim=True)).to(value.dtype)
            share = where / where.sum(dims, keepdim=True)
            return each(lambda d: (d * share).sum(dims, keepdim=keepdim), run.jet(x))

        return push

    return rule


def maximum(sign: int) -> Rule:
    """The larger of two tensors (sign 1) or the smaller (−1), and the mean of both where they are equal."""

    def rule(args: Any, kwargs: Any, out: Operand) -> Push:
        a, b = args
        if not (isinstance(a, Operand) and isinstance(b, Operand)):
            raise NotImplementedError("unknown form of its arguments")

        def push(run: Run) -> Jet:
            left, right = run.value(a).detach(), run.value(b).detach()
            share = (1 + sign * torch.sign(left - right)) / 2
            (a1, a2), (b1, b2) = run.jet(a), run.jet(b)

            def mixed(l: Part, r: Part) -> Part:
                return total(None if l is None else share * l, None if r is None else (1 - share) * r)

            return mixed(a1, b1), mixed(a2, b2)

        return push

    return rule


def maximum_or_entries(reduce: Callable[..., Tensor], sign: int) -> Rule:
    """`torch.max` and `min`: of all entries, along a dimension, or of two tensors."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        if isinstance(out, tuple):
            return selected("input dim keepdim")(args, kwargs, out)
        return (extreme(reduce) if len(args) == 1 and not kwargs else maximum(sign))(args, kwargs, out)

    return rule
