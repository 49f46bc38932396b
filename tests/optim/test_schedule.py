from __future__ import annotations

import math

import pytest

from metacal.errors import InputError
from metacal.optim import learning_rate_factor


def test_warmup_is_linear_and_then_the_schedule_begins():
    factors = [learning_rate_factor(s, 100, name="constant", warmup_steps=4) for s in range(6)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_is_half_a_cosine_from_one_to_final():
    for step in (0, 13, 50, 99, 100):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * step / 100)) / 2
        assert learning_rate_factor(step, 100, name="cosine", final=0.1) == pytest.approx(expected)


def test_step_falls_at_fractions_of_the_training():
    factors = [learning_rate_factor(s, 8, name="step", milestones=(0.5, 0.75), factor=0.1) for s in range(8)]
    assert factors == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_unknown_schedule():
    with pytest.raises(InputError, match="did you mean 'cosine'"):
        learning_rate_factor(0, 1, name="cosin")
