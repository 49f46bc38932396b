"""The runner's processes: several at a time, failures, signals, sharing. The runs are stand-ins that start fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from metacal.errors import InputError, RunError
from metacal.studies import runner
from metacal.studies.grid import grid_jobs

# As a run behaves: it writes its checkpoint when asked to stop and exits with 130, or its summary in the end.
STAND_IN = """
import json, os, pathlib, signal, sys, time
folder, seed, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
(folder / "checkpoints").mkdir(exist_ok=True)
def stop(number, frame):
    (folder / "checkpoints" / "last.pt").write_text("saved")
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
(folder / "began").write_text(str(time.time()))
(folder / "pid").write_text(str(os.getpid()))
(folder / "environment").write_text(os.environ.get("STAND_IN_GPU", ""))
print("working", flush=True)
time.sleep(seconds)
if seed == 13:
    print("metacal: something went wrong")
    sys.exit(1)
(folder / "ended").write_text(str(time.time()))
summary = {"method": "focal", "seed": seed, "data": {"fingerprint": "0"}, "time/train_s": 60.0}
(folder / "summary.json").write_text(json.dumps(summary))
"""

SUMMARY = {"method": "focal", "seed": 0, "data": {"fingerprint": "0"}, "time/train_s": 120.0}


@pytest.fixture
def stand_ins(monkeypatch):
    """Runs that only sleep; returns a setter of their seconds."""
    seconds = [0.0]

    def start(job, threads, gpu):
        job.folder.path.mkdir(parents=True, exist_ok=True)
        with open(job.folder.log, "a") as log:
            words = [str(job.folder.path), str(job.config.seed), str(seconds[0])]
            environment = os.environ | {"STAND_IN_GPU": str(gpu)}
            return subprocess.Popen(
                [sys.executable, "-c", STAND_IN, *words], stdout=log, env=environment, start_new_session=True
            )

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "check_start", lambda jobs: None)
    monkeypatch.setattr(runner, "_POLL", 0.01)
    return lambda value: seconds.__setitem__(0, value)


def jobs_of(tmp_path, seeds, *words):
    return grid_jobs([f"runs={tmp_path}", "method=focal", f"seed={','.join(map(str, seeds))}", *words])


def overlap(jobs):
    """The most runs that worked at one time."""
    times = [[float((j.folder.path / name).read_text()) for name in ("began", "ended")] for j in jobs]
    return max(sum(a <= t < b for a, b in times) for t, _ in times)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_no_more_runs_at_a_time_than_asked(n_jobs, tmp_path, stand_ins):
    stand_ins(0.3)
    jobs = jobs_of(tmp_path, range(3))
    states = runner.run_missing(jobs, n_jobs)
    assert [s.state for s in states] == ["done"] * 3
    assert overlap(jobs) <= n_jobs


def test_finished_runs_are_kept_and_a_failure_stops_no_other(tmp_path, stand_ins, capsys):
    jobs = jobs_of(tmp_path, [0, 13, 2])
    jobs[0].folder.path.mkdir(parents=True)
    jobs[0].folder.write_summary(SUMMARY)
    (jobs[0].folder.config).write_text("")
    states = runner.run_missing(jobs, 1)
    assert [s.state for s in states] == ["done", "failed", "done"]
    assert states[0].seconds == 120.0 and not (jobs[0].folder.path / "began").exists()
    with pytest.raises(RunError, match=r"1 of 3 runs failed \(seed=13\)"):
        runner.require_all_done(states)
    err = capsys.readouterr().err
    assert "something went wrong" in err and str(jobs[1].folder.log) in err
    runner.require_all_done([states[0], states[2]])
    # The same again: only what failed is run.
    began = (jobs[2].folder.path / "began").read_text()
    runner.run_missing(jobs, 1)
    assert (jobs[2].folder.path / "began").read_text() == began
    assert jobs[1].folder.log.read_text().count("working") == 2


def test_a_run_that_another_process_trains_is_waited_for(tmp_path, stand_ins, capsys):
    """It is done where that process ends it, and else started once that is gone."""
    jobs = jobs_of(tmp_path, (0, 1, 2))
    locks = [jobs[0].folder.locked(), jobs[1].folder.locked()]

    def end_elsewhere():
        jobs[0].folder.summary.write_text(json.dumps(SUMMARY))
        for lock in locks:
            lock.__exit__(None, None, None)

    for lock in locks:
        lock.__enter__()
    threading.Timer(1.0, end_elsewhere).start()
    states = runner.run_missing(jobs, n_jobs=2)
    assert [s.state for s in states] == ["done", "done", "done"]
    assert [(job.folder.path / "began").exists() for job in jobs] == [False, True, True]
    assert float((jobs[1].folder.path / "began").read_text()) > float((jobs[2].folder.path / "ended").read_text())
    assert capsys.readouterr().out.count("another process trains it") == 2


def test_all_finished_starts_nothing(tmp_path, stand_ins, capsys):
    jobs = jobs_of(tmp_path, [0])
    jobs[0].folder.path.mkdir(parents=True)
    jobs[0].folder.write_summary(SUMMARY)
    assert [s.state for s in runner.run_missing(jobs)] == ["done"]
    assert "all finished" in capsys.readouterr().out


def test_overwrite_runs_what_is_finished(tmp_path, stand_ins):
    jobs = jobs_of(tmp_path, [0], "overwrite=true")
    jobs[0].folder.path.mkdir(parents=True)
    jobs[0].folder.write_summary(SUMMARY)
    runner.run_missing(jobs)
    assert (jobs[0].folder.path / "began").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_runs_save_and_starts_no_more(number, tmp_path, stand_ins, capsys):
    stand_ins(30)
    jobs = jobs_of(tmp_path, range(3))
    before = signal.getsignal(number)

    def send():
        while not all((j.folder.path / "pid").exists() for j in jobs[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        runner.run_missing(jobs, 2)
    sender.join()
    assert [j.folder.last.exists() for j in jobs] == [True, True, False]
    assert not jobs[2].folder.path.exists()
    assert signal.getsignal(number) is before
    out = capsys.readouterr().out
    assert "2 stopped" in out and "same command" in out


def test_devices_are_shared_out_in_turn(tmp_path, stand_ins, monkeypatch):
    monkeypatch.setattr(runner, "_gpus", lambda environment, count: ["4", "7"])
    stand_ins(0.3)
    jobs = jobs_of(tmp_path, range(4))
    runner.run_missing(jobs, 2)
    used = [(j.folder.path / "environment").read_text() for j in jobs]
    assert sorted(used[:2]) == ["4", "7"] and set(used[2:]) <= {"4", "7"}


def test_names_of_the_gpus():
    assert runner._gpus({}, 3) == ["0", "1", "2"]
    assert runner._gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-8f"}, 2) == ["2", "GPU-8f"]
    assert runner._gpus({"CUDA_VISIBLE_DEVICES": ""}, 0) == []


@pytest.mark.parametrize(("device", "kept"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_a_runs_own_choice_of_device_stays(device, kept, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(runner.subprocess, "Popen", lambda words, **keys: seen.update(keys, words=words))
    (job,) = jobs_of(tmp_path, [0], f"device={device}")
    runner._start(job, 3, "5")
    assert (seen["env"].get("CUDA_VISIBLE_DEVICES") == "5") is kept
    assert seen["env"]["OMP_NUM_THREADS"] == "3" and seen["words"][-1] == "threads=3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=npz"], "data.path"),
        (["model.width=3"], "width"),
        (["method=gamma_net,focal", "meta.engine=higher", "optimizer=adam"], "higher"),
        (["device=tpu"], "device 'tpu' cannot be used"),
        (["device=cuda:99"], "device 'cuda:99' cannot be used"),
    ],
)
def test_what_no_run_could_start_with_is_known_before_the_first(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_start", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(InputError, match=message):
        runner.run_missing(grid_jobs([*words, "seed=0,1"]))
    assert not list(tmp_path.iterdir())


def test_configs_are_looked_at_once_for_all_seeds(tmp_path, monkeypatch):
    loaded, built = [], []
    prepare, build = runner.prepare_data, runner.build_backbone
    monkeypatch.setattr(runner, "prepare_data", lambda c, d: loaded.append(c) or prepare(c, d))
    monkeypatch.setattr(runner, "build_backbone", lambda c, *a: built.append(c) or build(c, *a))
    runner.check_start(grid_jobs([f"runs={tmp_path}", "method=focal,gamma_net", "optimizer.lr=0.1,0.2", "seed=0,1,2"]))
    assert len(built) == 4
    assert len(loaded) == 2  # with and without a meta split


@pytest.mark.parametrize(("n_jobs", "threads"), [(0, None), (1, 0)])
def test_counts_below_one_are_refused(n_jobs, threads, tmp_path):
    with pytest.raises(InputError, match="must be >= 1, got 0"):
        runner.run_missing(jobs_of(tmp_path, [0]), n_jobs, threads)


def test_folders_for_compare_hold_these_runs_and_no_others(tmp_path):
    jobs = grid_jobs([f"runs={tmp_path}", "method=focal,cross_entropy", "seed=0,1"])
    for job in jobs:
        job.folder.path.mkdir(parents=True)
        job.folder.config.write_text("")
    root = tmp_path / "default"
    assert runner.fewest_folders(jobs) == [str(root)]
    assert runner.fewest_folders(jobs[:2]) == [str(root / "focal")]
    assert runner.fewest_folders(jobs[1:3]) == [str(root / "focal/seed1"), str(root / "cross_entropy/seed0")]
    (root / "brier/seed0").mkdir(parents=True)
    (root / "brier/seed0/config.yaml").write_text("")
    assert runner.fewest_folders(jobs) == [str(root / "focal"), str(root / "cross_entropy")]
