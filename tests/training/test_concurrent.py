"""Several processes of one command: whichever ends the run first, the others leave it as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from metacal.cli import main
from metacal.training.setup import prepare_data

WORDS = [
    "method=cross_entropy",
    "model.hidden=[8]",
    "data.train_size=200",
    "epochs=1",
    "monitor.resamples=0",
    "monitor.figures_every=0",
]
WORDS += ["threads=1", "progress=false"]


def start(code: list[str], cwd: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *code],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("how", ["again", "resume"])
def test_a_run_that_was_ended_meanwhile_is_not_wiped(how, tmp_path, monkeypatch, capsys):
    """By somebody who started and ended it after this command had looked at the folder, and before it has its parts."""
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "name=same"]
    given = words
    if how == "resume":
        assert main(["train", *words]) == 0
        (folder,) = Path("runs/same").glob("*/seed0")
        (folder / "summary.json").unlink()  # as if it had been stopped at the end
        given = [f"resume={folder}"]
    ended: dict[str, bytes] = {}

    def prepared(*args):
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert main(["train", *words]) == 0
        ended.update(files(tmp_path / "runs"))
        return prepare_data(*args)

    monkeypatch.setattr("metacal.training.run.prepare_data", prepared)
    assert main(["train", *given]) == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert files(tmp_path / "runs") == ended and any(name.endswith("summary.json") for name in ended)


def test_a_run_of_a_grid_that_was_ended_meanwhile_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "name=same"]
    ended: dict[str, bytes] = {}

    def prepared(*args):
        monkeypatch.setattr("metacal.training.run.prepare_data", prepare_data)
        assert main(["train", *words]) == 0
        ended.update(files(tmp_path / "runs"))
        return prepare_data(*args)

    monkeypatch.setattr("metacal.training.run.prepare_data", prepared)
    assert main(["train", "-m", *words, "seed=0"]) == 0
    assert "already finished, skipped" in capsys.readouterr().out
    assert files(tmp_path / "runs") == ended and any(name.endswith("summary.json") for name in ended)


@pytest.mark.slow
def test_of_processes_that_start_together_one_trains(tmp_path):
    folder = tmp_path / "run"
    command = ["-m", "metacal", "train", *WORDS, f"run_dir={folder}"]
    processes = [start(command, tmp_path) for _ in range(3)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2, 2], outputs
    for process, out in zip(processes, outputs):
        assert process.returncode == 0 or "is in use" in out or "holds a finished run" in out, out
    assert json.loads((folder / "summary.json").read_text())["epochs"] == 1
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in logged if line["split"] == "val"]) == 1
    assert main(["evaluate", str(folder), "--resamples", "0"]) == 0
