"""Runs killed at random times, once or several times, and resumed: bit for bit the run that was never stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz.attack import attack
from reference.same_run import assert_same_run, logged_events

pytestmark = pytest.mark.slow

SMALL = [
    "data.train_size=300",
    "data.batch_size=32",
    "epochs=4",
    "threads=1",
    "progress=false",
    "monitor.resamples=0",
    "monitor.max_share=null",
    "monitor.figures_every=2",
    "monitor.log_every=3",
]
NETS = [
    ["model.hidden=[12]"],
    ["model=cnn", "model.width=2", "model.dropout=0.3", "data.crop_padding=1", "data.flip=true"],
    ["model=resnet20", "model.width=2"],
]
METHODS = [
    ["method=metacal"],
    ["method=gamma_net", "meta.reference_points=bank", "meta.bank_batches=2", "meta.every=2"],
    ["method=gamma_net", "meta.engine=difference"],
    ["method=gamma_scalar"],
    ["method=learned_smoothing"],
    ["method=adafocal"],
    ["method=mixup"],
    ["method=focal_schedule"],
    ["method=calmo"],
    ["method=cross_entropy", "penalties.gn_trace.weight=0.01", "penalties.gn_trace.every=3"],
]
OPTIMIZERS = [
    ["optimizer=sgd", "optimizer.lr=0.02"],
    ["optimizer=adamw"],
    ["optimizer=muon"],
    ["optimizer=sam"],
]
MONITORS = [[], [], ["monitor.every=5", "monitor.subset=20"], ["monitor=off"]]
SAVES = ["checkpoint_every=0.2", "checkpoint_every=0.4", "checkpoint_every=1", "checkpoint_every=2"]


def command(words: list[str], folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "metacal", "train", *words, f"run_dir={folder}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen, allowed: tuple[int, ...]) -> int:
    out, _ = process.communicate(timeout=600)
    assert process.returncode in allowed, f"status {process.returncode}: {out[-600:]}"
    assert "Traceback" not in out, out[-600:]
    return process.returncode


def test_killed_runs_resume_bit_for_bit(tmp_path):
    def check(seed: int) -> str:
        rng = random.Random(seed)
        words = [*SMALL, *(word for kind in (NETS, METHODS, OPTIMIZERS, MONITORS) for word in rng.choice(kind))]
        words += [rng.choice(SAVES), "keep_every=3", f"seed={rng.randrange(1000)}"]
        whole, killed = tmp_path / f"{seed}" / "whole", tmp_path / f"{seed}" / "killed"
        began = time.monotonic()
        ended(command(words, whole), (0,))
        seconds = time.monotonic() - began
        kills = 0
        for _ in range(rng.choice([1, 1, 2, 4])):
            process = command(words, killed)
            # Imports take the first part of the time; what happens in it is the same for every kill.
            time.sleep(seconds * rng.uniform(0.3, 1.05))
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            process.send_signal(number)
            # Imports are killed by SIGTERM; a run that has just ended is refused when it is started again.
            if ended(process, (0, 2, 130, -number)) in (-number, 130):
                kills += 1
        if not (killed / "summary.json").exists():
            ended(command(words, killed), (0,))
        told = f"kills: {kills}, words: {' '.join(words)}"
        try:
            assert_same_run(whole, killed)
            assert logged_events(whole) == logged_events(killed), "event files"
        except AssertionError as error:
            raise AssertionError(f"{str(error)[:300]} ({told})") from None
        return "not killed in time" if kills == 0 else "resumed"

    attack("test_kills", check, 6)
