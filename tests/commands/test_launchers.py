"""Grids through Hydra's launchers: submitit's local executor in place of a cluster's."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from metacal.cli import main
from metacal.commands import train
from metacal.commands.train import _Task

TINY = ["method=cross_entropy", "model.hidden=[8]", "monitor=off", "monitor.resamples=0", "threads=1"]
FOLDER = "cross_entropy,epochs={},model.hidden=[8],optimizer.lr={}"


@pytest.fixture
def no_hydra_state():
    """Hydra keeps one application a process; each test starts without."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize("rates", [["0.1"], pytest.param(["0.1", "0.2"], marks=pytest.mark.slow)])
def test_a_grid_on_submitits_local_executor(rates, tmp_path, monkeypatch, capfd, no_hydra_state):
    monkeypatch.chdir(tmp_path)
    words = ["train", "-m", *TINY, "epochs=1", f"optimizer.lr={','.join(rates)}"]
    assert main([*words, "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]) == 0
    out, _ = capfd.readouterr()
    assert f"{len(rates)} runs, {len(rates)} finished" in out
    assert ("compare them: metacal compare runs/default" in out) == (len(rates) > 1)
    for lr in rates:
        folder = tmp_path / "runs/default" / FOLDER.format(1, lr) / "seed0"
        summary = json.loads((folder / "summary.json").read_text())
        assert f"optimizer.lr={lr}" in summary["command"] and "hydra" not in summary["command"]
    assert len(list((tmp_path / "runs/default/.submitit").iterdir())) >= len(rates)  # each was a job of its own
    assert not (tmp_path / "runs/default/0").exists()  # no folders by the number of the job


def test_a_grid_in_this_process_goes_on_after_a_failure(tmp_path, monkeypatch, capsys, no_hydra_state):
    monkeypatch.chdir(tmp_path)
    words = ["train", "-m", *TINY, "epochs=1", "schedule=constant", "progress=false", "optimizer.lr=1e30,0.2"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "2 runs, 1 finished" in out
    assert "1 of 2 runs are not finished (optimizer.lr=1e+30)" in err
    assert len(list(tmp_path.glob("runs/default/*/seed0/summary.json"))) == 1
    words[-1] = "optimizer.lr=0.2"
    assert main(words) == 0
    assert "already finished, skipped" in capsys.readouterr().out


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _until(found, seconds=90.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError("waited in vain")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the job's process through /proc")
def test_a_preempted_job_saves_is_queued_again_and_goes_on(tmp_path):
    words = [sys.executable, "-m", "metacal", "train", "-m", *TINY, "epochs=300", "optimizer.lr=0.1"]
    words += ["checkpoint_every=1000", "overwrite=true", "hydra/launcher=submitit_local"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs/default" / FOLDER.format(300, "0.1") / "seed0"
    _until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size)
    (controller,) = _children(process.pid)
    (job,) = _children(controller)
    os.kill(job, signal.SIGUSR2)
    out, err = process.communicate(timeout=200)
    log = "".join(f.read_text() for f in (tmp_path / "runs/default/.submitit").rglob("*_log.*"))
    assert process.returncode == 0, out + err + log
    assert "Requeued job" in log and "interrupted; what was saved" in log
    assert "from step" in log  # there was no other checkpoint than the one that the signal asked for
    assert (folder / "summary.json").exists()


def test_the_slurm_launcher_composes(tmp_path, monkeypatch, capsys, no_hydra_state):
    monkeypatch.chdir(tmp_path)
    given = {"partition": "gpu", "gpus_per_node": 1, "cpus_per_task": 8, "timeout_min": 240, "max_num_timeout": 10}
    assert main(["train", "seed=0", *LAUNCHER, "--cfg", "hydra"]) == 0
    import yaml

    shown = yaml.safe_load(capsys.readouterr().out)["hydra"]["launcher"]
    assert shown.pop("_target_").endswith("SlurmLauncher")
    assert {key: shown[key] for key in given} == given
    assert shown["array_parallelism"] == 16 and shown["additional_parameters"] == {"requeue": True}
    assert not list(tmp_path.iterdir())


# SLURM's commands as far as submitit uses them. sbatch keeps the script that it is given; with FAKE_SLURM_RUNS set it
# also runs every task of the array, as a cluster would, after it has told the job's number.
SLURM = {
    "sbatch": """
        cp "$1" "$FAKE_SLURM/script.sh"
        if [ -z "$FAKE_SLURM_RUNS" ]; then echo "sbatch: error: invalid partition specified" >&2; exit 1; fi
        echo "Submitted batch job 4242"
        last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
        for i in $(seq 0 "$last"); do
            SLURM_JOB_ID=$((4242 + i)) SLURM_ARRAY_JOB_ID=4242 SLURM_ARRAY_TASK_ID=$i SLURM_NTASKS=1 \\
            SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=here \\
                setsid bash "$1" > "$FAKE_SLURM/task$i.log" 2>&1 < /dev/null &
        done
    """,
    "srun": """
        while [ "${1#--}" != "$1" ]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done
        exec "$@"
    """,
    "sacct": """
        echo "JobID|State|NodeList"
        for i in 0 1; do echo "4242_$i|RUNNING|here"; done
    """,
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder where the stand-in for SLURM leaves its script."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in SLURM.items():
        (folder / name).write_text("#!/bin/bash\n" + text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


LAUNCHER = [
    "hydra/launcher=submitit_slurm",
    "hydra.launcher.partition=gpu",
    "hydra.launcher.gpus_per_node=1",
    "hydra.launcher.cpus_per_task=8",
    "hydra.launcher.timeout_min=240",
    "hydra.launcher.max_num_timeout=10",
    "hydra.launcher.array_parallelism=16",
    "+hydra.launcher.additional_parameters={requeue: true}",
]


def test_what_slurm_is_asked_for(slurm, capsys, no_hydra_state):
    assert main(["train", "-m", *TINY, "epochs=1", "seed=0,1,2", *LAUNCHER]) == 1
    lines = (slurm / "script.sh").read_text().splitlines()
    asked = {line.split(" ", 1)[1] for line in lines if line.startswith("#SBATCH")}
    assert {
        "--partition=gpu",
        "--gpus-per-node=1",
        "--cpus-per-task=8",
        "--time=240",
        "--array=0-2%3",
        "--signal=USR2@120",
        "--requeue",
        "--open-mode=append",
    } <= asked
    err = capsys.readouterr().err
    assert "invalid partition" in err and "3 of 3 runs are not finished" in err


@pytest.mark.slow
def test_a_grid_as_an_array_of_slurm(slurm, monkeypatch, capsys, no_hydra_state):
    monkeypatch.setenv("FAKE_SLURM_RUNS", "1")
    assert main(["train", "-m", *TINY, "epochs=1", "optimizer.lr=0.1,0.2", *LAUNCHER]) == 0
    assert "2 runs, 2 finished" in capsys.readouterr().out
    assert len(list(Path("runs/default").glob("*/seed0/summary.json"))) == 2
    assert (Path("runs/default/.submitit/4242_0") / "4242_0_0_result.pkl").exists()


def test_a_launcher_needs_a_grid_and_its_plugin(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "seed=0", "hydra/launcher=submitit_slurm"]) == 2
    assert "give it with -m" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["train", "-m", "seed=0,1", "hydra/launcher=submitit_slurm"]) == 2
    assert "needs SLURM's sbatch" in capsys.readouterr().err
    assert main(["train", "-m", "seed=0,1", "--cfg", "hydra"]) == 2
    assert "give one of them" in capsys.readouterr().err
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    assert main(["train", "-m", "seed=0,1", "hydra/launcher=joblib"]) == 2
    err = capsys.readouterr().err
    assert "hydra-joblib-launcher" in err and "[joblib]" in err and err.count("\n") == 1


def test_bad_values_of_a_grid_surface_before_the_first_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "seed=0,1", "optimizer.lr=0.1,-1"]) == 2
    assert "optimizer.lr" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_task_is_pickled_by_name():
    copy = pickle.loads(pickle.dumps(_Task("a.yaml", in_grid=True)))
    assert (copy.config_file, copy.in_grid, copy.requeued) == ("a.yaml", True, False)


@pytest.fixture
def submitit_signals(monkeypatch):
    """The state of signals inside a submitit job: USR2 is its own, SIGTERM passes by. Collects what it is handed."""
    handed: list[int] = []
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    before = {n: signal.getsignal(n) for n in (signal.SIGUSR2, signal.SIGTERM)}
    signal.signal(signal.SIGUSR2, lambda number, frame: handed.append(number))
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield handed
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_signal_is_handed_on_at_once_where_nothing_trains(submitit_signals):
    task = _Task(None, in_grid=True)
    with task._saving_before_requeue() as requeue:
        signal.raise_signal(signal.SIGUSR2)
        assert submitit_signals == [signal.SIGUSR2] and task.requeued
        requeue()  # nothing is pending
    assert submitit_signals == [signal.SIGUSR2]


def test_the_signal_is_handed_on_after_saving_where_a_run_trains(submitit_signals):
    task, stopped = _Task(None, in_grid=True), []
    with task._saving_before_requeue() as requeue:
        outside = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))  # as the run does
        signal.raise_signal(signal.SIGUSR2)
        assert stopped == [signal.SIGTERM] and submitit_signals == [] and not task.requeued
        signal.signal(signal.SIGTERM, outside)
        requeue()
    assert submitit_signals == [signal.SIGUSR2] and task.requeued


def test_outside_a_job_or_the_main_thread_signals_are_left_alone(monkeypatch):
    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    with _Task(None, in_grid=True)._saving_before_requeue():
        assert signal.getsignal(signal.SIGUSR2) is before
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    seen = []

    def other():
        with _Task(None, in_grid=True)._saving_before_requeue():
            seen.append(signal.getsignal(signal.SIGUSR2))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [before]
