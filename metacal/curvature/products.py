"""Products with the Jacobian, the Gauss-Newton matrix and the Hessian of a classifier, without any of the matrices.

With J_n = ∂z_n/∂θ and S_n, u as in `problem`:

    J v            (N, K)   how the logits move along v
    Jᵀ w           like θ   Σ_n J_nᵀ w_n
    G v = 1/N Σ_n J_nᵀ S_n J_n v
    H v = ∇²L v = G v + R v,   R = Σ_nk u_nk ∇²z_nk

The formulas are in `metacal.autodiff.derivatives`. Two routes lead there; F is one forward pass and a reverse pass
costs about 2F.

`tape`      Carry derivatives along the recorded forward pass (`metacal.autodiff.tape`), whose values are there already:
            J v costs 2F, G v 4F, and H v, for which the run is differentiated, 5F. Needs a rule for every function.
`reverse`   Record Jᵀu once as a graph in u and θ, with normalisations spelled out: its derivative along v in u is J v,
            in θ H v. 2F to 4F for J v, after 3F once. Needs a second derivative of every function.

The tape is tried first. The first product of each operator is verified at no cost: ⟨w, J v⟩ must equal ⟨Jᵀw, v⟩, where
Jᵀw is an ordinary backward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from metacal.autodiff.derivatives import (
    dot,
    dots,
    filled,
    hv_along,
    hv_by_reverse,
    jv_by_reverse,
    pulled_back,
    recorded_gradient,
)
from metacal.autodiff.plain import PlainNorms
from metacal.autodiff.tape import Tape
from metacal.curvature.blocks import cache_block
from metacal.curvature.layers import examples_depend
from metacal.curvature.loss import LogitLoss, logit_gradient, logit_hessian, mean_loss
from metacal.curvature.problem import Problem, check_vector
from metacal.errors import InputError, require

__all__ = ["Curvature", "ggn_product", "hessian_product"]

ROUTES = ("tape", "reverse")


@dataclass
class _Recorded:
    """One chunk's logits with their graph, and the tape; or, by reverse passes, u(z) and g = Jᵀu."""

    z: Tensor
    tape: Tape | None
    u: Tensor | None = None
    g: list[Tensor | None] | None = None


class Curvature:
    """G and H of the mean loss at the network's present parameters, as operators on lists of tensors.

    The graphs are recorded at the first product and kept until `release()` (or the end of a `with` block), so a
    Lanczos run pays for them once. With `chunk_size` below N only one chunk's graphs live at a time: each product
    rebuilds them, and the result is the same up to rounding.

    With `across`, x and y are this rank's share of the N examples, maybe none: every rank makes the same products,
    which sum over ranks, and J v is of its own examples.

    Arguments: `model` maps x to logits (N, K), in whatever mode it is; labels `y` (N,); `loss` "cross_entropy" or
    "mse"; `route` "auto" or one of `ROUTES`; `randomness` "refuse" or "freeze" (see `Problem.of`). Vectors are lists of
    tensors, shaped and ordered like the trainable entries of `model.parameters()`.

    Attributes: `params`, `size` (their number of entries), `logits` (N, K) detached, `loss_value`; `gn_route`,
    `hessian_route` and `quadratic_route` after the first product of each kind.

    Raises `InputError` for bad arguments (`Problem.of`, `Problem.logits`), a batch split where the examples
    depend on each other, parameters changed after the graphs were recorded, and a network for which no route works.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        loss: LogitLoss = "cross_entropy",
        chunk_size: int | None = None,
        route: str = "auto",
        randomness: str = "refuse",
        seed: int = 0,
        across: bool = False,
    ) -> None:
        require(route in ("auto", *ROUTES), f"route must be one of auto, {', '.join(ROUTES)}, got {route!r}")
        self.problem = Problem.of(model, x, y, loss, randomness, seed, across=across)
        self._keep_all = chunk_size is None
        with self.problem.math():
            self._parts = self.problem.parts(cache_block(self.problem) if chunk_size is None else chunk_size)
            if len(self._parts) > 1:
                why = examples_depend(self.problem)
                require(why is None, f"chunk_size={chunk_size} < {len(x)} examples changes the result, since {why}")
        self.params = self.problem.params
        self.size = sum(p.numel() for p in self.params)
        self.gn_route: str | None = None
        self.hessian_route: str | None = None
        self.quadratic_route: str | None = None
        self._routes = list(ROUTES) if route == "auto" else [route]
        self._versions = [p._version for p in self.params]
        self._kept: dict[tuple[int, str], _Recorded] = {}
        self._chosen: set[int] | None = None  # the chunks that products run over; None: all
        self._logits: list[Tensor | None] = [None] * len(self._parts)
        self._failed: dict[str, str] = {}  # routes to J v that do not work here, and why
        self._checked = False

    # -- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Curvature:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Free the recorded graphs; the next product would record them anew."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self.problem)

    def _active(self) -> list[tuple[int, Problem]]:
        return [(i, part) for i, part in enumerate(self._parts) if self._chosen is None or i in self._chosen]

    @contextlib.contextmanager
    def quarter(self) -> Iterator[bool]:
        """Products with a quarter of the examples, over N all the same, at a quarter of the cost.

        For start vectors. Yields False, and changes nothing, unless the examples are kept in four blocks or more.
        """
        count = len(self._parts)
        apart = self._keep_all and count >= 4 and not self.problem.across  # ranks need not have as many blocks
        self._chosen = set(range(0, count, 4)) if apart else None
        try:
            yield apart
        finally:
            self._chosen = None

    @property
    def logits(self) -> Tensor:
        for i, part in enumerate(self._parts):
            if self._logits[i] is None:
                with part.math():
                    self._any(i)
        return torch.cat([z for z in self._logits if z is not None])

    @property
    def loss_value(self) -> float:
        value = mean_loss(self.logits.double(), self.problem.y, self.problem.loss) if len(self) else torch.zeros(())
        return self.problem.total_of(len(self) / self.problem.total * float(value))[0]

    # -- recording -------------------------------------------------------------------------------------------

    def _record(self, i: int, route: str) -> _Recorded:
        """The graphs of chunk i for a route. RuntimeError where the route does not work."""
        require(
            [p._version for p in self.params] == self._versions,
            "parameters changed since this Curvature was made: make a new one",
        )
        if route in self._failed:
            raise RuntimeError(self._failed[route])
        if (i, route) not in self._kept:
            if not self._keep_all:  # free the last chunk's graphs before building this one's
                self._kept = {key: graphs for key, graphs in self._kept.items() if key[0] == i}
            recorded = self._passed(self._parts[i], route)
            if self._logits[i] is None:
                self._parts[i].check_logits(recorded.z)
                self._logits[i] = recorded.z.detach()
            self._kept[i, route] = recorded
        return self._kept[i, route]

    def _passed(self, part: Problem, route: str) -> _Recorded:
        with PlainNorms() if route == "reverse" else Tape(self.params) as mode:
            z = part.logits()
        require(z.requires_grad, "logits do not depend on any trainable parameter")
        tape = mode.close(z) if isinstance(mode, Tape) else None
        if tape is not None and tape.failure is not None:
            self._failed[route] = tape.failure
            raise RuntimeError(tape.failure)
        return _Recorded(z, tape)

    def _reversed(self, i: int) -> _Recorded:
        """The same with the gradient as a graph."""
        recorded, part = self._record(i, "reverse"), self._parts[i]
        if recorded.g is None:
            recorded.u = logit_gradient(recorded.z, part.y, part.loss) / self.problem.total
            recorded.g = recorded_gradient(recorded.z, self.params, recorded.u)
        return recorded

    def _by_either(self, what: str, product: Callable[[str], Any], known: str | None = None) -> tuple[Any, str]:
        """What `product` returns for its known route, or else for the first one that works, and that route."""
        failures = []
        for route in self._routes if known is None else [known]:
            try:
                return product(route), route
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.OutOfMemoryError) or known is not None:
                    raise
                failures.append(f"{route}: {str(error).strip().splitlines()[0]}")
        raise InputError(f"no route to {what} works for this network ({'; '.join(failures)})")

    def _any(self, i: int) -> _Recorded:
        """Graphs of chunk i for an ordinary reverse pass."""
        kept = [self._kept[i, route] for route in self._routes if (i, route) in self._kept]
        return kept[0] if kept else self._by_either("the gradient", lambda route: self._record(i, route))[0]

    def prepare(self) -> None:
        """Record now what products will use, so that `gradient` comes free with it."""
        if not self._keep_all:
            return
        with self.problem.math(), contextlib.suppress(RuntimeError):  # a product will say what does not work
            for i, _ in self._active():
                if self._any(i).tape is None:
                    self._reversed(i)

    # -- products --------------------------------------------------------------------------------------------

    def _jv_chunk(self, i: int, v: list[Tensor], route: str) -> Tensor:
        tape = self._record(i, route).tape
        if tape is not None:
            return tape.jv(v)
        recorded = self._reversed(i)
        assert recorded.g is not None and recorded.u is not None
        return jv_by_reverse(recorded.g, recorded.u, v)

    def _verify(self, route: str, sums: Tensor, back: list[Tensor], v: list[Tensor]) -> None:
        """RuntimeError unless ⟨w, J v⟩ = ⟨Jᵀw, v⟩, where Jᵀw is an ordinary reverse pass. sums: `dots(w, J v)`."""
        left, w2, jv2, right = self.problem.total_of(*sums.tolist(), float(dot(back, v) or 0.0))
        scale, gap = math.sqrt(jv2 * w2), abs(left - right)
        if gap > (1e-7 if sums.dtype == torch.float64 else 2e-3) * scale:
            self._failed[route] = f"its product disagrees with the reverse pass by {gap / scale:.1e}"
            raise RuntimeError(self._failed[route])
        self._checked = True

    def jv(self, v: Sequence[Tensor]) -> Tensor:
        """J v, (N, K)."""
        v = check_vector(v, self.params)

        def product(route: str) -> Tensor:
            jv = torch.cat([self._jv_chunk(i, v, route) for i, _ in self._active()])
            if not self._checked:
                w = jv.clone()
                w.view(-1)[::3] *= -0.5  # not J v itself, to which an error may be orthogonal
                self._verify(route, dots(w, jv), self._jtu(w), v)
            return jv

        with self.problem.math():
            jv, self.gn_route = self._by_either("J v", product, self.gn_route)
        return jv

    def jtu(self, w: Tensor) -> list[Tensor]:
        """Jᵀ w for w (N, K)."""
        with self.problem.math():
            return self.problem.summed(self._jtu(w))

    def _jtu(self, w: Tensor) -> list[Tensor]:
        """Of this rank's examples."""
        rows = w.split([len(part) for _, part in self._active()])
        chunks = zip(self._active(), rows)
        return reduce(_added, (pulled_back(self._any(i).z, self.params, part) for (i, _), part in chunks))

    def gradient(self) -> list[Tensor]:
        """∇L, like the parameters; free once a recorded gradient exists."""

        def of_chunk(i: int, part: Problem) -> list[Tensor]:
            recorded = self._any(i)
            if recorded.g is not None:  # which products read again: it is not added to
                return [t.detach().clone() for t in filled(recorded.g, self.params)]
            u = logit_gradient(recorded.z.detach(), part.y, part.loss) / self.problem.total
            return pulled_back(recorded.z, self.params, u)

        with self.problem.math():
            return self.problem.summed(reduce(_added, (of_chunk(i, part) for i, part in self._active())))

    def gn(self, v: Sequence[Tensor]) -> list[Tensor]:
        """G v, like the parameters."""
        v = check_vector(v, self.params)

        def product(route: str) -> list[Tensor]:
            total, sums = list[Tensor](), list[Tensor]()
            for i, part in self._active():
                z = self._record(i, route).z
                jv = self._jv_chunk(i, v, route)
                pulled = logit_hessian(z.detach(), part.y, jv, part.loss).div_(self.problem.total)
                sums += [] if self._checked else [dots(pulled, jv)]
                del jv  # as large as the logits, as what comes next is
                of_chunk = pulled_back(z, self.params, pulled)
                total = _added(total, of_chunk) if total else of_chunk
            if sums:
                self._verify(route, torch.stack(sums).sum(0), total, v)
            return total

        with self.problem.math():
            total, self.gn_route = self._by_either("J v", product, self.gn_route)
            return self.problem.summed(total)

    def hessian(self, v: Sequence[Tensor]) -> list[Tensor]:
        """H v, like the parameters."""
        v = check_vector(v, self.params)

        def product(route: str) -> list[Tensor]:
            return reduce(_added, (self._hv_chunk(i, v, route)[0] for i, _ in self._active()))

        with self.problem.math():
            total, self.hessian_route = self._by_either("H v", product, self.hessian_route)
            return self.problem.summed(total)

    def _hv_chunk(self, i: int, v: list[Tensor], route: str) -> tuple[list[Tensor], Tensor]:
        """(H v, J v)."""
        part, tape = self._parts[i], self._record(i, route).tape
        if tape is None:
            recorded = self._reversed(i)
            assert recorded.g is not None
            return hv_by_reverse(recorded.g, self.params, v), self._jv_chunk(i, v, route)
        z = self._record(i, route).z
        z1 = tape.run(v)[0]
        u = logit_gradient(z, part.y, part.loss) / self.problem.total
        return hv_along(z1, u, self.params), torch.zeros_like(z).detach() if z1 is None else z1.detach()

    def quadratic(self, v: Sequence[Tensor]) -> float:
        """vᵀH v = d²L(θ + εv)/dε²: from second derivatives of the logits along v (5F), else from a product with H."""
        return self.residual_quadratic(v)[0]

    def residual_quadratic(self, v: Sequence[Tensor]) -> tuple[float, float]:
        """(vᵀH v, vᵀG v), as `quadratic`: without a product with G."""
        v = check_vector(v, self.params)

        def product(route: str) -> list[tuple[float, float]]:
            return [self._product_chunk(i, v, route) for i, _ in self._active()]

        with self.problem.math():
            try:
                parts = [self._second_chunk(i, v) for i, _ in self._active()]
                self.quadratic_route = "second derivatives, tape"
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                parts, self.hessian_route = self._by_either("H v", product, self.hessian_route)
                self.quadratic_route = f"Hessian product, {self.hessian_route}"
        h, g = self.problem.total_of(sum(h for h, _ in parts), sum(g for _, g in parts))
        return h, g

    def _second_chunk(self, i: int, v: list[Tensor]) -> tuple[float, float]:
        """z₁ᵀS z₁ + u·z₂ and z₁ᵀS z₁, over N."""
        recorded, part, n = self._record(i, self._routes[0]), self._parts[i], self.problem.total
        if recorded.tape is None:
            raise RuntimeError("not recorded")
        z = recorded.z.detach()
        with torch.no_grad():
            z1, z2 = recorded.tape.run(v, second=True)
            g = 0.0 if z1 is None else float((z1 * logit_hessian(z, part.y, z1, part.loss)).sum()) / n
            r = 0.0 if z2 is None else float((z2 * logit_gradient(z, part.y, part.loss)).sum()) / n
        return g + r, g

    def _product_chunk(self, i: int, v: list[Tensor], route: str) -> tuple[float, float]:
        part, z = self._parts[i], self._record(i, route).z.detach()
        hv, jv = self._hv_chunk(i, v, route)
        g = float((jv * logit_hessian(z, part.y, jv, part.loss)).sum()) / self.problem.total
        return float(dot(hv, v) or 0.0), g


def _added(total: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """In place."""
    torch._foreach_add_(total, more)
    return total


def ggn_product(
    model: nn.Module, x: Tensor, y: Tensor, v: Sequence[Tensor], loss: LogitLoss = "cross_entropy", **options: Any
) -> list[Tensor]:
    """G v = 1/N Σ_n J_nᵀ S_n J_n v, a list of tensors like the trainable parameters.

    `options` go to `Curvature` (chunk_size, route, randomness, seed). Many products on one batch: keep a `Curvature`.
    """
    with Curvature(model, x, y, loss=loss, **options) as c:
        return c.gn(v)


def hessian_product(
    model: nn.Module, x: Tensor, y: Tensor, v: Sequence[Tensor], loss: LogitLoss = "cross_entropy", **options: Any
) -> list[Tensor]:
    """H v = ∇²L v of the mean loss, like the trainable parameters. `options` as in `ggn_product`."""
    with Curvature(model, x, y, loss=loss, **options) as c:
        return c.hessian(v)
