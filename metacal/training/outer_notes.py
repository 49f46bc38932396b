"""What is said of an outer problem that goes wrong: a gamma at its cap or at rest, a direction by chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from metacal.bilevel.signal import WINDOW, Signal, averaging_rate

__all__ = ["OuterNotes"]

GAP = 0.02  # |confidence - accuracy| on the meta images, on average, from which on there is something to mend


class OuterNotes:
    """Looks at what each outer step reports, and says each thing once.

    source: whose `gamma_max` and `gamma_min`, where it has them, bound the gammas.
    """

    def __init__(self, source: nn.Module | None) -> None:
        self.cap, self.floor = (getattr(source, name, None) for name in ("gamma_max", "gamma_min"))
        self.steps, self.gap = 0, 0.0
        self.gammas: list[float] = []
        self.said: list[str] = []

    def add(self, values: Mapping[str, float]) -> list[str]:
        """What there is to say after a step that reported `values`; nothing after one without an outer part."""
        if "meta_gap" not in values or "gamma_mean" not in values:
            return []
        self.steps += 1
        self.gap += averaging_rate(self.steps) * (values["meta_gap"] - self.gap)
        self.gammas = [*self.gammas, values["gamma_mean"]][-WINDOW:]
        said = [self._bounded(), self._frozen(), self._coin_toss(values["hypergradient_snr"])]
        new = {kind: text for kind, text in filter(None, said) if kind not in self.said}
        self.said += new
        return [*new.values()]

    def _bounded(self) -> tuple[str, str] | None:
        gamma = self.gammas[-1]
        if self.cap is not None and gamma > 0.95 * self.cap:
            return "cap", (
                f"gamma has run to its cap: {gamma:.3g} on average, with gamma.max={self.cap:g}, after {self.steps} "
                f"outer steps, {self._where}; a slower meta.lr or more meta images help where it should not"
            )
        if self.floor is not None and self.floor < 0 and gamma < 0.95 * self.floor:
            return "floor", (
                f"gamma has run to its lower bound: {gamma:.3g} on average, with gamma.min={self.floor:g}, after "
                f"{self.steps} outer steps, {self._where}"
            )
        return None

    def _frozen(self) -> tuple[str, str] | None:
        low, high = min(self.gammas), max(self.gammas)
        if len(self.gammas) < WINDOW or abs(self.gap) < GAP or high - low > 1e-3 * max(1.0, abs(high)):
            return None
        return "frozen", (
            f"gamma stands still at {high:.3g}: it moved by {high - low:.1g} in {WINDOW} outer steps, "
            f"{self._where}; try a larger meta.lr, a smaller gamma.tau, a longer meta.horizon"
        )

    def _coin_toss(self, ratio: float) -> tuple[str, str] | None:
        if self.steps < WINDOW or abs(self.gap) < GAP or ratio > Signal.COIN_TOSS:
            return None
        return "coin toss", (
            f"the hypergradient's sign is a coin toss: its signal-to-noise ratio over the last {WINDOW} outer "
            f"steps is {ratio:.2g}, {self._where}; try meta.objective=confidence_gap with meta.squared=true, larger "
            "meta batches, a longer meta.horizon"
        )

    @property
    def _where(self) -> str:
        more = "over" if self.gap > 0 else "under"
        return f"while the meta images are {100 * abs(self.gap):.1f} points {more}confident"

    def state_dict(self) -> dict[str, Any]:
        """Plain Python."""
        return {"steps": self.steps, "gap": self.gap, "gammas": list(self.gammas), "said": list(self.said)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.gap = state["steps"], state["gap"]
        self.gammas, self.said = list(state["gammas"]), list(state["said"])
