"""`metacal evaluate` beyond the table of measures: prediction sets, another data set, groups of samples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metacal.errors import InputError, require

if TYPE_CHECKING:
    import numpy as np

    from metacal.predictions import Predictions
    from metacal.report.report import Report
    from metacal.report.tables import Table
    from metacal.training.saved import SavedRun

__all__ = ["Evaluated", "averaged", "check_sections", "sections"]


class Evaluated(NamedTuple):
    """What is measured: its predictions and those on val, if there are, and the run that made them; None of a file."""

    predictions: Predictions
    val: Predictions | None
    split: str
    run: SavedRun | None

    def report(self, arguments: argparse.Namespace) -> Report:
        from metacal.report.report import Report

        keys = {"n_bins": arguments.n_bins, "resamples": arguments.resamples, "scaling": arguments.scaling}
        return Report(self.predictions, self.val, split=self.split, **keys)


def check_sections(arguments: argparse.Namespace) -> None:
    """What can be checked before anything is read."""
    files = [what for what in arguments.what if Path(what).is_file()]
    for option, value in (("--val", arguments.val), ("--conformal", arguments.conformal), ("--ood", arguments.ood),
                          ("--by", arguments.by), ("--posterior", arguments.posterior)):  # fmt: skip
        other = "--shift" if arguments.shift else "--ensemble" if arguments.ensemble else None
        require(value is None or other is None, f"{option} does not go with {other}")
    if arguments.val is not None:
        require(len(files) == len(arguments.what) == 1, "--val goes with one FILE: a run has its own val split")
        require(Path(arguments.val).is_file(), f"--val: {arguments.val} does not exist")
    require(arguments.posterior is None or not files, f"--posterior needs a run, whose model it runs, not {files[:1]}")
    require(
        arguments.posterior is None or arguments.ood is None,
        "--posterior does not go with --ood, whose scores are those of one network",
    )
    require(
        arguments.posterior != "laplace" or arguments.split == "test",
        "--posterior laplace goes with --split test: its prior is fitted on val",
    )
    require(
        arguments.posterior is None or arguments.split != "train",
        "--posterior goes with --split test or val, got --split train",
    )
    require(
        arguments.posterior != "laplace" or arguments.conformal is None,
        "--conformal does not go with --posterior laplace, whose prior is fitted on the same val",
    )
    no_val = arguments.val is None and files
    if arguments.scaling != "temperature":
        require(
            not (arguments.ensemble and files),
            f"--scaling of an ensemble is fitted on its members' val predictions, which {files[:1]} does not have",
        )
        require(not no_val, f"--scaling of a file needs --val FILE.npz, on which it is fitted: {files[:1]}")
        require(arguments.split == "test", "--scaling goes with --split test: it is fitted on val")
    if arguments.conformal is not None:
        require(0 < arguments.conformal < 1, f"--conformal must lie in (0, 1), got {arguments.conformal}")
        require(not no_val, f"--conformal of a file needs --val FILE.npz, on which the sets are fitted: {files[:1]}")
        require(arguments.split == "test", "--conformal goes with --split test: the sets are fitted on val")
    if arguments.by not in (None, "class"):
        require(Path(arguments.by).is_file(), f"--by must be class or a file of groups, {arguments.by} does not exist")
    if arguments.ood is not None:
        _check_ood(arguments.ood, files)


def _check_ood(other: str, files: list[str]) -> None:
    from metacal.data.sources import IMAGE_FILES, SOURCES

    if other.endswith(".npz"):
        require(Path(other).is_file(), f"--ood: {other} does not exist")
        return
    names = [name for name in SOURCES if name not in ("npz", *IMAGE_FILES)]
    require(other in names, f"--ood must be a file *.npz or one of {', '.join(names)}, got {other!r}")
    require(not files, f"--ood {other} needs a run, whose model it is given; {files[:1]} is a file of predictions")


def sections(evaluated: Evaluated, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Table]]:
    """The values for JSON and the tables of what is asked for beside the measures."""
    from metacal.calibration.novelty import novelty
    from metacal.report.sections import conformal_sets, conformal_table, group_measures, group_table, ood_table

    values: dict[str, Any] = {}
    tables = []
    p, val = evaluated.predictions, evaluated.val
    if arguments.conformal is not None and val is not None:
        sets = conformal_sets(val, p, arguments.conformal)
        values["conformal"] = {"alpha": arguments.conformal, **{name: c._asdict() for name, c in sets.items()}}
        tables.append(conformal_table(sets, arguments.conformal, len(val)))
    if arguments.ood is not None:
        other = _other_predictions(arguments.ood, evaluated)
        scores = novelty(p, other)
        values["ood"] = {"data": arguments.ood, "n": len(other), **{name: s._asdict() for name, s in scores.items()}}
        tables.append(ood_table(scores, p, other, arguments.ood))
    if arguments.by is not None:
        by_class = arguments.by == "class"
        groups = p.labels.cpu().numpy() if by_class else _groups(arguments.by)
        names = evaluated.run.data.class_names if by_class and evaluated.run is not None else None
        measured = group_measures(p, groups, arguments.n_bins, names)
        values["by"] = measured
        tables.append(group_table(measured, "class" if by_class else Path(arguments.by).stem))
    return values, tables


def averaged(run: SavedRun, posterior: str) -> dict[str, Predictions]:
    """Predictions of val and test, averaged over a posterior of the weights."""
    from metacal.posterior import LastLayerLaplace, dropout_predictions, outputs_of
    from metacal.predictions import Predictions
    from metacal.training.setup import evaluation_batches

    data, backbone = run.data, run.backbone
    if posterior == "dropout":
        return {
            split.name: dropout_predictions(backbone, evaluation_batches(split).epoch(0))
            for split in (data.val, data.test)
        }
    train, val, test = (
        outputs_of(backbone, evaluation_batches(split).epoch(0)) for split in (data.train, data.val, data.test)
    )
    laplace = LastLayerLaplace().fit(train.features, train.logits).choose(val.features, val.logits, val.labels)
    return {
        name: Predictions.from_probabilities(laplace.probabilities(out.features, out.logits), out.labels)
        for name, out in (("val", val), ("test", test))
    }


def _groups(file: str) -> np.ndarray:
    import numpy as np

    try:
        groups = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"--by: {file} must be an npy file of integers or strings: {error}") from None
    require(isinstance(groups, np.ndarray), f"--by: {file} must hold one array, got several")
    return groups


def _other_predictions(other: str, evaluated: Evaluated) -> Predictions:
    """The run's predictions of another data set, which may be given as predictions already."""
    import numpy as np

    from metacal.predictions import Predictions

    if other.endswith(".npz"):
        try:
            with np.load(other, allow_pickle=False) as file:
                inputs = file["x"] if "x" in file.files else None
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"--ood: {other} must be an npz file: {error}") from None
        if inputs is None:
            return Predictions.load(other)
        require(evaluated.run is not None, f"--ood: {other} holds inputs x, which need a run; give predictions")
        return _predicted(inputs, evaluated)
    from metacal.data.sources import read_source

    source = read_source(other, None, False, None)
    inputs = source.inputs if source.test_inputs is None else source.test_inputs
    return _predicted(inputs.load(0), evaluated)


def _predicted(inputs: Any, evaluated: Evaluated) -> Predictions:
    """Predictions of inputs as the run takes them, with labels that mean nothing."""
    import torch

    from metacal.deploy import of_run
    from metacal.predict import predict

    assert evaluated.run is not None
    config, data, backbone = evaluated.run
    x = torch.as_tensor(inputs)
    return predict(of_run(config, data, backbone, 1.0), (x, torch.zeros(len(x), dtype=torch.int64)))
