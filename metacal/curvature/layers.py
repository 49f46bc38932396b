"""Per-example gradients, layer by layer, without forming them.

For logits z_n of example n and cotangents w_n^c (c = 1..C), `per_example_gram` returns

    M_n[c, c'] = ⟨J_nᵀ w_n^c, J_nᵀ w_n^c'⟩        (N, C, C)

so with C = 1 the squared per-example gradient norms. One forward pass keeps every layer's input a; a reverse pass
that stops at the layers' outputs gives the cotangents d there; the weight gradient Σ_t d_t a_tᵀ (t: positions)
enters only through its inner products:

    Linear          ⟨a, a⟩⟨d, d'⟩, and ⟨d, d'⟩ for the bias; over several positions Σ_tt' ⟨a_t, a_t'⟩⟨d_t, d'_t'⟩ or the
                    explicit product, whichever is the cheaper; all columns share what depends on a alone
    Conv2d          the same on unfolded patches, group by group
    BatchNorm (evaluation mode), GroupNorm, LayerNorm     Σ_t d_t∘x̂_t and Σ_t d_t, x̂ the normalised input

A layer is taken only if the autograd graph shows that each of its parameters is used exactly once and the layer
ran exactly once. All other parameters (tied, shared, plain ones, unknown layers) go through a per-example
vector-Jacobian product under `torch.func.vmap`, and where that fails through a loop over the examples: slower, same
numbers. Outputs are hooked by their gradient edge, taken inside the forward hook, so a later in-place
operation on them does no harm; an input that was overwritten sends its layer down the generic path.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from metacal.autodiff.derivatives import filled
from metacal.autodiff.graph import leaf_uses
from metacal.curvature.problem import OtherWay, Problem, tolerance_of
from metacal.errors import require

__all__ = [
    "Captured",
    "capture",
    "column_norms",
    "examples_depend",
    "gram_of",
    "per_example_gram",
]

BLOCK = 1 << 23  # entries of a temporary array; larger batches are worked off in blocks
CPU_BLOCK = 1 << 20  # the same for patches and cotangents on a CPU: what fits its caches takes half the time
COTANGENTS = 1 << 26  # entries of the cotangents at all layers that are held at a time


@dataclass
class Site:
    """One layer that the layer-wise formulas cover: its input, and where its output's gradient passes."""

    module: nn.Module
    a: Tensor
    version: int
    edge: GradientEdge


@dataclass
class Captured:
    """One forward pass: logits with their graph, the covered layers, and the names of all other used parameters."""

    problem: Problem
    z: Tensor
    sites: list[Site]
    others: list[str]

    @property
    def method(self) -> str:
        if not self.others:
            return "layers"
        return "per-example vjp" if not self.sites else "layers + per-example vjp"


def _covered(module: nn.Module) -> bool:
    """Whether the module runs exactly the operation that the formulas below are for, with parameters of its own."""
    if "forward" in module.__dict__ or {"weight", "bias"} - module._parameters.keys():
        return False  # a weight that is made of other parameters (weight_norm and its kin) is none of its own
    kind: Any = type(module)
    if isinstance(module, nn.Linear):
        return kind.forward is nn.Linear.forward
    if isinstance(module, nn.Conv2d):
        return kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward
    if isinstance(module, _BatchNorm):
        plain = kind.forward is _BatchNorm.forward
        return plain and not module.training and module.running_mean is not None
    if isinstance(module, nn.GroupNorm):
        return kind.forward is nn.GroupNorm.forward
    return isinstance(module, nn.LayerNorm) and kind.forward is nn.LayerNorm.forward


def examples_depend(problem: Problem) -> str | None:
    """Why per-example gradients are meaningless for this network, or None. Inside `problem.math()`.

    BatchNorm in training mode is recognised by its type; anything else by evaluating one example alone and beside
    another. The same two evaluations find the covered layers whose input has one row an example (kept in
    `problem.row_modules`): a sequence-first layout (T, N, D) with T = N by accident would pass a test of shapes.
    """
    if problem.coupled is not None:
        return problem.coupled
    fits: list[set[nn.Module]] = []
    logits: list[Tensor] = []
    pair = problem.x[:2] if len(problem) > 1 else torch.cat([problem.x, problem.x])
    for m in (2, 1):
        seen: set[nn.Module] = set()

        def hook(module: nn.Module, args: tuple[Any, ...], out: Any, m: int = m, seen: Any = seen) -> None:
            if len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim > 0 and len(args[0]) == m:
                seen.add(module)

        handles = [a.register_forward_hook(hook) for a in problem.model.modules() if _covered(a)]
        try:
            with torch.no_grad():
                logits.append(problem.logits(x=pair[:m])[0])
        finally:
            for handle in handles:
                handle.remove()
        fits.append(seen)
    problem.row_modules = fits[0] & fits[1]
    together, alone = logits
    if problem.random or not bool(torch.isfinite(torch.stack(logits)).all()):
        return None  # the checks of the whole batch say where logits are not finite
    problem.part(slice(0, 1)).note(alone[None])
    tolerance = tolerance_of(alone)
    if torch.allclose(together, alone, rtol=tolerance, atol=tolerance * float(alone.abs().max())):
        return None
    with torch.no_grad():
        problem.part(slice(0, 1)).logits()  # which raises where two passes of the same differ
    return str(OtherWay())


def capture(problem: Problem, graph: bool = False) -> Captured:
    """Run the network once and find out which parameters the layer-wise formulas cover. Inside `problem.math()`.

    graph: keep the layers' inputs with their graphs, for norms that can be differentiated in θ, and check nothing.
    """
    if problem.row_modules is None:
        examples_depend(problem)
    rows = problem.row_modules or set()
    runs_of: dict[nn.Module, list[Site]] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        plain = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(out, Tensor)
        if plain and out.requires_grad and len(args[0]) == len(problem):
            a = args[0] if graph else args[0].detach()
            runs_of.setdefault(module, []).append(Site(module, a, a._version, get_gradient_edge(out)))

    handles = [
        m.register_forward_hook(hook, prepend=True)
        for m in problem.model.modules()
        if m in rows and any(p.requires_grad for p in m.parameters(recurse=False))
    ]
    try:
        z = problem.logits()
    finally:
        for handle in handles:
            handle.remove()
    if not graph:
        problem.check_logits(z)
    require(z.requires_grad, "logits do not depend on any trainable parameter")
    uses = leaf_uses(z)
    sites: list[Site] = []
    taken: set[int] = set()
    for module, runs in runs_of.items():
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        intact = runs[0].a._version == runs[0].version
        if len(runs) == 1 and intact and all(uses[id(p)] == 1 for p in trained):
            sites.append(runs[0])
            taken.update(id(p) for p in trained)
    others = [n for n, p in zip(problem.names, problem.params) if id(p) not in taken and uses[id(p)] > 0]
    return Captured(problem, z, sites, others)


# -- the formulas ----------------------------------------------------------------------------------------------


def _gram(rows: Tensor) -> Tensor:
    """(n, C, m) → (n, C, C)."""
    if rows.shape[1] == 1:
        return rows.square().sum(2)[:, :, None]
    return rows @ rows.transpose(1, 2)


def _outer_gram(u: Tensor, d: Tensor) -> Tensor:
    """Inner products of the matrices Σ_t d_t u_tᵀ: u (n, g, i, T), d (n, C, g, o, T) → (n, C, C)."""
    i, t = u.shape[2:]
    n, c, o = d.shape[0], d.shape[1], d.shape[3]
    if t == 1:
        dd = d[..., 0].permute(0, 2, 1, 3)  # (n, g, C, o)
        uu = u[..., 0].square().sum(2)  # (n, g)
        return torch.einsum("ng,ngcd->ncd", uu, dd @ dd.transpose(2, 3))
    explicit = c * t * o * i + c * c * o * i
    paired = t * t * i + c * t * t * o + c * c * t * o
    # all columns in the rows of one matrix: a broadcast product would copy u for each of them
    rows = d.transpose(1, 2).reshape(n, d.shape[2], c * o, t)
    if explicit <= paired:
        return _gram(_columns_first(rows @ u.transpose(2, 3), c))
    moved = _columns_first(rows @ (u.transpose(2, 3) @ u), c)
    return d.reshape(n, c, -1) @ moved.transpose(1, 2)


def _columns_first(rows: Tensor, c: int) -> Tensor:
    """(n, g, C·o, m) → (n, C, g·o·m)."""
    n, g, _, m = rows.shape
    return rows.reshape(n, g, c, -1, m).transpose(1, 2).reshape(n, c, -1)


def _linear(module: nn.Linear, a: Tensor, d: Tensor) -> Iterator[Tensor]:
    n, c = d.shape[:2]
    d = d.reshape(n, c, -1, module.out_features).transpose(2, 3)  # (n, C, o, T)
    if module.weight.requires_grad:
        yield _outer_gram(a.reshape(n, 1, -1, module.in_features).transpose(2, 3), d[:, :, None])
    if module.bias is not None and module.bias.requires_grad:
        yield _gram(d.sum(3))


def _conv2d(module: nn.Conv2d, a: Tensor, d: Tensor) -> Iterator[Tensor]:
    n, c = d.shape[:2]
    d = d.reshape(n, c, module.out_channels, -1)
    if module.weight.requires_grad:
        (kh, kw), (dh, dw) = module.kernel_size[:2], module.dilation[:2]
        if module.padding == "same":
            th, tw = dh * (kh - 1), dw * (kw - 1)
            pad = [tw // 2, tw - tw // 2, th // 2, th - th // 2]
        elif isinstance(module.padding, str):
            pad = [0, 0, 0, 0]
        else:
            ph, pw = module.padding
            pad = [int(pw), int(pw), int(ph), int(ph)]
        if any(pad):
            a = F.pad(a, pad, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
        if (kh, kw) == (1, 1):
            u = a[:, :, :: module.stride[0], :: module.stride[1]].flatten(2)
        else:
            u = F.unfold(a, module.kernel_size, dilation=module.dilation, stride=module.stride)
        g = module.groups
        yield _outer_gram(u.reshape(n, g, -1, u.shape[-1]), d.reshape(n, c, g, -1, d.shape[-1]))
    if module.bias is not None and module.bias.requires_grad:
        yield _gram(d.sum(3))


def _norm(module: Any, a: Tensor, d: Tensor) -> Iterator[Tensor]:
    n, c = d.shape[:2]
    shape = module.weight.shape if module.weight is not None else module.bias.shape
    if isinstance(module, nn.LayerNorm):
        normed = F.layer_norm(a, module.normalized_shape, None, None, module.eps)
        normed, d = normed.reshape(n, 1, -1, shape.numel()), d.reshape(n, c, -1, shape.numel())
        over = 2
    else:
        if isinstance(module, nn.GroupNorm):
            normed = F.group_norm(a, module.num_groups, None, None, module.eps)
        else:
            normed = F.batch_norm(a, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
        normed, d = normed.reshape(n, 1, shape.numel(), -1), d.reshape(n, c, shape.numel(), -1)
        over = 3
    if module.weight is not None and module.weight.requires_grad:
        yield _gram((d * normed).sum(over))
    if module.bias is not None and module.bias.requires_grad:
        yield _gram(d.sum(over))


def _site_gram(site: Site, d: Tensor) -> Tensor:
    """(n, C, C) for one layer from its cotangents d (n, C, *output shape), in blocks of examples."""
    module, n, c = site.module, d.shape[0], d.shape[1]
    rule: Callable[..., Iterator[Tensor]] = _norm
    largest = max(site.a[0].numel(), d[0].numel())
    if isinstance(module, nn.Conv2d):
        rule = _conv2d
        positions = d[0, 0].numel() // module.out_channels
        patches = module.weight[0].numel() * positions * module.groups
        largest = max(largest, patches, c * module.weight.numel())
    elif isinstance(module, nn.Linear):
        rule = _linear
        largest = max(largest, c * module.weight.numel() if d.ndim > 3 else 0)
    step = max(1, (CPU_BLOCK if d.device.type == "cpu" else BLOCK) // largest)
    blocks = []
    for i in range(0, n, step):
        total: Any = 0
        for term in rule(module, site.a[i : i + step], d[i : i + step]):
            total = total + term
        blocks.append(total)
    return torch.cat(blocks)


# -- parameters outside the covered layers -------------------------------------------------------------------------


def _other_gram(captured: Captured, w: Tensor) -> Tensor:
    """(n, C, C) over the parameters `captured.others`, by one vector-Jacobian product an example."""
    problem = captured.problem
    require(
        problem.randomness == "refuse" or not problem.random,
        f"per-example gradients of {captured.others[0]} need evaluations of single examples, which would draw other "
        "masks than the batch: call model.eval()",
    )
    chosen = {n: p.detach() for n, p in zip(problem.names, problem.params) if n in set(captured.others)}

    def rows(xn: Tensor, wn: Tensor) -> tuple[Tensor, Tensor]:
        z, pull = torch.func.vjp(lambda sub: problem.logits(sub, xn[None])[0], chosen)  # type: ignore[misc]
        per_class = [torch.cat([g.reshape(-1) for g in pull(wc)[0].values()]) for wc in wn]
        return torch.stack(per_class), z

    n, c = w.shape[:2]
    size = sum(p.numel() for p in chosen.values())
    step = max(1, min(64, BLOCK // (c * size)))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # functions that vmap takes one by one
            grams, logits = [], []
            for i in range(0, n, step):
                gradients, z = torch.func.vmap(rows)(problem.x[i : i + step], w[i : i + step])
                grams.append(_gram(gradients))
                logits.append(z)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
    else:
        problem.note(torch.cat(logits), alone=True)
        return torch.cat(grams)
    leaves = [p for n, p in zip(problem.names, problem.params) if n in chosen]
    grams = []
    for i in range(n):
        z = problem.part(slice(i, i + 1)).logits()
        per_class = [
            torch.autograd.grad(z, leaves, w[i, j][None], retain_graph=True, allow_unused=True) for j in range(c)
        ]
        flat = [torch.cat([g.reshape(-1) for g in filled(grads, leaves)]) for grads in per_class]
        grams.append(_gram(torch.stack(flat)[None]))
    return torch.cat(grams)


def gram_of(captured: Captured, columns: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
    """(n, C, C) over the covered layers, given the cotangents at their outputs: C tuples, one entry a layer."""
    total: Tensor | None = None
    for site, ds in zip(captured.sites, zip(*columns)):
        some = next((d for d in ds if d is not None), None)
        if some is None:
            continue
        d = torch.stack([torch.zeros_like(some) if d is None else d for d in ds], 1)
        gram = _site_gram(site, d)
        total = gram if total is None else total.add_(gram)
    return total


def column_norms(captured: Captured, columns: Sequence[Tensor], graph: bool = False) -> Tensor:
    """Σ_c ‖J_nᵀ w_n^c‖² (n,) for cotangents w^c (n, K), as many columns at a time as memory allows.

    graph: to be differentiated in θ, of a pass `capture`d for it.
    """
    z = captured.z
    size = max(z.numel(), sum(s.a.numel() for s in captured.sites))
    group = max(1, min(len(columns), COTANGENTS // size, math.isqrt(COTANGENTS // len(z))))
    total: Tensor | None = None
    for i in range(0, len(columns), group):
        gram = per_example_gram(captured, torch.stack(list(columns[i : i + group]), 1), graph)
        part = gram.diagonal(dim1=1, dim2=2).sum(1)
        total = part if total is None else total + part
    assert total is not None
    return total


def per_example_gram(captured: Captured, w: Tensor, graph: bool = False) -> Tensor:
    """M_n[c, c'] = ⟨J_nᵀ w_n^c, J_nᵀ w_n^c'⟩ for cotangents w (N, C, K) → (N, C, C). Inside `problem.math()`."""
    n, c = w.shape[:2]
    total = torch.zeros(n, c, c, dtype=w.dtype, device=w.device)
    if captured.sites:
        edges = [s.edge for s in captured.sites]
        columns = [
            torch.autograd.grad(captured.z, edges, w[:, j], retain_graph=True, create_graph=graph, allow_unused=True)
            for j in range(c)
        ]
        gram = gram_of(captured, columns)
        total = total if gram is None else gram
    if captured.others:
        total = total + _other_gram(captured, w)
    return total
