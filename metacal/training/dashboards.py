"""TensorBoard's dashboards: which curves share a chart, and what the HParams tab shows, sorts and filters.

The custom-scalars tab merges the layouts of all runs, so a run only asks for the charts that it has numbers for, and
the tab has no empty ones. The HParams tab takes its columns from one of the runs, whichever it reads first, so every
run describes the same columns, also those that it leaves blank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from metacal.calibration import MEASURES
from metacal.calibration.surrogates import SURROGATES
from metacal.config import Config
from metacal.config.parts import learns, source_of
from metacal.config.schema import keys
from metacal.config.words import groups
from metacal.monitors import MONITORS, Charts

__all__ = ["METRICS", "by_epoch", "describe", "experiment", "hyperparameters", "layout", "session_end", "session_start"]

# What the training loop logs itself; monitors bring the charts of what they log.
_CHARTS: Charts = {
    "outer problem": {
        "outer loss": ["meta/outer_loss$"],
        "hypergradient norm": ["meta/hypergradient_norm$"],
        "signal to noise of the hypergradient": ["meta/hypergradient_snr$"],
        "confidence less accuracy on meta images": ["meta/confidence_gap$"],
    },
    "penalties": {
        "value": ["penalty/(?!.*_(share|grad_norm)$).*$"],
        "share of the objective": ["penalty/.*_share$"],
        "norm of the gradient": ["penalty/.*_grad_norm$"],
    },
    "training": {
        "loss": ["train/loss$"],
        "gradient norm": ["train/grad_norm$"],
        "learning rate": ["train/lr$"],
    },
    "time": {
        "one step, ms": ["time/step_ms$"],
        "penalties, ms": ["time/penalty_.*_ms$"],
        "monitors, ms": ["time/monitor_.*_ms$"],
    },
}


def layout(tags: Iterable[str]) -> Charts:
    """The categories and charts that `tags` fill, with the expressions in each."""
    tags = list(tags)

    def filled(patterns: Iterable[str]) -> bool:
        return any(re.match(pattern, tag) for pattern in patterns for tag in tags)

    needs = {category: tag for part in MONITORS.values() for category, tag in part.needs.items()}
    shown: Charts = {}
    for charts in (*(part.charts for part in MONITORS.values()), _CHARTS):
        for category, patterns in ((c, p) for c, p in charts.items() if c not in needs or filled([needs[c]])):
            for chart, tags_of_chart in patterns.items():
                if filled(tags_of_chart):
                    shown.setdefault(category, {}).setdefault(chart, []).extend(tags_of_chart)
    return shown


def by_epoch(values: Mapping[str, float]) -> dict[str, float]:
    """What the Time Series tab opens with, since its groups are in alphabetical order: val's accuracy, ECE and NLL,
    to be logged at the epoch in place of the step. Nothing where `values` are not those of a validation.
    """
    return {f"by_epoch/val_{name}": values[f"val/{name}"] for name in _OVERVIEW if f"val/{name}" in values}


_OVERVIEW = ("accuracy", "ece", "nll")

# Whose a measure is, by the split before its name.
_WHOSE = {
    "train": "of the training batches since the last validation, each as its step saw it",
    "val": "of the validation images, at each validation",
    "test": "of the test images, at the selected epoch",
    "train_subset": "of a fixed sample of training images, in evaluation mode",
    "val_subset": "of a fixed sample of validation images, in evaluation mode",
    "by_epoch": "of the validation images; the axis counts epochs, not steps",
}

# What the other tags are; the first expression that matches counts.
_SAID = {
    "train/loss$": "What the method minimises, mean since the last line: methods differ in it, so compare train/nll.",
    "train/lr$": "Learning rate of the optimizer.",
    "train/grad_norm$": "Norm of the gradient of the objective, before clipping.",
    "train/skipped$": "Steps left out because something was not finite.",
    "meta/outer_loss$": "The outer objective on the meta batch, which the gammas are learned by.",
    "meta/hypergradient_norm$": "Norm of the outer objective's gradient in the parameters behind the gammas.",
    "meta/hypergradient_snr$": "Signal to noise of the hypergradient over the last outer steps: low values say chance.",
    "meta/confidence_gap$": "Mean confidence less accuracy on the meta batch, a fraction: above 0 is overconfident.",
    "penalty/.*_share$": "The weighted penalty over the whole objective, a fraction.",
    "penalty/.*_grad_norm$": "Norm of the gradient of the weighted penalty.",
    "penalty/": "The penalty's value, before its weight.",
    "gamma/confidence_correlation$": "Pearson correlation of gamma and confidence in the last training batch.",
    "gamma/": "The focal loss's gamma over the last training batch.",
    "margin/least_margin$": "The least true margin of a validation image, z_y less the largest other logit.",
    "margin/q$": "Margin moment, mean exp(-m) over the validation images.",
    "margin/ratio_": "A bound on ECE over ECE itself, on the validation images: 1 is tight.",
    "margin/": "A side of the margin certificate of ECE, on the validation images.",
    ".*_subset/certificate_ratio_": "A bound on ECE over ECE itself, on the fixed sample: 1 is tight.",
    ".*_subset/certificate_": "A side of the margin certificate of ECE, on the fixed sample.",
    ".*_subset/(predicted_)?margin_q": "Quantile of the margin on the fixed sample.",
    ".*_subset/robust_": "Margin under an attack within robust_eps, on the fixed sample.",
    "curvature/edge_ratio$": "Sharpness over the edge of stability; above 1 the optimizer diverges on a quadratic.",
    "curvature/": "Curvature of the loss on the fixed training sample.",
    "time/.*_ms$": "Milliseconds.",
    "time/.*_s$": "Seconds.",
    "time/": "What monitors cost: the share of the run's time, and how often they waited.",
}


def describe(tag: str) -> str:
    """What a scalar is, with its unit and which end is good, for the information beside its chart."""
    split, _, name = tag.partition("/")
    scaled, name = name.endswith("_scaled"), name.removeprefix("val_").removesuffix("_scaled")
    if split in _WHOSE and name in MEASURES:
        record = MEASURES[name]
        unit = ", a fraction" if record.percent else ", nats" if name == "nll" else ""
        end = {"min": "; less is better", "max": "; more is better", None: ""}[record.best]
        return f"{record.title}{' after temperature scaling' if scaled else ''}{unit}, {_WHOSE[split]}{end}."
    return next((text for pattern, text in _SAID.items() if re.match(pattern, tag)), "")


# The metrics of the HParams tab: tag -> description. It shows the first five until told otherwise.
METRICS = {
    "test/accuracy": "accuracy on test, a fraction",
    "test/ece": "expected calibration error on test, a fraction",
    "test/nll": "negative log-likelihood on test, nats",
    "test/ece_scaled": "expected calibration error on test after temperature scaling",
    "test/brier": "Brier score on test, in [0, 2]",
    "test/nll_scaled": "negative log-likelihood on test after temperature scaling, nats",
    "test/adaptive_ece": "expected calibration error on test with bins of equal mass",
    "test/classwise_ece": "class-wise calibration error on test",
    "test/smooth_ece": "smooth calibration error on test",
    "test/kce": "kernel calibration error on test",
    "test/auroc": "area under the ROC curve of confidence for correctness on test",
    "val/accuracy": "accuracy on val at the last validation",
    "val/ece": "expected calibration error on val at the last validation",
    "val/nll": "negative log-likelihood on val at the last validation, nats",
    "time/train_s": "seconds of training",
}

# What comparisons vary as a rule: the tab shows these columns first, and five columns at the start.
_FIRST = ("lr", "method", "optimizer", "penalties", "seed")


def hyperparameters(config: Config) -> dict[str, str | float | bool | None]:
    """The columns of the HParams tab for a run; None where a column has no meaning for it.

    The names are the same for every config. Weights of penalties have a column each, so that they can be filtered as
    numbers.
    """
    weights = {f.name: getattr(config.penalties, f.name).weight for f in fields(config.penalties)}
    focal, outer, meta = source_of(config) is not None, learns(config), config.meta
    gamma = config.gamma if focal and config.gamma.source == "fixed" else None
    objective = meta.objective if isinstance(meta.objective, str) else " + ".join(sorted(meta.objective))
    return {
        "method": config.method,
        "seed": config.seed,
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "weight_decay": config.optimizer.weight_decay,
        "schedule": config.schedule.name,
        "model": config.model.name,
        "data": config.data.name,
        "batch_size": config.data.batch_size,
        "epochs": config.epochs,
        "precision": config.precision,
        "loss": config.loss.name,
        "gamma": config.gamma.source if focal else None,
        "gamma_value": None if gamma is None else gamma.value,
        "smoothing": getattr(config.loss, "smoothing", None),
        "mixup": config.data.mixup,
        "meta_objective": objective if outer else None,
        "meta_lr": meta.lr if outer else None,
        "meta_every": meta.every if outer else None,
        "meta_engine": meta.engine if outer else None,
        "penalties": " + ".join(sorted(name for name, weight in weights.items() if weight > 0)) or "none",
        **{f"penalty_{name}": weight for name, weight in weights.items()},
    }


def _choices(name: str, config: Config) -> set[str]:
    """Values that other runs may have in a column of strings, as far as they are known."""
    if name in groups():
        return set(groups()[name])
    if name == "penalties":
        return {"none", *(f.name for f in fields(config.penalties))}
    if name == "meta_objective":
        return set(SURROGATES)
    key = {"loss": "loss.name", "gamma": "gamma.source", "meta_engine": "meta.engine", "precision": "precision"}.get(
        name
    )
    return set(keys()[key].option.names) if key else set()


def experiment(config: Config) -> Any:
    """The summary that names the HParams tab's columns: hyperparameters with what they may be, and metrics.

    A column of strings can only be filtered in the browser if it lists values: as boxes to tick, or from ten on by a
    regular expression. A value that no list holds is shown as long as all boxes are ticked.
    """
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    columns = api_pb2.Experiment(name="metacal", time_created_secs=time.time())
    for name, value in hyperparameters(config).items():
        known = _choices(name, config)
        text = bool(known) or isinstance(value, str)
        info = api_pb2.HParamInfo(
            name=name,
            type=api_pb2.DATA_TYPE_STRING if text else api_pb2.DATA_TYPE_FLOAT64,
            differs=name in _FIRST,
        )
        if text:
            for choice in sorted(known | ({value} if isinstance(value, str) else set())):
                info.domain_discrete.values.add().string_value = choice
        columns.hparam_infos.append(info)
    for tag, description in METRICS.items():
        columns.metric_infos.append(
            api_pb2.MetricInfo(
                name=api_pb2.MetricName(tag=tag),
                description=description,
                dataset_type=api_pb2.DATASET_UNKNOWN if tag.startswith("time/") else api_pb2.DATASET_VALIDATION,
            )
        )
    return _summary("EXPERIMENT_TAG", plugin_data_pb2.HParamsPluginData(experiment=columns))


def session_start(values: Mapping[str, str | float | bool | None]) -> Any:
    """The summary that gives this run's hyperparameters; the run is shown as running until `session_end`."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in values.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, str):
            start.hparams[name].string_value = value
        elif value is not None:
            start.hparams[name].number_value = value
    return _summary("SESSION_START_INFO_TAG", plugin_data_pb2.HParamsPluginData(session_start_info=start))


def session_end() -> Any:
    """The summary that marks this run as finished. TensorBoard keeps the first one of a run."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return _summary("SESSION_END_INFO_TAG", plugin_data_pb2.HParamsPluginData(session_end_info=end))


def _summary(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    value = Summary.Value(
        tag=getattr(metadata, tag), metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
    return Summary(value=[value])
