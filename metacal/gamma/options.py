"""What the options of a gamma source have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from metacal.models.backbone import Backbone
from metacal.options import check_options

__all__ = ["Around", "SourceOptions"]


class Around(NamedTuple):
    """The run that a source is made for; inputs() gives a batch of its training."""

    backbone: Backbone
    inputs: Callable[[], Tensor]
    epochs: int
    seed: int


@dataclass
class SourceOptions:
    """The options of a gamma source, whose `build` makes it.

    Attributes:
        learned: it has parameters, which the outer problem learns.
        follows: it has a method `update(predictions)` for predictions on the meta split, called after every epoch.
    """

    learned: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    def check(self, prefix: str = "") -> None:
        """Raise `InputError` for options out of range, named with the `prefix`, or that do not go together."""
        check_options(self, prefix)

    def build(self, around: Around) -> nn.Module:
        raise NotImplementedError
