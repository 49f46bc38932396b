"""The training curves of a comparison as TensorBoard event folders: of each group the mean over seeds, with a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metacal.errors import require
from metacal.report.run_figures import CURVES, over_seeds
from metacal.report.verdict import verdict

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from metacal.report.comparison import RunComparison

__all__ = ["check_empty", "write_seed_curves"]


def check_empty(folder: Path) -> None:
    """Raise `InputError` unless `folder` is new or empty: TensorBoard would mix what lies there with the new curves."""
    require(not folder.exists() or folder.is_dir(), f"--tensorboard must name a folder, {folder} is a file")
    require(
        not folder.exists() or not any(folder.iterdir()),
        f"--tensorboard needs a folder that is new or empty, {folder} holds files",
    )


def write_seed_curves(result: RunComparison, folder: Path) -> list[Path]:
    """Write a folder for each group, and return them.

    Every series that all seeds of the group logged is there as its mean, under its own tag, those of val also over
    epochs (``by_epoch/…``), and the custom-scalars tab has those of `CURVES` with a band from the least to the largest
    seed. In Text are the table with its verdict, and the runs. Files of predictions have no curves and are left out.

    Raises:
        InputError: `folder` holds files.
    """
    from torch.utils.tensorboard import SummaryWriter  # about a second to import

    check_empty(folder)
    text = f"{result.table('none').render('markdown')}\n\n{verdict(result)}"
    places: list[Path] = []
    for group in (g for g in result.groups if not g.runs[0].is_file):
        name = _safe(group.short)
        place = folder / (name if folder / name not in places else f"{name} {len(places)}")
        with SummaryWriter(str(place)) as writer:
            names = sorted(set.intersection(*(set(run.series) for run in group.runs)))
            values: dict[int, dict[str, float]] = {}
            for name in (n for n in names if not n.endswith("/epoch")):
                _gather(values, name, *over_seeds(group.runs, name), group.runs[0].series.get("val/epoch", {}))
            _write(writer, values)
            writer.add_custom_scalars(_layout([n for n in CURVES if n in names]))
            writer.add_text("comparison", text)
            writer.add_text("runs", "\n".join(f"- {run.path}" for run in group.runs))
        places.append(place)
    return places


def _gather(
    into: dict[int, dict[str, float]],
    name: str,
    steps: Sequence[int],
    values: NDArray[np.float64],
    epochs: Mapping[int, float],
) -> None:
    """Step -> tag -> the mean over seeds, and for the curves that have a chart the least and the largest seed.

    epochs: step -> epochs done at a validation.
    """
    lines = {name: values.mean(0)}
    if name in CURVES:
        low, high = _band(name)
        lines |= {low: values.min(0), high: values.max(0)}
    for tag, line in lines.items():
        for step, value in zip(steps, line.tolist()):
            into.setdefault(step, {})[tag] = value
            if tag == name in CURVES and name.startswith("val/") and step in epochs:
                into.setdefault(int(epochs[step]), {})[f"by_epoch/{name.replace('/', '_')}"] = value


def _write(writer: SummaryWriter, values: Mapping[int, Mapping[str, float]]) -> None:
    """One event for each step, with all its tags: an event for each value takes ten times as long."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    assert writer.file_writer is not None  # until it is closed
    for step, of_tags in sorted(values.items()):
        said = [Summary.Value(tag=tag, simple_value=value) for tag, value in of_tags.items()]
        writer.file_writer.add_summary(Summary(value=said), step)


def _band(name: str) -> tuple[str, str]:
    flat = name.replace("/", "_")
    return f"seeds_low/{flat}", f"seeds_high/{flat}"


def _layout(names: Sequence[str]) -> Mapping[str, Mapping[str, tuple[str, list[str]]]]:
    """A chart with a band for each curve."""
    return {"mean and range over seeds": {CURVES[name]: ("Margin", [name, *_band(name)]) for name in names}}


def _safe(name: str) -> str:
    """A label as a folder's name."""
    return "".join(c if c.isalnum() or c in "._=,- " else "_" for c in name)
