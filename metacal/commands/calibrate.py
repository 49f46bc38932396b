"""`metacal calibrate`: a post-hoc map fitted on saved predictions, before and after, and kept."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metacal.commands.words import Parser, take_scaling
from metacal.errors import require
from metacal.jsonio import to_json

if TYPE_CHECKING:
    from metacal.calibration import Choice, Scaling
    from metacal.predictions import Predictions
    from metacal.report.tables import Table

__all__ = ["calibrate_command"]


def calibrate_command(argv: Sequence[str]) -> int:
    """Run `metacal calibrate ARGV`; returns the exit status."""
    arguments = _parse(argv)

    from metacal.calibration import choose_scaling, cross_fitted, fit_scaling, save_scaling
    from metacal.calibration.choice import AUTO, name_of
    from metacal.predictions import Predictions

    val = Predictions.load(arguments.val)
    choice = choose_scaling(val, seed=arguments.seed) if arguments.method == AUTO else None
    scaling = fit_scaling(val, arguments.method) if choice is None else choice.scaling
    name = name_of(scaling)
    if arguments.test is not None:
        before = Predictions.load(arguments.test)
        after, split = scaling.apply(before), Path(arguments.test).stem
    else:
        before, split = val, Path(arguments.val).stem
        after = cross_fitted(val, name, seed=arguments.seed)
    if arguments.json:
        print(to_json(_values(name, scaling, choice, before, after, arguments)))
    else:
        _print(scaling, choice, before, after, split, arguments)
    if arguments.out is not None:
        out, kept = Path(arguments.out), _map_file(arguments.out)
        (scaling.apply(before) if arguments.test is None else after).save(out)
        save_scaling(scaling, kept)
        if not arguments.json:
            print(f"written: {out} (calibrated predictions) and {kept} (the map)")
            print(f"all measures of them: metacal evaluate {out}")
            print(f"the map in Python: metacal.calibration.load_scaling({str(kept)!r})")
    elif not arguments.json:
        print("to keep the calibrated predictions and the map: --out FILE.npz")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    from metacal.calibration.choice import AUTO, FOLDS, SCALINGS

    parser = Parser(
        prog="metacal calibrate",
        description="Fit a post-hoc map on saved validation predictions (arrays logits or probs, and labels), and say "
        f"what it does to test predictions; without these, to the same ones by {FOLDS}-fold cross-validation.",
    )
    parser.add_argument("val", metavar="VAL.npz", help="on which the map is fitted: the model was not trained on it")
    parser.add_argument("test", metavar="TEST.npz", nargs="?", help="to which it is applied")
    parser.add_argument(
        "--method", default=AUTO, help=f"{', '.join(SCALINGS)}; or auto (default): the simplest one whose "
        "cross-validated NLL is within a standard error of the least"
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE.npz", help="write the calibrated predictions there (of TEST, or of VAL "
                        "without it), and the map to FILE.map.npz")  # fmt: skip
    parser.add_argument("--n-bins", type=int, default=15, metavar="M", help="bins of the binned measures (default: 15)")
    parser.add_argument("--resamples", type=int, default=1000, metavar="B", help="behind intervals (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the folds (default: 0)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON for machines")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args(list(argv))
    take_scaling(arguments.method, "--method")
    for option, value, least in (("n-bins", arguments.n_bins, 1), ("resamples", arguments.resamples, 1),
                                 ("seed", arguments.seed, 0)):  # fmt: skip
        require(value >= least, f"--{option} must be >= {least}, got {value}")
    given = [arguments.val] + ([] if arguments.test is None else [arguments.test])
    for file in given:
        require(Path(file).is_file(), f"{file} does not exist or is no file")
    if arguments.out is not None:
        out = Path(arguments.out)
        require(out.suffix == ".npz", f"--out must end in .npz, got {arguments.out!r}")
        require(out.absolute().parent.is_dir(), f"--out: the folder {out.parent} does not exist")
        written = {out.resolve(), _map_file(arguments.out).resolve()}
        twice = next((file for file in given if Path(file).resolve() in written), None)
        require(twice is None, f"--out {arguments.out} would overwrite {twice}")
    return arguments


def _map_file(out: str) -> Path:
    return Path(out).with_suffix(".map.npz")


def _print(
    scaling: Scaling,
    choice: Choice | None,
    before: Predictions,
    after: Predictions,
    split: str,
    arguments: argparse.Namespace,
) -> None:
    from metacal.report.sections import change_table

    form = "markdown" if arguments.markdown else "text"
    if choice is not None:
        print(_choice_table(choice).render(form), end="\n\n")
    print(scaling.describe(), end="\n\n")
    print(change_table(before, after, split, arguments.n_bins, arguments.resamples).render(form))
    if arguments.test is None:
        print("After: cross-validated, each prediction by a fit that has not seen it.")


def _choice_table(choice: Choice) -> Table:
    from metacal.report.tables import Cell, Column, Table

    columns = [Column("nll", "NLL", best="min"), Column("behind", "behind the least"), Column("error", "std. error")]
    rows: list[tuple[str, Sequence[Cell]]] = [
        (name + (" (chosen)" if name == choice.name else ""), [value, *choice.behind[name]])
        for name, value in choice.nll.items()
    ]
    note = "The simplest map, from the top, that is behind by no more than its standard error."
    return Table(columns, rows, "map", "Cross-validated on the validation predictions", [note])


def _values(
    name: str,
    scaling: Scaling,
    choice: Choice | None,
    before: Predictions,
    after: Predictions,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    from metacal.calibration.measures import MEASURES, values_of

    assert scaling.report is not None
    measures = [measure for measure, record in MEASURES.items() if record.compared]
    out: dict[str, Any] = {
        "method": name,
        "fit": scaling.report._asdict(),
        "n": len(before),
        "cross_validated": arguments.test is None,
        "before": values_of(before, measures, arguments.n_bins),
        "after": values_of(after, measures, arguments.n_bins),
    }
    if choice is not None:
        out["choice"] = {
            candidate: {"nll": nll, "behind": choice.behind[candidate][0], "std_error": choice.behind[candidate][1]}
            for candidate, nll in choice.nll.items()
        }
    return out
