"""Runs from end to end on the bundled digits: what they write, how they stop, and that they resume bit for bit."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from reference.same_run import assert_same_run, lines, logged_events

from metacal.cli import main
from metacal.report.verdict import meaning
from metacal.runs import checkpoint

NET = ["method=gamma_net"]

BRIEF = ["epochs=1", "data.train_size=200", "monitor.resamples=0", "monitor.figures_every=0"]

# A net with everything that a resume must restore: BatchNorm's buffers, dropout's masks, augmentation, a gamma-net.
WORDS = [
    "method=gamma_net",
    "model=cnn",
    "model.width=4",
    "model.dropout=0.2",
    "data.crop_padding=1",
    "data.train_size=300",
    "data.batch_size=32",
    "meta.reference_points=bank",
    "meta.bank_batches=3",
    "optimizer.lr=0.02",
    "epochs=3",
    "threads=1",
    "monitor.resamples=20",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", *WORDS, f"run_dir={folder}"]) == 0
    return folder


def test_a_run_writes_its_folder(finished):
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints/last.pt", "checkpoints/best.pt"):
        assert (finished / name).is_file(), name
    assert (finished / "figures" / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(finished.glob("events.out.tfevents.*"))) == 1
    summary = json.loads((finished / "summary.json").read_text())
    for measure in ("accuracy", "nll", "ece", "adaptive_ece", "brier"):
        assert {f"test/{measure}", f"test/{measure}_scaled", f"test/{measure}_low"} <= summary.keys()
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["data"]["train"] + summary["data"]["meta"] == 300 and summary["data"]["meta_from"] == "train"
    assert summary["steps"] == 27 and summary["last_epoch"] == 3 and summary["select"] == "nll"
    assert {"last/nll", "last/nll_scaled", "last/temperature"} <= summary.keys() and not summary["val_is_fitted"]
    assert summary["data"]["fingerprints"].keys() == {"train", "meta", "train_and_meta", "val"}
    assert summary["command"].startswith("metacal train method=gamma_net model=cnn")
    splits = {line["split"] for line in lines(finished)}
    assert {"train", "val", "gamma", "meta", "margin"} <= splits


def test_the_event_file_holds_scalars_images_histograms_text_and_hparams(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished), size_guidance={"histograms": 0, "images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    logged = {f"{line['split']}/{k}" for line in lines(finished) for k in line} - {
        f"{split}/{k}" for split in {line["split"] for line in lines(finished)} for k in ("step", "epoch", "split")
    }
    assert logged <= set(tags["scalars"])
    assert {"gamma/values", "val/confidence_values", "val/margin_values"} <= set(tags["histograms"])
    assert {"val/reliability", "test/reliability"} <= set(tags["images"])
    assert {"config/text_summary", "command/text_summary", "custom_scalars__config__"} <= set(tags["tensors"])
    assert events.PluginTagToContent("hparams").keys() >= {
        "_hparams_/experiment",
        "_hparams_/session_start_info",
        "_hparams_/session_end_info",
    }
    summary = json.loads((finished / "summary.json").read_text())
    assert events.Scalars("test/ece")[-1].value == pytest.approx(summary["test/ece"], rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        [*NET, "meta.objective={sece: 1.0, nll: 0.1}", "meta.engine=reverse"],
        [
            "method=gamma_net",
            "meta=skce",
            "meta.engine=difference",
            "optimizer=adamw",
            "meta.every=2",
            "meta.start=0.5",
        ],
        [
            "method=gamma_net",
            "meta.engine=higher",
            "meta.inner_steps=2",
            "meta.every=2",
            "gamma.input=random",
            "gamma.label_aware=true",
        ],
        [
            "method=gamma_net",
            "precision=bf16",
            "gamma.input=layer",
            "gamma.layer=1",
            "schedule=step",
            "schedule.warmup_epochs=1",
        ],
        [
            "method=focal",
            "gamma.source=step",
            "gamma.values=[5,1]",
            "gamma.milestones=[0.5]",
            "optimizer.clip_norm=0.5",
        ],
        pytest.param(["compile=true"], marks=pytest.mark.slow),
    ],
)
def test_keys_go_together(words, tmp_path):
    common = ["train", "model.hidden=[8]", "data.train_size=200", "data.batch_size=50", "epochs=2"]
    assert main([*common, *words, "monitor.resamples=0", "monitor.figures_every=0", f"run_dir={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] >= 6


def test_evaluate_recomputes_the_table_from_the_checkpoint(finished, capsys, tmp_path):
    summary = json.loads((finished / "summary.json").read_text())
    assert main(["evaluate", str(finished), "--json", "--resamples", "20"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("accuracy", "nll", "ece", "ece_scaled", "temperature", "ece_low"):
        assert again[name] == pytest.approx(summary[f"test/{name}"], rel=1e-9)
    assert main(["evaluate", str(finished), "--json", "--resamples", "0", "--checkpoint", "last"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("accuracy", "nll", "ece_scaled", "temperature"):
        assert again[name] == pytest.approx(summary[f"last/{name}"], rel=1e-9)
    picture = tmp_path / "r.png"
    assert (
        main(["evaluate", str(finished / "predictions" / "test.npz"), "--resamples", "0", "--figure", str(picture)])
        == 0
    )
    assert "Accuracy" in capsys.readouterr().out and picture.stat().st_size > 1000


def test_a_finished_run_is_refused_and_overwritten_only_on_request(finished, capsys):
    before = (finished / "summary.json").read_bytes()
    assert main(["train", *WORDS, f"run_dir={finished}"]) == 2
    assert "finished run" in capsys.readouterr().err
    assert main(["train", f"resume={finished}"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert (finished / "summary.json").read_bytes() == before


def test_the_runs_own_config_gives_the_same_run(finished, tmp_path):
    assert main(["train", str(finished / "config.yaml"), f"run_dir={tmp_path / 'again'}"]) == 0
    assert_same_run(finished, tmp_path / "again")


def test_json_has_no_infinity(tmp_path, capsys):
    np.savez(tmp_path / "p.npz", probs=np.array([[1.0, 0.0], [0.5, 0.5]]), labels=np.array([1, 0]))
    assert main(["evaluate", str(tmp_path / "p.npz"), "--json", "--resamples", "0"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["nll"] is None
    assert main(["evaluate", str(tmp_path / "p.npz"), "--figure", "x.doc"]) == 2
    assert main(["evaluate", str(tmp_path / "p.npz"), "--resamples", "0", "--figure", "/nonexistent/x.png"]) == 1
    assert "No such file" in capsys.readouterr().err


def start(folder: Path) -> subprocess.Popen:
    words = [*STOPPED, f"run_dir={folder}"]
    return subprocess.Popen(
        [sys.executable, "-m", "metacal", "train", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_checkpoint(process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 300
    while not (folder / "checkpoints" / "last.pt").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)


STOPPED = [*WORDS, "checkpoint_every=0.2", "epochs=6", "monitor.figures_every=4", "monitor.max_share=null"]
STOPPED += ["data.meta_from=folds", "data.meta_folds=5", "data.meta_batch_size=16"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was never stopped, with enough epochs that a signal comes before the end."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", *STOPPED, f"run_dir={folder}"]) == 0
    return folder


def test_a_stopped_run_resumes_bit_for_bit(whole, tmp_path, monkeypatch, capsys):
    """Though it is stopped three times, and goes on from where it was each time."""
    stopped = tmp_path / "stopped"
    process = start(stopped)
    wait_for_checkpoint(process, stopped)
    process.kill()
    process.communicate(timeout=120)
    assert not (stopped / "summary.json").exists(), "the run ended before the signal: give it more epochs"
    save, steps = checkpoint.save, [checkpoint.load(stopped / "checkpoints" / "last.pt")["progress"]["step"]]
    for number in (signal.SIGINT, signal.SIGTERM):  # to this process, once it has saved anew: within the run

        def save_and_signal(file: Path, state: dict, number: int = number) -> None:
            save(file, state)
            monkeypatch.undo()
            signal.raise_signal(number)

        monkeypatch.setattr(checkpoint, "save", save_and_signal)
        assert main(["train", *STOPPED, f"run_dir={stopped}", "progress=false"]) == 130
        assert "resume=" in capsys.readouterr().out and not (stopped / "summary.json").exists()
        steps.append(checkpoint.load(stopped / "checkpoints" / "last.pt")["progress"]["step"])
    assert steps == sorted(set(steps)), "each went on from where the one before was stopped"
    assert main(["train", *STOPPED, f"resume={stopped}"]) == 0
    assert_same_run(whole, stopped)
    assert logged_events(whole) == logged_events(stopped)


def test_a_run_stopped_while_it_measured_test_logs_nothing_twice(whole, tmp_path):
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    (stopped / "summary.json").unlink()
    assert main(["train", f"resume={stopped}"]) == 0
    assert_same_run(whole, stopped)
    events = logged_events(stopped)
    assert events == logged_events(whole)
    assert len(events["test/reliability"]) == len(events["test/ece"]) == 1
    assert [step for step, _ in events["val/reliability"]] == [36, 54]
    assert len(events["gamma/values"]) == 6 and len(events["gamma/against_confidence"]) == 2


def test_patience_ends_a_run_and_a_resume_does_not_go_on(tmp_path, capsys):
    folder, stopped = tmp_path / "run", tmp_path / "stopped"
    words = [
        "train",
        "epochs=9",
        "patience=2",
        "select=accuracy",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "data.meta_from=val",
    ]
    words += ["data.train_size=200", "model.hidden=[8]", "optimizer.lr=0", "threads=1"]
    assert main([*words, f"run_dir={folder}"]) == 0
    assert capsys.readouterr().out.count("val s") == 2, "at the start and beside the folder: val scores are fitted"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["best_epoch"], summary["last_epoch"], summary["epochs"]) == (1, 3, 9)
    assert summary["last/nll"] == summary["test/nll"] and summary["steps"] == 3
    assert summary["val_is_fitted"] and summary["data"]["train"] == 200 and summary["data"]["meta"] == 0
    shutil.copytree(folder, stopped)
    (stopped / "summary.json").unlink()
    assert main(["train", f"resume={stopped}"]) == 0
    assert_same_run(folder, stopped)
    capsys.readouterr()
    assert main(["compare", str(folder), "--epoch", "last", "--split", "val", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "Of the last epoch of each run" in out and "Val is fitted, not held out, for metacal" in out


def test_an_interrupted_run_goes_on_only_under_its_own_config(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/last.pt", "checkpoints/best.pt"):
        (folder / name).write_bytes((finished / name).read_bytes())
    assert main(["train", *WORDS, "optimizer.lr=0.5", f"run_dir={folder}"]) == 2
    assert "interrupted run with another optimizer.lr" in capsys.readouterr().err
    assert main(["train", f"resume={folder}", "optimizer.lr=0.5"]) == 2
    assert "optimizer.lr=0.5 differs from 0.02" in capsys.readouterr().err
    (folder / "checkpoints" / "last.pt").write_bytes(b"PK")
    assert main(["train", f"resume={folder}"]) == 2
    assert "truncated" in capsys.readouterr().err


def test_a_non_finite_loss_stops_the_run_and_names_the_step(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["train", "method=cross_entropy", "model=mlp", "model.activation=relu", "epochs=3", f"run_dir={folder}"]
    assert main([*words, "optimizer.lr=1e18", "monitor=off"]) == 1
    error = capsys.readouterr().err
    assert "non-finite" in error and "at step" in error and "nonfinite=skip" in error and error.count("\n") == 1
    # Leaving steps out cannot mend weights that overflow in the forward pass: validation says so.
    assert main([*words, "optimizer.lr=1e18", "monitor=off", "nonfinite=skip", "overwrite=true"]) == 1
    assert "validation after step 10 (epoch 1) failed" in capsys.readouterr().err


def test_baselines_share_splits_and_one_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "epochs=1",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "data.train_size=300",
        "baselines=[focal]",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    for word in ("metacal", "focal", "tensorboard --logdir", "reliability.png"):
        assert word in out
    summaries = [json.loads(p.read_text()) for p in Path("runs").rglob("summary.json")]
    for s in summaries:  # what is trained before it is trained, val's numbers as val's, and the table in words
        sizes = s["data"] | s["parameters"]
        aside = f", {sizes['meta']} meta" if sizes["meta"] else ""
        assert f"data: digits, images: {sizes['train']} train{aside}, {sizes['val']} val, 359 test; 10 classes" in out
        assert f"model: mlp, {sizes['backbone']:,} parameters" in out and f"method: {s['method']}; device: cpu" in out
        assert f"{s['method']} seed 0: epoch 1/1  val: Accuracy " in out and "run folder: runs/default/" in out
        assert f"{s['method']}: {meaning(s)}" in out and "beyond noise? metacal compare runs/default" in out
    assert len(summaries) == 2
    assert len({s["data"]["fingerprint"] for s in summaries}) == 1
    assert {s["data"]["train"] + s["data"]["meta"] for s in summaries} == {300}
    assert main(words) == 0
    assert "reused" in capsys.readouterr().out


def test_a_grid_makes_every_run_and_reuses_results_only_under_the_same_config(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", *BRIEF, "method=cross_entropy"]
    assert main([*words, "-m", "seed=0,1"]) == 0
    assert len(list(Path("runs").rglob("summary.json"))) == 2
    assert "compare them: metacal compare runs/default" in capsys.readouterr().out
    assert main([*words, "-m", "seed=0,1"]) == 0
    assert capsys.readouterr().out.count("skipped") == 2
    for more in (["-m", "seed=0,1"], ["baselines=[focal]"]):
        assert main([*words, *more, "monitor.n_bins=10"]) == 2
        assert "finished run with another monitor.n_bins" in capsys.readouterr().err


def test_default_folders_can_be_given_back_to_the_command(tmp_path, monkeypatch, capsys):
    """They hold commas and equal signs, which mean something to Hydra."""
    monkeypatch.chdir(tmp_path)
    words = [*BRIEF, "method=cross_entropy", "optimizer.lr=0.05"]
    assert main(["train", *words]) == 0
    (run,) = Path("runs/default").glob("*/seed0")
    assert "," in str(run) and "=" in str(run)
    assert main(["train", f"{run}/config.yaml", "seed=3"]) == 0
    assert (run.parent / "seed3" / "summary.json").is_file()
    assert main(["train", f"{run}/config.yaml", "seed=3"]) == 2
    assert "finished run" in capsys.readouterr().err
    (run / "summary.json").unlink()  # as if it had been stopped at the end
    assert main(["train", f"resume={run}"]) == 0
    assert (run / "summary.json").is_file()


def test_the_recorded_command_makes_the_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["name=a b", "method=gamma_net", "meta.objective={sece: 1.0, nll: 0.1}", "model.hidden=[8]"]
    words += [*BRIEF, "threads=1"]
    assert main(["train", *words]) == 0
    (run,) = Path("runs/a b").glob("*/seed0")
    from_file = [f"{run}/config.yaml", "seed=3"]
    assert main(["train", *from_file]) == 0
    hint = capsys.readouterr().out.rpartition("curves: ")[2]
    assert shlex.split(hint) == ["tensorboard", "--logdir", "runs/a b"]
    for folder, given in ((run, words), (run.parent / "seed3", from_file)):
        command = json.loads((folder / "summary.json").read_text())["command"]
        assert shlex.split(command) == ["metacal", "train", *given]
    (run / "summary.json").unlink()  # as if it had been stopped at the end
    assert main(["train", f"resume={run}", "threads=1"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert shlex.split(summary["command"]) == ["metacal", "train", *words]
    once = tmp_path / "once"
    run.rename(once)
    assert main(shlex.split(summary["command"])[1:]) == 0
    assert_same_run(once, run)


def test_overwriting_is_not_remembered(tmp_path):
    folder = tmp_path / "run"
    words = ["train", *BRIEF, f"run_dir={folder}"]
    assert main([*words, "overwrite=true", "baselines=[]"]) == 0
    text = (folder / "config.yaml").read_text()
    for line in ("overwrite: false", "run_dir: null", "resume: null", "baselines: []"):
        assert line in text


def test_other_peoples_files_are_left_alone(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    (theirs / "checkpoints").mkdir(parents=True)
    (theirs / "checkpoints" / "mine.pt").write_text("precious")
    words = ["train", "epochs=1", "data.train_size=200", f"run_dir={theirs}", "overwrite=true"]
    assert main(words) == 2
    (theirs / "config.yaml").write_text("mine: 1\n")
    assert main(words) == 2
    assert "not a metacal run's" in capsys.readouterr().err
    assert (theirs / "checkpoints" / "mine.pt").read_text() == "precious"


def test_two_processes_do_not_share_a_folder(tmp_path, capsys):
    from metacal.runs.folder import RunFolder

    folder = tmp_path / "run"
    folder.mkdir()
    with RunFolder(folder).locked():
        assert main(["train", "epochs=1", "data.train_size=200", f"run_dir={folder}"]) == 2
    assert "is in use" in capsys.readouterr().err


def test_a_sweep_with_a_bad_value_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "optimizer.lr=0.1,-1", "epochs=1"]) == 2
    assert "optimizer.lr must be >= 0" in capsys.readouterr().err
    assert main(["train", "-m", "seed=0,1", "baselines=[focal]"]) == 2
    assert "are for one run" in capsys.readouterr().err
    assert not list(tmp_path.rglob("config.yaml"))


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(finished):
    from metacal.errors import RunError
    from metacal.runs.folder import RunFolder
    from metacal.training.state import require_finite_weights

    net = torch.nn.Linear(2, 2)
    require_finite_weights(net, 7, RunFolder(finished))
    with torch.no_grad():
        net.bias[1] = float("inf")
    with pytest.raises(RunError, match=r"not finite after step 7; the last good checkpoint is .*last\.pt"):
        require_finite_weights(net, 7, RunFolder(finished))
    with pytest.raises(RunError, match="nothing was saved"):
        require_finite_weights(net, 7, None)


def test_an_unwritable_folder_says_so(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", "epochs=1", f"run_dir={tmp_path / 'file' / 'run'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("epochs", [1, 7, 10, 100])
def test_the_focal_schedule_takes_its_steps_whatever_the_epochs(epochs):
    from metacal.config.compose import compose
    from metacal.training.setup import build_gamma

    source = build_gamma(compose(["method=focal_schedule", f"epochs={epochs}"]), None, None)
    for at, value in ((0, 5), (0.299, 5), (0.301, 3), (0.699, 3), (0.701, 1), (1, 1)):
        assert float(source(None, epoch=at * epochs)) == value, at
    # A step that falls on a whole epoch is taken there: 0.55 · 100 is 55.00000000000001.
    words = ["method=focal_schedule", "epochs=100", "gamma.milestones=[0.29,0.55]"]
    source = build_gamma(compose(words), None, None)
    assert [float(source(None, epoch=e)) for e in (28, 29, 54, 55)] == [5, 3, 3, 1]
