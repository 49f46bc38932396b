"""What derivatives beyond a first backward pass need of PyTorch: forward mode without the noise of its first use,
and attention by a kernel that has them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["dual_level", "plain_attention"]


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


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as plain matrix products: the fused kernels have no forward-mode and no second derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
