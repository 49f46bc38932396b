"""Which epoch is selected, by any of the values that select can name, and how long one waits for a better one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import metacal
from metacal.calibration import TemperatureScaling, accuracy, ece, nll
from metacal.config.compose import compose
from metacal.errors import InputError
from metacal.training.selection import score

VALUES = {"nll": nll, "ece": ece, "accuracy": lambda p: -accuracy(p)}


def blobs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes that overlap widely, so that a network soon overfits."""
    y = torch.arange(n) % 3
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x + nn.functional.one_hot(y, 4), y


@pytest.mark.parametrize("select", ["nll", "nll_scaled", "ece", "ece_scaled", "accuracy", "last"])
def test_the_model_is_that_of_the_best_epoch(select: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    x, y = blobs(60, 1)
    seen: list[tuple[float, torch.Tensor]] = []

    def look(measured: dict[str, float]) -> None:
        logits = model(x).detach()
        p = metacal.Predictions.from_logits(logits, y)
        if select.endswith("_scaled"):
            p = TemperatureScaling().fit(p).apply(p)
        value = -measured["epoch"] if select == "last" else VALUES[select.removesuffix("_scaled")](p)
        if select not in ("last", "accuracy"):
            assert measured[f"val/{select}"] == pytest.approx(value, rel=1e-9)
        seen.append((value, logits))

    fit = metacal.fit(
        model, blobs(60, 0), None, (x, y), "cross_entropy", select=select, epochs=8, batch_size=20, lr=0.5,
        callbacks=[look], progress=False,
    )  # fmt: skip
    best = min(range(8), key=lambda i: seen[i][0])
    assert fit.best_epoch == best + 1 and len(seen) == 8
    assert torch.equal(fit.model(x), seen[best][1])


def test_patience_counts_epochs_since_the_selected_one() -> None:
    model = nn.Linear(4, 3)
    data = {"train": blobs(60, 0), "val": blobs(60, 1), "method": "focal", "lr": 0.0, "progress": False}
    fit = metacal.fit(model, **data, epochs=9, patience=2)
    assert (fit.best_epoch, len(fit.history)) == (1, 3)
    assert len(metacal.fit(model, **data, epochs=4).history) == 4
    with pytest.raises(InputError, match="patience=2 needs a value that can stop improving, which select=last has not"):
        metacal.fit(model, **data, select="last", patience=2)
    for word, match in (("select=ec", "did you mean 'ece'"), ("patience=0", "patience must be >= 1, got 0")):
        with pytest.raises(InputError, match=match):
            compose([word])


def test_a_value_that_is_no_number_is_the_worst() -> None:
    assert score("ece", 1, {"val/ece": math.nan}) == score("accuracy", 1, {"val/accuracy": math.nan}) == math.inf
    assert score("accuracy", 1, {"val/accuracy": 0.75}) == -0.75 and score("last", 7, {}) < score("last", 6, {})
