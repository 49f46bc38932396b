"""Run folders: found, checked, left out by name, and grouped by what differs beyond the seed."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from reference.run_folders import made_up, write_run

from metacal.config.compose import compose, config_dir
from metacal.config.resolve import flat
from metacal.errors import InputError
from metacal.report.caveats import unequal_conditions, unequal_data, unequal_times
from metacal.runs.record import find_runs, group_runs, load_runs, require_same_samples
from metacal.runs.settings import defaults_of, equal_settings, short_names, show_value


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


def test_patterns_match_names_with_brackets(tmp_path):
    """As a pattern `[1,2]` is one character; where that matches nothing the brackets are meant as they stand."""
    paths = [write_run(tmp_path / f"mlp,model.hidden=[{i},2]" / "seed0", seed=i) for i in (1, 3)]
    assert find_runs([f"{tmp_path}/*hidden=[1,2]/seed*"]) == paths[:1]
    assert find_runs([f"{tmp_path}/*hidden=[[][13],2]/seed*"]) == paths
    with pytest.raises(InputError, match="matches nothing"):
        find_runs([f"{tmp_path}/*hidden=[7,2]/seed*"])


def test_words_that_name_no_run_are_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere does not exist and matches nothing"):
        find_runs(["nowhere"])
    with pytest.raises(InputError, match="is no run folder and holds none"):
        find_runs([tmp_path])


def test_runs_that_differ_by_seed_and_bookkeeping_are_one_group(tmp_path):
    write_run(tmp_path / "a", ["method=focal", "threads=1", "monitor=full", "data.workers=0"], 1)
    own = [
        "name=other",
        "keep_every=2",
        "checkpoint_every=0.5",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "monitor.histograms=false",
    ]
    write_run(tmp_path / "b", ["method=focal", *own], 0)
    (group,) = groups_of(tmp_path)
    assert group.seeds == (0, 1) and group.label == "focal" and not group.differs
    (said,) = unequal_times([group])
    assert "threads (1, null)" in said and "monitor.every (0, 50)" in said and "resamples" not in said


def test_how_often_val_is_measured_decides_which_epoch_is_selected(tmp_path):
    write_run(tmp_path / "a", ["method=focal"], 0)
    write_run(tmp_path / "b", ["method=focal", "monitor.val_every=5"], 0)
    assert [g.label for g in groups_of(tmp_path)] == ["focal, monitor.val_every=1", "focal, monitor.val_every=5"]


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


def test_unequal_conditions_between_methods_are_told(tmp_path):
    """What differs between methods and not within one is a column and a warning, too."""
    write_run(tmp_path / "ce", ["method=cross_entropy", "optimizer.lr=0.01", "epochs=5"])
    write_run(tmp_path / "net", ["method=gamma_net", "epochs=200", "model=cnn", "data.flip=true", "meta.lr=0.5"])
    ce, net = groups_of(tmp_path)
    want = {"epochs": 5, "model.name": "mlp", "optimizer.lr": 0.01, "data.flip": False}
    assert {key: ce.differs[key] for key in want} == want and "meta.lr" not in ce.differs
    want = {"epochs": 200, "model.name": "cnn", "optimizer.lr": 0.1, "data.flip": True, "meta.lr": 0.5}
    assert net.differs == want
    said = unequal_conditions([ce, net])
    assert [line.split(":")[0] for line in said] == [
        "Not the same epochs", "Not the same model", "Not the same augmentation (data.flip)"
    ]  # fmt: skip
    assert said[1] == f"Not the same model: mlp ({ce.short}); cnn ({net.short})."


def test_a_method_names_what_its_yaml_sets_and_no_more(tmp_path):
    """mixup is mixup by its YAML; cross-entropy with mixup is not, nor a focal loss with another gamma."""
    write_run(tmp_path / "a", ["method=mixup"])
    write_run(tmp_path / "b", ["method=focal", "gamma.value=5"])
    write_run(tmp_path / "c", ["method=cross_entropy"])
    labels = [g.label for g in groups_of(tmp_path)]
    assert labels == ["mixup", "focal, gamma.value=5", "cross_entropy"]
    assert unequal_conditions(groups_of(tmp_path)) == []
    write_run(tmp_path / "d", ["method=dual_focal", "data.mixup=0.4"])
    *_, last = groups_of(tmp_path)
    assert last.label == "dual_focal, data.mixup=0.4"
    assert "0.4 (dual_focal, mixup=0.4)" in unequal_conditions(groups_of(tmp_path))[0]
    # One gamma in all groups is no column, but is said with what is equal where it is not what the names promise.
    assert equal_settings(groups_of(tmp_path / "b"))["gamma.value"] == 5
    assert "gamma.value" not in equal_settings(groups_of(tmp_path / "c"))


def test_a_number_written_in_another_way_is_the_same_number(tmp_path):
    """A method's file has `ramp: 2`, a run's config 2.0."""
    for method in ("metacal", "hessian_trace"):
        write_run(tmp_path / method, [f"method={method}"])
    assert sorted(g.label for g in groups_of(tmp_path)) == ["hessian_trace", "metacal"]


def test_a_choice_names_what_its_yaml_sets_and_no_more(tmp_path):
    write_run(tmp_path / "a", ["method=focal"])
    write_run(tmp_path / "b", ["method=brier"])
    write_run(tmp_path / "c", ["method=mmce"])
    write_run(tmp_path / "d", ["method=focal", "optimizer=muon"])
    write_run(tmp_path / "e", ["method=focal", "optimizer=sam", "optimizer.momentum=0.8"])
    groups = groups_of(tmp_path)
    assert [dict(g.differs) for g in groups[2:]] == [
        {"optimizer.name": "sgd"},
        {"optimizer.name": "muon"},
        {"optimizer.name": "sam", "optimizer.momentum": 0.8},
    ]
    assert [g.short for g in groups] == ["focal", "brier", "mmce", "focal, muon", "focal, sam, momentum=0.8"]
    assert "muon (focal, muon)" in unequal_conditions(groups)[0]


@pytest.mark.parametrize(("part", "option"), [("method", "mixup"), ("optimizer", "gd"), ("model", "cnn")])
def test_defaults_are_those_of_the_composition(part, option):
    want = flat(asdict(compose([f"{part}={option}"])))
    found = defaults_of(part, option)
    assert all(found[key] == value for key, value in want.items() if part in ("method", key.split(".")[0]))
    assert found.get("epochs") == want["epochs"] and defaults_of(part, "none such") is None


@pytest.mark.slow
def test_defaults_of_every_choice_are_those_of_the_composition():
    for part in ("method", "optimizer", "model", "schedule"):
        for file in (config_dir() / part).glob("*.yaml"):
            test_defaults_are_those_of_the_composition(part, file.stem)


def test_short_names_are_distinct():
    told = [{"optimizer.lr": 0.1}, {"optimizer.lr": 0.1}, {"optimizer.lr": 0.1}, {"optimizer.lr": 0.2}]
    assert short_names("abca", told) == ["a", "b", "c", "a, lr=0.2"]
    told = [{"meta.every": 2, "optimizer.every": 1}, {"optimizer.every": 2}]
    assert short_names("ab", told) == ["a, meta.every=2, optimizer.every=1", "b, optimizer.every=2"]


def data_of(train: str | None, val: str = "v", **more):
    """Of a summary; without fingerprints of train if there are none."""
    found = {"name": "npz", "fingerprint": "00000000", "train": 100, "meta": 0, "val": 9, "test": 9} | more
    return found | ({} if train is None else {"fingerprints": {"train": train, "meta": None, "val": val}})


def test_runs_that_trained_on_other_images_are_other_groups(tmp_path):
    words = ["method=focal"]
    write_run(tmp_path / "a0", words, 0, data=data_of("aaaaaaaaaa"))
    write_run(tmp_path / "a1", words, 1, data=data_of(None))  # an older run goes with the first
    write_run(tmp_path / "b0", words, 0, data=data_of("bbbbbbbbbb"))
    write_run(tmp_path / "b1", words, 1, data=data_of("bbbbbbbbbb"))
    write_run(tmp_path / "twin", words, 0, data=data_of("bbbbbbbbbb"))
    runs, left_out = load_runs(find_runs([tmp_path]))
    # a1 knows nothing of its images: b1 might be the same run.
    assert [left.path.name for left in left_out] == ["b1", "twin"]
    a, b = group_runs(runs)
    assert (a.seeds, b.seeds) == ((0, 1), (0,))
    assert a.label == "focal, data.fingerprints.train=aaaaaaaa" and b.differs["data.fingerprints.train"] == "bbbbbbbb"
    (said,) = [line for line in unequal_data([a, b]) if "under one configuration" in line]
    assert said.startswith("Not the same training images") and "/a0, " in said and "/b0" in said


def test_other_images_between_methods_are_told_and_splits_of_each_seed_are_not(tmp_path):
    write_run(tmp_path / "a", ["method=focal"], data=data_of("a", "v"))
    write_run(tmp_path / "b", ["method=brier"], data=data_of("a", "w"))
    (said,) = unequal_data(groups_of(tmp_path))
    assert said.startswith("Not the same val images under one configuration")
    for seed in range(2):
        for method in ("focal", "brier"):
            own = [f"method={method}", "data.split_seed=null"]
            write_run(tmp_path / "own" / method / str(seed), own, seed, data=data_of(f"t{seed}", f"v{seed}"))
    groups = groups_of(tmp_path / "own")
    assert [g.seeds for g in groups] == [(0, 1), (0, 1)] and unequal_data(groups) == []


def test_other_val_sets_are_refused_by_name_where_val_is_compared(tmp_path):
    write_run(tmp_path / "a", ["method=focal"], data=data_of("a", "vvvvvvvvvv"))
    write_run(tmp_path / "b", ["method=brier"], data=data_of("a", "wwwwwwwwww"))
    write_run(tmp_path / "c", ["method=mmce"], data=data_of(None))
    require_same_samples(groups_of(tmp_path))
    with pytest.raises(InputError, match=r"2 different val sets .* npz vvvvvvvv \(9 images\) of 1 run such as .*/a; "):
        require_same_samples(groups_of(tmp_path), "val")
    require_same_samples(groups_of(tmp_path / "b", tmp_path / "c"), "val")


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
    (paused,), _ = load_runs([write_run(tmp_path / "b", seed=3, step_ms=[20.0, 9000.0, 30.0])])
    assert paused.step_ms == 30.0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    del summary["time/train_s"], summary["versions"]
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    (run,), _ = load_runs([tmp_path / "a"])
    assert run.minutes is None and run.step_ms is None and run.versions == ""
