"""`metacal train`: words of the command line → one run, a run with baselines, or a sweep."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from metacal.commands.words import take_config_file
from metacal.errors import InputError, RunError, require
from metacal.launch import Place, joined, met, place, start

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from metacal.config import Config
    from metacal.runs.folder import RunFolder
    from metacal.studies.grid import Job

__all__ = ["train_command"]


def train_command(argv: Sequence[str]) -> int:
    """Run `metacal train ARGV`; returns the exit status."""
    words = list(argv)
    if any(word in ("-h", "--help") for word in words):
        from metacal.config.help import train_help

        print(train_help(), end="")
        return 0
    config_file = take_config_file(words)
    _check_launcher(words)
    at = place(os.environ)
    if any(word.startswith("-") for word in words):
        require(at is None, f"{' '.join(words)} is for one process, and this is one of {at and at.size} ranks")
        return _with_hydra(words, config_file)
    with met(at) as store:
        return _train(argv, words, config_file, at, store)


def _train(argv: Sequence[str], words: list[str], config_file: str | None, at: Place | None, store: Any) -> int:
    """What the words ask for, in this process or in several."""
    quiet = any(word.startswith("progress=") and word != "progress=true" for word in words)
    if not quiet and sys.modules.get("torch") is None:
        # The configuration is made of the parts' options, and the parts import PyTorch, which takes seconds.
        what = shlex.join(argv) or "the default method on the bundled digits"
        print(f"metacal train: loading PyTorch for {what}", flush=True)

    from metacal.config.compose import compose
    from metacal.config.unread import check_read

    config = compose(words, config_file)
    for method in config.baselines:  # a typo in the last baseline must not surface after the first run
        compose(_with_method(words, method), config_file)
    if config.resume is None:
        check_read([(config, words)])
    if at is None and (config.launch.ranks or 1) > 1:
        return start(config.launch.ranks, ["train", *argv], config.launch, config.device)
    with joined(at, store, config.launch, config.device):
        _require_same_words(config)
        return _runs(config, words, config_file)


def _require_same_words(config: Config) -> None:
    """All ranks were started with the same words and the same versions of the packages.

    Raises:
        InputError: on every rank.
    """
    from metacal import ranks
    from metacal.config.resolve import flat
    from metacal.runs.versions import versions

    if ranks.size() == 1:
        return
    keys = {**flat(asdict(config)), **{f"the version of {name}": value for name, value in versions().items()}}
    for rank, theirs in enumerate(ranks.gather_objects(keys)):
        for key in keys | theirs:
            require(
                theirs.get(key) == keys.get(key),
                f"all ranks must be started alike: {key} is {keys.get(key)!r} on rank {ranks.rank()} and "
                f"{theirs.get(key)!r} on rank {rank}",
            )


def _runs(config: Config, words: list[str], config_file: str | None) -> int:
    """The run that the words ask for: one that goes on, a new one, or one beside its baselines."""
    if config.resume is not None:
        if config.progress:
            print(f"metacal train: going on with {config.resume}", flush=True)
        return _resume(config, words)
    if not config.baselines:
        return _run(config, words, config_file)
    return _run_beside_baselines(config, words, config_file)


def _run(config: Config, words: Sequence[str], config_file: str | None) -> int:
    """One run: a finished one is refused, an interrupted one goes on."""
    from metacal.runs.naming import folder_of
    from metacal.training.run import run

    return run(config, folder_of(config, words, config_file), words, config_file).show()


def _resume(config: Config, words: Sequence[str]) -> int:
    """`resume=RUN`: go on under the run's own config.

    Other words may repeat what the run was started with, or say where it runs now (device, threads, progress).
    """
    from metacal.runs.checkpoint import load
    from metacal.runs.config import recorded_config
    from metacal.runs.folder import check_run
    from metacal.runs.naming import says_where
    from metacal.training.run import run

    folder = check_run(config.resume or "")
    require(not folder.finished, f"{folder.path} is finished: there is nothing to resume")
    require(folder.last.is_file(), f"{folder.path} has no checkpoint yet: run its command again instead")
    require(not config.overwrite, "resume=RUN goes on and overwrite=true starts over: give one of them")
    started_with = recorded_config(folder, load(folder.last))
    for key in (word.lstrip("+~").split("=", 1)[0] for word in words):
        if says_where(key):
            goes_on, words_say = (started_with.launch, config.launch) if "." in key else (started_with, config)
            name = key.rpartition(".")[2]
            setattr(goes_on, name, getattr(words_say, name))
            continue
        was, given = _value(started_with, key), _value(config, key)
        require(
            was == given,
            f"{key}={given} differs from {was} in {folder.path}: a resumed run keeps its config; leave the key "
            "out, or start a new run",
        )
    started_with.run_dir, started_with.resume = str(folder.path), None
    return run(started_with, folder, words).show()


def _value(config: Config, key: str) -> Any:
    """The value of a dotted key; for a group, the name of the choice."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return getattr(value, "name", getattr(value, "objective", value))


def _with_method(words: Sequence[str], method: str) -> list[str]:
    others = [w for w in words if w.split("=", 1)[0] not in ("method", "baselines", "run_dir")]
    return [*others, f"method={method}"]


def _run_beside_baselines(config: Config, words: list[str], config_file: str | None) -> int:
    """The run, then each method of `config.baselines` with the same other keys; ends with one table of all.

    Finished runs are reused, so the command can be given again.
    """
    from metacal.config.compose import compose
    from metacal.runs.naming import folder_of
    from metacal.training.run import run, show_together

    own_words = [w for w in words if not w.startswith("baselines=")]
    jobs = [(config, own_words)]
    require(
        config.run_dir is None, f"run_dir is one run's folder, and baselines make several, got run_dir={config.run_dir}"
    )
    for method in config.baselines:
        jobs.append((compose(_with_method(words, method), config_file), _with_method(words, method)))
    outcomes = []
    for job, job_words in jobs:
        outcome = run(job, folder_of(job, job_words, config_file), job_words, config_file, reuse=True)
        if outcome.status:
            return outcome.show()
        if outcome.reused:
            print(f"{job.method}: already finished in {outcome.folder.path}, reused (overwrite=true starts over)")
        outcomes.append(outcome)
    return show_together(outcomes)


_SHOW = {"--cfg", "-c"}  # Hydra's flag that shows a config and runs nothing
# Hydra's flags, but for those that take configs, or pickles of them, from elsewhere.
_FLAGS = ("-m", "--multirun", "-h", "--help", "--hydra-help", "-c", "--cfg", "--resolve", "-p", "--package", "-i",
          "--info", "-r", "--run", "-sc", "--shell-completion", "--version")  # fmt: skip
_WITH_VALUE = (*_SHOW, "-p", "--package", "-i", "--info")  # the next word is the flag's

# Hydra's launchers beside its own, and the packages that bring them.
_LAUNCHERS = {
    "submitit_slurm": ("submitit", "slurm"),
    "submitit_local": ("submitit", "slurm"),
    "joblib": ("joblib", "joblib"),
    "ray": ("ray", "ray"),
}


def _check_launcher(words: Sequence[str]) -> None:
    """A launcher's words belong to a grid, and its plugin must be installed."""
    launching = [word for word in words if word.lstrip("+~").startswith(("hydra/launcher=", "hydra.launcher."))]
    flags = {word for word in words if word.startswith("-")}
    require(
        not launching or bool(flags),
        f"{' '.join(launching)} says where the runs of a grid go: give it with -m (or --cfg hydra to look at it)",
    )
    for word in launching:
        plugin, extra = _LAUNCHERS.get(word.partition("hydra/launcher=")[2], ("", ""))
        if plugin and find_spec(f"hydra_plugins.hydra_{plugin}_launcher") is None:
            raise InputError(
                f"{word} needs the package hydra-{plugin}-launcher, which is not installed: "
                f"pip install hydra-{plugin}-launcher, or metacal with its extra [{extra}]"
            )
        require(
            not word.endswith("=submitit_slurm") or bool(_SHOW & flags) or bool(shutil.which("sbatch")),
            f"{word} needs SLURM's sbatch on this machine; hydra/launcher=submitit_local runs the same jobs here",
        )


class _Task:
    """What Hydra runs with each config: here, or wherever a launcher has sent it.

    It is pickled by its class's name. Nothing that it learns comes back: which run is done, only the folders say.
    """

    def __init__(self, config_file: str | None, in_grid: bool) -> None:
        self.config_file, self.in_grid = config_file, in_grid
        self.status = 0
        self.requeued = False  # by submitit, which pickles this object again for the next attempt

    def __call__(self, node: DictConfig) -> int:
        from hydra.core.hydra_config import HydraConfig

        try:
            self.status = self._run(node, list(HydraConfig.get().overrides.task))
        except (InputError, RunError) as error:
            if not self.in_grid:
                raise
            print(f"metacal: {error}", file=sys.stderr, flush=True)  # the other runs of the grid go on
            self.status = 1
        return self.status

    def _run(self, node: DictConfig, overrides: list[str]) -> int:
        from metacal.config.compose import from_dictionary
        from metacal.runs.naming import folder_of

        config = from_dictionary(node, overrides)
        folder = folder_of(config, overrides, self.config_file)
        if not folder.finished and (self.requeued or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"):
            config.overwrite = False  # the first attempt has started over; this one goes on
        with self._saving_before_requeue() as requeue:
            status = self._train(config, folder, overrides)
            if status == 130:
                requeue()  # does not come back if that is why the run stopped
                raise KeyboardInterrupt  # Ctrl-C is meant for the whole grid
        return status

    def _train(self, config: Config, folder: RunFolder, overrides: list[str]) -> int:
        """One run in this process, in several that are started here, or as one of several tasks of a job."""
        from metacal.training.run import run

        at = place(os.environ)
        if at is None and (config.launch.ranks or 1) > 1:
            if folder.finished and not config.overwrite:
                print(f"{folder.path}: already finished, skipped")
                return 0
            words = [word for word in overrides if not word.startswith("overwrite=")]
            words += [f"overwrite={str(config.overwrite).lower()}"]
            words = ["train", *([self.config_file] if self.config_file else []), *words]
            return start(config.launch.ranks, words, config.launch, config.device)
        with met(at) as store, joined(at, store, config.launch, config.device):
            outcome = run(config, folder, overrides, self.config_file, reuse=True)
            if outcome.reused:
                print(f"{folder.path}: already finished, skipped")
                return 0
            return outcome.show()

    @contextmanager
    def _saving_before_requeue(self) -> Iterator[Callable[[], None]]:
        """Inside a job of submitit, let its signal (USR2: preemption, or the end of the job's time) first end the run.

        submitit's own handler puts the job back into the queue and ends the process at once, in the middle of a step.
        Here the signal asks the training to stop and save, as SIGTERM does; the function that the block gets then
        calls submitit's handler. Where nothing trains yet, or no longer, that is called right away.
        """
        number = getattr(signal, "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2"), None)
        theirs = signal.getsignal(number) if number is not None and "SUBMITIT_EXECUTOR" in os.environ else None
        if number is None or not callable(theirs) or threading.current_thread() is not threading.main_thread():
            yield lambda: None
            return
        outside, me = signal.getsignal(signal.SIGTERM), os.getpid()
        asked: list[int] = []

        def hand_on(which: int, frame: Any) -> None:
            self.requeued = True
            theirs(which, frame)

        def ask(which: int, frame: Any) -> None:
            if os.getpid() != me:  # a data loader's worker, which the signal reaches too
                return
            if signal.getsignal(signal.SIGTERM) == outside:
                hand_on(which, frame)
            else:
                asked.append(which)
                signal.raise_signal(signal.SIGTERM)

        signal.signal(number, ask)
        try:
            yield lambda: hand_on(asked[0], None) if asked else None
        finally:
            signal.signal(number, theirs)


def _with_hydra(words: list[str], config_file: str | None) -> int:
    """Grids (-m), --cfg and Hydra's other flags."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from metacal.config.compose import (
        check_config_file,
        compose,
        config_dir,
        explain,
        open_sums,
        register_schema,
        to_yaml,
    )
    from metacal.config.unread import check_read
    from metacal.config.words import check_flags, check_words

    check_flags(words, _FLAGS)
    taken = {words[i + 1] for i, word in enumerate(words[:-1]) if word in _WITH_VALUE}
    check_words([w for w in words if w not in taken and not w.startswith("-")])
    register_schema(words)
    path = check_config_file(config_file) if config_file else config_dir() / "train.yaml"
    jobs: list[Job] = []
    # A bad value surfaces here, before the first run.
    run_words = [w for w in words if "=" in w and not w.lstrip("+~").startswith(("-", "hydra/", "hydra."))]
    if any(word in ("-m", "--multirun") for word in words):
        from metacal.studies.grid import grid_jobs

        require(not _SHOW.intersection(words), "-m runs a grid and --cfg shows a config: give one of them")
        jobs = grid_jobs(run_words, config_file, normal=True)
    elif _SHOW.intersection(words) and "job" in taken:
        print(to_yaml(compose(run_words, config_file)), end="")
        return 0
    else:
        check_read([(compose(run_words, config_file), run_words)])
    task = _Task(str(path) if config_file else None, in_grid=bool(jobs))

    # Hydra's parser wants the overrides in one piece, wherever its flags stand.
    words.sort(key=lambda word: word.startswith("-") or "=" not in word)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us whole; we print one line of them
    argv, sys.argv = sys.argv, ["metacal train", *open_sums(words)]
    try:
        hydra.main(version_base="1.3", config_path=str(path.parent), config_name=path.stem)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error, words)) from None
    except SystemExit as stop:  # --help and its like
        return int(stop.code or 0)
    except RuntimeError as error:
        if not type(error).__module__.startswith("submitit"):
            raise
        print(f"metacal: {str(error).strip().splitlines()[-1]}", file=sys.stderr)  # a job that died
    finally:
        sys.argv = argv
    return _grid_status(jobs) if jobs else task.status


def _grid_status(jobs: Sequence[Job]) -> int:
    """What the folders say when the launcher has come back.

    Raises:
        RunError: naming the runs that are not finished.
    """
    missing = [job for job in jobs if not job.folder.finished]
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} finished")
    if len(jobs) - len(missing) > 1:
        from metacal.studies.runner import fewest_folders

        words = fewest_folders([job for job in jobs if job.folder.finished])
        print("compare them: " + shlex.join(["metacal", "compare", *words]))
    if missing:
        names = ", ".join(job.title for job in missing[:5]) + (", …" if len(missing) > 5 else "")
        raise RunError(f"{len(missing)} of {len(jobs)} runs are not finished ({names}); the same command goes on")
    return 0
