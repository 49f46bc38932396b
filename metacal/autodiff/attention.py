"""Softmax and attention, for a tape.

    P = softmax(Q Kᵀ s + B),   Y = (P ∘ M) V,   M: dropout's mask over 1 − p

The pass itself runs by PyTorch's kernel of choice, except with dropout, whose mask only one kernel tells: the one that
also returns P ∘ M. The weights P are made again from Q and K when a derivative is wanted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from metacal.autodiff.jets import ZERO, Jet, Operand, Push, Run, bare, bound, each, product_jet, total

__all__ = [
    "attention",
    "attention_rule",
    "attention_with_dropout_rule",
    "fused_attention",
    "log_softmax",
    "logsumexp",
    "softmax",
]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by calls that have rules."""
    options: dict[str, Any] = {"scale": scale, **({"enable_gqa": True} if enable_gqa else {})}
    if dropout_p == 0:
        return fused_attention(query, key, value, attn_mask, is_causal, options)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # the whole of it in one precision, not each of its parts in its own
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = _additive(attn_mask, query)
    with torch.autocast(device, enabled=False):
        return torch._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, **options
        )[0]


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """Zero where a boolean mask allows attention, −∞ elsewhere."""
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: dict[str, Any]
) -> Tensor:
    """Attention without dropout; one function to a mode."""
    if has_torch_function((query, key, value)):
        arguments = (query, key, value, mask, is_causal, options)
        return handle_torch_function(fused_attention, (query, key, value), *arguments)
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, **options)


def attention_rule(args: Any, kwargs: Any, out: Any) -> Push:
    q, k, v, mask, causal, options = args
    return _pushed(q, k, v, mask, causal, options, None, 0.0)


def attention_with_dropout_rule(args: Any, kwargs: Any, out: Any) -> Push:
    q, k, v, mask, p, causal, _ = args
    push = _pushed(q, k, v, mask, causal, kwargs, out[1], p)
    return lambda run: each(lambda d: (d, None), push(run))


def _pushed(
    q: Operand, k: Operand, v: Operand, mask: Any, causal: bool, options: Any, dropped: Operand | None, p: float
) -> Push:
    if not all(isinstance(o, Operand) for o in (q, k, v)):
        raise NotImplementedError("unknown form of its arguments")
    scale = options.get("scale")
    scale = q.tensor.shape[-1] ** -0.5 if scale is None else scale
    groups = q.tensor.shape[-3] // k.tensor.shape[-3] if options.get("enable_gqa") else 1

    def heads(t: Tensor) -> Tensor:
        return t.repeat_interleave(groups, -3) if groups > 1 else t

    def push(run: Run) -> Jet:
        qs, ks, vs = run.value(q), heads(run.value(k)), heads(run.value(v))
        jq, jk, jv = run.jet(q), each(heads, run.jet(k)), each(heads, run.jet(v))
        logits = (qs * scale) @ ks.transpose(-2, -1)
        jet = product_jet(lambda a, b: (a * scale) @ b.transpose(-2, -1), (qs, ks), (jq, jk), run.second)
        if mask is not None:
            given = run.value(mask)
            logits = logits + (_additive(given, qs) if given.dtype is torch.bool else given)
            jet = total(jet[0], run.jet(mask)[0]), total(jet[1], run.jet(mask)[1])
        if causal:
            logits = logits + _additive(torch.ones_like(logits[..., :, :], dtype=torch.bool).tril(), qs)
        if mask is None:
            weights = logits.softmax(-1)
        else:  # a row that may look at nothing has weights of zero
            nothing = (logits == -math.inf).all(-1, keepdim=True)
            weights = logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        jet = softmax_jet(weights, jet, -1)
        if dropped is not None:
            # a weight of zero has a derivative of zero, so it does not matter which mask is read off there
            thinned = (run.value(dropped) != 0).to(weights.dtype) / (1 - p)
            weights, jet = weights * thinned, each(lambda d: d * thinned, jet)
        return product_jet(torch.matmul, (weights, vs), (jet, jv), run.second)

    return push


def softmax_jet(p: Tensor, jet: Jet, dim: int) -> Jet:
    """Of p = softmax(x) from the jet of x: p₁ = p (x₁ − p·x₁)."""
    x1, x2 = jet
    if x1 is None:
        return ZERO
    d = x1 - (p * x1).sum(dim, keepdim=True)  # derivative of log p
    other = d * d if x2 is None else x2 + d * d
    return p * d, p * (other - (p * other).sum(dim, keepdim=True))


def _dim(args: Any, kwargs: Any) -> int:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(dim, int):
        raise NotImplementedError("a softmax over an unknown dimension")
    return dim


def softmax(args: Any, kwargs: Any, out: Operand) -> Push:
    x, dim = bare(args[0]), _dim(args, kwargs)

    def push(run: Run) -> Jet:
        first, second = softmax_jet(run.value(out), run.jet(x), dim)
        return first, second if run.second else None

    return push


def log_softmax(args: Any, kwargs: Any, out: Operand) -> Push:
    """(log p)₁ = x₁ − p·x₁, and (log p)₂ = x₂ − p·x₂ − (p·x₁² − (p·x₁)²)."""
    x, dim = bare(args[0]), _dim(args, kwargs)

    def push(run: Run) -> Jet:
        x1, x2 = run.jet(x)
        if x1 is None:
            return ZERO
        first, second = _mean_and_spread(run.value(out).exp(), x1, x2, dim, run.second)
        return x1 - first, second if second is None else (0 if x2 is None else x2) - second

    return push


def logsumexp(args: Any, kwargs: Any, out: Operand) -> Push:
    """p·x₁ with p = softmax(x), and p·x₂ + p·x₁² − (p·x₁)²."""
    x, dim, keepdim = bound("input dim keepdim", args, kwargs, keepdim=False)

    def push(run: Run) -> Jet:
        x1, x2 = run.jet(x)
        if x1 is None:
            return ZERO
        value = run.value(x)
        p = (value - torch.logsumexp(value, dim, keepdim=True)).exp()
        jet = _mean_and_spread(p, x1, x2, dim, run.second)
        return jet if keepdim else each(lambda d: d.squeeze(dim), jet)

    return push


def _mean_and_spread(p: Tensor, x1: Tensor, x2: Tensor | None, dim: Any, second: bool) -> tuple[Tensor, Tensor | None]:
    first = (p * x1).sum(dim, keepdim=True)
    if not second:
        return first, None
    other = (p * (x1 - first).square()).sum(dim, keepdim=True)
    return first, other if x2 is None else other + (p * x2).sum(dim, keepdim=True)
