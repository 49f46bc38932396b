"""Mixup: what is mixed with what, from which draws, and that the losses are mixed alike."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metacal import losses
from metacal.errors import InputError
from metacal.mixing import mixed_loss, mixup


def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 4, 4, generator=g, dtype=torch.float64), torch.randint(5, (n,), generator=g)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_sample_is_mixed_with_its_partner_by_one_weight() -> None:
    x, y = batch()
    kept = x.clone()
    y = torch.arange(8)  # so that a label names its sample
    mixed, own, other, weight = mixup(x, y, 1.0, drawn())
    assert torch.equal(own, y) and sorted(other.tolist()) == y.tolist()
    assert 0 < weight < 1 and isinstance(weight, float)
    for i in range(8):
        torch.testing.assert_close(mixed[i], weight * x[i] + (1 - weight) * x[int(other[i])])
    assert torch.equal(x, kept)


def test_the_generator_is_all_that_decides() -> None:
    x, y = batch()
    state = torch.get_rng_state()
    a, b = mixup(x, y, 0.4, drawn()), mixup(x, y, 0.4, drawn())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2]) and a[3] == b[3]
    assert mixup(x, y, 0.4, drawn(1))[3] != a[3]
    generator = drawn()
    assert mixup(x, y, 0.4, generator)[3] != mixup(x, y, 0.4, generator)[3]  # each call draws anew


@pytest.mark.parametrize("alpha", [0.1, 1.0, 8.0])
def test_the_weight_is_that_of_a_beta_distribution(alpha: float) -> None:
    x, y = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    generator, n = drawn(), 4000
    w = torch.tensor([mixup(x, y, alpha, generator)[3] for _ in range(n)], dtype=torch.float64)
    variance = 1 / (4 * (2 * alpha + 1))
    assert ((w >= 0.5) & (w <= 1)).all()  # the greater part first
    # the distance to 1/2 is that of Beta(a, a), whose fourth central moment gives the error of the variance
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert abs((w - 0.5).square().mean() - variance) < 4 * math.sqrt((fourth - variance**2) / n)


def test_the_partners_are_uniform() -> None:
    x, y, generator = torch.zeros(4, 1), torch.arange(4), drawn()
    counts = torch.zeros(4, 4)
    for _ in range(2000):
        counts[y, mixup(x, y, 1.0, generator)[2]] += 1
    assert (counts - 500).abs().max() < 5 * math.sqrt(2000 * 0.25 * 0.75)


def test_cross_entropy_is_mixed_as_its_target_is() -> None:
    _, y = batch()
    z = torch.randn(8, 5, generator=drawn(), dtype=torch.float64)
    other, weight = y.flip(0), 0.3
    target = weight * F.one_hot(y, 5) + (1 - weight) * F.one_hot(other, 5)
    expected = F.cross_entropy(z, target, reduction="none")
    torch.testing.assert_close(mixed_loss(losses.cross_entropy, z, y, other, weight), expected)


def test_any_loss_is_mixed_with_what_it_takes() -> None:
    _, y = batch()
    z, gamma = torch.randn(8, 5, generator=drawn(), dtype=torch.float64), torch.linspace(0, 3, 8)
    other = y.roll(1)
    expected = 0.8 * losses.focal(z, y, gamma) + 0.2 * losses.focal(z, other, gamma)
    torch.testing.assert_close(mixed_loss(losses.focal, z, y, other, 0.8, gamma), expected)
    for weight, labels in ((1.0, y), (0.0, other)):
        torch.testing.assert_close(mixed_loss(losses.focal, z, y, other, weight, gamma), losses.focal(z, labels, gamma))


def test_a_batch_of_one_is_left_as_it_is() -> None:
    x, y = batch(1)
    mixed, _, other, _ = mixup(x, y, 1.0, drawn())
    torch.testing.assert_close(mixed, x)
    assert torch.equal(other, y)


def test_bad_input() -> None:
    x, y = batch()
    for call, match in [
        (lambda: mixup(x, y, 0.0, drawn()), "alpha must be a number > 0"),
        (lambda: mixup(x, y, math.nan, drawn()), "alpha must be a number > 0"),
        (lambda: mixup(x, y[:-1], 1.0, drawn()), "same number of samples"),
        (lambda: mixup(x[:0], y[:0], 1.0, drawn()), "at least one"),
        (lambda: mixup(x.byte(), y, 1.0, drawn()), "x must be floating-point, got torch.uint8"),
        (lambda: mixed_loss(losses.mse, x[:, 0, 0], y, y, 1.5), r"weight must be in \[0, 1\], got 1.5"),
    ]:
        with pytest.raises(InputError, match=match):
            call()
