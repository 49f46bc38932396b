"""SGD kept out of the sharpest directions: the update without its part in the span of the top k eigenvectors.

Source: "Too Sharp, Too Sure: When Calibration Follows Curvature" (arXiv 2604.20614), which compares the paths of SGD
and BulkSGD for k = 1, 3, 5.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.weak import WeakTensorKeyDictionary

from metacal import ranks
from metacal.curvature.spectrum import top_eigenpairs
from metacal.errors import InputError, require, require_choice
from metacal.optim.basic import SGDOptions, decay, momentum, rate
from metacal.optim.through import THROUGH, sgd_through
from metacal.optim.transpose import TRANSPOSES, Cotangents, by_groups, sgd_group
from metacal.options import option

__all__ = ["BulkSGD", "BulkSGDOptions"]

MATRICES = {"hessian": "hessian", "gauss_newton": "gn"}
VECTORS, STEPS = "bulk_vectors", "bulk_steps"  # keys in the state of a parameter; steps in that of the first one


@dataclass
class BulkSGDOptions(SGDOptions):
    """`BulkSGD`."""

    lr: float = rate(0.03)
    weight_decay: float = decay(0.0)
    momentum: float = momentum(0.0)
    k: int = option(1, "eigenvectors that are projected out", low=1)
    matrix: str = option("hessian", "whose eigenvectors", choices=tuple(MATRICES))
    every: int = option(1, "steps between new eigenvectors", low=1)
    tolerance: float = option(1e-3, "of the eigenvalues, relative", above=0, below=1)

    def build(self, module: nn.Module, loss: str = "cross_entropy") -> BulkSGD:
        own: dict[str, Any] = {"k": self.k, "matrix": self.matrix, "every": self.every, "tol": self.tolerance}
        return BulkSGD(self.groups(module), self.lr, module, loss=loss, **own, **self.momenta())


class BulkSGD(SGD):
    """SGD whose displacement has no part in the span of the top k eigenvectors of the Hessian or Gauss-Newton matrix.

        θ' = θ + P Δ,    P = I − V (VᵀV)⁻¹ Vᵀ,    Δ = the displacement of torch.optim.SGD

    Δ is whole: with momentum, Nesterov and weight decay, over all groups and their rates (one rate: P Δ = −lr · P d).
    The momentum buffer itself is SGD's and is not projected. V (P, k) holds the eigenvectors of the k algebraically
    largest eigenvalues, of the matrix of the mean `loss` on the batch given to `prepare`, whatever loss and penalties
    the gradients come from. Parameters without a gradient do not move; P is then that of the others' entries of V.

    The constructor has all keys of torch.optim.SGD beside its own.

    Args:
        params: the parameters of `model` that require a gradient, or groups of them; frozen ones may be among them.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach: as in torch.optim.SGD.
        model: maps x to logits (N, K); its present mode is used, its buffers are left alone, and it is not saved.
        k: number of eigenvectors, 1 <= k < number of parameter entries. G has at most N (K − 1) positive eigenvalues
            on N examples; beyond that the directions are arbitrary.
        matrix: "hessian" or "gauss_newton".
        loss: "cross_entropy" or "mse", for the matrix.
        every: the vectors are computed anew before every so many-th step, and reused in between.
        tol: relative error of the eigenvalues at which Lanczos stops. An eigenvector's own error goes like √tol times
            √(eigenvalue / gap to the next).
        max_products: limit on matrix products for one `prepare`, by default 50 + 10 k.
        seed: of the random part of a start vector and of the dropout mask that `prepare` holds, in training mode.

    The arguments are torch.optim.SGD's and those of the eigenvectors. In a loop of one's own:

        optimizer.prepare(x, y); loss.backward(); optimizer.step()

    The order of the first two is free, as long as the parameters do not move. Each parameter's state holds its part of
    the vectors, `(k, *shape)`, so `state_dict` carries them and a resumed run goes on bit for bit.

    Attributes, of the last `prepare` that computed and not saved: `eigenvalues`, `products`, `converged`.

    Raises:
        InputError: for k outside 1..number of entries − 1, an unknown matrix or loss, params that are not the model's,
            settings out of range, a step without vectors; in `prepare` what `metacal.curvature.Curvature` refuses.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        model: nn.Module,
        k: int = BulkSGDOptions.k,
        matrix: str = BulkSGDOptions.matrix,
        momentum: float = BulkSGDOptions.momentum,
        weight_decay: float = BulkSGDOptions.weight_decay,
        loss: str = "cross_entropy",
        every: int = BulkSGDOptions.every,
        *,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        tol: float = BulkSGDOptions.tolerance,
        max_products: int | None = None,
        seed: int = 0,
    ) -> None:
        require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}")
        require_choice("matrix", matrix, MATRICES)
        require_choice("loss", loss, ("cross_entropy", "mse"))
        require(every >= 1, f"every must be >= 1, got {every}")
        require(0 < tol < 1, f"tol must lie in (0, 1), a relative error, got {tol}")
        require(max_products is None or max_products > k, f"max_products must be > k = {k}, got {max_products}")
        try:
            super().__init__(
                params,
                lr=lr,
                momentum=momentum,
                dampening=dampening,
                weight_decay=weight_decay,
                nesterov=nesterov,
                maximize=maximize,
                foreach=foreach,
            )
        except ValueError as error:
            raise InputError(str(error)) from None
        self.model, self.k, self.matrix, self.loss, self.every = model, k, matrix, loss, every
        self.tol, self.max_products, self.seed = tol, max_products, seed
        self.eigenvalues: list[float] = []
        self.products = 0
        self.converged: bool | None = None
        size = sum(p.numel() for p in self._trained())
        require(1 <= k < size, f"k must be at least 1 and below the {size} trainable parameters, got {k}")

    # -- the eigenvectors ----------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the coming step needs vectors of its own, so that `prepare` will compute them."""
        return not any(VECTORS in self.state.get(p, ()) for p in self._params()) or self._steps() % self.every == 0

    @property
    def vectors(self) -> list[list[Tensor | None]]:
        """The k unit vectors, each a list like the parameters in the groups' order (None: frozen); empty before any."""
        parts = [self.state[p].get(VECTORS) if p in self.state else None for p in self._params()]
        count = next((len(part) for part in parts if part is not None), 0)
        return [[None if part is None else part[i] for part in parts] for i in range(count)]

    def prepare(self, x: Tensor, y: Tensor, chunk_size: int | None = None) -> bool:
        """Compute the eigenvectors at the present parameters on the batch `(x, y)`, if they are `due`.

        x, y: inputs and int64 labels (N,). chunk_size: how many examples are differentiated at a time, for batches that
        do not fit, in networks that draw no random numbers and do not couple examples. Lanczos starts from the sum of
        the last vectors. With several ranks each gives its share of the batch. Returns whether anything was computed.
        """
        if not self.due:
            return False
        trained = self._trained()
        last = [self.state[p].get(VECTORS) if p in self.state else None for p in trained]
        start = None
        if any(part is not None for part in last):
            start = [torch.zeros_like(p) if part is None else part.sum(0) for p, part in zip(trained, last)]
        pairs = top_eigenpairs(
            self.model,
            x,
            y,
            self.k,
            matrix=MATRICES[self.matrix],
            tol=self.tol,
            start=start,
            loss=self.loss,
            max_products=self.max_products,
            seed=self.seed + self._steps(),
            randomness="freeze" if chunk_size is None else "refuse",
            chunk_size=chunk_size,
            across=ranks.size() > 1,
        )
        for p in self._params():
            if p in self.state:
                self.state[p].pop(VECTORS, None)
        for p, *parts in zip(trained, *(pair.vector for pair in pairs)):
            self.state[p][VECTORS] = torch.stack(parts)
        self.eigenvalues = [pair.value for pair in pairs]
        self.products = pairs[0].products
        self.converged = all(pair.converged for pair in pairs)
        return True

    # -- the step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def project(self, tensors: Sequence[Tensor | None]) -> None:
        """Apply P in place to a vector in parameter space: tensors like the parameters, in the groups' order.

        None stands for a parameter that the step does not move; P is then the projection within the entries of the
        others, orthogonal to their part of V. P is symmetric, so it is its own transpose.
        """
        params = self._params()
        require(len(tensors) == len(params), f"tensors must hold {len(params)}, one per parameter, got {len(tensors)}")
        _project([self.state[p].get(VECTORS) if p in self.state else None for p in params], tensors)

    def projection(self, params: Sequence[Tensor]) -> Callable[[list[Tensor | None]], list[Tensor | None]]:
        """P of the coming step on tensors like `params`, the same also when the vectors have changed since."""
        position = {p: i for i, p in enumerate(params)}
        moving = [p for p in self._params() if p.grad is not None]
        vectors = [self.state[p].get(VECTORS) for p in moving]

        @torch.no_grad()
        def project(tensors: list[Tensor | None]) -> list[Tensor | None]:
            filled = [tensors[position[p]] if p in position else None for p in moving]
            filled = [torch.zeros_like(p) if t is None else t for p, t in zip(moving, filled)]
            _project(vectors, filled)
            result = list(tensors)
            for p, t in zip(moving, filled):
                if p in position:
                    result[position[p]] = t
            return result

        return project

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """θ' = θ + P Δ with the last vectors. A closure computes the gradients first; its loss is returned."""
        params = self._params()
        require(
            any(VECTORS in self.state.get(p, ()) for p in params), "prepare(x, y) must be called before the first step"
        )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        old = [None if p.grad is None else p.detach().clone() for p in params]
        # SGD's step itself, without torch's wrapper around it, which would run this optimizer's step hooks again
        inspect.unwrap(SGD.step)(self)
        for p, before in zip(params, old):
            if before is not None:
                p.sub_(before)
        self.project([None if before is None else p for p, before in zip(params, old)])
        for p, before in zip(params, old):
            if before is not None:
                p.add_(before)
        self.state[params[0]][STEPS] = self._steps() + 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`; one of plain SGD will do, its next step needs `prepare`.

        Raises `InputError` if it holds another number of vectors than k.
        """
        counts = {len(entries[VECTORS]) for entries in state_dict["state"].values() if VECTORS in entries}
        require(counts <= {self.k}, f"state_dict must hold k = {self.k} vectors, got {sorted(counts)}")
        super().load_state_dict(state_dict)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _steps(self) -> int:
        first = self._params()[0]
        return self.state[first].get(STEPS, 0) if first in self.state else 0

    def _trained(self) -> list[Tensor]:
        """The model's trainable parameters, in its order, which must be the optimizer's."""
        model: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        own, theirs = {p for p in self._params() if p.requires_grad}, set(model)
        require(
            own == theirs,
            "params must be all trainable parameters of the model, since the matrix is taken over these: "
            f"{len(theirs - own)} of the model's are missing, {len(own - theirs)} belong to something else",
        )
        return model

    def __getstate__(self) -> dict[str, Any]:
        # torch's keeps three entries, which would leave a copy without its settings and its model
        settings = ("model", "k", "matrix", "loss", "every", "tol", "max_products", "seed")
        found = ("eigenvalues", "products", "converged")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in settings + found}}


def _project(vectors: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> None:
    """P in place, within the entries of the tensors that are given; vectors: each parameter's part of V."""
    pairs = [(v, t) for v, t in zip(vectors, tensors) if v is not None and t is not None]
    if not pairs:
        return
    rows = [v.flatten(1) for v, _ in pairs]
    inverse = _inverse_gram([v for v, _ in pairs])
    for _ in range(2):  # once leaves a part of the size of rounding errors of the whole
        along = torch.stack([row @ t.flatten() for row, (_, t) in zip(rows, pairs)]).sum(0)
        along = (inverse @ along.double()).to(along.dtype)
        for row, (_, t) in zip(rows, pairs):
            t.sub_((along @ row).view(t.shape))


_INVERSES: Any = WeakTensorKeyDictionary()  # of the first of several parts: all of them, their versions, the inverse


def _inverse_gram(parts: list[Tensor]) -> Tensor:
    """(V Vᵀ)⁺ `(k, k)` of these parts of the vectors, computed once for all steps that they serve.

    I off rounding where nothing is left out; the pseudo-inverse also serves parts that are dependent.
    """
    versions = [v._version for v in parts]
    known = _INVERSES.get(parts[0])
    if known is not None and known[1] == versions and all(a is b for a, b in zip(known[0], parts[1:])):
        return known[2]
    gram = torch.stack([v.flatten(1).double() @ v.flatten(1).double().T for v in parts]).sum(0)
    rtol = 100 * torch.finfo(parts[0].dtype).eps
    inverse = torch.linalg.pinv(gram.cpu(), hermitian=True, rtol=rtol).to(gram.device)
    _INVERSES[parts[0]] = parts[1:], versions, inverse
    return inverse


def _transpose(optimizer: BulkSGD, params: Sequence[Tensor]) -> Callable[[Cotangents], tuple[Cotangents, float]]:
    """v = (SGD's own transpose) P u, with P constant and symmetric.

    P couples all parameters that the step moves: where M does not depend on one of them, it may still move another on
    which M depends.
    """
    project, apply = optimizer.projection(params), by_groups(sgd_group, optimizer, params)
    return lambda cotangents: apply(project(cotangents))


TRANSPOSES[BulkSGD] = _transpose
THROUGH[BulkSGD] = sgd_through
