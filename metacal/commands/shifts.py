"""`metacal evaluate --shift`: a run on corrupted copies of its test images."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from metacal.errors import require
from metacal.jsonio import to_json

__all__ = ["check_shift", "evaluate_shift"]


def check_shift(arguments: argparse.Namespace) -> None:
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


def evaluate_shift(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
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
        method=arguments.scaling,
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
