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

from metacal.calibration.surrogates import SURROGATES
from metacal.config import Config
from metacal.config.parts import learns, source_of
from metacal.config.schema import keys
from metacal.config.words import groups
from metacal.monitors import MONITORS, Charts

__all__ = ["METRICS", "experiment", "hyperparameters", "layout", "session_end", "session_start"]

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
