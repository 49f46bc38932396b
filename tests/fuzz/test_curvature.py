"""Curvature of random networks against dense matrices: products, traces, sharpness; and nothing has moved."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fuzz.attack import attack
from fuzz.nets import BLOCKS, INPUTS, MEANT_OTHERWISE, NO_SECOND_DERIVATIVE, PLAIN, K, N, build, draw
from reference.curvature import flat, ggn, hessian, mean_loss, trainable, unflat
from reference.whole_step import State
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metacal.curvature import Curvature, gn_sharpness, gn_trace, hessian_sharpness, hessian_trace
from metacal.curvature.products import ROUTES
from metacal.errors import InputError

pytestmark = pytest.mark.slow

DOUBLE_BACKWARD_IS_WRONG = {"weight_norm", "old_weight_norm"}  # torch's own fault, in the parameters
SAME_FUNCTION = {"sparse_embedding": "embedding", "checkpointed_reentrant": "tanh"}
# where these have kinks the Hessian jumps
KINKED = {
    "depends_on_data",
    "embedding",
    "hardswish",
    "max_pool",
    "prelu",
    "relu",
    "relu_in_place",
    "residual",
    "sorts",
}


class Case:
    """A network, a batch, a loss and a mode; the seed says it all."""

    def __init__(self, seed: int, names: list[str] | None = None) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.names = draw(rng, PLAIN if rng.random() < 0.5 else None) if names is None else names
        self.loss = rng.choice(["cross_entropy", "cross_entropy", "mse"])
        self.evaluation = rng.random() < 0.4
        self.randomness = rng.choice(["refuse", "freeze"])

    def __str__(self) -> str:
        return f"[{' '.join(self.names)}] {self.loss}{' eval' * self.evaluation} randomness={self.randomness}"

    def model(self, plain: bool = False) -> nn.Module:
        """A new network, the same every time, and the random streams before its pass.

        plain: with the same function in place of blocks that allow `backward()` alone, or give sparse gradients.
        """
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        names = [SAME_FUNCTION.get(name, name) if plain else name for name in self.names]
        net = build(names).train(not self.evaluation)
        with torch.no_grad():  # logits of a trained network's size
            net[-1].weight.mul_(3)
        self.x, self.y = torch.randn(N, INPUTS).double(), torch.randint(K, (N,))
        if self.randomness == "freeze":  # it draws from its own seed, and so does the reference
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
        return net

    def drawn(self) -> bool:
        """Whether a pass draws numbers."""
        net = self.model()
        before = State(net)
        net(self.x.clone())
        return any("stream" in change for change in before.changes(State(net)))


def gradient(case: Case, at: Tensor | None = None) -> Tensor:
    """∇L on a new network, at other parameters if given."""
    model = case.model()
    params = trainable(model)
    if at is not None:
        with torch.no_grad():
            for p, value in zip(params, unflat(at, params)):
                p.copy_(value)
    loss = mean_loss(model(case.x.clone()), case.y, case.loss)
    loss.backward()
    return flat([torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params])


def hessian_along(case: Case, v: Tensor, h: float = 2e-4) -> Tensor:
    """H v by central differences of the gradient, of fourth order."""
    theta = flat([p.detach() for p in trainable(case.model())])
    h = h / float(v.abs().max())
    far, near = (gradient(case, theta + k * h * v) - gradient(case, theta - k * h * v) for k in (2, 1))
    return (8 * near - far) / (12 * h)


def close(a: Sequence[Tensor], b: Tensor, tolerance: float) -> bool:
    return float((flat(a) - b).norm()) <= tolerance * float(b.norm()) + 1e-10


def curvature(case: Case, model: nn.Module, **keys: object) -> Curvature:
    return Curvature(model, case.x.clone(), case.y, loss=case.loss, randomness=case.randomness, **keys)


def unmoved(case: Case, model: nn.Module, before: State) -> None:
    moved = before.changes(State(model))
    assert not moved, f"{', '.join(moved)} moved: {case}"
    assert all(p.grad is None for p in model.parameters()), f"gradients are left: {case}"


def refused(case: Case, error: InputError, drawn: bool) -> str:
    assert "\n" not in str(error), f"a message of several lines: {error} {case}"
    plain = all(name in PLAIN for name in case.names) and DOUBLE_BACKWARD_IS_WRONG.isdisjoint(case.names)
    assert not plain or (drawn and case.randomness == "refuse"), f"refused without need: {error} {case}"
    return "refused"


def products(case: Case) -> str:
    """G v, H v and the gradient."""
    drawn, defined = case.drawn(), MEANT_OTHERWISE.isdisjoint(case.names)
    v = [torch.randn_like(p) for p in trainable(case.model())]
    g, slope = ggn_once(case) @ flat(v), gradient(case)
    h, tolerance = second(case, v) if defined else (slope, 1.0)
    model = case.model()
    before = State(model)
    try:
        with curvature(case, model) as c:
            found = c.gn(v)
            assert close(found, g, 1e-8), f"G v is off by {off(found, g):.1e}: {case}"
            assert close(c.gradient(), slope, 1e-8), f"the gradient is wrong: {case}"
            found = c.hessian(v)
            assert not defined or close(found, h, tolerance), f"H v is off by {off(found, h):.1e}: {case}"
    except InputError as error:
        outcome = refused(case, error, drawn)
    else:
        outcome = "right"
    unmoved(case, model, before)
    return outcome


def ggn_once(case: Case) -> Tensor:
    """G from one pass of a new network: the reference makes two, and they may differ."""

    class Recorded(nn.Module):
        """The logits of one pass, whoever calls it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = case.model(plain=True)
            with sdpa_kernel(SDPBackend.MATH):
                self.z = self.model(case.x.clone())

        def forward(self, x: Tensor) -> Tensor:
            return self.z

    return ggn(Recorded(), case.x, case.loss)


def second(case: Case, v: Sequence[Tensor]) -> tuple[Tensor, float]:
    """H v and its relative error: by double backward where it can be trusted."""
    if (NO_SECOND_DERIVATIVE | DOUBLE_BACKWARD_IS_WRONG).isdisjoint(case.names):
        model = case.model()
        params = trainable(model)
        with sdpa_kernel(SDPBackend.MATH):
            loss = mean_loss(model(case.x.clone()), case.y, case.loss)
        grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        along = torch.stack([(g * t).sum() for g, t in zip(grads, v) if g is not None]).sum()
        product = torch.autograd.grad(along, params, allow_unused=True)
        return flat([torch.zeros_like(p) if h is None else h for h, p in zip(product, params)]), 1e-8
    return hessian_along(case, flat(v)), 1e-6


def off(found: Sequence[Tensor], truth: Tensor) -> float:
    return float((flat(found) - truth).norm() / truth.norm().clamp(min=1e-300))


def test_products() -> None:
    attack("test_curvature", lambda seed: products(Case(seed)), 200)


def test_every_block_alone() -> None:
    names = sorted(BLOCKS)
    attack("test_curvature", lambda seed: products(Case(seed, [names[seed % len(names)]])), len(names))


def test_routes_and_chunks() -> None:
    """The other routes to the same products, on networks that draw nothing and couple no samples."""
    names = [n for n in PLAIN if not any(w in n for w in ("random", "drop", "noise", "attention", "hooks", "depends"))]

    def check(seed: int) -> str:
        case, rng = Case(seed, draw(random.Random(seed), names)), random.Random(~seed)
        case.randomness = "refuse"
        model = case.model()
        v = [torch.randn_like(p) for p in trainable(model)]
        keys = rng.choice([*({"route": route} for route in ROUTES), {"chunk_size": 4}])
        try:
            with curvature(case, model, **keys) as c:
                found_g, found_h = c.gn(v), c.hessian(v)
        except InputError as error:
            assert "\n" not in str(error), f"{keys}: a message of several lines: {error} {case}"
            return "refused"
        g, (truth, tolerance) = ggn_once(case) @ flat(v), second(case, v)
        assert close(found_g, g, 1e-8), f"{keys}: G v is off by {off(found_g, g):.1e}: {case}"
        assert close(found_h, truth, tolerance), f"{keys}: H v is off by {off(found_h, truth):.1e}: {case}"
        return "right"

    attack("test_curvature", check, 100)


def test_traces() -> None:
    """Exact ones to rounding, sampled ones within six standard errors."""

    def check(seed: int) -> str:
        case = Case(seed)
        if case.drawn() or not MEANT_OTHERWISE.isdisjoint(case.names):
            return "left out"
        g = ggn_once(case)
        truth = {gn_trace: float(g.trace())}
        if (NO_SECOND_DERIVATIVE | DOUBLE_BACKWARD_IS_WRONG).isdisjoint(case.names):
            truth[hessian_trace] = float(hessian(case.model(), case.x, case.y, case.loss).trace())
        outcome = "right"
        for function, value in truth.items():
            for exact in (True, False):
                model = case.model()
                before = State(model)
                try:
                    found = function(model, case.x, case.y, probes=32, exact=exact, seed=seed, loss=case.loss)
                except InputError as error:
                    outcome = refused(case, error, False)
                else:
                    allowed = 1e-8 * (1 + abs(value)) if exact else 6 * found.stderr + 1e-8 * (1 + abs(value))
                    assert abs(found.value - value) <= allowed, (
                        f"{function.__name__}(exact={exact}) gives {found.value:.6g} ± {found.stderr:.2g} "
                        f"by {found.method!r} for {value:.6g}: {case}"
                    )
                unmoved(case, model, before)
        return outcome

    attack("test_curvature", check, 100)


def test_sharpness() -> None:
    def check(seed: int) -> str:
        case = Case(seed, draw(random.Random(seed), PLAIN))
        if case.drawn() or not DOUBLE_BACKWARD_IS_WRONG.isdisjoint(case.names):
            return "left out"
        g = torch.linalg.eigvalsh(ggn_once(case))
        h = torch.linalg.eigvalsh(hessian(case.model(), case.x, case.y, case.loss))
        truth = {gn_sharpness: g[-1], hessian_sharpness: h[h.abs().argmax()]}
        for function, value in truth.items():
            model = case.model()
            found = function(model, case.x, case.y, tol=1e-4, loss=case.loss).value
            # two of nearly the same size and opposite signs are one eigenvalue to this precision
            wrong = min(abs(found - value), abs(abs(found) - abs(value)))
            assert wrong <= 1e-3 * abs(value) + 1e-10, (
                f"{function.__name__} gives {found:.6g} for {float(value):.6g}: {case}"
            )
        return "right"

    attack("test_curvature", check, 100)


def test_the_two_references_agree() -> None:
    def check(seed: int) -> str:
        case = Case(seed, draw(random.Random(seed), [n for n in PLAIN if n not in KINKED]))
        if not DOUBLE_BACKWARD_IS_WRONG.isdisjoint(case.names):
            return "left out"
        v = [torch.randn_like(p) for p in trainable(case.model())]
        a, b = second(case, v)[0], hessian_along(case, flat(v))
        assert float((a - b).norm()) <= 1e-6 * float(a.norm()) + 1e-9, f"off by {off(unflat(a, v), b):.1e}: {case}"
        return "agree"

    attack("test_curvature", check, 60)
