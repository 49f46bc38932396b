"""First derivatives of normalisations by statistics of their own input, along a direction.

With x̂ = (x − μ) s over some dimensions, s = 1/√(σ² + ε), the derivative of x̂ in x,

    x̂₁ = s (c − x̂ mean(x̂ c)),   c = x₁ − mean(x₁),

is symmetric: what carries a cotangent backward carries a tangent forward, and PyTorch's fused kernels do it. So for
y = w x̂ + b

    y₁ = w x̂₁ + w₁ x̂ + b₁

costs a forward and a backward kernel. Where the run is differentiated in its turn, the kernels' own derivatives are
wrong or missing: by the batch a backward of ours takes their place, elsewhere plain arithmetic. There are no second
derivatives here; `plain` is for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metacal.autodiff.jets import Jet, Operand, Push, Run, bare, bound, moving, product_jet, total
from metacal.autodiff.plain import standardised

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm", "weight_norm"]

Fused = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (x, x₁) → (x̂, x̂₁)


@dataclass(frozen=True)
class _Norm:
    """One call: x, seen in `shape`, is normalised over `dims` there; weight and bias apply in the shape `affine`."""

    x: Operand
    weight: Operand | None
    bias: Operand | None
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    affine: tuple[int, ...]
    eps: float
    fused: Fused | None
    centred: bool = True

    def push(self, run: Run) -> Jet:
        if run.second:
            raise NotImplementedError("no second derivative of a normalisation by its input's own statistics")
        (x1, _), (w1, _), (b1, _) = (run.jet(o) for o in (self.x, self.weight, self.bias))
        moved = None if b1 is None else b1.view(self.affine)
        if x1 is None and w1 is None:
            return moved, None
        normal, slope = self.normalised(run.value(self.x), x1)
        if slope is not None:
            w = None if self.weight is None else run.value(self.weight)
            moved = total(slope if w is None else slope * w.view(self.affine), moved)
        if w1 is not None:
            moved = total(moved, normal * w1.view(self.affine))
        return moved, None

    def normalised(self, x: Tensor, x1: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x̂ and x̂₁ in the shape of x."""
        form = x.shape
        x = x.reshape(self.shape)
        x1 = None if x1 is None else x1.reshape(self.shape)
        # CUDA's kernels take no empty batch
        if self.fused is not None and x1 is not None and x.numel() > 0 and not torch.is_grad_enabled():
            normal, slope = self.fused(x.contiguous(), x1.contiguous())
            return normal.reshape(form), slope.reshape(form)
        if x1 is None:
            centre, scale = standardised(x, self.dims, self.eps, self.centred)
            return (centre * scale).reshape(form), None
        normal, slope = _normalised(x, x1, self.dims, self.eps, self.centred)
        return normal.reshape(form), slope.reshape(form)


def _normalised(
    x: Tensor, x1: Tensor, dims: tuple[int, ...], eps: float, centred: bool = True
) -> tuple[Tensor, Tensor]:
    """x̂ and x̂₁, by plain arithmetic."""
    centre, scale = standardised(x, dims, eps, centred)
    normal = centre * scale
    c = x1 - x1.mean(dims, keepdim=True) if centred else x1
    return normal, scale * (c - normal * (normal * c).mean(dims, keepdim=True))


def _rule(norm: _Norm) -> Push:
    if not isinstance(norm.x, Operand) or any(o is not None and not isinstance(o, Operand) for o in (norm.weight,)):
        raise NotImplementedError("unknown form of its arguments")
    if norm.x.tensor.is_complex():
        raise NotImplementedError("no rule for complex numbers")
    return norm.push


def _by_batch(eps: float) -> Fused:
    def fused(x: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        normal, mean, scale = torch.native_batch_norm(x, None, None, None, None, True, 0.0, eps)
        return normal, _batch_kernel(x1, x, mean, scale, eps)[0]

    return fused


def _by_last(shape: tuple[int, ...], eps: float) -> Fused:
    def fused(x: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        normal, mean, scale = torch.native_layer_norm(x, shape, None, None, eps)
        return normal, torch.ops.aten.native_layer_norm_backward(
            x1, x, shape, mean, scale, None, None, [True, False, False]
        )[0]

    return fused


def _last(x: Operand, count: int) -> tuple[int, ...]:
    return tuple(range(x.tensor.ndim - count, x.tensor.ndim))


def _channels(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *[1] * (x.ndim - 2))


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def batch_norm(args: Any, kwargs: Any, out: Any) -> Push:
    """By the batch, or w s (x − μ) + b with constants μ and s in evaluation mode."""
    names = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
    x, weight, bias, mean, var, training, _, eps, _ = bound(names, args, kwargs)
    if training or mean is None:
        if x.tensor.ndim > 2 and x.tensor.shape[2:].numel() == 0:
            raise NotImplementedError("no rule for empty inputs")
        if weight is not None and bias is not None:
            return lambda run: _batch_statistics(run, x, weight, bias, eps)
        dims = _all_but_channels(x.tensor)
        return _rule(_Norm(x, weight, bias, tuple(x.tensor.shape), dims, _channels(x.tensor), eps, _by_batch(eps)))
    if moving((mean, var)):
        raise NotImplementedError("running statistics that depend on the parameters")
    return _running_statistics(x, weight, bias, mean, var, eps)


def _batch_statistics(run: Run, x: Operand, weight: Operand, bias: Operand, eps: float) -> Jet:
    """The same as `_Norm.push`, with scale and shift inside the kernels."""
    (x1, _), (w1, _), (b1, _) = (run.jet(o) for o in (x, weight, bias))
    if run.second or x1 is None or x.tensor.numel() == 0:
        dims = _all_but_channels(x.tensor)
        return _Norm(x, weight, bias, tuple(x.tensor.shape), dims, _channels(x.tensor), eps, None).push(run)
    value, w = run.value(x), run.value(weight)
    w1, b1 = (torch.zeros_like(w) if t is None else t for t in (w1, b1))
    return _BatchTangent.apply(value, x1.contiguous(), w, w1, b1, eps), None


class _BatchTangent(torch.autograd.Function):
    """y₁ = w x̂₁ + w₁ x̂ + b₁ of a batch normalisation, and its derivatives, by kernels.

    With D = ∂x̂/∂x, which is symmetric and acts on each channel, x̂₁ = D x₁, and the mean m over a channel, a cotangent g
    of y₁ goes to x₁ as w D g and to x as

        w₁ D g − s w (m(x̂ x₁) D g + m(g x̂₁) x̂ + m(g x̂) x̂₁).

    Where that is differentiated in its turn, plain arithmetic takes its place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, x1: Tensor, w: Tensor, w1: Tensor, b1: Tensor, eps: float) -> Tensor:
        moved, mean, scale = torch.native_batch_norm(x, w1, b1, None, None, True, 0.0, eps)
        slope, overlap, _ = _batch_kernel(x1, x, mean, scale, eps)
        ctx.save_for_backward(x, x1, w, w1, b1, mean, scale, slope, overlap)
        ctx.eps = eps
        return moved.addcmul_(slope, _by_channel(w, x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, x1, w, w1, b1, mean, scale, slope, overlap = ctx.saved_tensors
        if torch.is_grad_enabled():
            y1 = _plain_tangent(x, x1, w, w1, b1, ctx.eps)
            needed = [t for t, wanted in zip((x, x1, w, w1, b1), ctx.needs_input_grad) if wanted]
            grads = iter(torch.autograd.grad(y1, needed, g, create_graph=True))
            return *(next(grads) if wanted else None for wanted in ctx.needs_input_grad[:5]), None
        n = x.numel() // len(mean)
        back, with_normal, of_shift = _batch_kernel(g.contiguous(), x, mean, scale, ctx.eps)
        with_slope = (g * slope).sum(_all_but_channels(g))
        small = scale * w / n
        of_x = back * _by_channel(w1 - small * overlap, x)
        of_x.addcmul_(slope, _by_channel(-small * with_normal, x))
        level = -small * with_slope * scale  # of x̂ = s (x − μ)
        of_x.addcmul_(x, _by_channel(level, x)).sub_(_by_channel(level * mean, x))
        return of_x, back.mul_(_by_channel(w, x)), with_slope, with_normal, of_shift, None


def _batch_kernel(d: Tensor, x: Tensor, mean: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """D d, Σ d x̂ and Σ d of each channel. CUDA's kernel makes the two sums like the weight: it needs one."""
    one = torch.ones_like(mean)
    return torch.ops.aten.native_batch_norm_backward(d, x, one, None, None, mean, scale, True, eps, [True, True, True])


def _by_channel(t: Tensor, x: Tensor) -> Tensor:
    return t.view(_channels(x))


def _plain_tangent(x: Tensor, x1: Tensor, w: Tensor, w1: Tensor, b1: Tensor, eps: float) -> Tensor:
    normal, slope = _normalised(x, x1, _all_but_channels(x), eps)
    w, w1, b1 = (_by_channel(t, x) for t in (w, w1, b1))
    return w * slope + w1 * normal + b1


def _running_statistics(
    x: Operand, weight: Operand | None, bias: Operand | None, mean: Operand, var: Operand, eps: float
) -> Push:
    zero, ndim = torch.zeros_like(mean.tensor), x.tensor.ndim
    x = x if moving(weight) else bare(x)

    def push(run: Run) -> Jet:
        (x1, x2), (w1, w2), (b1, b2) = (run.jet(o) for o in (x, weight, bias))
        w = None if weight is None else run.value(weight)

        def norm(a: Tensor, m: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
            return torch.nn.functional.batch_norm(a, m, run.value(var), w, b, False, 0.0, eps)

        first = None if x1 is None else norm(x1, zero, w, b1 if w1 is None else None)
        if w1 is not None:
            moved = norm(run.value(x), run.value(mean), w1, b1)
            first = moved if first is None else moved.add_(first)
        elif first is None and b1 is not None:
            first = b1.view(-1, *[1] * (ndim - 2))
        if not run.second:
            return first, None
        if w2 is not None or b2 is not None:
            raise NotImplementedError("a scale of batch normalisation that is no parameter")
        return first, total(
            None if x2 is None else norm(x2, zero, w, None),
            None if x1 is None or w1 is None else norm(x1, zero, 2 * w1, None),
        )

    return push


def layer_norm(args: Any, kwargs: Any, out: Any) -> Push:
    names = "input normalized_shape weight bias eps cudnn_enable"
    x, shape, weight, bias, eps, _ = bound(names, args, kwargs, eps=1e-5)
    shape = tuple(shape)
    dims = _last(x, len(shape))
    return _rule(_Norm(x, weight, bias, tuple(x.tensor.shape), dims, shape, eps, _by_last(shape, eps)))


def rms_norm(args: Any, kwargs: Any, out: Any) -> Push:
    x, shape, weight, eps = bound("input normalized_shape weight eps", args, kwargs)
    eps = torch.finfo(x.tensor.dtype).eps if eps is None else eps
    dims = _last(x, len(shape))
    return _rule(_Norm(x, weight, None, tuple(x.tensor.shape), dims, tuple(shape), eps, None, centred=False))


def group_norm(args: Any, kwargs: Any, out: Any) -> Push:
    names = "input num_groups weight bias eps cudnn_enabled"
    x, groups, weight, bias, eps, _ = bound(names, args, kwargs, eps=1e-5)
    n, size = x.tensor.shape[0], math.prod(x.tensor.shape[1:]) // groups
    # a group is normalised as a row
    return _rule(
        _Norm(x, weight, bias, (n * groups, size), (1,), _channels(x.tensor), eps, _by_last((size,), eps)),
    )


def instance_norm(args: Any, kwargs: Any, out: Any) -> Push:
    names = "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled"
    x, weight, bias, mean, var, by_input, _, eps, _ = bound(names, args, kwargs)
    if not by_input:
        if moving((mean, var)):
            raise NotImplementedError("running statistics that depend on the parameters")
        return _running_statistics(x, weight, bias, mean, var, eps)
    n, size = math.prod(x.tensor.shape[:2]), math.prod(x.tensor.shape[2:])
    return _rule(_Norm(x, weight, bias, (n, size), (1,), _channels(x.tensor), eps, _by_last((size,), eps)))


def weight_norm(args: Any, kwargs: Any, out: Any) -> Push:
    """w = g u with u = v/‖v‖, ‖·‖ over all dimensions but `dim`."""
    v, g, dim = bound("v g dim", args, kwargs, dim=0)
    dims = tuple(i for i in range(v.tensor.ndim) if i != dim)

    def push(run: Run) -> Jet:
        direction, (v1, v2) = run.value(v), run.jet(v)
        # with no bound on its size: a sum over dims that does not reduce has to be left out
        over = (lambda t: t.sum(dims, keepdim=True)) if dims else (lambda t: t)
        n = over(direction.square()).sqrt()
        u = direction / n
        jet: Jet = (None, None)
        if v1 is not None:
            n1 = over(u * v1)
            u1 = (v1 - u * n1) / n
            u2 = None
            if run.second:
                n2 = (over(v1.square()) + (0 if v2 is None else over(direction * v2)) - n1.square()) / n
                u2 = ((0 if v2 is None else v2) - 2 * u1 * n1 - u * n2) / n
            jet = (u1, u2)
        return product_jet(torch.mul, (run.value(g), u), (run.jet(g), jet), run.second)

    return push
