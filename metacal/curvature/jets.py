"""How functions of PyTorch carry derivatives along a direction; `tape` puts them in a row.

Along the line θ + εv every intermediate value is a(ε) = a + ε a₁ + ½ε² a₂ + …; write (a₁, a₂) for its *jet*. A linear
operation applies to both parts; a bilinear one (layers, products) and an elementwise one give

    (A B)₁ = A₁B + A B₁     (A B)₂ = A₂B + 2 A₁B₁ + A B₂     φ(a)₁ = φ'a₁     φ(a)₂ = φ'a₂ + φ''a₁²

`RULES` maps a function to its rule. A rule gets the arguments of one call, tensors as `Operand`s, and the result, and
returns what computes the result's jet from the operands'; it raises LookupError for a call that it does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["RULES", "ZERO", "Jet", "JetOf", "Operand", "Push"]

Jet = tuple[Tensor | None, Tensor | None]  # (first, second derivative); None is zero
ZERO: Jet = (None, None)


@dataclass(frozen=True)
class Operand:
    """A tensor as an argument: its value, and the number of its jet (None: it does not depend on the parameters)."""

    tensor: Tensor
    version: int
    slot: int | None

    @property
    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("a value that a derivative needs was overwritten in place")
        return self.tensor


NOTHING = torch.empty(0)


def _bare(x: Any) -> Any:
    """The operand without its value, which a rule that needs none would otherwise keep alive."""
    return Operand(NOTHING, 0, x.slot) if isinstance(x, Operand) else x


JetOf = Callable[[Operand], Jet]
Push = Callable[[JetOf, bool], Jet]  # (jets of the operands, whether second derivatives are wanted) → the result's jet


Rule = Callable[[Any, Any, Tensor], Push]  # (arguments with `Operand`s for tensors, keywords, the result)


def _sum(*terms: Tensor | None) -> Tensor | None:
    total: Tensor | None = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def _both(f: Callable[[Tensor], Tensor], jet: Jet) -> Jet:
    first, second = jet
    return (None if first is None else f(first)), (None if second is None else f(second))


def _linear_in_first(func: Callable[..., Tensor]) -> Rule:
    """`func` is linear in its first argument, and only that one has a jet."""

    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        x, *rest = args
        others = list(_operands((rest, list(kwargs.values()))))
        if not isinstance(x, Operand) or any(o.slot is not None for o in others):
            raise LookupError("more than its first argument depends on the parameters")
        x, more = _bare(x), _plain(rest)
        named = {k: _plain(a) for k, a in kwargs.items()}
        return lambda of, second: _both(lambda d: func(d, *more, **named), of(x))

    return rule


def _operands(values: Iterable[Any]) -> Iterator[Operand]:
    for value in values:
        if isinstance(value, Operand):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _operands(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Operand):
        return value.value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value


def _sum_rule(sign: int, reverse: bool = False) -> Rule:
    """a ± alpha·b, out of place or in place."""

    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        a, b = map(_bare, reversed(args) if reverse else args)
        scale = sign * kwargs.get("alpha", 1)

        def push(of: JetOf, second: bool) -> Jet:
            left = of(a) if isinstance(a, Operand) else ZERO
            right = of(b) if isinstance(b, Operand) else ZERO
            if scale != 1:
                right = _both(lambda d: d * scale, right)
            return _sum(left[0], right[0]), _sum(left[1], right[1])

        return push

    return rule


def _bilinear(f: Callable[[Tensor, Tensor], Tensor], a: Operand, b: Operand) -> Push:
    def push(of: JetOf, second: bool) -> Jet:
        (a1, a2), (b1, b2) = of(a), of(b)
        first = _sum(
            None if a1 is None else f(a1, b.value),
            None if b1 is None else f(a.value, b1),
        )
        if not second:
            return first, None
        return first, _sum(
            None if a2 is None else f(a2, b.value),
            None if a1 is None or b1 is None else f(2 * a1, b1),
            None if b2 is None else f(a.value, b2),
        )

    return push


def _product(func: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Bilinear in two arguments, or a multiple by a number."""

    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        a, b = args
        if isinstance(a, Operand) and isinstance(b, Operand):
            return _bilinear(func, a, b)
        x, number = (_bare(a), b) if isinstance(a, Operand) else (_bare(b), a)
        return lambda of, second: _both(lambda d: d * number, of(x))

    return rule


def _quotient(args: Any, kwargs: Any, out: Tensor) -> Push:
    a, b = args
    if kwargs or not isinstance(a, Operand) or (isinstance(b, Operand) and b.slot is not None):
        raise LookupError("only a division by a constant has a rule")
    x = _bare(a)
    return lambda of, second: _both(lambda d: d / _plain(b), of(x))


def _layer(func: Callable[..., Tensor]) -> Rule:
    """Linear layers and convolutions: bilinear in input and weight, plus the bias."""

    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        names = ("input", "weight", "bias")
        rest = {k: a for k, a in kwargs.items() if k not in names}
        given = {k: a for k, a in kwargs.items() if k in names}
        x, weight, bias = _with_defaults(names, (None, None, None), args[:3], given)
        more = args[3:]
        if bias is not None and not isinstance(bias, Operand):
            raise LookupError("unknown form of its bias")
        product = _bilinear(lambda a, b: func(a, b, None, *more, **rest), x, weight)
        if bias is None or bias.slot is None:
            return product
        shape = (-1, *[1] * (out.ndim - 2)) if func is not F.linear else (-1,)

        def push(of: JetOf, second: bool) -> Jet:
            first, other = product(of, second)
            b1, b2 = _both(lambda d: d.view(shape), of(bias))
            return _sum(first, b1), _sum(other, b2)

        return push

    return rule


def _with_defaults(names: Sequence[str], defaults: Sequence[Any], args: Any, kwargs: Any) -> list[Any]:
    """The values of the named arguments, given by position or by name."""
    if len(args) > len(names) or not set(kwargs) <= set(names):
        raise LookupError("unknown arguments")
    values = dict(zip(names, defaults)) | dict(zip(names, args)) | kwargs
    return [values[n] for n in names]


def _batch_norm(args: Any, kwargs: Any, out: Tensor) -> Push:
    """By running statistics: w s (x - μ) + b with constants μ and s."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    x, mean, var, weight, bias, training, _, eps = _with_defaults(
        names, (None, None, None, None, None, False, 0.1, 1e-5), args, kwargs
    )
    if training or mean is None or var is None:
        raise LookupError("no rule for the statistics of a batch")
    zero = torch.zeros_like(mean.value)

    def norm(a: Tensor, m: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.batch_norm(a, m, var.value, w, b, False, 0.0, eps)

    def push(of: JetOf, second: bool) -> Jet:
        (x1, x2), (w1, w2), (b1, b2) = (ZERO if o is None else of(o) for o in (x, weight, bias))
        w = None if weight is None else weight.value
        first = None if x1 is None else norm(x1, zero, w, b1 if w1 is None else None)
        if w1 is not None:
            moved = norm(x.value, mean.value, w1, b1)
            first = moved if first is None else moved.add_(first)
        elif first is None and b1 is not None:
            first = b1.view(-1, *[1] * (out.ndim - 2))
        if not second:
            return first, None
        if w2 is not None or b2 is not None:
            raise RuntimeError("a scale of batch normalisation that is no parameter")
        return first, _sum(
            None if x2 is None else norm(x2, zero, w, None),
            None if x1 is None or w1 is None else norm(x1, zero, 2 * w1, None),
        )

    return push


def _elementwise(slopes: Callable[..., tuple[Tensor, Tensor]]) -> Rule:
    """φ with (φ', φ'') = slopes(input, result, further arguments)."""

    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        x, *more = args
        named = {k: a for k, a in kwargs.items() if k != "inplace"}
        if list(_operands((more, list(named.values())))):
            raise LookupError("only its first argument may be a tensor")
        result = Operand(out, out._version, None)

        def push(of: JetOf, second: bool) -> Jet:
            x1, x2 = of(x)
            if x1 is None:
                return ZERO
            slope, bend = slopes(x, result, *more, **named)
            return slope * x1, (_sum(None if x2 is None else slope * x2, bend * x1.square()) if second else None)

        return push

    return rule


def _relu(args: Any, kwargs: Any, out: Tensor) -> Push:
    x, result = _bare(args[0]), Operand(out, out._version, None)
    return lambda of, second: _both(lambda d: torch.ops.aten.threshold_backward(d, result.value.detach(), 0), of(x))


def _tanh(x: Operand, out: Operand) -> tuple[Tensor, Tensor]:
    slope = 1 - out.value.square()
    return slope, -2 * out.value * slope


def _sigmoid(x: Operand, out: Operand) -> tuple[Tensor, Tensor]:
    slope = out.value * (1 - out.value)
    return slope, slope * (1 - 2 * out.value)


def _silu(x: Operand, out: Operand) -> tuple[Tensor, Tensor]:
    h = x.value
    s = h.sigmoid()
    return s * (1 + h * (1 - s)), s * (1 - s) * (2 + h * (1 - 2 * s))


def _gelu(x: Operand, out: Operand, approximate: str = "none") -> tuple[Tensor, Tensor]:
    if approximate != "none":
        raise RuntimeError("no rule for an approximate gelu")
    h = x.value
    density = (-0.5 * h.square()).exp() / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(h / math.sqrt(2))) + h * density, density * (2 - h.square())


def _softplus(x: Operand, out: Operand, beta: float = 1.0, threshold: float = 20.0) -> tuple[Tensor, Tensor]:
    h = x.value * beta
    s = torch.where(h > threshold, torch.ones_like(h), h.sigmoid())
    return s, beta * s * (1 - s)


def _leaky_relu(x: Operand, out: Operand, negative_slope: float = 0.01) -> tuple[Tensor, Tensor]:
    if negative_slope <= 0:
        raise RuntimeError("a leaky relu of negative slope hides the sign of its input")
    slope = (out.value.detach() > 0).to(out.value.dtype)  # of the result: the input may be overwritten
    return slope + (1 - slope) * negative_slope, torch.zeros_like(slope)


def _max_pool2d(args: Any, kwargs: Any, out: Tensor) -> Push:
    x, *rest = args
    named = {k: a for k, a in kwargs.items() if k != "return_indices"}
    if kwargs.get("return_indices") or x.tensor.ndim != 4:
        raise LookupError("only pooling of a batch of images has a rule")
    chosen: list[Tensor] = []

    def push(of: JetOf, second: bool) -> Jet:
        if not chosen:
            with torch.no_grad():
                chosen.append(F.max_pool2d(x.value, *rest, **named, return_indices=True)[1])
        at = chosen[0]
        return _both(lambda d: d.flatten(2).gather(2, at.flatten(2)).view(at.shape), of(x))

    return push


def _cat(args: Any, kwargs: Any, out: Tensor) -> Push:
    parts, *rest = args
    operands = list(parts)

    def push(of: JetOf, second: bool) -> Jet:
        jets = [of(o) for o in operands]

        def joined(order: int) -> Tensor | None:
            ds = [jet[order] for jet in jets]
            if all(d is None for d in ds):
                return None
            return torch.cat(
                [torch.zeros_like(o.tensor) if d is None else d for o, d in zip(operands, ds)], *rest, **kwargs
            )

        return joined(0), joined(1)

    return push


RULES: dict[Any, Rule] = {
    F.linear: _layer(F.linear),
    F.conv1d: _layer(F.conv1d),
    F.conv2d: _layer(F.conv2d),
    F.batch_norm: _batch_norm,
    F.max_pool2d: _max_pool2d,
    torch.cat: _cat,
    torch.matmul: _product(torch.matmul),
    Tensor.matmul: _product(torch.matmul),
    Tensor.__matmul__: _product(torch.matmul),
}
"""What is known, by the function that PyTorch hands to a mode. In-place forms are carried out of place."""

_f: Any
for _f in (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__):
    RULES[_f] = _sum_rule(1)
for _f in (torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__):
    RULES[_f] = _sum_rule(-1)
RULES[Tensor.__rsub__] = _sum_rule(-1, reverse=True)
for _f in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__):
    RULES[_f] = _product(torch.mul)
for _f in (torch.div, Tensor.div, Tensor.__truediv__):
    RULES[_f] = _quotient
for _f in (torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu):
    RULES[_f] = _relu
for _f in (torch.tanh, Tensor.tanh, F.tanh):
    RULES[_f] = _elementwise(_tanh)
for _f in (torch.sigmoid, Tensor.sigmoid, F.sigmoid):
    RULES[_f] = _elementwise(_sigmoid)
RULES[F.silu] = _elementwise(_silu)
RULES[F.gelu] = _elementwise(_gelu)
RULES[F.softplus] = _elementwise(_softplus)
RULES[F.leaky_relu] = _elementwise(_leaky_relu)
for _f in (
    torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape, torch.permute, Tensor.permute, torch.transpose,
    Tensor.transpose, torch.squeeze, Tensor.squeeze, torch.unsqueeze, Tensor.unsqueeze, Tensor.expand,
    Tensor.contiguous, Tensor.clone, torch.t, Tensor.t, Tensor.__getitem__, torch.mean, Tensor.mean, torch.sum,
    Tensor.sum, torch.neg, Tensor.neg, Tensor.__neg__, F.avg_pool2d, F.adaptive_avg_pool2d, Tensor.to, Tensor.float,
    Tensor.double,
):  # fmt: skip
    RULES[_f] = _linear_in_first(_f)
RULES[Tensor.view] = _linear_in_first(Tensor.reshape)  # an expanded jet has no view


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    return F.pad(input, pad, mode)  # a constant border does not move


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training:
        raise RuntimeError("dropout drew a mask")
    return input


RULES[F.pad] = _linear_in_first(_pad)
RULES[F.dropout] = _linear_in_first(_dropout)
