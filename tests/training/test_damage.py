"""Damaged files of a run: a resume and an evaluate go on where a copy is left, and say what they left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from metacal.cli import main
from metacal.runs import checkpoint
from metacal.runs.folder import RunFolder, read_line, read_metrics
from metacal.training.logging import RunLog

WORDS = [
    "method=gamma_net",
    "model.hidden=[8]",
    "data.train_size=200",
    "epochs=2",
    "monitor.resamples=0",
    "monitor.figures_every=0",
    "threads=1",
]
FEW = ["--measures", "ece", "--resamples", "8"]  # of a comparison


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ended") / "run"
    assert main(["train", *WORDS, f"run_dir={folder}"]) == 0
    return folder


@pytest.fixture
def run(ended, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(ended, tmp_path / "run"))


def evaluated(run: Path, capsys) -> tuple[dict, str]:
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--resamples", "0"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


DAMAGES = {
    "half": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "no YAML": lambda text: text.replace(b":", b"\x00", 1),
    "another value": lambda text: text.replace(b"lr: 0.1", b"lr: 0.9"),
    "another key": lambda text: text.replace(b"epochs:", b"epochz:", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_config_is_taken_from_the_checkpoint(damage, run, capsys):
    config = run / "config.yaml"
    whole, expected = config.read_bytes(), evaluated(run, capsys)[0]
    config.write_bytes(DAMAGES[damage](whole))
    assert config.read_bytes() != whole
    found, said = evaluated(run, capsys)
    assert found == expected
    assert "config.yaml" in said and said.endswith("the checkpoint's copy of the config is taken\n")
    goes_on = {"half": [*WORDS, f"run_dir={run}"], "another key": [f"resume={run}"]}
    if damage in goes_on:
        (run / "summary.json").unlink()
        assert main(["train", *goes_on[damage]]) == 0
        assert "the checkpoint's copy" in capsys.readouterr().err
        assert config.read_bytes() == whole
        assert evaluated(run, capsys) == (expected, "")


def test_without_a_copy_a_damaged_config_is_named(run, capsys):
    for file in (run / "checkpoints").glob("*.pt"):
        state = checkpoint.load(file)
        del state["config"]
        checkpoint.save(file, state)
    assert main(["evaluate", str(run), "--resamples", "0"]) == 0
    (run / "config.yaml").write_bytes(b"")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--resamples", "0"]) == 2
    assert "config.yaml is damaged: it has no data, gamma" in capsys.readouterr().err


def test_a_damaged_summary_is_made_again(run, capsys):
    expected = json.loads((run / "summary.json").read_text())
    for text in ("", "[]", "{}", "[" * 10_000, '{"method": "gam'):
        (run / "summary.json").write_text(text)
        _, said = evaluated(run, capsys)
        assert "summary.json is damaged: whether the data are those of the run is not checked" in said
        assert not RunFolder(run).finished
    assert main(["train", *WORDS, f"run_dir={run}"]) == 0
    assert "summary.json is damaged; it is made again" in capsys.readouterr().err
    again = json.loads((run / "summary.json").read_text())
    assert {k: v for k, v in again.items() if k.startswith("test/")} == {
        k: v for k, v in expected.items() if k.startswith("test/")
    }
    # Without a checkpoint to make it from, what is left of the run is not wiped.
    (run / "summary.json").write_text(text)
    (run / "checkpoints" / "last.pt").unlink()
    assert main(["train", *WORDS, f"run_dir={run}"]) == 2
    assert "no checkpoint to make it again from" in capsys.readouterr().err
    assert (run / "predictions" / "test.npz").exists()


def test_damaged_lines_of_the_log_are_told_and_left_out(run, capsys):
    file = run / "metrics.jsonl"
    whole = file.read_bytes()
    lines = whole.split(b"\n")
    lines[1] = lines[1][:-5] + b"\xff\x00" + lines[1][-3:]
    file.write_bytes(b"\n".join(lines))
    (run / "summary.json").unlink()
    assert main(["train", f"resume={run}"]) == 0
    assert "metrics.jsonl: line 2 cannot be read" in capsys.readouterr().err
    assert read_metrics(file)[1] == [2]
    assert main(["compare", str(run), *FEW]) == 0
    assert "Left out of curves and step costs: line 2 of" in capsys.readouterr().out
    lines = whole.split(b"\n")
    for number, bit in ((1, 2), (3, 4)):  # both can still be read
        start = lines[number].index(b": ", 40) + 2
        lines[number] = lines[number][:start] + bytes([lines[number][start] ^ bit]) + lines[number][start + 1 :]
        assert read_line(lines[number]) is not None
    file.write_bytes(b"\n".join(lines))
    (run / "summary.json").unlink()
    for said in ("line 2, 4 has changed since it was written", "line 2, 4 cannot be read"):
        assert main(["train", f"resume={run}"]) == 0
        assert f"metrics.jsonl: {said}" in capsys.readouterr().err
        assert read_metrics(file)[0] == [read_line(line) for i, line in enumerate(lines[:-1]) if i not in (1, 3)]
        (run / "summary.json").unlink()
    file.write_bytes(whole[:-100])
    assert main(["train", f"resume={run}"]) == 0
    assert "metrics.jsonl has lost its last 100 bytes" in capsys.readouterr().err
    file.unlink()
    (run / "summary.json").unlink()
    assert main(["train", f"resume={run}"]) == 0


def test_no_flipped_bit_of_the_log_is_read_when_it_goes_on(run, tmp_path):
    """Whichever bit it is: what can be read afterwards are lines that the run wrote."""
    state = checkpoint.load(run / "checkpoints" / "last.pt")["log"]
    whole = (run / "metrics.jsonl").read_bytes()
    written = read_metrics(run / "metrics.jsonl")[0]
    for position in range(0, 8 * len(whole), 8 * len(whole) // 60):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << (position % 8)
        (tmp_path / "metrics.jsonl").write_bytes(flipped)
        RunLog(tmp_path, resume=state, sinks=()).close()
        lines, unread = read_metrics(tmp_path / "metrics.jsonl")
        assert all(line in written for line in lines) and len(unread) == 1
        assert len(lines) in (len(written) - 1, len(written) - 2)  # of two where what parts them is flipped


def test_a_number_that_has_changed_in_the_summary_or_the_log_is_told_and_left_out(run, capsys):
    """Or a digest itself; a summary without any, of an older run, is taken as it is."""
    folder = RunFolder(run)
    log, text = (run / "metrics.jsonl").read_bytes(), (run / "summary.json").read_text()
    summary = folder.read_summary()
    for name in ("test/nll", "seed", "digests"):
        start = text.index(f'"{name}": ')
        digit = next(i for i in range(start, len(text)) if text[i].isdigit())
        (run / "summary.json").write_text(f"{text[:digit]}{(int(text[digit]) + 1) % 10}{text[digit + 1 :]}")
        assert not folder.finished
        assert main(["compare", str(run)]) == 2
        assert "its summary.json is damaged or not that of a run" in capsys.readouterr().err
    (run / "summary.json").write_text(text)
    assert folder.read_summary() == summary and not folder.metrics_changed(summary)
    digit = next(i for i in range(len(log) // 2, len(log)) if chr(log[i]).isdigit())
    (run / "metrics.jsonl").write_bytes(
        log[:digit] + (b"1" if log[digit : digit + 1] == b"0" else b"0") + log[digit + 1 :]
    )
    told = "metrics.jsonl, which is not as the run wrote it"
    assert main(["compare", str(run), *FEW]) == 0
    assert told in capsys.readouterr().out
    older = {key: value for key, value in json.loads(text).items() if key != "digests"}
    (run / "summary.json").write_text(json.dumps(older))
    assert main(["compare", str(run), *FEW]) == 0
    assert told not in capsys.readouterr().out


def test_what_is_no_line_of_the_log_is_none():
    assert read_line(b'{"step": 1, "epoch": 0, "split": "val", "ece": 0.5, "nll": null}') is not None
    for text in (b"", b"{", b"[]", b"3", b'{"step": 1}', b'{"step": 1e999, "epoch": 0, "split": "val"}', b"[" * 10_000):
        assert read_line(text) is None
    assert read_line(b'{"step": 1, "epoch": 0, "split": "val", "ece": "x"}') is None
    assert read_line(b'{"step": 1, "epoch": 0, "split": 7}') is None


def test_a_damaged_checkpoint_names_the_last_good_one(run, capsys):
    for name, other in (("last", "best"), ("best", "last")):
        file = run / "checkpoints" / f"{name}.pt"
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 4
        file.write_bytes(damaged)
        assert main(["evaluate", str(run), "--checkpoint", name]) == 2
        said = capsys.readouterr().err
        assert f"{name}.pt is damaged" in said and f"the last good one is {run / 'checkpoints' / other}.pt" in said
        assert main(["curvature", str(run), "--subset", "20"]) == 0  # of those that are whole
        captured = capsys.readouterr()
        assert "left out" in captured.err and f"{other}.pt" in captured.out
        file.write_bytes(whole)


def test_an_ensemble_does_without_damaged_predictions(run, ended, capsys):
    (run / "predictions" / "test.npz").write_bytes(b"PK\x03\x04")
    assert main(["evaluate", str(run), str(ended), "--ensemble", "--json", "--resamples", "0"]) == 0
    captured = capsys.readouterr()
    assert "made again from the checkpoint" in captured.err
    first, second = json.loads(captured.out)["members"].values()
    assert first == pytest.approx(second)
    assert torch.get_num_threads() == 1
