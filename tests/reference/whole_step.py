"""One bilevel step written plainly, and dM/dφ through it: by double backward, and by differences. Float64.

Nothing of `metacal.bilevel` is used, and no pass is ever repeated on the same network: each is made on a new one, built
from the same seed, and called as a training loop of one's own would call it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from metacal.gamma import pool
from metacal.optim import SAM, BulkSGD

Grads = Sequence[Tensor | None]


def focal(logits: Tensor, labels: Tensor, gamma: Tensor) -> Tensor:
    """-(1 - p)^gamma log p with 1 - p floored at 1e-6."""
    log_p = torch.log_softmax(logits, dim=1)[torch.arange(len(labels)), labels]
    return -((-torch.expm1(log_p)).clamp(min=1e-6) ** gamma) * log_p


def smoothing(logits: Tensor, labels: Tensor, alpha: Tensor) -> Tensor:
    """-Σ_k t_k log p_k with t = (1 - α) e_y + α / K."""
    log_p = torch.log(torch.softmax(logits, dim=1))
    return -(1 - alpha) * log_p[torch.arange(len(labels)), labels] - alpha * log_p.mean(1)


# -- the optimizers' steps as functions of the gradient --------------------------------------------------------------


def _sgd(group: Mapping[str, Any], state: Mapping[str, Any], p: Tensor, g: Tensor) -> Tensor:
    g = (-g if group["maximize"] else g) + group["weight_decay"] * p
    if group["momentum"] != 0:
        old = state.get("momentum_buffer")
        buffer = g if old is None else group["momentum"] * old + (1 - group["dampening"]) * g
        g = g + group["momentum"] * buffer if group["nesterov"] else buffer
    return p - float(group["lr"]) * g


def _adam(group: Mapping[str, Any], state: Mapping[str, Any], p: Tensor, g: Tensor, decoupled: bool) -> Tensor:
    (b1, b2), lr = group["betas"], float(group["lr"])
    g = -g if group["maximize"] else g
    if decoupled:
        p = p * (1 - lr * group["weight_decay"])
    else:
        g = g + group["weight_decay"] * p
    t = float(state.get("step", 0)) + 1
    m = b1 * state.get("exp_avg", torch.zeros_like(p)) + (1 - b1) * g
    n = b2 * state.get("exp_avg_sq", torch.zeros_like(p)) + (1 - b2) * g * g
    if group["amsgrad"]:
        n = torch.maximum(state.get("max_exp_avg_sq", torch.zeros_like(p)), n)
    # √ has no slope at 0, where g = 0
    root = torch.where(n > 0, n, torch.ones_like(n)).sqrt() * (n > 0)
    return p - lr / (1 - b1**t) * m / (root / math.sqrt(1 - b2**t) + group["eps"])


def _muon(group: Mapping[str, Any], state: Mapping[str, Any], p: Tensor, g: Tensor) -> Tensor:
    mu, lr = group["momentum"], float(group["lr"])
    buffer = mu * state.get("momentum_buffer", torch.zeros_like(g)) + (1 - mu) * g
    x = ((1 - mu) * g + mu * buffer if group["nesterov"] else buffer).flatten(1)
    rows, columns = x.shape
    x = x / x.norm().clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    scale = math.sqrt(max(1, rows / columns))
    return p * (1 - lr * group["weight_decay"]) - lr * scale * x.view_as(p)


def moved(optimizer: Optimizer, params: Sequence[Tensor], start: Sequence[Tensor], grads: Grads) -> list[Tensor]:
    """θ' = U(θ, g), a graph in the gradients; θ = start. The optimizer's state stays as it is.

    SAM's step is that of its base. BulkSGD's vectors are those in its state.
    """
    if isinstance(optimizer, SAM):
        return moved(optimizer.base, params, start, grads)
    gradient, theta = dict(zip(params, grads)), dict(zip(params, start))
    result = dict(theta)
    for group in optimizer.param_groups:
        for p in group["params"]:
            g, at, state = gradient.get(p), theta.get(p), optimizer.state.get(p, {})
            if g is None:
                continue
            kind = group.get("kind", type(optimizer).__name__.lower())
            if kind in ("sgd", "bulksgd"):
                result[p] = _sgd(group, state, at, g)
            elif kind == "muon":
                result[p] = _muon(group, state, at, g)
            else:
                result[p] = _adam(group, state, at, g, kind == "adamw")
    if isinstance(optimizer, BulkSGD):
        moving = [p for p in params if gradient[p] is not None]
        step = torch.cat([(result[p] - theta[p]).flatten() for p in moving])
        v = torch.cat([optimizer.state[p]["bulk_vectors"].flatten(1) for p in moving], dim=1)
        step = step - torch.linalg.pinv(v) @ (v @ step)
        for p, part in zip(moving, step.split([p.numel() for p in moving])):
            result[p] = theta[p] + part.view_as(p)
    return [result[p] for p in params]


def clipped(grads: Grads, max_norm: float | None) -> Grads:
    if max_norm is None:
        return grads
    norm = torch.cat([g.flatten() for g in grads if g is not None]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [None if g is None else scale * g for g in grads]


# -- the step --------------------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """One step to be taken, once: as the arguments of `MetaStep`, with a loss and a penalty written in a test.

    loss: `(logits, labels, gamma) -> (N,)`; penalty: `(net, x, y, logits, features) -> scalar`.
    """

    net: nn.Module
    optimizer: Optimizer
    source: nn.Module
    x: Tensor
    y: Tensor
    x_meta: Tensor
    y_meta: Tensor
    outer: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] = focal
    clip_norm: float | None = None
    penalty: Callable[..., Tensor] | None = None
    ascent: list[Tensor | None] | None = None  # SAM's ε, where it is given: a constant of the step
    trained: State | None = None  # the network's state after the training pass

    @property
    def params(self) -> list[Tensor]:
        return [p for p in self.net.parameters() if p.requires_grad]

    @property
    def phi(self) -> list[Tensor]:
        return [p for p in self.source.parameters() if p.requires_grad]

    def call(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits, features and the output of the layer that the source reads."""
        seen: list[Tensor] = []
        layer = getattr(self.source, "layer", None)
        if layer is not None:
            hook = self.net.get_submodule(layer).register_forward_hook(lambda m, a, out: seen.append(pool(out)))
        with sdpa_kernel(SDPBackend.MATH):  # the kernel of attention that has a second derivative
            logits, features = self.net(x)
        if layer is not None:
            hook.remove()
        return logits, features, (seen[-1] if seen else features).detach()

    def gradient(self, differentiate: Callable[..., Grads], observe: bool = True) -> Grads:
        """g of the inner objective at the network's present parameters."""
        logits, features, seen = self.call(self.x)
        context = {"logits": logits.detach(), "labels": self.y, "inputs": self.x, "epoch": 0}
        if observe and hasattr(self.source, "observe"):
            self.source.observe(seen, **context)
        gamma = self.source(seen, **context)
        total = self.loss(logits, self.y, gamma).mean()
        if self.penalty is not None:
            total = total + self.penalty(self.net, self.x, self.y, logits, features)
        return differentiate(total, self.params)

    def moved(self, differentiate: Callable[..., Grads]) -> list[Tensor]:
        """θ', a graph in φ if `differentiate` leaves one. SAM's network is left at θ + ε."""
        start = [p.detach().clone() for p in self.params]
        sam = isinstance(self.optimizer, SAM)
        grads = self.gradient(once if sam else differentiate)
        self.trained = State(self.net)
        if sam:
            self.ascent = _ascent(self.optimizer, start, grads) if self.ascent is None else self.ascent
            with torch.no_grad():
                for p, move in zip(self.params, self.ascent):
                    if move is not None:
                        p += move
            grads = self.gradient(differentiate, observe=False)
        if isinstance(self.optimizer, BulkSGD):
            self.optimizer.prepare(self.x, self.y)
        return moved(self.optimizer, self.params, start, clipped(grads, self.clip_norm))

    @torch.no_grad()
    def put(self, theta: Sequence[Tensor]) -> None:
        """Make the network that which took the step: state of the training pass, parameters θ'."""
        assert self.trained is not None
        self.trained.restore(streams=False)
        for p, value in zip(self.params, theta):
            p.copy_(value)


def _ascent(sam: SAM, start: Sequence[Tensor], grads: Grads) -> list[Tensor | None]:
    """ε = ρ T² g / ‖T g‖, T = |θ| if adaptive, else 1."""
    scales = [t.abs() if sam.adaptive else torch.ones_like(t) for t in start]
    norm = torch.cat([(t * g).flatten() for t, g in zip(scales, grads) if g is not None]).norm()
    return [None if g is None else sam.rho * t * t * g / norm for t, g in zip(scales, grads)]


def twice(total: Tensor, leaves: Sequence[Tensor]) -> Grads:
    """The gradient, and its graph."""
    return torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)


def once(total: Tensor, leaves: Sequence[Tensor]) -> Grads:
    """The gradient as `backward` leaves it."""
    for p in leaves:
        p.grad = None
    total.backward()
    return [None if p.grad is None else p.grad.detach().to_dense() for p in leaves]


Build = Callable[[], Setting]
"""The same step on a new network every time, with the random streams as they were before it."""


@dataclass
class Taken:
    """θ', ∇M(θ') as backward gives it, the network's state after the step, and SAM's ε."""

    theta: list[Tensor]
    cotangents: Grads
    after: State
    ascent: list[Tensor | None] | None


def taken(build: Build) -> Taken:
    setting = build()
    theta = setting.moved(once)
    setting.put(theta)
    after = State(setting.net)
    torch.manual_seed(int(torch.randint(2**62, ())))  # the meta pass has a random stream of its own
    value = setting.outer(setting.call(setting.x_meta)[0], setting.y_meta)
    return Taken(theta, once(value, setting.params), after, setting.ascent)


def along(theta: Sequence[Tensor], step: Taken) -> Tensor:
    """⟨θ − θ', ∇M⟩."""
    pairs = zip(theta, step.theta, step.cotangents)
    return torch.stack([((a - b) * u).sum() for a, b, u in pairs if u is not None]).sum()


def double_backward(build: Build) -> Tensor:
    """dM/dφ = ∂/∂φ ⟨U(g(φ)), ∇M(θ')⟩, flat, through the graph of g. The training pass needs second derivatives."""
    step, setting = taken(build), build()
    slopes = torch.autograd.grad(along(setting.moved(twice), step), setting.phi, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if s is None else s).flatten() for p, s in zip(setting.phi, slopes)])


def differences(build: Build, h: float = 5e-5) -> Tensor:
    """The same by central differences of fourth order: first derivatives are enough.

    ∇M is that of backward, so it means what it means in training where a forward and its backward disagree
    (straight-through functions, statistics held constant).
    """
    step = taken(build)

    def value(which: int, entry: int, move: float) -> float:
        setting = build()
        setting.phi[which].detach().view(-1)[entry] += move
        setting.ascent = step.ascent
        return float(along(setting.moved(once), step))

    slopes = []
    for which, p in enumerate(build().phi):
        for entry in range(p.numel()):
            far, near = ([value(which, entry, sign * k * h) for sign in (1, -1)] for k in (2, 1))
            slopes.append((8 * (near[0] - near[1]) - (far[0] - far[1])) / (12 * h))
    return torch.tensor(slopes, dtype=torch.float64)


# -- everything that a pass may move ---------------------------------------------------------------------------------


def _plain(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes, but for the weights that torch's older norms derive from parameters."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not {f"{name}_g", f"{name}_orig"} & module._parameters.keys()
    }


class State:
    """Values of parameters, buffers and plain tensor attributes of modules, modes, and three random streams."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = [m for module in modules for m in module.modules()]
        self.tensors = [self._copies(m) for m in self.modules]
        self.modes = [m.training for m in self.modules]
        self.streams = torch.get_rng_state(), random.getstate(), np.random.get_state()

    @staticmethod
    def _copies(m: nn.Module) -> dict[str, Tensor | None]:
        named = {**m._parameters, **m._buffers, **_plain(m)}
        return {name: None if t is None else t.detach().clone() for name, t in named.items()}

    def restore(self, streams: bool = True) -> None:
        with torch.no_grad():
            for m, saved in zip(self.modules, self.tensors):
                for name, p in m._parameters.items():
                    if p is not None:
                        p.copy_(saved[name])
                for name, value in saved.items():
                    if name in m._buffers or name in _plain(m):
                        setattr(m, name, None if value is None else value.clone())
        if streams:
            torch.set_rng_state(self.streams[0])
            random.setstate(self.streams[1])
            np.random.set_state(self.streams[2])

    def changes(self, other: State, tolerance: float = 0.0) -> list[str]:
        """What differs in `other`, by name."""
        found = []
        for m, a, b in zip(self.modules, self.tensors, other.tensors):
            for name in sorted({**a, **b}):
                one, two = a.get(name), b.get(name)
                if one is None or two is None:
                    same = one is two
                else:
                    same = one.shape == two.shape and torch.allclose(one, two, rtol=tolerance, atol=tolerance)
                if not same:
                    found.append(f"{type(m).__name__}.{name}")
        if self.modes != other.modes:
            found.append("modes")
        if not torch.equal(self.streams[0], other.streams[0]):
            found.append("torch's random stream")
        if self.streams[1] != other.streams[1]:
            found.append("Python's random stream")
        if any(not np.array_equal(a, b) for a, b in zip(self.streams[2], other.streams[2])):
            found.append("numpy's random stream")
        return found


def entries(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the optimizer's state, a dictionary for each parameter in the groups' order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state.get(p, {}).items()} for p in params
    ]


def same_entries(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return all(
        one.keys() == two.keys()
        and all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(two[k])) for k in one if one[k] is not None)
        for one, two in zip(a, b, strict=True)
    )
