"""Sharpness as an optimizer feels it (per mini-batch, preconditioned), and the margin bound on λ_max(G)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metacal.curvature.blocks import n_classes
from metacal.curvature.lanczos import lanczos
from metacal.curvature.layers import capture, examples_depend, per_example_gram
from metacal.curvature.loss import LogitLoss
from metacal.curvature.problem import check_vector
from metacal.curvature.products import Curvature
from metacal.curvature.sampling import Estimate
from metacal.curvature.spectrum import Eigen, check_search, flatten, gn_sharpness, start_vector, unflatten
from metacal.errors import InputError, require

__all__ = [
    "NormCertificate",
    "batch_sharpness",
    "gn_norm_certificate",
    "preconditioned_sharpness",
    "preconditioner_of",
]

_MOST_CLASSES = 4096  # of the margin bound, which takes K x K numbers for each example


def batch_sharpness(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor] | tuple[Tensor, Tensor, LogitLoss]],
    *,
    loss: LogitLoss = "cross_entropy",
    chunk_size: int | None = None,
    randomness: str = "refuse",
) -> Estimate:
    """Mean over mini-batches B of g_Bᵀ H_B g_B / ‖g_B‖² (Andreyev & Beneventano 2024): curvature along SGD's own step.

    `batches` yields (x, y), or (x, y, loss) where the loss has a number for each example. One gradient a batch and one
    second derivative along it (`Curvature.quadratic`; a Hessian product where the network has no tape). `stderr` is
    that of the mean over batches (nan for a single one); `draws` counts them. Batches whose gradient is exactly zero
    have no direction and are left out. Raises `InputError` for no batch, or none with a gradient, and as `Curvature`
    does.
    """
    values: list[float] = []
    seen = 0
    for batch in batches:
        require(
            isinstance(batch, (tuple, list)) and len(batch) in (2, 3),
            f"batches must yield (x, y), got {type(batch).__name__}",
        )
        seen += 1
        x, y, *given = batch
        with Curvature(
            model, x, y, loss=given[0] if given else loss, chunk_size=chunk_size, randomness=randomness
        ) as c:
            c.prepare()
            g = flatten(c.gradient())
            size = g.norm()  # divided out first: the square of a small gradient may underflow
            if not float(size) > 0:
                continue
            g = g / size
            values.append(c.quadratic(unflatten(g, c.params)))
            route = c.quadratic_route
    require(seen > 0, "batches must hold at least one mini-batch, got none")
    require(bool(values), f"the gradient is exactly zero in all {seen} mini-batches: batch sharpness is undefined")
    t = torch.tensor(values, dtype=torch.float64)
    stderr = float(t.std()) / math.sqrt(len(t)) if len(t) > 1 else math.nan
    return Estimate(float(t.mean()), stderr, route or "", len(t))


def preconditioner_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The diagonal P of Adam or AdamW at its present state, P = √(v/(1-β₂ᵗ)) + ε, like the trainable parameters.

    The step is then lr · P⁻¹ m̂. With `amsgrad` the running maximum takes v's place. Raises `InputError` for other
    optimizers, and for parameters that it does not hold or has not stepped yet.
    """
    require(
        isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)),
        f"preconditioner must be a list of tensors, or an Adam or AdamW optimizer, got {type(optimizer).__name__}",
    )
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    diagonal = []
    for name, p in getattr(model, "_orig_mod", model).named_parameters():
        if not p.requires_grad:
            continue
        require(id(p) in group_of, f"optimizer does not hold the model's parameter {name}")
        group, state = group_of[id(p)], optimizer.state.get(p, {})
        require("exp_avg_sq" in state, f"optimizer has no second moment for {name} yet: take a step first")
        second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        correction = 1 - group["betas"][1] ** float(state["step"])
        diagonal.append((second / correction).sqrt() + group["eps"])
    return diagonal


def preconditioned_sharpness(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    preconditioner: Sequence[Tensor] | torch.optim.Optimizer,
    tol: float = 1e-2,
    start: Sequence[Tensor] | None = None,
    *,
    loss: LogitLoss = "cross_entropy",
    max_products: int = 200,
    seed: int = 0,
    **options: Any,
) -> Eigen:
    """λ_max(P^-½ H P^-½) for a positive diagonal P: the sharpness that an adaptive optimizer feels (Cohen et al. 2022).

    `preconditioner`: P as a list of tensors like the trainable parameters, or an Adam or AdamW optimizer whose
    present P is taken (`preconditioner_of`). `Eigen.vector` is the eigenvector of the scaled matrix; pass it as `start`
    the next time. Raises `InputError` unless P is positive and finite.
    """
    check_search(tol, max_products)
    if isinstance(preconditioner, torch.optim.Optimizer):
        preconditioner = preconditioner_of(model, preconditioner)
    with Curvature(model, x, y, loss=loss, **options) as c:
        diagonal = flatten(check_vector(preconditioner, c.params, "preconditioner"))
        require(
            bool(torch.isfinite(diagonal).all()) and float(diagonal.min()) > 0,
            f"preconditioner must be positive and finite, its smallest entry is {float(diagonal.min())}",
        )
        scale = diagonal.rsqrt()
        c.prepare()
        flat, generator = start_vector(c, start, seed)
        if start is None:
            flat = flat * scale
        pairs, products = lanczos(
            lambda v: scale * flatten(c.hessian(unflatten(scale * v, c.params))),
            flat,
            tol=tol,
            max_products=max_products,
            generator=generator,
        )
        p = pairs[0]
        return Eigen(
            p.value, unflatten(p.vector, c.params), products, p.residual, p.bound, p.converged, c.hessian_route or ""
        )


@dataclass(frozen=True)
class NormCertificate:
    """λ_max(G) ≤ bound ≤ loose; ratio = value/bound (1 at most, unless the code is wrong).

    bound   2(K-1) · mean(‖J_i‖² e^{-m̂_i})
    loose   2(K-1) · max ‖J_i‖² · Q,  Q = mean e^{-m_i}
    """

    value: float
    bound: float
    loose: float

    @property
    def ratio(self) -> float:
        return self.value / self.bound if self.bound > 0 else (0.0 if self.value == 0 else math.inf)


def gn_norm_certificate(
    model: nn.Module, x: Tensor, y: Tensor, tol: float = 1e-2, *, chunk_size: int = 64
) -> NormCertificate:
    """Both sides of λ_max(G) ≤ 2(K-1) mean(‖J_i‖²_op e^{-m̂_i}) for cross-entropy.

    ‖J_i‖² is the largest eigenvalue of the K × K matrix J_i J_iᵀ, which takes K reverse passes of the batch: meant for
    small networks and subsets, and for 4,096 classes at most. m̂_i is the margin of the predicted class, m_i that of
    the label. The inequality: by Gershgorin λ_max(S_i) ≤ 2 max_k p_k(1-p_k) ≤ 2(1 - max p) ≤ 2(K-1)e^{-m̂_i}.

    Raises `InputError` where examples depend on each other, by the way that a batch takes too, and for more classes.
    """
    squared, predicted, true = [], [], []
    c = Curvature(model, x, y)
    with c.problem.math():
        why = examples_depend(c.problem)
        if why is not None:
            raise InputError(f"a per-example Jacobian is meaningless, since {why}: use evaluation mode")
        k = n_classes(c.problem)
        require(
            k <= _MOST_CLASSES,
            f"the margin bound needs a matrix of K x K numbers and K reverse passes: {_MOST_CLASSES} classes at most, "
            f"got {k}",
        )
        for part in c.problem.parts(max(1, min(chunk_size, (1 << 24) // k**2))):
            captured = capture(part)
            z = captured.z.detach()
            n = len(z)
            columns = torch.eye(k, dtype=z.dtype, device=z.device).expand(n, k, k)
            squared.append(torch.linalg.eigvalsh(per_example_gram(captured, columns).double())[:, -1])
            z = z.double()
            top = z.topk(2).values
            predicted.append(top[:, 0] - top[:, 1])
            own = z.gather(1, part.y[:, None])[:, 0]
            true.append(own - z.scatter(1, part.y[:, None], -math.inf).amax(1))
        c.problem.check_ways()
    value = gn_sharpness(model, x, y, tol=tol, chunk_size=None).value
    j, m_hat, m = torch.cat(squared), torch.cat(predicted), torch.cat(true)
    factor = 2 * (captured.z.shape[1] - 1)
    return NormCertificate(
        value, float(factor * (j * (-m_hat).exp()).mean()), float(factor * j.max() * (-m).exp().mean())
    )
