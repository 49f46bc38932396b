"""The bilevel step: gamma learned through the backbone's own optimizer step."""

from __future__ import annotations

from metacal.bilevel import engines
from metacal.bilevel.step import Last, MetaStep, NonFiniteError
from metacal.bilevel.tangent import TANGENT
from metacal.bilevel.unrolled import HIGHER

__all__ = ["ENGINES", "Last", "MetaStep", "NonFiniteError"]

ENGINES: tuple[str, ...] = (*engines.ENGINES, TANGENT, HIGHER)
"""Names of the engines that `MetaStep` takes."""
