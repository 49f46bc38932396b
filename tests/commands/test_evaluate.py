"""`metacal evaluate` on runs made by the trainer: ensembles and distribution shift."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from metacal.calibration import TemperatureScaling, VectorScaling, choose_scaling, ece, load_scaling, nll
from metacal.calibration.choice import fit_scaling
from metacal.calibration.conformal import ConformalSets
from metacal.cli import main
from metacal.errors import InputError
from metacal.predict import predict
from metacal.predictions import Predictions
from metacal.report.ensemble import average
from metacal.training.saved import load_run

WORDS = [
    "model.hidden=[8]",
    "data.train_size=300",
    "epochs=3",
    "threads=1",
    "monitor.resamples=0",
    "monitor.figures_every=0",
    "progress=false",
]


def train(folder: Path, *more: str) -> Path:
    assert main(["train", "method=cross_entropy", *WORDS, *more, f"run_dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    return [train(base / f"seed{seed}", f"seed={seed}") for seed in (0, 1)]


@pytest.fixture(scope="module")
def other_data(tmp_path_factory) -> Path:
    """A run on float features, ten classes, with a test set of its own."""
    base = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(0)
    y = np.arange(500) % 10
    np.savez(base / "features.npz", x_train=(rng.normal(size=(500, 20)) + y[:, None]).astype(np.float32), y_train=y)
    path = f"data.path={base / 'features.npz'}"
    return train(base / "run", "data=npz", path, "data.train_size=null", "model=mlp")


def files(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def saved(run: Path, split: str) -> Predictions:
    return Predictions.load(run / "predictions" / f"{split}.npz")


def evaluate(capsys, *argv: str | Path) -> dict:
    assert main(["evaluate", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *argv: str | Path) -> str:
    assert main(["evaluate", *map(str, argv)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_train_is_measured_without_augmentation_and_scaled_by_val(runs, tmp_path, capsys):
    run = train(tmp_path / "run", "data.flip=true", "data.crop_padding=2", "data.fold_meta_into_train=false")
    capsys.readouterr()
    _, data, backbone = load_run(run)
    x, y = data.train.transform(data.train.storage), data.train.labels
    p = predict(backbone, [(x, y)])
    measured = evaluate(capsys, run, "--split", "train", "--resamples", "0")
    assert measured["n"] == len(y) == 270 and measured["nll"] == pytest.approx(nll(p), rel=1e-6)
    scaled = TemperatureScaling().fit(saved(run, "val")).apply(p)
    assert measured["nll_scaled"] == pytest.approx(nll(scaled), rel=1e-6)
    assert "members may have trained on different images" in refused(capsys, *runs, "--ensemble", "--split", "train")
    assert "--split train does not go with --shift" in refused(capsys, run, "--shift", "--split", "train")


# ------------------------------------------------------------------------------------------------ ensembles


def test_average_is_the_mean_of_the_probabilities():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (50,), generator=g)
    logits = [torch.randn(50, 3, generator=g, dtype=torch.float64) for _ in range(3)]
    members = {str(i): Predictions.from_logits(z, y) for i, z in enumerate(logits)}
    pooled = average(members)
    assert torch.allclose(pooled.probs, torch.stack([z.softmax(1) for z in logits]).mean(0), atol=1e-15)
    assert torch.equal(pooled.labels, y)
    # Jensen: the mean's NLL is at most the mean NLL.
    assert nll(pooled) < sum(nll(p) for p in members.values()) / 3
    alone = average({"only": members["0"]})
    assert torch.allclose(alone.probs, members["0"].probs)


def test_average_refuses_other_samples_by_name():
    y = torch.tensor([0, 1, 1, 0])
    a = Predictions.from_logits(torch.zeros(4, 2), y)
    with pytest.raises(InputError, match="the labels of b differ from those of a in 2 of 4 rows, the first at index 1"):
        average({"a": a, "b": Predictions.from_logits(torch.zeros(4, 2), torch.tensor([0, 0, 0, 0]))})
    with pytest.raises(InputError, match="b has 3 samples and 2 classes, a has 4 samples and 2 classes"):
        average({"a": a, "b": a[:3]})
    with pytest.raises(InputError, match="at least one"):
        average({})


def test_an_ensemble_is_averaged_and_then_tempered(runs, capsys):
    found = evaluate(capsys, *runs, "--ensemble", "--resamples", "0")
    test = average({str(run): saved(run, "test") for run in runs})
    scaling = TemperatureScaling().fit(average({str(run): saved(run, "val") for run in runs}))
    assert found["ensemble"]["nll"] == pytest.approx(nll(test), rel=1e-9)
    assert found["ensemble"]["temperature"] == pytest.approx(scaling.temperature, rel=1e-9)
    assert found["ensemble"]["ece_scaled"] == pytest.approx(ece(scaling.apply(test)), rel=1e-9)
    assert found["unscaled_because"] is None
    assert list(found["members"]) == [str(run) for run in runs]
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        assert found["members"][str(run)]["ece"] == pytest.approx(summary["test/ece"], rel=1e-9)
    mean = sum(of["nll_scaled"] for of in found["members"].values()) / 2
    assert found["mean"]["nll_scaled"] == pytest.approx(mean)
    vector = fit_scaling(average({str(run): saved(run, "val") for run in runs}), "vector")
    found = evaluate(capsys, *runs, "--ensemble", "--resamples", "0", "--scaling", "vector")
    assert found["ensemble"]["nll_scaled"] == pytest.approx(nll(vector.apply(test)), rel=1e-9)
    of_first = fit_scaling(saved(runs[0], "val"), "vector").apply(saved(runs[0], "test"))
    assert found["members"][str(runs[0])]["nll_scaled"] == pytest.approx(nll(of_first), rel=1e-9)
    file = runs[0] / "predictions" / "test.npz"
    assert "fitted on its members' val" in refused(capsys, runs[1], file, "--ensemble", "--scaling", "vector")


def test_saved_predictions_and_the_checkpoint_give_the_same_ensemble(runs, capsys, tmp_path):
    import shutil

    copies = [Path(shutil.copytree(run, tmp_path / run.name)) for run in runs]
    for copy in copies:
        shutil.rmtree(copy / "predictions")
    a = evaluate(capsys, *runs, "--ensemble", "--resamples", "0")["ensemble"]
    b = evaluate(capsys, *copies, "--ensemble", "--resamples", "0")["ensemble"]
    assert a == pytest.approx(b, rel=1e-6)
    last = evaluate(capsys, *runs, "--ensemble", "--resamples", "0", "--checkpoint", "last")["ensemble"]
    assert last["n"] == a["n"]


def test_an_ensemble_of_files_has_no_temperature_and_says_why(runs, capsys, tmp_path):
    members = [runs[0], runs[1] / "predictions" / "test.npz"]
    found = evaluate(capsys, *members, "--ensemble", "--resamples", "0")
    assert "temperature" not in found["ensemble"] and str(members[1]) in found["unscaled_because"]
    picture = tmp_path / "ensemble.png"
    words = ["evaluate", *map(str, runs), "--ensemble", "--resamples", "0", "--figure", str(picture)]
    assert main(words) == 0 and picture.stat().st_size > 1000
    out = capsys.readouterr().out
    assert f"member 2: {runs[1]}" in out and "mean of members" in out and "T = " in out


def test_ensembles_of_other_samples_are_refused_by_name(runs, other_data, capsys, tmp_path):
    error = refused(capsys, *runs, other_data, "--ensemble")
    assert f"the same test split: that of {other_data} is not that of {runs[0]}" in error
    elsewhere = train(tmp_path / "split1", "data.split_seed=1")
    assert f"{elsewhere} is not that of {runs[0]}" in refused(capsys, runs[0], elsewhere, "--ensemble")
    files_ = [runs[0] / "predictions" / f"{name}.npz" for name in ("test", "val")]
    assert f"{files_[1]} has " in refused(capsys, *files_, "--ensemble")
    assert "at least two" in refused(capsys, runs[0], "--ensemble")
    assert "distinct members" in refused(capsys, runs[0], f"{runs[0]}/", "--ensemble")


def test_several_runs_without_ensemble_have_a_table_each(runs, capsys):
    found = evaluate(capsys, *runs, "--resamples", "0")
    assert list(found) == [str(run) for run in runs]


# ------------------------------------------------------------------------------------------------ shift


@pytest.fixture
def run(runs, tmp_path) -> Path:
    import shutil

    return Path(shutil.copytree(runs[0], tmp_path / "run"))


def test_shift_writes_its_two_files_and_nothing_else(run, capsys):
    before = files(run)
    options = ["--shift", "--corruptions", "contrast,gaussian_noise", "--severities", "1,5", "--device", "cpu"]
    found = evaluate(capsys, run, *options)
    after = files(run)
    assert after.keys() - before.keys() == {"shift.json", "figures/shift.png"}
    assert {name: after[name] for name in before} == before
    assert json.loads((run / "shift.json").read_text()) == found
    assert (run / "figures" / "shift.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((run / "summary.json").read_text())
    for name in ("accuracy", "nll", "ece", "ece_scaled"):
        assert found["clean"][name] == pytest.approx(summary[f"test/{name}"], rel=1e-6)
    assert found["temperature"] == pytest.approx(summary["test/temperature"], rel=1e-6)
    assert found["corruptions"].keys() == {"contrast", "gaussian_noise"}
    assert found["versions"]["torch"] == torch.__version__ and "--shift" in found["command"]
    again = evaluate(capsys, run, *options)
    for volatile in ("minutes",):
        found.pop(volatile), again.pop(volatile)
    assert again == found
    other = evaluate(capsys, run, *options, "--scaling", "vector")
    assert (found["scaling"], other["scaling"], other["temperature"]) == ("temperature", "vector", None)
    scaled = fit_scaling(saved(run, "val"), "vector").apply(saved(run, "test"))
    assert other["clean"]["nll_scaled"] == pytest.approx(nll(scaled), rel=1e-6)
    assert other["mean"]["all"]["nll"] == found["mean"]["all"]["nll"]


def test_shift_prints_tables_and_the_minutes(run, capsys):
    words = ["evaluate", str(run), "--shift", "--corruptions", "contrast,pixelate", "--samples", "50", "--seed", "3"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "severity 5" in out and "50 of" in out and "Scaled ECE %" in out and "minutes" in out
    assert main([*words, "--markdown"]) == 0
    assert "| severity 5 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shift", "--corruptions", "contrst"], "did you mean 'contrast'"),
        (["--shift", "--corruptions", ","], "--corruptions must name at least one"),
        (["--shift", "--severities", "1,6"], "--severities must be integers from 1 to 5, got 6"),
        (["--shift", "--severities", "0"], "--severities must be integers from 1 to 5, got 0"),
        (["--shift", "--severities", "two"], "--severities must be integers from 1 to 5, got 'two'"),
        (["--shift", "--samples", "0"], "--samples must be >= 1, got 0"),
        (["--shift", "--seed", "-1"], "--seed must be >= 0, got -1"),
        (["--shift", "--ensemble"], "--ensemble does not go with --shift"),
        (["--shift", "--split", "val"], "--split val does not go with --shift"),
        (["--shift", "--resamples", "0"], "--resamples does not go with --shift"),
        (["--severities", "1"], "--severities goes with --shift"),
        (["--samples", "10"], "--samples goes with --shift"),
    ],
)
def test_bad_words_stop_before_any_work(words, message, run, capsys):
    before = files(run)
    assert message in refused(capsys, run, *words)
    assert files(run) == before


def test_shift_needs_one_run_with_pixels(runs, other_data, capsys):
    assert "--shift goes with one RUN, got 2" in refused(capsys, *runs, "--shift")
    assert "needs a run folder" in refused(capsys, runs[0] / "predictions" / "test.npz", "--shift")
    error = refused(capsys, other_data, "--shift")
    assert f"data=npz of {other_data} holds float features of shape (20,), which have no pixels" in error
    assert not (other_data / "shift.json").exists()


# ------------------------------------------------------------------------------------------------ more tables


def test_another_map_sets_other_data_and_groups(runs, tmp_path, capsys):
    run = runs[0]
    val, test = saved(run, "val"), saved(run, "test")
    other = tmp_path / "other.npz"
    rng = np.random.default_rng(0)
    np.savez(other, x=rng.integers(0, 17, size=(70, 1, 8, 8), dtype=np.uint8))
    groups = np.array(["a", "b", "b"])[np.arange(len(test)) % 3]
    np.save(tmp_path / "side.npy", groups)
    words = ["--resamples", "0", "--conformal", "0.1", "--ood", other, "--by", tmp_path / "side.npy"]
    result = evaluate(capsys, run, "--scaling", "vector", *words)
    assert result["nll_scaled"] == pytest.approx(nll(VectorScaling().fit(val).apply(test)), rel=1e-6)
    assert result["scaling_n"] == len(val) and "temperature" not in result
    sets = ConformalSets("aps", 0.1).fit(val).measure(test)
    assert result["conformal"]["aps"]["coverage"] == pytest.approx(sets.coverage, abs=1e-3)
    assert result["ood"]["n"] == 70 and set(result["ood"]) == {"data", "n", "max_probability", "energy", "entropy"}
    a = test[torch.from_numpy(groups == "a")]
    assert result["by"]["a"]["n"] == len(a)
    assert result["by"]["a"]["accuracy"] == pytest.approx(float(a.correct.double().mean()))
    assert result["by"]["a"]["ece"] == pytest.approx(ece(a), abs=1e-6)
    # The same from the files of predictions, but for the other data, whose model they lack.
    files = [run / "predictions" / "test.npz", "--val", run / "predictions" / "val.npz"]
    again = evaluate(capsys, *files, "--scaling", "vector", "--resamples", "0", "--conformal", "0.1", "--by", "class")
    assert again["nll_scaled"] == pytest.approx(result["nll_scaled"], rel=1e-6)
    assert sum(of["n"] for of in again["by"].values()) == len(test) and list(again["by"]) == [str(k) for k in range(10)]
    assert main(["evaluate", str(run), *map(str, words), "--by", "class"]) == 0
    printed = capsys.readouterr().out
    for text in ("THR", "Coverage %", "AUROC %", "By class", "Out of distribution"):
        assert text in printed
    laplace = evaluate(capsys, run, "--posterior", "laplace", "--resamples", "0")
    assert laplace["nll"] < nll(test) + 0.02 and laplace["nll"] != pytest.approx(nll(test), abs=1e-9)
    for more, message in (
        ([run, "--posterior", "dropout"], "has no Dropout with p > 0"),
        ([files[0], "--posterior", "laplace"], "--posterior needs a run"),
        ([files[0], "--conformal", "0.1"], "--conformal of a file needs --val FILE.npz"),
        ([files[0], "--ood", "fashion_mnist"], "needs a run, whose model it is given"),
        ([files[0], "--ood", other], "holds inputs x, which need a run"),
        ([run, "--ood", "cifar"], "--ood must be a file *.npz or one of digits, cifar10"),
        ([run, "--scaling", "temprature"], "did you mean 'temperature'"),
        ([run, "--conformal", "1"], "--conformal must lie in (0, 1), got 1.0"),
        ([run, "--by", "nothing.npy"], "nothing.npy does not exist"),
        ([run, "--by", other], "must hold one array"),
        ([run, runs[1], "--ensemble", "--conformal", "0.1"], "--conformal does not go with --ensemble"),
        ([run, "--val", files[0]], "--val goes with one FILE"),
    ):
        assert message in refused(capsys, *more)


def test_calibrate_prints_before_and_after_and_writes_both(runs, tmp_path, capsys):
    files = [runs[0] / "predictions" / f"{split}.npz" for split in ("val", "test")]
    val, test = map(Predictions.load, files)
    out = tmp_path / "calibrated.npz"
    assert main(["calibrate", *map(str, files), "--method", "temperature", "--out", str(out), "--resamples", "20"]) == 0
    printed = capsys.readouterr().out
    scaling = TemperatureScaling().fit(val)
    assert f"T = {scaling.temperature:.3f}" in printed and "test, before" in printed and "calibrated.map.npz" in printed
    assert torch.equal(Predictions.load(out).probs, scaling.apply(test).probs)
    kept = load_scaling(tmp_path / "calibrated.map.npz")
    assert torch.equal(kept.apply(test).probs, scaling.apply(test).probs)
    assert main(["calibrate", str(files[0]), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    choice = choose_scaling(val)
    assert result["method"] == choice.name and result["cross_validated"]
    assert result["after"]["nll"] == pytest.approx(choice.nll[choice.name])
    assert result["choice"]["vector"]["nll"] == pytest.approx(choice.nll["vector"])
    for words, message in (
        ([tmp_path / "no.npz"], "no.npz does not exist"),
        ([files[0], "--method", "platt"], "--method must be one of auto, none, temperature"),
        ([files[0], "--out", "x.json"], "--out must end in .npz, got 'x.json'"),
        ([files[0], "--out", files[0]], "would overwrite"),
    ):
        assert main(["calibrate", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
