"""Rules for kinds of functions: linear, bilinear and so on, elementwise, and any other by reverse passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metacal.autodiff.activations import Slopes
from metacal.autodiff.jets import (
    NOTHING,
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
    like,
    moving,
    operands,
    product_jet,
    total,
)

__all__ = ["by_reverse_passes", "elementwise", "jointly_linear", "layer", "linear", "multilinear", "shaped_like"]


def linear(func: Callable[..., Any]) -> Rule:
    """`func` is linear in its first argument, and only that one depends on the parameters."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        x, *more = args
        if not isinstance(x, Operand) or moving(more) or moving(kwargs):
            raise NotImplementedError("more than its first argument depends on the parameters")
        x = bare(x)
        return lambda run: each(lambda d: func(d, *run.value(more), **run.value(kwargs)), run.jet(x))

    return rule


def shaped_like(args: Any, kwargs: Any, out: Operand) -> Push:
    """The entries of the first argument in order, in the result's shape."""
    x, shape = bare(args[0]), out.tensor.shape
    return lambda run: each(lambda d: d.reshape(shape), run.jet(x))


@dataclass(frozen=True)
class _Zeros:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, t: Tensor) -> _Zeros:
        return cls(t.shape, t.dtype, t.device)

    def make(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def jointly_linear(func: Callable[..., Any], names: str, movable: str) -> Rule:
    """`func` with arguments `names` is linear in the arguments `movable` together: tensors, numbers or lists."""

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        values = dict(zip(names.split(), bound(names, args, kwargs)))
        parts = {k: a for k, a in values.items() if k in movable.split()}
        constant = {k: a for k, a in values.items() if k not in parts}
        if moving(constant):
            raise NotImplementedError("an unexpected argument depends on the parameters")
        hollow = {k: _hollow(a) for k, a in parts.items()}

        def push(run: Run) -> Jet:
            given = run.value(constant)

            def joined(order: int) -> Part:
                filled = {k: _filled(a, run, order) for k, a in hollow.items()}
                if all(_is_zero(a, run, order) for a in hollow.values()):
                    return None
                together = {**given, **filled}
                return func(*[together[n] for n in names.split() if together[n] is not None])

            return joined(0), joined(1) if run.second else None

        return push

    return rule


def _hollow(value: Any) -> Any:
    """What is left of an argument without its values: (operand, zeros of its shape), lists of them, or a number's 0."""
    if isinstance(value, Operand):
        return bare(value), _Zeros.like(value.tensor)
    if isinstance(value, (list, tuple)):
        return [_hollow(v) for v in value]
    return None if value is None else 0


def _filled(hollow: Any, run: Run, order: int) -> Any:
    if isinstance(hollow, list):
        return [_filled(h, run, order) for h in hollow]
    if not isinstance(hollow, tuple):
        return hollow
    d = run.jet(hollow[0])[order]
    return hollow[1].make() if d is None else d


def _is_zero(hollow: Any, run: Run, order: int) -> bool:
    if isinstance(hollow, list):
        return all(_is_zero(h, run, order) for h in hollow)
    return not isinstance(hollow, tuple) or run.jet(hollow[0])[order] is None


def multilinear(func: Callable[..., Tensor], factors: int | None = 2) -> Rule:
    """`func` is linear in each of its first `factors` arguments, or of all tensors after its first (None)."""

    def rule(args: Any, kwargs: Any, out: Operand) -> Push:
        if factors is None:
            head, parts, more = args[:1], args[1:], ()
            if not isinstance(head[0], str):
                raise NotImplementedError("unknown form of its arguments")
            parts = tuple(parts[0]) if len(parts) == 1 and isinstance(parts[0], (list, tuple)) else parts
        else:
            head, parts, more = (), args[:factors], args[factors:]
        if moving(more) or moving(kwargs) or (factors is not None and len(parts) < factors):
            raise NotImplementedError("an argument given by name, or an unexpected one, depends on the parameters")
        return _product(lambda *a, rest, named: func(*head, *a, *rest, **named), parts, more, kwargs)

    return rule


def _product(f: Callable[..., Tensor], factors: Sequence[Any], more: Any, named: Any) -> Push:
    held = [a if moving([*factors[:i], *factors[i + 1 :]]) else bare(a) for i, a in enumerate(factors)]

    def push(run: Run) -> Jet:
        jets = [run.jet(a) for a in held]
        # a factor that alone moves is not read
        values = [a if not isinstance(a, Operand) or a.tensor is NOTHING else run.value(a) for a in held]
        rest, keywords = run.value(more), run.value(named)
        return product_jet(lambda *a: f(*a, rest=rest, named=keywords), values, jets, run.second)

    return push


def layer(func: Callable[..., Tensor]) -> Rule:
    """Linear layers and convolutions: bilinear in input and weight, plus the bias."""

    def rule(args: Any, kwargs: Any, out: Operand) -> Push:
        options = {k: a for k, a in kwargs.items() if k not in ("input", "weight", "bias")}
        given = {k: a for k, a in kwargs.items() if k not in options}
        x, weight, bias = bound("input weight bias", args[:3], given)
        more = args[3:]
        if moving(more) or moving(options) or not (bias is None or isinstance(bias, Operand)):
            raise NotImplementedError("unknown form of its arguments")
        product = _product(lambda a, b, rest, named: func(a, b, None, *rest, **named), (x, weight), more, options)
        if bias is None or not bias.moves:
            return product
        shape, bias = (-1, *[1] * (weight.tensor.ndim - 2)), bare(bias)

        def push(run: Run) -> Jet:
            first, second = product(run)
            b1, b2 = each(lambda d: d.view(shape), run.jet(bias))
            if first is not None and b1 is not None and not torch.is_grad_enabled():
                return first.add_(b1), total(second, b2)
            return total(first, b1), total(second, b2)

        return push

    return rule


def elementwise(slopes: Callable[..., Slopes], by_result: bool) -> Rule:
    """φ with (φ', φ'') = slopes(input or result, further arguments)."""

    def rule(args: Any, kwargs: Any, out: Operand) -> Push:
        x, *more = args
        if moving(more) or moving(kwargs) or not isinstance(x, Operand):
            raise NotImplementedError("more than its first argument depends on the parameters")
        if out.tensor.is_complex() or x.tensor.is_complex():
            raise NotImplementedError("no rule for complex numbers")
        at, x = (out if by_result else x), bare(x)

        def push(run: Run) -> Jet:
            x1, x2 = run.jet(x)
            if x1 is None and x2 is None:
                return ZERO
            slope, bend = slopes(run.value(at), *run.value(more), **run.value(kwargs))
            first, second = each(lambda d: slope * d, (x1, x2))
            if not run.second or x1 is None or bend is None:
                return first, second
            return first, total(second, bend * x1.square())

        return push

    return rule


def by_reverse_passes(func: Callable[..., Any]) -> Rule:
    """Any function without random numbers or side effects whose value is made again; both jets, with graphs.

    Jᵀw is linear in w, so J x₁ is the derivative of ⟨Jᵀw, x₁⟩ in w; once more along x₁, plus J x₂, is the second part.
    """

    def rule(args: Any, kwargs: Any, out: Any) -> Push:
        if any(o.tensor.is_complex() for o in operands((args, list(kwargs.values()), out))):
            raise NotImplementedError("no rule for complex numbers")

        def push(run: Run) -> Jet:
            graph = torch.is_grad_enabled()
            xs: list[Tensor] = []
            jets: list[Jet] = []

            def leaf(x: Any) -> Any:
                if isinstance(x, (list, tuple)):
                    return like(x, [leaf(v) for v in x])
                value = run.value(x)
                if run.jet(x)[0] is not None:
                    # a name of its own: arguments may depend on each other
                    value = value.view_as(value) if graph and value.requires_grad else value.detach().requires_grad_()
                    xs.append(value)
                    jets.append(run.jet(x))
                return value

            with torch.enable_grad():
                result = func(*leaf(args), **{k: leaf(a) for k, a in kwargs.items()})
                ys = list(result) if isinstance(result, (list, tuple)) else [result]
                firsts, seconds = [j[0] for j in jets], [j[1] for j in jets]
                first = _along(ys, xs, firsts)
                second: list[Any] = [None] * len(ys)
                if run.second:
                    second = [total(a, b) for a, b in zip(_along(first, xs, firsts), _along(ys, xs, seconds))]
            if not graph:
                first, second = ([None if t is None else t.detach() for t in part] for part in (first, second))
            return (first[0], second[0]) if isinstance(result, Tensor) else (first, second)

        return push

    return rule


def _along(ys: Sequence[Any], xs: Sequence[Tensor], ds: Sequence[Tensor | None]) -> list[Any]:
    """Σ ∂y/∂x d over the xs, for each y; None is zero."""
    some = [
        (i, y, torch.zeros_like(y, requires_grad=True)) for i, y in enumerate(ys) if y is not None and y.requires_grad
    ]
    moved: list[Any] = [None] * len(ys)
    if not some:
        return moved
    pulled = torch.autograd.grad(
        [y for _, y, _ in some], xs, [w for *_, w in some], create_graph=True, allow_unused=True
    )
    dot = total(*[(g * d).sum() for g, d in zip(pulled, ds) if g is not None and d is not None])
    if dot is None or not dot.requires_grad:
        return moved
    parts = torch.autograd.grad(dot, [w for *_, w in some], create_graph=True, allow_unused=True)
    for (i, _, _), part in zip(some, parts):
        moved[i] = part
    return moved
