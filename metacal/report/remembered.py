"""What was measured of a run's predictions, kept beside them: the next comparison measures only what is new.

A value is kept under a digest of all that it was computed from: the scores and labels, the measure and its options, the
resamples, the code of the measures and the versions below it. So it is never out of date, and the file can be removed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

import metacal
from metacal.calibration import MEASURES
from metacal.errors import RunError
from metacal.files import UNREADABLE, arrays_in, write_atomically
from metacal.predictions import Predictions
from metacal.report.significance import Sampled, sample_one

__all__ = ["Remembered", "digest_of"]


class Remembered:
    """The measured values of one run, on the resamples `counts` (N, R) of `draw_counts`.

    Args:
        file: where they are kept: an npz file of names (E,) and values (E, 1 + R), the first on all samples, which
            belong to the resamples and code in `made_by`. One that cannot be read or belongs to others is written anew.
            None: nowhere.
        counts: see `sample_one`.
        made_by: `digest_of(counts)`, which all runs of a comparison share.
    """

    def __init__(self, file: Path | None, counts: Tensor, made_by: str) -> None:
        self.file, self.counts, self.made_by = file, counts, made_by
        self.rows: dict[str, np.ndarray] = {}
        self.grown = False
        with suppress(*UNREADABLE, KeyError):
            kept = {} if file is None else arrays_in(file)
            if str(kept["made_by"]) == made_by and kept["values"].shape[1:] == (1 + counts.shape[1],):
                self.rows = dict(zip(kept["names"].tolist(), kept["values"].astype(float)))

    def sample(self, measures: Mapping[str, Mapping[str, Any]], p: Predictions) -> dict[str, Sampled]:
        """`sample_one`, of which only measures that are not known yet are computed."""
        content = _content(p)
        names = {m: f"{m} {sorted(options.items())} {content}" for m, options in measures.items() if _is_ours(m)}
        new = {m: options for m, options in measures.items() if names.get(m) not in self.rows}
        sampled = sample_one(new, p, self.counts) if new else {}
        for measure in sampled.keys() & names.keys():
            self.rows[names[measure]] = np.concatenate([sampled[measure].values, sampled[measure].resampled[0]])
            self.grown = True
        for measure in measures.keys() - sampled.keys():
            row = self.rows[names[measure]]
            sampled[measure] = Sampled(row[:1], row[None, 1:])
        return {measure: sampled[measure] for measure in measures}

    def save(self) -> None:
        """Keep what is new; where the folder cannot be written, nothing is kept."""
        if self.file is not None and self.grown:
            names, values = list(self.rows), np.stack([*self.rows.values()])

            def write(file: BinaryIO) -> None:
                np.savez(file, made_by=self.made_by, names=names, values=values)

            with suppress(RunError):
                write_atomically(self.file, write, durable=False)


def digest_of(counts: Tensor) -> str:
    """Of the resamples, and of everything but the predictions and options that makes a value what it is."""
    return _digest(_code().encode(), counts.contiguous().numpy())


@functools.cache
def _code() -> str:
    """Of the modules that measure, and of the versions of what they stand on."""
    root = Path(metacal.__file__).parent
    files = [root / "predictions.py", root / "report/significance.py", *sorted((root / "calibration").glob("*.py"))]
    versions = f"{metacal.__version__} {torch.__version__} {np.__version__}"
    return _digest(versions.encode(), *(file.read_bytes() for file in files if file.is_file()))


def _content(p: Predictions) -> str:
    """Of the scores, their kind, and the labels."""
    scores = p.probs if p.logits is None else p.logits
    kind = f"{p.logits is None} {scores.dtype} {tuple(scores.shape)}"
    return _digest(kind.encode(), *(t.cpu().contiguous().numpy() for t in (scores, p.labels)))


def _digest(*parts: Any) -> str:
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def _is_ours(measure: str) -> bool:
    """Whether `_code` covers the measure: it does not know the code of one that somebody has added."""
    record = MEASURES[measure]
    return all(
        getattr(f, "__module__", "").startswith("metacal.calibration.") for f in (record.function, record.weighted) if f
    )
