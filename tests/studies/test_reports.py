"""The reports of studies, on tiny runs of the trainer: files, rows, and numbers that are those of the runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from metacal.calibration import ece
from metacal.predictions import Predictions
from metacal.studies import compare, optimizers, validation
from metacal.studies.grid import Study, grid_jobs
from metacal.training.run import run


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    words = ["method=cross_entropy,focal", "optimizer=sgd,adamw", "seed=0,1", "epochs=1", "model.hidden=[8]"]
    words += ["data.train_size=200", "monitor.resamples=0", f"runs={folder}", "progress=false"]
    jobs = [dataclasses.replace(job, label=job.config.method) for job in grid_jobs(words)]
    for job in jobs:
        assert run(job.config, job.folder, job.words).status == 0
    return Study("tiny", "optimizers", jobs, folder / "report", "metacal study tiny")


def test_methods_under_optimizers(study, capsys):
    table, numbers, figure = optimizers.report(study)
    found = json.loads(numbers.read_text())
    assert len(found) == 8 and figure.stat().st_size > 10_000
    for entry in found:
        p = Predictions.load(Path(entry["folder"]) / "predictions" / "test.npz")
        assert entry["ece"] == pytest.approx(float(ece(p)), abs=1e-12)
        assert entry["gn_sharpness"] > 0 and entry["minutes"] > 0
    text = table.read_text()
    assert text.count("| cross_entropy |") == 2 and text.count("| focal |") == 2
    assert "Optimizer adamw" in text and "metacal study tiny" in text
    assert "Optimizer sgd" in capsys.readouterr().out


def test_settings_on_validation_are_sorted_and_leave_the_test_split_unread(study):
    for job in study.jobs:
        (job.folder.path / "predictions" / "test.npz").rename(job.folder.path / "hidden.npz")
    try:
        table, numbers = validation.report(study)
    finally:
        for job in study.jobs:
            (job.folder.path / "hidden.npz").rename(job.folder.path / "predictions" / "test.npz")
    found = json.loads(numbers.read_text())
    assert len(found) == 4 and all(len(runs) == 2 for runs in found.values())
    lines = [line for line in table.read_text().splitlines() if "optimizer=" in line and line.startswith("|")]
    nll = [float(line.split("|")[3].split("±")[0].replace("*", "")) for line in lines]
    assert len(nll) == 4 and nll == sorted(nll)


def test_runs_compared(study):
    table, page, numbers, *figures = compare.report(study)
    text = table.read_text()
    assert all(str(job.folder.path) in text for job in study.jobs)
    assert "<html" in page.read_text() and json.loads(numbers.read_text())["command"] == "metacal study tiny"
    assert len(figures) >= 3 and all(figure.stat().st_size > 5_000 for figure in figures)
