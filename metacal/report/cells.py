"""The cells and columns of tables: numbers with intervals or spreads, and how those of a measure are shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from metacal.calibration import MEASURES

__all__ = ["Cell", "Column", "Range", "Spread", "central", "column_of", "in_words", "is_scaled", "summarise"]


class Range(NamedTuple):
    """A value with its interval, shown as `value [low, high]`, and after it what is said of it, such as `↑ worse`."""

    value: float
    low: float
    high: float
    said: str = ""


class Spread(NamedTuple):
    """Mean and standard deviation over runs, shown as `mean ± std`."""

    mean: float
    std: float


Cell = float | int | str | Range | Spread | None


@dataclass(frozen=True)
class Column:
    """How one column is headed and shown.

    Attributes:
        name: in CSV, and in the mappings that rows come from.
        title: in the other formats; "%" is appended when `percent`.
        digits: behind the decimal point, after the factor of 100 when `percent`.
        percent: show fractions times 100.
        best: "min" or "max" marks the best value of the column (of several rows); None marks none.
    """

    name: str
    title: str = ""
    digits: int = 4
    percent: bool = False
    best: str | None = None

    @property
    def header(self) -> str:
        return (self.title or self.name) + (" %" if self.percent else "")

    def show(self, cell: Cell, times: str = "±") -> str:
        """The cell as text; a value that is missing or NaN is a dash."""
        if cell is None:
            return "–"
        if isinstance(cell, str):
            return cell
        if isinstance(cell, Range):
            if math.isnan(cell.low) or math.isnan(cell.high):
                return self._number(cell.value)
            text = f"{self._number(cell.value)} [{self._number(cell.low)}, {self._number(cell.high)}]"
            return f"{text} {cell.said}" if cell.said else text
        if isinstance(cell, Spread):
            mean = self._number(cell.mean)
            return mean if math.isnan(cell.std) else f"{mean} {times} {self._number(cell.std)}"
        return self._number(cell)

    def in_words(self, cell: Cell) -> str:
        """The cell with its title and unit, for sentences and lines: `ECE 1.64 %`, `NLL 0.1089`."""
        return f"{self.title or self.name} {self.show(cell)}" + (" %" if self.percent else "")

    def _number(self, x: float) -> str:
        if isinstance(x, int):
            return str(x)
        if math.isnan(x):
            return "–"
        return f"{x * 100 if self.percent else x:.{self.digits}f}"


_NO_MEASURES = {"temperature": Column("temperature", "Temperature", 3)}


def column_of(name: str) -> Column:
    """How the measure `name` of `metacal.calibration.MEASURES`, or "temperature", is shown; others by the bare name."""
    if name not in MEASURES:
        return _NO_MEASURES.get(name, Column(name))
    shown = MEASURES[name]
    return Column(name, shown.title, shown.digits, shown.percent, shown.best)


def in_words(values: Mapping[str, float], names: Iterable[str]) -> str:
    """The named measures of `values`, those that it has, with their units: `Accuracy 96.38 %  NLL 0.1089`."""
    return "  ".join(column_of(name).in_words(values[name]) for name in names if name in values)


def is_scaled(name: str) -> bool:
    """Whether one temperature for all classes changes it."""
    return name in MEASURES and not MEASURES[name].classes_only


def summarise(values: Iterable[float | None]) -> Cell:
    """One value as it is, several as mean ± (sample) standard deviation, None if any is missing."""
    known = list(values)
    if not known or any(v is None for v in known):
        return None
    numbers = [float(v) for v in known if v is not None]
    if len(numbers) == 1:
        return numbers[0]
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers))


def central(cell: Cell) -> float | None:
    """A cell's value, or its mean; None where it has no number."""
    if cell is None or isinstance(cell, str):
        return None
    return float(cell[0]) if isinstance(cell, tuple) else float(cell)
