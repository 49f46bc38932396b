"""Batch normalisation where several ranks have parts of a batch: by the statistics of all samples, or by each rank's.

torch's SyncBatchNorm works on GPUs alone, and once: its backward pass has no derivative. Here the statistics are two
sums over ranks (`ranks.summed`) among plain arithmetic, so that derivatives of every order, and along a direction,
are those of the whole batch, on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metacal import ranks
from metacal.errors import require

__all__ = ["UnionBatchNorm", "average_statistics", "synchronise", "synchronises"]


class UnionBatchNorm(_BatchNorm):
    """`nn.BatchNorm1d` to `3d`, which in training takes mean and variance over the samples of all ranks.

        mean = Σ_r Σ_i x_i / m,   var = Σ_r Σ_i (x_i − mean)² / m,   m = Σ_r m_r entries of a channel

    Inputs (N, C, …), N ≥ 0. Running statistics are then the same on all ranks. One rank: torch's own.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        require(input.ndim >= 2, f"input must have shape (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if ranks.size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims, shape = (0, *range(2, x.ndim)), (1, -1, *[1] * (x.ndim - 2))
        entries = x.new_full((1,), x.numel() // x.shape[1])
        sums = ranks.summed(torch.cat([x.sum(dims), entries]))
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centre = x - mean.view(shape)
        var = ranks.summed(centre.square().sum(dims)) / count
        if self.training and self.running_mean is not None:
            self._track(mean.detach(), (var * count / (count - 1)).detach())
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        out = centre * scale.view(shape)
        out = out if self.bias is None else out + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # of all batches: on the device, for which the host would have to wait
        rate: Any = 1.0 / self.num_batches_tracked.to(self.running_mean) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), rate)
        self.running_var.lerp_(var.to(self.running_var), rate)


def synchronise(model: nn.Module) -> nn.Module:
    """Make every `nn.BatchNorm1d` to `3d` of a model a `UnionBatchNorm`, in place; returns the model.

    Parameters, buffers, hooks and names stay what they are: the modules change their class, and nothing else.
    """
    for module in model.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = UnionBatchNorm
    return model


def synchronises(model: nn.Module) -> bool:
    """Whether a pass of the model in its present mode speaks to the other ranks."""
    return any(isinstance(m, UnionBatchNorm) and (m.training or m.running_mean is None) for m in model.modules())


def average_statistics(model: nn.Module) -> None:
    """Give all ranks the mean of their running statistics, for batch normalisation by each rank's own samples.

    These averages are linear in what they have seen and feed nothing back, so that it is enough to do this before they
    are read: before an evaluation, and before the model is saved.
    """
    own = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, UnionBatchNorm)]
    ranks.average_([t for m in own for t in (m.running_mean, m.running_var) if t is not None])
