"""The optimizer step as a map of the gradient, and the transpose of its derivative.

A step takes θ to θ' = U(θ, g; state). The outer problem needs v = (∂U/∂g)ᵀ u for a cotangent u of θ'. The step
itself is always taken by the real optimizer; its transpose stands in `TRANSPOSES` under its class, for torch's own
optimizers here and for each other one in the file of its step. SGD and Adam act on every entry of g by itself, so the
transpose is a product with ∂U/∂g entry by entry. Gradient clipping comes before all of them and couples all entries:
`transposed_clip`.

Use: with the gradients in `.grad`, call `transposed_update(optimizer, params)` before `optimizer.step()`, and what it
returns afterwards. The step may use `.grad` as scratch memory: what is read of it after the step comes from
`kept_gradients`, taken before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from metacal.errors import InputError, require

__all__ = [
    "TRANSPOSES",
    "Cotangents",
    "GroupTranspose",
    "Transpose",
    "adam_group",
    "by_groups",
    "check_sparse",
    "check_step_hooks",
    "check_supported",
    "clips",
    "kept_gradients",
    "sgd_group",
    "steps_taken",
    "total_norm",
    "transposed_clip",
    "transposed_update",
]

Cotangents = list[Tensor | None]
"""One per parameter of the backbone, None for zero."""

Transpose = Callable[[Any, Sequence[Tensor]], Callable[[Cotangents], tuple[Cotangents, float]]]
"""`(optimizer, params) -> (cotangents -> (list, factor))`, as `transposed_update` describes it for any optimizer."""


class GroupTranspose(NamedTuple):
    """∂U/∂g of one parameter group: `factors[i]` times, if given, what `multiply(which, tensors)` does in place.

    `which` are positions in the group's list of parameters, `tensors` the cotangents of these.
    """

    factors: list[float]
    multiply: Callable[[list[int], list[Tensor]], None] | None = None


def check_supported(optimizer: Optimizer) -> None:
    """Raise `InputError` unless the step of this optimizer, and of one inside it, can be differentiated."""
    transposed_update(optimizer, [])
    check_step_hooks(optimizer)


def check_step_hooks(optimizer: Optimizer) -> None:
    """Raise `InputError` for a hook that runs before the step, of this optimizer or of all: no transpose sees it."""
    hooks = [_global_optimizer_pre_hooks]
    hooks += [getattr(part, "_optimizer_step_pre_hooks", {}) for part in (optimizer, getattr(optimizer, "base", None))]
    require(
        not any(hooks),
        "optimizer has a hook that runs before its step and may change the gradient, which no engine can "
        "differentiate: remove it, or change the loss instead of its gradient",
    )


def check_sparse(optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
    """Raise `InputError` where a parameter's gradient is sparse and a step known here takes dense ones alone.

    Sparse ones come of `Embedding(sparse=True)`, with an entry for each row that was looked up. torch's SGD takes them
    without weight decay.
    """
    base = getattr(optimizer, "base", optimizer)
    names = {p: name for name, p in named.items() if p.grad is not None and p.grad.layout is torch.sparse_coo}
    if not names or type(base) not in TRANSPOSES:
        return
    for group in base.param_groups:
        name = next((names[p] for p in group["params"] if p in names), None)
        decay = group.get("weight_decay", 0)
        if name is not None and (type(base) is not SGD or decay != 0):
            step = type(base).__name__ + (f" with weight_decay={decay}" if type(base) is SGD else "")
            raise InputError(
                f"optimizer must be SGD without weight decay for a sparse gradient, which backbone parameter {name} "
                f"has, got {step}: make its Embedding with sparse=False"
            )


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all entries of all tensors, a 0-d tensor."""
    if not tensors:
        return torch.zeros(())
    dense = [t.coalesce().values() if t.layout is torch.sparse_coo else t for t in tensors]  # of embeddings
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)))


def kept_gradients(optimizer: Optimizer, params: Sequence[Tensor]) -> Cotangents:
    """The gradients as they are now, to be read after the step: copies of those that the step writes into."""
    written = {p for group in optimizer.param_groups if _writes_gradients(group) for p in group["params"]}
    return [p.grad.clone() if p in written and p.grad is not None else p.grad for p in params]


def _writes_gradients(group: dict[str, Any]) -> bool:
    """Whether the step leaves something else in `.grad`: torch's multi-tensor Nesterov adds the momentum there.

    With weight decay or maximize it has made a new tensor before that. `foreach=None` is its choice except on a CPU.
    """
    if not group.get("nesterov") or "foreach" not in group:
        return False
    if group["weight_decay"] != 0 or group["maximize"] or group.get("fused"):
        return False
    foreach = group["foreach"]
    return any(p.device.type != "cpu" for p in group["params"]) if foreach is None else foreach


def transposed_update(
    optimizer: Optimizer, params: Sequence[Tensor]
) -> Callable[[Cotangents], tuple[Cotangents, float]]:
    """Prepare (∂U/∂g)ᵀ of the step that `optimizer` is about to take with the gradients in `.grad`.

    Returns a function to be called *after* the step, with one cotangent for each of `params`. It gives `(list,
    factor)` with v = factor · list, reusing the cotangents' memory. A parameter without a gradient, or unknown
    to the optimizer, is not moved by g: its entry is None. The factor that all parameters share stays outside,
    since one pass over the parameters is a measurable part of a step.

    Raises `InputError` unless the optimizer's class is in `TRANSPOSES`, exactly: a subclass may step in another way.
    """
    kind = type(optimizer)
    if kind not in TRANSPOSES:
        names = ", ".join(sorted(known.__name__ for known in TRANSPOSES))
        raise InputError(
            f"optimizer must be one of {names} (their steps are the ones that the outer problem can "
            f"differentiate), got {kind.__name__}"
        )
    return TRANSPOSES[kind](optimizer, params)


def by_groups(
    group_transpose: Callable[[Any, dict[str, Any], list[Tensor]], GroupTranspose],
    optimizer: Optimizer,
    params: Sequence[Tensor],
) -> Callable[[Cotangents], tuple[Cotangents, float]]:
    """The `Transpose` of a step in which parameter groups do not depend on each other.

    group_transpose: `(optimizer, group, params of it with a gradient) -> GroupTranspose`.
    """
    position = {p: i for i, p in enumerate(params)}
    groups: list[tuple[list[int], GroupTranspose]] = []
    for group in optimizer.param_groups:
        moved = [p for p in group["params"] if p in position and p.grad is not None]
        if moved:
            groups.append(([position[p] for p in moved], group_transpose(optimizer, group, moved)))

    @torch.no_grad()
    def apply(cotangents: Cotangents) -> tuple[Cotangents, float]:
        result: Cotangents = [None] * len(cotangents)
        by_factor: dict[float, list[Tensor]] = {}
        for positions, transpose in groups:
            which, tensors = [], []
            for i, (at, factor) in enumerate(zip(positions, transpose.factors)):
                cotangent = cotangents[at]
                if cotangent is not None:
                    which.append(i)
                    tensors.append(cotangent)
                    by_factor.setdefault(factor, []).append(cotangent)
                    result[at] = cotangent
            if transpose.multiply is not None and tensors:
                transpose.multiply(which, tensors)
        if len(by_factor) == 1:
            return result, next(iter(by_factor))
        for factor, tensors in by_factor.items():
            torch._foreach_mul_(tensors, factor)
        return result, 1.0

    return apply


def clips(total: float | Tensor, max_norm: float) -> bool:
    """Whether a gradient of norm `total` is made shorter, so that clipping has a derivative other than 1.

    True too where that is not known, of a norm that is on a device: the derivative is then worked out there.
    """
    return isinstance(total, Tensor) or max_norm / (total + 1e-6) < 1


def transposed_clip(
    grads: Cotangents, total: float | Tensor, max_norm: float, cotangents: Cotangents
) -> float | Tensor:
    """Transpose of `torch.nn.utils.clip_grad_norm_`, in place on the cotangents up to the factor returned.

    Clipping is g ↦ c = s g with s = min(1, max_norm / (‖g‖ + 1e-6)). Where s < 1,

        v = s · (u − ⟨c, u⟩ / (s · max_norm · ‖g‖) · c),

    the projection off the gradient, up to the 1e-6; elsewhere v = u.
    grads: the gradients *after* clipping, c, as the step received them. total: the norm before, a number or a 0-d
    tensor. Where `clips(total, max_norm)` is false, grads are not read. The norm couples all parameters: one whose
    cotangent is None gets a v of its own, since its gradient shortens those of the others.
    """
    if not clips(total, max_norm):
        return 1.0
    scale = max_norm / (total + 1e-6)
    grads = [c.to_dense() if c is not None and c.layout is torch.sparse_coo else c for c in grads]
    if all(u is None for u in cotangents):
        return scale.clamp(max=1) if isinstance(scale, Tensor) else scale
    cotangents[:] = [torch.zeros_like(c) if u is None and c is not None else u for c, u in zip(grads, cotangents)]
    pairs = [(c, u) for c, u in zip(grads, cotangents) if c is not None and u is not None]
    clipped, tensors = [c for c, _ in pairs], [u for _, u in pairs]
    inner = torch.stack([torch.dot(c.flatten(), u.flatten()) for c, u in pairs]).sum()
    weight = -inner / (scale * max_norm * total)
    if isinstance(scale, Tensor):
        weight = torch.where(scale < 1, weight, 0.0)
        torch._foreach_add_(tensors, torch._foreach_mul(clipped, weight))
        return scale.clamp(max=1)
    torch._foreach_add_(tensors, clipped, alpha=weight.item())
    return scale


def sgd_group(optimizer: Optimizer, group: dict[str, Any], params: list[Tensor]) -> GroupTranspose:
    """buf' = μ buf + (1 − d) g̃ (buf' = g̃ at the first step), θ' = θ − lr · (g̃ + μ buf' if Nesterov else buf').

    ∂U/∂g is one number for each parameter; g̃ = ±g + weight decay.
    """
    momentum, rate = float(group["momentum"]), -float(group["lr"])
    if group["maximize"]:
        rate = -rate
    factors = []
    for p in params:
        factor = 1.0
        if momentum != 0:
            # torch does not dampen the first gradient
            first = optimizer.state[p].get("momentum_buffer") is None if p in optimizer.state else True
            factor = 1.0 if first else 1.0 - float(group["dampening"])
            if group["nesterov"]:
                factor = 1.0 + momentum * factor
        factors.append(rate * factor)
    return GroupTranspose(factors)


def steps_taken(state: Mapping[str, Any]) -> Any:
    """t of Adam's bias corrections, a number; a 0-d float64 tensor where the optimizer counts on a GPU."""
    t = state["step"]
    return t.double() if isinstance(t, Tensor) and t.device.type != "cpu" else float(t)


def adam_group(
    optimizer: Optimizer, group: dict[str, Any], params: list[Tensor], decoupled: bool = False
) -> GroupTranspose:
    """Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019), nonlinear in g: differentiated at the actual g.

        m' = β1 m + (1 − β1) g̃,   n' = β2 n + (1 − β2) g̃²,   d = √n' / √(1 − β2^t) + ε
        θ' = … − α m'/d,  α = lr / (1 − β1^t)
        ∂θ'/∂g̃ = −α/d · [ (1 − β1) − m'/d · (1 − β2) g̃ / (√n' √(1 − β2^t)) ]

    With amsgrad n' in d is the running maximum, and the second term is there only where n' attains it. m' and
    n' are read from the state after the step, so nothing is computed twice. g̃ = ±g, plus the decay where it is
    not decoupled, by the class of the optimizer (torch before 2.7) or by the group.
    """
    beta1, beta2 = (float(b) for b in group["betas"])
    lr, eps = float(group["lr"]), float(group["eps"])
    sign = -1.0 if group["maximize"] else 1.0
    decay = 0.0 if decoupled or group.get("decoupled_weight_decay", False) else group["weight_decay"]
    grads = [g for g in kept_gradients(optimizer, params) if g is not None]
    if decay:
        # g̃ depends on θ before the step, which the step overwrites
        grads = [g.mul(sign).add_(p.detach(), alpha=decay) for g, p in zip(grads, params)]

    def multiply(which: list[int], tensors: list[Tensor]) -> None:
        for i, u in zip(which, tensors):
            p = params[i]
            state = optimizer.state[p]
            t = steps_taken(state)
            rate = sign * lr / (1 - beta1**t)
            root2 = (1 - beta2**t) ** 0.5
            m, n = state["exp_avg"], state["exp_avg_sq"]
            root = n.sqrt()
            # g̃ = 0 = m' wherever n' = 0 (it starts at 0): the quotient is 0 there
            shape = torch.mul(m, grads[i])
            shape.div_(root.clamp(min=torch.finfo(root.dtype).tiny))
            shape.mul_((1 - beta2) / root2 * (1.0 if decay else sign))
            if group["amsgrad"]:
                peak = state["max_exp_avg_sq"]
                shape.mul_(n >= peak)
                root = peak.sqrt()
            denominator = root.div_(root2).add_(eps)
            shape.div_(denominator).sub_(1 - beta1).mul_(rate)
            u.mul_(shape).div_(denominator)

    return GroupTranspose([1.0] * len(params), multiply)


TRANSPOSES: dict[type[Optimizer], Transpose] = {
    SGD: partial(by_groups, sgd_group),
    Adam: partial(by_groups, adam_group),
    AdamW: partial(by_groups, partial(adam_group, decoupled=True)),
}
"""By the class of the optimizer; called before the step with `.grad` set.

To offer another one under the bilevel step, add its class: `TRANSPOSES[Mine] = transpose`.
"""
