"""The result of a comparison of runs: its tables, what they mean, and where every number comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np

from metacal.errors import require, require_choice
from metacal.report import caveats
from metacal.report.significance import Difference, Sampled
from metacal.report.tables import Cell, Column, Range, Table, budgets, central, column_of, summarise
from metacal.report.verdict import arrow, verdict
from metacal.runs.record import Group, LeftOut
from metacal.runs.settings import equal_settings, name_first, show_value

__all__ = ["Judged", "RunComparison", "spread_of"]

UNTESTED = " ?"
UNTESTED_NOTE = "?: not tested, since a value of a run or of a resample is not finite; it is neither marked nor worse."


class Judged(NamedTuple):
    """A group held against another: the test, and its p-value after Holm's adjustment."""

    test: Difference
    adjusted: float


@dataclass(frozen=True)
class RunComparison:
    """What `judge_groups` returns.

    Attributes:
        groups: in the order of the tables' rows without scaling.
        scalings: "none", and names of post-hoc maps.
        results: scaling -> measure -> one `Sampled` for each group.
        best: scaling -> measure -> the index of the group with the best mean; None where a measure has no best.
        against_best: scaling -> measure -> each group minus the best one; None for the best itself.
        against_baseline: the same against the baseline; empty without one.
        baseline: its index.
        left_out: runs that are not in it, and why.
        n_samples, split, n_bins, resamples, alpha: how it was measured and tested.
        moderated: there are so many groups that variances over seeds are moderated by all of them.
    """

    groups: Sequence[Group]
    split: str
    n_samples: int
    scalings: Sequence[str]
    measures: Sequence[str]
    results: Mapping[str, Mapping[str, Sequence[Sampled]]]
    best: Mapping[str, Mapping[str, int | None]]
    against_best: Mapping[str, Mapping[str, Sequence[Judged | None]]]
    against_baseline: Mapping[str, Mapping[str, Sequence[Judged | None]]]
    baseline: int | None
    left_out: Sequence[LeftOut]
    n_bins: int
    resamples: int
    alpha: float
    moderated: bool = False
    sort: str | None = None
    order: Mapping[str, Sequence[int]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------ tables

    def table(self, origins: str = "runs", csv: bool = False) -> Table:
        """Groups × scaling as rows, settings that differ and measures as columns; the title names the split.

        Args:
            origins: below the table: "runs", every run with its command and the versions; "folders", the folders of
                each row; "none", when `runs_table` stands beside it.
            csv: put what the notes say (split, seeds, runs, commands, versions) into columns, since CSV has no notes,
                and for each measure the mark as a word, with the adjusted p-values.
        """
        keys = self._keys()
        seeds_differ = len({g.seeds for g in self.groups}) > 1
        columns = [Column("scaling", "Scaling"), *(Column(key, key) for key in keys)]
        columns += [Column("seeds", "Seeds")] if seeds_differ or csv else []
        first = len(columns)
        columns += [column_of(name) for name in self.measures]
        columns += [Column("minutes", "Minutes", 1), Column("step_cost", "Step cost ×", 2)]
        if csv:
            against = ["p"] + ([] if self.baseline is None else ["p_baseline"])
            columns += [Column(f"{name}_{what}") for name in self.measures for what in ("mark", *against)]
            columns += [Column(name) for name in ("split", "runs", "commands", "versions")]
        costs = self.step_costs()
        rows: list[tuple[str, list[Cell]]] = []
        marked: set[tuple[int, int]] = set()
        for scaling in self.scalings:
            for i in self.order[scaling]:
                g = self.groups[i]
                cells: list[Cell] = [scaling]
                cells += [show_value(g.differs[key]) if key in g.differs else None for key in keys]
                cells += [_listed(g.seeds)] if seeds_differ or csv else []
                for j, name in enumerate(self.measures, first):
                    cell = spread_of(self.results[scaling][name][i].values)
                    if not csv and self.is_untested(scaling, name, i):
                        cell = column_of(name).show(cell) + UNTESTED
                    cells.append(cell)
                    if self.is_among_best(scaling, name, i):
                        marked.add((len(rows), j))
                cells += [summarise([run.minutes for run in g.runs]), costs[i]]
                if csv:
                    for name in self.measures:
                        cells += self._judgement(scaling, name, i)
                    runs = [str(run.path) for run in g.runs], [str(run.summary.get("command", "")) for run in g.runs]
                    versions = sorted({run.versions for run in g.runs})
                    cells += [self.split, *("; ".join(x) for x in (*runs, versions))]
                rows.append((g.method, cells))
        note = "the best of its column (and scaling), and those that do not differ from it significantly"
        return Table(
            columns,
            rows,
            "method",
            f"{self.split.capitalize()} split",
            notes=[*self.notes(), *self._origins(origins)],
            marked=frozenset(marked),
            mark_note=note,
            lead=first,
        )

    def difference_table(self) -> Table:
        """Each group minus the baseline, with intervals; of significant differences it says which way and how good.

        Raises:
            InputError: without a baseline.
        """
        require(self.baseline is not None, "there is no baseline: give one as KEY=VALUE")
        assert self.baseline is not None
        keys = self._keys()
        columns = [Column("scaling", "Scaling"), *(Column(key, key) for key in keys)]
        first = len(columns)
        columns += [column_of(name) for name in self.measures]
        rows: list[tuple[str, list[Cell]]] = []
        some_untested = False
        for scaling in self.scalings:
            for i in (i for i in self.order[scaling] if i != self.baseline):
                g = self.groups[i]
                cells: list[Cell] = [scaling]
                cells += [show_value(g.differs[key]) if key in g.differs else None for key in keys]
                for name in self.measures:
                    judged = self.against_baseline[scaling][name][i]
                    assert judged is not None
                    said = arrow(name, judged.test.difference) if judged.adjusted < self.alpha else ""
                    cell = Range(judged.test.difference, judged.test.low, judged.test.high, said)
                    untested = math.isnan(judged.adjusted)
                    cells.append(column_of(name).show(cell) + UNTESTED if untested else cell)
                    some_untested |= untested
                rows.append((g.method, cells))
        level = f"{(1 - self.alpha) * 100:g} %"
        notes = [
            f"Method minus {self.groups[self.baseline].label}, with {level} intervals (each for itself, unadjusted).",
            f"↑, ↓ with better or worse: differs from it at {self.alpha * 100:g} %, Holm-adjusted over the "
            f"{len(self.groups) - 1} comparisons of a column and scaling; without them: not beyond noise.",
        ]
        notes += [UNTESTED_NOTE] if some_untested else []
        title = f"Differences from {self.groups[self.baseline].label}, {self.split} split"
        return Table(columns, rows, "method", title, notes, marked=frozenset(), lead=first)

    def to_frame(self) -> Any:
        """`table(csv=True)` as a pandas DataFrame: fractions, marks, p-values and where the numbers come from."""
        return self.table(csv=True).to_frame()

    def _repr_html_(self) -> str:
        return f"<p>{escape(verdict(self))}</p>" + self.table("folders")._repr_html_()

    def is_among_best(self, scaling: str, name: str, i: int) -> bool:
        """Whether group i is the best, or does not differ from it significantly (then its p-value is known)."""
        best = self.best[scaling][name]
        if best is None or len(self.groups) < 2:
            return False
        judged = self.against_best[scaling][name][i]
        return i == best or (judged is not None and judged.adjusted >= self.alpha)

    def is_untested(self, scaling: str, name: str, i: int) -> bool:
        """Whether group i could not be tested against the best: a value, or one of a resample, is not finite."""
        judged = self.against_best[scaling][name][i]
        return judged is not None and math.isnan(judged.adjusted)

    def _judgement(self, scaling: str, name: str, i: int) -> list[Cell]:
        """For CSV: best, as_good, worse or untested (empty where a measure has no best), and the p-values behind it."""
        judged = self.against_best[scaling][name][i]
        word = None
        if self.best[scaling][name] == i:
            word = "best"
        elif judged is not None:
            untested = self.is_untested(scaling, name, i)
            word = "untested" if untested else "as_good" if self.is_among_best(scaling, name, i) else "worse"
        tests = [judged] + ([] if self.baseline is None else [self.against_baseline[scaling][name][i]])
        return [word, *(None if t is None or math.isnan(t.adjusted) else t.adjusted for t in tests)]

    def step_costs(self) -> list[Cell]:
        """The time of a step, over that of the baseline or else of the cheapest group."""
        times = [[run.step_ms for run in g.runs] for g in self.groups]
        reference = self._cost_reference()
        if reference is None:
            return [None] * len(times)
        unit = float(np.mean([t for t in times[reference] if t is not None]))
        return [summarise([None if t is None else t / unit for t in of_runs]) for of_runs in times]

    def _cost_reference(self) -> int | None:
        times = [[run.step_ms for run in g.runs] for g in self.groups]
        means = {i: float(np.mean([t for t in of_runs if t])) for i, of_runs in enumerate(times) if all(of_runs)}
        if self.baseline in means:
            return self.baseline
        return min(means, key=lambda i: means[i]) if means else None

    def _keys(self) -> list[str]:
        return sorted({key for g in self.groups for key in g.differs}, key=name_first)

    # ------------------------------------------------------------------------------------------------ notes

    def notes(self, costs: bool = True) -> list[str]:
        """What was measured, what is equal, how it was tested, what the costs are of, and what to beware of."""
        seeds = {g.seeds for g in self.groups}
        notes = [f"{self.split.capitalize()} split, {self.n_samples:,} samples, {self.n_bins} bins."]
        if max(len(s) for s in seeds) > 1:
            which = f" {_listed(next(iter(seeds)))}" if len(seeds) == 1 else ""
            notes[0] += f" Mean ± standard deviation over the seeds{which}."
        elif len(seeds) == 1:
            notes[0] += f" Seed {_listed(next(iter(seeds)))}."
        if any(run.epoch == "last" for g in self.groups for run in g.runs):
            notes.append("Of the last epoch of each run, not of the one that it selected.")
        if equal := equal_settings(self.groups):
            notes.append("Equal in all: " + ", ".join(f"{k}={show_value(v)}" for k, v in equal.items()) + ".")
        notes += budgets({g.short: [run.summary for run in g.runs] for g in self.groups})
        if "temperature" in self.scalings:
            notes.append("Scaling: one temperature for each run, which it fitted on its val split by NLL.")
        if maps := [s for s in self.scalings if s not in ("none", "temperature")]:
            notes.append(f"Scaling by {', '.join(maps)}: fitted here for each run on its val predictions, by NLL.")
        if len(self.groups) > 1:
            notes.append(self.test_note())
            if any(self.is_untested(s, m, i) for s in self.scalings for m in self.measures for i in self.order[s]):
                notes.append(UNTESTED_NOTE)
        reference = self._cost_reference() if costs else None
        if reference is not None:
            ms = np.mean([run.step_ms for run in self.groups[reference].runs if run.step_ms])
            cheapest = "the baseline" if reference == self.baseline else "the cheapest"
            notes.append(
                f"Step cost: median time of a step, {cheapest} {self.groups[reference].short} = 1 ({ms:.3g} ms)."
            )
        return notes + self.warnings()

    def test_note(self) -> str:
        """The test behind the bold numbers, in full."""
        maps = [s for s in self.scalings if s != "none"]
        fitted = "scaling" if set(maps) - {"temperature"} else "".join(maps)
        return caveats.test_note(self.groups, self.alpha, self.resamples, self.moderated, fitted)

    def warnings(self) -> list[str]:
        """What makes the groups less comparable than the table suggests."""
        groups = [g for g in self.groups if not g.runs[0].is_file]
        files = [g.label for g in self.groups if g.runs[0].is_file]
        about_runs = (
            caveats.unequal_conditions,
            caveats.unequal_data,
            caveats.unequal_times,
            caveats.unread_lines,
        )
        return [
            *(line for caveat in about_runs if groups for line in caveat(groups)),
            *(caveats.fitted_val(groups) if groups and self.split == "val" else []),
            *([f"Files of predictions, of whose making nothing is known: {', '.join(files)}."] if files else []),
            *(f"Left out: {path}: {reason}." for path, reason in self.left_out),
        ]

    def runs_table(self) -> Table:
        """Every run: its group, seed, folder, command, versions and device."""
        columns = [Column(name) for name in ("seed", "run", "command", "versions", "device")]
        rows: list[tuple[str, list[Cell]]] = []
        for g in self.groups:
            for run in g.runs:
                said = [str(run.path), str(run.summary.get("command", "")), run.versions]
                rows.append((g.label, [run.seed, *said, str(run.summary.get("device", ""))]))
        return Table(columns, rows, "group", "Where the numbers come from", lead=len(columns))

    def _origins(self, how: str) -> list[str]:
        require_choice("origins", how, ("runs", "folders", "none"))
        if how == "none":
            return []
        if how == "folders":
            return [f"{g.label}: {_folders(g)}" for g in self.groups]
        versions = {run.versions for g in self.groups for run in g.runs}
        lines = [f"Versions: {next(iter(versions))}."] if len(versions) == 1 else []
        for g in self.groups:
            for run in g.runs:
                line = f"{g.label}, seed {run.seed}: {run.path}: {run.summary.get('command', 'command unknown')}"
                lines.append(line + (f" ({run.versions})" if len(versions) > 1 else ""))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON: groups with the values of every run, tests, notes, and the runs' origins."""
        costs = self.step_costs()
        groups = []
        for i, g in enumerate(self.groups):
            measured = {
                scaling: {name: self.entry(scaling, name, i) for name in self.measures} for scaling in self.scalings
            }
            groups.append(
                {
                    "label": g.label,
                    "short": g.short,
                    "method": g.method,
                    "differs": dict(g.differs),
                    "seeds": list(g.seeds),
                    "measures": measured,
                    "minutes": [run.minutes for run in g.runs],
                    "step_ms": [run.step_ms for run in g.runs],
                    "step_cost": central(costs[i]),
                    "runs": [
                        {
                            "path": str(run.path),
                            "seed": run.seed,
                            "command": run.summary.get("command"),
                            "versions": run.summary.get("versions"),
                            "device": run.summary.get("device"),
                            "temperature": run.temperature,
                            "test_fingerprint": run.fingerprint,
                        }
                        for run in g.runs
                    ],
                }
            )
        return {
            "split": self.split,
            "n": self.n_samples,
            "n_bins": self.n_bins,
            "resamples": self.resamples,
            "alpha": self.alpha,
            "moderated": self.moderated,
            "baseline": None if self.baseline is None else self.groups[self.baseline].label,
            "equal": equal_settings(self.groups, main=False),
            "groups": groups,
            "verdict": verdict(self),
            "notes": self.notes(),
            "left_out": [{"path": str(path), "reason": reason} for path, reason in self.left_out],
        }

    def entry(self, scaling: str, name: str, i: int) -> dict[str, Any]:
        """What one group has in one measure, for JSON: the values of its runs, and how they were judged."""
        values = self.results[scaling][name][i].values
        entry: dict[str, Any] = {
            "mean": float(values.mean()),
            "std": float(values.std(ddof=1)) if len(values) > 1 else None,
            "values": values.tolist(),
            "best": self.best[scaling][name] == i,
            "among_best": self.is_among_best(scaling, name, i),
            "untested": self.is_untested(scaling, name, i),
        }
        for key, tests in (("against_best", self.against_best), ("against_baseline", self.against_baseline)):
            judged = tests[scaling][name][i] if scaling in tests else None
            if judged is not None:
                entry[key] = {**judged.test._asdict(), "p_adjusted": judged.adjusted}
        return entry


def spread_of(values: Iterable[float]) -> Cell:
    """Mean and standard deviation over runs; the mean alone, which is not finite either, where a value is not."""
    known = list(map(float, values))
    return summarise(known) if len(known) < 2 or np.isfinite(known).all() else float(np.mean(known))


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _folders(g: Group) -> str:
    """The run folders in one line: `runs/digits/focal/{seed0,seed1}` where only the last part differs."""
    parents = {run.path.parent for run in g.runs}
    names = [run.path.name for run in g.runs]
    if len(parents) == 1 and len(names) > 1:
        return f"{next(iter(parents))}/{{{','.join(names)}}}"
    return ", ".join(str(run.path) for run in g.runs)
