"""From a model and data to predictions, and from predictions to a report of all measures with their intervals.

report = metacal.evaluate(model, test_loader, val=val_loader)
print(report)                                  # a table; report.to_markdown(), report.to_dict()
report.reliability_diagram().savefig("reliability.png")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metacal.calibration import MEASURES, Interval
from metacal.calibration.bootstrap import bootstrap_sets
from metacal.calibration.choice import AUTO, SCALINGS, fit_scaling, name_of
from metacal.calibration.fitted import Scaling
from metacal.calibration.measures import values_of
from metacal.calibration.temperature import TemperatureScaling
from metacal.data.wrap import for_model
from metacal.errors import require, require_choice
from metacal.names import MeasureName
from metacal.predict import Data, predict
from metacal.predictions import Predictions
from metacal.report.figures import reliability_diagram
from metacal.report.tables import Cell, Column, Range, Table, column_of
from metacal.report.verdict import meaning

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = ["Report", "evaluate", "predict"]


class Report:
    """All measures of one set of predictions with bootstrap intervals, before and after post-hoc scaling.

    With `val`, predictions on validation data, a temperature or another map is fitted on these (by NLL) and every
    measure is also given after scaling by it. Values are fractions (nll: nats).

    Args:
        scaling: the map: a name in `metacal.calibration.SCALINGS`, or auto for the choice among them.
        measures: names in `metacal.calibration.MEASURES`; None: all of them.
        n_bins: of the binned measures and of the diagram.
        resamples: of the percentile bootstrap; 0: no intervals (NaN).
        seed: of the resampling; the resamples are the same for all measures, before and after scaling.
        level: of the intervals.
        split: name of what is measured, for headers.

    Attributes:
        predictions: what was measured.
        values: measure -> Interval(low, value, high).
        scaled: the same after scaling; None without `val`.
        scaling: the map that was fitted, with what it rests on; None without `val`.
        temperature: T of temperature scaling; None without `val` and for another map.
    """

    def __init__(
        self,
        predictions: Predictions,
        val: Predictions | None = None,
        *,
        scaling: str = "temperature",
        measures: Sequence[MeasureName] | None = None,
        n_bins: int = 15,
        resamples: int = 1000,
        seed: int = 0,
        level: float = 0.95,
        split: str = "test",
    ) -> None:
        names = list(MEASURES if measures is None else measures)
        for name in names:
            require(name in MEASURES, f"measures must be among {', '.join(MEASURES)}, got {name!r}")
        require(isinstance(resamples, int) and resamples >= 0, f"resamples must be an integer >= 0, got {resamples}")
        require(0 < level < 1, f"level must lie in (0, 1), got {level}")
        require_choice("scaling", scaling, [AUTO, *SCALINGS])
        k = predictions.n_classes
        require(
            val is None or val.n_classes == k,
            f"val must have {k} classes as the predictions have, got {val.n_classes if val else None}",
        )

        options = {name: MEASURES[name].options(n_bins) for name in names}

        def measured(p: Predictions) -> dict[str, Interval]:
            return {name: Interval(math.nan, value, math.nan) for name, value in values_of(p, names, n_bins).items()}

        self.predictions = predictions
        self.n_bins, self.level, self.split = n_bins, level, split
        self.scaling: Scaling | None = None if val is None else fit_scaling(val, scaling, seed)
        sets = [predictions] + ([] if self.scaling is None else [self.scaling.apply(predictions)])
        of_sets = bootstrap_sets(options, sets, resamples, seed, level) if resamples else list(map(measured, sets))
        self.values: dict[str, Interval] = of_sets[0]
        self.scaled: dict[str, Interval] | None = None if self.scaling is None else of_sets[1]

    @property
    def temperature(self) -> float | None:
        return self.scaling.temperature if isinstance(self.scaling, TemperatureScaling) else None

    def to_dict(self) -> dict[str, float]:
        """Flat: `ece`, `ece_low`, `ece_high`, `ece_scaled`, `ece_scaled_low`, …, `n`, and with `val` `temperature`,
        `temperature_low`, `temperature_high`, `temperature_n` (of the fit) and `temperature_wrong` of these; of another
        map `scaling_n` and `scaling_wrong`. Fractions.
        """
        out: dict[str, float] = {"n": len(self.predictions)}
        for suffix, values in (("", self.values), ("_scaled", self.scaled or {})):
            for name, interval in values.items():
                out[name + suffix] = interval.value
                if not math.isnan(interval.low):
                    out[f"{name}{suffix}_low"] = interval.low
                    out[f"{name}{suffix}_high"] = interval.high
        if self.scaling is not None and self.scaling.report is not None:
            fit, what = self.scaling.report, "scaling"
            if isinstance(self.scaling, TemperatureScaling):
                what, (low, high) = "temperature", self.scaling.interval
                out |= {"temperature": self.scaling.temperature, "temperature_low": low, "temperature_high": high}
            out |= {f"{what}_n": fit.n, f"{what}_wrong": fit.wrong}
        return out

    def table(self) -> Table:
        """Measures as rows; value and interval, before and after scaling, as columns."""
        intervals = any(not math.isnan(v.low) for v in self.values.values())
        range_title = f"{self.level * 100:g} % interval"
        columns = [Column("value", self.split)]
        columns += [Column("interval", range_title)] if intervals else []
        if self.scaled is not None:
            t = self.temperature
            how = f"T = {t:.3f}" if t is not None else name_of(self.scaling) if self.scaling is not None else ""
            columns.append(Column("scaled", f"{self.split}, {how}"))
            columns += [Column("scaled_interval", range_title)] if intervals else []
        rows: list[tuple[str, list[Cell]]] = []
        for name in self.values:
            shown = column_of(name)
            cells: list[Cell] = []
            for values in (self.values, self.scaled):
                if values is not None:
                    low, value, high = values[name].low, values[name].value, values[name].high
                    cells.append(shown.show(value))
                    cells += [f"[{shown.show(low)}, {shown.show(high)}]"] if intervals else []
            rows.append((shown.header, cells))
        p = self.predictions
        title = f"{len(p):,} predictions over {p.n_classes} classes, {self.n_bins} bins"
        notes = []
        if self.scaling is not None:
            notes.append(self.scaling.describe())
        return Table(columns, rows, "measure", title, notes)

    def to_markdown(self) -> str:
        return self.table().render("markdown")

    def __str__(self) -> str:
        return self.table().render("text")

    def to_frame(self) -> DataFrame:
        """The measures as a pandas DataFrame: rows by name, with `title`, `value`, `low`, `high` (fractions, nats), and
        with `val` `scaled`, `scaled_low`, `scaled_high`.

        Raises:
            InputError: pandas is not installed.
        """
        columns = [Column("title"), Column("value"), *([] if self.scaled is None else [Column("scaled")])]
        rows: list[tuple[str, list[Cell]]] = []
        for name in self.values:
            intervals = [values[name] for values in (self.values, self.scaled) if values is not None]
            cells = [i.value if math.isnan(i.low) else Range(i.value, i.low, i.high) for i in intervals]
            rows.append((name, [column_of(name).title, *cells]))
        frame = Table(columns, rows, "measure").to_frame()
        return frame.rename(columns={"value_low": "low", "value_high": "high"})

    def _repr_html_(self) -> str:
        said = meaning(self.to_dict(), self.split)
        return self.table()._repr_html_() + (f"<p>{escape(said)}</p>" if said else "")

    def __rich__(self) -> Table:
        return self.table()

    def __repr__(self) -> str:
        return f"Report({len(self.predictions)} predictions, {', '.join(self.values)})"

    def reliability_diagram(self, title: str = "") -> Figure:
        """Figure of the bins behind `ece`, before scaling, with its interval (see `report.figures`)."""
        ece = self.values.get("ece")
        known = ece is not None and not math.isnan(ece.low)
        interval = (ece.low, ece.high) if ece is not None and known else None
        return reliability_diagram(self.predictions, self.n_bins, interval=interval, level=self.level, title=title)


def evaluate(
    model: Callable[[Tensor], Any],
    data: Data,
    val: Data | None = None,
    *,
    device: torch.device | str | None = None,
    ignore_index: int | None = None,
    **options: Any,
) -> Report:
    """Report on the model's predictions for `data`; see `predict` for these, `Report` for the options.

    With `val` a temperature is fitted on it, and the report gives every measure after scaling as well. A model that
    `metacal.fit` trained is given its data as there: uint8 images are normalised, inputs of another kind refused.

    Labels that are probabilities (N, K) of the classes count as the most probable class. Samples with the label
    `ignore_index` are left out.
    """
    predictions = predict(model, for_model(model, data, "data", ignore_index), device)
    held_out = None if val is None else predict(model, for_model(model, val, "val", ignore_index), device)
    return Report(predictions, held_out, **options)
