"""What a penalty with a name is: a dataclass of its options, whose instances are called by the training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from metacal.options import check_options, option
from metacal.pixels import UNITS, Pixels, check_pixels

__all__ = ["InputPart", "Penalty", "PenaltyPart"]


Penalty = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""`(model, x, y, logits, features) -> scalar`: of the backbone's parameters, never of the gamma source's.

One with an attribute `batch` is a mean over the first so many samples of a batch alone.
One with an attribute `step` draws at random: it is told the number of the step, and draws from that alone. One with an
attribute `offset` is told which sample of the batch is its first, where a batch is taken in parts.
One with a method `look` is shown inputs with `look(x)` when training begins, and raises `InputError` for those that it
cannot work on: a step on a GPU looks at no values.
One with a true attribute `batchwise` is no mean over samples, and so not the sum of its values on parts of a batch. If
it is `of_logits` too, a function of the logits and labels, several ranks compute it of the logits of all of them.
"""


@dataclass
class PenaltyPart:
    """`(model, x, y, logits, features) -> scalar`, checked when it is made.

    Attributes:
        batchwise: no mean over samples, and so not the sum of its values on parts of a batch.
        first_order: can be differentiated once only.
        of_logits: a function of the logits and labels alone, so that θ reaches it by the logits only.
        needs_pixels: is in units of pixels, so that it must be known how the inputs are made of these.
    """

    batchwise: ClassVar[bool] = False
    first_order: ClassVar[bool] = False
    of_logits: ClassVar[bool] = False
    needs_pixels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        raise NotImplementedError


@dataclass(kw_only=True)
class InputPart(PenaltyPart):
    """One that perturbs the input, or differentiates in it, in units of pixels or of the inputs."""

    units: str = option(
        "pixels", "of distances in the input: pixels in [0, 1], or the inputs as they are", choices=UNITS
    )
    pixels: Pixels | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pixels(self.pixels)

    @property
    def needs_pixels(self) -> bool:  # type: ignore[override]
        return self.units == "pixels"

    @property
    def scale(self) -> Pixels | None:
        """What the units are made of inputs by; None where they are those of the inputs."""
        return self.pixels if self.units == "pixels" else None
