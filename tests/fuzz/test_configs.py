"""Random keys and values for `metacal train`: a run of a few steps, or exit status 2 with one line on stderr."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz.attack import attack

from metacal.cli import main
from metacal.config.compose import compose, config_dir, to_yaml

pytestmark = pytest.mark.slow

SMALL = [
    "data.train_size=80",
    "data.meta_size=20",
    "data.val_size=30",
    "data.test_size=30",
    "data.batch_size=20",
    "data.meta_batch_size=16",
    "epochs=1",
    "progress=false",
    "monitor.resamples=10",
    "monitor.figures_every=0",
]
PLACES = ("compile", "device", "download", "name", "path", "resume", "run_dir", "runs", "threads", "workers")
"""Keys, by their last part, that say where something is, reach out of the process, or take a minute."""

LARGE = ("cifar", "fashion", "mnist", "svhn", "densenet", "wide_resnet", "resnet3", "resnet4", "resnet5", "resnet11")
WORDS = ["null", "true", "x", "''", "[1,2]", "[]", "{a: 1}", "1e-3", "'1e-3'", "${seed}", "${no}", "[a", "0x10", "ø"]
NOT_OURS = ["=", "a", "optimizer.lrr=1", "+new=1", "~epochs", "data=1", "method=0", "--x", "a=b=c", "model@x=mlp"]
SECONDS = 120


def leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


DEFAULTS = {
    key: value
    for key, value in leaves(yaml.safe_load(to_yaml(compose([])))).items()
    if key.rpartition(".")[2] not in PLACES
}
GROUPS = {
    folder.name: [f.stem for f in sorted(folder.glob("*.yaml")) if not f.stem.startswith(LARGE)]
    for folder in sorted(config_dir().iterdir())
    if folder.is_dir() and folder.name not in ("study", "__pycache__")
}


def value(rng: random.Random, default: Any) -> str:
    """Something of the default's kind, seldom out of range; or not."""
    if rng.random() < 0.06:
        return rng.choice(WORDS)
    if isinstance(default, bool):
        return rng.choice(["true", "false"])
    if isinstance(default, int):
        return str(rng.choice([1, 1, 2, 2, 3, 5, -1, 0, 0.5]))
    if isinstance(default, float):
        return str(rng.choice([1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 0.0, 1.0, 2.5, -0.1, 1e300, "nan", "inf"]))
    if isinstance(default, list):
        return rng.choice(["[]", "[1]", "[0.5]", "[0.5,0.2]", "[0.2,0.5]", "[2,3]", "[-1]", "[a]", "[null]"])
    if isinstance(default, str):
        return rng.choice(CHOICES.get(default, NAMES))
    return str(rng.choice([1, 2, 0.5, 4, -1, 0, "relu", "batch", "group", "null"]))


NAMES = sorted({v for v in DEFAULTS.values() if isinstance(v, str)} | {c for g in GROUPS.values() for c in g})
CHOICES = {
    "auto": ["auto", "auto", "none", "memory", "stream", "true", "false"],
    "float32": ["float32", "bf16"],
    "forward": ["forward", "reverse", "difference", "higher"],
    "raise": ["raise", "skip"],
    "features": ["features", "noise", "random", "layer"],
    "samples": ["samples", "bank"],
    "sece": ["sece", "nll", "brier", "mmce", "skce", "soft_ece", "{sece: 1, nll: 0.5}", "{}", "[sece]"],
    "linf": ["linf", "l2"],
}
"""Others of a default's kind."""


def words(seed: int) -> list[str]:
    """A method, an optimizer and up to four keys, one of them perhaps misspelled."""
    rng = random.Random(seed)
    drawn = [f"{group}={rng.choice(options)}" for group, options in GROUPS.items() if rng.random() < 0.4]
    if rng.random() < 0.7:
        drawn = [word for word in drawn if not word.startswith("data=")]
    # most keys belong to one choice of a group: those of the penalties and of the outer part are of every method
    likely = [key for key in DEFAULTS if not key.startswith(("model.", "optimizer."))]
    for key in rng.sample(sorted(DEFAULTS if rng.random() < 0.3 else likely), rng.choice([1, 1, 2, 3])):
        drawn.append(f"{key}={value(rng, DEFAULTS[key])}")
    if rng.random() < 0.04:
        drawn.append(rng.choice(NOT_OURS))
    return drawn


@contextlib.contextmanager
def limited(seconds: int) -> Any:
    def stop(*_: object) -> None:
        raise AssertionError(f"no end within {seconds} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def outcome(drawn: list[str]) -> str:
    told = " ".join(drawn)
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        limited(SECONDS),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = main(["train", *SMALL, f"run_dir={folder}/run", *drawn])
        except Exception as error:
            raise type(error)(f"{str(error)[:150]}: {told}") from error
        started = (Path(folder) / "run" / "config.yaml").exists()
    lines = err.getvalue().splitlines()
    assert status in (0, 1, 2), f"status {status}: {told}"
    if status == 0:
        return "ran"
    assert len(lines) == 1 and lines[0].startswith("metacal: "), f"status {status} with {lines[:3]}: {told}"
    assert len(lines[0]) < 600, f"a line of {len(lines[0])} characters: {told}"
    if status == 2:
        assert not started, f"refused after the run had started: {lines[0]}: {told}"
        return "refused"
    return "stopped by itself"


def test_configs() -> None:
    attack("test_configs", lambda seed: outcome(words(seed)), 120)
