"""Several ranks equal one process: parameters, states and all numbers after nine steps or twenty, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.cases import CASES, SLOW, made_by_ranks, start

Together = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return together(2, tmp_path_factory.mktemp("two"), [*CASES, "spoken"])


def together(size: int, folder: Path, names: list[str]) -> Together:
    """What one process made of each case, and what each of `size` ranks made, which work at the same time."""
    processes = start(size, folder, names)
    one = {name: SLOW[name]() for name in names}
    many = made_by_ranks(processes, size, folder)
    return {name: (one[name], [made.get(name, "it was not reached") for made in many]) for name in names}


def differences(name: str, made: Together) -> list[str]:
    one, many = made[name]
    wrong = [f"rank {r}: {values}" for r, values in enumerate(many) if isinstance(values, str)]
    if wrong:
        return wrong
    # a difference of logits over ε magnifies their rounding
    tolerance = 1e-6 if name.endswith("float32") else 1e-11 if "difference" in name else 1e-12
    for key, value in one.items():
        theirs = many[0].get(key)
        if theirs is None or theirs.shape != value.shape:
            wrong.append(f"{key}: {value.shape} and {None if theirs is None else theirs.shape}")
            continue
        # relative to the largest entry; numbers like a KL divergence are differences of numbers of size 1
        scale = max(1.0, float(value.double().abs().nan_to_num(posinf=0.0).max()))
        if key == "hypergradient_snr":  # a ratio of hypergradients, which may be 1e-4 of the numbers they are made of
            scale *= 100
        close = torch.isclose(value.double(), theirs.double(), rtol=0, atol=tolerance * scale, equal_nan=True)
        if not close.all():
            wrong.append(f"{key}: off by {float((value.double() - theirs.double())[~close].abs().max() / scale):.1e}")
        # the same bits on every rank, so that they never part
        wrong += [f"{key}: rank {r} has other bits" for r, m in enumerate(many) if not _same(m[key], theirs)]
    return wrong + [f"{key}: no such value of one process" for key in many[0].keys() - one.keys()]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name: str, two: Together) -> None:
    assert differences(name, two) == []


def test_a_step_says_its_gradients_and_little_else(two: Together) -> None:
    """g and u, and with SAM g twice; a step that ranks cannot make together is refused on all of them."""
    for said in two["spoken"][1]:
        assert not isinstance(said, str), said
        for optimizer in ("sgd", "adam"):
            for rho, sums in ((None, 1), (0.1, 2)):
                assert sums <= said[f"plain, {optimizer}, {rho}"] < sums + 0.03
                assert sums + 1 <= said[f"meta, {optimizer}, {rho}"] < sums + 1.03
        assert said["seed"] == "seed must be the same on all ranks, got 0 on 0 and 1 on 1"
        assert "sparse=False" in said["sparse"] and "got none" in said["empty"] and "one rank" in said["higher"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_equal_one_for_every_method_and_optimizer(size: int, tmp_path: Path) -> None:
    made = together(size, tmp_path, [name for name in SLOW if name != "spoken"])
    assert {name: wrong for name in made if (wrong := differences(name, made))} == {}
