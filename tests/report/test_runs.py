"""Run folders: found, checked, left out by name, and grouped by what differs beyond the seed."""

from __future__ import annotations

import json

import pytest
from reference.run_folders import made_up, write_run

from metacal.errors import InputError
from metacal.report.runs import equal_settings, find_runs, group_runs, load_runs, require_same_samples, show_value


def groups_of(*words):
    runs, left_out = load_runs(find_runs(words))
    assert not left_out
    return group_runs(runs)


def test_folders_of_folders_and_globs_name_every_run_once(tmp_path):
    paths = [write_run(tmp_path / "a" / f"focal,x=[1,{i}]" / "seed0", ["method=focal"], i) for i in range(3)]
    assert find_runs([tmp_path]) == paths
    assert find_runs([paths[2], tmp_path / "a"]) == [paths[2], *paths[:2]]
    assert find_runs([f"{tmp_path}/a/*/seed*"]) == paths
    assert find_runs([f"{tmp_path}/**/seed0"]) == paths


def test_words_that_name_no_run_are_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist and matches nothing"):
        find_runs(["nowhere"])
    with pytest.raises(InputError, match="is no run folder and holds none"):
        find_runs([tmp_path])


def test_runs_that_differ_by_seed_and_bookkeeping_are_one_group(tmp_path):
    write_run(tmp_path / "a", ["method=focal", "threads=1", "monitor=off", "data.workers=0"], 1)
    write_run(tmp_path / "b", ["method=focal", "name=other", "keep_every=2", "checkpoint_every=0.5"], 0)
    (group,) = groups_of(tmp_path)
    assert group.seeds == (0, 1) and group.label == "focal" and not group.differs


def test_what_differs_is_told_where_it_says_something(tmp_path):
    words = {
        "ce": ["method=cross_entropy"],
        "ce_fast": ["method=cross_entropy", "optimizer.lr=0.5"],
        "f1": ["method=focal", "gamma.value=1"],
        "f5": ["method=focal", "gamma.value=5"],
    }
    for name, own in words.items():
        write_run(tmp_path / name, own)
    labels = [g.label for g in groups_of(tmp_path)]
    lr = show_value(groups_of(tmp_path)[0].config["optimizer.lr"])
    # The learning rate says something about every method, gamma only where it varies; loss.name follows from method.
    assert labels == [
        f"cross_entropy, optimizer.lr={lr}",
        "cross_entropy, optimizer.lr=0.5",
        f"focal, gamma.value=1, optimizer.lr={lr}",
        f"focal, gamma.value=5, optimizer.lr={lr}",
    ]
    equal = equal_settings(groups_of(tmp_path), main=False)
    assert equal["model.name"] == "mlp" and "optimizer.lr" not in equal and "gamma.value" not in equal


def test_a_config_without_newer_keys_has_their_defaults(tmp_path):
    write_run(tmp_path / "a", ["method=focal"], 0)
    old = write_run(tmp_path / "b", ["method=focal"], 1)
    text = (old / "config.yaml").read_text()
    assert "nonfinite: raise\n" in text
    (old / "config.yaml").write_text(text.replace("nonfinite: raise\n", ""))
    (group,) = groups_of(tmp_path)
    assert group.seeds == (0, 1)


def test_unfinished_and_damaged_runs_are_left_out_by_name(tmp_path):
    write_run(tmp_path / "good", seed=0)
    unfinished = write_run(tmp_path / "unfinished", ["epochs=7"], 1, finished=False)
    (unfinished / "checkpoints").mkdir()
    (unfinished / "checkpoints" / "last.pt").write_bytes(b"")
    write_run(tmp_path / "young", seed=2, finished=False)
    damaged = write_run(tmp_path / "damaged", seed=3)
    (damaged / "summary.json").write_text('{"method": "foc')
    foreign = write_run(tmp_path / "foreign", seed=4)
    (foreign / "config.yaml").write_text("a: [1\n")
    (tmp_path / "crashed" / "seed0").mkdir(parents=True)
    (tmp_path / "crashed" / "seed0" / "log.txt").write_text("Traceback")
    write_run(tmp_path / "twin", seed=0)
    runs, left_out = load_runs(find_runs([tmp_path]))
    assert [run.path.name for run in runs] == ["good"]
    reasons = {str(path.relative_to(tmp_path)): reason for path, reason in left_out}
    assert reasons.keys() == {"unfinished", "young", "damaged", "foreign", "crashed/seed0", "twin"}
    assert (
        reasons["unfinished"] == f"unfinished after 3 of 7 epochs; `metacal train resume={unfinished}` goes on with it"
    )
    assert "stopped before its first checkpoint" in reasons["young"]
    assert reasons["damaged"] == "its summary.json is damaged or not that of a run"
    assert reasons["foreign"] == "its config.yaml cannot be read"
    assert "log.txt" in reasons["crashed/seed0"]
    assert reasons["twin"] == f"has the configuration and the seed of {tmp_path / 'good'}"


def test_different_test_sets_are_refused_by_name(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, labels_seed=5)
    with pytest.raises(InputError, match=r"2 different test sets .* such as .*/a; .* such as .*/b"):
        require_same_samples(groups_of(tmp_path))


def test_predictions_that_contradict_the_summary_are_refused(tmp_path):
    path = write_run(tmp_path / "a")
    (run,), _ = load_runs([path])
    assert len(run.predictions("test")) == 200
    made_up(200, 7, 3, 1.0).save(path / "predictions" / "test.npz")
    with pytest.raises(InputError, match="one was replaced"):
        run.predictions("test")
    (path / "predictions" / "val.npz").unlink()
    with pytest.raises(InputError, match="not found"):
        run.predictions("val")


def test_series_skip_a_line_cut_off_by_a_crash(tmp_path):
    path = write_run(tmp_path / "a")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "epoch": 4, "split": "val", "ec')
    (run,), _ = load_runs([path])
    assert run.series["val/ece"] == pytest.approx({10: 0.1, 20: 0.05, 30: 0.1 / 3})
    assert run.series["train/loss"] == {5: 2.0, 15: 1.0, 25: 2 / 3}


def test_times_and_versions(tmp_path):
    (run,), _ = load_runs([write_run(tmp_path / "a", seed=3)])
    assert run.minutes == pytest.approx(63 / 60) and run.step_ms == pytest.approx(2100)
    assert run.versions == "metacal 0.1.0, torch 2.0"
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    del summary["time/train_s"], summary["versions"]
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    (run,), _ = load_runs([tmp_path / "a"])
    assert run.minutes is None and run.step_ms is None and run.versions == ""
