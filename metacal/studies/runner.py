"""Run what a grid misses: each run a process of its own, several at a time, with the machine shared out among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from metacal.config.parts import needs_meta
from metacal.errors import InputError, RunError, require
from metacal.jsonio import to_json
from metacal.studies.grid import Job
from metacal.studies.progress import Board, RunState
from metacal.training.setup import (
    build_backbone,
    build_parts,
    choose_device,
    evaluation_batches,
    pixels_of,
    prepare_data,
    training_batches,
)

__all__ = ["check_start", "fewest_folders", "require_all_done", "run_missing"]

_POLL = 0.2  # seconds


def run_missing(
    jobs: Sequence[Job], n_jobs: int = 1, threads: int | None = None, console: Console | None = None
) -> list[RunState]:
    """Run what is not finished, `n_jobs` at a time, each as a `metacal train` of its own with its own log file.

    Interrupted runs go on from their checkpoints. A run that fails does not keep the others from running; one that
    another process trains comes last, when that has ended, and is done if it is finished then. Where there are several
    GPUs, runs that leave the choice open take turns on them.

    Args:
        threads: of each run; None shares out the cores that this process may use.

    Returns:
        the state of every run, in the order of `jobs`.

    Raises:
        InputError: what would keep a run from starting; nothing has run then.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, when all runs have saved and ended. A second signal
            kills them; what their last checkpoints hold stays.
    """
    require(n_jobs >= 1, f"jobs must be >= 1, got {n_jobs}")
    require(threads is None or threads >= 1, f"threads must be >= 1, got {threads}")
    threads = threads or max(1, cores() // n_jobs)
    now = time.time()
    states = [RunState(job) for job in jobs]
    for s in states:
        s.read(now)
        _note_finished(s)
    waiting = [s for s in states if s.state == "waiting"]
    if not waiting:
        Board(states, n_jobs, console).line(f"{len(states)} runs, all finished")
        return states
    check_start([s.job for s in waiting])
    slots = list(range(n_jobs))  # free ones
    gpus = _gpus(os.environ, torch.cuda.device_count())
    running: dict[subprocess.Popen[bytes], tuple[RunState, int]] = {}
    elsewhere: set[RunState] = set()
    with _asked_to_stop() as asked, Board(states, n_jobs, console) as board:
        while running or (waiting and not asked()):
            while slots and not asked() and (chosen := _next(waiting, elsewhere, board)) is not None:
                slot = slots.pop(0)
                running[_start(chosen.job, threads, gpus[slot % len(gpus)] if len(gpus) > 1 else None)] = (chosen, slot)
                chosen.start(time.time())
                board.event(chosen)
            if asked():
                _stop(running, board, asked)
            time.sleep(_POLL)
            for process in [p for p in running if p.poll() is not None]:
                s, slot = running.pop(process)
                slots.append(slot)
                s.read(time.time())
                s.end(_ending(s.job, process.returncode, asked() > 0), process.returncode, time.time())
                if s.state == "waiting":
                    waiting.append(s)
                board.event(s)
            board.refresh()
        if asked():
            board.line("interrupted: what was saved goes on when the same command is given again")
            raise KeyboardInterrupt
    return states


def _note_finished(s: RunState) -> bool:
    """Whether this run is done already, which is noted."""
    if not s.job.folder.finished or s.job.config.overwrite:
        return False
    s.state, s.seconds = "done", float(s.job.folder.read_summary().get("time/train_s", 0.0))
    return True


def _next(waiting: list[RunState], elsewhere: set[RunState], board: Board) -> RunState | None:
    """Take out the first run that no other process trains, past those that one has finished meanwhile.

    elsewhere: the runs of which it was said that another process trains them.
    """
    for s in list(waiting):
        if s.job.folder.in_use:
            if s not in elsewhere:
                board.line(f"{s.job.title}: another process trains it, waiting for its end")
                elsewhere.add(s)
            continue
        waiting.remove(s)
        if not _note_finished(s):
            return s
        board.event(s)
    return None


def _ending(job: Job, status: int, asked: bool) -> str:
    # Another process may have ended the run while this one started: it is refused then, and done all the same.
    if status == 0 or (status == 2 and job.folder.finished and not job.config.overwrite):
        return "done"
    if status == 2 and job.folder.in_use:  # another process was a little faster
        return "waiting"
    return "stopped" if status == 130 or asked else "failed"


def _start(job: Job, threads: int, gpu: str | None) -> subprocess.Popen[bytes]:
    file = [job.config_file] if job.config_file else []
    chosen = job.config.threads  # what the run's own words say counts
    ranks = job.config.launch.ranks or 1
    threads = max(1, threads // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(chosen or threads)}
    if gpu is not None and ranks == 1 and job.config.device in ("auto", "cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    job.folder.path.mkdir(parents=True, exist_ok=True)
    with open(job.folder.log, "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "metacal", "train", *file, *job.words, *([] if chosen else [f"threads={threads}"])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C comes to us alone; we pass it on once
        )


def _stop(running: Mapping[subprocess.Popen[bytes], Any], board: Board, asked: Callable[[], int]) -> None:
    """End all runs: they save after the step that they are at."""
    board.line(f"stopping {len(running)} run(s); they save first")
    for process in running:
        process.terminate()
    while any(process.poll() is None for process in running):
        time.sleep(_POLL)
        if asked() > 1:
            for process in running:
                process.kill()


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], int]]:
    """Within it Ctrl-C, SIGTERM and SIGHUP are counted, and nothing else happens by them."""
    count = 0

    def ask(number: int, frame: Any) -> None:
        nonlocal count
        count += 1

    names = ("SIGINT", "SIGTERM", "SIGHUP")
    previous: dict[int, Any] = {}
    try:
        for number in [getattr(signal, name) for name in names if hasattr(signal, name)]:
            previous[number] = signal.signal(number, ask)
    except ValueError:  # not in the main thread: signals are somebody else's
        previous = {}
    try:
        yield lambda: count
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)


def check_start(jobs: Sequence[Job]) -> None:
    """Make all that each run trains with, as it would itself, so that what it cannot work with is known beforehand.

    Runs that differ by nothing but their seed are looked at once. Everything is made on the CPU: a GPU's memory is
    the runs'.

    Raises:
        InputError: naming the run.
    """
    distinct = {to_json(asdict(replace(job.config, seed=0))): job for job in reversed(jobs)}
    by_data: dict[str, list[Job]] = {}
    for job in reversed(distinct.values()):
        c = job.config
        by_data.setdefault(to_json([asdict(c.data), needs_meta(c)]), []).append(job)
    cpu = torch.device("cpu")
    for group in by_data.values():
        data = None
        for job in group:
            try:
                _check_device(job.config.device)
                data = data or prepare_data(job.config, cpu)
                backbone = build_backbone(job.config, data, cpu)
                train, meta = training_batches(job.config, data)
                build_parts(job.config, backbone, train, meta, evaluation_batches(data.val), pixels=pixels_of(data))
            except InputError as error:
                raise InputError(f"{job.title}: {error}") from None


def _check_device(name: str) -> None:
    """As `choose_device`, without opening a GPU."""
    if not name.startswith("cuda"):
        choose_device(name)
        return
    index = name.partition(":")[2] or "0"
    count = torch.cuda.device_count()
    require(index.isdigit() and int(index) < count, f"device {name!r} cannot be used: there are {count} GPUs")


def cores() -> int:
    """The CPU cores that this process may use: fewer than the machine's inside a cluster's allocation."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each of the `count` GPUs that this process sees."""
    named = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(i) for i in range(count)]


def require_all_done(states: Sequence[RunState]) -> None:
    """Name the runs that failed, with the end of their logs.

    Raises:
        RunError: if there are any.
    """
    failed = [s for s in states if s.state in ("failed", "stopped")]
    for s in failed:
        lines = s.job.folder.log.read_text(errors="replace").strip().splitlines()
        reason = lines[-1].strip() if lines else f"status {s.status}"
        print(f"{s.job.title} {s.state}: {reason}\n  log: {s.job.folder.log}", file=sys.stderr)
    if failed:
        names = ", ".join(s.job.title for s in failed[:3]) + (", …" if len(failed) > 3 else "")
        raise RunError(f"{len(failed)} of {len(states)} runs failed ({names}); the same command tries them again")


def fewest_folders(jobs: Sequence[Job]) -> list[str]:
    """The fewest folders that hold these runs and no others, for `metacal compare`."""
    mine = list(dict.fromkeys(job.folder.path for job in jobs))
    words: list[str] = []
    for root in dict.fromkeys(path.parent.parent for path in mine):
        inside = [path for path in mine if path.parent.parent == root]
        if len(inside) > 1 and _runs_in(root, "*/*") <= set(inside):
            words.append(str(root))
            continue
        for parent in dict.fromkeys(path.parent for path in inside):
            seeds = [path for path in inside if path.parent == parent]
            whole = len(seeds) > 1 and _runs_in(parent, "*") <= set(seeds)
            words += [str(parent)] if whole else [str(path) for path in seeds]
    return words


def _runs_in(folder: Path, pattern: str) -> set[Path]:
    return {file.parent for file in folder.glob(f"{pattern}/config.yaml")}
