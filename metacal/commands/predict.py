"""`metacal predict`: a run's calibrated probabilities of new inputs, in a file."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metacal.commands.words import Parser, check_out
from metacal.errors import InputError, require

if TYPE_CHECKING:
    from torch import Tensor

    from metacal.data.reading import Inputs
    from metacal.deploy import CalibratedModel

__all__ = ["predict_command"]


def predict_command(argv: Sequence[str]) -> int:
    """Run `metacal predict ARGV`; returns the exit status."""
    arguments = _parse(argv)
    out = check_out(arguments.out, ".npz", ".csv")
    source = Path(arguments.inputs)
    require(not source.exists() or source.resolve() != out.resolve(), f"--out {out} is the file of the inputs")

    from metacal.data.reading import read_inputs
    from metacal.training.saved import load
    from metacal.training.setup import choose_device

    model = load(arguments.run, device=choose_device(arguments.device))
    inputs = read_inputs(
        source, model.kind, model.task, model.image_size, batch_size=arguments.batch_size, workers=arguments.workers
    )
    probabilities = _probabilities(model, inputs, arguments.batch_size)
    write = {".npz": _write_npz, ".csv": _write_csv}[out.suffix]
    write(out, probabilities, model.class_names, inputs)
    print(f"{inputs.count} predictions of {len(model.class_names)} classes in {out}")
    if inputs.labels is not None and out.suffix == ".npz":
        print(f"measure them: metacal evaluate {out}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="metacal predict",
        description="Write the calibrated class probabilities of new inputs. An .npz holds probs (N, K), predicted "
        "(N,), class_names, the images' names and the labels, where they are known; a .csv a line for each input: its "
        "name or number, the predicted class, its probability, the label, and p_CLASS for every class.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, or a file that `save` wrote")
    parser.add_argument(
        "inputs",
        metavar="IMAGES/|FILE.npz|FILE.npy",
        help="a folder of images; or arrays: x and, if known, y (or x_test and y_test, or one alone)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="predictions.npz or .csv; replaced if it exists")
    parser.add_argument("--batch-size", type=int, metavar="N", help="inputs at a time (default: by their size)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode images (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    arguments = parser.parse_args(list(argv))
    require(
        arguments.batch_size is None or arguments.batch_size >= 1,
        f"--batch-size must be >= 1, got {arguments.batch_size}",
    )
    require(arguments.workers >= 0, f"--workers must be >= 0, got {arguments.workers}")
    for path in (arguments.run, arguments.inputs):
        require(Path(path).exists(), f"{path} does not exist")
    return arguments


def _probabilities(model: CalibratedModel, inputs: Inputs, batch_size: int | None) -> Tensor:
    import torch

    parts = []
    with _progress(inputs.count) as advance:
        for x in inputs.batches():
            try:
                parts.append(model.predict_proba(x, batch_size).cpu())
            except InputError:
                raise
            except (RuntimeError, ValueError, IndexError) as error:
                shape = ", ".join(["N", *map(str, x.shape[1:])])
                reason = str(error).strip().splitlines()[0]
                raise InputError(f"the model cannot take inputs of shape ({shape}): {reason}") from error
            advance(len(x))
    return torch.cat(parts)


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error, to be told of so many more inputs; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("metacal predict", total=count)
        yield lambda more: bar.advance(task, more)


def _write_npz(out: Path, probabilities: Tensor, class_names: Sequence[str], inputs: Inputs) -> None:
    import numpy as np

    from metacal.files import write_atomically

    arrays: dict[str, Any] = {
        "probs": probabilities.numpy(),
        "predicted": probabilities.argmax(1).numpy(),
        "class_names": np.array(class_names),
    }
    if inputs.names is not None:
        arrays["names"] = np.array(inputs.names)
    if inputs.labels is not None:
        arrays["labels"] = inputs.labels.numpy()
    write_atomically(out, lambda file: np.savez(file, **arrays))


def _write_csv(out: Path, probabilities: Tensor, class_names: Sequence[str], inputs: Inputs) -> None:
    from metacal.files import write_atomically
    from metacal.report.tables import inert

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = [] if inputs.labels is None else ["label"]
    names = inputs.names or [str(i) for i in range(inputs.count)]
    writer.writerow(["name", "predicted", "probability", *known, *(f"p_{name}" for name in class_names)])
    top, predicted = probabilities.max(1)
    labels = predicted if inputs.labels is None else inputs.labels
    rows = zip(names, predicted.tolist(), top.numpy(), labels.tolist(), probabilities.numpy())
    for name, k, probability, label, row in rows:
        shown = [inert(class_names[label])] if known else []
        writer.writerow([inert(name), inert(class_names[k]), probability, *shown, *row])
    write_atomically(out, lambda file: file.write(text.getvalue().encode()))
