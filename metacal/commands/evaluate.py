"""`metacal evaluate`: the table of runs, from their checkpoints, or of saved predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from metacal.commands.ensembles import evaluate_ensemble
from metacal.commands.sections import Evaluated, averaged, check_sections, sections
from metacal.commands.shifts import check_shift, evaluate_shift
from metacal.commands.words import Parser, take_scaling
from metacal.errors import require
from metacal.jsonio import to_json

__all__ = ["evaluate_command"]


def evaluate_command(argv: Sequence[str]) -> int:
    """Run `metacal evaluate ARGV`; returns the exit status."""
    arguments = _parse(argv)
    if arguments.shift:
        return evaluate_shift(arguments, argv)
    if arguments.ensemble:
        return evaluate_ensemble(arguments)
    measured = {}
    for what in arguments.what:
        evaluated = _evaluated(what, arguments)
        report = evaluated.report(arguments)
        values, tables = sections(evaluated, arguments)
        if arguments.json:
            measured[what] = report.to_dict() | values
        else:
            form = "markdown" if arguments.markdown else "text"
            print(f"{what} ({len(report.predictions)} samples)")
            print("\n\n".join(table.render(form) for table in [report.table(), *tables]))
        if arguments.figure:
            report.reliability_diagram().savefig(arguments.figure, dpi=150)
    if arguments.json:
        print(to_json(measured if len(measured) > 1 else next(iter(measured.values()))))
    return 0


# ------------------------------------------------------------------------------------------------ the command line


def _parser() -> Parser:
    parser = Parser(
        prog="metacal evaluate",
        description="Measure runs or saved predictions: accuracy and calibration with 95 % intervals, and for "
        "runs the same after scaling fitted on val. A run is measured from its checkpoint.",
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
    parser.add_argument(
        "--scaling",
        default="temperature",
        metavar="METHOD",
        help="temperature (default), vector, auto, ...: the map fitted on val; `metacal calibrate --help` lists them",
    )
    parser.add_argument("--val", metavar="FILE.npz", help="validation predictions of a FILE, for its scaling and sets")
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
    parser.add_argument(
        "--posterior",
        choices=("laplace", "dropout"),
        help="of a run: average over the last layer's Laplace "
        "approximation, whose prior is fitted on val, or over 30 passes with Dropout",
    )
    _add_tables(parser)
    return parser


def _add_tables(parser: Parser) -> None:
    """What is measured beside the one table."""
    more = parser.add_argument_group("more tables")
    more.add_argument("--conformal", type=float, metavar="A", help="prediction sets that miss a share A of the labels")
    more.add_argument(
        "--ood",
        metavar="DATA|FILE.npz",
        help="tell the samples from those of another data set, such as fashion_mnist, or of a file of predictions, or "
        "of inputs x",
    )
    more.add_argument("--by", metavar="class|FILE.npy", help="the same by class, or by a group of each sample")
    shift = parser.add_argument_group(
        "distribution shift", "the test images of RUN under corruptions; writes shift.json and figures/shift.png there"
    )
    shift.add_argument("--shift", action="store_true", help="accuracy, NLL and ECE against the corruptions' severity")
    shift.add_argument("--corruptions", metavar="A,B", help="only these (default: all)")
    shift.add_argument("--severities", metavar="1,3,5", help="only these (default: 1 to 5)")
    shift.add_argument("--samples", type=int, metavar="N", help="only N images, drawn by --seed (default: all)")
    shift.add_argument("--seed", type=int, metavar="S", help="of the noise and of that draw (default: 0)")


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
        check_shift(arguments)
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
    take_scaling(arguments.scaling)
    check_sections(arguments)
    for what in arguments.what:  # all of them before any work
        require(Path(what).exists(), f"{what} does not exist")
    return arguments


# ------------------------------------------------------------------------------------------------ one table each


def _evaluated(what: str, arguments: argparse.Namespace) -> Evaluated:
    from metacal.predict import predict
    from metacal.predictions import Predictions
    from metacal.training.saved import load_run
    from metacal.training.setup import evaluation_batches

    if Path(what).is_file():
        val = None if arguments.val is None else Predictions.load(arguments.val)
        return Evaluated(Predictions.load(what), val, Path(what).stem, None)
    run = load_run(what, arguments.device, arguments.checkpoint)
    if arguments.posterior is not None:
        predictions = averaged(run, arguments.posterior)
    else:
        splits = {"val": run.data.val, arguments.split: getattr(run.data, arguments.split)}
        predictions = {name: predict(run.backbone, evaluation_batches(s).epoch(0)) for name, s in splits.items()}
    val = None if arguments.split == "val" else predictions["val"]
    return Evaluated(predictions[arguments.split], val, arguments.split, run)
