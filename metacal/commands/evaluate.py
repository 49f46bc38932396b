"""`metacal evaluate`: the table of runs, from their checkpoints, or of saved predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from metacal.errors import InputError, require
from metacal.jsonio import to_json

if TYPE_CHECKING:
    from metacal.report.report import Report

__all__ = ["Parser", "evaluate_command"]


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, like every other bad input's."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def evaluate_command(argv: Sequence[str]) -> int:
    """Run `metacal evaluate ARGV`; returns the exit status."""
    parser = Parser(
        prog="metacal evaluate",
        description="Measure runs or saved predictions: accuracy and calibration with 95 % intervals, and for "
        "runs the same after temperature scaling fitted on val. A run is measured from its checkpoint.",
    )
    parser.add_argument(
        "what", nargs="+", metavar="RUN|FILE.npz", help="run folders, or arrays logits|probs and labels"
    )
    parser.add_argument("--split", choices=("val", "test"), default="test", help="of a run (default: test)")
    parser.add_argument(
        "--checkpoint", choices=("best", "last"), default="best", help="of a run: least val NLL, or the last epoch's"
    )
    parser.add_argument("--n-bins", type=int, default=15, metavar="M", help="bins of the binned measures (default: 15)")
    parser.add_argument(
        "--resamples", type=int, default=1000, metavar="B", help="behind the intervals (default: 1000; 0: no intervals)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON for machines: one object a RUN or FILE")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--figure", metavar="PNG", help="also write the reliability diagram (of one RUN or FILE) there")
    arguments = parser.parse_args(list(argv))
    require(arguments.n_bins >= 1, f"--n-bins must be >= 1, got {arguments.n_bins}")
    require(arguments.resamples >= 0, f"--resamples must be >= 0, got {arguments.resamples}")
    require(
        not arguments.figure or len(arguments.what) == 1,
        f"--figure goes with one RUN or FILE, got {len(arguments.what)}",
    )
    if arguments.figure:
        suffixes = (".png", ".pdf", ".svg", ".jpg")
        require(
            Path(arguments.figure).suffix in suffixes,
            f"--figure must end in {', '.join(suffixes)}, got {arguments.figure!r}",
        )
    for what in arguments.what:  # all of them before any work
        require(Path(what).exists(), f"{what} does not exist")
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


def _report(what: str, arguments: argparse.Namespace) -> Report:
    from metacal.predictions import Predictions
    from metacal.report.report import Report
    from metacal.training.saved import predict_run

    keys = {"n_bins": arguments.n_bins, "resamples": arguments.resamples}
    if Path(what).is_file():
        return Report(Predictions.load(what), split=Path(what).stem, **keys)
    predictions = predict_run(what, arguments.device, arguments.checkpoint)
    val = predictions["val"] if arguments.split == "test" else None
    return Report(predictions[arguments.split], val, split=arguments.split, **keys)
