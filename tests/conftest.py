"""What all tests share: few threads, hypothesis without wall-clock deadlines, and a collector with little to do."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "metacal", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("metacal")


def pytest_collection_finish() -> None:
    """What was imported until now stays: half a million objects, through which the collector need not go again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
