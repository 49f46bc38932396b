"""`metacal show`: one run at a glance: what it is, where it stands, its scores, its files, and how to go on."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metacal.commands.words import Parser

if TYPE_CHECKING:
    from metacal.report.tables import Table
    from metacal.runs.folder import RunFolder

__all__ = ["show_command"]

_DESCRIPTION = (
    "What a run is, where it stands, its scores with their units, its files, and the commands that go on with it. "
    "Nothing is computed anew: `metacal evaluate RUN` does that."
)


_PROSE, _WIDTH = ("method", "versions"), 100


def show_command(argv: Sequence[str]) -> int:
    """Run `metacal show ARGV`; returns the exit status."""
    parser = Parser(prog="metacal show", description=_DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    runs = parser.parse_args(list(argv)).runs

    from metacal.runs.folder import check_run

    folders = [check_run(run) for run in runs]  # all of them before the first is shown
    print("\n\n".join(_shown(folder) for folder in folders))
    return 0


def _shown(folder: RunFolder) -> str:
    from metacal.report.verdict import meaning

    summary = folder.read_summary() if folder.finished else {}
    config = _settings(folder)
    parts = [f"{folder.path}: {_state(folder, config, summary)}", _aligned(_facts(folder, config, summary))]
    if summary:
        parts += [_scores(summary).render("text"), meaning(summary)]
    elif val := _last_val(folder):
        parts.append(f"val at epoch {val[0]}: {val[1]}")
    parts.append("files\n" + _aligned(_files(folder), "  "))
    if commands := _next_commands(folder, config):
        parts.append("go on\n" + "\n".join(f"  {line}" for line in commands))
    return "\n\n".join(filter(None, parts))


def _settings(folder: RunFolder) -> Mapping[str, Any]:
    """Dotted key -> value of config.yaml; keys that it lacks have the default."""
    from metacal.config.files import read_yaml
    from metacal.config.resolve import complete, flat
    from metacal.runs.config import translated

    return flat(complete(translated(read_yaml(folder.config))))


def _state(folder: RunFolder, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Where it stands, in words."""
    epochs = config.get("epochs")
    if summary:
        selected, last = summary.get("best_epoch"), summary.get("last_epoch", epochs)
        how = config.get("select", "nll")
        return f"finished after epoch {last} of {epochs}; epoch {selected} was selected (select={how})"
    val = _last_val(folder)
    done = f"epoch {val[0] if val else 0} of {epochs}"
    if folder.in_use:
        return f"in training now, {done} done"
    if folder.summary.exists():
        return "ended, but its summary.json is damaged"
    if folder.last.is_file():
        return f"stopped, {done} done"
    return "stopped before its first checkpoint"


def _last_val(folder: RunFolder) -> tuple[int, str] | None:
    """Epoch and measures of the last validation that was logged."""
    from metacal.report.cells import in_words
    from metacal.runs.folder import read_metrics

    lines = [line for line in read_metrics(folder.metrics)[0] if line["split"] == "val"]
    if not lines:
        return None
    last = {name: value for name, value in lines[-1].items() if value is not None}
    return last["epoch"], in_words(last, ("accuracy", "nll", "ece"))


def _facts(folder: RunFolder, config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """The config in short, and what the summary tells of how it was trained."""
    from metacal.configs import comment_of, config_dir
    from metacal.runs.settings import show_value

    def value(key: str) -> str:
        return show_value(config.get(key))

    file = config_dir() / "method" / f"{value('method')}.yaml"
    data, sizes = summary.get("data", {}), summary.get("parameters", {})
    counts = ", ".join(f"{data[s]:,} {s}" for s in ("train", "meta", "val", "test") if data.get(s))
    time = summary.get("time/train_s")
    training = [f"{value('epochs')} epochs, batches of {value('data.batch_size')}, seed {value('seed')}"]
    training += [f"{summary['steps']:,} steps"] if "steps" in summary else []
    training += [f"{time / 60:.1f} min" if time >= 60 else f"{time:.1f} s"] if time is not None else []
    training += [f"on {summary['device']}"] if "device" in summary else []
    return {
        "method": value("method") + (f": {comment_of(file)}" if file.is_file() else ""),
        "data": value("data.name") + (f": {counts}; {data.get('n_classes', '?')} classes" if counts else ""),
        "model": value("model.name") + (f", {sizes['backbone']:,} parameters" if "backbone" in sizes else ""),
        "optimizer": f"{value('optimizer.name')}, lr {value('optimizer.lr')}, schedule {value('schedule.name')}",
        "training": ", ".join(training),
        "command": folder.read_command() or summary.get("command") or "not recorded",
        "versions": ", ".join(f"{name} {version}" for name, version in (summary.get("versions") or {}).items())
        or "not recorded",
    }


def _scores(summary: Mapping[str, Any]) -> Table:
    """Those measures that comparisons show: on test, after scaling, and at the last epoch."""
    from metacal.calibration import MEASURES
    from metacal.report.cells import Cell, Column, Range, column_of
    from metacal.report.tables import Table

    def cell(key: str, shown: Column) -> str:
        value, low, high = (summary.get(key + end) for end in ("", "_low", "_high"))
        return shown.show(value if value is None or low is None or high is None else Range(value, low, high))

    columns = [Column("test"), Column("scaled", "after temperature"), Column("last", "last epoch")]
    rows: list[tuple[str, list[Cell]]] = []
    for name in (name for name, m in MEASURES.items() if m.compared and f"test/{name}" in summary):
        shown = column_of(name)
        keys = (f"test/{name}", f"test/{name}_scaled", f"last/{name}")
        rows.append((shown.header, [cell(key, shown) for key in keys]))
    return Table(columns, rows, "measure", "Test split, with 95 % intervals where they were taken")


def _files(folder: RunFolder) -> dict[str, str]:
    """Those that are there, and what each holds."""
    told = {
        folder.config: "every key of the run; itself an input of metacal train",
        folder.command: "the command that started it",
        folder.metrics: "what was logged, a JSON object a line",
        folder.summary: "the scores, as fractions and nats",
        folder.model: f"the calibrated model: metacal.load({str(folder.path)!r})",
        folder.last: "all that a resume needs",
        folder.best: "the weights of the selected epoch",
        folder.predictions("test"): "logits and labels of test at the selected epoch",
        folder.figures / "reliability.png": "the reliability diagram of test",
        folder.shift: "scores under corruptions",
        folder.log: "what it printed",
        folder.sinks: "its ids at the services that it is logged to",
    }
    shown = {str(file.relative_to(folder.path)): said for file, said in told.items() if file.is_file()}
    events = folder.event_files()
    return shown | ({"events.out.tfevents.*": "curves for TensorBoard"} if events else {})


def _next_commands(folder: RunFolder, config: Mapping[str, Any]) -> list[str]:
    path = str(folder.path)
    curves = [shlex.join(["tensorboard", "--logdir", path])] if folder.event_files() else []
    if folder.in_use:
        return curves
    if folder.interrupted:
        return [shlex.join(["metacal", "train", f"resume={path}"]), *curves]
    if not folder.finished:
        return [folder.read_command() or shlex.join(["metacal", "train", str(folder.config), f"run_dir={path}"])]
    compared = str(folder.path.parent.parent) if folder.path.name.startswith("seed") else "RUNS"
    return [
        shlex.join(["metacal", "evaluate", path]),
        shlex.join(["metacal", "predict", path, "IMAGES", "--out", "predictions.csv"]),
        shlex.join(["metacal", "train", str(folder.config), f"seed={int(config.get('seed') or 0) + 1}"]),
        shlex.join(["metacal", "compare", compared]),
        *curves,
    ]


def _aligned(lines: Mapping[str, str], indent: str = "") -> str:
    """Names and, beside them, their texts; sentences are broken at a width that can be read, commands are not."""
    width = max(map(len, lines), default=0) + 2

    def beside(name: str, text: str) -> str:
        if name not in _PROSE:
            return text
        broken = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
        return ("\n" + " " * (len(indent) + width)).join(broken)

    return "\n".join(f"{indent}{name:<{width}}{beside(name, text)}" for name, text in lines.items())
