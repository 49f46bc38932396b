"""`metacal curvature`: sharpness and traces of every checkpoint of a run, measured afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from metacal.commands.words import Parser
from metacal.errors import InputError, note, require
from metacal.jsonio import to_json

__all__ = ["curvature_command"]


def curvature_command(argv: Sequence[str]) -> int:
    """Run `metacal curvature ARGV`; returns the exit status."""
    parser = Parser(
        prog="metacal curvature",
        description="Measure every checkpoint of a run (checkpoints/*.pt; keep_every=N in its training keeps more than "
        "the best and the last): sharpness and traces of the mean cross-entropy in evaluation mode, beside ECE.",
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--split", choices=("train", "val", "test"), default="val", help="default: val")
    parser.add_argument("--subset", type=int, default=1000, metavar="N", help="samples of it (default: 1000)")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of eigenvalues, relative (default: 0.01)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    arguments = parser.parse_args(list(argv))
    require(arguments.subset >= 1, f"--subset must be >= 1, got {arguments.subset}")
    require(0 < arguments.tolerance < 1, f"--tolerance must be in (0, 1), got {arguments.tolerance}")

    from metacal.calibration import accuracy, ece
    from metacal.monitors import curvature_values
    from metacal.predict import predict
    from metacal.report.tables import Column, Spread, Table
    from metacal.runs import checkpoint
    from metacal.runs.config import recorded_config
    from metacal.runs.folder import check_run
    from metacal.training.setup import build_backbone, choose_device, curvature_loss, fixed_subset, prepare_data

    folder = check_run(arguments.run)
    files = folder.checkpoints()
    require(bool(files), f"{arguments.run} has no checkpoint yet")
    states = []
    for file in files:
        try:
            state = checkpoint.load(file)
        except InputError as error:
            note(f"left out: {error}")
            continue
        states.append((checkpoint.epoch_of(state), file.name, state["backbone"]))
    require(bool(states), f"{arguments.run} has no checkpoint that is whole")
    config = recorded_config(folder, state)
    device = choose_device(arguments.device)
    data = prepare_data(config, device)
    backbone = build_backbone(config, data, device)
    x, y = fixed_subset(getattr(data, arguments.split), arguments.subset, "curvature")
    found = {}
    starts: dict = {}
    for epoch, name, weights in sorted(states, key=lambda state: state[:2]):
        checkpoint.load_weights(backbone, weights, name)
        values = curvature_values(
            backbone,
            x,
            y,
            tol=arguments.tolerance,
            batch_size=config.data.batch_size,
            starts=starts,
            loss=curvature_loss(config),
        )
        p = predict(backbone, (x, y))
        found[name] = {"epoch": epoch, "accuracy": accuracy(p), "ece": ece(p)}
        found[name] |= {k.removeprefix("curvature/"): v for k, v in values.items()}
    if arguments.json:
        print(to_json(found))
        return 0
    columns = [
        Column("epoch", "Epoch", 0),
        Column("ece", "ECE", 2, percent=True),
        Column("gn_sharpness", "λ(G)", 2),
        Column("hessian_sharpness", "λ(H)", 2),
        Column("gn_trace", "Tr G", 1),
        Column("hessian_trace", "Tr H", 1),
        Column("batch_sharpness", "Batch sharpness", 2),
    ]

    def cell(values: dict, name: str) -> float | Spread:
        error = values.get(f"{name}_stderr")
        return values[name] if error is None else Spread(values[name], error)

    rows = [(name, [cell(values, c.name) for c in columns]) for name, values in found.items()]
    notes = [
        f"{len(y)} samples of {arguments.split}, evaluation mode, mean {curvature_loss(config)}; ± one standard error."
    ]
    print(Table(columns, rows, "checkpoint", notes=notes))
    return 0
