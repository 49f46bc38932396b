"""Rules of single functions: sums, quotients, powers, embeddings, gates, what is written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.autodiff.activations import BY_INPUT, BY_RESULT
from metacal.autodiff.jets import (
    ZERO,
    Jet,
    Operand,
    Part,
    Push,
    Rule,
    Run,
    bare,
    bound,
    each,
    moving,
    product_jet,
    total,
)
from metacal.autodiff.kinds import by_reverse_passes, elementwise, jointly_linear, multilinear

__all__ = [
    "assigned",
    "constant",
    "copied",
    "embedding",
    "embedding_bag",
    "expanded",
    "gated",
    "index_copied",
    "leaky_relu",
    "lerp",
    "masked",
    "native_dropout",
    "plus_product",
    "power",
    "prelu",
    "quotient",
    "recurrent",
    "relu",
    "scattered",
    "weighted_sum",
    "where",
    "zero_padded",
]


def weighted_sum(sign: int, reverse: bool = False) -> Rule:
    """a ± alpha·b, out of place or in place."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        a, b = map(bare, reversed(args) if reverse else args)
        scale = sign * kwargs.get("alpha", 1)

        def push(run: Run) -> Jet:
            left, right = run.jet(a), run.jet(b)

            def added(l: Part, r: Part) -> Part:
                if r is None or scale == 1:
                    return total(l, r)
                return r * scale if l is None else torch.add(l, r, alpha=scale)

            return added(left[0], right[0]), added(left[1], right[1])

        return push

    return rule


def quotient(args: Any, kwargs: Any, out: Any) -> Push:
    """q = a/b: q₁ = (a₁ − q b₁)/b, q₂ = (a₂ − 2 q₁ b₁ − q b₂)/b."""
    a, b = args
    if kwargs.get("rounding_mode") is not None:
        raise NotImplementedError("no rule for a rounded quotient")
    if not moving(b):
        x = bare(a)
        return lambda run: each(lambda d: d / run.value(b), run.jet(x))

    def push(run: Run) -> Jet:
        (a1, a2), (b1, b2) = run.jet(a), run.jet(b)
        below = run.value(b)
        q = run.value(a) / below
        first = total(a1, None if b1 is None else -q * b1)
        first = None if first is None else first / below
        if not run.second:
            return first, None
        twice = None if b1 is None or first is None else -2 * first * b1
        second = total(a2, twice, None if b2 is None else -q * b2)
        return first, None if second is None else second / below

    return push


def power(args: Any, kwargs: Any, out: Operand) -> Push:
    base, exponent = args
    if isinstance(base, Operand) and not isinstance(exponent, Operand):
        return elementwise(BY_INPUT["pow"], by_result=False)(args, kwargs, out)
    return by_reverse_passes(torch.pow)(args, kwargs, out)


def plus_product(product: Callable[..., Tensor], factors: int, inverse: bool = False) -> Rule:
    """beta·c + alpha·a b, as torch.addmm and its kin; with `inverse` c + value·a/b."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        c, *parts = args
        if len(parts) != factors or moving(kwargs):
            raise NotImplementedError("unknown form of its arguments")
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", kwargs.get("value", 1))
        term = quotient(parts, {}, out) if inverse else multilinear(product, factors)(parts, {}, out)
        c = bare(c)

        def push(run: Run) -> Jet:
            first, second = (
                total(None if l is None else beta * l, None if r is None else alpha * r)
                for l, r in zip(run.jet(c), term(run))
            )
            return first, second

        return push

    return rule


def lerp(args: Any, kwargs: Any, out: Any) -> Push:
    """a + w (b − a)."""
    a, b, w = bound("input end weight", args, kwargs)
    if moving(w):
        return by_reverse_passes(torch.lerp)(args, kwargs, out)
    a, b = bare(a), bare(b)

    def push(run: Run) -> Jet:
        (a1, a2), (b1, b2), weight = run.jet(a), run.jet(b), run.value(w)

        def mixed(l: Part, r: Part) -> Part:
            return total(None if l is None else (1 - weight) * l, None if r is None else weight * r)

        return mixed(a1, b1), mixed(a2, b2)

    return push


def prelu(args: Any, kwargs: Any, out: Any) -> Push:
    x, weight = args
    shape = (1, -1, *[1] * (x.tensor.ndim - 2)) if x.tensor.ndim > 1 else (-1,)

    def push(run: Run) -> Jet:
        value, w = run.value(x), run.value(weight).view(shape)
        below = (value.detach() <= 0).to(value.dtype)
        jet = each(lambda d: d.view(shape), run.jet(weight))
        bent = product_jet(torch.mul, (w - 1, value), (jet, run.jet(x)), run.second)
        first, second = (total(d, None if b is None else below * b) for d, b in zip(run.jet(x), bent))
        return first, second

    return push


def gated(args: Any, kwargs: Any, out: Any) -> Push:
    """a σ(b) for the halves a and b."""
    x, dim = bound("input dim", args, kwargs, dim=-1)

    def push(run: Run) -> Jet:
        a, b = run.value(x).chunk(2, dim)
        halves = [(None, None) if d is None else d.chunk(2, dim) for d in run.jet(x)]
        gate = torch.sigmoid(b)
        slope = gate * (1 - gate)
        b1, b2 = halves[0][1], halves[1][1]
        gate1 = None if b1 is None else slope * b1
        gate2 = None if b1 is None else slope * (1 - 2 * gate) * b1.square() + (0 if b2 is None else slope * b2)
        return product_jet(torch.mul, (a, gate), ((halves[0][0], halves[1][0]), (gate1, gate2)), run.second)

    return push


def embedding(args: Any, kwargs: Any, out: Any) -> Push:
    """Rows of the weight, without those of the padding, which autograd holds still."""
    weight, places, padding, by_frequency, _ = bound(
        "weight indices padding_idx scale_grad_by_freq sparse", args, kwargs, padding_idx=-1
    )
    if by_frequency:
        raise NotImplementedError("scale_grad_by_freq makes the gradient another one than that of the loss")
    weight = bare(weight)

    def push(run: Run) -> Jet:
        at = run.value(places)

        def rows(d: Tensor) -> Tensor:
            moved = F.embedding(at, d)
            return moved if padding < 0 else moved.masked_fill((at == padding)[..., None], 0.0)

        return each(rows, run.jet(weight))

    return push


def embedding_bag(args: Any, kwargs: Any, out: Any) -> Push:
    names = "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
    weight, places, offsets, by_frequency, mode, _, factors, last, padding = bound(names, args, kwargs, mode=0)
    if by_frequency or mode == 2:
        raise NotImplementedError("no rule for scale_grad_by_freq, or for the maximum of a bag")
    if not moving(factors):
        weight = bare(weight)

    def push(run: Run) -> Jet:
        def bags(w: Tensor, f: Tensor | None) -> Tensor:
            return torch.embedding_bag(w, run.value(places), run.value(offsets), False, mode, False, f, last, padding)[
                0
            ]

        if factors is None:
            return each(lambda d: (bags(d, None), None, None, None), run.jet(weight))
        values = (run.value(weight) if moving(factors) else None, run.value(factors))
        jet = product_jet(bags, values, (run.jet(weight), run.jet(factors)), run.second)
        return each(lambda d: (d, None, None, None), jet)

    return push


def native_dropout(args: Any, kwargs: Any, out: Any) -> Push:
    """x ∘ mask / (1 − p); the mask is the second result."""
    x, p, _ = bound("input p train", args, kwargs)
    x, mask, scale = bare(x), out[1], 1 / (1 - p)
    return lambda run: each(lambda d: (d * run.value(mask) * scale, None), run.jet(x))


def copied(args: Any, kwargs: Any, out: Any) -> Push:
    source = bare(args[1])
    return lambda run: run.jet(source)


def constant(args: Any, kwargs: Any, out: Any) -> Push:
    return lambda run: ZERO


def scattered(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """A place that is written twice counts twice, as in autograd's backward pass."""
    return input.scatter(dim, index, 0.0).scatter_add(dim, index, src)


def index_copied(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return input.index_fill(dim, index, 0.0).index_add(dim, index, source)


def assigned(args: Any, kwargs: Any, out: Operand) -> Push:
    """x[places] = value; the result is x."""
    places = args[1] if isinstance(args[1], tuple) else (args[1],)
    repeated = any(isinstance(p, list) or (isinstance(p, Operand) and p.tensor.dtype is not torch.bool) for p in places)
    return jointly_linear(_put_all if repeated else _put, "x places value", "x value")(args, kwargs, out)


def _put(x: Tensor, places: Any, value: Any) -> Tensor:
    x = x.clone()
    x[places] = value
    return x


def _put_all(x: Tensor, places: Any, value: Any) -> Tensor:
    """A place that is written twice counts twice, as in autograd's backward pass."""
    at = torch.arange(x.numel(), device=x.device).view(x.shape)[places]
    entries = value.to(x) if isinstance(value, Tensor) else x.new_full((), value)
    entries = entries.expand(at.shape).reshape(-1)
    return x.reshape(-1).index_fill(0, at.reshape(-1), 0.0).index_add(0, at.reshape(-1), entries).view(x.shape)


def masked(args: Any, kwargs: Any, out: Any) -> Push:
    x, mask, _ = bound("input mask value", args, kwargs)
    if moving(args[1:]):
        raise NotImplementedError("a value that depends on the parameters")
    x = bare(x)
    return lambda run: each(lambda d: d.masked_fill(run.value(mask), 0.0), run.jet(x))


def zero_padded(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    return F.pad(input, pad, mode)  # a constant border does not move


def recurrent(func: Callable[..., Any]) -> Rule:
    """Recurrent layers and cells, on a CPU: their fused kernels elsewhere have no second derivative."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        switches = [a for a in args if isinstance(a, (bool, float))]  # whether biased, dropout, whether training, …
        if args[0].tensor.is_cuda or (switches and switches[1] and switches[2]):
            raise NotImplementedError("no rule for dropout between its layers, or on this device")

        def plain(*args: Any) -> Any:
            enabled = torch.backends.mkldnn.enabled
            torch.backends.mkldnn.set_flags(_enabled=False)  # its cells have no second derivative
            try:
                return func(*args)
            finally:
                torch.backends.mkldnn.set_flags(_enabled=enabled)

        return by_reverse_passes(plain)(args, kwargs, out)

    return rule


def where(owner: Any) -> Rule:
    names = "condition input other" if owner is torch else "input condition other"
    return jointly_linear(owner.where, names, "input other")


def expanded(args: Any, kwargs: Any, out: Operand) -> Push:
    x, shape = bare(args[0]), out.tensor.shape
    return lambda run: each(lambda d: d.expand(shape), run.jet(x))


def relu(args: Any, kwargs: Any, out: Operand) -> Push:
    x = bare(args[0])
    return lambda run: each(lambda d: torch.ops.aten.threshold_backward(d, run.value(out).detach(), 0), run.jet(x))


def leaky_relu(args: Any, kwargs: Any, out: Operand) -> Push:
    (slope,) = bound("input negative_slope", args, kwargs, negative_slope=0.01)[1:]
    if slope < 0:
        raise NotImplementedError("a leaky relu of negative slope hides the sign of its input")
    return elementwise(BY_RESULT["leaky_relu"], by_result=True)(args, kwargs, out)
