"""Several processes for one run: started here, or by torchrun or srun; what goes wrong in one of them is told once.

    metacal train launch.ranks=2 …                                   starts two processes here and waits for them
    torchrun --nproc-per-node=2 -m metacal train …                   torchrun starts them, on one node or on several
    srun --ntasks=2 metacal train …                                  so does SLURM

Each process gets the same words and knows its rank from the environment (`place`). The ranks meet at a store
(`met`), and work as the one process group of torch.distributed that `metacal.ranks` speaks through (`joined`).
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from metacal.errors import RunError, require
from metacal.options import option

__all__ = ["LaunchOptions", "Place", "joined", "met", "on_signals", "orphaned", "place", "start"]

_LAUNCHER = "METACAL_LAUNCHER"  # the process that has started a rank and tells when one was killed
_ENDED = 3  # the exit status of a rank that ends because another one did
_MEET = 600.0  # seconds in which all ranks must have come
_HEED = 1.0  # seconds in which a rank that failed says so, before those that miss it end
_GRACE = 5.0  # seconds in which the other ranks end by themselves when one has failed


@dataclass
class LaunchOptions:
    """How several processes train one run."""

    ranks: int | None = option(
        None, "processes that train one run together, started here; null: one, or those of torchrun or srun", low=1
    )
    backend: str = option(
        "auto",
        "what they talk by: nccl, with a GPU for each, or gloo; auto: by the device",
        choices=("auto", "nccl", "gloo"),
    )
    batchnorm: str = option(
        "all",
        "batch normalisation by the samples of all ranks, as one process does; own: by those of each rank",
        choices=("all", "own"),
    )
    timeout: float = option(1800.0, "seconds that a rank waits for the others before the run stops", above=0)


class Place(NamedTuple):
    """Which rank this process is, of how many, and which of those on this machine."""

    rank: int
    size: int
    local: int


# -- who is who --------------------------------------------------------------------------------------------------------


def place(environment: Mapping[str, str]) -> Place | None:
    """This process's place by the variables of torchrun, or else of srun; None where it is the only one.

    Raises:
        InputError: for variables that make no sense together.
    """
    env = {**_of_slurm(environment), **environment}
    if not env.get("RANK") or env.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        at = Place(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", env["RANK"])))
    except ValueError:
        at = Place(-1, 0, 0)
    require(
        0 <= at.rank < at.size,
        f"the environment must say RANK in 0..WORLD_SIZE-1, got RANK={env['RANK']} and WORLD_SIZE={env['WORLD_SIZE']}",
    )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        require(name in env, f"the environment must say {name}, where rank 0 of {at.size} is met; torchrun sets it")
    return at


def _of_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, for a task of a step that srun has started; nothing anywhere else.

    The script that sbatch runs is no step: it has a number of tasks, but is alone.
    """
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return {}
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    number = int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))  # jobs of one node have ports apart
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": _first_host(nodes),
        "MASTER_PORT": str(20000 + number % 10000),
    }


def _first_host(nodes: str) -> str:
    """Of SLURM's list of nodes, such as ``gpu[03-05,09],login1``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    require(match is not None, f"SLURM_STEP_NODELIST must name nodes, got {nodes!r}")
    assert match is not None
    return "".join(part or "" for part in match.groups())


def orphaned() -> bool:
    """Whether this is a rank whose launcher has died."""
    return _LAUNCHER in os.environ and os.getppid() != int(os.environ[_LAUNCHER])


# -- one rank among others ---------------------------------------------------------------------------------------------


@contextmanager
def met(at: Place | None) -> Iterator[Any]:
    """The store where all ranks meet, for the block; None for a process that is alone.

    All ranks but the first are silent. An exception that leaves the block is told by the rank that has it first; the
    others, which have it too or wait for that one in vain, end without a word.

    Raises:
        RunError: the other ranks have not come.
    """
    if at is None:
        yield None
        return
    if at.rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    store = _store(at)
    try:
        yield store
    except Exception as error:
        gone = _misses_another(error)
        if gone:
            time.sleep(_HEED)
        if at.rank == 0:
            atexit.register(time.sleep, 2 * _HEED)  # it may hold the store, which the others still ask
        if not _is_first_to_speak(at, store) or (gone and _LAUNCHER in os.environ):
            raise SystemExit(_ENDED) from None
        sys.stderr = sys.__stderr__
        if gone:
            reason = str(error).splitlines()[0]
            raise RunError(
                f"another rank has ended or does not answer, as rank {at.rank} of {at.size} sees ({reason}); the same "
                "command goes on from the last checkpoint"
            ) from None
        raise


def _store(at: Place) -> Any:
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    os.environ.update({**_of_slurm(os.environ), **os.environ})
    try:
        return next(rendezvous("env://", at.rank, at.size, timeout=timedelta(seconds=_MEET)))[0]
    except (DistError, RuntimeError, ValueError) as error:
        sys.stderr = sys.__stderr__
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise RunError(f"rank {at.rank} has not met the others of {at.size} ranks at {where}: {reason}") from None


def _misses_another(error: BaseException) -> bool:
    """Whether a message between ranks has failed: what gloo raises has no class of its own."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def _is_first_to_speak(at: Place, store: Any) -> bool:
    from torch.distributed import DistError

    try:
        return store.add("told", 1) == 1
    except (DistError, RuntimeError):  # rank 0 held it and was killed
        return at.rank == 1


@contextmanager
def joined(at: Place | None, store: Any, options: Any, device: str) -> Iterator[None]:
    """The process group of all ranks, for the block; nothing for a process that is alone.

    With GPUs each rank computes on that of its number on its machine, and what lies on the CPU goes by gloo.

    Args:
        options: `config.launch`. device: `config.device`.

    Raises:
        InputError: for another number of ranks than was asked for, and for GPUs that are not there.
    """
    if at is None:
        yield
        return
    import torch
    import torch.distributed as dist

    require(
        options.ranks in (None, at.size),
        f"launch.ranks={options.ranks} starts ranks, and this is one of {at.size} that torchrun or srun has started: "
        "leave the key out",
    )
    backend = backend_of(options.backend, device)
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(at.local % torch.cuda.device_count())  # SLURM may show each task its own alone
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=dist.PrefixStore("ranks", store),
        rank=at.rank,
        world_size=at.size,
        timeout=timedelta(seconds=options.timeout),
    )
    if backend == "nccl":
        _require_own_gpu(platform.node(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    yield
    dist.destroy_process_group()  # not after an error: others may wait in it for ever


def _require_own_gpu(node: str, gpu: str) -> None:
    """Raise `InputError`, on every rank, where two of them have one GPU: NCCL would fail by its own words."""
    from metacal import ranks

    holders: dict[tuple[str, str], int] = {}
    for rank, which in enumerate(ranks.gather_objects((node, gpu))):
        other = holders.setdefault(which, rank)
        require(
            other == rank,
            f"launch.backend=nccl needs a GPU for each rank, and ranks {other} and {rank} have the same one on {node}: "
            "start fewer, or give launch.backend=gloo",
        )


def backend_of(backend: str, device: str, here: int = 1) -> str:
    """What the ranks talk by, of which at least `here` are on this machine.

    Raises:
        InputError: for a device that they cannot share.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0
    if backend == "auto":
        backend = "nccl" if gpus else "gloo"
    require(
        device in ("auto", "cpu", "cuda"),
        f"device must be auto, cpu or cuda with several ranks, each of which takes the GPU of its number, got {device}",
    )
    require(
        backend == "gloo" or gpus >= here,
        f"launch.backend=nccl needs a GPU for each rank of a machine, got {here} ranks and {gpus} GPUs"
        + ("" if device != "cpu" else " with device=cpu"),
    )
    return backend


# -- starting ranks ----------------------------------------------------------------------------------------------------


def start(count: int, words: Sequence[str], options: Any, device: str) -> int:
    """`metacal WORDS` in `count` processes on this machine, as ranks of one run; returns the exit status of the run.

    SIGINT and SIGTERM are passed on to all of them. When one fails the others have `_GRACE` seconds to end.

    Raises:
        InputError: for GPUs that are not there.
        RunError: a rank was killed.
    """
    from torch.distributed import TCPStore

    backend_of(options.backend, device, count)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # a laptop's name may lead nowhere
        **os.environ,
        # what torchrun sets, for ranks that are told that the store is not theirs to make
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        _LAUNCHER: str(os.getpid()),
    }
    command = [sys.executable, "-m", "metacal", *words]
    processes: list[subprocess.Popen] = []
    with _passed_on(processes):
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # sessions of their own: Ctrl-C in the terminal reaches each of them once, from here
            processes.append(subprocess.Popen(command, env=env | own, stdin=subprocess.DEVNULL, start_new_session=True))
        try:
            failed, status = _awaited(processes)
        finally:
            for process in processes:
                process.kill()
    if status < 0:
        raise RunError(
            f"rank {failed} of {count} was killed ({signal.Signals(-status).name}); the same command goes on from the "
            "last checkpoint"
        )
    return 1 if status == _ENDED else status


def _awaited(processes: Sequence[subprocess.Popen]) -> tuple[int, int]:
    """The first rank that did not end well, with its status; (0, the status of rank 0) where all did.

    130 is no failure of one: all ranks stop together, and the first still writes.
    """
    failed: tuple[int, int] | None = None
    until = 0.0
    while True:
        statuses = [process.poll() for process in processes]
        bad = [(rank, status) for rank, status in enumerate(statuses) if status not in (None, 0, 130)]
        if failed is None and bad:
            # one that ended because of another may be seen first
            failed, until = min(bad, key=lambda one: (one[1] == _ENDED, one[1])), time.monotonic() + _GRACE
        if statuses[0] is not None and None not in statuses:
            return failed or (0, statuses[0])
        if failed is not None and time.monotonic() > until:
            for process in processes:
                process.kill()
        time.sleep(0.05)


@contextmanager
def _passed_on(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Within it SIGINT and SIGTERM are for these processes."""

    def pass_on(number: int, previous: Mapping[int, Any]) -> None:
        for process in processes:
            process.send_signal(number)

    with on_signals(pass_on):
        yield


@contextmanager
def on_signals(handle: Callable[[int, Mapping[int, Any]], None]) -> Iterator[None]:
    """Within it SIGINT and SIGTERM call `handle` with their number and the handlers that there were, by number."""
    previous: dict[int, Any] = {}
    with suppress(ValueError):  # not in the main thread: signals are somebody else's
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, lambda number, frame: handle(number, previous))
    try:
        yield
    finally:
        for handled, handler in previous.items():
            signal.signal(handled, handler)
