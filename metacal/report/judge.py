"""Groups of runs side by side: every measure over seeds, which differences are real, and where the numbers come from.

runs, left_out = load_runs(find_runs(["runs/digits"]))
result = judge_groups(group_runs(runs), left_out=left_out, sort="ece")
print(result.table())                     # rich draws it; render("markdown"), "csv" or "latex" write it
result.to_dict()                          # all of it, with every run, for machines
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from metacal.calibration import MEASURES, SCALINGS, FewErrorsWarning, fit_scaling, scale_by
from metacal.calibration.choice import AUTO
from metacal.errors import InputError, require, require_choice
from metacal.predictions import Predictions
from metacal.report.comparison import Judged, RunComparison
from metacal.report.remembered import Remembered, digest_of
from metacal.report.significance import (
    MANY,
    Difference,
    Sampled,
    difference,
    draw_counts,
    holm,
    moderated,
    stack,
)
from metacal.report.tables import central, is_scaled, summarise
from metacal.runs.record import Group, LeftOut, Run, group_runs, require_same_samples
from metacal.runs.settings import show_value

__all__ = ["judge_groups", "load_predictions"]


def judge_groups(
    groups: Sequence[Group],
    *,
    split: str = "test",
    measures: Sequence[str] | None = None,
    scaling: str = "both",
    baseline: Sequence[str] = (),
    sort: str | None = None,
    n_bins: int = 15,
    resamples: int = 128,
    alpha: float = 0.05,
    seed: int = 0,
    left_out: Sequence[LeftOut] = (),
) -> RunComparison:
    """Measure every run from its saved predictions and test the differences between groups.

    All runs are measured by the same code here, whatever bins and version they were made with; a run whose predictions
    cannot be read, or contradict its summary, is left out by name.

    Args:
        groups: from `group_runs`.
        split: "test" or "val". Val has no scaled values: the temperature was fitted there.
        measures: names in `metacal.calibration.MEASURES`; None: those that are `compared`.
        scaling: "none", "temperature" (the one that the run fitted on val), or another map of
            `metacal.calibration.SCALINGS` or "auto", fitted here on each run's val predictions; several with commas
            between them; "both": none,temperature.
        baseline: `KEY=VALUE` words that pick one group, e.g. ["method=focal", "gamma.value=3"].
        sort: a measure, "minutes" or "step_cost": rows from the best to the worst.
        n_bins: of the binned measures.
        resamples: of the test samples, behind the tests.
        alpha: level of the tests.
        seed: of the resamples.

    Raises:
        InputError: bad arguments; no run left; runs whose `split` is not the same (by fingerprint or labels).
    """
    names = [name for name, m in MEASURES.items() if m.compared] if measures is None else list(measures)
    _check_arguments(split, names, scaling, sort, n_bins, resamples, alpha)
    require(len(groups) > 0, "there is no finished run to compare" + _reasons(left_out))
    require_same_samples(groups, split)
    if baseline:
        _pick(groups, baseline)  # before the work
    scalings = _scalings(groups, split, scaling)
    options = {name: MEASURES[name].options(n_bins) for name in names}
    loaded, left = _measured_runs(groups, split, scalings, options, resamples, seed, left_out)
    groups = group_runs([run for g in groups for run in g.runs if run in loaded])
    require(len(groups) > 0, "there is no run to compare" + _reasons(left))
    result = RunComparison(
        groups=groups,
        split=split,
        n_samples=int(next(iter(loaded.values()))["n"]),
        scalings=scalings,
        measures=tuple(names),
        **_tests(groups, loaded, scalings, names, _pick(groups, baseline) if baseline else None, 1 - alpha),
        left_out=left,
        n_bins=n_bins,
        resamples=resamples,
        alpha=alpha,
        sort=sort,
        order={s: range(len(groups)) for s in scalings},
    )
    return result if sort is None else replace(result, order={s: _order(result, s, sort) for s in scalings})


def _scalings(groups: Sequence[Group], split: str, scaling: str) -> list[str]:
    """Those to measure; without temperature where that is not asked for by name and no run, or some file, has one."""
    runs = [run for g in groups for run in g.runs]
    if scaling != "both":
        names = scaling.split(",")
        missing = [str(run.path) for run in runs if run.is_file and run.val_file is None]
        require(names == ["none"] or not missing, f"scaling={scaling} needs the val predictions of {missing[:1]}: give "
                "TEST.npz:VAL.npz, or scaling=none")  # fmt: skip
        return names
    no_temperature = all(math.isnan(run.temperature) and run.val_file is None for run in runs)
    some_file = any(run.is_file and run.val_file is None for run in runs)
    return ["none"] if split == "val" or no_temperature or some_file else ["none", "temperature"]


def _check_arguments(
    split: str, measures: Sequence[str], scaling: str, sort: str | None, n_bins: int, resamples: int, alpha: float
) -> None:
    require_choice("split", split, ("test", "val"))
    if scaling != "both":
        for name in scaling.split(","):
            require_choice("scaling", name, ("both", AUTO, *SCALINGS))
        require(
            "both" not in scaling.split(",") and len(set(scaling.split(","))) == len(scaling.split(",")),
            f"scaling must be both, or distinct maps with commas between them, got {scaling}",
        )
    require(len(measures) > 0, "measures must name at least one measure")
    for name in measures:
        require_choice("measures", name, MEASURES)
    require(len(set(measures)) == len(measures), f"measures must be distinct, got {', '.join(measures)}")
    if sort is not None:
        require_choice("sort", sort, [*measures, "minutes", "step_cost"])
    require(isinstance(resamples, int) and resamples >= 2, f"resamples must be an integer >= 2, got {resamples}")
    require(n_bins >= 1, f"n_bins must be >= 1, got {n_bins}")
    require(0 < alpha < 1, f"alpha must lie in (0, 1), got {alpha}")
    require(split == "test" or scaling in ("none", "both"), f"scaling={scaling} needs split=test: it is fitted on val")


def _tests(
    groups: Sequence[Group],
    loaded: Mapping[Run, Mapping[str, Any]],
    scalings: Sequence[str],
    measures: Sequence[str],
    baseline: int | None,
    level: float,
) -> dict[str, Any]:
    """The results of a `RunComparison`, the best of each measure, and the tests against it and the baseline."""
    results = {
        s: {name: [stack([loaded[run][s][name] for run in g.runs]) for g in groups] for name in measures}
        for s in scalings
    }

    def against(reference: Callable[[str, str], int | None]) -> dict[str, dict[str, list[Judged | None]]]:
        return {
            s: {name: _against(sampled, groups, reference(s, name), level) for name, sampled in of.items()}
            for s, of in results.items()
        }

    best = {s: {name: _best(sampled, MEASURES[name].best) for name, sampled in of.items()} for s, of in results.items()}
    return {
        "results": results,
        "best": best,
        "against_best": against(lambda s, name: best[s][name]),
        "baseline": baseline,
        "against_baseline": {} if baseline is None else against(lambda s, name: baseline),
        "moderated": max(Counter(g.seeds for g in groups if len(g.seeds) > 1).values(), default=0) >= MANY,
    }


def load_predictions(run: Run, split: str, scaling: str) -> Predictions:
    """The run's saved predictions after a scaling: "temperature" divides by its own temperature, any other map is
    fitted on its val predictions.

    Raises:
        InputError: see `Run.predictions`; or the run has no temperature.
    """
    return _scaled(run, run.predictions(split), scaling)


def _scaled(run: Run, p: Predictions, scaling: str) -> Predictions:
    if scaling == "none":
        return p
    if scaling != "temperature" or run.is_file:
        val = run.predictions("val")
        require(val.n_classes == p.n_classes, f"its val predictions have {val.n_classes} classes, not {p.n_classes}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewErrorsWarning)  # one line for each run would bury the table
            return fit_scaling(val, scaling).apply(p)
    t = run.temperature
    require(t > 0 and math.isfinite(t), "its summary.json has no temperature")
    return scale_by(p, t)


def _measured_runs(
    groups: Sequence[Group],
    split: str,
    scalings: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    resamples: int,
    seed: int,
    left_out: Sequence[LeftOut],
) -> tuple[dict[Run, dict[str, Any]], list[LeftOut]]:
    """Run -> scaling -> measure -> Sampled (and "n"), one run in memory at a time; and the runs left out.

    What a run's folder has kept of an earlier comparison is not measured again.
    """
    out: dict[Run, dict[str, Any]] = {}
    left = list(left_out)
    labels: torch.Tensor | None = None
    first: Run | None = None
    counts, made_by = torch.empty(0), ""
    for run in (run for g in groups for run in g.runs):
        try:
            p = run.predictions(split)
            scaled = {s: _scaled(run, p, s) for s in scalings if s != "none"}
        except InputError as error:
            left.append(LeftOut(run.path, str(error)))
            continue
        if labels is None:
            labels, first, counts = p.labels, run, draw_counts(len(p), resamples, seed)
            made_by = digest_of(counts)
        elif not torch.equal(labels, p.labels):
            assert first is not None
            raise InputError(
                f"the {split} split of {run.path} ({len(p)} samples) is not that of {first.path} ({len(labels)} "
                "samples): their labels differ, so they cannot be compared"
            )
        known = Remembered(None if run.is_file else run.folder.measured, counts, made_by)
        values: dict[str, Any] = {"n": len(p), "none": known.sample(options, p)}
        for s, q in scaled.items():
            same_classes = torch.equal(q.predicted, p.predicted)
            changed = {name: keys for name, keys in options.items() if is_scaled(name) or not same_classes}
            values[s] = values["none"] | (known.sample(changed, q) if changed else {})
        known.save()
        out[run] = values
    return out, left


def _against(
    results: Sequence[Sampled], groups: Sequence[Group], reference: int | None, level: float
) -> list[Judged | None]:
    """Each group minus the reference, p-values adjusted over all of them."""
    if reference is None:
        return [None] * len(groups)
    others = [i for i in range(len(groups)) if i != reference]
    seeds = groups[reference].seeds
    pooled = _pooled(results, groups, seeds)

    def test(i: int) -> Difference:
        known = None
        if i in pooled and reference in pooled:
            known = (pooled[i][0], pooled[reference][0], pooled[i][1])
        return difference(results[i], results[reference], groups[i].seeds == seeds, level, known)

    tests = [test(i) for i in others]
    adjusted = holm([test.p_value for test in tests])
    out: list[Judged | None] = [None] * len(groups)
    for i, test_of, p in zip(others, tests, adjusted):
        out[i] = Judged(test_of, p)
    return out


def _pooled(
    results: Sequence[Sampled], groups: Sequence[Group], seeds: tuple[int, ...]
) -> dict[int, tuple[float, float]]:
    """Group -> (moderated variance over seeds, its degrees of freedom), of the groups with `seeds` if they are many."""
    if len(seeds) < 2:
        return {}
    same = [i for i, g in enumerate(groups) if g.seeds == seeds and np.isfinite(results[i].values).all()]
    if len(same) < MANY:
        return {}
    pooled = moderated(np.stack([results[i].values for i in same]))
    return {i: (float(v), pooled.df) for i, v in zip(same, pooled.variances)}


def _best(results: Sequence[Sampled], direction: str | None) -> int | None:
    means = {i: r.mean for i, r in enumerate(results) if math.isfinite(r.mean)}
    if direction is None or not means:
        return None
    return (min if direction == "min" else max)(means, key=lambda i: means[i])


def _order(result: RunComparison, scaling: str, sort: str) -> list[int]:
    """Rows from the best to the worst; those without a value last."""
    sign = 1.0
    if sort in result.measures:
        values: list[float | None] = [r.mean for r in result.results[scaling][sort]]
        sign = -1.0 if MEASURES[sort].best == "max" else 1.0
    elif sort == "minutes":
        values = [central(summarise([run.minutes for run in g.runs])) for g in result.groups]
    else:
        values = [central(cell) for cell in result.step_costs()]
    numbers = [math.inf if v is None or math.isnan(v) else sign * v for v in values]
    return sorted(range(len(numbers)), key=lambda i: numbers[i])


def _pick(groups: Sequence[Group], words: Sequence[str]) -> int:
    """The one group that all `KEY=VALUE` words fit."""
    wanted = []
    for word in words:
        key, equals, value = word.partition("=")
        require(bool(equals and key), f"baseline must be KEY=VALUE, such as method=cross_entropy, got {word!r}")
        require(key == "method" or any(key in g.config for g in groups), f"baseline: the runs have no key {key!r}")
        wanted.append((key, value))

    def fits(g: Group) -> bool:
        for key, value in wanted:
            has = show_value(g.method if key == "method" else g.config.get(key))
            if has != value and not _equal_numbers(has, value):
                return False
        return True

    fitting = [i for i, g in enumerate(groups) if fits(g)]
    if len(fitting) != 1:
        have = "; ".join(g.label for g in (groups if not fitting else [groups[i] for i in fitting]))
        count = "none fits" if not fitting else f"{len(fitting)} fit"
        raise InputError(f"baseline {' '.join(words)} must pick one of the groups, {count}: {have}")
    return fitting[0]


def _equal_numbers(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return False


def _reasons(left_out: Sequence[LeftOut]) -> str:
    return "".join(f"; {path}: {reason}" for path, reason in left_out)
