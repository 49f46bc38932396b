"""`metacal compare` from the command line: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json

import pytest
from reference.run_folders import write_run

from metacal.calibration import VectorScaling, accuracy, nll
from metacal.cli import main
from metacal.predictions import Predictions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for method, sharpness in {"cross_entropy": 3.0, "focal": 1.0}.items():
        for seed in range(2):
            write_run(root / method / f"seed{seed}", [f"method={method}"], seed, sharpness=sharpness)
    return root


FEW = ["--measures", "ece,accuracy", "--resamples", "8"]


def test_prints_one_table_with_what_was_left_out(folder, tmp_path, capsys):
    cut = write_run(tmp_path / "cut", ["method=brier"], finished=False)
    assert main(["compare", str(folder), str(cut), *FEW]) == 0
    text = capsys.readouterr().out
    assert "cross_entropy" in text and "temperature" in text and "brier" not in text
    assert f"Left out: {cut}: unfinished" in text and "Holm" in text


def test_formats_are_printed_or_written(folder, tmp_path, capsys):
    assert main(["compare", "--csv", str(folder), *FEW]) == 0  # the folder is no file to write
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 4 and {row["method"] for row in rows} == {"cross_entropy", "focal"}
    files = [tmp_path / name for name in ("table.md", "table.tex", "page.html", "all.json")]
    words = [w for form, file in zip(("markdown", "latex", "html", "json"), files) for w in (f"--{form}", str(file))]
    assert main(["compare", str(folder), *FEW, *words, "--baseline", "method=cross_entropy", "--sort", "ece"]) == 0
    out = capsys.readouterr().out
    assert all(f"written: {file}" in out for file in files) and "Differences from cross_entropy" in out
    markdown, latex, page, found = (file.read_text() for file in files)
    assert (
        "| focal |" in markdown and "Made by `metacal compare" in markdown and "metacal train method=focal" in markdown
    )
    assert r"\begin{tabular}" in latex and latex.count("% Made by metacal compare") == 1
    assert page.startswith("<!doctype html>") and "Differences from cross_entropy" in page
    assert json.loads(found)["baseline"] == "cross_entropy" and json.loads(found)["command"].startswith(
        "metacal compare"
    )


def test_spaces_between_measures_are_allowed(folder, capsys):
    assert main(["compare", str(folder), "--csv", "--measures", "ece, nll ", "--resamples", "4"]) == 0
    header = capsys.readouterr().out.splitlines()[0].split(",")
    assert header[header.index("ece") + 1] == "ece_std" and "nll" in header and "nll_p" in header


def test_json_on_standard_output_is_json_alone(folder, capsys):
    assert main(["compare", str(folder), "--json", *FEW]) == 0
    assert len(json.loads(capsys.readouterr().out)["groups"]) == 2


def test_refusals_are_one_line_and_status_2(folder, tmp_path, capsys):
    other = write_run(tmp_path / "other", ["method=brier"], labels_seed=9)
    for words, message in (
        (["nowhere"], "nowhere does not exist"),
        (
            [str(tmp_path / "other"), str(folder)],
            f"2 different test sets and cannot be compared: digits 00000009 (200 images) of 1 run such as {other}",
        ),
        ([str(folder), "--sort", "speed"], "sort must be one of"),
        ([str(folder), "--measures", "ece,eec"], "did you mean 'ece'?"),
        ([str(folder), "--baseline", "method=none"], "baseline method=none must pick one of the groups"),
        ([str(folder), "--html", str(tmp_path)], "--html must name a file"),
        ([str(folder), "--epoch", "last"], "test_last.npz"),
        ([str(folder), "--csv", "missing/a.csv"], "the folder missing does not exist"),
        (
            [str(folder), "--markdown", "rep.txt"],
            "--markdown writes to a file that ends in .md or .markdown, or prints",
        ),
        ([str(folder), "--meas", "ece"], "unrecognized arguments: --meas"),
        ([str(folder), "--csv", "--json"], "only one format can go to standard output, got --csv --json"),
        ([], "the following arguments are required: RUNS"),
    ):
        assert main(["compare", *words]) == 2, words
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_all_unfinished_says_why_each_is(tmp_path, capsys):
    for seed in range(2):
        write_run(tmp_path / f"seed{seed}", seed=seed, finished=False)
    assert main(["compare", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no finished run to compare" in error and all(f"seed{seed}: unfinished" in error for seed in range(2))


def test_runs_of_the_trainer_can_be_compared(tmp_path, capsys):
    words = [
        "method=cross_entropy",
        "baselines=[focal]",
        "epochs=3",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "progress=false",
    ]
    words += ["model.hidden=[8]", "data.train_size=300", "threads=1", "select=ece"]
    for seed in range(2):
        assert main(["train", *words, f"seed={seed}", f"runs={tmp_path}"]) == 0
    capsys.readouterr()
    ece = {}
    for epoch, split in (("selected", "test"), ("last", "last")):
        assert main(["compare", f"{tmp_path}/**/seed*", "--epoch", epoch, "--json", *FEW]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [(g["label"], g["seeds"]) for g in found["groups"]] == [("cross_entropy", [0, 1]), ("focal", [0, 1])]
        ece[epoch] = [g["measures"]["none"]["ece"]["values"] for g in found["groups"]]
        for g in found["groups"]:
            for i, run in enumerate(g["runs"]):
                with open(f"{run['path']}/summary.json") as file:
                    summary = json.load(file)
                for scaling, suffix in (("none", ""), ("temperature", "_scaled")):
                    value = g["measures"][scaling]["ece"]["values"][i]
                    assert value == pytest.approx(summary[f"{split}/ece{suffix}"], abs=1e-9)
    assert ece["selected"] != ece["last"], "select=ece chose an earlier epoch of some run"


def test_other_maps_and_files_of_predictions(folder, tmp_path, capsys):
    run = folder / "focal" / "seed0"
    files = {split: run / "predictions" / f"{split}.npz" for split in ("val", "test")}
    p = {split: Predictions.load(file) for split, file in files.items()}
    own = tmp_path / "own.npz"
    p["test"].save(own)
    words = ["--json", *FEW[2:], "--measures", "ece,accuracy,nll", "--scaling", "none,vector"]
    assert main(["compare", str(folder), f"{own}:{files['val']}", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [g["method"] for g in result["groups"]] == ["cross_entropy", "focal", str(tmp_path / "own")]
    assert result["groups"][2]["label"] == str(tmp_path / "own")  # no key of the runs is held against it
    assert any("Files of predictions, of whose making nothing is known" in note for note in result["notes"])
    assert any(note.startswith("Scaling by vector: fitted here") for note in result["notes"])
    scaled = VectorScaling().fit(p["val"]).apply(p["test"])
    for g, i in ((result["groups"][1], 0), (result["groups"][2], 0)):
        for scaling, q in (("none", p["test"]), ("vector", scaled)):
            assert g["measures"][scaling]["nll"]["values"][i] == pytest.approx(nll(q))
            assert g["measures"][scaling]["accuracy"]["values"][i] == pytest.approx(accuracy(q))
    assert main(["compare", str(own), str(run), "--html", str(tmp_path / "page.html"), *FEW]) == 0  # without its val
    assert "temperature" not in capsys.readouterr().out
    for more, message in (
        (["--scaling", "vector"], "scaling=vector needs the val predictions of"),
        (["--scaling", "none,platt"], "scaling must be one of both, auto, none, temperature"),
        (["--scaling", "none,none"], "distinct maps"),
    ):
        assert main(["compare", str(own), str(run), *FEW, *more]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert main(["compare", f"{own}:{tmp_path / 'no.npz'}"]) == 2
    assert "no.npz does not exist" in capsys.readouterr().err


def test_curves_over_seeds_go_to_tensorboard(folder, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = tmp_path / "curves"
    assert main(["compare", str(folder), *FEW, "--tensorboard", str(place)]) == 0
    assert f"curves: tensorboard --logdir {place}" in capsys.readouterr().out
    assert sorted(p.name for p in place.iterdir()) == ["cross_entropy", "focal"]
    events = EventAccumulator(str(place / "focal"))
    events.Reload()

    def curve(tag):
        return {e.step: e.value for e in events.Scalars(tag)}

    # seeds 0 and 1 logged 0.1/epoch + 0.01 seed at steps 10, 20, 30
    ece = {step: 0.1 / epoch for epoch, step in ((1, 10), (2, 20), (3, 30))}
    assert curve("val/ece") == pytest.approx({step: value + 0.005 for step, value in ece.items()})
    assert curve("seeds_low/val_ece") == pytest.approx(ece)
    assert curve("seeds_high/val_ece") == pytest.approx({step: value + 0.01 for step, value in ece.items()})
    assert curve("by_epoch/val_nll") == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3})
    assert curve("train/loss") == pytest.approx({5: 2, 15: 1, 25: 2 / 3})
    assert {"comparison/text_summary", "runs/text_summary"} <= set(events.Tags()["tensors"])
    assert main(["compare", str(folder), *FEW, "--tensorboard", str(place)]) == 2
    assert f"--tensorboard needs a folder that is new or empty, {place} holds files" in capsys.readouterr().err
