"""Run folders read back: found, checked, and grouped into those that differ by nothing but the seed.

    runs, left_out = load_runs(find_runs(["runs/digits", "runs/cifar/focal*/seed*"]))
    for group in group_runs(runs):
        group.method, group.seeds, group.differs          # {"gamma.value": 3.0} where other groups have another value

Only what a run writes into its folder is read: config.yaml, summary.json, metrics.jsonl and predictions/.
"""

from __future__ import annotations

import glob
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from metacal.config.files import read_yaml
from metacal.config.resolve import complete, flat
from metacal.errors import InputError, require
from metacal.predictions import Predictions
from metacal.runs.config import translated
from metacal.runs.folder import RunFolder, read_metrics, series_of
from metacal.runs.settings import is_bookkeeping, short_names, show_value, telling

__all__ = ["Group", "LeftOut", "Run", "find_runs", "group_runs", "load_runs", "require_same_samples"]

_SPLITS = ("train", "meta", "val")  # that summary.json has fingerprints of, beside test's


class LeftOut(NamedTuple):
    """A run that is not compared, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run, or a file of predictions beside such.

    Attributes:
        path: its folder, or the file.
        config: dotted key -> value of all that can change its result, the seed left out; keys that its config.yaml
            lacks have the default.
        summary: its summary.json.
        watching: dotted key -> value of the rest: device, threads, monitors, folders.
        epoch: whose predictions and temperature are taken: the "selected" or the "last" one.
        val_file: the validation predictions of a file, None where it has none; of a run they are in its folder.
    """

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    watching: Mapping[str, Any] = field(default_factory=dict)
    epoch: str = "selected"
    val_file: Path | None = None

    @property
    def is_file(self) -> bool:
        """Whether it is a file of predictions, of whose making nothing is known."""
        return not self.config.keys() - {"method"}

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @property
    def method(self) -> str:
        return str(self.summary["method"])

    @property
    def fingerprint(self) -> str | None:
        """Of the content of its test split; None of a file."""
        return None if self.is_file else str(self.summary["data"]["fingerprint"])

    @property
    def fingerprints(self) -> Mapping[str, str | None]:
        """Of the content of its splits train, meta and val; empty where the run is older than they are."""
        fingerprints = self.summary["data"].get("fingerprints")
        return fingerprints if isinstance(fingerprints, dict) else {}

    def predictions(self, split: str) -> Predictions:
        """The predictions that it saved, of `split` test or val.

        Raises:
            InputError: when there are none, the file is damaged, or does not give the numbers of the summary.
        """
        if self.is_file:
            path = self.path if split == "test" else self.val_file
            require(path is not None, f"a file of predictions has val ones only if they are given: {self.path}:VAL.npz")
            assert path is not None
            return Predictions.load(path)
        file = self.folder.predictions(split, self.epoch)
        p = Predictions.load(file)
        if split == "test":
            was, accuracy = self._measured("accuracy"), int(p.correct.sum()) / len(p)
            require(
                was is None or abs(was - accuracy) < 1e-9,
                f"predictions/{file.name} has an accuracy of {accuracy:.6f} and summary.json of {was}: one was "
                "replaced",
            )
        return p

    @property
    def temperature(self) -> float:
        """The temperature that the run fitted on val; NaN if its summary has none."""
        value = self._measured("temperature")
        return math.nan if value is None else float(value)

    def _measured(self, name: str) -> float | None:
        """What the summary has of the test split at the epoch."""
        return self.summary.get(f"{'last' if self.epoch == 'last' else 'test'}/{name}")

    @property
    def minutes(self) -> float | None:
        """Of training, without the measurement at its end."""
        seconds = self.summary.get("time/train_s")
        return None if seconds is None else seconds / 60

    @property
    def step_ms(self) -> float | None:
        """The median of the step times in its log, which a busy minute does not move; else training time over steps."""
        if logged := self.series.get("time/step_ms"):
            return statistics.median(logged.values())
        seconds, steps = self.summary.get("time/train_s"), self.summary.get("steps")
        return 1e3 * seconds / steps if seconds and steps else None

    @property
    def versions(self) -> str:
        """What it was made by, in one line."""
        return ", ".join(f"{name} {version}" for name, version in (self.summary.get("versions") or {}).items())

    @cached_property
    def series(self) -> dict[str, dict[int, float]]:
        """metrics.jsonl as ``split/measure`` -> step -> value; lines that cannot be read are skipped."""
        return series_of(self._metrics[0])

    @property
    def unread(self) -> Sequence[int]:
        """The numbers of the lines of metrics.jsonl that cannot be read."""
        return self._metrics[1]

    @cached_property
    def changed(self) -> bool:
        """Whether metrics.jsonl is not what the run wrote, and no line of it says where: none counts then."""
        return not self.is_file and not self._logged[1] and self.folder.metrics_changed(self.summary)

    @property
    def _metrics(self) -> tuple[list[dict[str, Any]], list[int]]:
        return ([], []) if self.changed else self._logged

    @cached_property
    def _logged(self) -> tuple[list[dict[str, Any]], list[int]]:
        return ([], []) if self.is_file else read_metrics(self.folder.metrics)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ by their seed only, in the order of the seeds.

    Attributes:
        runs: at least one.
        differs: dotted key -> value, of the keys that tell the groups apart beyond what names tell.
        short: a name for legends and notes, distinct among the groups; the label if none is given.
    """

    runs: Sequence[Run]
    differs: Mapping[str, Any] = field(default_factory=dict)
    short: str = ""

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def label(self) -> str:
        """The method, with the values that tell it from its siblings: `focal, gamma.value=5.0`."""
        return ", ".join([self.method, *(f"{key}={show_value(value)}" for key, value in self.differs.items())])


def find_runs(words: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run folders that `words` name: each a run, a folder that holds runs at any depth, or a glob of such; and
    files of predictions, TEST.npz or TEST.npz:VAL.npz, as they stand.

    Sorted within each word, every folder once.

    Raises:
        InputError: a word that names nothing, or no run.
    """
    by_place: dict[Path, Path] = {}
    for word in words:
        here = Path(word)
        test, val = _of_file(here)
        if val is not None or (here.suffix == ".npz" and here.is_file()):
            for file in (test, val or test):
                require(file.is_file(), f"{word}: {file} does not exist or is no file")
            by_place.setdefault(here.resolve(), here)
            continue
        # Names of runs may hold brackets: what exists is meant as it stands.
        matches = [here] if here.exists() else _glob(str(word))
        require(len(matches) > 0, f"{word} does not exist and matches nothing")
        runs = [run for match in matches if match.is_dir() for run in _runs_in(match)]
        runs += [match for match in matches if match.suffix == ".npz" and match.is_file()]
        require(len(runs) > 0, f"{word} is no run folder and holds none: a run folder has a config.yaml")
        for run in runs:
            by_place.setdefault(run.resolve(), run)
    return list(by_place.values())


def _glob(word: str) -> list[Path]:
    """What a pattern matches: as it stands, or else with its brackets taken literally."""
    matches = glob.glob(word, recursive=True) or glob.glob(word.replace("[", "[[]"), recursive=True)
    return [Path(m) for m in sorted(matches)]


def _runs_in(folder: Path) -> list[Path]:
    if _is_run(folder):
        return [folder]
    runs = []
    for root, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in list(folders):
            if _is_run(Path(root, name)):
                runs.append(Path(root, name))
                folders.remove(name)
    return runs


def _is_run(path: Path) -> bool:
    """A run's folder has its config; one that a study started and that failed before that has its log alone."""
    folder = RunFolder(path)
    return folder.config.is_file() or (folder.log.is_file() and path.name.startswith("seed"))


def load_runs(paths: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """The finished runs among `paths`, and the others with the reason."""
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for path in paths:
        try:
            runs.append(_load_run(path))
        except InputError as error:
            left_out.append(LeftOut(path, str(error)))
    known: dict[tuple[str, int, str | None], list[Run]] = {}
    for run in list(runs):
        same = known.setdefault((_identity(run), run.seed, run.fingerprint), [])
        twin = next((other for other in same if not _other_data(run, other)), None)
        if twin is not None:
            left_out.append(LeftOut(run.path, f"has the configuration and the seed of {twin.path}"))
            runs.remove(run)
        same.append(run)
    return runs, left_out


def _load_run(path: Path) -> Run:
    """Raises InputError with what is wrong, without the path."""
    file, val = _of_file(path)
    if file.is_file():
        method = file.with_suffix("").as_posix()
        return Run(file, {"method": method}, {"method": method, "seed": 0, "data": {}}, val_file=val)
    folder = RunFolder(path)
    require(folder.config.is_file(), f"stopped before training began; its {folder.log.name} says why")
    try:
        config = translated(read_yaml(folder.config))
    except InputError:
        raise InputError(f"its {folder.config.name} cannot be read") from None
    require("method" in config, f"its {folder.config.name} is not that of a run")
    if not folder.summary.is_file():
        raise InputError(_how_far(folder, config))
    try:
        summary = folder.read_summary()
    except InputError:
        raise InputError(f"its {folder.summary.name} is damaged or not that of a run") from None
    settings = flat(complete(config))
    return Run(
        path,
        {key: value for key, value in settings.items() if not is_bookkeeping(key)},
        summary,
        {key: value for key, value in settings.items() if is_bookkeeping(key)},
    )


def _of_file(path: Path) -> tuple[Path, Path | None]:
    """TEST.npz:VAL.npz as the two files; any other path alone."""
    test, colon, val = str(path).rpartition(":")
    return (Path(test), Path(val)) if colon and test.endswith(".npz") and val.endswith(".npz") else (path, None)


def _how_far(folder: RunFolder, config: Mapping[Any, Any]) -> str:
    """Why a run without a summary has none."""
    epochs = config.get("epochs", "?")
    done = int(max(series_of(read_metrics(folder.metrics)[0]).get("val/epoch", {}).values(), default=0))
    if folder.last.is_file():
        return f"unfinished after {done} of {epochs} epochs; `metacal train resume={folder.path}` goes on with it"
    return f"unfinished, and stopped before its first checkpoint (epochs: {epochs})"


def _identity(run: Run) -> str:
    return json.dumps(run.config, sort_keys=True, default=str)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ only by seed together, in the order in which the groups first appear.

    Runs of one configuration that trained on different images are different groups: their fingerprints differ.
    """
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(_identity(run), []).append(run)
    parts: list[tuple[list[Run], dict[str, Any]]] = []
    for same in together.values():
        parts += _by_data(same)
    told = telling([group[0].config for group, _ in parts])
    told = [keys | prints for keys, (_, prints) in zip(told, parts)]
    short = short_names([group[0].method for group, _ in parts], told)
    seeds = (sorted(group, key=lambda run: run.seed) for group, _ in parts)
    groups = [Group(group, differs, name) for group, differs, name in zip(seeds, told, short)]
    return [replace(g, short=g.short or g.label) for g in groups]


def _by_data(runs: Sequence[Run]) -> list[tuple[list[Run], dict[str, Any]]]:
    """Runs of one configuration, by the images that they trained on, with the fingerprints that tell these apart.

    Runs that do not know go with the first.
    """
    parts: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: not run.fingerprints):
        same = next((part for part in parts if not any(_other_data(run, other) for other in part)), None)
        if same is None:
            parts.append([run])
        else:
            same.append(run)
    out: list[tuple[list[Run], dict[str, Any]]] = []
    for part in parts:
        fingerprints = part[0].fingerprints
        differ = [split for split in _SPLITS if len({p[0].fingerprints.get(split) for p in parts}) > 1]
        out.append((part, {f"data.fingerprints.{split}": (fingerprints.get(split) or "?")[:8] for split in differ}))
    return out


def _other_data(first: Run, second: Run) -> bool:
    """Whether two runs of one configuration trained on images that should be the same and are not."""
    if first.config.get("data.split_seed", 0) is None and first.seed != second.seed:
        return False  # every seed has splits of its own
    a, b = first.fingerprints, second.fingerprints
    return bool(a and b) and any(a.get(split) != b.get(split) for split in _SPLITS)


def require_same_samples(groups: Sequence[Group], split: str = "test") -> None:
    """All runs have one split `split`, test or val; runs that do not tell the fingerprint of their val pass.

    Raises:
        InputError: naming the splits with a run of each.
    """
    sets: dict[str, list[Run]] = {}
    for run in (run for g in groups for run in g.runs):
        fingerprint = run.fingerprint if split == "test" else run.fingerprints.get(split)
        if fingerprint is not None:
            sets.setdefault(fingerprint, []).append(run)
    if len(sets) > 1:
        named = "; ".join(
            f"{runs[0].summary['data'].get('name', '?')} {fingerprint[:8]} ({runs[0].summary['data'].get(split, '?')} "
            f"images) of {len(runs)} run{'s' * (len(runs) > 1)} such as {runs[0].path}"
            for fingerprint, runs in sets.items()
        )
        raise InputError(f"runs were measured on {len(sets)} different {split} sets and cannot be compared: {named}")
