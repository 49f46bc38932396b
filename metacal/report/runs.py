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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metacal.config import Config
from metacal.errors import InputError, require
from metacal.predictions import Predictions
from metacal.training.folder import NOT_IN_NAME

__all__ = ["Group", "LeftOut", "Run", "find_runs", "group_runs", "load_runs", "require_same_samples"]

# Beside NOT_IN_NAME, keys that cannot change what a run computes: where its data lie, how they are
# fetched (what they are, the test split's fingerprint tells), and what is kept and watched.
_BOOKKEEPING = (NOT_IN_NAME - {"method"}) | {
    "keep_every",
    "monitor",
    "data.path",
    "data.download",
    "data.storage",
    "data.workers",
}


class LeftOut(NamedTuple):
    """A run that is not compared, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        path: its folder.
        config: dotted key -> value of all that can change its result, the seed left out; keys that its config.yaml
            lacks have the default.
        summary: its summary.json.
    """

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @property
    def method(self) -> str:
        return str(self.summary["method"])

    @property
    def fingerprint(self) -> str:
        """Of the content of its test split."""
        return str(self.summary["data"]["fingerprint"])

    def predictions(self, split: str) -> Predictions:
        """The predictions that it saved, of `split` test or val.

        Raises:
            InputError: when there are none, the file is damaged, or does not give the numbers of the summary.
        """
        p = Predictions.load(self.path / "predictions" / f"{split}.npz")
        if split == "test":
            was, accuracy = self.summary.get("test/accuracy"), int(p.correct.sum()) / len(p)
            require(
                was is None or abs(was - accuracy) < 1e-9,
                f"predictions/test.npz has an accuracy of {accuracy:.6f} and summary.json of {was}: one was replaced",
            )
        return p

    @property
    def temperature(self) -> float:
        """The temperature that the run fitted on val; NaN if its summary has none."""
        value = self.summary.get("test/temperature")
        return math.nan if value is None else float(value)

    @property
    def minutes(self) -> float | None:
        """Of training, without the measurement at its end."""
        seconds = self.summary.get("time/train_s")
        return None if seconds is None else seconds / 60

    @property
    def step_ms(self) -> float | None:
        """Training time over steps."""
        seconds, steps = self.summary.get("time/train_s"), self.summary.get("steps")
        return 1e3 * seconds / steps if seconds and steps else None

    @property
    def versions(self) -> str:
        """What it was made by, in one line."""
        return ", ".join(f"{name} {version}" for name, version in (self.summary.get("versions") or {}).items())

    @cached_property
    def series(self) -> dict[str, dict[int, float]]:
        """metrics.jsonl as ``split/measure`` -> step -> value; lines that cannot be read are skipped."""
        found: dict[str, dict[int, float]] = {}
        try:
            lines = (self.path / "metrics.jsonl").read_text(errors="replace").splitlines()
        except OSError:
            return found
        for text in lines:
            try:
                line = json.loads(text)
                step, split = int(line.pop("step")), line.pop("split")
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            for name, value in line.items():  # val/epoch counts the epochs that are done
                if isinstance(value, int | float):
                    found.setdefault(f"{split}/{name}", {})[step] = float(value)
        return found


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ by their seed only, in the order of the seeds.

    Attributes:
        runs: at least one.
        differs: dotted key -> value, of the keys that tell the groups apart beyond what the method's name tells.
    """

    runs: Sequence[Run]
    differs: Mapping[str, Any] = field(default_factory=dict)

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


def show_value(value: Any) -> str:
    """A config value as on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show_value(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def find_runs(words: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run folders that `words` name: each a run, a folder that holds runs at any depth, or a glob of such.

    Sorted within each word, every folder once.

    Raises:
        InputError: a word that names nothing, or no run.
    """
    found: dict[Path, Path] = {}
    for word in words:
        here = Path(word)
        # Names of runs may hold brackets: what exists is meant as it stands.
        matches = [here] if here.exists() else [Path(m) for m in sorted(glob.glob(str(word), recursive=True))]
        require(len(matches) > 0, f"{word} does not exist and matches nothing")
        runs = [run for match in matches if match.is_dir() for run in _runs_in(match)]
        require(len(runs) > 0, f"{word} is no run folder and holds none: a run folder has a config.yaml")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


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


def _is_run(folder: Path) -> bool:
    """A run's folder has its config; one that a study started and that failed before that has its log alone."""
    return (folder / "config.yaml").is_file() or ((folder / "log.txt").is_file() and folder.name.startswith("seed"))


def load_runs(paths: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """The finished runs among `paths`, and the others with the reason."""
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    defaults = _flat(OmegaConf.to_container(OmegaConf.structured(Config)))
    for path in paths:
        try:
            runs.append(_load_run(path, defaults))
        except InputError as error:
            left_out.append(LeftOut(path, str(error)))
    known: dict[tuple[str, int, str], Run] = {}
    for run in list(runs):
        key = (_identity(run), run.seed, run.fingerprint)
        if key in known:
            left_out.append(LeftOut(run.path, f"has the configuration and the seed of {known[key].path}"))
            runs.remove(run)
        known.setdefault(key, run)
    return runs, left_out


def _load_run(path: Path, defaults: Mapping[str, Any]) -> Run:
    """Raises InputError with what is wrong, without the path."""
    require((path / "config.yaml").is_file(), "stopped before training began; its log.txt says why")
    try:
        config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError):
        raise InputError("its config.yaml cannot be read") from None
    if not isinstance(config, dict) or "method" not in config:
        raise InputError("its config.yaml is not that of a run")
    if not (path / "summary.json").is_file():
        raise InputError(_how_far(path, config))
    try:
        summary = json.loads((path / "summary.json").read_text())
        summary["method"], int(summary["seed"]), summary["data"]["fingerprint"]
    except (ValueError, KeyError, TypeError):
        raise InputError("its summary.json is damaged or not that of a run") from None
    return Run(path, {**defaults, **_flat(config)}, summary)


def _how_far(path: Path, config: Mapping[Any, Any]) -> str:
    """Why a run without a summary has none."""
    epochs = config.get("epochs", "?")
    done = int(max(Run(path, {}, {}).series.get("val/epoch", {}).values(), default=0))
    if (path / "checkpoints" / "last.pt").is_file():
        return f"unfinished after {done} of {epochs} epochs; `metacal train resume={path}` goes on with it"
    return f"unfinished, and stopped before its first checkpoint (epochs: {epochs})"


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, bookkeeping left out; dictionaries without fixed keys (an objective) are one value."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if name in _BOOKKEEPING:
            continue
        if isinstance(value, dict) and name != "meta.objective":
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def _identity(run: Run) -> str:
    return json.dumps(run.config, sort_keys=True, default=str)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ only by seed together, in the order in which the groups first appear."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(_identity(run), []).append(run)
    groups = [Group(sorted(group, key=lambda run: run.seed)) for group in together.values()]
    return [Group(g.runs, differs) for g, differs in zip(groups, _telling(groups))]


def _telling(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For each group the keys, with its values, that tell it from the others beyond what the method's name tells.

    A method sets keys of loss, gamma, meta and penalties, which may mean nothing to another: they are given for the
    methods in which they vary. Any other key is given for all groups, if it varies within a method.
    """
    by_method: dict[str, list[Group]] = {}
    for g in groups:
        by_method.setdefault(g.method, []).append(g)
    told: list[dict[str, Any]] = [{} for _ in groups]
    for key in sorted({key for g in groups for key in g.config}):
        varying = {method for method, siblings in by_method.items() if len(_values(siblings, key)) > 1}
        own = key.split(".")[0] in ("loss", "gamma", "meta", "penalties")
        for g, keys in zip(groups, told):
            if g.method in varying or (varying and not own):
                keys[key] = g.config.get(key)
    return told


def equal_settings(groups: Sequence[Group], main: bool = True) -> dict[str, Any]:
    """The settings in which all groups agree, less those that are null; with `main` only what a reader asks first."""
    keys = sorted({key for g in groups for key in g.config})
    if main:
        keys = [
            "data.name",
            "data.train_size",
            "data.batch_size",
            "model.name",
            "optimizer.name",
            "optimizer.lr",
            "epochs",
        ]
    return {
        key: groups[0].config[key]
        for key in keys
        if groups[0].config.get(key) is not None and len(_values(groups, key)) == 1
    }


def _values(groups: Sequence[Group], key: str) -> set[str]:
    return {json.dumps(g.config.get(key), sort_keys=True, default=str) for g in groups}


def require_same_samples(groups: Sequence[Group]) -> None:
    """All runs were measured on one test set.

    Raises:
        InputError: naming the test sets with a run of each.
    """
    sets: dict[str, list[Run]] = {}
    for run in (run for g in groups for run in g.runs):
        sets.setdefault(run.fingerprint, []).append(run)
    if len(sets) > 1:
        named = "; ".join(
            f"{runs[0].summary['data'].get('name', '?')} {fingerprint[:8]} ({runs[0].summary['data'].get('test', '?')} "
            f"images) of {len(runs)} run{'s' * (len(runs) > 1)} such as {runs[0].path}"
            for fingerprint, runs in sets.items()
        )
        raise InputError(f"runs were measured on {len(sets)} different test sets and cannot be compared: {named}")
