"""Calibration: measures, differentiable surrogates, post-hoc scaling, and intervals for all of them."""

from __future__ import annotations

from metacal.calibration.accumulate import CalibrationAccumulator
from metacal.calibration.binning import Bins, reliability_bins
from metacal.calibration.bootstrap import Comparison, Interval, bootstrap, bootstrap_all, compare
from metacal.calibration.measure import Measure, Streamed
from metacal.calibration.measures import (
    MEASURES,
    accuracy,
    adaptive_ece,
    aurc,
    auroc,
    brier,
    classwise_ece,
    confidence,
    debiased_ece,
    ece,
    error,
    kce,
    mce,
    nll,
    overconfidence,
    sece,
    skce,
    smooth_ece,
    underconfidence,
)
from metacal.calibration.scaling import (
    FitReport,
    HistogramBinning,
    IsotonicScaling,
    MatrixScaling,
    TemperatureScaling,
    VectorScaling,
    scale_by,
)

__all__ = [
    "MEASURES",
    "Bins",
    "CalibrationAccumulator",
    "Comparison",
    "FitReport",
    "HistogramBinning",
    "Interval",
    "IsotonicScaling",
    "MatrixScaling",
    "Measure",
    "Streamed",
    "TemperatureScaling",
    "VectorScaling",
    "accuracy",
    "adaptive_ece",
    "aurc",
    "auroc",
    "bootstrap",
    "bootstrap_all",
    "brier",
    "classwise_ece",
    "compare",
    "confidence",
    "debiased_ece",
    "ece",
    "error",
    "kce",
    "mce",
    "nll",
    "overconfidence",
    "reliability_bins",
    "scale_by",
    "sece",
    "skce",
    "smooth_ece",
    "underconfidence",
]


def __getattr__(name: str) -> object:
    if name == "surrogates":
        import importlib

        return importlib.import_module("metacal.calibration.surrogates")
    raise AttributeError(f"module 'metacal.calibration' has no attribute {name!r}")
