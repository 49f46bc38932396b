"""Images for benchmarks that train from a file: random pixels, since a step costs the same whatever they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_images(file: Path, n: int) -> None:
    """n training images of CIFAR-10's shape, with a class-dependent mean, the first 200 of them also for testing."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 10
    x = (rng.integers(0, 156, (n, 32, 32, 3)) + 10 * y[:, None, None, None]).astype(np.uint8)
    np.savez(file, x_train=x, y_train=y, x_test=x[:200], y_test=y[:200])
