"""The `metacal` command. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from metacal import __version__
from metacal.errors import InputError, RunError, did_you_mean, missing_package, require_packages

__all__ = ["main"]

COMMANDS = (
    "train",
    "show",
    "evaluate",
    "predict",
    "export",
    "calibrate",
    "compare",
    "sweep",
    "study",
    "curvature",
    "list",
)
TRAINING = ("train", "sweep", "study")

USAGE = """metacal: train calibrated classifiers and measure how true their confidence is.

usage: metacal COMMAND ...

commands:
  train [group=name ...] [key=value ...]   train one run; -m for a grid of them; --help lists all groups and keys
  show RUN ...                             what a run is, where it stands, its scores and files, how to go on
  evaluate RUN ... | FILE.npz ... [--json] measure runs (from their checkpoint) or saved predictions
  evaluate RUN ... --ensemble | RUN --shift  the mean of several runs' probabilities; a run on corrupted images
  predict RUN IMAGES/|FILE.npz --out FILE  calibrated probabilities of new inputs, as .npz or .csv
  export RUN --format F --out FILE         the calibrated network for other programs: torch-export, onnx, state_dict
  calibrate VAL.npz [TEST.npz]             fit a post-hoc map on saved predictions, and what it does to others
  compare RUNS ...                         one table of runs over seeds: what differs, and whether it is significant
  sweep key=a,b,c ... [jobs=N]             a grid of runs on this machine, several at a time
  study NAME [variant=...] [key=value ...] run what a study's grid misses and write its report
  curvature RUN                            sharpness and traces of every checkpoint of a run
  list KIND                                methods, models, optimizers, data, studies or measures, with a line each

options:
  -h, --help     this text; `metacal COMMAND --help` tells more
  --version      the version

exit status: 0 done, 1 the run had to stop, 2 bad input, 130 interrupted (what was done is saved)

examples:
  metacal train                                     the full objective on the bundled digits
  metacal train baselines=[cross_entropy,focal]     ... and two baselines on the same splits
  metacal train data=npz data.path=cifar10.npz model=resnet20 optimizer.lr=0.1 epochs=100 seed=1
  metacal sweep method=cross_entropy,focal,metacal seed=0,1,2 jobs=2
  metacal evaluate runs/default/metacal/seed0
  metacal predict runs/default/metacal/seed0 new_images/ --out predictions.csv
  metacal compare runs/default --baseline method=cross_entropy --sort ece --html report.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if argv[0] == "--version":
        print(f"metacal {__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            near = did_you_mean(argv[0], COMMANDS)
            raise InputError(f"unknown command {argv[0]!r}{near}; commands are {', '.join(COMMANDS)}")
        if argv[0] in TRAINING:  # before any work: figures are drawn when a run ends
            require_packages(f"metacal {argv[0]}", "hydra", "rich", "tensorboard", "matplotlib")
        module = importlib.import_module(f"metacal.commands.{argv[0]}")
        with warnings.catch_warnings():
            warnings.showwarning = _show
            return getattr(module, f"{argv[0]}_command")(argv[1:])
    except InputError as error:
        print(f"metacal: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"metacal: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("metacal: interrupted", file=sys.stderr)
        return 130
    except (ImportError, MemoryError) as error:
        missing = missing_package(f"metacal {argv[0]}", error) if isinstance(error, ImportError) else None
        print(f"metacal: {missing or _shortage(error)}", file=sys.stderr)
        return 2 if missing else 1
    except BrokenPipeError:  # the reader of our output has gone (`metacal … | head`)
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, an unwritable file
        where = f"{error.filename}: " if error.filename else ""
        print(f"metacal: {where}{error.strerror or error}", file=sys.stderr)
        return 1


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings of this package as one line; others as Python prints them."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        print(f"metacal: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno), end="", file=sys.stderr)


def _shortage(error: ImportError | MemoryError) -> str:
    """What could not be loaded, and the limit on this process's memory where it has one: libraries fail by it."""
    reason = f"{error}" if isinstance(error, ImportError) else "out of memory"
    try:
        import resource
    except ImportError:  # no such limits on this system
        return reason
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return reason
    return f"{reason}; this process may use {limit / 2**30:.1f} GiB of addresses (ulimit -v), which is not enough"


if __name__ == "__main__":
    raise SystemExit(main())
