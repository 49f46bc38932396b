"""Run folders with made-up predictions, as a training run writes them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metacal.calibration import TemperatureScaling, accuracy
from metacal.config import Config
from metacal.config.compose import compose, to_yaml
from metacal.predictions import Predictions

SMALL = [
    "data.train_size=300",
    "data.batch_size=32",
    "model.hidden=[16]",
    "epochs=2",
    "threads=1",
    "progress=false",
    "monitor.resamples=0",
    "monitor.figures_every=1",
    "monitor.max_share=null",
    "monitor.log_every=3",
]
"""Words of a run that logs all that a run can, in seconds."""


@functools.cache
def composed(words: tuple[str, ...]) -> Config:
    """The config of a command's words."""
    return compose(words)


def write_run(
    path: Path,
    words: Sequence[str] = (),
    seed: int = 0,
    *,
    sharpness: float = 1.5,
    n: int = 200,
    labels_seed: int = 0,
    finished: bool = True,
    noise: float = 0.2,
    step_ms: Sequence[float] = (),
    train_measures: bool = False,
    **summary: Any,
) -> Path:
    """A run of `metacal train *words seed=…` whose logits are `sharpness` times calibrated ones, with noise.

    `step_ms` are the step times in its log; with `train_measures` it has NLL and ECE on training there.
    """
    path.mkdir(parents=True)
    key = (*words, f"seed={seed}")
    config = replace(composed(tuple(words)), seed=seed)
    (path / "config.yaml").write_text(to_yaml(config))
    lines = []
    for epoch in (1, 2, 3):
        line = {"step": 10 * epoch, "epoch": epoch, "split": "val", "ece": 0.1 / epoch + 0.01 * seed, "nll": 1 / epoch}
        lines += [{"step": 10 * epoch - 5, "epoch": epoch - 1, "split": "train", "loss": 2.0 / epoch}, line]
        if train_measures:
            lines.append(
                {"step": 10 * epoch, "epoch": epoch, "split": "train", "nll": 0.8 / epoch, "ece": 0.05 / epoch}
            )
    lines += [{"step": 1 + i, "epoch": 0, "split": "time", "step_ms": ms} for i, ms in enumerate(step_ms)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    if not finished:
        return path
    splits = {name: made_up(n, seed, labels_seed + i, sharpness, noise) for i, name in enumerate(("test", "val"))}
    for name, p in splits.items():
        p.save(path / "predictions" / f"{name}.npz")
    found = {
        "method": config.method,
        "name": config.name,
        "seed": seed,
        "test/accuracy": accuracy(splits["test"]),
        "test/temperature": TemperatureScaling().fit(splits["val"]).temperature,
        "epochs": 3,
        "steps": 30,
        "time/train_s": 60.0 + seed,
        "device": "cpu",
        "data": {"name": "digits", "fingerprint": f"{labels_seed:08d}", "train": 100, "meta": 0, "val": n, "test": n},
        "command": " ".join(["metacal", "train", *key]),
        "versions": {"metacal": "0.1.0", "torch": "2.0"},
    } | summary
    (path / "summary.json").write_text(json.dumps(found))
    return path


def made_up(n: int, seed: int, labels_seed: int, sharpness: float, noise: float = 0.2) -> Predictions:
    """Labels that depend on `labels_seed` only, and logits that are overconfident where sharpness > 1."""
    g = torch.Generator().manual_seed(labels_seed)
    z = 1.5 * torch.randn(n, 4, generator=g, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(z, 1), 1, generator=g).squeeze(1)
    own = torch.Generator().manual_seed(1000 + seed)
    return Predictions.from_logits(
        sharpness * (z + noise * torch.randn(n, 4, generator=own, dtype=torch.float64)), labels
    )
