"""Products with the Jacobian, the Gauss-Newton matrix and the Hessian of a classifier, without any of the matrices.

With J_n = ∂z_n/∂θ and S_n, u as in `problem`:

    J v            (N, K)   how the logits move along v
    Jᵀ w           like θ   Σ_n J_nᵀ w_n
    G v = 1/N Σ_n J_nᵀ S_n J_n v
    H v = ∇²L v = G v + R v,   R = Σ_nk u_nk ∇²z_nk

Four routes lead to J v; F is one forward pass and a reverse pass costs about 2F.

`tape`         Carry tangents along the recorded forward pass (`tape`), whose values are there already: 2F, and 2F for
               the reverse half. For H v the run is differentiated, ∇_θ(u·Jv): 5F. Needs a rule for every function.
`double-vjp`   Record Jᵀu once as a graph in u; it is linear in u, so its reverse derivative along v is J v. 2F, and
               2F for the reverse half: 4F a product, after 3F once. Needs double backward.
`forward`      Keep the reverse graph of the logits, take a fresh Jacobian-vector product in forward mode: 5F.
`reverse`      (H only) reverse over reverse on the recorded gradient: 4F to 6F.
`forward-over-reverse`  (H only) where double backward is missing; nothing is kept, 9F.

The tape is tried first. Double backward of convolutions is dear (measured: J v costs 1.2 training steps on a
ResNet-20, forward mode 0.8, while on an MLP it is 0.45 against 1.5), so networks with convolutions try `forward` next
and the others `double-vjp`. A route that raises is dropped for the next, and the first product of each operator is
verified at no cost: ⟨w, J v⟩ must equal ⟨Jᵀw, v⟩, where Jᵀw is an ordinary backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from metacal.autodiff.tape import Tape
from metacal.curvature.layers import cache_block, examples_depend
from metacal.curvature.problem import Problem, check_vector, logit_gradient, logit_hessian
from metacal.errors import InputError, require
from metacal.forward_mode import dual_level

__all__ = ["Curvature", "ggn_product", "hessian_product"]

ROUTES = ("auto", "tape", "double-vjp", "forward")


def _graph_names(*roots: Any) -> set[str]:
    """Names of all nodes of an autograd graph."""
    seen, stack, names = set(roots), list(roots), set()
    while stack:
        node = stack.pop()
        names.add(node.name())
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return names


def _filled(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params)]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.dot(s.reshape(-1), t.reshape(-1)) for s, t in zip(a, b)]).sum()


@dataclass
class _Recorded:
    """Graphs of one chunk: logits z and the tape of that pass; once asked for, u(z), and g = Jᵀu as a graph in u, θ."""

    z: Tensor
    tape: Tape | None = None
    u: Tensor | None = None
    g: list[Tensor | None] | None = None


class Curvature:
    """G and H of the mean loss at the network's present parameters, as operators on lists of tensors.

    The graphs are recorded at the first product and kept until `release()` (or the end of a `with` block), so a
    Lanczos run pays for them once. With `chunk_size` below N only one chunk's graphs live at a time: each product
    rebuilds them (7F instead of 4F), and the result is the same up to rounding.

    Arguments: `model` maps x to logits (N, K), in whatever mode it is; labels `y` (N,); `loss` "cross_entropy" or
    "mse"; `route` "auto", "double-vjp" or "forward"; `randomness` "refuse" or "freeze" (see `Problem.of`).
    Vectors are lists of tensors, shaped and ordered like the trainable entries of `model.parameters()`.

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
        loss: str = "cross_entropy",
        chunk_size: int | None = None,
        route: str = "auto",
        randomness: str = "refuse",
        seed: int = 0,
    ) -> None:
        require(route in ROUTES, f"route must be one of {', '.join(ROUTES)}, got {route!r}")
        self.problem = Problem.of(model, x, y, loss, randomness, seed)
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
        self._asked = route
        self._versions = [p._version for p in self.params]
        self._kept: dict[int, _Recorded] = {}
        self._chosen: set[int] | None = None  # the chunks that products run over; None: all
        self._logits: list[Tensor | None] = [None] * len(self._parts)
        self._failed: dict[str, str] = {}  # routes to J v that do not work here, and why
        self._checked = False

    # -- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Curvature:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        apart = self._keep_all and count >= 4
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
                    self._record(i)
        return torch.cat([z for z in self._logits if z is not None])

    @property
    def loss_value(self) -> float:
        z, y = self.logits.double(), self.problem.y
        if self.problem.loss == "mse":
            target = torch.zeros_like(z).scatter_(1, y[:, None], 1.0)
            return float((z - target).square().mean())
        return float(-z.log_softmax(1).gather(1, y[:, None]).mean())

    # -- recording -------------------------------------------------------------------------------------------

    def _forward(self, part: Problem) -> tuple[Tensor, Tape | None]:
        if self._asked not in ("auto", "tape"):
            return part.logits(), None
        with Tape(self.params) as tape:
            z = part.logits()
        return z, tape.close(z)

    def _tape(self, i: int) -> Tape:
        """The tape of chunk i; RuntimeError where it cannot be used."""
        tape = self._record(i).tape
        if tape is None or tape.failure is not None:
            raise RuntimeError("not recorded" if tape is None else tape.failure)
        return tape

    def _record(self, i: int, second: bool = False) -> _Recorded:
        """Graphs of chunk i; `second` adds the gradient as a graph."""
        require(
            [p._version for p in self.params] == self._versions,
            "parameters changed since this Curvature was made: make a new one",
        )
        part = self._parts[i]
        if i in self._kept:
            kept = self._kept[i]
        else:
            if not self._keep_all:
                self._kept.clear()  # free the last chunk's graphs before building this one's
            z, tape = self._forward(part)
            require(z.requires_grad, "logits do not depend on any trainable parameter")
            if self._logits[i] is None:
                part.check_logits(z)
                self._logits[i] = z.detach()
            kept = _Recorded(z, tape)
            self._kept[i] = kept
        if second and kept.g is None:
            u = logit_gradient(kept.z, part.y, part.loss) / len(self.problem)
            kept.g = list(torch.autograd.grad(kept.z, self.params, u, create_graph=True, allow_unused=True))
            kept.u = u
            # the engine would silently skip a function that is once_differentiable
            roots = [g.grad_fn for g in kept.g if g is not None and g.grad_fn is not None]
            if any(name.endswith("Error") for name in _graph_names(*roots)):
                kept.g = kept.u = None
                raise RuntimeError("a function marked once_differentiable has no double backward")
        return kept

    # -- the halves, chunk by chunk ---------------------------------------------------------------------------

    def _jv_tape(self, i: int, v: list[Tensor]) -> Tensor:
        tape = self._tape(i)  # outside no_grad: it may have to record
        with torch.no_grad():
            first, _ = tape.run(v)
        return torch.zeros_like(self._record(i).z, requires_grad=False) if first is None else first

    def _jv_double(self, i: int, v: list[Tensor]) -> Tensor:
        kept = self._record(i, second=True)
        assert kept.g is not None and kept.u is not None
        used = [(g, a) for g, a in zip(kept.g, v) if g is not None and g.requires_grad]
        # g depends on θ as well; the engine walks only the paths to u
        (out,) = torch.autograd.grad([g for g, _ in used], kept.u, [a for _, a in used], retain_graph=True)
        return out.detach()

    def _jv_forward(self, i: int, v: list[Tensor]) -> Tensor:
        with torch.no_grad(), dual_level():
            duals = {n: forward_ad.make_dual(p.detach(), a) for n, p, a in zip(self.problem.names, self.params, v)}
            tangent = forward_ad.unpack_dual(self._parts[i].logits(duals)).tangent
        require(tangent is not None, "logits do not depend on any trainable parameter")
        assert tangent is not None
        return tangent.detach()

    def _jt(self, i: int, w: Tensor) -> list[Tensor]:
        kept = self._record(i)
        grads = torch.autograd.grad(kept.z, self.params, w, retain_graph=True, allow_unused=True)
        return _filled(grads, self.params)

    def _gn_routes(self, i: int) -> list[str]:
        """The routes to try, the cheaper first."""
        if self._asked != "auto":
            return [self._asked]
        names = _graph_names(self._record(i).z.grad_fn)
        if any("Convolution" in n or "BatchNorm" in n for n in names):
            return ["tape", "forward", "double-vjp"]
        return ["tape", "double-vjp", "forward"]

    def _jv_chunk(self, i: int, v: list[Tensor]) -> Tensor:
        """J v of chunk i by the chosen route, or by the first one that does not raise."""
        routes = {"tape": self._jv_tape, "double-vjp": self._jv_double, "forward": self._jv_forward}
        if self.gn_route is not None:
            return routes[self.gn_route](i, v)
        for name in self._gn_routes(i):
            if name in self._failed:
                continue
            try:
                jv = routes[name](i, v)
                self.gn_route = name
                return jv
            except InputError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self._failed[name] = str(error).strip().splitlines()[0]
        reasons = "; ".join(f"{name}: {why}" for name, why in self._failed.items())
        raise InputError(f"no route to J v works for this network ({reasons})")

    def _verified(self, jv: Tensor, w: Tensor, back: list[Tensor], v: list[Tensor]) -> bool:
        """Whether ⟨w, J v⟩ = ⟨Jᵀw, v⟩, where Jᵀw is an ordinary reverse pass; else the route is struck off."""
        scale = float(jv.norm() * w.norm())
        gap = abs(float((w * jv).sum() - _dot(back, v)))
        if gap > (1e-7 if jv.dtype == torch.float64 else 2e-3) * scale:
            assert self.gn_route is not None
            self._failed[self.gn_route] = f"its product disagrees with the reverse pass by {gap / scale:.1e}"
            self.gn_route = None
            return False
        self._checked = True
        return True

    # -- products --------------------------------------------------------------------------------------------

    def jv(self, v: Sequence[Tensor]) -> Tensor:
        """J v, (N, K)."""
        v = check_vector(v, self.params)
        with self.problem.math():
            while True:
                jv = torch.cat([self._jv_chunk(i, v) for i, _ in self._active()])
                if self._checked:
                    return jv
                w = jv.clone()
                w.view(-1)[::3] *= -0.5  # not J v itself, to which an error may be orthogonal
                if self._verified(jv, w, self.jtu(w), v):
                    return jv

    def jtu(self, w: Tensor) -> list[Tensor]:
        """Jᵀ w for w (N, K)."""
        with self.problem.math():
            total: list[Tensor] | None = None
            row = 0
            for i, part in self._active():
                total = _added(total, self._jt(i, w[row : row + len(part)]))
                row += len(part)
        assert total is not None
        return total

    def gradient(self) -> list[Tensor]:
        """∇L, like the parameters; free once a recorded gradient exists."""
        n = len(self.problem)
        with self.problem.math():
            total: list[Tensor] | None = None
            for i, part in self._active():
                kept = self._record(i)
                if kept.g is not None:
                    grads = [g if g is None else g.detach() for g in kept.g]
                    total = _added(total, _filled(grads, self.params))
                else:
                    total = _added(total, self._jt(i, logit_gradient(kept.z.detach(), part.y, part.loss) / n))
        assert total is not None
        return total

    def prepare(self, matrix: str) -> None:
        """Record now what products with `matrix` ("gn", "hessian") will use, so that `gradient` comes free with it."""
        if not self._keep_all:
            return
        with self.problem.math():
            tape = self._record(0).tape
            if tape is not None and tape.failure is None:
                return
            if matrix == "hessian" or next(r for r in self._gn_routes(0) if r != "tape") == "double-vjp":
                for i, _ in self._active():
                    self._record(i, second=True)

    def gn(self, v: Sequence[Tensor]) -> list[Tensor]:
        """G v, like the parameters."""
        v = check_vector(v, self.params)
        n = len(self.problem)
        with self.problem.math():
            while True:
                total: list[Tensor] | None = None
                moved, pulled = [], []
                for i, part in self._active():
                    jv = self._jv_chunk(i, v)
                    w = logit_hessian(self._record(i).z.detach(), jv, part.loss) / n
                    total = _added(total, self._jt(i, w))
                    moved.append(jv)
                    pulled.append(w)
                assert total is not None
                if self._checked or self._verified(torch.cat(moved), torch.cat(pulled), total, v):
                    return total

    def hessian(self, v: Sequence[Tensor]) -> list[Tensor]:
        """H v, like the parameters."""
        v = check_vector(v, self.params)
        routes = {"tape": self._hv_tape, "reverse": self._hv_reverse, "forward-over-reverse": self._hv_forward}
        failures = []
        with self.problem.math():
            for name in list(routes) if self.hessian_route is None else [self.hessian_route]:
                try:
                    total: list[Tensor] | None = None
                    for i, _ in self._active():
                        total = _added(total, routes[name](i, v))
                    assert total is not None
                    if self.hessian_route is None and name == "forward-over-reverse":
                        self._check_symmetry(v, total)
                    self.hessian_route = name
                    return total
                except (RuntimeError, NotImplementedError) as error:
                    if isinstance(error, torch.OutOfMemoryError) or self.hessian_route is not None:
                        raise
                    failures.append(f"{name}: {str(error).strip().splitlines()[0]}")
        raise InputError(f"no route to H v works for this network ({'; '.join(failures)})")

    def _check_symmetry(self, v: list[Tensor], hv: list[Tensor]) -> None:
        """RuntimeError unless ⟨w, H v⟩ = ⟨v, H w⟩ for another vector w, by forward over reverse."""
        w = [torch.linspace(-1, 1, p.numel()).to(p).reshape(p.shape) for p in self.params]
        hw: list[Tensor] | None = None
        for i, _ in self._active():
            hw = _added(hw, self._hv_forward(i, w))
        assert hw is not None
        a, b = float(_dot(w, hv)), float(_dot(v, hw))
        scale = float(_dot(w, w) * _dot(hv, hv)) ** 0.5
        if abs(a - b) > 1e-3 * (abs(a) + abs(b)) + 1e-5 * scale:
            raise RuntimeError(f"the product is not symmetric, {a:.6g} and {b:.6g}")

    def quadratic(self, v: Sequence[Tensor]) -> float:
        """vᵀH v = d²L(θ + εv)/dε²: from second derivatives of the logits along v (5F), else from a product with H."""
        v = check_vector(v, self.params)
        n, total = len(self.problem), 0.0
        try:
            with self.problem.math():
                for i, part in self._active():
                    tape = self._tape(i)
                    with torch.no_grad():
                        first, second = tape.run(v, second=True)
                    z = self._record(i).z.detach()
                    u = logit_gradient(z, part.y, part.loss)
                    if first is not None:
                        total += float((first * logit_hessian(z, first, part.loss)).sum())
                    if second is not None:
                        total += float((u * second).sum())
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            value = float(_dot(self.hessian(v), v))
            self.quadratic_route = f"Hessian product, {self.hessian_route}"
            return value
        self.quadratic_route = "second derivatives, tape"
        return total / n

    def residual_quadratic(self, v: Sequence[Tensor]) -> tuple[float, float]:
        """(vᵀH v, vᵀG v) from one reverse pass over the recorded gradient: no separate product with G."""
        v = check_vector(v, self.params)
        n, h, g = len(self.problem), 0.0, 0.0
        with self.problem.math():
            for i, part in self._active():
                kept = self._record(i, second=True)
                assert kept.g is not None and kept.u is not None
                used = [(t, a) for t, a in zip(kept.g, v) if t is not None and t.requires_grad]
                both = torch.autograd.grad(
                    [t for t, _ in used],
                    [kept.u, *self.params],
                    [a for _, a in used],
                    retain_graph=True,
                    allow_unused=True,
                )
                jv = both[0].detach()
                h += float(_dot(_filled(both[1:], self.params), v))
                g += float((jv * logit_hessian(kept.z.detach(), jv, part.loss)).sum()) / n
        return h, g

    def _hv_tape(self, i: int, v: list[Tensor]) -> list[Tensor]:
        tape = self._tape(i)
        kept, part = self._record(i), self._parts[i]
        first, _ = tape.run(v)
        if first is None:
            return [torch.zeros_like(p) for p in self.params]
        u = logit_gradient(kept.z, part.y, part.loss) / len(self.problem)
        grads = torch.autograd.grad((u * first).sum(), self.params, retain_graph=True, allow_unused=True)
        return _filled(grads, self.params)

    def _hv_reverse(self, i: int, v: list[Tensor]) -> list[Tensor]:
        kept = self._record(i, second=True)
        assert kept.g is not None
        used = [(g, a) for g, a in zip(kept.g, v) if g is not None and g.requires_grad]
        grads = torch.autograd.grad(
            [g for g, _ in used], self.params, [a for _, a in used], retain_graph=True, allow_unused=True
        )
        return [g.detach() for g in _filled(grads, self.params)]

    def _hv_forward(self, i: int, v: list[Tensor]) -> list[Tensor]:
        part = self._parts[i]
        with dual_level():
            duals = {
                n: forward_ad.make_dual(p.detach().requires_grad_(), a)
                for n, p, a in zip(self.problem.names, self.params, v)
            }
            z = part.logits(duals)
            u = logit_gradient(z, part.y, part.loss) / len(self.problem)
            grads = torch.autograd.grad(z, list(duals.values()), u, allow_unused=True)
            tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in grads]
        return [t.detach() for t in _filled(tangents, self.params)]


def _added(total: list[Tensor] | None, more: list[Tensor]) -> list[Tensor]:
    if total is None:
        return more
    torch._foreach_add_(total, more)
    return total


def ggn_product(
    model: nn.Module, x: Tensor, y: Tensor, v: Sequence[Tensor], loss: str = "cross_entropy", **options: Any
) -> list[Tensor]:
    """G v = 1/N Σ_n J_nᵀ S_n J_n v, a list of tensors like the trainable parameters.

    `options` go to `Curvature` (chunk_size, route, randomness, seed). Many products on one batch: keep a `Curvature`.
    """
    with Curvature(model, x, y, loss=loss, **options) as c:
        return c.gn(v)


def hessian_product(
    model: nn.Module, x: Tensor, y: Tensor, v: Sequence[Tensor], loss: str = "cross_entropy", **options: Any
) -> list[Tensor]:
    """H v = ∇²L v of the mean loss, like the trainable parameters. `options` as in `ggn_product`."""
    with Curvature(model, x, y, loss=loss, **options) as c:
        return c.hessian(v)
