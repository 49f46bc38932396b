"""Grids of runs: of a study's file, or of the words of a command in Hydra's grammar.

`metacal.studies.spec` has the format of the file, `metacal.studies.runner` runs what a grid misses.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from metacal.config import Config
from metacal.config.compose import PATH_KEYS, compose, config_dir, explain
from metacal.config.unread import check_read
from metacal.configs import comment_of
from metacal.errors import InputError, require, require_choice
from metacal.runs.config import require_same_config
from metacal.runs.folder import RunFolder, read_metrics, series_of
from metacal.runs.naming import folder_of
from metacal.studies.spec import read_spec
from metacal.training.sinks import require_sinks

__all__ = ["Job", "Study", "expand", "grid_jobs", "load_series", "load_study", "study_names"]


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a grid.

    Attributes:
        label: of its group in a study; empty in a sweep.
        words: of its command.
        swept: key -> value of what the grid varies.
        config_file: the command's first word where it is a file.
    """

    label: str
    words: tuple[str, ...]
    swept: Mapping[str, Any]
    folder: RunFolder
    config: Config
    config_file: str | None = None

    @property
    def title(self) -> str:
        """What tells it from the others in a few words: ``focal optimizer.lr=0.1 seed=0``."""
        swept = [f"{key}={value}" for key, value in self.swept.items()]
        return " ".join([*([self.label] if self.label else []), *swept]) or self.config.method


@dataclass(frozen=True)
class Study:
    """A study as it will be run, or what its report is made of.

    Attributes:
        report: the module of `metacal.studies` that makes it.
        jobs: for a report only those that are finished.
        folder: where the report goes.
        command: that made it.
        unfinished: the other jobs, which a report names.
        choices: label -> labels of groups, of which each seed takes the run with the least val NLL.
        spec: what its file says, with the variant in place, and `shows`, its first comment; nothing without a file.
    """

    name: str
    report: str
    jobs: Sequence[Job]
    folder: Path
    command: str
    unfinished: Sequence[Job] = ()
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)


def study_names() -> list[str]:
    """The studies of `configs/study/`."""
    return sorted(p.stem for p in (config_dir() / "study").glob("*.yaml"))


def load_study(name: str, variant: str | None = None, words: Sequence[str] = ()) -> Study:
    """The study `name`, in a variant of its file, with `words` added to every run's command.

    name: of `configs/study/`, or the path of another such file (`*.yaml`).

    Raises:
        InputError: for unknown names, files that are no study, words that would replace what tells the groups apart,
            runs that would share a folder, and keys or values that a run would refuse: all runs are composed here.
    """
    if name.endswith((".yaml", ".yml")):
        file = Path(name)
        require(file.is_file(), f"study file {name} does not exist")
    else:
        require_choice("study", name, study_names())
        file = config_dir() / "study" / f"{name}.yaml"
    spec = read_spec(file, variant)
    title = file.stem if variant is None else f"{file.stem}-{variant}"
    jobs = []
    composed = _composer()
    given = {_key_of(word): word for word in words}
    for label, group in spec["groups"].items():
        sweep = group.get("sweep", {})
        for key in given & sweep.keys():
            raise InputError(f"{key}=… cannot be given: the study sweeps over {key} {list(sweep[key])}")
        for word in group.get("words", []):
            other = given.get(_key_of(word), word)
            require(other == word, f"{other} cannot be given: it would replace {word} of the study's group {label!r}")
        for values in itertools.product(*sweep.values()):
            swept = dict(zip(sweep, values))
            command = (
                f"name={title}",
                *spec.get("common", []),
                *group.get("words", []),
                *(f"{key}={'null' if value is None else value}" for key, value in swept.items()),
                *words,
            )
            jobs.append(_job(composed, label, _last_of_each(command), swept))
    _check_grid(jobs)
    made_by = shlex.join(["metacal", "study", name, *([f"variant={variant}"] if variant else []), *words])
    config = jobs[0].config
    folder = Path(config.runs) / config.name / "report"
    return Study(
        title,
        spec["report"],
        jobs,
        folder,
        made_by,
        choices=spec.get("choices", {}),
        spec={**spec, "shows": comment_of(file)},
    )


def _key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _last_of_each(words: Sequence[str]) -> tuple[str, ...]:
    """The last word of every key: a variant or the command line replaces what the file says."""
    return tuple({_key_of(word): word for word in words}.values())


def expand(words: Sequence[str], normal: bool = False) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """Every combination of the values that `words` sweep over: (words of one run, {swept key: value}).

    The grammar is Hydra's: ``key=a,b``, ``key=range(1,4)``, ``key=choice(a,b)``, ``group=glob(re*)``. The last key
    varies fastest. Of a key that comes twice the last word counts.

    normal: fixed words as Hydra's sweeper hands them on (``{a: 1}`` becomes ``{a:1}``), rather than as they stand.

    Raises:
        InputError: a word that is no override, or that sweeps over no or infinitely many values.
    """
    choices: dict[str, list[str]] = {}
    swept: list[str] = []
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        for word in words:
            key = word.partition("=")[0]
            path = word.partition("=")[2]
            swept = [k for k in swept if k != key]
            if key in PATH_KEYS and ("=" in path or (path and Path(path).exists())):
                choices[key] = [word]  # folders of runs have commas and equal signs in their names
                continue
            try:
                (override,) = parser.parse_overrides([word])
                if not override.is_sweep_override():
                    value = override.get_value_element_as_str() if normal and "=" in word else None
                    choices[key] = [word if value is None else f"{override.get_key_element()}={value}"]
                    continue
                require(
                    override.is_discrete_sweep(),
                    f"{word} has no finite list of values; list them, or give a range(first,end,step)",
                )
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            except HydraException as error:
                raise InputError(f"{word}: {explain(error)}") from None
            require(len(choices[key]) > 0, f"{word} gives no values to sweep over")
            swept.append(key)
    runs = []
    for combination in itertools.product(*choices.values()):
        value_of = dict(word.split("=", 1) for word in combination if "=" in word)
        runs.append((combination, {key: value_of[key] for key in choices if key in swept}))
    return runs


def grid_jobs(words: Sequence[str], config_file: str | None = None, normal: bool = False) -> list[Job]:
    """The runs of `expand(words)`, each composed and checked, with the folder where `metacal train` would put it.

    Raises:
        InputError: unknown keys, values that a run would refuse, keys that only one run can have, two runs with the
            same folder, and folders where a run with another config lies.
    """
    composed = _composer(config_file)
    jobs = [_job(composed, "", command, swept, config_file) for command, swept in expand(words, normal)]
    _check_grid(jobs)
    return jobs


def _check_grid(jobs: Sequence[Job]) -> None:
    """Every run of a grid has a folder of its own, no key that only a single command can have, and each key a reader.

    A word that all runs share need not be read by all.
    """
    check_read([(job.config, job.words) for job in jobs])
    folders: dict[Path, Job] = {}
    for job in jobs:
        require(
            job.config.resume is None and not job.config.baselines and job.config.run_dir is None,
            "resume, baselines and run_dir are for one run; a grid goes on with interrupted runs by itself",
        )
        same = folders.setdefault(job.folder.path, job)
        if same is job:
            continue
        shared = f"{same.title} and {job.title} would share the folder {job.folder.path}"
        if same.label != job.label:
            raise InputError(f"two groups need other words, of keys that enter a run's name: {shared}")
        keys = [key for key in job.swept if job.swept[key] != same.swept[key]]
        raise InputError(f"{' and '.join(keys) or 'a value'} cannot be swept over: {shared}")


def _composer(config_file: str | None = None) -> Callable[[tuple[str, ...]], Config]:
    """`compose`, which takes a tenth of a second, done once for runs that differ by nothing but the seed."""
    done: dict[tuple[str, ...], Config] = {}

    def composed(words: tuple[str, ...]) -> Config:
        others = tuple(word for word in words if not word.startswith("seed="))
        seed = re.fullmatch(r"seed=(\d{1,9})", "".join(set(words) - set(others)))
        if seed is None or others not in done:
            done[others] = compose(words, config_file)
            return done[others]
        return replace(done[others], seed=int(seed[1]))

    return composed


def _job(
    composed: Callable[[tuple[str, ...]], Config],
    label: str,
    words: tuple[str, ...],
    swept: Mapping[str, Any],
    config_file: str | None = None,
) -> Job:
    """The run of a command; one that its folder already holds must be of the same config."""
    config = composed(words)
    require_sinks(config.log)
    folder = folder_of(config, words, config_file)
    if folder.taken and not config.overwrite:
        require_same_config(config, folder)
    return Job(label, words, swept, folder, config, config_file)


def load_series(folder: RunFolder) -> Mapping[str, Mapping[int, float]]:
    """What a run logged, ``split/measure`` → step → value.

    Raises:
        InputError: when that is nothing.
    """
    series = series_of(read_metrics(folder.metrics)[0])
    require(len(series) > 0, f"{folder.path} has no metrics")
    return series
