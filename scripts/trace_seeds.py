"""How far one probe of Tr G is off on a convolutional network, against the standard error that it gives of itself.

    python scripts/trace_seeds.py [--seeds 14] [--images 256]

A ResNet-20 in evaluation mode after 20 steps on random images; the exact trace by K − 1 columns, and one probe with
each of the seeds. Printed: the root mean square of the relative errors, and the spread of the errors in units of their
own standard errors, which is 1 where these are right.
"""

from __future__ import annotations

import argparse
import math
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F

from metacal.curvature import gn_trace
from metacal.models.resnet import resnet


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=14)
    parser.add_argument("--images", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(0)
    net = resnet(20, 10, (3, 32, 32))
    x, y = torch.randn(args.images, 3, 32, 32), torch.randint(10, (args.images,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for i in range(20):
        rows = torch.arange(64) + 64 * i
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows % args.images]), y[rows % args.images]).backward()
        optimizer.step()
    net.eval()
    exact = gn_trace(net, x, y, exact=True).value
    off, own = [], []
    for seed in range(args.seeds):
        estimate = gn_trace(net, x, y, seed=seed)
        off.append(estimate.value / exact - 1)
        own.append((estimate.value - exact) / estimate.stderr)

    def rms(values: list[float]) -> float:
        return math.sqrt(sum(value**2 for value in values) / len(values))

    print(f"Tr G = {exact:.1f}; {args.seeds} seeds on {args.images} images:")
    print(f"root mean square error {rms(off):.1%}, {rms(own):.2f} of their own standard errors")


if __name__ == "__main__":
    main()
