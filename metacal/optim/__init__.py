"""Optimizers and schedules by name."""

from metacal.optim.factory import build_optimizer, parameter_groups
from metacal.optim.schedule import learning_rate_factor

__all__ = ["build_optimizer", "learning_rate_factor", "parameter_groups"]
