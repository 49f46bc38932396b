"""How many matrix products BulkSGD's eigenvectors take, and how near they are to the exact ones.

    python scripts/bulk_sgd_accuracy.py [--steps 20] [--seed 0]

An MLP 64-100-10 with ReLU learns the digits in float32, batches of 128, SGD with momentum 0.9. From its 20th step on,
with a new batch at each, the vectors of the Hessian and of the Gauss-Newton matrix are computed for k = 1, 3, 5 at two
tolerances: cold (from a random start) and warm (from the sum of the last step's). Printed: the mean number of products,
and the largest sine of the principal angles between the span found warm and that of Lanczos at 1e-10 in float64, over
four of the batches.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from metacal.curvature.spectrum import Eigen, top_eigenpairs

FIRST, COMPARED = 20, 4
NAMES = {"hessian": "Hessian", "gn": "Gauss–Newton"}


def flat(pairs: Sequence[Eigen]) -> Tensor:
    """The vectors as columns (P, k) in float64."""
    return torch.stack([torch.cat([part.flatten() for part in pair.vector]) for pair in pairs], 1).double()


def largest_sine(a: Tensor, b: Tensor) -> float:
    """Of the principal angles between the spans of the columns of a and b."""
    (qa, _), (qb, _) = torch.linalg.qr(a), torch.linalg.qr(b)
    return float(torch.linalg.matrix_norm(qb - qa @ (qa.T @ qb), 2))


def states(steps: int, seed: int) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """The network before each of the steps FIRST, …, with that step's batch."""
    torch.manual_seed(seed)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(FIRST + steps):
        rows = torch.randperm(len(y))[:128]
        if step >= FIRST:
            seen.append((copy.deepcopy(net), x[rows], y[rows]))
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return seen


def row(seen: Sequence[tuple[nn.Module, Tensor, Tensor]], matrix: str, k: int, tol: float) -> str:
    cold, warm, sines = [], [], []
    last = None
    for i, (net, x, y) in enumerate(seen):
        cold.append(top_eigenpairs(net, x, y, k, matrix=matrix, tol=tol, seed=i)[0].products)
        start = None if last is None else [torch.stack(parts).sum(0) for parts in zip(*(p.vector for p in last))]
        last = top_eigenpairs(net, x, y, k, matrix=matrix, tol=tol, start=start, seed=i)
        if start is not None:
            warm.append(last[0].products)
        if i % (len(seen) // COMPARED or 1) == 1 and len(sines) < COMPARED:
            exact = top_eigenpairs(
                copy.deepcopy(net).double(), x.double(), y, k, matrix=matrix, tol=1e-10, max_products=400
            )
            assert all(pair.converged for pair in exact)
            sines.append(largest_sine(flat(exact), flat(last)))
    return f"{statistics.mean(cold):.1f}, {statistics.mean(warm):.1f} | {max(sines):.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seen = states(args.steps, args.seed)
    print("| matrix, k | tol 1e-2: cold, warm | sine | tol 1e-3: cold, warm | sine |\n|---|---|---|---|---|")
    for matrix, name in NAMES.items():
        for k in (1, 3, 5):
            print(f"| {name}, {k} | {' | '.join(row(seen, matrix, k, tol) for tol in (1e-2, 1e-3))} |", flush=True)


if __name__ == "__main__":
    main()
