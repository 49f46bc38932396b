"""Optimizers and schedules: what torch.optim lacks, and all of them by name."""

from metacal.optim.basic import OptimizerOptions, parameter_groups
from metacal.optim.bulk_sgd import BulkSGD
from metacal.optim.factory import OPTIMIZERS, backbone_optimizer, build_optimizer
from metacal.optim.muon import Muon, muon_groups
from metacal.optim.sam import SAM
from metacal.optim.schedule import SCHEDULES, learning_rate_factor
from metacal.optim.transpose import TRANSPOSES

__all__ = [
    "OPTIMIZERS",
    "SAM",
    "SCHEDULES",
    "TRANSPOSES",
    "BulkSGD",
    "Muon",
    "OptimizerOptions",
    "backbone_optimizer",
    "build_optimizer",
    "learning_rate_factor",
    "muon_groups",
    "parameter_groups",
]
