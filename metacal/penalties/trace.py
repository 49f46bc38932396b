"""Traces of the Hessian and the Gauss-Newton matrix as penalties: unbiased, in value and in gradient in θ.

    Tr H,  H = ∇²_θ of the mean cross-entropy (or MSE) of the batch        Tr G,  G = 1/N Σ_n J_nᵀ S_n J_n

whatever loss trains the network. Both are those of the network in its present mode on this batch. The route depends
on the network; each has the trace as its mean over probes, and the first that applies is the least noisy:

`closed form`   multilayer perceptrons. Tr G from signs e_n at the logits, ‖J_nᵀ S_n^½ e_n‖² layer by layer; the
                residual Tr(H − G) exactly with up to two hidden layers, else from signs at the hidden units. Read off
                the graph of the logits that the loss has made: no forward pass of its own.
`layers`        networks of independent samples whose parameters all lie in linear, convolution and normalisation
                layers: Tr G as above, from one recorded backward pass. Tr H too if they are piecewise linear, where it
                equals Tr G.
`jets`          any other network: with signs v for all parameters but those of the last layer,
                vᵀHv = d²/dε² L(θ + εv), or its part z₁ᵀS z₁ for G, from the derivatives of the logits along v (`Tape`);
                the last layer's own 1/N Σ tr(S_n)(‖a_n‖² + 1) is exact. BatchNorm in training mode is differentiated
                through its statistics.
`reverse`       where an operation has no rule in `autodiff.jets`: the same by double and triple backward.

With K − 1 probes and more the signs at the logits give way to the K − 1 columns of a factor of S_n, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from metacal.autodiff.plain import WRONG, PlainNorms
from metacal.autodiff.tape import Tape
from metacal.curvature.layers import Captured, Site, capture, examples_depend, gram_of
from metacal.curvature.problem import LOSSES, Problem, factor_columns, logit_factor, logit_gradient, logit_hessian
from metacal.curvature.structure import curved_activations
from metacal.curvature.trace import signs_at
from metacal.errors import InputError, require, require_choice
from metacal.network import Streams, plain_attention
from metacal.penalties.chain import Head, chain_from, ends_in_linear, head_from
from metacal.penalties.evaluate import (
    check_batch,
    check_number,
    graph_names,
    logits_of,
    own_buffers,
    plain,
    require_second_derivative,
)

__all__ = ["check_trace", "gn_trace", "hessian_trace", "trace_and_route"]


def hessian_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    seed: int = 0,
    loss: str = "cross_entropy",
    *,
    batch: int | None = None,
    step: int = 0,
    logits: Tensor | None = None,
) -> Tensor:
    """An unbiased estimate of Tr H, a scalar whose gradient in θ estimates that of Tr H without bias.

    Args:
        model: x -> logits (N, K) or (logits, features), in the mode that H is wanted in. Buffers, modes and `.grad`
            stay as they are. Dropout draws from `seed` and `step`, not from the training's stream.
        probes: >= 1 sign vectors, whose estimates are averaged.
        seed, step: fix the signs; give the number of the step for fresh ones in every step.
        loss: "cross_entropy" or "mse" (mean over samples and classes, against one-hot labels).
        batch: use the first so many samples only; None: all.
        logits: of the plain forward of x, with their graph, if there are any: a perceptron then needs no other pass.

    Raises `InputError` for bad arguments, and for a network none of whose routes works.
    """
    return trace_and_route("hessian", model, x, y, probes, seed, loss, batch=batch, step=step, logits=logits)[0]


def gn_trace(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    seed: int = 0,
    loss: str = "cross_entropy",
    *,
    batch: int | None = None,
    step: int = 0,
    logits: Tensor | None = None,
) -> Tensor:
    """An unbiased estimate of Tr G, as `hessian_trace`. θ moves J and the probabilities in S. y is not used."""
    return trace_and_route("gn", model, x, y, probes, seed, loss, batch=batch, step=step, logits=logits)[0]


def check_trace(probes: int, seed: int, loss: str, batch: int | None, step: int = 0) -> None:
    """Raise `InputError` for options that no trace can have."""
    check_number("probes", probes, 1, integer=True)
    check_number("seed", seed, 0, integer=True)
    check_number("step", step, 0, integer=True)
    require_choice("loss", loss, LOSSES)
    if batch is not None:
        check_number("batch", batch, 1, integer=True)


def trace_and_route(
    which: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int = 1,
    seed: int = 0,
    loss: str = "cross_entropy",
    *,
    batch: int | None = None,
    step: int = 0,
    logits: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, str]:
    """The estimate, `which` "hessian" or "gn", and the route that it took (see the module).

    offset: the place of the first sample in its batch, so that parts of a batch add up to the estimate of the whole.
    """
    check_trace(probes, seed, loss, batch, step)
    check_batch(f"{which}_trace", model, x, y)
    require(
        logits is None or (logits.ndim == 2 and len(logits) == len(x)),
        f"logits must be those of x, ({len(x)}, K), got shape {tuple(logits.shape) if logits is not None else ()}",
    )
    with torch.autocast(x.device.type, enabled=False):
        value, route, z = _estimated(which, model, x, y, probes, seed, loss, batch, step, logits, offset)
    if not value.requires_grad:  # a trace that does not depend on θ, as of a linear model's MSE
        value = value + 0 * z.sum()
    return value, route


def _estimated(
    which: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    probes: int,
    seed: int,
    loss: str,
    batch: int | None,
    step: int,
    logits: Tensor | None,
    offset: int,
) -> tuple[Tensor, str, Tensor]:
    """As `trace_and_route`, with arguments checked, and logits that carry the graph."""
    params = [p for p in model.parameters() if p.requires_grad]
    require(bool(params), "model has no trainable parameter (none with requires_grad)")
    part = slice(0, min(batch or len(x), len(x)))
    probe = _Probe(which, probes, (seed, step), loss, offset)
    with torch.enable_grad():
        fits = logits is not None and logits.requires_grad and logits.dtype == params[0].dtype
        fits = fits and plain(model) is model  # the graph of a compiled network cannot be read
        z = logits if fits and logits is not None else logits_of(model, x[part])
        rows = part if fits else slice(None)
        require(z.requires_grad, "the logits do not depend on any trainable parameter")
        chain = chain_from(z, params, rows)
        if chain is not None:
            return _closed(probe, *chain, z[rows], y[part]), "closed form", z
        x, y = x[part], y[part]
        # dropout with masks of its own, and the stream outside not moved
        with Streams.aside(x.device, seed=_hash((seed, step))):
            if len(z) != len(x):
                z = logits_of(model, x)
            layers = _layers(which, model, x, y, loss)
            if layers is not None:
                return _layerwise(probe, model, x, layers), "layers", z
            head = head_from(z, params)
            if head is None and fits and ends_in_linear(z):
                # logits of copies of the parameters (engine "reverse"): the estimate must not depend on that
                z = logits_of(model, x)
                head = head_from(z, params)
            try:
                return _general(probe, model, x, y, params, head, z, _by_jets), "jets", z
            except NotImplementedError:  # no rule for an operation
                return _general(probe, model, x, y, params, head, z, _by_reverse), "reverse", z


class _Probe:
    """What to estimate, and the signs to do it with."""

    def __init__(self, which: str, count: int, key: tuple[int, int], loss: str, first: int) -> None:
        self.hessian = which == "hessian"
        self.count, self.key, self.loss, self.first = count, key, loss, first

    def signs(self, probe: int, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Of a parameter."""
        return signs_at(shape, 0, (*self.key, probe, place), like)

    def rows(self, probe: int, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Of samples, by their place in the batch."""
        return signs_at(shape, self.first, (*self.key, probe, place), like)

    def columns(self, z: Tensor) -> tuple[list[Tensor], float]:
        """Cotangents (N, K) of the logits, and the weight of each one's squared norm in the mean."""
        k = z.shape[1]
        if self.count >= (k - 1 if self.loss == "cross_entropy" else k):
            return factor_columns(z, self.loss), 1.0
        drawn = [logit_factor(z, self.rows(i, 0, tuple(z.shape), z), self.loss) for i in range(self.count)]
        return drawn, 1.0 / self.count


def _hash(key: tuple[int, int]) -> int:
    return (key[0] * 0x9E3779B1 + key[1] * 0x85EBCA77 + 1) % (1 << 62)


# -- multilayer perceptrons -----------------------------------------------------------------------------------------


def _closed(probe: _Probe, chain: Any, straight: bool, z: Tensor, y: Tensor) -> Tensor:
    columns, weight = probe.columns(z)
    total = weight * chain.gauss_newton(torch.stack(columns, 1))
    if probe.hessian and not straight:
        u = logit_gradient(z, y, probe.loss)
        if chain.depth <= 2:
            total = total + chain.residual(u)
        else:
            for i in range(probe.count):
                signs = [probe.rows(i, l + 1, tuple(s.shape), z) for l, s in enumerate(chain.slope)]
                total = total + chain.residual_sampled(u, signs, smooth=True) / probe.count
    return total.mean()


# -- per-example norms, layer by layer -------------------------------------------------------------------------------


class _LogitsOnly(nn.Module):
    """A network that returns logits alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out[0] if isinstance(out, tuple) else out


def _layers(which: str, model: nn.Module, x: Tensor, y: Tensor, loss: str) -> set[nn.Module] | None:
    """The layers that hold all trained parameters, if this route gives the trace; else None."""
    problem = Problem.of(_LogitsOnly(plain(model)), x, y, loss, randomness="freeze")
    if problem.coupled is not None:
        return None
    with problem.math():
        try:
            if examples_depend(problem) is not None:
                return None
            # only parts of a batch are looked at, which the layers found there must fit
            small = problem.part(slice(0, 2))
            small.row_modules = problem.row_modules
            look = capture(small)
        except (RuntimeError, NotImplementedError, AttributeError, KeyError):
            return None
        if look.others or (which == "hessian" and curved_activations(look) != []):
            return None
    return {site.module for site in look.sites}


def _layerwise(probe: _Probe, model: nn.Module, x: Tensor, layers: set[nn.Module]) -> Tensor:
    sites: list[Site] = []

    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        sites.append(Site(module, args[0], args[0]._version, get_gradient_edge(out)))

    handles = [m.register_forward_hook(hook, prepend=True) for m in layers]
    try:
        z = logits_of(model, x)
    finally:
        for handle in handles:
            handle.remove()
    require(
        all(s.a._version == s.version for s in sites),
        "model overwrites the input of a layer, which this penalty needs: use operations that are not in place",
    )
    columns, weight = probe.columns(z)
    edges = [s.edge for s in sites]
    captured = Captured(None, z, sites, [])  # type: ignore[arg-type]
    total = z.new_zeros(())
    for column in columns:
        cotangents = torch.autograd.grad(z, edges, column, create_graph=True, allow_unused=True)
        gram = gram_of(captured, [cotangents])
        assert gram is not None
        total = total + weight * gram.sum()
    return total / len(x)


# -- any network -------------------------------------------------------------------------------------------------------

Quadratic = Callable[[_Probe, nn.Module, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor | None], Tensor], Tensor]


def _general(
    probe: _Probe,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    params: Sequence[Tensor],
    head: Head | None,
    z: Tensor,
    quadratic: Quadratic,
) -> Tensor:
    """The last layer's own trace, exactly, and vᵀHv or vᵀGv with v = 0 there."""
    total = z.new_zeros(())
    exact: set[int] = set()
    if head is not None:
        exact = {id(p) for p in (head.weight, head.bias) if p is not None}
        beta = head.a.square().sum(1) + (head.bias is not None)
        total = (_logit_trace(z, probe.loss) * beta).mean()
    if all(id(p) in exact for p in params):
        return total
    for i in range(probe.count):
        v = [None if id(p) in exact else probe.signs(i, l, (p.numel(),), p).view(p.shape) for l, p in enumerate(params)]
        total = total + quadratic(probe, model, x, y, params, v, z) / probe.count
    return total


def _logit_trace(z: Tensor, loss: str) -> Tensor:
    """tr S_n, (N,)."""
    if loss == "cross_entropy":
        p = z.softmax(1)
        return (p * (1 - p)).sum(1)
    return torch.full_like(z[:, 0], 2.0)


def _by_jets(
    probe: _Probe,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    params: Sequence[Tensor],
    v: Sequence[Tensor | None],
    z: Tensor,
) -> Tensor:
    net = plain(model)
    with own_buffers(net), plain_attention(), Tape(params, fixed=[x], spelled_out=True) as tape:
        out = net(x)
    z0 = out[0] if isinstance(out, tuple) else out
    z1, z2 = tape.close(z0).run(v, second=probe.hessian)
    if z1 is None:
        raise NotImplementedError("a network whose operations do not show its parameters")
    value = (z1 * logit_hessian(z0, z1, probe.loss)).sum()
    if z2 is not None:
        value = value + (logit_gradient(z0, y, probe.loss) * z2).sum()
    return value / len(x)


def _by_reverse(
    probe: _Probe,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    params: Sequence[Tensor],
    v: Sequence[Tensor | None],
    z: Tensor,
) -> Tensor:
    some = [(p, t) for p, t in zip(params, v) if t is not None]
    moved = [p for p, _ in some]
    name = f"{'hessian' if probe.hessian else 'gn'}_trace"
    with PlainNorms(), plain_attention():
        z = logits_of(model, x)
    n = len(x)
    if not probe.hessian:
        # J v as the derivative of Jᵀw, linear in w, along v
        w = torch.zeros_like(z, requires_grad=True)
        dot = _dot(torch.autograd.grad(z, moved, w, create_graph=True, allow_unused=True), some)
        if dot is None:
            return z.new_zeros(())
        require_second_derivative(name, dot)
        (z1,) = torch.autograd.grad(dot, w, create_graph=True)
        return (z1 * logit_hessian(z, z1, probe.loss)).sum() / n
    wrong = next((kind for kind in graph_names(z) if any(part in kind for part in WRONG)), None)
    if wrong is not None:
        raise InputError(
            f"{name} needs a third derivative, which PyTorch has wrong for an operation of the model (graph node "
            f"{wrong}): use the function of torch.nn.functional, or plain operations"
        )
    u = logit_gradient(z, y, probe.loss) / n
    dot = _dot(torch.autograd.grad(z, moved, u, create_graph=True, allow_unused=True), some)
    if dot is None or not dot.requires_grad:
        return z.new_zeros(())
    require_second_derivative(name, dot)
    value = _dot(torch.autograd.grad(dot, moved, create_graph=True, allow_unused=True), some)
    return z.new_zeros(()) if value is None else value


def _dot(grads: Sequence[Tensor | None], some: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Σ ⟨g, v⟩, or None where no parameter has a part in it."""
    terms = [(g * t).sum() for g, (_, t) in zip(grads, some) if g is not None]
    return torch.stack(terms).sum() if terms else None
