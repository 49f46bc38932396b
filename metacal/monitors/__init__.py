"""What is watched while a model trains.

A monitor is anything with a `name`, a cadence `every` and `measure(state) -> {"split/measure": value}`. With
`every = k > 0` it measures after every k-th training step; with `every = 0` at each validation, when `state.val` holds
the predictions on the validation split. Monitors never change the training: no parameter, buffer, gradient or global
generator. What each costs is logged as ``time/monitor_<name>_ms``; a `Watch` runs them and makes dear ones wait.
"""

from metacal.monitors.calibration import CalibrationMonitor, CalibrationOptions
from metacal.monitors.curvature import CurvatureMonitor, CurvatureOptions, curvature_values, measurable
from metacal.monitors.gamma import GammaMonitor, GammaOptions
from metacal.monitors.margin import MarginMonitor, MarginOptions
from metacal.monitors.subset import SubsetMonitor, SubsetOptions
from metacal.monitors.watch import Charts, Monitor, MonitorOptions, State, Watch, Watched

__all__ = [
    "MONITORS",
    "CalibrationMonitor",
    "Charts",
    "CurvatureMonitor",
    "GammaMonitor",
    "MarginMonitor",
    "Monitor",
    "MonitorOptions",
    "State",
    "SubsetMonitor",
    "Watch",
    "Watched",
    "curvature_values",
    "measurable",
]

MONITORS: dict[str, type[MonitorOptions]] = {
    "calibration": CalibrationOptions,
    "subset": SubsetOptions,
    "curvature": CurvatureOptions,
    "gamma": GammaOptions,
    "margin": MarginOptions,
}
"""By name: dataclasses like `MonitorOptions`, whose `build` makes the monitors that a run's `monitor` keys ask for.

The options of all of them stand side by side in a config, so each has a name of its own.
"""
