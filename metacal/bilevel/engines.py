"""The engines by name; `metacal.bilevel.unrolled` holds the reference, which works otherwise."""

from __future__ import annotations

from metacal.bilevel.difference import Difference
from metacal.bilevel.passes import Engine, Forward, Reverse

__all__ = ["ENGINES"]

ENGINES: dict[str, type[Engine]] = {"forward": Forward, "difference": Difference, "reverse": Reverse}
"""`ENGINES[name](network, **options)`."""
