"""Folds of samples with the classes' shares in each, for cross-fitting and for meta images."""

from __future__ import annotations

import numpy as np

__all__ = ["dealt"]


def dealt(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The fold of each sample, 0..count-1, int64 `(N,)`, at random.

    The sizes of two folds differ by at most one, and so do the numbers of samples of a class in them: the samples are
    shuffled, and dealt out one by one, class after class.
    """
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    fold = np.empty(len(labels), dtype=np.int64)
    fold[order] = np.arange(len(labels)) % count
    return fold
