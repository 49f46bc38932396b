"""`metacal sweep` from its words to its exit status, with real runs."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time

import pytest

from metacal.cli import main
from metacal.commands.words import take_count
from metacal.errors import InputError

# Small and short: what is tested is the sweep, not the training.
TINY = ["method=cross_entropy", "epochs=1", "model.hidden=[8]", "monitor=off", "monitor.resamples=0"]


def test_a_sweep_runs_reports_failures_and_can_be_given_again(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    constant = [*TINY, "schedule=constant", "threads=1"]
    for lr in (0.1, 0.2):  # a sweep takes them as they are
        assert main(["train", *constant, f"optimizer.lr={lr}"]) == 0
    words = ["sweep", *constant, "optimizer.lr=0.1,0.2,1e30", "jobs=2"]
    capfd.readouterr()
    assert main(words) == 1
    out, err = capfd.readouterr()
    assert "2 done, 1 failed" in out
    folders = {p.parent.name: p for p in (tmp_path / "runs/default").glob("*/seed0")}
    bad = next(name for name in folders if "lr=1e" in name)
    assert f"optimizer.lr={'1e+30' if '1e+30' in bad else '1e30'} failed: metacal: " in err
    assert "log.txt" in err and "1 of 3 runs failed" in err
    done = sorted(p for name, p in folders.items() if name != bad)
    words_to_compare = shlex.split(out.partition("compare them: ")[2])
    assert words_to_compare == ["metacal", "compare", *(str(p.relative_to(tmp_path)) for p in done)]
    assert not (folders[bad] / "summary.json").exists()

    words[words.index("optimizer.lr=0.1,0.2,1e30")] = "optimizer.lr=0.1,0.2"
    assert main(words) == 0
    assert "2 runs, all finished" in capfd.readouterr().out


@pytest.mark.slow
def test_an_interrupted_sweep_saves_and_goes_on(tmp_path):
    words = [sys.executable, "-m", "metacal", "sweep", "method=focal", "epochs=200", "seed=0,1,2", "model.hidden=[8]"]
    words += ["monitor.resamples=0", "jobs=2", "threads=1"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folders = [tmp_path / f"runs/default/focal,epochs=200,model.hidden=[8]/seed{i}" for i in range(3)]
    for _ in range(600):
        if all((f / "checkpoints/last.pt").exists() for f in folders[:2]):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "2 stopped" in out and "same command" in out and "metacal: interrupted" in err
    for folder in folders[:2]:
        assert "interrupted; what was saved goes on" in (folder / "log.txt").read_text()
        assert not (folder / "summary.json").exists()
    assert not folders[2].exists()
    done = subprocess.run([*words, "overwrite=false"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((f / "summary.json").exists() for f in folders)
    assert "from step" in (folders[0] / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0,1", "jobs=0"], "jobs must be an integer >= 1, got '0'"),
        (["seed=0,1", "threads=x"], "threads must be an integer >= 1, got 'x'"),
        (["seed=0,1", "-m"], "sweep takes key=value words, got '-m'"),
        (["seed=0,1", "focal"], "sweep takes key=value words, got 'focal'"),
        (["seed=0,1", "hydra/launcher=submitit_slurm"], "launchers are for `metacal train -m`"),
        (["method=focl,brier"], "did you mean 'focal'?"),
        (["missing.yaml", "seed=0,1"], "missing.yaml does not exist"),
    ],
)
def test_bad_words_end_with_status_2_and_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_needs_no_torch():
    code = "import sys; from metacal.cli import main; main(['sweep', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "usage: metacal sweep" in done.stdout


def test_counts_are_taken_out_of_the_words():
    words = ["a=1", "jobs=2", "b=2", "jobs=3"]
    assert take_count(words, "jobs") == 3 and words == ["a=1", "b=2"]
    assert take_count(words, "threads") is None
    with pytest.raises(InputError, match="jobs must be an integer"):
        take_count(["jobs=-1"], "jobs")
