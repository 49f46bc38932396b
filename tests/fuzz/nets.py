"""Random small float64 networks: a stem, a few blocks `(N, 6) -> (N, 6)` of every kind, a head.

A network is a list of names of `BLOCKS`; `build(names)` makes it with the global torch stream, so the same seed gives
the same network. Numbers that are not torch's own are drawn on training batches (N rows) alone, since no convention
says what a meta batch draws.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = [
    "BLOCKS",
    "HIDDEN_STATE",
    "INPUTS",
    "MEANT_OTHERWISE",
    "NO_SECOND_DERIVATIVE",
    "N_META",
    "PLAIN",
    "K",
    "N",
    "build",
    "draw",
]

N, N_META, INPUTS, D, K = 9, 7, 10, 6, 3
Function = torch.autograd.Function


class Block(nn.Module):
    """A function of `(N, D)` with a matrix at hand."""

    def __init__(self, function: Callable[[Block, Tensor], Tensor], *children: nn.Module) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(D, D)
        self.inner = nn.ModuleList(children)

    def forward(self, h: Tensor) -> Tensor:
        return self.function(self, h)


BLOCKS: dict[str, Callable[[], nn.Module]] = {}


def block(function: Callable[[Block, Tensor], Tensor]) -> Callable[[Block, Tensor], Tensor]:
    """Enter a function as a block of its name."""
    BLOCKS[function.__name__] = lambda: Block(function)
    return function


def entered(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Enter a builder as a block of its name."""
    BLOCKS[make.__name__] = make
    return make


# -- layers ----------------------------------------------------------------------------------------------------------

for _name, _activation in {
    "tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "softplus": nn.Softplus, "prelu": nn.PReLU,
    "hardswish": nn.Hardswish, "elu": nn.ELU,
}.items():  # fmt: skip
    BLOCKS[_name] = lambda activation=_activation: nn.Sequential(nn.Linear(D, D), activation())

BLOCKS |= {
    "relu_in_place": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True)),
    "batch_norm": lambda: nn.BatchNorm1d(D),
    "batch_norm_bare": lambda: nn.BatchNorm1d(D, affine=False),
    "batch_norm_no_statistics": lambda: nn.BatchNorm1d(D, track_running_stats=False),
    "batch_norm_cumulative": lambda: nn.BatchNorm1d(D, momentum=None),
    "frozen_batch_norm": lambda: nn.BatchNorm1d(D).eval(),
    "layer_norm": lambda: nn.LayerNorm(D),
    "group_norm": lambda: nn.GroupNorm(2, D),
    "dropout": lambda: nn.Dropout(0.3),
    "alpha_dropout": lambda: nn.AlphaDropout(0.2),
    "frozen_dropout": lambda: nn.Dropout(0.5).eval(),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2, padding=1), nn.AvgPool2d(2, 1),
                                  nn.Tanh(), nn.Flatten(), nn.Linear(12, D)),
    "conv1d": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 3, padding=1, groups=2), nn.Flatten()),
    "conv_transpose": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.ConvTranspose1d(2, 1, 4), nn.Flatten()),
    "max_pool": lambda: nn.Sequential(nn.Linear(D, 2 * D), nn.Unflatten(1, (1, 2 * D)), nn.MaxPool1d(2), nn.Flatten()),
    "batch_norm_2d": lambda: nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.BatchNorm2d(2), nn.Flatten()),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(D, D)), nn.Tanh()),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(D, D)),
}  # fmt: skip


@entered
def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(D, D))


@entered
def old_spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(D, D))


@entered
def attention() -> nn.Module:
    def attend(self: Block, h: Tensor) -> Tensor:
        tokens = self.linear(h).view(-1, 3, 2)
        return h + self.inner[0](tokens, tokens, tokens, need_weights=False)[0].flatten(1)

    return Block(attend, nn.MultiheadAttention(2, 1, batch_first=True, dropout=0.1))


@block
def fused_attention(self: Block, h: Tensor) -> Tensor:
    q = self.linear(h).view(-1, 1, 3, 2)
    return h + F.scaled_dot_product_attention(q, q.tanh(), q, is_causal=True).flatten(1)


@entered
def gru() -> nn.Module:
    return Block(lambda self, h: self.inner[0](h.view(-1, 3, 2))[0].flatten(1), nn.GRU(2, 2, batch_first=True))


@entered
def embedding(sparse: bool = False) -> nn.Module:
    def look_up(self: Block, h: Tensor) -> Tensor:
        return self.linear(h) + self.inner[0]((h.detach() > 0).long() + 2 * torch.arange(D)).mean(1)

    return Block(look_up, nn.Embedding(2 * D, D, sparse=sparse))


BLOCKS["sparse_embedding"] = lambda: embedding(sparse=True)


@entered
def embedding_bag() -> nn.Module:
    def look_up(self: Block, h: Tensor) -> Tensor:
        return self.linear(h) + self.inner[0]((h.detach() > 0).long() + 2 * torch.arange(D))

    return Block(look_up, nn.EmbeddingBag(2 * D, D))


# -- structure -------------------------------------------------------------------------------------------------------


@block
def residual(self: Block, h: Tensor) -> Tensor:
    out = self.linear(h)
    out += h
    return F.relu_(out)


@block
def called_twice(self: Block, h: Tensor) -> Tensor:
    return torch.tanh(self.linear(torch.tanh(self.linear(h))))


@block
def tied(self: Block, h: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(h, self.linear.weight)), self.linear.weight.T)


@entered
def shared() -> nn.Module:
    a, b = nn.Linear(D, D), nn.Linear(D, D)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b)


@entered
def partly_frozen() -> nn.Module:
    layers = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    layers[0].requires_grad_(False)
    return layers


@entered
def unused_parameter() -> nn.Module:
    return Block(lambda self, h: torch.tanh(h), nn.Linear(D, D))


@entered
def hooks() -> nn.Module:
    made = Block(lambda self, h: self.linear(h))
    made.linear.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0),))
    made.linear.register_forward_hook(lambda module, args, output: output * torch.tensor(1.5, dtype=output.dtype))
    return made


@block
def gate(self: Block, h: Tensor) -> Tensor:
    return h * torch.softmax(self.linear(h), 1) + torch.logsumexp(h, 1, keepdim=True)


@block
def sorts(self: Block, h: Tensor) -> Tensor:
    values, order = self.linear(h).sort(1)
    return values.cumsum(1) * 0.3 + h.gather(1, order)


@block
def distances(self: Block, h: Tensor) -> Tensor:
    return torch.cdist(h, self.linear.weight) - torch.einsum("ni,ij->nj", h, self.linear.weight)


@block
def depends_on_data(self: Block, h: Tensor) -> Tensor:
    return torch.tanh(self.linear(h)) if h.mean() > 0 else torch.sin(self.linear(h))


@block
def writes_in_place(self: Block, h: Tensor) -> Tensor:
    out = torch.sin(self.linear(h)) + 0.1
    out.mul_(self.linear.bias).add_(h)
    out[:, 0] = h[:, 1]
    return out.masked_fill(out > 2, 2.0)


@block
def complex_values(self: Block, h: Tensor) -> Tensor:
    f = torch.fft.rfft(self.linear(h), dim=1)
    f = f * torch.exp(1j * torch.arange(f.shape[1]))
    return torch.fft.irfft(f, n=D, dim=1) + f.abs().mean(1, keepdim=True)


@block
def gradient_of_energy(self: Block, h: Tensor) -> Tensor:
    """Forces: the derivative of a learned energy, as a forward value."""
    with torch.enable_grad():
        at = h if h.requires_grad else h.clone().requires_grad_()
        energy = torch.tanh(self.linear(at)).square().sum()
        return torch.autograd.grad(energy, at, create_graph=True)[0]


@block
def profiled(self: Block, h: Tensor) -> Tensor:
    with torch.profiler.record_function("block"):
        return torch.tanh(self.linear(h))


@block
def checkpointed(self: Block, h: Tensor) -> Tensor:
    return checkpoint(lambda h: F.dropout(torch.tanh(self.linear(h)), 0.3, self.training), h, use_reentrant=False)


@block
def checkpointed_reentrant(self: Block, h: Tensor) -> Tensor:
    return checkpoint(lambda h: torch.tanh(self.linear(h)), h, use_reentrant=True)


# -- constants, and what the backward pass is told -------------------------------------------------------------------


@block
def tensor_constants(self: Block, h: Tensor) -> Tensor:
    parts = [h * torch.tensor([1.0, k, -k, 0.5, k * k, 2.0], dtype=h.dtype) for k in (1, 2, 3)]
    return torch.stack(parts).mean(0) + torch.linspace(0, 1, D)


@block
def numpy_constants(self: Block, h: Tensor) -> Tensor:
    return torch.stack([self.linear(h) * torch.as_tensor(np.cos(np.arange(D) * k)) for k in (1, 2, 3)]).sum(0)


@block
def no_grad_statistics(self: Block, h: Tensor) -> Tensor:
    with torch.no_grad():
        mean, deviation = h.mean(0), h.std(0)
    return (h - mean) / (deviation + 0.1)


@block
def detached_statistics(self: Block, h: Tensor) -> Tensor:
    return (h - h.mean(0).detach()) / (h.detach().std(0) + 0.1)


@block
def straight_through(self: Block, h: Tensor) -> Tensor:
    return h + (torch.sign(h) - h).detach()


class _Sign(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return torch.sign(h)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


@block
def straight_through_function(self: Block, h: Tensor) -> Tensor:
    return 0.5 * _Sign.apply(h) + torch.tanh(self.linear(h))


class _Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * cotangent


class _CubeWithJvp(_Cube):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * tangent


class _CubeOnce(_Cube):
    backward = staticmethod(torch.autograd.function.once_differentiable(_Cube.backward))


BLOCKS |= {
    "function": lambda: Block(lambda self, h: 0.2 * _Cube.apply(self.linear(h))),
    "function_with_jvp": lambda: Block(lambda self, h: 0.2 * _CubeWithJvp.apply(self.linear(h))),
    "function_once": lambda: Block(lambda self, h: 0.2 * _CubeOnce.apply(self.linear(h)) + h),
}


@block
def tensor_hook(self: Block, h: Tensor) -> Tensor:
    h = torch.tanh(self.linear(h))
    if h.requires_grad:
        h.register_hook(lambda cotangent: 2 * cotangent)
    return h


@entered
def parameter_hook() -> nn.Module:
    """Rows whose gradient is masked, as half-frozen embeddings have."""
    made = Block(lambda self, h: torch.tanh(self.linear(h)))
    made.linear.weight.register_hook(lambda g: g * (torch.arange(D) > 2).to(g)[:, None])
    return made


@entered
def module_backward_hook() -> nn.Module:
    made = Block(lambda self, h: torch.tanh(self.linear(h)))
    made.linear.register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))
    return made


# -- state and random numbers ----------------------------------------------------------------------------------------


class Statistics(Block):
    """Running statistics that enter the values: `how` they are stored."""

    def __init__(self, how: str) -> None:
        super().__init__(getattr(Statistics, how))
        if how.startswith("plain"):
            self.mean = torch.zeros(D, dtype=torch.float64)
        else:
            self.register_buffer("mean", torch.zeros(D))

    def reassigned(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        return self.linear(h - self.mean)

    plain_reassigned = reassigned

    def in_place(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return self.linear(h - self.mean)

    plain_in_place = in_place

    def read_before(self, h: Tensor) -> Tensor:
        out = self.linear(h - self.mean)
        self.mean.copy_(0.9 * self.mean + 0.1 * h.detach().mean(0))
        return out


for _how in ("reassigned", "plain_reassigned", "in_place", "plain_in_place", "read_before"):
    BLOCKS[f"statistics_{_how}"] = lambda how=_how: Statistics(how)


@block
def noise(self: Block, h: Tensor) -> Tensor:
    return h + 0.3 * torch.randn_like(h) * torch.rand(D, dtype=h.dtype)


@block
def layer_drop(self: Block, h: Tensor) -> Tensor:
    return h + torch.tanh(self.linear(h)) if not self.training or torch.rand(()) < 0.6 else h


@block
def python_layer_drop(self: Block, h: Tensor) -> Tensor:
    return h if len(h) == N and random.random() < 0.5 else h + 3 * torch.tanh(self.linear(h))


@block
def python_random(self: Block, h: Tensor) -> Tensor:
    return self.linear(h) * (random.uniform(0.5, 2.0) if len(h) == N else 1.0)


@block
def numpy_random(self: Block, h: Tensor) -> Tensor:
    h = torch.tanh(self.linear(h))
    return h * torch.as_tensor(np.random.rand(*h.shape)) if len(h) == N else h


@block
def gumbel(self: Block, h: Tensor) -> Tensor:
    return h * F.gumbel_softmax(self.linear(h), hard=True)


@entered
def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(1)

    def function(self: Block, h: Tensor) -> Tensor:
        drawn = torch.rand(h.shape, generator=generator, dtype=h.dtype) if len(h) == N else 1.0
        return torch.tanh(self.linear(h * drawn))

    return Block(function)


@entered
def counts_passes() -> nn.Module:
    passes = [0]

    def function(self: Block, h: Tensor) -> Tensor:
        passes[0] += len(h) == N
        return torch.tanh(self.linear(h)) if passes[0] % 2 else h

    return Block(function)


# -- networks --------------------------------------------------------------------------------------------------------

NO_SECOND_DERIVATIVE = {"function_once", "embedding_bag", "sparse_embedding", "checkpointed_reentrant", "gru"}

HIDDEN_STATE = {"own_generator", "counts_passes"}
"""What moves in a pass and nobody can see."""

MEANT_OTHERWISE = {
    "no_grad_statistics", "detached_statistics", "straight_through", "straight_through_function", "gumbel",
    "tensor_hook", "parameter_hook", "module_backward_hook", "spectral_norm", "old_spectral_norm",
    *(name for name in BLOCKS if name.startswith("statistics_")),
}  # fmt: skip
"""The backward pass is told something else than the values say: no quotient of values can be right."""

NO_FORWARD_MODE = {"checkpointed", "distances", "function", "gradient_of_energy", "gru", "orthogonal"} | {
    "weight_norm",
    "old_weight_norm",
}

PLAIN = sorted(BLOCKS.keys() - NO_SECOND_DERIVATIVE - HIDDEN_STATE - MEANT_OTHERWISE - NO_FORWARD_MODE)
"""Blocks that no engine has a reason to refuse."""


class InPlaceInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x -= 0.3
        return x


def build(names: list[str], writes_input: bool = False, parallel: bool = False) -> nn.Module:
    """Stem, blocks, head, in training mode but for what the blocks froze."""
    blocks = [BLOCKS[name]() for name in names]
    first = [InPlaceInput()] if writes_input else []
    net = nn.Sequential(*first, nn.Linear(INPUTS, D), nn.Tanh(), *blocks, nn.Linear(D, K)).double()
    return nn.DataParallel(net) if parallel else net


def draw(rng: random.Random, names: list[str] | None = None) -> list[str]:
    """One to four blocks."""
    return rng.choices(sorted(BLOCKS) if names is None else names, k=rng.choice([1, 1, 2, 2, 3, 4]))
