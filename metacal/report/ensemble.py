"""Several models as one: the mean of their probabilities."""

from __future__ import annotations

from collections.abc import Mapping

from metacal.errors import require
from metacal.predictions import Predictions

__all__ = ["average"]


def average(members: Mapping[str, Predictions]) -> Predictions:
    """The ensemble's predictions: p = 1/M Σ_m p^(m), the mean of the members' probabilities (N, K) in float64.

    Raises:
        InputError: naming the member whose samples or classes are not those of the first.
    """
    require(len(members) > 0, "members must hold at least one set of predictions, got none")
    (first, reference), *others = members.items()
    total = reference.probs.double()
    for name, p in others:
        _require_same_samples(first, reference, name, p)
        total = total + p.probs.double()
    return Predictions.from_probabilities(total / len(members), reference.labels)


def _require_same_samples(first: str, reference: Predictions, name: str, p: Predictions) -> None:
    ours, theirs = (len(reference), reference.n_classes), (len(p), p.n_classes)
    shape = "{} samples and {} classes"
    require(
        ours == theirs,
        f"an ensemble needs predictions for the same samples: {name} has {shape.format(*theirs)}, "
        f"{first} has {shape.format(*ours)}",
    )
    different = reference.labels != p.labels.to(reference.device)
    require(
        not bool(different.any()),
        f"an ensemble needs predictions for the same samples: the labels of {name} differ from those of {first} in "
        f"{int(different.sum())} of {len(p)} rows, the first at index {int(different.int().argmax())}",
    )
