"""Data: a source, four disjoint splits, and batches that are functions of (seed, stream, epoch, index)."""

from __future__ import annotations

from metacal.data.batches import Batches
from metacal.data.build import Data, build_data
from metacal.data.kind import InputKind, Task
from metacal.data.loaders import LoaderBatches
from metacal.data.splits import Folds, Split, Transform
from metacal.data.wrap import as_batches, as_split

__all__ = [
    "Batches",
    "Data",
    "Folds",
    "InputKind",
    "LoaderBatches",
    "Split",
    "Task",
    "Transform",
    "as_batches",
    "as_split",
    "build_data",
]
