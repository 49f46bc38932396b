"""Taylor coefficients of the logits along a direction in the parameters, with an ordinary graph in θ.

    z(θ + εv) = z₀ + ε z₁ + ε²/2 z₂ + …        z₁ = J v,  z₂ = v^T ∇²z v

`Jets` is a context in which a network is called as ever. Operations on tensors that depend on the parameters also
compute the first one or two coefficients of their result, by the rules below; everything else runs untouched. Each
rule is made of plain operations, so one reverse pass differentiates the coefficients in θ: third-order derivatives of
the network, without third-order graphs and without the operators whose higher derivatives PyTorch has wrong or not at
all (normalisation by a batch's or a layer's own statistics).

An operation without a rule raises `Unsupported`, and so does every in-place operation that is none of the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metacal.penalties.activations import ACTIVATIONS

__all__ = ["WRONG", "Jets", "PlainNorms", "Unsupported"]

Part = Tensor | None  # a coefficient; None: zero
Jet = tuple[Any, Any, Any]


class Unsupported(NotImplementedError):
    """An operation without a rule."""


class Jets(TorchFunctionMode):
    """Within, tensors depending on `params` carry their coefficients along `direction`; `of` reads them.

    order: 1 leaves z₂ out. Tensors are told apart by identity, and kept alive until the object is.
    """

    def __init__(self, params: Sequence[Tensor], direction: Sequence[Tensor | None], order: int = 2) -> None:
        super().__init__()
        self.order = order
        self._table: dict[int, tuple[Tensor, Part, Part]] = {}
        self._stale: dict[int, Tensor] = {}
        for p, v in zip(params, direction):
            if v is not None:
                self._table[id(p)] = (p, v, None)

    def of(self, t: Any) -> tuple[Any, Part, Part]:
        """(t, t₁, t₂)."""
        if id(t) in self._stale:
            raise Unsupported("reading a tensor after an in-place operation on it")
        entry = self._table.get(id(t))
        return (t, None, None) if entry is None else entry

    def _moves(self, args: Any) -> bool:
        for a in args:
            if isinstance(a, Tensor):
                if id(a) in self._table or id(a) in self._stale:
                    return True
            elif isinstance(a, (tuple, list)) and self._moves(a):
                return True
        return False

    def _keep(self, y0: Any, y1: Any, y2: Any) -> Any:
        if isinstance(y0, (tuple, list)):
            for i, part in enumerate(y0):
                self._keep(part, None if y1 is None else y1[i], None if y2 is None else y2[i])
        elif y1 is not None or y2 is not None:
            self._table[id(y0)] = (y0, y1, y2)
        return y0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() or not (self._moves(args) or self._moves(kwargs.values())):
            return func(*args, **kwargs)
        raw = getattr(func, "__name__", "")
        if raw == "__get__":  # a property
            raw = getattr(getattr(func, "__self__", None), "__name__", "")
            if raw not in ("T", "mT"):
                return func(*args, **kwargs)
        if raw in _PASS:
            return func(*args, **kwargs)
        name = raw.strip("_")
        name = name[1:] if name in ("iadd", "isub", "imul", "itruediv") else name
        by_name = raw.startswith("__i") if raw.startswith("__") else raw.endswith("_")
        in_place = by_name or kwargs.get("inplace", False)
        rule = _RULES.get(name)
        if rule is None:
            with torch.no_grad():
                shown = None if in_place else func(*args, **kwargs)
            if shown is not None and not _floating(shown):
                return shown  # shapes, comparisons, indices: nothing to differentiate
            raise Unsupported(f"{raw}")
        y = self._keep(*rule(self, func, args, kwargs))
        if in_place:
            # done out of place: the tensor that should have changed must not be read again
            if args[0]._is_view():
                raise Unsupported(f"{raw} on a view")
            self._stale[id(args[0])] = args[0]
        return y


_PASS = {"size", "dim", "numel", "stride", "is_floating_point", "is_complex", "detach", "requires_grad_", "type",
         "data_ptr", "__len__", "is_contiguous", "get_device", "element_size", "ndimension", "__hash__", "__repr__",
         "_is_view", "argmax", "new_zeros", "new_ones", "zeros_like", "ones_like"}  # fmt: skip


def _floating(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return any(_floating(r) for r in result)
    return isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex())


# -- arithmetic of coefficients ------------------------------------------------------------------------------------


def _sum(*parts: Part) -> Part:
    some = [p for p in parts if p is not None]
    if not some:
        return None
    total = some[0]
    for p in some[1:]:
        total = total + p
    return total


def _times(f: Callable[[Tensor, Tensor], Tensor], a: Part, b: Part) -> Part:
    return None if a is None or b is None else f(a, b)


def _product(f: Callable[[Any, Any], Tensor], a: Jet, b: Jet, order: int) -> Jet:
    """Of a bilinear f, by Leibniz's rule."""
    (a0, a1, a2), (b0, b1, b2) = a, b
    y1 = _sum(_times(f, a1, b0), _times(f, a0, b1))
    if order < 2:
        return f(a0, b0), y1, None
    cross = _times(f, a1, b1)
    y2 = _sum(_times(f, a2, b0), None if cross is None else 2 * cross, _times(f, a0, b2))
    return f(a0, b0), y1, y2


def _mul(a: Any, b: Any) -> Tensor:
    return a * b


def _spread(part: Part, like: Tensor) -> Part:
    return None if part is None or part.shape == like.shape else part.expand_as(like)


# -- rules: (mode, func, args, kwargs) -> jet of the result -----------------------------------------------------------


def _linear_in_first(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    if not args or mode._moves(args[1:]) or mode._moves(kwargs.values()):
        raise Unsupported(f"{func.__name__} with several arguments that depend on the parameters")
    x0, x1, x2 = mode.of(args[0])

    def apply(part: Any) -> Any:
        return None if part is None else func(part, *args[1:], **kwargs)

    return apply(x0), apply(x1), apply(x2)


def _linear_in_list(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    jets = [mode.of(t) for t in args[0]]
    results: list[Any] = [func([j[0] for j in jets], *args[1:], **kwargs)]
    for i in (1, 2):
        if any(j[i] is not None for j in jets):
            filled = [torch.zeros_like(j[0]) if j[i] is None else j[i] for j in jets]
            results.append(func(filled, *args[1:], **kwargs))
        else:
            results.append(None)
    return results[0], results[1], results[2]


def _additive(sign: int, swapped: bool = False) -> Callable[..., Jet]:
    def rule(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        a, b = mode.of(args[0]), mode.of(args[1])
        if swapped:
            a, b = b, a
        scale = sign * alpha
        y0 = a[0] + scale * b[0] if scale != 1 else a[0] + b[0]
        parts = []
        for i in (1, 2):
            moved = b[i] if b[i] is None or scale == 1 else scale * b[i]
            part = _sum(a[i], moved)
            parts.append(part if part is None or part.shape == y0.shape else part.expand_as(y0))
        return y0, parts[0], parts[1]

    return rule


def _bilinear(f: Callable[[Any, Any], Tensor]) -> Callable[..., Jet]:
    def rule(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
        if len(args) != 2 or kwargs:
            raise Unsupported(func.__name__)
        return _product(f, mode.of(args[0]), mode.of(args[1]), mode.order)

    return rule


def _divide(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    if len(args) != 2 or kwargs or mode._moves(args[1:]):
        raise Unsupported("division by what depends on the parameters")
    x0, x1, x2 = mode.of(args[0])
    c = args[1]
    return x0 / c, None if x1 is None else x1 / c, None if x2 is None else x2 / c


def _power(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    exponent = args[1] if len(args) > 1 else 2
    if exponent != 2:
        raise Unsupported("powers other than squares")
    x = mode.of(args[0])
    return _product(_mul, x, x, mode.order)


def _layer(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    """Linear and convolutional layers: func(x, w, b, …)."""
    x, w = mode.of(args[0]), mode.of(args[1])
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    rest = args[3:]
    options = {k: v for k, v in kwargs.items() if k != "bias"}
    if mode._moves(rest) or mode._moves(options.values()):
        raise Unsupported(func.__name__)
    y0, y1, y2 = _product(lambda a, b: func(a, b, None, *rest, **options), x, w, mode.order)
    if bias is None:
        return y0, y1, y2
    shape = bias.shape if func.__name__ == "linear" else (-1, *[1] * (y0.ndim - 2))
    y0 = y0 + bias.view(shape)
    db = mode.of(bias)[1]
    if db is not None:
        y1 = _sum(y1, db.view(shape).expand_as(y0))
    return y0, y1, y2


def _elementwise(name: str) -> Callable[..., Jet]:
    phi = ACTIVATIONS[name]

    def rule(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
        x0, x1, x2 = mode.of(args[0])
        options = {k: v for k, v in kwargs.items() if k not in ("inplace",)}
        try:
            y0, slope, bend = phi(x0, *args[1:], **options)
        except (NotImplementedError, TypeError) as error:
            raise Unsupported(f"{name} with options {args[1:]} {options}") from error
        y1 = None if x1 is None else slope * x1
        y2 = None if x2 is None else slope * x2
        if mode.order > 1 and bend is not None and x1 is not None:
            curved = bend * x1 * x1
            y2 = curved if y2 is None else y2 + curved
        return y0, y1, y2

    return rule


def _dropout(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    options = {k: v for k, v in kwargs.items() if k != "inplace"}
    rest = args[1:3] if func.__name__ == "dropout" else args[1:]
    x = mode.of(args[0])
    with torch.no_grad():
        mask = func(torch.ones_like(x[0]), *rest, **options)
    return x[0] * mask, _times(_mul, x[1], mask), _times(_mul, x[2], mask)


def _pad(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    x = mode.of(args[0])
    names = dict(zip(("pad", "mode", "value"), args[1:])) | kwargs
    constant = names.get("mode", "constant") == "constant"
    slope = {**names, "value": None} if constant else names  # the constant has no derivative
    return (
        func(x[0], **names),
        None if x[1] is None else func(x[1], **slope),
        None if x[2] is None else func(x[2], **slope),
    )


def _max_pool2d(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    options = {k: v for k, v in kwargs.items() if k != "return_indices"}
    if kwargs.get("return_indices"):
        raise Unsupported("max_pool2d with indices")
    x0, x1, x2 = mode.of(args[0])
    y0, at = F.max_pool2d_with_indices(x0, *args[1:], **options)

    def chosen(part: Part) -> Part:
        return None if part is None else part.flatten(-2).gather(-1, at.flatten(-2)).view_as(at)

    return y0, chosen(x1), chosen(x2)


def _softmax(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None or kwargs.get("dtype") is not None:
        raise Unsupported("softmax without dim, or to another type")
    return _softmax_jet(mode.of(args[0]), int(dim))


def _softmax_jet(x: Jet, dim: int) -> Jet:
    x0, x1, x2 = x
    p = x0.softmax(dim)
    if x1 is None and x2 is None:
        return p, None, None
    d = None if x1 is None else x1 - (p * x1).sum(dim, keepdim=True)  # derivative of log p
    second = _sum(x2, None if d is None else d * d)
    y1 = None if d is None else p * d
    y2 = None if second is None else p * (second - (p * second).sum(dim, keepdim=True))
    return p, y1, y2


def _attention(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    q, k, v = (mode.of(t) for t in args[:3])
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is not None or len(args) > 4 or kwargs.get("dropout_p", 0.0) or kwargs.get("is_causal", False):
        raise Unsupported("attention with a mask or dropout")
    scale = kwargs.get("scale")
    scale = q[0].shape[-1] ** -0.5 if scale is None else scale
    scores = _product(lambda a, b: (a * scale) @ b.transpose(-2, -1), q, k, mode.order)
    weights = _softmax_jet(scores, -1)
    return _product(torch.matmul, (weights[0], weights[1], weights[2] if mode.order > 1 else None), v, mode.order)


# -- normalisation --------------------------------------------------------------------------------------------------


def _inverse_root(c: Jet, moment: Callable[[Tensor], Tensor], eps: float, order: int) -> Jet:
    """Jet of 1/√(moment(c²) + eps), for a moment that is linear: a mean or a sum over some dimensions."""
    c0, c1, c2 = c
    s0 = (moment(c0.square()) + eps).rsqrt()
    half1 = None if c1 is None else moment(c0 * c1)  # half the moment's derivatives
    half2 = None if c2 is None else moment(c0 * c2)
    if order > 1 and c1 is not None:
        half2 = _sum(half2, moment(c1.square()))
    cube = s0 * s0 * s0
    s1 = None if half1 is None else -cube * half1
    s2 = None if half2 is None else -cube * half2
    if order > 1 and half1 is not None:
        s2 = _sum(s2, 3 * cube * s0 * s0 * half1 * half1)
    return s0, s1, s2


def _centred(x: Jet, dims: tuple[int, ...], eps: float, order: int) -> tuple[Jet, Jet]:
    """Jets of x − mean and of 1/√(variance + eps), over dims."""
    c0, c1, c2 = (None if part is None else part - part.mean(dims, keepdim=True) for part in x)
    centre = (c0, c1, c2)
    return centre, _inverse_root(centre, lambda t: t.mean(dims, keepdim=True), eps, order)


def _affine(mode: Jets, y: Jet, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Jet:
    if weight is not None:
        y = _product(_mul, y, _shaped(mode.of(weight), shape), mode.order)
    if bias is not None:
        b = _shaped(mode.of(bias), shape)
        y = (y[0] + b[0], _sum(y[1], _spread(b[1], y[0]) if y[1] is None else b[1]), y[2])
    return y


def _shaped(jet: Jet, shape: tuple[int, ...]) -> Jet:
    return tuple(None if part is None else part.view(shape) for part in jet)  # type: ignore[return-value]


def _batch_norm(
    mode: Jets,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Jet:
    x = mode.of(input)
    shape = (1, -1, *[1] * (input.ndim - 2))
    if training:
        centre, scale = _centred(x, (0, *range(2, input.ndim)), eps, mode.order)
    else:
        assert running_mean is not None and running_var is not None
        centre = (x[0] - running_mean.view(shape), x[1], x[2])
        scale = ((running_var.view(shape) + eps).rsqrt(), None, None)
    if weight is not None:  # scale and weight are one number a channel: multiply them first
        scale = _product(_mul, scale, _shaped(mode.of(weight), shape), mode.order)
    return _affine(mode, _product(_mul, centre, scale, mode.order), None, bias, shape)


def _group_norm(
    mode: Jets,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Jet:
    grouped = (len(input), num_groups, -1)
    x = tuple(None if part is None else part.reshape(grouped) for part in mode.of(input))
    centre, scale = _centred(x, (2,), eps, mode.order)  # type: ignore[arg-type]
    normed = _product(_mul, centre, scale, mode.order)
    back = tuple(None if part is None else part.reshape(input.shape) for part in normed)
    return _affine(mode, back, weight, bias, (1, -1, *[1] * (input.ndim - 2)))  # type: ignore[arg-type]


def _layer_norm(
    mode: Jets,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Jet:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    centre, scale = _centred(mode.of(input), dims, eps, mode.order)
    return _affine(mode, _product(_mul, centre, scale, mode.order), weight, bias, tuple(normalized_shape))


def _rms_norm(
    mode: Jets,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Jet:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    x = mode.of(input)
    scale = _inverse_root(x, lambda t: t.mean(dims, keepdim=True), eps, mode.order)
    return _affine(mode, _product(_mul, x, scale, mode.order), weight, None, tuple(normalized_shape))


def _weight_norm(mode: Jets, v: Tensor, g: Tensor, dim: int = 0) -> Jet:
    if dim < 0:
        raise Unsupported("weight normalisation of the whole tensor")
    dims = tuple(i for i in range(v.ndim) if i != dim)
    direction = mode.of(v)
    scale = _inverse_root(direction, lambda t: t.sum(dims, keepdim=True), 0.0, mode.order)
    return _product(_mul, direction, _product(_mul, mode.of(g), scale, mode.order), mode.order)


_NORMS: dict[Any, Callable[..., Jet]] = {
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    torch._weight_norm: _weight_norm,
}
if hasattr(F, "rms_norm"):
    _NORMS[F.rms_norm] = _rms_norm

WRONG = ("BatchNorm", "GroupNorm", "LayerNorm", "RmsNorm", "RMSNorm", "WeightNorm")
"""Parts of the names of graph nodes whose third derivatives PyTorch has wrong, without saying so, or not at all."""


def _norm(mode: Jets, func: Any, args: Any, kwargs: Any) -> Jet:
    if func not in _NORMS:  # a relative, with its arguments in another order
        raise Unsupported(func.__name__)
    return _NORMS[func](mode, *args, **kwargs)


class PlainNorms(TorchFunctionMode):
    """Within, normalisations are computed by plain arithmetic, whose derivatives of every order are right."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _NORMS:
            return func(*args, **(kwargs or {}))
        try:
            return _NORMS[func](Jets([], []), *args, **(kwargs or {}))[0]
        except Unsupported:
            return func(*args, **(kwargs or {}))


_FIRST = (
    "view reshape flatten unflatten permute transpose t T mT contiguous expand expand_as squeeze unsqueeze getitem "
    "select narrow unbind chunk split sum mean neg negative clone avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d flip roll repeat movedim swapaxes view_as reshape_as to float double "
    "pixel_shuffle unfold"
)
_RULES: dict[str, Callable[..., Jet]] = {
    **dict.fromkeys(_FIRST.split(), _linear_in_first),
    **dict.fromkeys(("cat", "concat", "stack"), _linear_in_list),
    **{name: _elementwise(name) for name in ACTIVATIONS},
    **dict.fromkeys(("batch_norm", "group_norm", "layer_norm", "rms_norm", "weight_norm"), _norm),
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), _layer),
    **dict.fromkeys(("mul", "multiply", "rmul"), _bilinear(_mul)),
    **dict.fromkeys(("matmul", "mm", "bmm"), _bilinear(torch.matmul)),
    "rmatmul": _bilinear(lambda a, b: b @ a),
    **dict.fromkeys(("add", "radd"), _additive(1)),
    "sub": _additive(-1),
    "rsub": _additive(-1, swapped=True),
    **dict.fromkeys(("div", "truediv", "true_divide"), _divide),
    **dict.fromkeys(("pow", "square"), _power),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    "pad": _pad,
    "max_pool2d": _max_pool2d,
    "softmax": _softmax,
    "scaled_dot_product_attention": _attention,
}
