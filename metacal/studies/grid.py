"""Grids of runs: of a study's file in `configs/study/`, or of the words of a command in Hydra's grammar.

A study's file holds

    report: trajectory               the module of `metacal.studies` that makes the report
    common: [key=value, ...]         words of every run's command
    groups: {label: {words: [...], sweep: {key: [value, ...]}}}
    variants: {name: {common: [...], groups: {label: {...}}}}     replacements for a shorter or longer version

`metacal.studies.runner` runs what a grid misses.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from metacal.compose import compose, config_dir, explain
from metacal.config import Config
from metacal.errors import InputError, require, require_choice
from metacal.training.folder import RunFolder, folder_of, require_same_config

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
    """A study as it will be run."""

    name: str
    report: str
    jobs: Sequence[Job]
    folder: Path  # where the report goes
    command: str  # that made it


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
    composed = _composer()
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
            jobs.append(_job(composed, label, _last_of_each(command), swept))
    command = " ".join(["metacal study", name, *([f"variant={variant}"] if variant else []), *words])
    return Study(title, spec["report"], jobs, Path(jobs[0].config.runs) / title / "report", command)


def _last_of_each(words: Sequence[str]) -> tuple[str, ...]:
    """The last word of every key: a variant or the command line replaces what the file says."""
    return tuple({word.split("=", 1)[0]: word for word in words}.values())


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
            if key in _PATHS and ("=" in path or (path and Path(path).exists())):
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
    found = []
    for combination in itertools.product(*choices.values()):
        value_of = dict(word.split("=", 1) for word in combination if "=" in word)
        found.append((combination, {key: value_of[key] for key in choices if key in swept}))
    return found


_PATHS = ("data.path", "runs", "run_dir", "resume")


def grid_jobs(words: Sequence[str], config_file: str | None = None, normal: bool = False) -> list[Job]:
    """The runs of `expand(words)`, each composed and checked, with the folder where `metacal train` would put it.

    Raises:
        InputError: unknown keys, values that a run would refuse, keys that only one run can have, two runs with the
            same folder, and folders where a run with another config lies.
    """
    composed = _composer(config_file)
    jobs: list[Job] = []
    folders: dict[Path, Job] = {}
    for command, swept in expand(words, normal):
        job = _job(composed, "", command, swept, config_file)
        require(
            job.config.resume is None and not job.config.baselines and job.config.run_dir is None,
            "resume, baselines and run_dir are for one run; a grid goes on with interrupted runs by itself",
        )
        if same := folders.get(job.folder.path):
            keys = [key for key in swept if swept[key] != same.swept[key]]
            raise InputError(
                f"{' and '.join(keys) or 'a value'} cannot be swept over: {same.title} and {job.title} would share "
                f"the folder {job.folder.path}"
            )
        folders[job.folder.path] = job
        jobs.append(job)
    return jobs


def _composer(config_file: str | None = None) -> Callable[[tuple[str, ...]], Config]:
    """`compose`, which takes a tenth of a second, done once for runs that differ by nothing but the seed."""
    done: dict[tuple[str, ...], Config] = {}

    def composed(words: tuple[str, ...]) -> Config:
        rest = tuple(word for word in words if not word.startswith("seed="))
        seed = re.fullmatch(r"seed=(\d{1,9})", "".join(set(words) - set(rest)))
        if seed is None or rest not in done:
            done[rest] = compose(words, config_file)
            return done[rest]
        return replace(done[rest], seed=int(seed[1]))

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
    folder = folder_of(config, words, config_file)
    if (folder.finished or folder.interrupted) and not config.overwrite:
        require_same_config(config, folder)
    return Job(label, words, swept, folder, config, config_file)


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
