"""The reports of studies, on tiny runs of the trainer: files, rows, and numbers that are those of the runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from metacal.calibration import ece, nll
from metacal.predictions import Predictions
from metacal.runs.folder import RunFolder
from metacal.studies import compare, methods, optimizers, validation
from metacal.studies.footer import over_seeds
from metacal.studies.grid import Study, grid_jobs
from metacal.training.run import run


def assert_says_where_its_numbers_come_from(text: str, study: Study) -> None:
    assert all(f"| {job.folder.path} |" in text for job in study.jobs)
    assert f"`{study.command}`: {len(study.jobs)} runs" in text and "Versions: metacal " in text
    assert "| **" not in text, "the best without a test"


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    words = ["method=cross_entropy,focal", "optimizer=sgd,adamw", "seed=0,1", "epochs=1", "model.hidden=[8]"]
    words += [
        "data.train_size=200",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        f"runs={folder}",
        "progress=false",
    ]
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
    assert "Optimizer adamw" in text and text.count("over 2 seeds") == 2
    assert_says_where_its_numbers_come_from(text, study)
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
    assert len(found) == 4 and all([run["seed"] for run in runs] == [0, 1] for runs in found.values())
    folders = [run["folder"] for runs in found.values() for run in runs]
    assert sorted(folders) == sorted(str(job.folder.path) for job in study.jobs)
    assert_says_where_its_numbers_come_from(table.read_text(), study)
    text = table.read_text().partition("Where the numbers come from")[0]
    lines = [line for line in text.splitlines() if "optimizer=" in line and line.startswith("|")]
    nll = [float(line.split("|")[3].split("±")[0]) for line in lines]
    assert len(nll) == 4 and nll == sorted(nll)


def test_runs_compared(study):
    table, page, numbers, *figures = compare.report(study)
    text = table.read_text()
    assert all(str(job.folder.path) in text for job in study.jobs)
    assert "<html" in page.read_text() and json.loads(numbers.read_text())["command"] == "metacal study tiny"
    assert len(figures) >= 3 and all(figure.stat().st_size > 5_000 for figure in figures)


def test_methods_side_by_side(study):
    study = dataclasses.replace(study, choices={"the better": ["cross_entropy", "focal"]})
    table, numbers, curves = methods.report(study)
    found = json.loads(numbers.read_text())
    for epoch, rows in found.items():
        chosen = rows.pop("the better")
        assert [entry["seed"] for entry in chosen] == [0, 1]
        for entry in chosen:
            val = [nll(Predictions.load(job.folder.predictions("val", epoch))) for job in study.jobs
                   if job.config.seed == entry["seed"]]  # fmt: skip
            assert entry["val/nll"] == pytest.approx(min(map(float, val)))
    for runs in (*found["selected"].values(), *found["last"].values()):
        assert len(runs) == 4
        for entry in runs:
            assert json.loads((Path(entry["folder"]) / "summary.json").read_text())["seed"] == entry["seed"]
    text = table.read_text()
    assert_says_where_its_numbers_come_from(text, study)
    assert "over 4 seeds" in text and "| the better |" in text and curves.stat().st_size > 5_000


def test_what_is_not_finished_is_named(study, tmp_path):
    lost = dataclasses.replace(study.jobs[-1], folder=RunFolder(tmp_path / "lost" / "seed1"))
    part = dataclasses.replace(study, jobs=study.jobs[:-1], unfinished=[lost])
    text = validation.report(part)[0].read_text()
    assert f"{lost.folder.path}: stopped before training began" in text
    assert "7 runs, 1 more not finished" in text and "over 1 or 2 seeds" in text


def test_runs_of_several_versions_name_their_own(study):
    folder = study.jobs[0].folder
    before = folder.read_summary()
    folder.write_summary(before | {"versions": {"metacal": "0.0.0"}})
    try:
        text = validation.report(study)[0].read_text()
    finally:
        folder.write_summary(before)
    assert text.count("metacal 0.0.0") == 1 and "not the same for all runs" in text
    assert text.count(f"metacal {before['versions']['metacal']}") == len(study.jobs) - 1


def test_seeds_are_counted_by_row():
    assert over_seeds([3, 3]) == "Mean ± standard deviation over 3 seeds"
    assert over_seeds([3, 1]) == "Mean ± standard deviation over 1 or 3 seeds"
    assert over_seeds([1]) == "One run each"
