"""Reports: predictions of a model, their measures with intervals, tables and figures."""

from __future__ import annotations

from metacal.report.figures import confidence_histogram, reliability_curves, reliability_diagram
from metacal.report.report import Report, evaluate, predict
from metacal.report.tables import Table, methods_table

__all__ = [
    "Report",
    "Table",
    "confidence_histogram",
    "evaluate",
    "methods_table",
    "predict",
    "reliability_curves",
    "reliability_diagram",
]
