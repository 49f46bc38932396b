"""A study whose file names its columns: from the command to a page that is drawn again without the runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from metacal.calibration import TemperatureScaling, ece
from metacal.cli import main
from metacal.curvature import Focal, hessian_sharpness
from metacal.errors import InputError
from metacal.margins import moment, true_margin
from metacal.studies import grid, measured, pages
from metacal.studies.spec import read_spec
from metacal.training.run import run
from metacal.training.saved import load_run, predict_run
from metacal.training.setup import fixed_subset

STUDY = """\
# What gamma does.
report: measured
title: Gammas
setting: An MLP.
differs: everything.
columns: [accuracy, ece, train/ece, val/q, hessian_sharpness, trained/hessian_sharpness, parameters, gamma,
  epoch, temperature]
epochs: [selected, last]
plots: [[gamma.value, hessian_sharpness], [val/q, ece]]
published: {gammas value 0: {ece: 0.25, accuracy: [0.5, 0.1]}}
common: [method=focal, 'model.hidden=[8]', data.train_size=200, epochs=2, monitor=off, monitor.resamples=0]
groups:
  gammas: {sweep: {gamma.value: [0, 5], seed: [0, 1]}}
variants:
  other: {title: Others, published: {}}
"""


def test_a_study_of_named_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gammas.yaml").write_text(STUDY)
    for job in grid.load_study("gammas.yaml").jobs:  # the study takes them as they are
        assert run(job.config, job.folder, job.words).status == 0
    assert main(["study", "gammas.yaml", "jobs=2", "threads=1"]) == 0
    text = Path("runs/gammas/report/table.md").read_text()
    assert "| gammas value 0, published | 50.00 ± 10.00 | 25.00 | – |" in text and "over 2 seeds" in text
    assert "What differs from the published setting: everything." in text

    numbers = json.loads(Path("runs/gammas/report/numbers.json").read_text())
    last = numbers["runs"][3]
    (job,) = [job for job in grid.load_study("gammas.yaml").jobs if job.swept == {"gamma.value": 5, "seed": 1}]
    assert last["swept"] == {"gamma.value": 5} and last["seed"] == 1
    for epoch, which in (("selected", "best"), ("last", "last")):
        p = predict_run(job.folder.path, "cpu", which, ("train", "val", "test"))
        _, data, backbone = load_run(job.folder.path, "cpu", which)
        x, y = fixed_subset(data.val, measured.IMAGES, "curvature")
        expected = {
            "ece": float(ece(p["test"])),
            "train/ece": float(ece(p["train"])),
            "val/q": moment(true_margin(p["val"].logits, p["val"].labels)),
            "hessian_sharpness": hessian_sharpness(backbone.eval(), x, y).value,
            "trained/hessian_sharpness": hessian_sharpness(backbone, x, y, loss=Focal(5.0)).value,
            "parameters": float(64 * 8 + 8 + 8 * 10 + 10),
            "gamma": 5.0,
            "epoch": float(job.folder.read_summary()["best_epoch" if epoch == "selected" else "last_epoch"]),
            "temperature": TemperatureScaling().fit(p["val"]).temperature,
        }
        assert {name: last[epoch][name] for name in expected} == pytest.approx(expected, rel=1e-4)

    saved = shutil.move("runs/gammas/report/numbers.json", "saved.json")
    shutil.rmtree("runs")  # nothing but the numbers is left
    paths = pages.redraw(saved, "docs")
    assert [path.name for path in paths] == ["gammas.md", "gammas.json", "gammas_plots.png"]
    page = paths[0].read_text()
    assert page.startswith("# Gammas\n\n    metacal study gammas.yaml\n\nWhat gamma does. An MLP.")
    for line in text.splitlines():
        assert line in page or not line.startswith("| gammas value")
    paths[0].write_text(f"{page}\n{pages.READING}\n\nMine.\n")
    assert main(["study", "redraw", "docs/gammas.json"]) == 0
    assert paths[0].read_text() == f"{page}\n{pages.READING}\n\nMine.\n", "what somebody wrote stays"
    assert "docs/gammas_plots.png" in capsys.readouterr().out


def test_what_a_file_says_is_checked_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.yaml"
    for change, message in (
        (("columns: [accuracy, ", "columns: [acuracy, "), "did you mean 'accuracy'"),
        (("columns: [accuracy, ", "columns: [trained/ece, "), "no column trained/ece"),
        (("epochs: [selected, last]", "epochs: [first]"), "an epoch of"),
        (("plots: [[gamma.value, hessian_sharpness], [val/q, ece]]", "plots: [ece]"), "plots must be a list of pairs"),
        (("[val/q, ece]]", "[val/q, nll]]"), "the y of a plot: a column must be one of"),
        (("[val/q, ece]]", "[gamma.init, ece]]"), "the x of a plot: a swept key or a column must be one of"),
        (("epochs: [sel", "sort: nll\nepochs: [sel"), "sort must be one of the study's columns"),
        (("title: Gammas", "title: 3"), "title must be text"),
        (("{gammas value 0: {ece: 0.25, accuracy: [0.5, 0.1]}}", "[1]"), "published must map rows"),
    ):
        assert change[0] in STUDY
        file.write_text(STUDY.replace(*change))
        assert main(["study", str(file)]) == 2
        assert message in capsys.readouterr().err and not Path("runs").exists(), "no run is made for nothing"
    file.write_text(STUDY.partition("variants:")[0])
    with pytest.raises(InputError, match="has no variants, got variant=other"):
        read_spec(file, "other")
    file.write_text(STUDY)
    assert read_spec(file, "other")["title"] == "Others" and read_spec(file, "other")["published"] == {}
    file.write_text("no json")
    with pytest.raises(InputError, match="no file of numbers"):
        pages.redraw(file)
    with pytest.raises(InputError, match="does not exist"):
        pages.redraw(tmp_path / "none.json")
    for report, key in (("measured", "epochs"), ("compare", "rows")):
        file.write_text(json.dumps({"name": "mine", "report": report}))
        with pytest.raises(InputError, match=f"lacks '{key}', of which a report {report} is drawn"):
            pages.redraw(file, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_the_studies_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert main(["study", "list"]) == 0
    listed = capsys.readouterr().out
    for name in grid.study_names():
        assert f"\n{name}\n    " in f"\n{listed}"
    assert "setting: " in listed and "variants: " in listed
    assert main(["study", "redraw", "--help"]) == 0 and "usage: metacal study" in capsys.readouterr().out
