"""One run in its folder: prepare, train or go on, measure the test split once, write the summary."""

from __future__ import annotations

import functools
import resource
import shlex
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from metacal import deploy, ranks
from metacal.batchnorm import synchronise
from metacal.calibration import FewErrorsWarning
from metacal.config import Config
from metacal.config.compose import to_yaml
from metacal.data import Batches, Data
from metacal.errors import InputError, note, require
from metacal.monitors import MONITORS, Monitor, Watch, Watched
from metacal.options import made
from metacal.predict import predict_epoch
from metacal.predictions import Predictions
from metacal.report.report import Report
from metacal.report.tables import methods_table
from metacal.report.verdict import meaning
from metacal.runs import checkpoint
from metacal.runs.config import require_same_config
from metacal.runs.folder import RunFolder
from metacal.runs.versions import versions
from metacal.training.logging import ConsoleLog, RunLog
from metacal.training.loop import train
from metacal.training.setup import (
    Parts,
    build_backbone,
    build_parts,
    choose_device,
    curvature_loss,
    evaluation_batches,
    fixed_subset,
    pixels_of,
    prepare_data,
    trained_loss,
    training_batches,
)
from metacal.training.sinks import require_sinks
from metacal.training.state import Progress, restore
from metacal.training.together import require_alike, require_rows, stop_on_signals

__all__ = ["Outcome", "build_watch", "run", "show_together"]


@dataclass
class Outcome:
    """A run that ended: its folder, its summary (empty when interrupted), the exit status, and whether an earlier
    command had ended it.
    """

    folder: RunFolder
    summary: dict[str, Any]
    status: int
    reused: bool = False

    def show(self) -> int:
        """Print the table of the test split; returns the exit status."""
        if self.status == 0:
            return show_together([self])
        return self.status


def run(
    config: Config,
    folder: RunFolder,
    overrides: Sequence[str] = (),
    config_file: str | Path | None = None,
    reuse: bool = False,
) -> Outcome:
    """Train the run that `config` describes in `folder`, going on from its last checkpoint if there is one.

    Where several ranks work together, all of them call this. The first one looks at the folder and writes to it.

    Args:
        overrides, config_file: the words and the file that `config` was composed of. A run records them as its command
            when it starts, and keeps them when it goes on by other words.
        reuse: a finished run gives back what it has, where it is otherwise refused.

    Raises:
        InputError: bad input, before anything is written.
        RunError: the run had to stop; checkpoints stay.
    """
    if outcome := ranks.broadcast_object(ranks.is_first() and _finished(config, folder, reuse)):
        return outcome
    require_sinks(config.log)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if config.data.download and not ranks.is_first():
        ranks.barrier()  # until the first one has downloaded
    data = prepare_data(config, device)
    if config.data.download and ranks.is_first():
        ranks.barrier()
    backbone = build_backbone(config, data, device)
    if ranks.size() > 1 and config.launch.batchnorm == "all":
        synchronise(backbone)
    train_batches, meta_batches = training_batches(config, data)
    require_rows(train_batches, meta_batches)
    parts = build_parts(
        config, backbone, train_batches, meta_batches, evaluation_batches(data.val), pixels=pixels_of(data)
    )
    watch = build_watch(config, parts)
    if ranks.size() > 1:
        require_alike(data, parts.backbone)
    if ranks.is_first():
        folder.create()
    with folder.locked() if ranks.is_first() else nullcontext():
        # Another process may have started and ended this run while the parts were made.
        if outcome := ranks.broadcast_object(ranks.is_first() and _finished(config, folder, reuse)):
            return outcome
        command = ["metacal", "train", *([str(config_file)] if config_file else []), *overrides]
        return _run_in(folder, config, data, parts, watch, shlex.join(command))


def _finished(config: Config, folder: RunFolder, reuse: bool) -> Outcome | None:
    """What a finished run in `folder` gives, None where there is none or it is to be replaced.

    Raises:
        InputError: a finished run that is not to be reused, or a run of another config.
    """
    if config.overwrite or not folder.taken:
        return None
    if folder.finished and not reuse:
        look = shlex.join(["metacal", "evaluate", str(folder.path)])
        raise InputError(
            f"{folder.path} holds a finished run; look at it with `{look}`, start over "
            "with overwrite=true, or choose another seed=… or name=…"
        )
    require_same_config(config, folder)
    if folder.finished:
        return Outcome(folder, folder.read_summary(), status=0, reused=True)
    require(  # what is left of a run that ended is not wiped
        folder.interrupted,
        f"{folder.summary} is damaged, and there is no checkpoint to make it again from; start over with "
        "overwrite=true",
    )
    return None


def _run_in(folder: RunFolder, config: Config, data: Data, parts: Parts, watch: Watch, command: str) -> Outcome:
    """The run itself, with all of its parts at hand and the folder its own."""
    state = None
    if ranks.broadcast_object(folder.interrupted and not config.overwrite):
        state = checkpoint.load(folder.last)
    progress = restore(parts, watch, state, str(folder.last)) if state else Progress()
    if state is None:
        torch.manual_seed(config.seed)  # what dropout draws from
    if ranks.is_first():
        command = _write_start(folder, config, command, state)

    if config.progress:
        print(_introduced(config, data, parts, folder), flush=True)
    logged = state and state.get("log", state)  # older ones: beside the rest
    log = RunLog(folder.path if ranks.is_first() else None, progress.step, logged, config.log)
    console = ConsoleLog(
        f"{config.method} seed {config.seed}",
        config.epochs * len(parts.train),
        config.epochs,
        enabled=config.progress,
    )
    log.start(config, command)
    try:
        with stop_on_signals() as stop:
            progress, best = train(config, parts, watch, log, console, folder, progress, stop)
        began = time.perf_counter()
        last = _predicted(data, parts)
        parts.backbone.load_state_dict(best)
        selected = _predicted(data, parts)
        memory = max(ranks.gather_objects(_peak_memory_mb(parts.device)))
        summary: dict[str, Any] = {}
        if ranks.is_first():
            summary |= _at_last_epoch(config, last, folder)
            summary |= _measure(config, data, parts, progress, selected, folder, log)
            summary |= {"memory/peak_mb": memory, "time/test_s": time.perf_counter() - began, "ranks": ranks.size()}
            summary |= {"command": command, "versions": versions(), "parameters": _count(parts)}
            folder.write_summary(summary)
        summary = ranks.broadcast_object(summary)
    except KeyboardInterrupt:
        how = shlex.join(["metacal", "train", f"resume={folder.path}"])
        console.line(f"interrupted; what was saved goes on with: {how}", always=ranks.is_first())
        return Outcome(folder, {}, status=130)
    finally:
        console.stop()
        log.close()
    return Outcome(folder, summary, status=0)


def _write_start(folder: RunFolder, config: Config, command: str, state: Mapping[str, Any] | None) -> str:
    """Prepare the folder for a run that starts, or that goes on from `state`; returns the command that started it."""
    if state is not None:
        _mend(folder, state)
        return folder.read_command() or command
    folder.clear()
    # How this command was given is not part of what a later one should repeat.
    launch = replace(config.launch, ranks=None)
    config = replace(config, overwrite=False, resume=None, run_dir=None, baselines=[], launch=launch)
    folder.write_config(to_yaml(config))
    folder.write_command(command)
    return command


def _introduced(config: Config, data: Data, parts: Parts, folder: RunFolder) -> str:
    """What is trained, on what, and where: the first lines of a run."""
    counts = {"train": len(data.train), "meta": data.set_aside, "val": len(data.val), "test": len(data.test)}
    shown = ", ".join(f"{count:,} {split}" for split, count in counts.items() if count)
    kind = "samples" if data.pixel_range is None else "images"
    sizes = _count(parts)
    source = f" and {sizes['gamma']:,} behind the gammas" if sizes.get("gamma") else ""
    return (
        f"data: {data.name}, {kind}: {shown}; {data.n_classes} classes\n"
        f"model: {config.model.name}, {sizes['backbone']:,} parameters{source}; method: {config.method}; "
        f"device: {parts.device}{f', {ranks.size()} ranks' if ranks.size() > 1 else ''}\n"
        f"run folder: {folder.path}"
    )


def _mend(folder: RunFolder, state: Mapping[str, Any]) -> None:
    """Write again what a checkpoint holds a copy of, and say what was damaged."""
    if folder.summary.exists():
        note(f"{folder.summary} is damaged; it is made again")
    copy = state.get("config")
    if copy and folder.config.read_bytes() != copy.encode():
        folder.write_config(copy)


def build_watch(config: Config, parts: Parts) -> Watch:
    """The monitors that `config.monitor` asks for. The calibration of val is always there: it selects the epoch."""
    m = config.monitor

    @functools.cache
    def subset(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        batches = {"train": parts.train, "val": parts.val}[split]
        if not isinstance(batches, Batches):
            raise InputError("monitor.every needs data that can be indexed, not a DataLoader; set it to 0")
        return fixed_subset(batches.split, m.subset, f"{split}_subset")

    watched = Watched(
        keys=m,
        subset=subset,
        loss=curvature_loss(config),
        has_gamma=parts.gamma is not None,
        per_epoch=len(parts.train),
        batch_size=parts.train.batch_size if isinstance(parts.train, Batches) else config.data.batch_size,
        seed=config.seed,
        pixels=parts.pixels,
        trained=functools.partial(trained_loss, config, parts.backbone, parts.gamma),
    )
    names = ["calibration"] if m.name == "off" else list(MONITORS)
    monitors: list[Monitor] = [x for name in names for x in made(MONITORS[name], m).build(watched)]
    return Watch(monitors, None if m.name == "off" else m.max_share)


def _predicted(data: Data, parts: Parts) -> dict[str, Predictions]:
    """Of the weights that `parts` hold now, on val and test."""
    batches = {"val": parts.val, "test": evaluation_batches(data.test)}
    return {name: predict_epoch(parts.backbone, of_split) for name, of_split in batches.items()}


def _at_last_epoch(config: Config, predicted: Mapping[str, Predictions], folder: RunFolder) -> dict[str, Any]:
    """The test split at the last epoch, ``last/…``, with its own temperature and without intervals; saves predictions.

    It is for comparison only: that test is read for it too changes nothing of the run.
    """
    for name, p in predicted.items():
        p.save(folder.predictions(name, "last"))
    with warnings.catch_warnings():  # of a small val split: told of the selected epoch
        warnings.simplefilter("ignore", FewErrorsWarning)
        report = Report(predicted["test"], predicted["val"], n_bins=config.monitor.n_bins, resamples=0)
    return {f"last/{name}": value for name, value in report.to_dict().items()}


def _measure(
    config: Config,
    data: Data,
    parts: Parts,
    progress: Progress,
    predicted: Mapping[str, Predictions],
    folder: RunFolder,
    log: RunLog,
) -> dict[str, Any]:
    """Fit the temperature on val, measure test, and write predictions, figures and the HParams entry."""
    m = config.monitor
    report = Report(predicted["test"], predicted["val"], n_bins=m.n_bins, resamples=m.resamples)
    for name, p in predicted.items():
        p.save(folder.predictions(name))
    deploy.save(deploy.of_run(config, data, parts.backbone, report.temperature or 1.0), folder.model)
    folder.figures.mkdir(exist_ok=True)
    figure = report.reliability_diagram()
    figure.set_dpi(150)
    log.figure("test/reliability", figure, progress.step, folder.figures / "reliability.png")
    log.text("test", f"{report.to_markdown()}\n\n{meaning(report.to_dict())}", progress.step)
    test = {f"test/{name}": value for name, value in report.to_dict().items()}
    summary: dict[str, Any] = {
        "method": config.method,
        "name": config.name,
        "seed": config.seed,
        **test,
        "val/nll": progress.best_nll,
        "select": config.select,
        "best_epoch": progress.best_epoch,
        "last_epoch": progress.epoch,
        "epochs": config.epochs,
        "steps": progress.step,
        "skipped_steps": parts.step.skipped,
        "time/train_s": progress.seconds,
        "device": str(parts.device),
        "val_is_fitted": data.meta_from == "val",
        "data": {
            "name": data.name,
            "fingerprint": data.fingerprint,
            "fingerprints": dict(data.fingerprints),
            "n_classes": data.n_classes,
            "train": len(data.train),
            "meta": data.set_aside,
            "meta_from": data.meta_from,
            "val": len(data.val),
            "test": len(data.test),
        },
    }
    log.finish(summary, progress.step)
    return summary


def _count(parts: Parts) -> dict[str, int]:
    counts = {"backbone": sum(p.numel() for p in parts.backbone.parameters())}
    if parts.gamma is not None:
        counts["gamma"] = sum(p.numel() for p in parts.gamma.parameters())
    return counts


def _peak_memory_mb(device: torch.device) -> float:
    """Of the device if it is a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def show_together(outcomes: Sequence[Outcome]) -> int:
    """The table of several runs on the same test split, what it means in words, where their pictures lie, and how to
    open TensorBoard.
    """
    console = Console(file=sys.stdout)
    console.print(methods_table({o.summary["method"]: o.summary for o in outcomes}))
    for o in outcomes:
        if said := meaning(o.summary):
            console.print(f"{o.summary['method']}: {said}", highlight=False, soft_wrap=True, markup=False)
    for o in outcomes:
        fitted = " (val was its meta images too: val scores are fitted)" if o.summary.get("val_is_fitted") else ""
        console.print(f"{o.summary['method']}: {o.folder.path}{fitted}", highlight=False, soft_wrap=True)
    first = outcomes[0].folder
    root = Path(*first.path.parts[:-2]) if len(first.path.parts) > 2 else first.path
    console.print(f"reliability diagram: {first.figures / 'reliability.png'}", highlight=False, soft_wrap=True)
    curves = shlex.join(["tensorboard", "--logdir", str(root)])
    if len(outcomes) > 1:
        compare = shlex.join(["metacal", "compare", str(root)])
        console.print(f"do they differ beyond noise? {compare}", highlight=False, soft_wrap=True)
    shown = shlex.join(["metacal", "show", str(first.path)])
    console.print(f"one run, its files, and how to use it: {shown}", highlight=False, soft_wrap=True)
    if first.event_files():
        console.print(f"curves: {curves}", highlight=False, soft_wrap=True)
    return max(o.status for o in outcomes)
