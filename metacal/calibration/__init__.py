"""Calibration: measures, differentiable surrogates, post-hoc scaling, and intervals for all of them."""

from __future__ import annotations

from metacal.calibration.accumulate import CalibrationAccumulator
from metacal.calibration.beta import BetaScaling
from metacal.calibration.binning import Bins, reliability_bins
from metacal.calibration.bootstrap import Comparison, Interval, bootstrap, bootstrap_all, compare
from metacal.calibration.choice import (
    SCALINGS,
    Choice,
    choose_scaling,
    cross_fitted,
    fit_scaling,
    load_scaling,
    save_scaling,
)
from metacal.calibration.conformal import ConformalSets, Coverage
from metacal.calibration.fitted import FewErrorsWarning, FitReport, Identity, Scaling
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
from metacal.calibration.mixture import EnsembleTemperatureScaling
from metacal.calibration.novelty import novelty
from metacal.calibration.scaling import (
    HistogramBinning,
    IsotonicScaling,
    MatrixScaling,
    TemperatureScaling,
    VectorScaling,
    scale_by,
)
from metacal.calibration.spline import SplineScaling

__all__ = [
    "MEASURES",
    "SCALINGS",
    "BetaScaling",
    "Bins",
    "CalibrationAccumulator",
    "Choice",
    "Comparison",
    "ConformalSets",
    "Coverage",
    "EnsembleTemperatureScaling",
    "FewErrorsWarning",
    "FitReport",
    "HistogramBinning",
    "Identity",
    "Interval",
    "IsotonicScaling",
    "MatrixScaling",
    "Measure",
    "Scaling",
    "SplineScaling",
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
    "choose_scaling",
    "classwise_ece",
    "compare",
    "confidence",
    "cross_fitted",
    "debiased_ece",
    "ece",
    "error",
    "fit_scaling",
    "kce",
    "load_scaling",
    "mce",
    "nll",
    "novelty",
    "overconfidence",
    "reliability_bins",
    "save_scaling",
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
