"""The transpose of a whole optimizer step: cotangents of θ and of the optimizer's state, carried from after to before.

A step takes (θ, m) to (θ', m') = U(θ, m, g), m the optimizer's state. For cotangents u of θ' and s of m',

    λ_g = (∂U/∂g)ᵀ (u, s)        λ_θ, λ_m = (∂U/∂(θ, m))ᵀ (u, s)

at fixed g. Several steps are differentiated by applying this from the last to the first, with what g owes to θ added
between them (`metacal.bilevel.horizon`). One step alone needs λ_g for s = 0 only, as `metacal.optim.transpose` has it.

Use: `step = record_step(optimizer, params)` before `optimizer.step()`, and later `through(step, after, u, s)`. All
formulas read the state before and after the step, from which they get the gradient back: nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from metacal.errors import InputError
from metacal.optim.transpose import steps_taken

__all__ = [
    "THROUGH",
    "Cotangent",
    "State",
    "StepTaken",
    "adam_through",
    "along",
    "check_through",
    "discounted",
    "record_step",
    "sgd_through",
    "through",
]

State = dict[str, Any]
"""What an optimizer keeps of one parameter, or cotangents of its tensors (a missing one is zero)."""

Cotangent = tuple[Tensor, Tensor, State]
"""(λ_g, λ_θ, λ_m) of one parameter."""

Rule = Callable[[Mapping[str, Any], State, State, Tensor, State], Cotangent]
"""`(settings of the group, state before, state after, u, s) -> (λ_g, λ_θ, λ_m)` of one parameter."""


@dataclass
class StepTaken:
    """A step about to be taken: for each parameter that it moves its position and the settings of its group, and the
    state of every parameter before it. `project`: what the displacement of θ goes through, for optimizers that do."""

    kind: type[Optimizer]
    moved: list[tuple[int, dict[str, Any]]]
    state: list[State]
    project: Callable[[list[Tensor | None]], list[Tensor | None]] | None = None


def record_step(optimizer: Optimizer, params: Sequence[Tensor]) -> StepTaken:
    """Copy what `through` needs of the step that `optimizer` is about to take with the gradients in `.grad`.

    Raises `InputError` for an optimizer whose class is not in `THROUGH`, exactly.
    """
    check_through(optimizer)
    optimizer = getattr(optimizer, "base", optimizer)  # SAM's perturbation is constant: its step is that of its base
    position = {p: i for i, p in enumerate(params)}
    moved = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        moved += [(position[p], settings) for p in group["params"] if p in position and p.grad is not None]
    projection = getattr(optimizer, "projection", None)
    return StepTaken(type(optimizer), moved, states(optimizer, params), projection and projection(params))


def states(optimizer: Optimizer, params: Sequence[Tensor]) -> list[State]:
    """Copies of the optimizer's state of each parameter."""
    optimizer = getattr(optimizer, "base", optimizer)
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in optimizer.state.get(p, {}).items()
        }
        for p in params
    ]


def discounted(
    theta: Sequence[Tensor | None], state: Sequence[State], factor: float
) -> tuple[list[Tensor | None], list[State]]:
    """Cotangents or tangents of θ and of the state, times a factor."""
    return (
        [None if t is None else factor * t for t in theta],
        [{key: factor * value for key, value in entries.items()} for entries in state],
    )


def check_through(optimizer: Optimizer) -> None:
    """Raise `InputError` for an optimizer whose class is not in `THROUGH`, exactly."""
    if type(getattr(optimizer, "base", optimizer)) not in THROUGH:
        names = ", ".join(sorted(kind.__name__ for kind in THROUGH))
        raise InputError(
            f"optimizer must be one of {names}, or SAM on one, for a horizon of several steps or engine 'tangent', "
            f"got {type(optimizer).__name__}: set horizon=1, or use one of these"
        )


@torch.no_grad()
def through(
    step: StepTaken, after: Sequence[State], u: Sequence[Tensor | None], s: Sequence[State]
) -> tuple[list[Tensor | None], list[Tensor | None], list[State]]:
    """(λ_g, λ_θ, λ_m) of all parameters; a parameter that the step does not move passes its cotangents on.

    after: the state of each parameter after the step. u, s: cotangents by position, None and a missing entry for zero.
    """
    gradient: list[Tensor | None] = [None] * len(u)
    theta, state = list(u), list(s)
    pushed = list(u) if step.project is None else step.project([None if a is None else a.clone() for a in u])
    rule = THROUGH[step.kind]
    for i, settings in step.moved:
        push, direct = pushed[i], u[i]
        if push is None and not s[i]:
            continue
        if push is None:
            push = torch.zeros_like(next(iter(s[i].values())))
        gradient[i], moved, state[i] = rule(settings, step.state[i], after[i], push, s[i])
        # the projection is on the displacement alone, not on the θ from which it starts
        theta[i] = moved if step.project is None else moved - push + (0 if direct is None else direct)
    return gradient, theta, state


def along(
    step: StepTaken,
    after: Sequence[State],
    g: Sequence[Tensor | None],
    theta: Sequence[Tensor | None],
    state: Sequence[State],
) -> tuple[list[Tensor | None], list[State]]:
    """The tangents of θ' and m' along tangents of g, θ and m: U's derivative itself, in place of its transpose.

    Each rule of `THROUGH` is linear in (u, s), and its transpose is looked for, ∂⟨rule(u, s), tangents⟩/∂(u, s): so
    every optimizer that has a rule has this too.
    """
    moved, states_ = list(theta), list(state)
    rule = THROUGH[step.kind]
    displacement: list[Tensor | None] = [None] * len(moved)
    for i, settings in step.moved:
        tangent_g, tangent = g[i], theta[i]
        if tangent_g is None and tangent is None and not state[i]:
            continue
        like = next(t for t in (tangent_g, tangent, *state[i].values()) if t is not None)
        u = torch.zeros_like(like, requires_grad=True)
        s = {
            key: torch.zeros_like(value, requires_grad=True)
            for key, value in after[i].items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == like.shape
        }
        with torch.enable_grad():
            slope, direct, back = rule(settings, step.state[i], after[i], u, s)
            pairs = [(slope, tangent_g), (direct, tangent), *((back.get(key), t) for key, t in state[i].items())]
            total = sum((a * b).sum() for a, b in pairs if isinstance(a, Tensor) and a.requires_grad and b is not None)
        if not isinstance(total, Tensor):
            continue
        to_u, *to_s = torch.autograd.grad(total, [u, *s.values()], allow_unused=True)
        states_[i] = {key: t for key, t in zip(s, to_s) if t is not None}
        moved[i] = to_u
        displacement[i] = to_u if tangent is None or to_u is None else to_u - tangent
    if step.project is None:
        return moved, states_
    pushed = step.project([None if a is None else a.clone() for a in displacement])
    for i, _ in step.moved:
        a, b = theta[i], pushed[i]
        moved[i] = b if a is None else a if b is None else a + b
    return moved, states_


def sgd_through(group: Mapping[str, Any], before: State, after: State, u: Tensor, s: State) -> Cotangent:
    """buf' = μ buf + (1 − d) g̃ (buf' = g̃ at first), θ' = θ − lr (g̃ + μ buf' if Nesterov else buf'), g̃ = ±g + wd θ.

    With λ = s − lr (μ if Nesterov) u of buf': λ_g̃ = (1 − d) λ (− lr u if Nesterov), λ_buf = μ λ, λ_θ = u + wd λ_g̃.
    """
    lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
    if momentum == 0:
        slope, state = -lr * u, {}
    else:
        total = u * (-lr * (momentum if group["nesterov"] else 1.0))
        if "momentum_buffer" in s:
            total += s["momentum_buffer"]
        first = before.get("momentum_buffer") is None
        slope = total * (1.0 if first else 1.0 - group["dampening"])
        if group["nesterov"]:
            slope -= lr * u
        state = {} if first else {"momentum_buffer": total.mul_(momentum)}
    theta = u if decay == 0 else torch.add(u, slope, alpha=decay)
    return (-slope if group["maximize"] else slope), theta, state


def adam_through(
    group: Mapping[str, Any], before: State, after: State, u: Tensor, s: State, decoupled: bool = False
) -> Cotangent:
    """Adam and AdamW: m' = β1 m + (1 − β1) g̃, n' = β2 n + (1 − β2) g̃², d = √n'/√(1 − β2^t) + ε, θ' = (…θ) − α m'/d.

        λ_m' = s_m − α u/d        λ_n' = s_n + α m'/d² u / (2 √n' √(1 − β2^t))
        λ_g̃ = (1 − β1) λ_m' + 2 (1 − β2) g̃ λ_n'        λ_m = β1 λ_m'        λ_n = β2 λ_n'

    With amsgrad d is made of the running maximum of n', whose cotangent goes to n' where n' attains it and to the old
    maximum elsewhere. λ_θ = (1 − lr wd) u with decoupled decay, else u + wd λ_g̃.
    """
    beta1, beta2 = (float(b) for b in group["betas"])
    lr, eps, decay = float(group["lr"]), float(group["eps"]), group["weight_decay"]
    t = steps_taken(after)
    rate, root2 = lr / (1 - beta1**t), (1 - beta2**t) ** 0.5
    m, n = after["exp_avg"], after["exp_avg_sq"]
    old_m, old_n = before.get("exp_avg"), before.get("exp_avg_sq")
    peak = after["max_exp_avg_sq"] if group["amsgrad"] else n
    root = peak.sqrt()
    d = root / root2 + eps
    first = u * (-rate) / d
    second = first * (-0.5) * m / d
    # √n' = 0 only where all gradients were 0, and m' with them: the quotient is 0 there
    second = torch.where(root > 0, second / (root * root2).clamp(min=torch.finfo(root.dtype).tiny), 0.0)
    state: State = {}
    if group["amsgrad"]:
        second = second + s.get("max_exp_avg_sq", 0.0)
        attained = n >= peak
        state["max_exp_avg_sq"] = torch.where(attained, 0.0, second)
        second = torch.where(attained, second, 0.0)
    first, second = first + s.get("exp_avg", 0.0), second + s.get("exp_avg_sq", 0.0)
    g = m / (1 - beta1) if old_m is None else (m - beta1 * old_m) / (1 - beta1)
    slope = (1 - beta1) * first + 2 * (1 - beta2) * g * second
    if old_m is not None and old_n is not None:
        state |= {"exp_avg": beta1 * first, "exp_avg_sq": beta2 * second}
    else:
        state = {}
    if decoupled or group.get("decoupled_weight_decay", False):
        theta = u * (1 - lr * decay)
    else:
        theta = u if decay == 0 else torch.add(u, slope, alpha=decay)
    return (-slope if group["maximize"] else slope), theta, state


THROUGH: dict[type[Optimizer], Rule] = {
    SGD: sgd_through,
    Adam: adam_through,
    AdamW: partial(adam_through, decoupled=True),
}
"""By the class of the optimizer. Its method `projection(params)`, where it has one, is what its displacement goes
through."""
