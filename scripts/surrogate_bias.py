"""How far the surrogates are off on a perfectly calibrated model.

    python scripts/surrogate_bias.py [--draws 1000]

Confidence c ~ Beta(3, 1) (redrawn below 0.11, which 0.1 % are), the rest spread evenly over nine other classes,
and the prediction right with probability c. The true calibration error is 0, so the mean over draws that
is printed, with its standard error, is bias; `spread` in the CSV is the standard deviation of one draw. An
unbiased estimator's mean lies within a few standard errors of 0.

    --sizes 64 256 4096   batch sizes N          --csv   comma-separated, full precision
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from metacal.calibration.surrogates import dece, mmce, sece, skce, soft_ece

SURROGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sece h=.01": partial(sece, bandwidth=0.01),
    "sece h=.01 leave-one-out": partial(sece, bandwidth=0.01, self_term=False),
    "sece h=.05": partial(sece, bandwidth=0.05),
    "sece h=.05 leave-one-out": partial(sece, bandwidth=0.05, self_term=False),
    "dece": dece,
    "soft_ece": soft_ece,
    "mmce": mmce,
    "skce": skce,
}
CLASSES, LEAST = 10, 0.11


def calibrated_batches(size: int, draws: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`draws` batches (logits (size, 10), labels (size,)) in float64 whose every confidence is true."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        # Beta(3, 1) has the distribution function c³; above LEAST by inversion.
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        c = (LEAST**3 + (1 - LEAST**3) * uniform) ** (1 / 3)
        right = torch.rand(size, generator=generator, dtype=torch.float64) < c
        top = torch.randint(CLASSES, (size,), generator=generator)
        other = (top + torch.randint(1, CLASSES, (size,), generator=generator)) % CLASSES
        p = ((1 - c) / (CLASSES - 1))[:, None].repeat(1, CLASSES).scatter(1, top[:, None], c[:, None])
        yield p.log(), torch.where(right, top, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    print("surrogate,N,mean,stderr,spread" if args.csv else f"| surrogate | {' | '.join(map(str, args.sizes))} |")
    if not args.csv:
        print("|---" * (len(args.sizes) + 1) + "|")
    table: dict[str, list[str]] = {name: [] for name in SURROGATES}
    for size in args.sizes:
        values: dict[str, list[float]] = {name: [] for name in SURROGATES}
        for logits, labels in calibrated_batches(size, args.draws, args.seed):
            for name, surrogate in SURROGATES.items():
                values[name].append(surrogate(logits, labels).item())
        for name, draws in values.items():
            sample = torch.tensor(draws, dtype=torch.float64)
            mean, spread = sample.mean().item(), sample.std().item()
            stderr = spread / math.sqrt(args.draws)
            if args.csv:
                print(f"{name},{size},{mean!r},{stderr!r},{spread!r}", flush=True)
            table[name].append(f"{mean:.5f} ± {stderr:.5f}")
    if not args.csv:
        for name, cells in table.items():
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
