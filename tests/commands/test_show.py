"""`metacal show` and `metacal list`: what they say is what the files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reference.run_folders import write_run

from metacal.calibration import MEASURES
from metacal.cli import main
from metacal.config.words import groups
from metacal.report.verdict import meaning
from metacal.runs.folder import RunFolder
from metacal.studies.grid import study_names


def test_a_finished_run_an_unfinished_and_an_old_one(tmp_path, capsys):
    scores = {"test/ece": 0.05, "test/confidence": 0.7}
    run = write_run(tmp_path / "focal" / "seed3", ["method=focal", "gamma.value=2"], 3, **scores)
    half = write_run(tmp_path / "half", ["method=brier"], finished=False)
    (half / "checkpoints").mkdir()
    (half / "checkpoints" / "last.pt").write_bytes(b"")
    old = Path(__file__).parents[1] / "runs" / "old_run"
    assert main(["show", str(run), str(half), str(old)]) == 0
    text = capsys.readouterr().out
    finished, unfinished, first = (text[text.index(f"{path}: ") :] for path in (run, half, old))
    summary = json.loads((run / "summary.json").read_text())
    assert "Focal loss with one fixed gamma" in finished and meaning(summary) in finished
    accuracy = next(line for line in finished.splitlines() if line.startswith("Accuracy %"))
    assert f"{100 * summary['test/accuracy']:.2f}" in accuracy
    for line in ("config.yaml", "predictions/test.npz"):
        assert f"\n  {line} " in finished
    assert f"metacal train {run / 'config.yaml'} seed=4" in finished and f"metacal compare {tmp_path}\n" in finished
    assert (
        unfinished.startswith(f"{half}: stopped, epoch 3 of ")
        and "val at epoch 3: NLL 0.3333  ECE 3.33 %" in unfinished
    )
    assert f"go on\n  metacal train resume={half}" in unfinished
    assert first.startswith(f"{old}: finished after epoch 3 of 3") and "ECE %" in first
    with RunFolder(half).locked():
        assert main(["show", str(half)]) == 0
    assert "in training now, epoch 3 of " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["methods", "models", "optimizers", "data", "studies", "measures"])
def test_lists_have_every_name_with_something_to_say(kind, capsys):
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    said = {line.split()[0]: line.split()[1:] for line in lines if not line.startswith(" ")}
    expected = {"studies": study_names(), "measures": [*MEASURES]}
    assert [*said] == (expected.get(kind) or groups()[kind.removesuffix("s") if kind != "data" else kind])
    assert all(len(words) >= 2 for words in said.values())
