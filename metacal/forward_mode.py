"""PyTorch's forward-mode differentiation, entered without the noise of its first use."""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager

import torch
from torch.autograd import forward_ad

__all__ = ["dual_level"]


@functools.cache
def _load_rules() -> None:
    """Make PyTorch load its forward-mode rules, which in some releases warns of deprecated calls of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def dual_level() -> AbstractContextManager[None]:
    """`torch.autograd.forward_ad.dual_level()`, after the rules are loaded."""
    _load_rules()
    return forward_ad.dual_level()
