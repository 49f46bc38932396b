"""Random signs that depend on their place alone, what is drawn with them, and with which standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metacal.curvature.loss import FactorColumns, factor_rank, logit_factor
from metacal.curvature.problem import Problem

__all__ = ["Draw", "Estimate", "Probe", "sampled", "signs_at"]


def signs_at(shape: tuple[int, ...], first_row: int, key: tuple[int, ...], like: Tensor) -> Tensor:
    """Signs ±1 that depend only on (key, row, place in the row), so that they do not change with the chunk size.

    A counter run through the finaliser of splitmix64 (Steele et al. 2014); row = first_row + index along dim 0.
    """
    stream = 0
    for part in key:
        stream = ((stream ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (1 << 64)
        stream ^= stream >> 29
    size = math.prod(shape)
    per_row = size // shape[0]
    at = torch.arange(size, device=like.device) + first_row * per_row
    x = at * -7046029254386353131 + (stream - (1 << 63))
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return (1 - 2 * ((x >> 31) & 1)).to(like.dtype).view(shape)


@dataclass(frozen=True)
class Probe:
    """The signs of a penalty's estimate: `count` vectors of them by the key (seed, step).

    first: the place of the first sample in its batch, so that parts of a batch add up to the estimate of the whole.
    """

    hessian: bool
    count: int
    key: tuple[int, int]
    loss: str
    first: int

    def signs(self, probe: int, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Of a parameter."""
        return signs_at(shape, 0, (*self.key, probe, place), like)

    def rows(self, probe: int, place: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Of samples, by their place in the batch."""
        return signs_at(shape, self.first, (*self.key, probe, place), like)

    def columns(self, z: Tensor) -> tuple[Sequence[Tensor], float]:
        """Cotangents (N, K) of the logits, and the weight of each one's squared norm in the mean.

        With as many probes as a factor of S has columns these take the place of the signs: they are exact.
        """
        if self.count >= factor_rank(z.shape[1], self.loss):
            return FactorColumns(z, self.loss), 1.0
        drawn = [logit_factor(z, self.rows(i, 0, tuple(z.shape), z), self.loss) for i in range(self.count)]
        return drawn, 1.0 / self.count

    @property
    def stream(self) -> int:
        """Seed of the random numbers that the network draws itself."""
        return (self.key[0] * 0x9E3779B1 + self.key[1] * 0x85EBCA77 + 1) % (1 << 62)


@dataclass(frozen=True)
class Estimate:
    """value ± stderr (one standard deviation of the sampling; 0 for an exact value), how, and from how many draws."""

    value: float
    stderr: float
    method: str = ""
    draws: int = 1


def _standard_error(draws: list[Tensor], second: tuple[Tensor, Tensor] | None) -> float:
    """Error of the mean over examples and probes; `second`: two draws of the same rows, for a single probe.

    From the rows only the share of the noise in the draws' second moment is taken, and the moment itself from all
    examples: a few of them carry most of it, and the rows may have missed these.
    """
    n = len(draws[0])
    if second is None:
        values = torch.stack(draws).double()
        within = values.var(0).mean() / len(draws)
    else:
        one, two = (d.double() for d in second)
        moment = (one.square() + two.square()).mean() / 2
        share = (one - two).square().mean() / 2 / moment if float(moment) > 0 else moment
        within = share * draws[0].double().square().mean()
    return math.sqrt(float(within) / n)


Draw = Callable[[Problem, int, tuple[int, ...]], Tensor]  # (examples, index of the first, key of the probe) → (n,)


def sampled(problem: Problem, chunk_size: int | None, probes: int, seed: int, draw: Draw) -> tuple[float, float]:
    """Mean and standard error of `probes` draws an example.

    A single probe cannot tell its noise from the spread between examples, so it is repeated on every 16th example
    (32 at least) for the error's sake.
    """
    step = len(problem) if chunk_size is None else chunk_size

    def run(part: Problem, first: int, key: tuple[int, ...]) -> Tensor:
        return torch.cat([draw(p, first + i * step, key) for i, p in enumerate(part.parts(chunk_size))])

    draws = [run(problem, 0, (seed, probe)) for probe in range(probes)]
    second = None
    if probes == 1:
        n = len(problem)
        rows = torch.arange(0, n, max(1, n // max(32, n // 16)), device=problem.x.device)
        again = run(problem.part(rows), n, (seed, probes))
        second = (draws[0][rows], again)
    value = float(torch.stack(draws).double().mean())
    return value, _standard_error(draws, second)
