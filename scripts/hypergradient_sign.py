"""Which outer gradients point the right way: the share of them that would move conf - acc towards 0.

    python scripts/hypergradient_sign.py cifar10.npz [--draws 40] [--horizons 1 4 8 16]

A net is trained with one fixed gamma (MLP 3072-200-200-10 tanh, 3,000 images, SGD .05 with momentum and cosine decay,
30 epochs). After some epochs, with conf - acc on held-out images as printed, the same windows of the last K training
steps and the same meta batches are differentiated for every objective. Where the net is overconfident gamma should
rise: dM/dgamma < 0 is right; where it is underconfident the other way round. Printed: the share that is right, and in
brackets the mean of -dM/dgamma over its standard deviation, with the sign of what is right.

    --gamma 1      the fixed gamma          --meta 256     images of a meta batch
    --epochs 1 4 10 25    when to look      --csv          comma-separated
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor, nn

from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import brier, confidence_gap, mmce, nll, sece, soft_ece
from metacal.gamma import ScalarGamma

OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sece h=.01": sece,
    "sece h=.05 l2": partial(sece, bandwidth=0.05, norm="l2"),
    "sece h by batch, l2": partial(sece, adaptive=True, norm="l2"),
    "soft_ece": soft_ece,
    "soft_ece by batch": partial(soft_ece, adaptive=True),
    "mmce": mmce,
    "confidence_gap squared": partial(confidence_gap, squared=True),
    "gap squared + .1 nll": lambda z, y: confidence_gap(z, y, squared=True) + 0.1 * nll(z, y),
    "brier": brier,
    "nll": nll,
}
TRAIN, HELD_OUT, BATCH, EPOCHS = 3000, 6000, 128, 30


def load(file: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and held-out ones, standardised by the former."""
    with np.load(file) as arrays:
        x = torch.from_numpy(arrays["x_train"][: TRAIN + HELD_OUT]).float()
        y = torch.from_numpy(np.asarray(arrays["y_train"][: TRAIN + HELD_OUT])).long()
    x = (x - x[:TRAIN].mean()) / x[:TRAIN].std()
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


@torch.no_grad()
def gap(model: nn.Module, x: Tensor, y: Tensor) -> float:
    confidence, predicted = model(x).softmax(1).max(1)
    return float(confidence.mean() - (predicted == y).float().mean())


def slopes(model: nn.Module, optimizer: torch.optim.Optimizer, source: nn.Module, horizon: int, draws: int,
           size: int, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:  # fmt: skip
    """dM/dscore of each objective `(draws,)`; a window starts from a state `horizon` steps before."""
    x, y, x_held, y_held = data
    found: dict[str, list[float]] = {name: [] for name in OBJECTIVES}
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        batches = [torch.randperm(len(x), generator=generator)[:BATCH] for _ in range(horizon)]
        meta = torch.randperm(len(x_held), generator=generator)[:size]
        for name, objective in OBJECTIVES.items():
            step = MetaStep(
                *copy.deepcopy((model, optimizer)), source, None, outer=objective, every=horizon, horizon=horizon
            )
            xs, ys = [x[i] for i in batches], [y[i] for i in batches]
            slope = step.hypergradient(
                xs if horizon > 1 else xs[0], ys if horizon > 1 else ys[0], x_held[meta], y_held[meta]
            )
            found[name].append(float(slope[0]))
    return {name: torch.tensor(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help=".npz with x_train, y_train, such as `metacal` reads")
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--horizons", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 4, 10, 25])
    parser.add_argument("--gamma", type=float, default=1.0)
    parser.add_argument("--meta", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = load(options.data)
    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(data[0][0].numel(), 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(),
        nn.Linear(200, int(data[1].max()) + 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    source = ScalarGamma(options.gamma)
    step = MetaStep(model, optimizer, source)
    rows: list[tuple[str, float, int, dict[str, Tensor]]] = []
    per_epoch = TRAIN // BATCH
    for epoch in range(max(options.epochs)):
        for i, batch in enumerate(torch.randperm(TRAIN).split(BATCH)[:per_epoch]):
            done = (epoch * per_epoch + i) / (EPOCHS * per_epoch)
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * done)) / 2
            step.step(data[0][batch], data[1][batch])
        if epoch + 1 in options.epochs:
            difference = gap(model, *data[2:])
            for horizon in options.horizons:
                found = slopes(model, optimizer, source, horizon, options.draws, options.meta, data)
                rows.append((f"{epoch + 1}", difference, horizon, found))
                print(f"epoch {epoch + 1}, horizon {horizon} done", file=sys.stderr, flush=True)
    _print(rows, options.csv)


def _print(rows: list[tuple[str, float, int, dict[str, Tensor]]], as_csv: bool) -> None:
    cells = [["epoch", "conf - acc", "horizon", *OBJECTIVES]]
    for epoch, difference, horizon, found in rows:
        right = math.copysign(1.0, difference)
        row = [epoch, f"{difference:+.3f}", str(horizon)]
        for values in found.values():
            share = float((values * -right > 0).double().mean())
            row.append(f"{share:.2f} [{-right * float(values.mean() / values.std()):+.1f}]")
        cells.append(row)
    for i, row in enumerate(cells):
        print(",".join(row) if as_csv else "| " + " | ".join(row) + " |")
        if i == 0 and not as_csv:
            print("|" + " --- |" * len(row))


if __name__ == "__main__":
    main()
