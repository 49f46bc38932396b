"""The inner problem: per-sample loss + gamma source + class weights + penalties = what the backbone minimises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from metacal import losses
from metacal.errors import require
from metacal.options import check_options, option
from metacal.penalties.part import Penalty

__all__ = [
    "ClassWeighting",
    "Loss",
    "Penalty",
    "Term",
    "Weighting",
    "build_loss",
    "build_penalties",
    "class_weights",
]

Loss = Callable[..., Tensor]
"""`(logits (N, K), labels (N,)[, gamma]) -> (N,)`."""

_WEIGHTS = "none, balanced, or a list of numbers > 0, one for each class"


@dataclass
class Weighting:
    """How a penalty enters the inner objective: the options that every penalty has beside its own."""

    weight: float = option(0.0, "on average over the steps; 0: the penalty is left out", low=0)
    every: int = option(1, "steps: it enters every so many-th, with so many times its weight", low=1)
    ramp: float = option(0.0, "epochs over which the weight grows from 0", low=0)


@dataclass(frozen=True)
class Term:
    """A penalty in the inner objective.

    weight: of the penalty, averaged over steps. Every so many-th step it enters with `every` times that, so that
    `every` changes what the penalty costs and not how strong it is. ramp: epochs over which the weight grows linearly
    from 0.
    """

    penalty: Penalty
    weight: float
    every: int = Weighting.every
    ramp: float = Weighting.ramp

    def __post_init__(self) -> None:
        check_options(Weighting(self.weight, self.every, self.ramp), "a penalty's ")

    def weight_at(self, step: int, epoch: float) -> float:
        """The factor on the penalty at a step, counted from 0, and (fractional) epoch; 0 where it is left out."""
        if step % self.every != 0:
            return 0.0
        ramp = min(1.0, epoch / self.ramp) if self.ramp > 0 else 1.0
        return self.weight * self.every * ramp


@dataclass
class ClassWeighting:
    """Which weights the classes have in the mean of the loss, by `class_weights`."""

    class_weight: Any = option(
        "none",
        "weights of the classes in the mean loss: none, balanced (n / (K n_k)), or a list",
        valid=lambda spec: spec in ("none", "balanced") if isinstance(spec, str) else _positive(spec),
        must=_WEIGHTS,
    )


def class_weights(
    spec: Any, n_classes: int, labels: Tensor | None = None, names: Sequence[str] | None = None
) -> Tensor | None:
    """Weights w_k > 0 of the classes `(K,)`, with which the loss of a batch is Σ_i w_{y_i} ℓ_i / Σ_i w_{y_i}.

    That is the mean of `torch.nn.functional.cross_entropy(weight=w)`, for any of the losses.

    Args:
        spec: None or "none"; "balanced", n / (K n_k) over the K classes that occur in `labels`, as scikit-learn has it,
            1 for a class that does not; K numbers; or some of them by class, an index or a name of `names`, the others
            being 1.
        labels: of the training samples `(n,)`, which "balanced" counts.

    Raises `InputError` for anything else.
    """
    if spec is None or (isinstance(spec, str) and spec == "none"):
        return None
    if isinstance(spec, str):
        require(spec == "balanced", f"class_weight must be {_WEIGHTS}, got {spec!r}")
        require(
            labels is not None,
            "class_weight='balanced' counts the training labels, which are not known here (a DataLoader does not show "
            "them): give one number for each class",
        )
        assert labels is not None
        counts = torch.bincount(labels.cpu(), minlength=n_classes).double()
        balanced = len(labels) / (int((counts > 0).sum()) * counts)
        return torch.where(counts > 0, balanced, 1.0)
    numbers = _by_class(spec, n_classes, names) if isinstance(spec, Mapping) else spec
    listed = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    require(_positive(listed), f"class_weight must be {_WEIGHTS}, got {spec!r}")
    require(
        len(listed) == n_classes,
        f"class_weight must have one number for each of {n_classes} classes, got {len(listed)}",
    )
    return torch.tensor(listed, dtype=torch.float64)


def build_loss(spec: str | Loss, source: object | None) -> Loss:
    """The per-sample loss for a name of `metacal.losses.LOSSES` or a callable, and the source of what goes into it."""
    with_gamma = source is not None
    if getattr(source, "gamma_min", 0) < 0:
        function = spec if isinstance(spec, str) else getattr(spec, "func", spec)  # options may be bound to it
        name = next((name for name, loss in losses.LOSSES.items() if function in (name, loss)), None)
        require(
            name is None or name in losses.SIGNED,
            f"gamma_net gives negative gammas, which loss={name!r} does not take: use loss='signed_focal'",
        )
    if not isinstance(spec, str):
        return spec
    require(
        spec in losses.LOSSES, f"loss must be a callable or one of {', '.join(sorted(losses.LOSSES))}, got {spec!r}"
    )
    require(
        not with_gamma or losses.takes(losses.LOSSES[spec]) is not None,
        f"gamma_net must be None with loss={spec!r}: a gamma goes into "
        f"{', '.join(name for name, loss in losses.LOSSES.items() if losses.takes(loss))} only",
    )
    return losses.LOSSES[spec]


def build_penalties(spec: Mapping[str, float | tuple[Penalty, float] | Term] | None) -> dict[str, Term]:
    """`{name: weight, (callable, weight) or Term}` -> `{name: Term}`.

    A bare weight needs a name in `metacal.penalties.PENALTIES`. Penalties of weight 0 are left out: they would be
    computed for nothing.
    """
    terms: dict[str, Term] = {}
    for name, entry in (spec or {}).items():
        if isinstance(entry, Term):
            term = entry
        elif isinstance(entry, tuple):
            term = _term(name, *entry)
        else:
            from metacal.penalties import build_penalty  # with the networks' curvature behind it, not needed else

            term = _term(name, build_penalty(name), float(entry))
        if term.weight > 0:
            terms[name] = term
    return terms


def _term(name: str, penalty: Penalty, weight: float) -> Term:
    require(
        math.isfinite(weight) and weight >= 0,
        f"penalties[{name!r}] must have a weight >= 0 and finite, got {weight}",
    )
    return Term(penalty, float(weight))


def _positive(spec: Any) -> bool:
    """Whether it is a list of numbers > 0."""
    return isinstance(spec, (list, tuple)) and all(
        isinstance(w, Real) and not isinstance(w, bool) and 0 < float(w) < math.inf for w in spec
    )


def _by_class(weights: Mapping[Any, float], n_classes: int, names: Sequence[str] | None) -> list[float]:
    """One weight a class, 1 where there is none."""
    index = {k: k for k in range(n_classes)} | {name: k for k, name in enumerate(names or ())}
    for key in weights:
        require(
            key in index,
            f"class_weight must name classes, one of {', '.join(map(str, names or range(n_classes)))}, got {key!r}",
        )
    given = {index[key]: weight for key, weight in weights.items()}
    return [given.get(k, 1.0) for k in range(n_classes)]
