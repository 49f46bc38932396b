"""Optimizers and schedules: what torch.optim lacks, and all of them by name."""

from metacal.optim.bulk_sgd import BulkSGD
from metacal.optim.factory import OPTIMIZERS, backbone_optimizer, build_optimizer, parameter_groups
from metacal.optim.muon import Muon, muon_groups
from metacal.optim.sam import SAM
from metacal.optim.schedule import learning_rate_factor

__all__ = [
    "OPTIMIZERS",
    "SAM",
    "BulkSGD",
    "Muon",
    "backbone_optimizer",
    "build_optimizer",
    "learning_rate_factor",
    "muon_groups",
    "parameter_groups",
]
