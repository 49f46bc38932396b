"""Measures, surrogates and losses on random and extreme logits, against their formulas in 50 digits or in loops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from fuzz.attack import attack
from reference import measures as loops
from reference import surrogates as surrogate_loops
from torch import Tensor

from metacal import losses
from metacal.calibration import MEASURES, CalibrationAccumulator
from metacal.calibration.surrogates import SURROGATES
from metacal.predictions import Predictions

pytestmark = pytest.mark.slow

mpmath.mp.dps = 50
SIZES = (1e-8, 1e-2, 1.0, 4.0, 30.0, 800.0, 1e4, 1e9, 1e17, 1e37)


def draw(seed: int, largest: float = 1e37, ruled_out: bool = True) -> tuple[Tensor, Tensor, str]:
    """Logits (N, K) of a random kind, labels, and the kind."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    n, k = rng.choice([1, 2, 3, 7, 20, 40]), rng.choice([2, 3, 5, 10])
    size = rng.choice([s for s in SIZES if s <= largest])
    z = size * torch.randn(n, k, generator=g, dtype=torch.float64)
    kind = rng.choice(["plain", "plain", "ties", "equal", "one_hot", "shifted", "mixed", "ruled_out"])
    if kind == "ties":
        z = (z / size).round() * size
    elif kind == "equal":
        z = z[:1].expand(n, k).clone()
    elif kind == "one_hot":
        z = torch.zeros(n, k).double()
        z[torch.arange(n), torch.randint(k, (n,), generator=g)] = size
    elif kind == "shifted":
        z = torch.randn(n, k, generator=g).double() + size
    elif kind == "mixed":
        z = z * torch.pow(10.0, -8 * torch.rand(n, 1, generator=g))
    elif kind == "ruled_out" and ruled_out:
        z[torch.rand(n, k, generator=g) < 0.3] = -math.inf
        z[torch.arange(n), torch.randint(k, (n,), generator=g)] = 0.5 * size
    dtype = rng.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16])
    y = torch.randint(k, (n,), generator=g)
    if rng.random() < 0.3:
        y = z.argmax(1)
    if rng.random() < 0.1:
        y = z.argmin(1)
    return z.to(dtype), y, f"{kind} logits of size {size:g}, {str(dtype)[6:]}, (N, K) = ({n}, {k})"


def log_probabilities(z: Tensor) -> list[list[mpmath.mpf]]:
    """log p in 50 digits, of the very numbers in z."""
    rows = []
    for row in z.double().tolist():
        values = [mpmath.mpf(v) if v != -math.inf else mpmath.ninf for v in row]
        top = max(values)
        total = mpmath.fsum(mpmath.exp(v - top) for v in values)
        rows.append([v - top - mpmath.log(total) for v in values])
    return rows


def same(a: float, b: float, tolerance: float) -> bool:
    if math.isinf(a) or math.isinf(b) or math.isnan(b):
        return a == b
    return abs(a - b) <= tolerance * max(1.0, abs(b))


def test_measures() -> None:
    def check(seed: int) -> str:
        z, y, kind = draw(seed)
        p, exact = Predictions.from_logits(z, y), log_probabilities(z)
        probs = [[float(mpmath.exp(v)) for v in row] for row in exact]
        wrong = float((p.probs - torch.tensor(probs, dtype=torch.float64)).abs().max())
        assert wrong <= 1e-14, f"probabilities are off by {wrong:.1e}: {kind}"
        likelihood = [float(row[label]) for row, label in zip(exact, y.tolist())]
        values = {"nll": -math.fsum(likelihood) / len(y) if min(likelihood) > -math.inf else math.inf}
        values["brier"] = loops.brier(probs, y.tolist())
        wrong = float((p.confidence - torch.tensor([max(row) for row in probs], dtype=torch.float64)).abs().max())
        assert wrong <= 1e-12, f"confidences are off by {wrong:.1e}: {kind}"
        # which side of an edge a rounding falls, and whether it breaks a tie, is no fault: bins are those of the
        # confidences as they are
        top = torch.zeros_like(p.probs).scatter_(1, p.predicted[:, None], p.confidence[:, None]).tolist()
        values["classwise_ece"] = loops.classwise_ece(p.probs.tolist(), y.tolist())
        for name, measure in MEASURES.items():
            if name == "smooth_ece" and seed % 10:
                continue  # the loop is slow
            keys = {"points": 300} if name == "smooth_ece" else {}
            expected = values[name] if name in values else getattr(loops, name)(top, y.tolist(), **keys)
            found = measure(p)
            # roots: of rounding errors where the truth is 0
            tolerance = {"smooth_ece": 2e-2, "sece": 1e-4, "debiased_ece": 1e-7, "kce": 1e-7}.get(name, 1e-10)
            assert same(found, expected, tolerance), f"{name} = {found!r} for {expected!r}: {kind}"
        return "right"

    attack("test_measures", check, 300)


def test_order_and_batches() -> None:
    """The same value in any order and, streamed, in any batches."""

    def check(seed: int) -> str:
        z, y, kind = draw(seed)
        rng = random.Random(seed)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
        p, q = Predictions.from_logits(z, y), Predictions.from_logits(z[order], y[order])
        for name, measure in MEASURES.items():
            assert same(measure(q), measure(p), 1e-10), f"{name} depends on the order: {kind}"
        streamed, at = CalibrationAccumulator(z.shape[1]), 0
        while at < len(y):
            size = rng.randint(1, 9)
            streamed.update(z[order][at : at + size], y[order][at : at + size])
            at += size
        for name, value in streamed.compute().items():
            if name in MEASURES:
                assert same(value, MEASURES[name](p), 1e-10), f"{name} is another in batches: {kind}"
        return "right"

    attack("test_measures", check, 200)


def test_surrogates() -> None:
    """Value, a finite gradient, and its slope along a direction."""

    def check(seed: int) -> str:
        rng = random.Random(seed)
        z, y, kind = draw(seed, largest=1e9, ruled_out=False)
        z = z.double()
        keys = {
            "sece": {"bandwidth": rng.choice([0.01, 0.1]), "self_term": rng.random() < 0.5},
            "dece": {"t_a": rng.choice([5.0, 100.0]), "t_b": rng.choice([0.01, 0.1])},
            "mmce": {"weighted": rng.random() < 0.5},
            "soft_ece": {"norm": rng.choice(["l1", "l2"])},
        }
        for name, surrogate in SURROGATES.items():
            options = keys.get(name, {})
            at = z.clone().requires_grad_()
            value = surrogate(at, y, **options)
            (slope,) = torch.autograd.grad(value, at)
            assert bool(slope.isfinite().all()), f"{name}{options} has a gradient that is not finite: {kind}"
            if name == "nll":
                exact = log_probabilities(z)
                expected = float(-mpmath.fsum(row[label] for row, label in zip(exact, y.tolist())) / len(y))
            else:
                try:
                    expected = float(getattr(surrogate_loops, name)(z, y, **options))
                except OverflowError:  # of the loops' own exponential
                    continue
            value = value.item()
            assert same(value, expected, 1e-8), f"{name}{options} = {value!r} for {expected!r}: {kind}"
            v = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            # with ties every step changes who is predicted
            if float(z.abs().max()) < 50 and kind.startswith(("plain", "shifted", "mixed")):
                check_slope(lambda t, s=surrogate, o=options: s(t, y, **o), z, v, slope, f"{name}{options}: {kind}")
        return "right"

    attack("test_measures", check, 200)


def check_slope(f: Callable[[Tensor], Tensor], z: Tensor, v: Tensor, slope: Tensor, told: str) -> None:
    """⟨slope, v⟩ against one-sided and central differences.

    No check where another class is predicted at one end, or where the one-sided ones are further apart than the central
    one may be from the slope: there is a kink.
    """
    h, tolerance = 1e-6, 1e-4
    if not torch.equal((z + h * v).argmax(1), (z - h * v).argmax(1)):
        return
    above, below = float(f(z + h * v)), float(f(z - h * v))
    middle, expected = float(f(z)), float((slope * v).sum())
    if abs((above - middle) - (middle - below)) > tolerance * abs(above - below) + 1e-12:
        return
    found = (above - below) / (2 * h)
    assert abs(found - expected) <= tolerance * abs(found) + 1e-7, f"slope {expected!r} for {found!r}: {told}"


def floored(p: mpmath.mpf) -> mpmath.mpf:
    return max(p, mpmath.mpf(losses.PROBABILITY_FLOOR))


def _dual(log_p: list[mpmath.mpf], y: int, gamma: mpmath.mpf) -> mpmath.mpf:
    p = [mpmath.exp(v) for v in log_p]
    below = max((q for q, v in zip(p, log_p) if v < log_p[y]), default=mpmath.mpf(0))
    return -(floored(1 - p[y] + below) ** gamma) * log_p[y]


def _entropy(log_p: list[mpmath.mpf]) -> mpmath.mpf:
    return -mpmath.fsum(mpmath.exp(v) * v for v in log_p if v != mpmath.ninf)


LOSSES: dict[str, Callable[[list[mpmath.mpf], int, mpmath.mpf], mpmath.mpf]] = {
    "cross_entropy": lambda log_p, y, _: -log_p[y],
    "focal": lambda log_p, y, gamma: -(floored(1 - mpmath.exp(log_p[y])) ** gamma) * log_p[y],
    "inverse_focal": lambda log_p, y, gamma: -min((1 + mpmath.exp(log_p[y])) ** gamma, mpmath.exp(80)) * log_p[y],
    "dual_focal": _dual,
    "label_smoothing": lambda log_p, y, alpha: -(1 - alpha) * log_p[y] - alpha * mpmath.fsum(log_p) / len(log_p),
    "confidence_penalty": lambda log_p, y, beta: -log_p[y] - beta * _entropy(log_p),
    "brier": lambda log_p, y, _: mpmath.fsum((mpmath.exp(v) - (k == y)) ** 2 for k, v in enumerate(log_p)),
}


def test_losses() -> None:
    """Value in float64, and finite first and mixed derivatives for every finite gap."""

    def check(seed: int) -> str:
        rng = random.Random(seed)
        z, y, kind = draw(seed, largest=1e9)
        z = z.double()
        exact, finite = log_probabilities(z), bool(z.isfinite().all())
        for name, formula in LOSSES.items():
            setting = rng.choice([0.0, 0.2, 0.5, 1.0, 5.0, 20.0, 200.0])
            if name in ("label_smoothing", "confidence_penalty"):
                setting = min(setting, 1.0)
            if name == "label_smoothing" and not finite:
                continue  # infinite: every class has a part in it
            takes = name not in ("cross_entropy", "brier")
            function = losses.LOSSES[name]
            value = function(z, y, setting) if takes else function(z, y)
            told = f"{name}({setting}): {kind}"
            for found, log_p, label in zip(value.tolist(), exact, y.tolist()):
                if log_p[label] == mpmath.ninf and name != "brier":
                    continue
                expected = float(formula(log_p, label, mpmath.mpf(setting)))
                assert same(found, expected, 1e-9), f"{found!r} for {expected!r}: {told}"
            if not finite:
                continue
            at, gamma = z.clone().requires_grad_(), torch.full((len(y),), setting).double().requires_grad_()
            per_sample = function(at, y, gamma) if takes and name != "confidence_penalty" else function(at, y)
            (slope,) = torch.autograd.grad(per_sample.sum(), at, create_graph=True)
            assert bool(slope.isfinite().all()), f"a gradient that is not finite: {told}"
            if takes and name != "confidence_penalty":
                (mixed,) = torch.autograd.grad(slope.square().sum(), gamma, allow_unused=True)
                assert mixed is None or bool(mixed.isfinite().all()), f"a mixed derivative that is not finite: {told}"
        return "right"

    attack("test_measures", check, 300)
