"""A run folder of the first version, whose config has fewer keys, milestones in epochs, and no copy in checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from reference.run_folders import write_run

from metacal.cli import main
from metacal.config.compose import compose
from metacal.errors import InputError
from metacal.runs.config import recorded_config, translated
from metacal.runs.folder import RunFolder
from metacal.runs.record import find_runs, group_runs, load_runs

WORDS = [
    "method=focal",
    "gamma.source=step",
    "gamma.values=[5,3,1]",
    "gamma.milestones=[0.3333333333333333,0.6666666666666666]",
]
WORDS += ["model.hidden=[3]", "data.train_size=100", "data.test_size=0.03", "data.val_size=0.02", "data.batch_size=25"]
WORDS += ["epochs=3", "monitor.resamples=0"]


@pytest.fixture
def old(tmp_path) -> Path:
    return Path(shutil.copytree(Path(__file__).parent / "old_run", tmp_path / "old" / "seed0"))


def test_its_config_is_said_as_today(old):
    config = recorded_config(RunFolder(old))
    assert config.gamma.milestones == [1 / 3, 2 / 3]
    today = replace(compose(WORDS), run_dir="old_run", threads=1)
    assert asdict(config) == asdict(replace(today, monitor=config.monitor))


def test_it_is_compared_and_grouped_with_runs_of_today(old, tmp_path, capsys):
    write_run(tmp_path / "new" / "seed1", WORDS, seed=1)
    runs, left_out = load_runs(find_runs([tmp_path]))
    (group,) = group_runs(runs)
    assert group.seeds == (0, 1) and not left_out
    (run,) = [run for run in runs if run.path == old]
    assert run.config["data.mixup"] == 0.0 and len(run.predictions("test")) == 54 and run.unread == []
    assert sorted(run.series["val/nll"]) == [4, 8, 12]
    assert run.series["margin/least_margin"][4] == -1.3817522525787354 and "margin/gamma_min" not in run.series
    assert main(["compare", str(old)]) == 0
    assert "focal" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["best", "last"])
def test_it_is_evaluated_from_its_checkpoints(which, old, capsys):
    assert main(["evaluate", str(old), "--json", "--resamples", "0", "--checkpoint", which]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    summary = json.loads((old / "summary.json").read_text())
    assert json.loads(captured.out)["nll"] == pytest.approx(summary["test/nll"], abs=0.2 * (which == "last") + 1e-6)
    assert main(["curvature", str(old), "--subset", "20"]) == 0


def test_that_it_cannot_be_gone_on_with_is_a_sentence(old, capsys):
    (old / "summary.json").unlink()
    assert main(["train", f"resume={old}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("last.pt cannot be resumed from: it has no watch\n") and captured.err.count("\n") == 1
    assert captured.out == f"metacal train: going on with {old}\n"


def test_runs_from_before_the_units_had_a_key_keep_theirs(old):
    plain = {"penalties": {"margin_smoothness": {"weight": 0.01}}, "monitor": {"robust_eps": 0.1}}
    assert translated(plain) == {
        "penalties": {"margin_smoothness": {"weight": 0.01, "units": "inputs"}},
        "monitor": {"robust_eps": 0.1, "robust_units": "inputs"},
    }
    plain["penalties"]["margin_smoothness"]["units"] = plain["monitor"]["robust_units"] = "pixels"
    assert translated(plain) is plain


def test_milestones_in_fractions_stay(old):
    for gamma in ({"milestones": [0.5, 0.75]}, {"milestones": []}, {}, "?"):
        plain = {"epochs": 4, "gamma": gamma}
        assert translated(plain) is plain
    assert translated({"epochs": 4, "gamma": {"milestones": [1, 3]}})["gamma"] == {"milestones": [0.25, 0.75]}
    meta = {"start_epoch": 3, "every": 2}
    assert translated({"epochs": 12, "meta": meta})["meta"] == {"start": 0.25, "every": 2}
    assert translated({"epochs": 2, "meta": meta})["meta"]["start"] < 1  # never
    for data, augmented in (({"flip": True}, True), ({"flip": True, "meta_augment": False}, False), ({}, None)):
        assert translated({"data": data})["data"].get("meta_augment") is augmented
    (old / "config.yaml").write_text((old / "config.yaml").read_text().replace("engine: forward", "engine: backward"))
    with pytest.raises(InputError, match=r"config\.yaml: meta\.engine must be one of"):
        recorded_config(RunFolder(old))
