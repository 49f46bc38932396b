"""What `MetaStep` is made of: checks of its arguments, and the window that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from metacal.bilevel.engines import ENGINES
from metacal.bilevel.horizon import Horizon
from metacal.bilevel.inner import Inner
from metacal.bilevel.passes import check_unhooked
from metacal.bilevel.tangent import TANGENT, Tangent
from metacal.bilevel.unrolled import HIGHER, Unroller, check_unrollable
from metacal.bilevel.window import OneStep
from metacal.errors import InputError, require
from metacal.network import Network
from metacal.objective import class_weights
from metacal.optim.transpose import check_supported

__all__ = ["build_window", "check_parameters", "check_parts", "on_backbone"]


def build_window(
    inner: Inner,
    optimizer: Optimizer,
    engine: str,
    options: Mapping[str, Any] | None,
    every: int,
    horizon: int,
    decay: float,
    chunk: int | None,
    clip_norm: float | None,
    meta_params: Sequence[Tensor],
) -> OneStep | Horizon | Tangent | Unroller:
    """The window of these arguments of `MetaStep`, all of which it checks against each other."""
    options = dict(options or {})
    steps = options.pop("steps", 1) if engine == HIGHER else 1
    if chunk is not None:
        options.setdefault("reuse", False)  # what to reuse would be the activations of the whole batch
    try:
        passes = ENGINES["forward" if engine in (HIGHER, TANGENT) else engine](inner.network, **options)
    except TypeError:
        raise InputError(f"engine_options must be options of engine {engine!r}, got {options}") from None
    require(1 <= horizon <= every, f"horizon must be between 1 and every = {every} steps, got {horizon}")
    require(horizon == 1 or engine == "forward", f"horizon > 1 needs engine 'forward', got engine {engine!r}")
    if engine == TANGENT:
        return Tangent(inner, optimizer, clip_norm, every, decay, meta_params)
    if engine == HIGHER:
        return Unroller(inner, optimizer, passes, clip_norm, every, steps)
    if horizon > 1:
        return Horizon(inner, optimizer, clip_norm, horizon, decay)
    return OneStep(inner, optimizer, passes, clip_norm, steps=1)


def on_backbone(network: Network, class_weight: Sequence[float] | Tensor | None) -> Tensor | None:
    """The weights of the classes in the precision and on the device of the network; None without any."""
    weights = None if class_weight is None else class_weights(class_weight, len(class_weight))
    return None if weights is None else weights.to(network.params[0])


def check_parameters(
    network: Network, optimizer: Optimizer, gamma_net: nn.Module | None, meta_optimizer: Optimizer | None, engine: str
) -> None:
    require(bool(network.params), "backbone must have a parameter that requires a gradient, it has none")
    for name, p in zip(network.names, network.params):
        require(p.is_floating_point(), f"backbone must have real parameters, {name} is {p.dtype}: hold its two parts")
    if meta_optimizer is not None:
        check_unhooked(network.names, network.params)
    ours = {id(p) for p in network.params}
    require(
        all(id(p) in ours for group in optimizer.param_groups for p in group["params"] if p.requires_grad),
        "optimizer must hold parameters of the backbone only, it holds others",
    )
    if meta_optimizer is not None:
        learned = gamma_net is not None and any(p.requires_grad for p in gamma_net.parameters())
        require(learned, "meta_optimizer must be None: gamma_net has no parameters to learn")
        check_supported(optimizer)
        if engine == HIGHER:
            check_unrollable(optimizer)


def check_parts(inner: Inner, engine: str, meta_optimizer: Optimizer | None, chunk: int | None) -> None:
    """Which options go together."""
    require(
        inner.mix is None or (chunk is None and engine != HIGHER),
        "mix does not go with chunk or engine 'higher': leave one of them out",
    )
    if chunk is None:
        return
    require(chunk >= 1, f"chunk must be >= 1 or None, got {chunk}")
    require(
        engine in ("forward", TANGENT) or meta_optimizer is None, f"chunk needs engine 'forward', got engine {engine!r}"
    )
    for name, term in inner.penalties.items():
        require(
            not getattr(term.penalty, "batchwise", False),
            f"penalties[{name!r}] is no mean over samples, so a batch cannot be taken in chunks, got chunk {chunk}",
        )
