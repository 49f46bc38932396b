"""The inner problem: per-sample loss + gamma source + penalties = what the backbone minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from metacal import losses
from metacal.errors import InputError, require

__all__ = ["Loss", "Penalty", "build_loss", "build_penalties"]

Loss = Callable[..., Tensor]
"""`(logits (N, K), labels (N,)[, gamma]) -> (N,)`."""

Penalty = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""`(model, x, y, logits, features) -> scalar`: of the backbone's parameters, never of the gamma source's."""


def build_loss(spec: str | Loss, with_gamma: bool) -> Loss:
    """The per-sample loss for a name of `metacal.losses.LOSSES` or a callable, and whether a gamma goes into it."""
    if not isinstance(spec, str):
        return spec
    require(
        spec in losses.LOSSES, f"loss must be a callable or one of {', '.join(sorted(losses.LOSSES))}, got {spec!r}"
    )
    require(
        not with_gamma or spec == "focal",
        f"gamma_net must be None with loss={spec!r}: only the focal loss takes a gamma",
    )
    return losses.LOSSES[spec]


def build_penalties(
    spec: Mapping[str, float | tuple[Penalty, float]] | None,
    known: Mapping[str, Penalty] | None = None,
) -> dict[str, tuple[Penalty, float]]:
    """`{name: weight or (callable, weight)}` -> `{name: (callable, weight)}`.

    A bare weight needs a name in `known`. Penalties of weight 0 are left out: they would be computed for nothing.
    """
    known = known or {}
    penalties: dict[str, tuple[Penalty, float]] = {}
    for name, entry in (spec or {}).items():
        if isinstance(entry, tuple):
            penalty, weight = entry
        else:
            if name not in known:
                choices = ", ".join(sorted(known)) or "none by name: give (callable, weight)"
                raise InputError(f"penalties has the unknown name {name!r}; known: {choices}")
            penalty, weight = known[name], entry
        require(weight >= 0, f"penalties[{name!r}] must have a weight >= 0, got {weight}")
        if weight > 0:
            penalties[name] = (penalty, float(weight))
    return penalties
