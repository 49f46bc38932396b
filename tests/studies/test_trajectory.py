"""The trajectory study: its correlations, its grid, and a tiny one from end to end."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest

from metacal.cli import main
from metacal.errors import InputError
from metacal.studies import grid
from metacal.studies.trajectory import HELD_OUT_SHARPNESS, SHARPNESS, coupling, lag_of_best_correlation
from metacal.training.run import run


def test_lag_is_found_and_signed():
    rng = np.random.default_rng(0)
    base = rng.standard_normal(200)
    sharpness = base[5:-5]
    assert lag_of_best_correlation(base[2:-8], sharpness, 10) == (3, pytest.approx(1.0))  # a(t + 3) = b(t)
    assert lag_of_best_correlation(base[8:-2], sharpness, 10) == (-3, pytest.approx(1.0))
    assert lag_of_best_correlation(sharpness, sharpness, 10) == (0, pytest.approx(1.0))
    assert lag_of_best_correlation([1, 1, 1, 1], [1, 2, 3, 4], 2)[0] == 0


def test_coupling_pairs_values_of_the_same_step():
    steps = range(0, 100, 10)
    sharpness = {s: float(s) for s in steps}
    linear = {s: 0.1 + 0.001 * s for s in steps} | {5: 9.0}  # a step without sharpness is left out
    falling = {s: -(float(s) ** 3) for s in steps}
    series = {
        SHARPNESS: sharpness,
        HELD_OUT_SHARPNESS: falling,
        "train_subset/ece": linear,
        "train_subset/kce": falling,
    }
    series |= {"val_subset/ece": dict.fromkeys(steps, 0.5), "val_subset/kce": linear}
    found = coupling(series)
    assert found["train ECE"]["pearson"] == pytest.approx(1.0) and found["train ECE"]["points"] == 10
    assert found["train KCE"]["spearman"] == pytest.approx(-1.0) and found["train KCE"]["pearson"] > -1
    assert np.isnan(found["held-out ECE"]["pearson"])
    own = coupling(series, own=True)
    assert own["train ECE"] == found["train ECE"]
    assert found["held-out KCE"]["spearman"] == pytest.approx(1.0) == -own["held-out KCE"]["spearman"]
    with pytest.raises(InputError, match="monitor=full"):
        coupling({SHARPNESS: sharpness})


def test_a_study_composes_all_of_its_runs_before_any_starts():
    study = grid.load_study("trajectory", "paper", ["data=digits"])
    assert Counter(job.label for job in study.jobs) == {
        **dict.fromkeys(("GD", "SGD", "AdamW", "Muon", "SAM"), 4),
        "BulkSGD": 6,
    }
    assert len({str(job.folder.path) for job in study.jobs}) == 26
    assert all("monitor.subset=5000" in job.words and "monitor.subset=500" not in job.words for job in study.jobs)
    for arguments, message in (
        (("trajectry",), "did you mean 'trajectory'"),
        (("trajectory", "papr"), "did you mean 'paper'"),
        (("trajectory", None, ["optimizer.lrr=1"]), "did you mean 'optimizer.lr'"),
        (("trajectory", None, ["optimizer.lr=0.1"]), "the study sweeps over optimizer.lr"),
    ):
        with pytest.raises(InputError, match=message):
            grid.load_study(*arguments)


def test_a_tiny_study_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = tmp_path / "configs" / "study"
    spec.mkdir(parents=True)
    (spec / "tiny.yaml").write_text(
        "report: trajectory\n"
        "common: [method=cross_entropy, model=mlp, 'model.hidden=[8]', data=digits, data.train_size=200, epochs=6,\n"
        "  monitor=full, monitor.every=2, monitor.subset=100, monitor.max_share=null, monitor.certificate=0,\n"
        "  monitor.resamples=0, monitor.figures_every=0]\n"
        "published: {SGD: {train ECE: [0.84, 0.07], held-out ECE: 0.97}}\n"
        "groups:\n"
        "  SGD: {words: [data.batch_size=100], sweep: {optimizer.lr: [0.05, 0.2]}}\n"
    )
    monkeypatch.setattr(grid, "config_dir", lambda: tmp_path / "configs")
    for job in grid.load_study("tiny").jobs:  # in this process: a study starts each in one of its own
        assert run(job.config, job.folder, job.words).status == 0
    assert main(["study", "tiny", "jobs=2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"SGD, published +0.84 ± 0.07 +– +0.97 +–", out) and "2 runs, all finished" in out
    report = tmp_path / "runs" / "tiny" / "report"
    assert {p.name for p in report.iterdir()} == {"table.md", "numbers.json", "phase.png", "curves.png"}
    numbers = json.loads((report / "numbers.json").read_text())
    assert len(numbers["runs"]) == 2
    assert all(-1 <= run["own"]["held-out ECE"]["pearson"] <= 1 for run in numbers["runs"])
    assert main(["study", "redraw", str(report / "numbers.json"), "docs"]) == 0
    pictures = {"tiny_phase.png": "phase.png", "tiny_curves.png": "curves.png"}
    assert {p.name for p in (tmp_path / "docs").iterdir()} == {"tiny.md", "tiny.json", *pictures}
    page = (tmp_path / "docs" / "tiny.md").read_text()
    assert page.startswith("# tiny\n\n    metacal study tiny") and all(f"]({name})" in page for name in pictures)
    values = next(line for line in (report / "table.md").read_text().splitlines() if line.startswith("| SGD, here"))
    assert values in page
    assert main(["study", "tiny", "jobs=x"]) == 2
