"""Per-sample losses against their formulas, and the focal loss at its edges."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from reference.memory import Peak
from torch import Tensor

from metacal import losses
from metacal.errors import InputError

GAMMAS = [0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 50.0]
GAPS = [0.0, 1e-3, 1.0, 10.0, 17.0, 20.0, 50.0, 89.0, 1e3, 1e4]


def batch(n: int = 6, k: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(n, k, generator=generator, dtype=torch.float64) * 3,
        torch.randint(k, (n,), generator=generator),
    )


def test_formulas() -> None:
    z, y = batch()
    p = torch.exp(z) / torch.exp(z).sum(1, keepdim=True)
    onehot = torch.eye(4, dtype=torch.float64)[y]
    p_y = (p * onehot).sum(1)
    close = torch.testing.assert_close
    close(losses.cross_entropy(z, y), -torch.log(p_y))
    close(losses.focal(z, y, 2.5), -((1 - p_y) ** 2.5) * torch.log(p_y))
    gamma = torch.linspace(0, 5, len(y), dtype=torch.float64)
    close(losses.focal(z, y, gamma), -((1 - p_y) ** gamma) * torch.log(p_y))
    target = 0.7 * onehot + 0.3 / 4
    close(losses.label_smoothing(z, y, 0.3), -(target * torch.log(p)).sum(1))
    close(losses.brier(z, y), ((p - onehot) ** 2).sum(1))
    close(losses.mse(z, y), ((z - onehot) ** 2).sum(1) / 4)


def rows(z: Tensor, y: Tensor, *values: Tensor) -> Iterator[tuple[list[float], int, list[float]]]:
    """Probabilities, label and further values of each sample, by plain arithmetic."""
    for i, row in enumerate(z.tolist()):
        total = math.fsum(math.exp(v) for v in row)
        yield [math.exp(v) / total for v in row], int(y[i]), [float(v[i]) for v in values]


def same(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_formulas_of_the_focal_family() -> None:
    z, y = batch(40, 5)
    gamma = torch.linspace(0, 6, 40, dtype=torch.float64)
    dual, inverse = [], []
    for p, label, (g,) in rows(z, y, gamma):
        below = max([q for q in p if q < p[label]], default=0.0)
        dual.append(-((1 - p[label] + below) ** g) * math.log(p[label]))
        inverse.append(-((1 + p[label]) ** g) * math.log(p[label]))
    same(losses.dual_focal(z, y, gamma), dual)
    same(losses.inverse_focal(z, y, gamma), inverse)
    for f in (losses.focal, losses.dual_focal, losses.inverse_focal):
        torch.testing.assert_close(f(z, y, 2.5), f(z, y, torch.tensor(2.5)))
        torch.testing.assert_close(f(z, y, 2.5), f(z, y, torch.full((40,), 2.5)))


def test_adafocal_is_focal_above_zero_and_inverse_focal_below() -> None:
    z, y = batch(40)
    gamma = torch.linspace(-2, 20, 40, dtype=torch.float64)
    expected = [
        -((1 - p[label]) ** g if g >= 0 else (1 + p[label]) ** -g) * math.log(p[label])
        for p, label, (g,) in rows(z, y, gamma)
    ]
    same(losses.adafocal(z, y, gamma), expected)
    assert torch.equal(losses.adafocal(z, y, 3.0), losses.focal(z, y, 3.0))
    assert torch.equal(losses.adafocal(z, y, -1.5), losses.inverse_focal(z, y, 1.5))


def test_signed_focal_is_the_focal_family_from_one_on_and_smooth_between() -> None:
    z, y = (t.double() if t.is_floating_point() else t for t in batch(200, 5))
    for gamma in (1.0, 1.5, 7.0):
        torch.testing.assert_close(losses.signed_focal(z, y, gamma), losses.focal(z, y, gamma))
        torch.testing.assert_close(losses.signed_focal(z, y, -gamma), losses.inverse_focal(z, y, gamma))
    # two continuous derivatives in gamma at the places where the formula changes, 0 among them for good measure
    for at in (-1.0, 0.0, 1.0):
        gamma = torch.tensor([at - 1e-7, at + 1e-7]).double().requires_grad_()
        values = torch.stack([losses.signed_focal(z, y, g).sum() for g in gamma])
        (first,) = torch.autograd.grad(values.sum(), gamma, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), gamma)
        for slope in (values, first, second):
            assert float((slope[1] - slope[0]).detach().abs()) < 1e-4 * float(1 + slope[0].detach().abs())
    sure = torch.tensor([[40.0, 0.0]]).double()
    assert 0 <= float(losses.signed_focal(sure, torch.tensor([0]), torch.tensor(-0.5).double())) < 1e-12


def test_dual_focal_takes_the_largest_of_the_smaller_probabilities() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5], [0.4, 0.4, 0.2]], dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.int64)
    # above both; below both, so that there is none; between; and a tie, which is not smaller
    base = torch.tensor([1 - 0.5 + 0.3, 1 - 0.2, 1 - 0.3 + 0.2, 1 - 0.4 + 0.2], dtype=torch.float64)
    torch.testing.assert_close(losses.dual_focal(p.log(), y, 3.0), -(base**3) * p[:, 0].log())


def test_confidence_penalty() -> None:
    z, y = batch(20, 5)
    expected = [-math.log(p[label]) - 0.3 * -sum(q * math.log(q) for q in p) for p, label, _ in rows(z, y)]
    same(losses.confidence_penalty(z, y, 0.3), expected)
    torch.testing.assert_close(losses.confidence_penalty(z, y, 0.0), losses.cross_entropy(z, y))


def test_smoothing_of_each_sample() -> None:
    z, y = batch(20, 5)
    alpha = torch.linspace(0, 1, 20, dtype=torch.float64)
    expected = []
    for p, label, (a,) in rows(z, y, alpha):
        expected.append(-sum(((1 - a) * (k == label) + a / 5) * math.log(q) for k, q in enumerate(p)))
    same(losses.label_smoothing(z, y, alpha), expected)
    one = torch.tensor(0.3, dtype=torch.float64)
    assert torch.equal(losses.label_smoothing(z, y, one), losses.label_smoothing(z, y, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_focal_keeps_its_digits_near_certainty(dtype: torch.dtype) -> None:
    """-log p = log1p(e^-gap) of two classes is far below the rounding of 1, and its weight as far above it."""
    gaps = [1.0, 2.3, 5.0, 17.0, 40.0, 80.0]
    z = torch.tensor([[gap, 0.0] for gap in gaps], dtype=dtype, requires_grad=True)
    y = torch.zeros(len(gaps), dtype=torch.int64)
    gamma, rtol = 50.0, 2e-5 if dtype == torch.float32 else 1e-11
    expected, slopes = [], []
    for gap in z[:, 0].tolist():
        odds = math.exp(-gap)
        p, miss = 1 / (1 + odds), odds / (1 + odds)
        expected.append((1 + p) ** gamma * math.log1p(odds))
        slopes.append(-((1 + p) ** gamma) * miss * (1 - gamma * p * math.log1p(odds) / (1 + p)))
    for value in (losses.inverse_focal(z, y, gamma), losses.adafocal(z, y, torch.full((len(gaps),), -gamma))):
        torch.testing.assert_close(value, torch.tensor(expected, dtype=dtype), rtol=rtol, atol=0)
        (slope,) = torch.autograd.grad(value.sum(), z)
        torch.testing.assert_close(slope[:, 0], torch.tensor(slopes, dtype=dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", ["dual_focal", "inverse_focal", "adafocal", "signed_focal", "label_smoothing"])
def test_mixed_derivatives_by_differences(name: str) -> None:
    z, y = batch()
    value = torch.linspace(0.3, 6, len(y), dtype=torch.float64)
    value = value / 7 if name == "label_smoothing" else value
    value = value * torch.tensor([1, -1] * 3) if name in losses.SIGNED else value
    inputs = (z.requires_grad_(), value.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda z, v: losses.LOSSES[name](z, y, v), inputs)


EXTREMES = {
    "brier": (),
    "confidence_penalty": (0.0, 0.1, 10.0),
    "cross_entropy": (),
    "label_smoothing": (0.0, 0.05, 1.0),
    "mse": (),
    "focal": GAMMAS,
    "dual_focal": GAMMAS,
    "inverse_focal": GAMMAS,
    "adafocal": [*GAMMAS, -0.2, -2.0, -20.0],
    "signed_focal": [*GAMMAS, -0.2, -0.99, -2.0, -20.0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", losses.LOSSES)
def test_every_loss_is_finite_at_every_gap(name: str, dtype: torch.dtype) -> None:
    """Value, gradient and, where a source may give the third argument, the mixed derivative."""
    gaps = torch.tensor(GAPS + [-g for g in GAPS])
    z = torch.stack([gaps, torch.zeros_like(gaps), -gaps.abs()], 1).to(dtype).requires_grad_()
    y = torch.zeros(len(gaps), dtype=torch.int64)
    loss = losses.LOSSES[name]
    for value in EXTREMES[name] or [None]:
        learned = value is not None and name != "confidence_penalty"
        third = torch.full((len(gaps),), value, requires_grad=True) if learned else value
        found = loss(z, y) if third is None else loss(z, y, third)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        (slope,) = torch.autograd.grad(found.sum(), z, create_graph=True)
        assert torch.isfinite(found).all() and torch.isfinite(slope).all()
        if learned:
            direction = torch.linspace(-1, 2, slope.numel(), dtype=slope.dtype).view_as(slope)
            (mixed,) = torch.autograd.grad((slope * direction).sum(), third)
            assert torch.isfinite(mixed).all()


@pytest.mark.parametrize("name", ["dual_focal", "inverse_focal", "adafocal", "signed_focal"])
def test_gamma_zero_of_the_others_is_cross_entropy_exactly(name: str) -> None:
    z, y = batch()[0].float().requires_grad_(), batch()[1]
    for gamma in (0.0, torch.zeros(6)):
        a, b = losses.LOSSES[name](z, y, gamma), losses.cross_entropy(z, y)
        assert torch.equal(a, b)
        assert torch.equal(torch.autograd.grad(a.sum(), z)[0], torch.autograd.grad(b.sum(), z)[0])


def test_large_arrays_have_the_same_losses_in_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, gradient and mixed derivative, at logits that are ruled out and beyond all exponentials too."""
    z, y = torch.randn(60, 100, dtype=torch.float64) * 8, torch.arange(60)
    z[:5], z[5:9, 40:], z[9, 9] = z[:5] * 1e4 + 1e5, -math.inf, 60.0
    z.requires_grad_()

    def made(name: str) -> list[Tensor]:
        third = torch.full((60,), 1.3, dtype=torch.float64, requires_grad=True)
        value = losses.LOSSES[name](z, y, third) if losses.takes(losses.LOSSES[name]) == "gamma" else None
        value = losses.LOSSES[name](z, y) if value is None else value
        (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
        if losses.takes(losses.LOSSES[name]) != "gamma":
            return [value, slope]
        return [value, slope, torch.autograd.grad(slope, third, torch.linspace(-1, 2, z.numel()).view_as(z))[0]]

    names = ("cross_entropy", "focal", "dual_focal", "inverse_focal", "adafocal", "signed_focal")
    small = {name: made(name) for name in names}
    monkeypatch.setattr(losses, "_LARGE", 1)
    for name in names:
        torch.testing.assert_close(made(name), small[name], rtol=1e-10, atol=1e-13)
    z, gamma = torch.randn(200, 1000, requires_grad=True), torch.ones(200, requires_grad=True)
    for name in names[1:]:
        with Peak() as memory:
            (slope,) = torch.autograd.grad(losses.LOSSES[name](z, torch.arange(200), gamma).sum(), z, create_graph=True)
            torch.autograd.grad(slope, gamma, z.detach())
        assert 2 < memory.peak / (z.numel() * 4) < 4.1, name


@given(st.integers(1, 9), st.integers(2, 6), st.integers(0, 10**6))
def test_order_of_samples_and_names_of_classes_do_not_matter(n: int, k: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    z, y = 3 * torch.randn(n, k, generator=g, dtype=torch.float64), torch.randint(k, (n,), generator=g)
    samples, classes = torch.randperm(n, generator=g), torch.randperm(k, generator=g)
    renamed = torch.empty_like(classes)
    renamed[classes] = torch.arange(k)
    for loss in losses.LOSSES.values():
        torch.testing.assert_close(loss(z[samples], y[samples]), loss(z, y)[samples])
        torch.testing.assert_close(loss(z[:, classes], renamed[y]), loss(z, y))


def test_label_smoothing_is_that_of_torch() -> None:
    z, y = batch()
    torch.testing.assert_close(
        losses.label_smoothing(z, y, 0.1), F.cross_entropy(z, y, label_smoothing=0.1, reduction="none")
    )


@pytest.mark.parametrize("name", losses.LOSSES)
def test_gradients(name: str) -> None:
    z, y = batch()
    assert torch.autograd.gradcheck(lambda z: losses.LOSSES[name](z, y), z.requires_grad_())


def test_focal_mixed_derivative_by_differences() -> None:
    z, y = batch()
    gamma = torch.linspace(0.3, 6, len(y), dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda z, g: losses.focal(z, y, g), (z.requires_grad_(), gamma.requires_grad_())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_focal_is_finite_everywhere(gamma: float, dtype: torch.dtype) -> None:
    """Value, gradient and mixed derivative at every logit gap, on the right and on the wrong side."""
    gaps = torch.tensor(GAPS + [-g for g in GAPS])
    z = torch.stack([gaps, torch.zeros_like(gaps), -gaps.abs()], 1).to(dtype).requires_grad_()
    y = torch.zeros(len(gaps), dtype=torch.int64)
    for g in (gamma, torch.full((len(gaps),), gamma)):
        assert torch.isfinite(losses.focal(z, y, g)).all()
    g = torch.full((len(gaps),), gamma, requires_grad=True)
    value = losses.focal(z, y, g)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    assert torch.isfinite(slope).all()
    for direction in (torch.ones_like(slope), torch.randn_like(slope)):
        (mixed,) = torch.autograd.grad((slope * direction).sum(), g, retain_graph=True)
        assert torch.isfinite(mixed).all()
        (second,) = torch.autograd.grad((slope * direction).sum(), z, retain_graph=True)
        assert torch.isfinite(second).all()


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=5), st.floats(0, 50, width=32))
def test_focal_is_finite_for_any_logits(row: list[float], gamma: float) -> None:
    z = torch.tensor([row], requires_grad=True)
    g = torch.tensor([gamma], requires_grad=True)
    value = losses.focal(z, torch.tensor([0]), g)
    (slope,) = torch.autograd.grad(value, z, create_graph=True)
    (mixed,) = torch.autograd.grad(slope[0, 0], g)
    assert math.isfinite(value.item()) and value.item() >= 0
    assert torch.isfinite(slope).all() and torch.isfinite(mixed).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_gamma_zero_is_cross_entropy_exactly(as_tensor: bool) -> None:
    z = torch.cat([batch()[0].float(), torch.tensor([[30.0, 0, 0, 0], [1e4, 0, 0, 0], [-1e4, 0, 0, 0]])])
    y = torch.cat([batch()[1], torch.zeros(3, dtype=torch.int64)])
    z.requires_grad_()
    gamma = torch.zeros(len(y)) if as_tensor else 0.0
    a, b = losses.focal(z, y, gamma), losses.cross_entropy(z, y)
    assert torch.equal(a, b)
    assert torch.equal(torch.autograd.grad(a.sum(), z)[0], torch.autograd.grad(b.sum(), z)[0])


def test_focal_keeps_its_digits_near_certainty() -> None:
    z = torch.tensor([[12.0, 0.0]])
    p = torch.sigmoid(torch.tensor(12.0, dtype=torch.float64))
    truth = -((1 - p) ** 2) * torch.log(p)
    assert losses.focal(z, torch.tensor([0]), 2.0).item() == pytest.approx(truth.item(), rel=1e-5)


def test_focal_falls_in_gamma() -> None:
    z, y = batch()
    values = torch.stack([losses.focal(z, y, g) for g in GAMMAS])
    assert (values.diff(dim=0) <= 0).all()


@given(
    st.lists(st.floats(-12, 12), min_size=2, max_size=6),
    st.integers(0, 5),
    st.one_of(st.just(0.0), st.floats(1, 20)),
)
def test_focal_bounds_cross_entropy_less_gamma_times_the_entropy(logits: list[float], label: int, gamma: float) -> None:
    """(1 − p)^γ ≥ 1 − γ p, by Bernoulli for γ ≥ 1, and −p_y log p_y ≤ H (Mukhoti et al. 2020)."""
    z, y = torch.tensor([logits], dtype=torch.float64), torch.tensor([label % len(logits)])
    log_p = torch.log_softmax(z, 1)
    entropy = -(log_p.exp() * log_p).sum(1)
    slack = losses.focal(z, y, gamma) - (losses.cross_entropy(z, y) - gamma * entropy)
    assert (slack >= -1e-12).all()


def test_bad_input() -> None:
    z, y = batch()
    for call, match in [
        (lambda: losses.focal(z, y, -1.0), "gamma must be >= 0, got -1.0"),
        (lambda: losses.focal(z, y, torch.ones(3)), r"gamma must be a number or have one value per sample \(6,\)"),
        (lambda: losses.cross_entropy(z[0], y), r"logits must have shape \(N, K\), got \(4,\)"),
        (lambda: losses.brier(z, y[:-1]), r"labels must have shape \(6,\)"),
        (lambda: losses.mse(z, y.float()), "int64"),
        (lambda: losses.label_smoothing(z, y, 1.5), r"smoothing must be in \[0, 1\], got 1.5"),
        (
            lambda: losses.label_smoothing(z, y, torch.ones(4)),
            "smoothing must be a number or have one value per sample",
        ),
        (lambda: losses.dual_focal(z, y, -1.0), "gamma must be >= 0, got -1.0"),
        (lambda: losses.inverse_focal(z, y, math.nan), "gamma must be >= 0, got nan"),
        (lambda: losses.adafocal(z, y, math.inf), "gamma must be finite, got inf"),
        (lambda: losses.confidence_penalty(z, y, -0.1), "beta must be >= 0, got -0.1"),
        (lambda: losses.confidence_penalty(z, y[:-1]), r"labels must have shape \(6,\)"),
    ]:
        with pytest.raises(InputError, match=match):
            call()


@pytest.mark.parametrize("name", losses.SOFT)
def test_probabilities_as_labels(name: str) -> None:
    """Σ_k q_k ℓ(k), and its gradient and mixed derivative in gamma; squares take q in the place of the one-hot row."""
    loss = losses.LOSSES[name]
    z, y = batch(7, 4)
    q = torch.rand(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = q / q.sum(1, keepdim=True)
    gamma = torch.linspace(0.2, 3, 7, dtype=torch.float64, requires_grad=True)
    more = {"gamma": gamma} if losses.takes(loss) == "gamma" else {}

    def derivatives(value: Tensor) -> Iterator[Tensor]:
        yield value.detach()
        (gradient,) = torch.autograd.grad(value.sum(), z, create_graph=True)
        yield gradient.detach()
        if more:
            yield from torch.autograd.grad((gradient * torch.arange(4)).sum(), gamma)

    z.requires_grad_()
    expected = sum(q[:, k] * loss(z, torch.full_like(y, k), **more) for k in range(4))
    if name in ("brier", "mse"):
        scores = torch.softmax(z, 1) if name == "brier" else z
        expected = (scores - q).square().sum(1) / (1 if name == "brier" else 4)
    for found, wanted in zip(derivatives(loss(z, q, **more)), derivatives(expected)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(loss(z, F.one_hot(y, 4).double()), loss(z, y), rtol=1e-12, atol=1e-14)
        ruled_out = loss(torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([[0.3, 0.7, 0.0]]))
    assert name in ("mse", "label_smoothing") or torch.isfinite(ruled_out).all()


def test_probabilities_are_refused_by_name() -> None:
    z, y = batch()
    for name in set(losses.LOSSES) - set(losses.SOFT):
        with pytest.raises(InputError, match=r"go with the losses brier, .* only"):
            losses.LOSSES[name](z, F.one_hot(y, 4).double())
    with pytest.raises(InputError, match=r"must have the shape of the logits \(6, 4\), got \(6, 3\)"):
        losses.cross_entropy(z, torch.ones(6, 3) / 3)
