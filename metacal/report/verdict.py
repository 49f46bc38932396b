"""What the numbers say, in sentences: of one run, and of a comparison of groups of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metacal.calibration import MEASURES
from metacal.report.cells import column_of

if TYPE_CHECKING:
    from metacal.report.comparison import Judged, RunComparison

__all__ = ["arrow", "direction", "heading", "meaning", "verdict", "when_scaled"]

_NAMED = 4  # methods that a sentence names, before "and 9 more"


def meaning(results: Mapping[str, Any], split: str = "test") -> str:
    """What a run's scores mean: how many predictions are right, and how far confidence is from that.

    Args:
        results: flat, as `Report.to_dict` gives them, with or without ``split/`` before each name: `accuracy`, `ece`,
            `confidence`, `n`, and where they are known `ece_low`, `ece_high`, `ece_scaled`, `temperature`.

    Returns:
        Sentences; empty where accuracy, confidence or ECE is missing.
    """

    def value(name: str) -> float | None:
        found = results.get(f"{split}/{name}", results.get(name))
        return None if found is None else float(found)

    accuracy, confidence, ece = value("accuracy"), value("confidence"), value("ece")
    if accuracy is None or confidence is None or ece is None:
        return ""
    n, gap = value("n"), confidence - accuracy
    of = f" of {n:,.0f}" if n else ""
    text = (
        f"{100 * accuracy:.1f} %{of} predictions on {split} are right, and their mean confidence is "
        f"{100 * confidence:.1f} %: {abs(100 * gap):.1f} points too {'high' if gap > 0 else 'low'}. Bin by bin, "
        f"confidence is off by {100 * ece:.1f} points (ECE)"
    )
    low, high = value("ece_low"), value("ece_high")
    if low is not None and high is not None:
        text += f", 95 % interval {100 * low:.1f} to {100 * high:.1f}"
    scaled, temperature = value("ece_scaled"), value("temperature")
    if scaled is not None:
        fitted = f" (T = {temperature:.2f}, fitted on val)" if temperature is not None else ""
        text += f"; after scaling{fitted} by {100 * scaled:.1f}"
    return text + "."


def direction(name: str, difference: float) -> str:
    """Whether a difference from a reference is "better" or "worse"; empty for 0, NaN and measures with no best."""
    best = MEASURES[name].best if name in MEASURES else None
    if best is None or not abs(difference) > 0:
        return ""
    return "better" if (difference < 0) == (best == "min") else "worse"


def arrow(name: str, difference: float) -> str:
    """A difference from a reference as `↑ worse`, `↓ better`, and for measures with no best `↑ differs`."""
    return f"{'↑' if difference > 0 else '↓'} {direction(name, difference) or 'differs'}"


def heading(result: RunComparison) -> str:
    """What is compared, and on what data: `brier, focal and 3 more on digits`."""
    data = sorted({str(g.config["data.name"]) for g in result.groups if g.config.get("data.name")})
    return _named([g.short for g in result.groups]) + (f" on {_named(data)}" if data else "")


def when_scaled(scaling: str) -> str:
    """`without scaling`, or `after temperature scaling`."""
    return "without scaling" if scaling == "none" else f"after {scaling} scaling"


def verdict(result: RunComparison) -> str:
    """One sentence: which groups differ from the baseline (or else from the best) in ECE beyond noise.

    Where ECE was not measured, in the first measure that has a best end. The tests are those of the tables,
    Holm-adjusted. Empty for a single group, or where no measure has a best end.
    """
    measures = [name for name in ("ece", *result.measures) if name in result.measures and column_of(name).best]
    if len(result.groups) < 2 or not measures:
        return ""
    parts = []
    for scaling in result.scalings:
        when = when_scaled(scaling)
        parts.append(f"{when}, {_of_one(result, scaling, measures[0])}")
    text, count = "; ".join(parts), len(result.groups) - 1
    tests = f"Holm-corrected for {count} comparison{'s' * (count > 1)}"
    return f"{text[0].upper()}{text[1:]} (two-sided tests at {100 * result.alpha:g} %, {tests}, {_seeds(result)})."


def _of_one(result: RunComparison, scaling: str, name: str) -> str:
    """Which groups differ after one scaling."""
    column, groups = column_of(name), result.groups
    reference = result.best[scaling][name] if result.baseline is None else result.baseline
    if reference is None:
        return f"no method has a finite {column.title}"
    tests = (result.against_best if result.baseline is None else result.against_baseline)[scaling][name]
    judged = {i: tests[i] for i in result.order[scaling] if i != reference}
    differ = [i for i, j in judged.items() if j is not None and j.adjusted < result.alpha]
    untested = [i for i, j in judged.items() if j is None or math.isnan(j.adjusted)]
    who = groups[reference].short
    if result.baseline is None:
        who += f" (the best: {column.in_words(result.results[scaling][name][reference].mean)})"
    clauses = []
    if differ:
        names = _named([f"{groups[i].short} ({_difference(name, judged[i])})" for i in differ])
        clauses = [f"{names} differ{'s' * (len(differ) == 1)} from {who} in {column.title} beyond noise"]
        clauses += ["no other does"] if len(differ) + len(untested) < len(judged) else []
    elif len(untested) < len(judged):
        clauses = [f"no method differs from {who} in {column.title} beyond noise"]
    if untested:
        clauses.append(f"{_named([groups[i].short for i in untested])} could not be tested against {who}")
    return ", ".join(clauses)


def _difference(name: str, judged: Judged | None) -> str:
    """`3.1 points worse`, or for a measure that is no percentage `0.0210 better`."""
    assert judged is not None
    column, size = column_of(name), abs(judged.test.difference)
    number = column.show(size)
    return f"{number}{' points' if column.percent else ''} {direction(name, judged.test.difference)}"


def _named(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and 3 more`."""
    shown = list(names[:_NAMED]) + ([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _seeds(result: RunComparison) -> str:
    counts = sorted({len(g.runs) for g in result.groups})
    text = f"over {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "")
    text += f" seed{'s' * (counts[-1] > 1)}"
    return text + (", so another seed may give another result" if counts[0] == 1 else "")
