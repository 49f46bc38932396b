"""The names that arguments take, for type checkers and editors; the registries are where they mean something."""

from __future__ import annotations

from typing import Literal

__all__ = ["DEFAULT_METHOD", "MeasureName", "MethodName", "OptimizerName"]

MethodName = Literal[
    "adafocal",
    "brier",
    "calmo",
    "confidence_penalty",
    "cross_entropy",
    "dece",
    "dual_focal",
    "flsd53",
    "focal",
    "focal_schedule",
    "gamma_curve",
    "gamma_horizon",
    "gamma_net",
    "gamma_scalar",
    "hessian_trace",
    "inverse_focal",
    "label_smoothing",
    "learned_smoothing",
    "margin_tail",
    "mbls",
    "mdca",
    "meta_calibration",
    "metacal",
    "mixup",
    "mmce",
    "soft_ece",
]
"""The files in `configs/method/`."""

OptimizerName = Literal["adam", "adamw", "bulk_sgd", "gd", "muon", "sam", "sgd"]
"""The keys of `metacal.optim.OPTIMIZERS`."""

MeasureName = Literal[
    "accuracy",
    "error",
    "nll",
    "brier",
    "confidence",
    "ece",
    "adaptive_ece",
    "classwise_ece",
    "mce",
    "debiased_ece",
    "overconfidence",
    "underconfidence",
    "smooth_ece",
    "sece",
    "kce",
    "skce",
    "auroc",
    "aurc",
]
"""The keys of `metacal.calibration.MEASURES`."""

DEFAULT_METHOD: MethodName = "metacal"
"""What trains where nobody says otherwise, from Python and from the command line."""
