"""The training loop: one run, from top to bottom like the algorithm."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metacal import ranks
from metacal.batchnorm import average_statistics
from metacal.bilevel import NonFiniteError
from metacal.bilevel.reading import StepReport, read_all
from metacal.config import Config
from metacal.config.parts import needs_meta, schedule_of
from metacal.data import Batches
from metacal.data.batches import derived_seed
from metacal.errors import InputError, RunError
from metacal.margins import true_margin
from metacal.monitors import State, Watch
from metacal.optim.schedule import factor_at
from metacal.predict import predict_epoch
from metacal.report.figures import gamma_scatter, reliability_diagram
from metacal.runs import checkpoint
from metacal.runs.folder import RunFolder
from metacal.training.logging import FIGURE_SHARE, ConsoleLog, RunLog
from metacal.training.outer_notes import OuterNotes
from metacal.training.running import RunningMeasures
from metacal.training.selection import scaled_values, score
from metacal.training.setup import Parts
from metacal.training.state import Progress, best_weights, complete_state, kept, require_finite_weights, save_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["train"]


def train(
    config: Config,
    parts: Parts,
    watch: Watch,
    log: RunLog,
    console: ConsoleLog,
    folder: RunFolder | None = None,
    progress: Progress | None = None,
    stop: Any = None,
    after_validation: Callable[[dict[str, float]], bool] | None = None,
) -> tuple[Progress, dict[str, Tensor]]:
    """Train `parts` as `config` says and return the progress and the weights of the epoch that `config.select` chooses.

    Several ranks (`metacal.ranks`) run this in step, each on its share of every batch. The first one measures, logs and
    writes, and what depends on a measurement or on the clock is its decision. Its random stream is that of one process;
    the others draw theirs anew for each step, so that a checkpoint holds nothing of them.

    Args:
        folder: where checkpoints go; None keeps everything in memory.
        progress: of the checkpoint that `parts` were restored from; None starts at the beginning.
        stop: called after every step; when it returns true, on all ranks alike, the state is saved and
            KeyboardInterrupt raised.
        after_validation: called with what a validation measured; when it returns true, the training ends there.

    Raises:
        RunError: a loss, gradient or hypergradient that is not finite (unless `nonfinite=skip`), or a checkpoint
            that cannot be written.
        KeyboardInterrupt: when `stop` asked for it; what was done is saved.
    """
    run = _Training(config, parts, watch, log, console, folder, progress or Progress())
    p = run.p
    console.start(p.step)
    if config.data.meta_from == "val" and needs_meta(config):
        console.line(
            "val serves as meta images too: gamma is learned on them, so val's scores are fitted, not held out"
        )
    while p.epoch < config.epochs and not p.ended:
        for x, y in parts.train.epoch(p.epoch, start=p.batch):
            run.step(x, y)
            run.stopping = run.stopping or (stop is not None and stop())
            run.save_if_due()
        run.end_epoch(after_validation)
    run.end()
    return p, run.best


class _Training:
    """A training under way: what happens at a step, at the end of an epoch, and when a checkpoint is due.

    Attributes: `p`, where it is; `best`, the weights of the selected epoch; `stopping`, whether a stop
    was asked for.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        watch: Watch,
        log: RunLog,
        console: ConsoleLog,
        folder: RunFolder | None,
        p: Progress,
    ) -> None:
        self.config, self.parts, self.watch, self.log, self.console = config, parts, watch, log, console
        self.folder, self.p = folder, p
        self.per_epoch = len(parts.train)
        self.schedule, self.warmup_steps = schedule_of(config), round(config.schedule.warmup_epochs * self.per_epoch)
        self.meta_start = round(config.meta.start * config.epochs * self.per_epoch)  # the first step with an outer part
        self.base_lrs = [group["initial_lr"] for group in parts.optimizer.param_groups]
        self.save_every = max(1, round(config.checkpoint_every * self.per_epoch))
        self.state = State(parts.backbone, p.step, p.epoch, parts.optimizer)
        self.running: RunningMeasures | None = None
        one_label = config.data.mixup == 0  # a mixed sample has two
        if config.monitor.name != "off" and one_label and ranks.is_first():
            self.running = RunningMeasures(config.monitor.n_bins)
            if p.running:
                self.running.load_state_dict(p.running)
        self.notes = OuterNotes(parts.gamma)
        if p.outer:
            self.notes.load_state_dict(p.outer)
        self.unread: list[tuple[int, StepReport]] = []  # what steps reported and nobody has looked at, by number
        self.best = best_weights(folder, p)
        self.writes = folder is not None and ranks.is_first()
        self.config_text = folder.config.read_text() if folder is not None and self.writes else ""  # in each checkpoint
        self.meta_stream: Iterator[tuple[Tensor, ...]] | None = None
        meta = parts.meta
        # Each epoch has meta images of its own.
        self.meta_folds = meta if isinstance(meta, Batches) and meta.visits is not None else None
        self.stopping = self.owed = False  # a stop that was asked for, a checkpoint that is due
        self.started = time.perf_counter() - p.seconds

    def step(self, x: Tensor, y: Tensor) -> None:
        """One training step, and what is watched and logged of it."""
        p, step, state = self.p, self.parts.step, self.state
        factor = factor_at(p.step, self.config.epochs * self.per_epoch, self.warmup_steps, self.schedule)
        for group, lr in zip(self.parts.optimizer.param_groups, self.base_lrs):
            group["lr"] = lr * factor
        step.epoch = p.epoch + p.batch / self.per_epoch
        if ranks.rank() > 0:
            torch.manual_seed(derived_seed(self.config.seed, "rank", ranks.rank(), p.step))
        log_due = (p.step + 1) % self.config.monitor.log_every == 0
        if log_due:
            step.detail()
        began = time.perf_counter()
        with _naming_the_step(p, self.folder, "the training step"):
            values = step.step(x, y, *self._meta_batch())
        p.step += 1
        p.batch += 1
        state.step, state.epoch = p.step, p.epoch
        if step.last is not None:
            state.logits, state.gamma = step.last.logits, step.last.gamma
        self.unread.append(
            (p.step, values | {"lr": self.base_lrs[0] * factor, "ms": 1e3 * (time.perf_counter() - began)})
        )
        if self.parts.device.type == "cpu" or log_due or len(self.unread) >= UNREAD:
            self._take_in()
        if log_due:
            _log_means(p, step.skipped, self.watch, self.log)
        with _naming_the_step(p, self.folder, "measuring"):
            if self.running is not None and step.last is not None:
                self.running.add(step.last.logits, step.last.labels, step.last.gamma, values.raw.get("skipped", 0.0))
            if ranks.is_first():
                with ranks.alone():
                    self.log.scalars(self.watch.measure(state, validation=False), p.step, p.epoch)
        self.console.step(p.step)

    def _take_in(self) -> None:
        """Look at what the steps have reported, with one wait for the device: notes on it, and sums for the log."""
        read_all(report for _, report in self.unread)
        for number, report in self.unread:
            for sentence in self.notes.add(report):
                self.console.line(f"step {number}: {sentence}")
                self.log.text("notes/outer_problem", sentence, number)
            _collect(self.p, report)
        self.unread = []

    def _conclude(self) -> None:
        """Wait until the last step is known to have gone well, and look at all that was reported."""
        with _naming_the_step(self.p, self.folder, "the training step"):
            self.parts.step.conclude()
        self._take_in()

    def _meta_batch(self) -> tuple[Tensor, ...]:
        """The next one, if the coming step has an outer part."""
        meta, p = self.parts.meta, self.p
        if meta is None or not self.parts.step.due or p.step < self.meta_start:
            return ()
        if self.meta_stream is None:
            folds = self.meta_folds
            self.meta_stream = folds.again(p.epoch, p.outer_in_epoch) if folds else meta.forever(start=p.outer_steps)
        batch = next(self.meta_stream)
        p.outer_steps, p.outer_in_epoch = p.outer_steps + 1, p.outer_in_epoch + 1
        return batch

    def save_if_due(self) -> None:
        """After a step: a checkpoint within an epoch, or the last one before a stop.

        A window of several steps is in no checkpoint: it is waited for.
        """
        p = self.p
        self.owed = self.owed or (p.step % self.save_every == 0 and p.batch < self.per_epoch)
        if self.parts.step.resting and (self.stopping or self.owed):
            self.save()
            if self.stopping:
                self.console.stop()
                raise KeyboardInterrupt

    def save(self) -> None:
        p, self.owed = self.p, False
        self._conclude()
        average_statistics(self.parts.backbone)
        p.seconds = time.perf_counter() - self.started
        p.running = {} if self.running is None else self.running.state_dict()
        p.outer = self.notes.state_dict()
        require_finite_weights(self.parts.backbone, p.step, self.folder)
        if self.folder is not None and self.writes:
            state = complete_state(self.parts, p, self.watch, self.log, self.config_text)
            checkpoint.save(self.folder.last, state)

    def end_epoch(self, after_validation: Callable[[dict[str, float]], bool] | None) -> None:
        """Update what learns once an epoch, validate and save, each where it is due."""
        p, parts, config, folder = self.p, self.parts, self.config, self.folder
        self._conclude()
        average_statistics(parts.backbone)
        if parts.held_out is not None and parts.gamma is not None:
            parts.gamma.update(predict_epoch(parts.backbone, parts.held_out, p.epoch))  # type: ignore[operator]
        p.epoch, p.batch, p.outer_in_epoch = p.epoch + 1, 0, 0
        if self.meta_folds is not None:
            self.meta_stream = None
        if p.epoch % config.monitor.val_every == 0 or p.epoch == config.epochs:
            self._validate()
            p.ended = config.patience is not None and p.epoch - p.best_epoch >= config.patience
            p.ended |= after_validation is not None and after_validation(dict(self.log.history[-1]))
        if folder is not None and self.writes and config.keep_every and p.epoch % config.keep_every == 0:
            save_weights(folder.checkpoint(p.epoch), parts.backbone.state_dict(), p, self.config_text)
        due = p.epoch * self.per_epoch % self.save_every == 0 or self.save_every < self.per_epoch
        self.owed = self.owed or due
        if p.ended or p.epoch == config.epochs or (self.owed and parts.step.resting):
            self.save()

    def _validate(self) -> None:
        """Measure val, and keep the weights if they are the best so far."""
        p, parts = self.p, self.parts
        if p.sums:
            _log_means(p, parts.step.skipped, self.watch, self.log)  # a short epoch has its line too
        with _naming_the_step(p, self.folder, "validation"):
            values = _validate(self.config, p, parts, self.state, self.watch, self.running, self.log)
        value = score(self.config.select, p.epoch, values)
        if p.best_epoch == 0 or value < p.best_score:
            p.best_score, p.best_nll, p.best_epoch = value, values["val/nll"], p.epoch
            self.best = copy.deepcopy(dict(parts.backbone.state_dict()))
            if self.folder is not None and self.writes:
                save_weights(self.folder.best, self.best, p, self.config_text)
        shown = {k.removeprefix("val/"): v for k, v in values.items()}
        self.console.epoch(p.epoch, shown, ("accuracy", "nll", "ece"))

    def end(self) -> None:
        """The last figures."""
        p, state = self.p, self.state
        p.seconds = time.perf_counter() - self.started
        if self.config.monitor.figures_every:
            if state.val is None:  # the run had stopped after its last validation
                state.val, state.epoch = predict_epoch(self.parts.backbone, self.parts.val), p.epoch
            self.log.figures(_figures(self.config, state, self.running), p.step)
        self.console.stop()


@contextmanager
def _naming_the_step(p: Progress, folder: RunFolder | None, what: str) -> Iterator[None]:
    """Turn a non-finite number, or one that a measure refuses, into an error that says where and what is left."""
    where = f"at step {p.step + 1} (epoch {p.epoch + 1}, batch {p.batch + 1})"
    try:
        yield
    except NonFiniteError as error:
        late = p.step - error.step  # on a GPU it is known one step later, within the epoch
        where = f"at step {error.step + 1} (epoch {p.epoch + 1}, batch {p.batch + 1 - late})"
        raise RunError(
            f"non-finite {error.quantity} ({error.value}) {where}; {kept(folder)}; lower optimizer.lr, "
            "set optimizer.clip_norm, or leave such steps out with nonfinite=skip"
        ) from None
    except InputError as error:
        where = f"after step {p.step} (epoch {p.epoch + (p.batch > 0)})" if what != "the training step" else where
        # measures refuse logits that are not finite; data are refused for what they are
        unfit = what != "the training step" and str(error).startswith("logits")
        hint = "; lower optimizer.lr" if unfit else ""
        raise RunError(f"{what} {where} failed: {error}; {kept(folder)}{hint}") from None


UNREAD = 1000  # reports of steps that may wait on the device for the next line of the log


# What `MetaStep.step` and the loop report of a step, under its name in the log; names with a slash keep theirs.
_STEP_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "ms": "time/step_ms",
    "outer": "meta/outer_loss",
    "hypergradient_norm": "meta/hypergradient_norm",
    "hypergradient_snr": "meta/hypergradient_snr",
    "meta_gap": "meta/confidence_gap",
}


def _collect(p: Progress, values: Mapping[str, float]) -> None:
    """Add what a step reported to the sums since the last line of the log."""
    for name, value in values.items():
        if (name in _STEP_NAMES or "/" in name) and math.isfinite(value):
            total, count = p.sums.get(name, (0.0, 0))
            p.sums[name] = (total + value, count + 1)


def _log_means(p: Progress, skipped: int, watch: Watch, log: RunLog) -> None:
    """The means of what steps reported since the last line."""
    means = {_STEP_NAMES.get(name, name): total / count for name, (total, count) in p.sums.items()}
    means |= watch.scalars() | ({"train/skipped": float(skipped)} if skipped else {})
    log.scalars(means, p.step, p.epoch)
    p.sums = {}


def _validate(
    config: Config, p: Progress, parts: Parts, state: State, watch: Watch, running: RunningMeasures | None, log: RunLog
) -> dict[str, float]:
    """Predictions on val, every monitor that is due, histograms and figures."""
    state.val = predict_epoch(parts.backbone, parts.val)
    state.epoch = p.epoch
    values: dict[str, float] = {}
    if ranks.is_first():
        with ranks.alone():
            values = watch.measure(state, validation=True)
        values |= scaled_values(config.select, state.val, config.monitor.n_bins)
        values |= {} if running is None else running.values()
    values = ranks.broadcast_object(values)
    log.scalars(values, p.step, p.epoch)
    log.history.append({"step": p.step, "epoch": p.epoch, **values})
    m = config.monitor
    if m.histograms:
        assert state.val.logits is not None
        log.histogram("val/confidence_values", state.val.confidence, p.step, 0.0, 1.0)
        log.histogram("val/margin_values", true_margin(state.val.logits, state.val.labels), p.step)
        sample = running.gammas() if running is not None else None
        if sample is not None:
            log.histogram("gamma/values", sample[0], p.step)
    due = m.figures_every and (p.epoch % m.figures_every == 0 or log.figures_wait)
    if due and p.epoch < config.epochs:  # the last ones are drawn when training is over
        log.figures(_figures(config, state, running), p.step, None if m.max_share is None else FIGURE_SHARE)
    return values


def _figures(config: Config, state: State, running: RunningMeasures | None) -> dict[str, Callable[[], Figure]]:
    """What to draw at a validation, by name."""
    assert state.val is not None
    figures: dict[str, Callable[[], Figure]] = {
        "val/reliability": partial(reliability_diagram, state.val, n_bins=config.monitor.n_bins)
    }
    sample = running.gammas() if running is not None else None
    if sample is not None:
        figures["gamma/against_confidence"] = partial(
            gamma_scatter, *sample, title=f"training samples, epoch {state.epoch}"
        )
    return figures
