"""`metacal curvature`: sharpness and traces of every checkpoint of a run, measured afterwards."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from metacal.commands.words import Parser
from metacal.errors import InputError, note, require
from metacal.jsonio import to_json

if TYPE_CHECKING:
    from torch import Tensor

    from metacal.config import Config
    from metacal.curvature.loss import LogitLoss
    from metacal.data import Data
    from metacal.models import Backbone
    from metacal.report.tables import Table
    from metacal.runs.folder import RunFolder

__all__ = ["curvature_command"]


def curvature_command(argv: Sequence[str]) -> int:
    """Run `metacal curvature ARGV`; returns the exit status."""
    arguments = _parse(argv)

    from metacal.config.parts import learns
    from metacal.runs.config import recorded_config
    from metacal.runs.folder import check_run
    from metacal.training.setup import build_backbone, choose_device, curvature_loss, fixed_subset, prepare_data

    folder = check_run(arguments.run)
    states = _whole_checkpoints(folder)
    config = recorded_config(folder, states[-1].state)
    device = choose_device(arguments.device)
    data = prepare_data(config, device)
    backbone = build_backbone(config, data, device)
    x, y = fixed_subset(getattr(data, arguments.split), arguments.subset, "curvature")
    if arguments.loss == "trained" and learns(config):
        states = _with_gammas(states)
    loss_of = _loss_of(config, arguments.loss, backbone, data)
    values = _measured(config, backbone, states, x, y, arguments.tolerance, loss_of)
    if arguments.json:
        print(to_json(values))
        return 0
    named = curvature_loss(config) if arguments.loss == "cross_entropy" else f"{config.loss.name}, as trained"
    note_below = f"{len(y)} samples of {arguments.split}, evaluation mode, mean {named}; ± one standard error."
    print(_table(values, note_below))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="metacal curvature",
        description="Measure every checkpoint of a run (checkpoints/*.pt; keep_every=N in its training keeps more than "
        "the best and the last): sharpness and traces of the mean loss in evaluation mode, beside ECE.",
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--split", choices=("train", "val", "test"), default="val", help="default: val")
    parser.add_argument("--subset", type=int, default=1000, metavar="N", help="samples of it (default: 1000)")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of eigenvalues, relative (default: 0.01)")
    parser.add_argument(
        "--loss",
        choices=("cross_entropy", "trained"),
        default="cross_entropy",
        help="whose curvature: cross_entropy (mse for runs that train it), by which methods compare (default), or the "
        "trained per-sample loss with its gamma or smoothing, without penalties and class weights",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    arguments = parser.parse_args(list(argv))
    require(arguments.subset >= 1, f"--subset must be >= 1, got {arguments.subset}")
    require(0 < arguments.tolerance < 1, f"--tolerance must be in (0, 1), got {arguments.tolerance}")
    return arguments


class _Saved(NamedTuple):
    epoch: int
    name: str
    state: dict[str, Any]


def _whole_checkpoints(folder: RunFolder) -> list[_Saved]:
    """Those that can be read, by epoch; what cannot is told."""
    from metacal.runs import checkpoint

    files = folder.checkpoints()
    require(bool(files), f"{folder.path} has no checkpoint yet")
    states = []
    for file in files:
        try:
            state = checkpoint.load(file)
        except InputError as error:
            note(f"left out: {error}")
            continue
        states.append(_Saved(checkpoint.epoch_of(state), file.name, state))
    require(bool(states), f"{folder.path} has no checkpoint that is whole")
    return sorted(states, key=lambda saved: saved[:2])


def _with_gammas(states: Sequence[_Saved]) -> list[_Saved]:
    """Those with the state of what is learned, which the best weights are saved without."""
    whole = [saved for saved in states if saved.state.get("gamma")]
    for saved in states:
        if not saved.state.get("gamma"):
            note(f"left out: {saved.name} has the weights without what was learned beside them, which the loss needs")
    require(bool(whole), "no checkpoint has the gammas or the smoothing that were learned: use --loss cross_entropy")
    return whole


LossOf = Callable[["dict[str, Any]", "Tensor", "Tensor", int], "LogitLoss"]


def _loss_of(config: Config, which: str, backbone: Backbone, data: Data) -> LossOf:
    """`(checkpoint, x, y, epoch)` -> the loss whose curvature is measured."""
    from metacal.monitors import measurable
    from metacal.training.setup import build_gamma, curvature_loss, trained_loss, training_batches

    if which == "cross_entropy":
        return lambda state, x, y, epoch: curvature_loss(config)
    measurable(config.loss.name)
    source = build_gamma(config, backbone, training_batches(config, data)[0])

    def loss_of(state: dict[str, Any], x: Tensor, y: Tensor, epoch: int) -> LogitLoss:
        if source is not None:
            source.load_state_dict(state.get("gamma") or {})  # one that is not learned has no state
            source.to(x.device)
        return trained_loss(config, backbone, source, x, y, epoch)

    return loss_of


def _measured(
    config: Config,
    backbone: Backbone,
    states: Sequence[_Saved],
    x: Tensor,
    y: Tensor,
    tolerance: float,
    loss_of: LossOf,
) -> dict[str, dict[str, Any]]:
    """Accuracy, ECE and curvature by the name of the checkpoint. Eigenvectors start from those of the one before."""
    from metacal.calibration import accuracy, ece
    from metacal.monitors import curvature_values
    from metacal.predict import predict
    from metacal.runs import checkpoint

    measured: dict[str, dict[str, float]] = {}
    starts: dict[str, Any] = {}
    for epoch, name, state in states:
        checkpoint.load_weights(backbone, state["backbone"], name)
        values = curvature_values(
            backbone,
            x,
            y,
            tol=tolerance,
            batch_size=config.data.batch_size,
            starts=starts,
            loss=loss_of(state, x, y, epoch),
        )
        p = predict(backbone, (x, y))
        measured[name] = {"epoch": epoch, "accuracy": accuracy(p), "ece": ece(p)}
        measured[name] |= {k.removeprefix("curvature/"): v for k, v in values.items()}
    return measured


def _table(measured: dict[str, dict[str, Any]], note_below: str) -> Table:
    from metacal.report.tables import Column, Spread, Table

    columns = [
        Column("epoch", "Epoch", 0),
        Column("ece", "ECE", 2, percent=True),
        Column("gn_sharpness", "λ(G)", 2),
        Column("hessian_sharpness", "λ(H)", 2),
        Column("gn_trace", "Tr G", 1),
        Column("hessian_trace", "Tr H", 1),
        Column("batch_sharpness", "Batch sharpness", 2),
    ]

    def cell(values: dict[str, Any], name: str) -> float | Spread:
        error = values.get(f"{name}_stderr")
        return values[name] if error is None else Spread(values[name], error)

    rows = [(name, [cell(values, c.name) for c in columns]) for name, values in measured.items()]
    return Table(columns, rows, "checkpoint", notes=[note_below])
