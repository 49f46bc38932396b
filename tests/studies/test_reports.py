"""The reports of studies, on tiny runs of the trainer: files, rows, and numbers that are those of the runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from metacal.calibration import ece, nll
from metacal.errors import InputError
from metacal.predictions import Predictions
from metacal.runs.folder import RunFolder
from metacal.studies import compare, measured, optimizers, pages
from metacal.studies.choices import chosen as choose
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


def test_runs_compared_and_drawn_again_without_them(study, tmp_path):
    study = dataclasses.replace(study, report="compare", choices={"the better": ["cross_entropy", "focal"]})
    table, numbers, *figures, page = compare.report(study)
    text = table.read_text()
    assert all(str(job.folder.path) in text for job in study.jobs) and "| the better | none |" in text
    assert "<html" in page.read_text() and json.loads(numbers.read_text())["command"] == "metacal study tiny"
    assert len(figures) == 2 and all(figure.stat().st_size > 5_000 for figure in figures)
    found = json.loads(numbers.read_text())
    scaled = [np.mean(row["measures"]["temperature"]["ece"]["values"]) for row in found["rows"]]
    assert len(scaled) == 4 and scaled == sorted(scaled)
    for row in found["rows"]:  # the bins are those that the ECE is made of
        for scaling, runs in row["bins"].items():
            sums = np.array(runs)
            errors = np.abs(sums[:, 1] - sums[:, 2]).sum(1) / sums[:, 0].sum(1)
            assert errors == pytest.approx(row["measures"][scaling]["ece"]["values"])
    drawn, _, *pictures = pages.redraw(numbers, tmp_path)
    assert text.partition("\n\n")[0] in drawn.read_text() and len(pictures) == 2


def test_a_row_that_is_chosen_for_each_seed_on_validation(study):
    spec = {"columns": ["nll", "gamma", "val/ece"], "epochs": ["selected", "last"], "sort": "nll"}
    choices = {"the better": ["cross_entropy", "focal"]}
    study = dataclasses.replace(study, report="measured", choices=choices, spec=spec)
    table, numbers = measured.report(study)
    found = json.loads(numbers.read_text())
    for epoch in ("selected", "last"):
        values = [{**entry, **entry[epoch]} for entry in found["runs"]]
        best = choose(values, choices)["the better"]
        assert [entry["seed"] for entry in best] == [0, 1]
        for entry in best:
            val = [nll(Predictions.load(job.folder.predictions("val", epoch))) for job in study.jobs
                   if job.config.seed == entry["seed"]]  # fmt: skip
            assert entry["val/nll"] == pytest.approx(min(map(float, val)))
    text = table.read_text()
    assert_says_where_its_numbers_come_from(text, study)
    assert text.count("| the better |") == 2 and text.count("over 2 seeds") == 2
    first = text.partition("At the last epoch")[0]
    means = [float(line.split("|")[2].split("±")[0]) for line in first.splitlines() if "±" in line and line[0] == "|"]
    assert len(means) == 5 and means == sorted(means)
    with pytest.raises(InputError, match="sort must be one of the study's columns nll, gamma, val/ece, got ece"):
        measured.collect(dataclasses.replace(study, spec={**spec, "sort": "ece"}))


def test_a_study_of_validation_leaves_the_test_split_unread(study):
    for job in study.jobs:
        (job.folder.path / "predictions" / "test.npz").rename(job.folder.path / "hidden.npz")
    try:
        measured.report(dataclasses.replace(study, report="measured", spec={"columns": ["val/nll", "minutes"]}))
    finally:
        for job in study.jobs:
            (job.folder.path / "hidden.npz").rename(job.folder.path / "predictions" / "test.npz")


def test_what_is_not_finished_is_named(study, tmp_path):
    lost = dataclasses.replace(study.jobs[-1], folder=RunFolder(tmp_path / "lost" / "seed1"))
    part = dataclasses.replace(study, jobs=study.jobs[:-1], unfinished=[lost])
    text = optimizers.report(part)[0].read_text()
    assert f"{lost.folder.path}: stopped before training began" in text
    assert "7 runs, 1 more not finished" in text and "over 1 or 2 seeds" in text


def test_runs_of_several_versions_name_their_own(study):
    folder = study.jobs[0].folder
    before = folder.read_summary()
    folder.write_summary(before | {"versions": {"metacal": "0.0.0"}})
    try:
        text = optimizers.report(study)[0].read_text()
    finally:
        folder.write_summary(before)
    assert text.count("metacal 0.0.0") == 1 and "not the same for all runs" in text
    assert text.count(f"metacal {before['versions']['metacal']}") == len(study.jobs) - 1


def test_seeds_are_counted_by_row():
    assert over_seeds([3, 3]) == "Mean ± standard deviation over 3 seeds"
    assert over_seeds([3, 1]) == "Mean ± standard deviation over 1 or 3 seeds"
    assert over_seeds([1]) == "One run each"
