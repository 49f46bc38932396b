"""How functions of PyTorch carry derivatives along a direction; `tape` puts them in a row.

Along the line θ + εv every intermediate value is a(ε) = a + ε a₁ + ½ε² a₂ + …; write (a₁, a₂) for its *jet*. A linear
operation applies to both parts; a bilinear one (layers, products) and an elementwise one give

    (A B)₁ = A₁B + A B₁     (A B)₂ = A₂B + 2 A₁B₁ + A B₂     φ(a)₁ = φ'a₁     φ(a)₂ = φ'a₂ + φ''a₁²

`RULES` maps a function to its rule. A rule gets the arguments of one call, tensors as `Operand`s, and the result, and
returns what computes the result's jet from the operands'; it raises NotImplementedError for a call that it does not
cover.
All are made of operations whose reverse derivatives are right, so jets can be differentiated in θ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.autodiff.activations import BY_INPUT, BY_RESULT, Slopes
from metacal.autodiff.plain import mean_square

__all__ = ["RULES", "ZERO", "Jet", "JetOf", "Operand", "Push", "overwrites"]


Part = Any  # a derivative: a tensor, or a tuple of them for a function with several results; None is zero
Jet = tuple[Part, Part]  # (first, second derivative)
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
            raise NotImplementedError("a value that a derivative needs was overwritten in place")
        return self.tensor


NOTHING = torch.empty(0)


def _bare(x: Any) -> Any:
    """The operand without its value, which a rule that needs none would otherwise keep alive."""
    return Operand(NOTHING, 0, x.slot) if isinstance(x, Operand) else x


JetOf = Callable[[Operand], Jet]
Push = Callable[[JetOf, bool], Jet]  # (jets of the operands, whether second derivatives are wanted) → the result's jet
Rule = Callable[[Any, Any, Any], Push]  # (arguments with `Operand`s for tensors, keywords, the result)


def _sum(*terms: Tensor | None) -> Tensor | None:
    total: Tensor | None = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def _both(f: Callable[[Tensor], Any], jet: Jet) -> Jet:
    first, second = jet
    return (None if first is None else f(first)), (None if second is None else f(second))


def _linear_in_first(func: Callable[..., Any]) -> Rule:
    """`func` is linear in its first argument, and only that one has a jet."""

    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        x, *rest = args
        others = list(_operands((rest, list(kwargs.values()))))
        if not isinstance(x, Operand) or any(o.slot is not None for o in others):
            raise NotImplementedError("more than its first argument depends on the parameters")
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

            def total(l: Part, r: Part) -> Part:
                if r is None or scale == 1:
                    return _sum(l, r)
                return r * scale if l is None else torch.add(l, r, alpha=scale)

            return total(left[0], right[0]), total(left[1], right[1])

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
            None if a1 is None or b1 is None else (f(2 * a1, b1) if a1.numel() <= b1.numel() else f(a1, 2 * b1)),
            None if b2 is None else f(a.value, b2),
        )

    return push


def _mean_square(args: Any, kwargs: Any, out: Tensor) -> Push:
    x, dims = args

    def push(of: JetOf, second: bool) -> Jet:
        x1, x2 = of(x)
        if x1 is None:
            return ZERO
        first = 2 * (x.value * x1).mean(dims, keepdim=True)
        if not second:
            return first, None
        total = mean_square(x1, dims)
        return first, 2 * (total if x2 is None else total + (x.value * x2).mean(dims, keepdim=True))

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
        raise NotImplementedError("only a division by a constant has a rule")
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
            raise NotImplementedError("unknown form of its bias")
        product = _bilinear(lambda a, b: func(a, b, None, *more, **rest), x, weight)
        if bias is None or bias.slot is None:
            return product
        shape = (-1, *[1] * (weight.tensor.ndim - 2))

        def push(of: JetOf, second: bool) -> Jet:
            first, other = product(of, second)
            b1, b2 = _both(lambda d: d.view(shape), of(bias))
            return _sum(first, b1), _sum(other, b2)

        return push

    return rule


def _with_defaults(names: Sequence[str], defaults: Sequence[Any], args: Any, kwargs: Any) -> list[Any]:
    """The values of the named arguments, given by position or by name."""
    if len(args) > len(names) or not set(kwargs) <= set(names):
        raise NotImplementedError("unknown arguments")
    values = dict(zip(names, defaults)) | dict(zip(names, args)) | kwargs
    return [values[n] for n in names]


def _batch_norm(args: Any, kwargs: Any, out: Tensor) -> Push:
    """By running statistics: w s (x - μ) + b with constants μ and s."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    x, mean, var, weight, bias, training, _, eps = _with_defaults(
        names, (None, None, None, None, None, False, 0.1, 1e-5), args, kwargs
    )
    if training or mean is None or var is None:
        raise NotImplementedError("no rule for the statistics of a batch")
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
            raise NotImplementedError("a scale of batch normalisation that is no parameter")
        return first, _sum(
            None if x2 is None else norm(x2, zero, w, None),
            None if x1 is None or w1 is None else norm(x1, zero, 2 * w1, None),
        )

    return push


def _elementwise(slopes: Callable[..., Slopes], by_result: bool) -> Rule:
    """φ with (φ', φ'') = slopes(input or result, further arguments)."""

    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        x, *more = args
        named = {k: a for k, a in kwargs.items() if k != "inplace"}
        if list(_operands((more, list(named.values())))):
            raise NotImplementedError("only its first argument may be a tensor")
        at = Operand(out, out._version, None) if by_result else x
        x = _bare(x)

        def push(of: JetOf, second: bool) -> Jet:
            x1, x2 = of(x)
            if x1 is None:
                return ZERO
            slope, bend = slopes(at.value, *more, **named)
            if not second:
                return slope * x1, None
            return slope * x1, _sum(
                None if x2 is None else slope * x2,
                None if bend is None else bend * x1.square(),
            )

        return push

    return rule


def _relu(args: Any, kwargs: Any, out: Tensor) -> Push:
    x, result = _bare(args[0]), Operand(out, out._version, None)
    return lambda of, second: _both(lambda d: torch.ops.aten.threshold_backward(d, result.value.detach(), 0), of(x))


def _softmax(args: Any, kwargs: Any, out: Tensor) -> Push:
    x, dim = _bare(args[0]), kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None or kwargs.get("dtype") is not None or len(args) > 2:
        raise NotImplementedError("softmax without dim, or to another type")
    result = Operand(out, out._version, None)

    def push(of: JetOf, second: bool) -> Jet:
        x1, x2 = of(x)
        if x1 is None:
            return ZERO
        p = result.value
        d = x1 - (p * x1).sum(dim, keepdim=True)  # derivative of log p
        if not second:
            return p * d, None
        other = d * d if x2 is None else x2 + d * d
        return p * d, p * (other - (p * other).sum(dim, keepdim=True))

    return push


def _max_pool2d(args: Any, kwargs: Any, out: Tensor) -> Push:
    x, *rest = args
    named = {k: a for k, a in kwargs.items() if k != "return_indices"}
    if kwargs.get("return_indices"):
        raise NotImplementedError("no rule for pooling with indices")
    chosen: list[Tensor] = []

    def push(of: JetOf, second: bool) -> Jet:
        if not chosen:
            with torch.no_grad():
                chosen.append(F.max_pool2d(x.value, *rest, **named, return_indices=True)[1])
        at = chosen[0]
        return _both(lambda d: d.flatten(-2).gather(-1, at.flatten(-2)).view(at.shape), of(x))

    return push


def _linear_in_list(func: Callable[..., Tensor]) -> Rule:
    def rule(args: Any, kwargs: Any, out: Tensor) -> Push:
        operands, *rest = args

        def push(of: JetOf, second: bool) -> Jet:
            jets = [of(o) for o in operands]

            def joined(order: int) -> Part:
                ds = [jet[order] for jet in jets]
                if all(d is None for d in ds):
                    return None
                filled = [torch.zeros_like(o.tensor) if d is None else d for o, d in zip(operands, ds)]
                return func(filled, *rest, **kwargs)

            return joined(0), joined(1)

        return push

    return rule


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    return F.pad(input, pad, mode)  # a constant border does not move


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training:
        raise NotImplementedError("dropout drew a mask")
    return input


def _forms(*names: str, in_place: bool = True) -> Iterator[Any]:
    """The functions of these names in torch, torch.Tensor and torch.nn.functional, as operators, and in place."""
    forms = ("{}", "__{}__", "{}_", "__i{}__") if in_place else ("{}", "__{}__")
    for owner in (torch, Tensor, F):
        for form in forms:
            for name in names:
                found = getattr(owner, form.format(name), None)
                if callable(found):
                    yield found


LINEAR = (
    "flatten", "unflatten", "reshape", "reshape_as", "view_as", "permute", "transpose", "t", "movedim", "swapaxes",
    "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "contiguous", "clone", "to", "float", "double",
    "getitem", "select", "narrow", "unbind", "chunk", "split", "flip", "roll", "mean", "sum", "neg", "negative",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "pixel_shuffle", "unfold",
)  # fmt: skip

RULES: dict[Any, Rule] = {
    **{f: _linear_in_first(f) for f in _forms(*LINEAR, in_place=False)},
    **{f.__get__: _linear_in_first(f.__get__) for f in (Tensor.T, Tensor.mT)},  # type: ignore[attr-defined]
    Tensor.view: _linear_in_first(Tensor.reshape),  # an expanded jet has no view
    F.pad: _linear_in_first(_pad),
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _linear_in_first(_dropout)),
    **{f: _linear_in_list(f) for f in _forms("cat", "concat", "stack", in_place=False)},
    **dict.fromkeys(_forms("add", "radd"), _sum_rule(1)),
    **dict.fromkeys(_forms("sub"), _sum_rule(-1)),
    **dict.fromkeys(_forms("rsub"), _sum_rule(-1, reverse=True)),
    **dict.fromkeys(_forms("mul", "multiply", "rmul"), _product(torch.mul)),
    **dict.fromkeys(_forms("div", "truediv", "true_divide"), _quotient),
    **dict.fromkeys(_forms("matmul", "mm", "bmm", in_place=False), _product(torch.matmul)),
    Tensor.__rmatmul__: _product(lambda a, b: b @ a),
    **{f: _layer(f) for f in (F.linear, F.conv1d, F.conv2d, F.conv3d)},
    F.batch_norm: _batch_norm,
    F.max_pool2d: _max_pool2d,
    mean_square: _mean_square,
    **dict.fromkeys(_forms("softmax", in_place=False), _softmax),
    **{f: _elementwise(slopes, True) for name, slopes in BY_RESULT.items() for f in _forms(name)},
    **{f: _elementwise(slopes, False) for name, slopes in BY_INPUT.items() for f in _forms(name)},
    **dict.fromkeys(_forms("relu"), _relu),
}
"""What is known, by the function that PyTorch hands to a mode. In-place forms are carried out of place."""

_OLD = set(_forms(*BY_INPUT))


def overwrites(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call works in place on a first argument whose old value its rule needs."""
    if func in (Tensor.mul_, Tensor.__imul__):
        return any(isinstance(a, Tensor) and a.requires_grad for a in args[1:])
    return func in _OLD and kwargs.get("inplace", False)
