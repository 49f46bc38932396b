"""A study: a grid of runs from a YAML file in `configs/study/`, run where missing, then a report of them all.

The file holds

    report: trajectory               the module of `metacal.studies` that makes the report
    common: [key=value, ...]         words of every run's command
    groups: {label: {words: [...], sweep: {key: [value, ...]}}}
    variants: {name: {common: [...], groups: {label: {...}}}}     replacements for a shorter or longer version
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from metacal.compose import compose, config_dir
from metacal.errors import InputError, RunError, require, require_choice
from metacal.training.folder import RunFolder, folder_of, require_same_config

__all__ = ["Job", "Study", "load_study", "run_missing", "study_names"]


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a study: its group's label, the words of its command, what it was swept over, and its folder."""

    label: str
    words: tuple[str, ...]
    swept: Mapping[str, Any]
    folder: RunFolder


@dataclass(frozen=True)
class Study:
    """A study as it will be run."""

    name: str
    report: str
    jobs: Sequence[Job]
    folder: Path  # where the report goes


def study_names() -> list[str]:
    """The studies of `configs/study/`."""
    return sorted(p.stem for p in (config_dir() / "study").glob("*.yaml"))


def load_study(name: str, variant: str | None = None, words: Sequence[str] = ()) -> Study:
    """The study `name`, in a variant of its file, with `words` added to every run's command.

    Raises:
        InputError: for unknown names, and for keys or values that a run would refuse: all runs are composed here.
    """
    require_choice("study", name, study_names())
    spec: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "study" / f"{name}.yaml"))
    if variant is not None:
        require_choice("variant", variant, spec.get("variants", {}))
        change = spec["variants"][variant]
        spec["common"] = [*spec["common"], *change.get("common", [])]
        for label, group in change.get("groups", {}).items():
            spec["groups"][label] = spec["groups"].get(label, {}) | group
    title = name if variant is None else f"{name}-{variant}"
    jobs = []
    given = {word.split("=", 1)[0] for word in words}
    for label, group in spec["groups"].items():
        sweep = group.get("sweep", {})
        for key in given & sweep.keys():
            raise InputError(f"{key}=… cannot be given: the study sweeps over {key} {list(sweep[key])}")
        for values in itertools.product(*sweep.values()):
            swept = dict(zip(sweep, values))
            command = (
                f"name={title}",
                *spec["common"],
                *group.get("words", []),
                *(f"{key}={value}" for key, value in swept.items()),
                *words,
            )
            command = _last_of_each(command)
            config = compose(command)
            folder = folder_of(config, command)
            if folder.finished:
                require_same_config(config, folder)
            jobs.append(Job(label, command, swept, folder))
    root = compose(jobs[0].words)
    return Study(title, spec["report"], jobs, Path(root.runs) / title / "report")


def _last_of_each(words: Sequence[str]) -> tuple[str, ...]:
    """The last word of every key: a variant or the command line replaces what the file says."""
    return tuple({word.split("=", 1)[0]: word for word in words}.values())


def run_missing(jobs: Sequence[Job], n_jobs: int = 1, threads: int | None = None) -> None:
    """Run what is not finished, `n_jobs` at a time, each as a `metacal train` of its own with its own log file.

    Interrupted runs go on from their checkpoints. `threads` for each; None shares the machine's cores out.

    Raises:
        RunError: naming the first run that failed, and its log; the others end first.
    """
    require(n_jobs >= 1, f"jobs must be >= 1, got {n_jobs}")
    waiting = [job for job in jobs if not job.folder.finished]
    print(
        f"{len(jobs)} runs, {len(jobs) - len(waiting)} finished, {len(waiting)} to do, {n_jobs} at a time", flush=True
    )
    threads = threads or max(1, (os.cpu_count() or 1) // n_jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    running: dict[subprocess.Popen, tuple[Job, float]] = {}
    failed: list[Job] = []
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C, so that a preempted study leaves saved runs behind
    try:
        while waiting or running:
            while waiting and len(running) < n_jobs:
                job = waiting.pop(0)
                job.folder.path.mkdir(parents=True, exist_ok=True)
                with open(job.folder.path / "log.txt", "a") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "metacal", "train", *job.words, f"threads={threads}"],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                running[process] = (job, time.monotonic())
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                job, started = running.pop(process)
                what = "done" if process.returncode == 0 else f"FAILED (status {process.returncode})"
                swept = ", ".join(f"{key}={value}" for key, value in job.swept.items())
                print(f"{job.label} {swept}: {what} in {time.monotonic() - started:.0f} s", flush=True)
                if process.returncode:
                    failed.append(job)
    except KeyboardInterrupt:
        for process in running:
            process.terminate()  # they save and end
        for process in running:
            process.wait()
        raise
    if failed:
        log_file = failed[0].folder.path / "log.txt"
        last = log_file.read_text().strip().splitlines()[-1:]
        raise RunError(f"{len(failed)} run(s) failed, the first with {' '.join(last)!r}; see {log_file}")


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def load_series(folder: RunFolder) -> dict[str, dict[int, float]]:
    """metrics.jsonl as series: ``split/measure`` → step → value."""
    series: dict[str, dict[int, float]] = {}
    for text in folder.metrics.read_text().splitlines():
        line = json.loads(text)
        step, split = line.pop("step"), line.pop("split")
        line.pop("epoch")
        for name, value in line.items():
            if value is not None:
                series.setdefault(f"{split}/{name}", {})[step] = value
    if not series:
        raise InputError(f"{folder.path} has no metrics")
    return series
