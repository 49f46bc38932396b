"""metacal: train calibrated classifiers and measure how true their confidence is.

The names below are loaded on first use, so that `import metacal` and `metacal --help` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Backbone": "metacal.models.backbone",
    "CalibratedModel": "metacal.deploy",
    "Fit": "metacal.training.fit",
    "GammaNet": "metacal.gamma",
    "InputError": "metacal.errors",
    "MetaStep": "metacal.bilevel",
    "Predictions": "metacal.predictions",
    "Report": "metacal.report.report",
    "calibrate": "metacal.training.posthoc",
    "evaluate": "metacal.report.report",
    "fit": "metacal.training.fit",
    "load": "metacal.training.saved",
}
_MODULES = (
    "batchnorm", "bilevel", "calibration", "curvature", "data", "losses", "margins", "models", "optim", "penalties",
    "ranks",
)  # fmt: skip

__all__ = [*_HOME, *_MODULES, "__version__"]

if TYPE_CHECKING:  # what type checkers and editors see; "as" says that a name is meant for others
    from metacal import batchnorm as batchnorm
    from metacal import bilevel as bilevel
    from metacal import calibration as calibration
    from metacal import curvature as curvature
    from metacal import data as data
    from metacal import losses as losses
    from metacal import margins as margins
    from metacal import models as models
    from metacal import optim as optim
    from metacal import penalties as penalties
    from metacal import ranks as ranks
    from metacal.bilevel import MetaStep as MetaStep
    from metacal.deploy import CalibratedModel as CalibratedModel
    from metacal.errors import InputError as InputError
    from metacal.gamma import GammaNet as GammaNet
    from metacal.models.backbone import Backbone as Backbone
    from metacal.predictions import Predictions as Predictions
    from metacal.report.report import Report as Report
    from metacal.report.report import evaluate as evaluate
    from metacal.training.fit import Fit as Fit
    from metacal.training.fit import fit as fit
    from metacal.training.posthoc import calibrate as calibrate
    from metacal.training.saved import load as load


def __getattr__(name: str) -> Any:
    try:
        if name in _MODULES or name == "sklearn":  # which loads scikit-learn, and so is in no list
            return importlib.import_module(f"metacal.{name}")
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        from metacal.errors import missing_package

        sentence = missing_package(f"metacal.{name}", error)
        if sentence is None:
            raise
        raise ImportError(sentence, name=error.name) from error
    raise AttributeError(f"module 'metacal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
