"""Parts from a file outside the package: found by name, trained with, logged, compared, printed and checked."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from torch import nn

from metacal.calibration.surrogates import SURROGATES
from metacal.cli import main
from metacal.config.compose import compose
from metacal.config.help import key_table
from metacal.errors import InputError
from metacal.gamma import SOURCES
from metacal.losses import LOSSES
from metacal.monitors import MONITORS
from metacal.optim import OPTIMIZERS, SCHEDULES, TRANSPOSES
from metacal.optim.transpose import transposed_update
from metacal.penalties import PENALTIES
from metacal.runs.settings import defaults_of
from metacal.training.dashboards import layout

WORDS = [
    "method=gamma_net",
    "data.train_size=200",
    "data.batch_size=50",
    "model.hidden=[8]",
    "epochs=1",
    "loss.name=tempered_focal",
    "gamma.source=gamma_net",
    "penalties.logit_norm.weight=0.01",
    "optimizer.name=normalised_gd",
    "optimizer.floor=0.01",
    "meta.objective=squared_gap",
    "meta.scale=3",
    "schedule.name=linear",
    "monitor.weights_every=1",
    "monitor.log_every=1",
    "monitor.resamples=0",
    "monitor.figures_every=0",
]


@pytest.fixture
def own(monkeypatch) -> Iterator[ModuleType]:
    """The file, imported; the dictionaries are as before afterwards."""
    known = (LOSSES, PENALTIES, SURROGATES, OPTIMIZERS, TRANSPOSES, SCHEDULES, SOURCES, MONITORS)
    before = [dict(parts) for parts in known]
    path = Path(__file__).resolve().parents[1] / "reference" / "own_parts.py"
    spec = importlib.util.spec_from_file_location("own_parts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    defaults_of.cache_clear()
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for parts, entries in zip(known, before):
            parts.clear()  # type: ignore[attr-defined]
            parts.update(entries)  # type: ignore[arg-type]
        defaults_of.cache_clear()


def test_a_run_of_own_parts_is_trained_logged_compared_and_printed(own, tmp_path, capsys):
    first, second = tmp_path / "a" / "seed0", tmp_path / "b" / "seed0"
    assert main(["train", *WORDS, f"run_dir={first}"]) == 0
    config = yaml.safe_load((first / "config.yaml").read_text())
    assert config["optimizer"]["floor"] == 0.01 and config["optimizer"]["lr"] == 0.02
    assert config["loss"] == {
        "name": "tempered_focal",
        "learn_smoothing": "no",
        "class_weight": "none",
        "temperature": 2.0,
    }
    assert config["meta"]["scale"] == 3.0 and "bandwidth" not in config["meta"]
    lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert sum("norm" in line for line in lines if line["split"] == "weights") == 4  # 200 images in batches of 50
    assert any(line.get("logit_norm", 0) > 0 for line in lines if line["split"] == "penalty")
    assert any(line.get("outer_loss", 0) > 0 for line in lines if line["split"] == "meta")
    assert "weights" in layout(["weights/norm"])
    plain = [word for word in WORDS if not word.startswith(("optimizer.", "schedule.", "gamma.", "meta."))]
    assert main(["train", *plain, "gamma.source=opposite", f"run_dir={second}"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(first)]) == 0
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "normalised_gd" in shown and "opposite" in shown


def test_own_parts_are_checked_and_described_like_the_others(own):
    for words, message in (
        (["loss.name=tempered_focl"], "did you mean 'tempered_focal'"),
        (["loss.name=tempered_focal", "loss.temperature=0"], "loss.temperature must be > 0, got 0"),
        (["penalties.logit_norm.powr=1"], "did you mean 'penalties.logit_norm.power'"),
        (["optimizer.floor=1"], "optimizer.floor=1.* is no setting of sgd"),
        (["monitor.weights_every=-1"], "monitor.weights_every must be >= 0"),
    ):
        with pytest.raises(InputError, match=message):
            compose(words)
    table = key_table()
    for key in (
        "loss.temperature",
        "optimizer.floor",
        "schedule.end",
        "gamma.top",
        "meta.scale",
        "monitor.weights_every",
    ):
        assert f"`{key}`" in table


def test_the_transpose_of_an_own_optimizer_is_that_of_its_step(own):
    """(∂U/∂g)ᵀ u by central differences of real steps."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    start, grad, u = p.detach().clone(), *torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    optimizer = own.NormalisedGD([p], lr=0.1, eps=0.5)

    def moved(g: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            p.copy_(start)
        p.grad = g.clone()
        optimizer.step()
        return p.detach().clone()

    expected = torch.zeros_like(grad)
    for i in range(grad.numel()):
        e = torch.zeros(6, dtype=torch.float64)
        e[i] = 1e-5
        e = e.view(3, 2)
        expected.view(-1)[i] = ((moved(grad + e) - moved(grad - e)) / 2e-5 * u).sum()
    p.grad = grad.clone()
    apply = transposed_update(optimizer, [p])
    optimizer.step()
    (v,), factor = apply([u.clone()])
    torch.testing.assert_close(v * factor, expected, rtol=1e-7, atol=1e-9)
