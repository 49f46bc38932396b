"""Muon for matrices and convolution kernels, AdamW or SGD for the rest, as one optimizer.

    optimizer = Muon(muon_groups(backbone, lr=0.02, rest="adamw", rest_lr=1e-3))

`torch.optim.Muon` takes 2-D parameters only, is young (torch 2.9) and works in bfloat16. This one has its
definitions, takes kernels as well, and works in the precision of the parameters, so that its step has a derivative
worth taking (`metacal.optim.transpose`), which stands here too; `ns_dtype="bfloat16"` gives torch's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, AdamW, Optimizer

from metacal.errors import InputError, require, require_choice
from metacal.models.backbone import Backbone
from metacal.optim.basic import OptimizerOptions, betas, decay, epsilon, momentum, nesterov, rate
from metacal.optim.newton_schulz import COEFFICIENTS, newton_schulz, newton_schulz_vjp
from metacal.optim.through import THROUGH, Cotangent, State, adam_through, sgd_through
from metacal.optim.transpose import TRANSPOSES, GroupTranspose, adam_group, by_groups, sgd_group
from metacal.options import option

__all__ = ["Muon", "MuonOptions", "adjusted_lr", "muon_groups", "newton_schulz_of"]

REST: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "sgd": SGD}
"""Kinds of groups that are not Muon's own, and whose step they take."""

_ADJUSTMENTS = ("original", "match_rms_adamw", "spectral_unclamped")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_NEVER = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


@dataclass
class MuonOptions(OptimizerOptions):
    """`Muon` for hidden matrices, AdamW or SGD for the rest."""

    lr: float = rate(0.02)
    weight_decay: float = decay(1e-2)
    momentum: float = momentum(0.95)
    nesterov: bool = nesterov(True)
    rest: str = option("adamw", "the optimizer of heads, biases and norms", choices=tuple(REST))
    rest_lr: float = option(1e-3, "its learning rate", low=0)
    betas: list[float] = betas()
    eps: float = epsilon()

    def check(self, prefix: str = "") -> None:
        super().check(prefix)
        require(self.head_lr == 1, f"{prefix}head_lr must be 1 under muon, whose head has rest_lr, got {self.head_lr}")
        require(
            not self.nesterov or self.momentum > 0,
            f"{prefix}nesterov=true needs momentum > 0, got momentum {self.momentum}",
        )

    def build(self, module: nn.Module, loss: str = "cross_entropy") -> Muon:
        adamw: dict[str, Any] = {"betas": tuple(self.betas), "eps": self.eps}
        groups = muon_groups(
            module,
            lr=self.lr,
            weight_decay=self.weight_decay,
            rest=self.rest,
            rest_lr=self.rest_lr,
            rest_weight_decay=self.weight_decay,
            rest_options=adamw if self.rest == "adamw" else {"momentum": self.momentum},
            decay_norm_and_bias=self.decay_norm_and_bias,
        )
        return Muon(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


def newton_schulz_of(group: Mapping[str, Any], grad: Tensor, buffer: Tensor, cotangent: Tensor | None = None) -> Tensor:
    """Newton–Schulz of D, with the settings of a Muon group: D = (1 − μ) g + μ B if Nesterov, else B.

    grad, buffer: g and B `(A, …)`, with this step's gradient in B. They are taken as matrices, and in the group's
    `ns_dtype`. With a `cotangent` like them the result is (∂NS/∂D)ᵀ cotangent instead, in float32 at least: below that
    it would be the derivative of rounding errors. The result has g's shape.
    """
    direction = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
    dtype = direction.dtype if group["ns_dtype"] is None else _DTYPES[group["ns_dtype"]]
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
    if cotangent is None:
        result = newton_schulz(direction.flatten(1).to(dtype), *settings)
    else:
        dtype = torch.promote_types(dtype, torch.float32)
        result = newton_schulz_vjp(direction.flatten(1).to(dtype), cotangent.flatten(1).to(dtype), *settings)
    return result.reshape(grad.shape)


def adjusted_lr(group: Mapping[str, Any], param: Tensor) -> float:
    """The learning rate of one parameter, by the shape (A, B) of its matrix and the group's `adjust_lr_fn`."""
    lr, how = float(group["lr"]), group["adjust_lr_fn"]
    rows, columns = param.shape[0], math.prod(param.shape[1:])
    if how == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    ratio = rows / columns
    return lr * math.sqrt(ratio if how == "spectral_unclamped" else max(1, ratio))


class Muon(Optimizer):
    """Momentum, orthogonalised: Muon (Jordan et al. 2024), with AdamW or SGD groups beside it.

    For a weight θ of shape `(A, …)`, taken as a matrix `(A, B)` with all further dimensions in B, so a convolution
    kernel as `(out, in·kh·kw)`:

        B' = μ B + (1 − μ) g,   D = (1 − μ) g + μ B' if Nesterov else B'
        θ' = (1 − lr·λ) θ − lr·s(A, B) · NewtonSchulz(D)

    with s = √max(1, A/B) for `adjust_lr_fn` None or "original", 0.2 √max(A, B) for "match_rms_adamw" (AdamW's lr
    and weight decay then serve; Liu et al. 2025) and √(A/B) for "spectral_unclamped".

    Args:
        params: parameters, or groups. A group's key `kind` is "muon" (the default), "adamw" or "sgd". In a Muon group
            every parameter has two dimensions or more. An AdamW or SGD group takes the keys of that class, and the
            defaults of torch for what it leaves out, `lr` too. `muon_groups` makes the groups of a model.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: of the Muon groups, as in
            torch.optim.Muon.
        ns_dtype: of Newton–Schulz: None is the parameter's, "bfloat16" is what torch.optim.Muon does: faster on
            accelerators, within about 1 %. Kept as a name, so that state dicts are plain.

    The arguments are those of torch.optim.Muon and one more. Groups and state dict are ordinary: a schedule may scale
    every group's `lr`.
    Raises `InputError` for values out of range and for parameters that are no matrix in a Muon group.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = MuonOptions.momentum,
        nesterov: bool = MuonOptions.nesterov,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str | torch.dtype | None = None,
    ) -> None:
        defaults = {
            "kind": "muon",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": _name(ns_dtype),
        }
        _check_muon(defaults)
        self._rest: dict[str, Optimizer] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # copies and loaded states have groups of their own
        self._rest = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's. Raises `InputError` for the state of an optimizer of another class."""
        for i, group in enumerate(state_dict["param_groups"]):
            require("kind" in group, f"state_dict must be one of Muon, but its param_groups[{i}] has no kind")
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of any `kind`."""
        group = {"kind": "muon", **param_group}
        require_choice("kind", group["kind"], ("muon", *REST))
        params = group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
        muon = self.defaults
        if group["kind"] == "muon":
            defaults = muon
            group["ns_dtype"] = _name(group.get("ns_dtype", muon["ns_dtype"]))
            _check_muon({**muon, **group})
            for p in _tensors(group["params"]):
                require(
                    p.ndim >= 2 and not p.is_complex(),
                    "params of a Muon group must be real and have two dimensions or more, got "
                    f"{p.dtype} {tuple(p.shape)}; put the others into a group with kind 'adamw' or 'sgd' (muon_groups)",
                )
        else:
            defaults = _rest_settings(group)
        # the base class gives every group all of `defaults`
        self.defaults = defaults
        try:
            super().add_param_group(group)
        finally:
            self.defaults = muon
        self._rest = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure` recomputes the loss, if given, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._step_muon(group)
        for kind, cls in REST.items():
            groups = [group for group in self.param_groups if group["kind"] == kind]
            if groups:
                if kind not in self._rest:
                    self._rest[kind] = cls(groups)
                inner = self._rest[kind]
                inner.param_groups, inner.state = groups, self.state
                inner.step()
        return loss

    def _step_muon(self, group: dict[str, Any]) -> None:
        decay = float(group["lr"]) * group["weight_decay"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            update = newton_schulz_of(group, p.grad, buffer)
            if decay != 0:
                p.mul_(1 - decay)
            p.add_(update, alpha=-adjusted_lr(group, p))


def _transposed_group(optimizer: Muon, group: dict[str, Any], params: list[Tensor]) -> GroupTranspose:
    """Of the step above, with D = (1 − μ) g + μ B' if Nesterov else B':

        v = −lr·s · (1 − μ) (1 + μ if Nesterov) · (∂NS/∂D)ᵀ u

    with Newton–Schulz differentiated exactly, as the polynomial iteration that it is, at the actual D. B' is read from
    the state after the step. Groups of another kind have the step of AdamW or SGD.
    """
    if group["kind"] == "adamw":
        return adam_group(optimizer, group, params, decoupled=True)
    if group["kind"] == "sgd":
        return sgd_group(optimizer, group, params)
    slope = 1.0 - group["momentum"]
    if group["nesterov"]:
        slope *= 1.0 + group["momentum"]
    grads = [p.grad for p in params]

    def multiply(which: list[int], tensors: list[Tensor]) -> None:
        for i, u in zip(which, tensors):
            grad = grads[i]
            assert grad is not None
            u.copy_(newton_schulz_of(group, grad, optimizer.state[params[i]]["momentum_buffer"], u))

    return GroupTranspose([-adjusted_lr(group, p) * slope for p in params], multiply)


TRANSPOSES[Muon] = partial(by_groups, _transposed_group)


def _through(group: Mapping[str, Any], before: State, after: State, u: Tensor, s: State) -> Cotangent:
    """The whole of it: with λ_D = −lr·s (∂NS/∂D)ᵀ u and λ = s_B + (μ λ_D if Nesterov else λ_D) of B',

    λ_g = (1 − μ) (λ + λ_D if Nesterov else λ),    λ_B = μ λ,    λ_θ = (1 − lr wd) u.
    """
    if group["kind"] == "adamw":
        return adam_through(group, before, after, u, s, decoupled=True)
    if group["kind"] == "sgd":
        return sgd_through(group, before, after, u, s)
    momentum, nesterov = group["momentum"], group["nesterov"]
    buffer = after["momentum_buffer"]
    old = before.get("momentum_buffer", torch.zeros_like(buffer))
    grad = (buffer - momentum * old) / (1 - momentum)
    direction = newton_schulz_of(group, grad, buffer, u).to(u.dtype) * -adjusted_lr(group, u)
    total = direction * (momentum if nesterov else 1.0) + s.get("momentum_buffer", 0.0)
    slope = (1 - momentum) * (total + direction if nesterov else total)
    return slope, u * (1 - float(group["lr"]) * group["weight_decay"]), {"momentum_buffer": momentum * total}


THROUGH[Muon] = _through


def muon_groups(
    module: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    rest: str = MuonOptions.rest,
    rest_lr: float = MuonOptions.rest_lr,
    rest_weight_decay: float = 0.0,
    rest_options: Mapping[str, Any] | None = None,
    decay_norm_and_bias: bool = True,
    head: str | None = None,
) -> list[dict[str, Any]]:
    """The trainable parameters of a model, split for `Muon`.

    To Muon go the weights of hidden layers: parameters whose own name says `weight` (`conv1.weight`, `in_proj_weight`,
    `weight_ih_l0`) and whose matrix has more than one row and one column. To `rest` go the head, biases, norms,
    embeddings and whatever has another name (positions, class tokens, scales).

    Args:
        module: a `Backbone` or any model.
        lr, weight_decay: of the Muon group.
        rest: "adamw" or "sgd", with `rest_lr`, `rest_weight_decay` and further keys in `rest_options` (`betas`,
            `momentum`, …).
        decay_norm_and_bias: False takes the weight decay from the rest's parameters of at most one dimension.
        head: name of the layer that makes the logits; None is a Backbone's own, or else the last Linear layer.

    Raises:
        InputError: for a matrix parameter nowhere, an unknown `head` or `rest`, a negative rate.
    """
    require_choice("rest", rest, REST)
    rates = {"lr": lr, "weight_decay": weight_decay, "rest_lr": rest_lr, "rest_weight_decay": rest_weight_decay}
    for name, value in rates.items():
        require(value >= 0, f"{name} must be >= 0, got {value}")
    options = dict(rest_options or {})
    taken = options.keys() & {"params", "kind", "lr", "weight_decay"}
    require(not taken, f"rest_options must not have {', '.join(sorted(taken))}, which have arguments of their own")
    matrices, others = _hidden_and_others(module, head)
    if not matrices:
        raise InputError(
            f"muon with no matrix parameters: model {type(module).__name__} has no trainable weight of a hidden Linear "
            "or convolution layer; use optimizer adamw or sgd"
        )
    groups: list[dict[str, Any]] = [{"params": matrices, "kind": "muon", "lr": lr, "weight_decay": weight_decay}]
    if decay_norm_and_bias or rest_weight_decay == 0:
        split = [(others, rest_weight_decay)]
    else:
        split = [([p for p in others if p.ndim > 1], rest_weight_decay), ([p for p in others if p.ndim <= 1], 0.0)]
    groups += [
        {"params": some, "kind": rest, "lr": rest_lr, "weight_decay": decay, **options} for some, decay in split if some
    ]
    return groups


def _hidden_and_others(module: nn.Module, head: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of hidden layers, and all other trainable parameters."""
    layer = _head(module, head)
    excluded = set() if layer is None else {id(p) for p in layer.parameters()}
    for part in module.modules():
        if isinstance(part, _NEVER):
            excluded.update(id(p) for p in part.parameters(recurse=False))
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in module.named_parameters():
        if p.requires_grad:
            matrix = p.ndim >= 2 and p.numel() > max(p.shape)
            hidden = "weight" in name.rpartition(".")[2].split("_") and id(p) not in excluded
            (matrices if matrix and hidden else others).append(p)
    return matrices, others


def _head(module: nn.Module, name: str | None) -> nn.Module | None:
    """The layer that makes the logits; None if there is no Linear layer and no name."""
    module = getattr(module, "_orig_mod", module)
    if name is None and isinstance(module, Backbone):
        return module.head
    # a Backbone's own names are those of its net
    layers = dict((module.net if isinstance(module, Backbone) else module).named_modules())
    if name is not None:
        require(name in layers, f"head must name a layer of the model, got {name!r}")
        return layers[name]
    return next((layer for layer in reversed(layers.values()) if isinstance(layer, nn.Linear)), None)


def _name(dtype: str | torch.dtype | None) -> str | None:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def _tensors(params: list[Any]) -> list[Tensor]:
    """The parameters of a group, which may come as (name, parameter)."""
    return [p[1] if isinstance(p, tuple) else p for p in params]


def _rest_settings(group: dict[str, Any]) -> dict[str, Any]:
    """All settings of an AdamW or SGD group but its parameters, with torch's defaults, checked by torch."""
    cls = REST[group["kind"]]
    names = cls([torch.zeros(0)]).defaults.keys() - {"decoupled_weight_decay"}
    try:
        return cls([torch.zeros(0)], **{key: group[key] for key in group.keys() & names}).defaults
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"group of kind {group['kind']!r}: {error}") from error


def _check_muon(group: Mapping[str, Any]) -> None:
    """Raise `InputError` for settings of a Muon group that are out of range."""
    lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    require(not isinstance(lr, Tensor) or lr.numel() == 1, "lr must be a number or a tensor of one element")
    require(bool(lr >= 0), f"lr must be >= 0, got {lr}")
    require(decay >= 0, f"weight_decay must be >= 0, got {decay}")
    require(0 <= momentum < 1, f"momentum must be in [0, 1), got {momentum}")
    require(group["eps"] > 0, f"eps must be > 0, got {group['eps']}")
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    require(isinstance(steps, int) and 1 <= steps < 100, f"ns_steps must be a whole number from 1 to 99, got {steps}")
    require(len(coefficients) == 3, f"ns_coefficients must be three numbers, got {coefficients}")
    if group["adjust_lr_fn"] is not None:
        require_choice("adjust_lr_fn", group["adjust_lr_fn"], _ADJUSTMENTS)
    if group["ns_dtype"] is not None:
        require_choice("ns_dtype", group["ns_dtype"], _DTYPES)
