"""`metacal evaluate`: the table of runs, from their checkpoints, or of saved predictions; their ensemble; a run under
distribution shift.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metacal.commands.words import Parser
from metacal.errors import InputError, note, require
from metacal.jsonio import to_json

if TYPE_CHECKING:
    from metacal.predictions import Predictions
    from metacal.report.report import Report

__all__ = ["evaluate_command"]


def evaluate_command(argv: Sequence[str]) -> int:
    """Run `metacal evaluate ARGV`; returns the exit status."""
    arguments = _parse(argv)
    if arguments.shift:
        return _shift(arguments, argv)
    if arguments.ensemble:
        return _ensemble(arguments)
    found = {}
    for what in arguments.what:
        report = _report(what, arguments)
        if arguments.json:
            found[what] = report.to_dict()
        else:
            print(f"{what} ({len(report.predictions)} samples)")
            print(report.to_markdown() if arguments.markdown else report)
        if arguments.figure:
            report.reliability_diagram().savefig(arguments.figure, dpi=150)
    if arguments.json:
        print(to_json(found if len(found) > 1 else next(iter(found.values()))))
    return 0


# ------------------------------------------------------------------------------------------------ the command line


def _parser() -> Parser:
    parser = Parser(
        prog="metacal evaluate",
        description="Measure runs or saved predictions: accuracy and calibration with 95 % intervals, and for "
        "runs the same after temperature scaling fitted on val. A run is measured from its checkpoint.",
    )
    parser.add_argument(
        "what", nargs="+", metavar="RUN|FILE.npz", help="run folders, or arrays logits|probs and labels"
    )
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        default="test",
        help="of a run; train: the images that it trained on, as they are (default: test)",
    )
    parser.add_argument(
        "--checkpoint", choices=("best", "last"), default="best", help="of a run: the selected epoch's, or the last's"
    )
    parser.add_argument("--n-bins", type=int, default=15, metavar="M", help="bins of the binned measures (default: 15)")
    parser.add_argument(
        "--resamples", type=int, default=None, metavar="B", help="behind the intervals (default: 1000; 0: no intervals)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON for machines: one object a RUN or FILE")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument(
        "--figure", metavar="PNG", help="also write the reliability diagram (of one RUN or FILE, or the ensemble) there"
    )
    parser.add_argument(
        "--ensemble",
        action="store_true",
        help="average the probabilities of all RUNs and FILEs, beside the members; without it each has its own table",
    )
    shift = parser.add_argument_group(
        "distribution shift", "the test images of RUN under corruptions; writes shift.json and figures/shift.png there"
    )
    shift.add_argument("--shift", action="store_true", help="accuracy, NLL and ECE against the corruptions' severity")
    shift.add_argument("--corruptions", metavar="A,B", help="only these (default: all)")
    shift.add_argument("--severities", metavar="1,3,5", help="only these (default: 1 to 5)")
    shift.add_argument("--samples", type=int, metavar="N", help="only N images, drawn by --seed (default: all)")
    shift.add_argument("--seed", type=int, metavar="S", help="of the noise and of that draw (default: 0)")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked as far as that goes without reading a run."""
    arguments = _parser().parse_args(list(argv))
    count = len(arguments.what)
    require(arguments.n_bins >= 1, f"--n-bins must be >= 1, got {arguments.n_bins}")
    require(
        arguments.resamples is None or arguments.resamples >= 0, f"--resamples must be >= 0, got {arguments.resamples}"
    )
    for name in ("corruptions", "severities", "samples", "seed"):
        given = getattr(arguments, name) is not None
        require(arguments.shift or not given, f"--{name} goes with --shift")
    if arguments.shift:
        for name, given in (
            ("--ensemble", arguments.ensemble),
            ("--figure", arguments.figure),
            ("--resamples", arguments.resamples is not None),
            (f"--split {arguments.split}", arguments.split != "test"),
        ):
            require(
                not given, f"{name} does not go with --shift, which draws its own figure of test, without intervals"
            )
        require(count == 1, f"--shift goes with one RUN, got {count}")
        _check_shift(arguments)
    require(
        not arguments.ensemble or arguments.split != "train",
        "--split train does not go with --ensemble: members may have trained on different images",
    )
    require(not arguments.ensemble or count >= 2, f"--ensemble needs at least two RUNs or FILEs, got {count}")
    if arguments.ensemble:
        places = [Path(what).resolve() for what in arguments.what]
        twice = next((what for i, what in enumerate(arguments.what) if places[i] in places[:i]), None)
        require(twice is None, f"--ensemble needs distinct members, got {twice} twice")
    require(
        not arguments.figure or count == 1 or arguments.ensemble, f"--figure goes with one RUN or FILE, got {count}"
    )
    if arguments.figure:
        suffixes = (".png", ".pdf", ".svg", ".jpg")
        require(
            Path(arguments.figure).suffix in suffixes,
            f"--figure must end in {', '.join(suffixes)}, got {arguments.figure!r}",
        )
    if arguments.resamples is None:
        arguments.resamples = 1000
    for what in arguments.what:  # all of them before any work
        require(Path(what).exists(), f"{what} does not exist")
    return arguments


def _check_shift(arguments: argparse.Namespace) -> None:
    """Parse and check what belongs to --shift."""
    from metacal.data.corruptions import CORRUPTIONS, SEVERITIES
    from metacal.report.shift import check_conditions

    names = arguments.corruptions
    arguments.corruptions = list(CORRUPTIONS) if names is None else [w.strip() for w in names.split(",") if w.strip()]
    levels: list[Any] = list(SEVERITIES)
    if arguments.severities is not None:
        words = [w.strip() for w in arguments.severities.split(",") if w.strip()]
        levels = [int(w) if w.isdecimal() else w for w in words]
    arguments.severities = levels
    arguments.seed = arguments.seed or 0
    require(arguments.seed >= 0, f"--seed must be >= 0, got {arguments.seed}")
    check_conditions(arguments.corruptions, arguments.severities, arguments.samples, prefix="--")
    run = Path(arguments.what[0])
    require(not run.is_file(), f"--shift needs a run folder, whose model it runs, got the file {run}")


# ------------------------------------------------------------------------------------------------ one table each


def _report(what: str, arguments: argparse.Namespace) -> Report:
    from metacal.predictions import Predictions
    from metacal.report.report import Report
    from metacal.training.saved import predict_run

    keys = {"n_bins": arguments.n_bins, "resamples": arguments.resamples}
    if Path(what).is_file():
        return Report(Predictions.load(what), split=Path(what).stem, **keys)
    splits = {"val", arguments.split}
    predictions = predict_run(what, arguments.device, arguments.checkpoint, splits)
    val = predictions["val"] if arguments.split != "val" else None
    return Report(predictions[arguments.split], val, split=arguments.split, **keys)


# ------------------------------------------------------------------------------------------------ ensembles


def _ensemble(arguments: argparse.Namespace) -> int:
    from metacal.report.ensemble import average
    from metacal.report.report import Report
    from metacal.report.tables import methods_table

    _require_same_data(arguments)
    loaded = {what: _member(what, arguments) for what in arguments.what}
    pooled = average({what: p for what, (p, _) in loaded.items()})
    pooled_val, why_not = _pooled_val({what: val for what, (_, val) in loaded.items()}, arguments)
    members = {
        what: Report(p, val, n_bins=arguments.n_bins, resamples=0, split=arguments.split).to_dict()
        for what, (p, val) in loaded.items()
    }
    mean = {
        name: statistics.fmean(of[name] for of in members.values())
        for name in next(iter(members.values()))
        if all(name in of for of in members.values())
    }
    report = Report(pooled, pooled_val, n_bins=arguments.n_bins, resamples=arguments.resamples, split=arguments.split)
    if arguments.figure:
        report.reliability_diagram(f"ensemble of {len(members)}").savefig(arguments.figure, dpi=150)
    if arguments.json:
        print(to_json({"members": members, "mean": mean, "ensemble": report.to_dict(), "unscaled_because": why_not}))
        return 0
    rows: dict[str, Any] = {f"member {i}": of for i, of in enumerate(members.values(), 1)}
    rows |= {"mean of members": list(members.values()), "ensemble": report.to_dict()}
    for i, what in enumerate(members, 1):
        print(f"member {i}: {what}")
    table = methods_table(rows, split=arguments.split, title=f"Ensemble of {len(members)}: mean of the probabilities")
    print(table.render("markdown" if arguments.markdown else "text"))
    if why_not:
        print(f"The ensemble is not temperature scaled: {why_not}.")
    print(f"\nensemble ({len(pooled)} samples)")
    print(report.to_markdown() if arguments.markdown else report)
    return 0


def _member(what: str, arguments: argparse.Namespace) -> tuple[Predictions, Predictions | None]:
    """A member's predictions, and those on val for a run measured on test.

    A finished run's are read from its predictions/, which hold the best checkpoint's.
    """
    from metacal.predictions import Predictions
    from metacal.runs.folder import check_run
    from metacal.training.saved import predict_run

    if Path(what).is_file():
        return Predictions.load(what), None
    folder = check_run(what)
    files = {name: folder.predictions(name) for name in ("val", "test")}
    found = None
    if arguments.checkpoint == "best" and folder.finished and all(file.is_file() for file in files.values()):
        try:
            found = {name: Predictions.load(file) for name, file in files.items()}
        except InputError as error:
            note(f"{error}; the predictions are made again from the checkpoint")
    found = found or predict_run(what, arguments.device, arguments.checkpoint)
    return found[arguments.split], found["val"] if arguments.split == "test" else None


def _pooled_val(
    vals: Mapping[str, Predictions | None], arguments: argparse.Namespace
) -> tuple[Predictions | None, str | None]:
    """The average on val, for the ensemble's temperature, or None and the reason why there is none."""
    from metacal.report.ensemble import average

    known = {what: val for what, val in vals.items() if val is not None}
    if arguments.split == "val":
        return None, "a temperature is fitted on val, which is measured here"
    if missing := [what for what in vals if what not in known]:
        return None, f"{missing[0]} has no predictions on val"
    first = next(iter(known))
    for what in known:
        if _val_split(what) != _val_split(first):
            return None, f"{what} and {first} have different val splits"
    try:
        return average(known), None
    except InputError as error:
        return None, f"on val, {error}"


def _val_split(what: str) -> tuple[Any, ...]:
    """What decides which samples are in val, beside the data themselves."""
    from metacal.runs.config import recorded_config
    from metacal.runs.folder import check_run

    config = recorded_config(check_run(what))
    d = config.data
    return config.seed if d.split_seed is None else d.split_seed, d.val_size, d.test_size


def _require_same_data(arguments: argparse.Namespace) -> None:
    """Refuse runs whose samples differ, which equal labels would not tell: by the test splits' content, where they are
    finished, and for val by what it was drawn with.
    """
    from metacal.runs.folder import check_run

    runs = [what for what in arguments.what if Path(what).is_dir()]
    folders = {what: check_run(what) for what in runs}
    known = {what: f.read_summary().get("data", {}).get("fingerprint") for what, f in folders.items() if f.finished}
    checks: list[tuple[str, Mapping[str, Any]]] = [("test", known)]
    if arguments.split == "val":
        checks.append(("val", {what: _val_split(what) for what in runs}))
    for split, marks in checks:
        for what, mark in marks.items():
            first = next(iter(marks))
            require(
                mark == marks[first],
                f"--ensemble needs members with the same {split} split: that of {what} is not that of {first}",
            )


# ------------------------------------------------------------------------------------------------ shift


def _shift(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from metacal.predict import predict
    from metacal.report.shift import measure_shift
    from metacal.runs.folder import RunFolder
    from metacal.runs.versions import versions
    from metacal.training.saved import load_run
    from metacal.training.setup import evaluation_batches

    run = Path(arguments.what[0])
    began = time.perf_counter()
    config, data, backbone = load_run(run, arguments.device, arguments.checkpoint)
    require(
        data.pixel_range is not None,
        f"--shift needs images: data={config.data.name} of {run} holds float features of shape "
        f"{tuple(data.input_shape)}, which have no pixels",
    )
    files = RunFolder(run)
    for folder in (run, files.figures):  # before the work
        require(not folder.exists() or os.access(folder, os.W_OK), f"--shift writes into {folder}, which is read-only")
    live = sys.stderr.isatty() and not arguments.json
    shift = measure_shift(
        backbone,
        data.test,
        predict(backbone, evaluation_batches(data.val).epoch(0)),
        corruptions=arguments.corruptions,
        severities=arguments.severities,
        samples=arguments.samples,
        seed=arguments.seed,
        n_bins=arguments.n_bins,
        progress=_counter(arguments) if live else lambda name, severity: None,
    )
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    minutes = (time.perf_counter() - began) / 60
    picture = files.figures / "shift.png"
    picture.parent.mkdir(exist_ok=True)
    shift.figure().savefig(picture, dpi=150)
    summary = {
        "run": str(run),
        "command": shlex.join(["metacal", "evaluate", *argv]),
        "checkpoint": arguments.checkpoint,
        "fingerprint": data.fingerprint,
        **shift.to_dict(),
        "minutes": minutes,
        "versions": versions(),
    }
    files.write_shift(summary)
    if arguments.json:
        print(to_json(summary))
        return 0
    form = "markdown" if arguments.markdown else "text"
    tables = [shift.table(), *(shift.tables() if len(shift.values) > 1 else [])]
    print(run)
    print("\n\n".join(table.render(form) for table in tables))
    print(f"\nwrote {files.shift} and {picture} in {minutes:.1f} minutes")
    return 0


def _counter(arguments: argparse.Namespace) -> Callable[[str, int], None]:
    """Shows on one line of a terminal how many corruptions have begun."""
    count, total = 0, len(set(arguments.corruptions)) * len(set(arguments.severities))

    def progress(name: str, severity: int) -> None:
        nonlocal count
        count += 1
        print(f"\r\033[K{count}/{total} {name} {severity}", end="", file=sys.stderr, flush=True)

    return progress
