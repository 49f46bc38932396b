"""`metacal study` with a run that fails: the others are reported, and it is named."""

from __future__ import annotations

import json

from metacal.cli import main


def test_a_failing_run_is_named_and_the_others_are_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "report: compare\n"
        "common: [method=cross_entropy, epochs=1, schedule=constant, monitor=off, monitor.resamples=0]\n"
        "groups:\n"
        "  good: {words: ['model.hidden=[8]'], sweep: {seed: [0]}}\n"
        "  bad: {words: ['model.hidden=[8]', optimizer.lr=1e30], sweep: {seed: [0]}}\n"
    )
    assert main(["study", "mine.yaml", "jobs=2", "threads=1"]) == 1
    out, err = capfd.readouterr()
    assert "runs/mine/report/table.md" in out
    (good,) = (tmp_path / "runs/mine").glob("*/seed0/summary.json")
    assert json.loads(good.read_text())["command"].endswith("threads=1") and (good.parent / "log.txt").read_text()
    assert "bad seed=0 failed: metacal: " in err and "1 of 2 runs failed (bad seed=0)" in err
    text = (tmp_path / "runs/mine/report/table.md").read_text()
    assert "1 run, 1 more not finished" in text and "Left out: runs/mine/" in text
    numbers = json.loads((tmp_path / "runs/mine/report/numbers.json").read_text())
    (left,) = numbers["left_out"]
    assert "lr=1e" in left["path"] and len(numbers["rows"]) == 1
