"""Accuracy and calibration under distribution shift: a model on corrupted copies of its test images.

    shift = measure_shift(model, data.test, val=predict(model, data.val batches))
    print(shift.table())                           # against severity, mean over the corruptions
    shift.tables(); shift.figure(); shift.to_dict()

The scaling is fitted on clean validation predictions: nothing of the shift is known when it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metacal.calibration.choice import fit_scaling, name_of
from metacal.calibration.fitted import Scaling
from metacal.calibration.measures import values_of
from metacal.calibration.temperature import TemperatureScaling
from metacal.data import Batches, Split, Transform
from metacal.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from metacal.errors import require, require_choice
from metacal.predict import predict
from metacal.predictions import Predictions
from metacal.report.drawing import SMALL, clean, percent
from metacal.report.tables import Cell, Column, Table, column_of, is_scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Shift", "check_conditions", "corrupted_batches", "measure_shift"]

MEASURED = ("accuracy", "nll", "ece")

Values = dict[str, float]


@dataclass(frozen=True)
class Shift:
    """Measures by corruption and severity: fractions, and nats for NLL.

    Measures are `accuracy`, `nll` and `ece`, and with a scaling `nll_scaled` and `ece_scaled`, after it.

    Attributes:
        clean: measure -> value on the images as they are.
        values: corruption -> severity -> measure -> value.
        n: images measured, the same ones throughout, of `total`.
        seed: of the choice of images and of the random corruptions.
        scaling: the map fitted on clean validation predictions; None without these.
        n_bins: of the ECE.
    """

    clean: Values
    values: dict[str, dict[int, Values]]
    n: int
    total: int
    seed: int
    scaling: Scaling | None
    n_bins: int
    split: str = "test"

    @property
    def temperature(self) -> float | None:
        """T of temperature scaling; None for another map."""
        return self.scaling.temperature if isinstance(self.scaling, TemperatureScaling) else None

    @property
    def severities(self) -> list[int]:
        return list(next(iter(self.values.values())))

    def mean(self, severity: int | None = None) -> Values:
        """Each measure's mean over the corruptions at one severity, or over all severities too."""
        cells = [
            values
            for by_severity in self.values.values()
            for s, values in by_severity.items()
            if severity is None or s == severity
        ]
        require(len(cells) > 0, f"severity must be one of {', '.join(map(str, self.severities))}, got {severity}")
        return {name: statistics.fmean(values[name] for values in cells) for name in self.clean}

    def to_dict(self) -> dict[str, Any]:
        """`clean`, `mean` (by severity, and `all`) and `corruptions` (by name and severity), with what they hold for.

        Severities are strings, as keys of JSON are.
        """
        mean = {str(s): self.mean(s) for s in self.severities}
        return {
            "split": self.split,
            "samples": self.n,
            "of": self.total,
            "seed": self.seed,
            "n_bins": self.n_bins,
            "scaling": None if self.scaling is None else name_of(self.scaling),
            "temperature": self.temperature,
            "clean": self.clean,
            "mean": {**mean, "all": self.mean()},
            "corruptions": {
                name: {str(s): values for s, values in by_severity.items()} for name, by_severity in self.values.items()
            },
        }

    def table(self) -> Table:
        """Severities as rows, measures (means over the corruptions) as columns."""
        columns = [self._column(name) for name in self.clean]
        rows: list[tuple[str, list[Cell]]] = [("clean", list(self.clean.values()))]
        rows += [(f"severity {s}", list(self.mean(s).values())) for s in self.severities]
        if len(self.severities) > 1:
            rows.append(("all severities", list(self.mean().values())))
        count = len(self.values)
        what = f"Mean over {count} corruptions" if count > 1 else f"Corruption: {next(iter(self.values))}"
        notes = [f"{what}. {self.n:,} of {self.total:,} images of {self.split}, seed {self.seed}, {self.n_bins} bins."]
        if self.scaling is not None:
            notes.append(
                f"Scaled: by {self._shown(self.scaling)}, fitted on clean validation predictions, the same for all."
            )
        return Table(columns, rows, "images", notes=notes)

    def _shown(self, scaling: Scaling) -> str:
        return name_of(scaling) if self.temperature is None else f"T = {self.temperature:.3f}"

    def tables(self) -> list[Table]:
        """For each measure the corruptions as rows and the severities as columns."""
        return [self._by_corruption(name) for name in self.clean]

    def _by_corruption(self, measure: str) -> Table:
        shown = self._column(measure)
        columns = [replace(shown, name=f"severity_{s}", title=str(s), percent=False) for s in self.severities]
        columns.append(replace(shown, name="mean", title="mean", percent=False))
        factor = 100 if shown.percent else 1  # the header of the whole table says %, not each column's

        def cells(values: list[float]) -> list[Cell]:
            return [factor * v for v in (*values, statistics.fmean(values))]

        rows = [(name, cells([values[measure] for values in of.values()])) for name, of in self.values.items()]
        rows.append(("mean", cells([self.mean(s)[measure] for s in self.severities])))
        clean = shown.show(self.clean[measure])
        return Table(columns, rows, "severity", title=f"{shown.header} (clean: {clean})")

    def _column(self, measure: str) -> Column:
        base = column_of(measure.removesuffix("_scaled"))
        title = f"Scaled {base.title}" if measure.endswith("_scaled") else base.title
        return replace(base, name=measure, title=title, best=None)

    def figure(self, title: str = "") -> Figure:
        """Accuracy, NLL and ECE against severity: a thin line for each corruption, a thick one for the mean, and for
        NLL and ECE a dashed one for the mean after scaling. Severity 0 are the clean images.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11.5, 3.9), layout="constrained")
        for ax, measure in zip(figure.subplots(1, 3), MEASURED):
            self._draw(ax, measure)
        handles, labels = figure.axes[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=SMALL)
        if title:
            figure.suptitle(title, fontsize=10.5)
        return figure

    def _draw(self, ax: Axes, measure: str) -> None:
        x = [0, *self.severities]
        for name, of in self.values.items():
            y = [self.clean[measure], *(values[measure] for values in of.values())]
            color, line = _STYLES.get(name, ("#777777", "-"))
            ax.plot(x, y, color=color, linestyle=line, linewidth=1.1, alpha=0.8, label=name.replace("_", " "))
        means = [self.clean, *(self.mean(s) for s in self.severities)]
        thick: dict[str, Any] = {"color": "#222222", "linewidth": 2.4, "marker": "o", "markersize": 4, "zorder": 4}
        ax.plot(x, [m[measure] for m in means], label="mean", **thick)
        if self.scaling is not None and (scaled := f"{measure}_scaled") in self.clean:
            label = f"mean, {self._shown(self.scaling)}"
            ax.plot(x, [m[scaled] for m in means], label=label, linestyle="--", **thick | {"markerfacecolor": "white"})
        ax.set(xlabel="severity", xticks=x, ylim=(0, 1) if measure == "accuracy" else None)
        if measure != "accuracy":
            ax.set_ylim(bottom=0)
        if column_of(measure).percent:
            percent(ax.yaxis)
        clean(ax, column_of(measure).title)


# One hue for each family (noise, blur, light, resolution), one dash for each member.
_STYLES = {
    "gaussian_noise": ("#c44e52", "-"),
    "shot_noise": ("#c44e52", "--"),
    "impulse_noise": ("#c44e52", ":"),
    "gaussian_blur": ("#4878a8", "-"),
    "defocus_blur": ("#4878a8", "--"),
    "motion_blur": ("#4878a8", ":"),
    "zoom_blur": ("#4878a8", "-."),
    "brightness": ("#dd9a3c", "-"),
    "contrast": ("#dd9a3c", "--"),
    "pixelate": ("#5a9e6f", "-"),
    "jpeg_compression": ("#5a9e6f", "--"),
}


def check_conditions(
    corruptions: Sequence[str], severities: Sequence[int], samples: int | None, prefix: str = ""
) -> None:
    """Raise `InputError` for an unknown corruption, a severity outside 1..5, an empty list, or `samples` below 1.

    `prefix` goes before the arguments' names in messages.
    """
    require(len(corruptions) > 0, f"{prefix}corruptions must name at least one, got none")
    require(len(severities) > 0, f"{prefix}severities must name at least one of 1..5, got none")
    for name in corruptions:
        require_choice(f"{prefix}corruptions", name, CORRUPTIONS)
    for severity in severities:
        require(
            isinstance(severity, int) and severity in SEVERITIES,
            f"{prefix}severities must be integers from 1 to 5, got {severity!r}",
        )
    require(samples is None or samples >= 1, f"{prefix}samples must be >= 1, got {samples}")


def measure_shift(
    model: Callable[[Tensor], Any],
    split: Split,
    val: Predictions | None = None,
    *,
    method: str = "temperature",
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    samples: int | None = None,
    seed: int = 0,
    n_bins: int = 15,
    batch_size: int | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Shift:
    """Accuracy, NLL and ECE of the model on a split of images, clean and under every corruption at every severity.

    Args:
        model: x -> logits (N, K), or (logits, features); run in evaluation mode.
        split: of uint8 images with their transform, as in `Data.test`: they are corrupted before normalisation.
        val: clean validation predictions, on which the scaling is fitted; None: no values after scaling.
        method: of scaling: a name in `metacal.calibration.SCALINGS`, or auto.
        corruptions, severities: among `CORRUPTIONS` and 1..5; repeats count once.
        samples: measure on this many images, drawn by `seed`; None: on all.
        seed: an image's corruption depends on this and on its place in the split only.
        progress: called with (corruption, severity) before each is measured.

    Raises:
        InputError: by argument; for a split whose inputs are no uint8 images; for JPEG of other than 1 or 3 channels.
    """
    corruptions, severities = list(dict.fromkeys(corruptions)), sorted(dict.fromkeys(severities))
    check_conditions(corruptions, severities, samples)
    _check_images(split, corruptions)
    scaling = None if val is None else fit_scaling(val, method)

    def measured(batches: Iterator[tuple[Tensor, ...]]) -> Values:
        p = predict(model, batches)
        values = values_of(p, MEASURED, n_bins)
        if scaling is not None:
            after = values_of(scaling.apply(p), filter(is_scaled, MEASURED), n_bins)
            values |= {f"{name}_scaled": value for name, value in after.items()}
        return values

    positions = _positions(len(split), samples, seed)
    part = _part(split, positions)
    clean = measured(Batches(part, batch_size, shuffle=False, augment=False).epoch(0))
    values: dict[str, dict[int, Values]] = {name: {} for name in corruptions}
    for name in corruptions:
        for severity in severities:
            if progress is not None:
                progress(name, severity)
            values[name][severity] = measured(
                corrupted_batches(part, name, severity, seed=seed, positions=positions, batch_size=batch_size)
            )
    return Shift(clean, values, len(part), len(split), seed, scaling, n_bins, split.name)


def corrupted_batches(
    split: Split,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    positions: Tensor | None = None,
    batch_size: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (x, y) of a split in its order, corrupted as pixels in [0, 1] of 256 levels and then normalised.

    Stored values of fewer levels (the digits' 0..16) are taken to 0..255 first, so that the corruption is not rounded
    away.

    Args:
        positions: (n,) numbers that identify the samples, for `corrupt`; None: their places in the split.
    """
    transform = split.transform
    assert transform is not None
    normalise = Transform(1 / 255, transform.mean, transform.std)
    stored = Batches(replace(split, transform=None), batch_size, shuffle=False, augment=False, with_index=True)
    for images, labels, places in stored.epoch(0):
        if transform.scale != 1 / 255:
            images = (images * (255 * transform.scale)).round_().clamp_(0, 255).to(torch.uint8)
        index = places.cpu() if positions is None else positions[places.cpu()]
        yield normalise(corrupt(images, name, severity, seed=seed, index=index)), labels


def _positions(total: int, samples: int | None, seed: int) -> Tensor:
    """The places of the samples that are measured, ascending."""
    if samples is None or samples >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:samples].sort().values


def _part(split: Split, positions: Tensor) -> Split:
    if len(positions) == len(split):
        return split
    return split.at(positions, split.name)


def _check_images(split: Split, corruptions: Sequence[str]) -> None:
    first = split.storage[0]
    first = first[0] if split.yields_labels else first
    require(
        first.dtype == torch.uint8 and first.ndim == 3 and split.transform is not None,
        f"corruptions need images with pixel values, stored as uint8 (C, H, W); those of {split.name} are "
        f"{str(first.dtype).removeprefix('torch.')} of shape {tuple(first.shape)}",
    )
    require(
        "jpeg_compression" not in corruptions or first.shape[0] in (1, 3),
        f"corruptions must leave out jpeg_compression, which needs 1 or 3 channels; the images have {first.shape[0]}",
    )
