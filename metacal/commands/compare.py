"""`metacal compare`: runs side by side over seeds, with tests, as a table for the terminal, papers or a browser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from metacal.commands.words import Parser
from metacal.errors import require, require_packages
from metacal.jsonio import to_json

if TYPE_CHECKING:
    from metacal.report.comparison import RunComparison

__all__ = ["compare_command"]

_SUFFIXES = {"markdown": (".md", ".markdown"), "csv": (".csv",), "latex": (".tex",), "json": (".json",)}


def compare_command(argv: Sequence[str]) -> int:
    """Run `metacal compare ARGV`; returns the exit status."""
    arguments = _parser().parse_args(_with_paths(argv))
    files, to_stdout, curves = _destinations(arguments)

    from metacal.report.judge import judge_groups
    from metacal.runs.record import find_runs, group_runs, load_runs

    runs, left_out = load_runs(find_runs(arguments.runs))
    runs = [replace(run, epoch=arguments.epoch) for run in runs]
    measures = [name.strip() for name in arguments.measures.split(",")] if arguments.measures else None
    result = judge_groups(
        group_runs(runs),
        split=arguments.split,
        measures=measures,
        scaling=arguments.scaling,
        baseline=arguments.baseline,
        sort=arguments.sort,
        n_bins=arguments.n_bins,
        resamples=arguments.resamples,
        alpha=arguments.alpha,
        left_out=left_out,
    )
    command = shlex.join(["metacal", "compare", *argv])
    for form, file in files.items():
        file.write_text(_text(result, form, command), encoding="utf-8")
    if curves is not None:
        from metacal.report.seed_curves import write_seed_curves

        write_seed_curves(result, curves)
    if to_stdout is not None:
        print(_text(result, to_stdout, command).rstrip("\n"))
        return 0
    _print(result)
    for file in files.values():
        print(f"written: {file}")
    if curves is not None:
        print(f"curves: {shlex.join(['tensorboard', '--logdir', str(curves)])}")
    return 0


def _destinations(arguments: argparse.Namespace) -> tuple[dict[str, Path], str | None, Path | None]:
    """The file of each format that is written to one, the format that is printed, and the folder of the curves.

    Raises:
        InputError: what cannot be written there: before the work, not after it.
    """
    paths = {form: getattr(arguments, form) for form in _SUFFIXES}
    to_stdout = [form for form, path in paths.items() if path == "-"]
    require(
        len(to_stdout) <= 1,
        f"only one format can go to standard output, got --{' --'.join(to_stdout)}; give the others a file",
    )
    files = {form: Path(path) for form, path in (*paths.items(), ("html", arguments.html)) if path not in (None, "-")}
    for form, file in files.items():
        require(not file.is_dir(), f"--{form} must name a file, {file} is a folder")
        require(file.parent.is_dir(), f"--{form}: the folder {file.parent} does not exist")
    curves = None if arguments.tensorboard is None else Path(arguments.tensorboard)
    if curves is not None:
        from metacal.report.seed_curves import check_empty

        require_packages("metacal compare --tensorboard", "tensorboard")
        check_empty(curves)
    return files, to_stdout[0] if to_stdout else None, curves


def _print(result: RunComparison) -> None:
    """The tables, drawn where there is a terminal, and the verdict."""
    from rich.console import Console

    from metacal.report.verdict import verdict

    console = Console()
    tables = [result.table("folders")] + ([result.difference_table()] if result.baseline is not None else [])
    for i, table in enumerate(tables):
        if i:
            print()
        if console.is_terminal:
            console.print(table)
        else:  # a pipe has no bold: plain text marks with a star
            print(table)
    if said := verdict(result):
        console.print(f"\nVerdict: {said}", highlight=False, soft_wrap=True, markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="metacal compare",
        allow_abbrev=False,
        description="Compare finished runs. Runs that differ only by seed become one row: mean and standard deviation "
        "of every measure, before and after temperature scaling; bold are the best and all that do not differ from it "
        "significantly (paired over seeds and test samples). Values come from each run's saved predictions.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, folders that hold such, globs, "
                        "or files of predictions, TEST.npz or TEST.npz:VAL.npz")  # fmt: skip
    parser.add_argument("--baseline", action="append", default=[], metavar="KEY=VALUE", help="also give differences "
                        "from this group, such as method=cross_entropy; repeat it until one group fits")  # fmt: skip
    parser.add_argument("--sort", metavar="COLUMN", help="a measure, minutes or step_cost: the best first")
    parser.add_argument("--measures", metavar="A,B,...", help="which, by their names in metacal.calibration "
                        "(default: accuracy, the proper scores and the usual calibration errors)")  # fmt: skip
    parser.add_argument("--split", choices=("test", "val"), default="test", help="default: test")
    parser.add_argument("--epoch", choices=("selected", "last"), default="selected", help="whose predictions: the one "
                        "that each run selected by val, or its last (default: selected)")  # fmt: skip
    parser.add_argument("--scaling", default="both", metavar="METHOD,...", help="none, temperature (the run's own), "
                        "or another map, fitted here on its val predictions (`metacal calibrate --help` lists them); "
                        "default: both, which is none,temperature")  # fmt: skip
    parser.add_argument("--n-bins", type=int, default=15, metavar="M", help="bins of the binned measures (default: 15)")
    parser.add_argument("--resamples", type=int, default=128, metavar="B", help="behind the tests (default: 128)")
    parser.add_argument("--alpha", type=float, default=0.05, metavar="A", help="level of the tests (default: 0.05)")
    kinds = (("markdown", "Markdown"), ("csv", "CSV, fractions in full precision"), ("latex", "LaTeX (booktabs)"),
             ("json", "JSON with every value, test and run"))  # fmt: skip
    for form, name in kinds:
        ending = " or ".join(_SUFFIXES[form])
        parser.add_argument(f"--{form}", nargs="?", const="-", metavar="FILE", help=f"{name}: printed, or written to "
                            f"FILE (*{ending})")  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="one self-contained page with tables and figures")
    parser.add_argument("--tensorboard", metavar="DIR", help="event folders of the training curves: each row's mean "
                        "over seeds, with a band from the least to the largest")  # fmt: skip
    return parser


def _with_paths(argv: Sequence[str]) -> list[str]:
    """`--markdown RUN` prints: only a word with the format's ending is taken for the file to write.

    Raises:
        InputError: the word after it names neither runs nor such a file.
    """
    words = []
    for i, word in enumerate(argv):
        form = word.removeprefix("--")
        if word.startswith("--") and form in _SUFFIXES:
            following = argv[i + 1] if i + 1 < len(argv) else ""
            other = Path(following).suffix and not following.startswith("-") and not any(c in following for c in "*?[")
            require(
                following.endswith(_SUFFIXES[form]) or not other or Path(following).exists(),
                f"{word} writes to a file that ends in {' or '.join(_SUFFIXES[form])}, or prints where runs follow; "
                f"{following} is neither",
            )
            words.append(word if following.endswith(_SUFFIXES[form]) else f"{word}=-")
        else:
            words.append(word)
    return words


def _text(result: RunComparison, form: str, command: str) -> str:
    if form == "json":
        return to_json({"command": command, **result.to_dict()}) + "\n"
    if form == "html":
        from metacal.report.html import comparison_page

        return comparison_page(result, command=command)
    if form == "csv":
        return result.table(csv=True).render("csv")
    tables = [result.table("none" if form == "markdown" else "runs")]
    tables += [result.difference_table()] if result.baseline is not None else []
    tables += [result.runs_table()] if form == "markdown" else []
    from metacal.report.verdict import verdict

    lines = [*([f"Verdict: {said}"] if (said := verdict(result)) else []), f"Made by `{command}`."]
    if form == "latex":
        lines = [f"% {line.replace('`', '').rstrip('.')}" for line in lines]
    return "\n\n".join([*(table.render(form) for table in tables), *lines]) + "\n"
