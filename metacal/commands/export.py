"""`metacal export`: a run's calibrated network as a file for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from metacal.commands.words import Parser, check_out
from metacal.errors import require, require_choice

__all__ = ["export_command"]

USES: dict[str, str] = {
    "torch-export": "torch.export.load({out!r}).module()(x) gives probabilities; x as the run's data has it",
    "onnx": "onnxruntime.InferenceSession({out!r}) gives probabilities; inputs as the run's data has them",
    "state_dict": "torch.load({out!r}) gives the weights, and the numbers of the normalisation and the map",
}
"""What opens a file of each format."""


def export_command(argv: Sequence[str]) -> int:
    """Run `metacal export ARGV`; returns the exit status."""
    parser = Parser(
        prog="metacal export",
        description="Write the calibrated network, from raw inputs to probabilities, normalisation and temperature "
        "inside, for batches of any size. What is written has given the network's probabilities on random inputs.",
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, or a file that `save` wrote")
    parser.add_argument(
        "--format", required=True, metavar="FORMAT", help="torch-export, onnx, or state_dict (weights and numbers)"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="replaced if it exists")
    arguments = parser.parse_args(list(argv))
    require(Path(arguments.run).exists(), f"{arguments.run} does not exist")
    out = check_out(arguments.out)

    from metacal.export import FORMATS
    from metacal.training.saved import load

    require_choice("--format", arguments.format, FORMATS)
    load(arguments.run).export(out, arguments.format)
    print(f"{arguments.format} of {arguments.run} in {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    if use := USES.get(arguments.format):
        print(f"use it: {use.format(out=str(out))}")
    return 0
