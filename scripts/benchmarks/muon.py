"""What Muon's step and its transpose cost, and how far the engine `difference` is off behind it.

    OMP_WAIT_POLICY=passive python scripts/benchmarks/muon.py [--rounds 9] [--wall-time]

Cost: of the optimizer's step alone, and of `transposed_update` (made before the step, applied to one cotangent after
it), over a plain training step (forward, cross-entropy, backward, SGD with momentum) of the same network on a batch of
128; the smallest of the rounds, in processor time of one thread. Error: of the hypergradient of one gamma-net step by
`difference` and its central form against `forward`, both in float32 from the same state after 20 steps, under SGD and
under Muon, over five seeds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from metacal.bilevel import MetaStep
from metacal.gamma import GammaNet
from metacal.models import Backbone, build_model
from metacal.models.options import ModelConfig
from metacal.optim import Muon, muon_groups
from metacal.optim.transpose import transposed_update

BATCH, SEEDS = 128, 5
NETS: dict[str, dict[str, object]] = {
    "mlp 64-32-10": {"name": "mlp", "hidden": [32]},
    "mlp 3072-200-200-10": {"name": "mlp"},
    "cnn, width 8": {"name": "cnn", "width": 8},
    "resnet20": {"name": "resnet20"},
}
OF_ERROR = ("mlp 64-32-10", "cnn, width 8")


def sgd(net: nn.Module) -> Optimizer:
    return SGD(net.parameters(), lr=0.01, momentum=0.9)


def muon(net: nn.Module) -> Optimizer:
    return Muon(muon_groups(net, lr=0.02))


class Setting:
    """A network with one batch to train on and one for the outer objective."""

    def __init__(self, name: str, make: Callable[[nn.Module], Optimizer], seed: int = 0) -> None:
        torch.manual_seed(seed)
        shape = (1, 8, 8) if name.startswith("mlp 64") else (3, 32, 32)
        self.net = Backbone(build_model(ModelConfig(**NETS[name]), 10, shape))  # type: ignore[arg-type]
        self.optimizer = make(self.net)
        self.x, self.x_meta = (torch.randn(BATCH, *shape) for _ in range(2))
        self.y, self.y_meta = (torch.randint(10, (BATCH,)) for _ in range(2))
        self.gamma_net = GammaNet(self.net.in_features)
        nn.init.normal_(self.gamma_net.last.weight, std=0.1)

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.net(self.x)[0], self.y).backward()

    def plain(self) -> None:
        self.backward()
        self.optimizer.step()

    def hypergradient(self, engine: str, options: dict[str, object]) -> Tensor:
        outer = Adam(self.gamma_net.parameters())
        step = MetaStep(self.net, self.optimizer, self.gamma_net, outer, engine=engine, engine_options=options)
        parts = step.hypergradient(self.x, self.y, self.x_meta, self.y_meta)
        return torch.cat([part.flatten() for part in parts])


def costs(name: str, rounds: int, clock: Callable[[], float]) -> str:
    """Smallest times of a plain step, Muon's step, and its transpose."""
    plain, own = Setting(name, sgd), Setting(name, muon)
    params = list(own.net.parameters())
    spent: dict[str, list[float]] = {"plain": [], "step": [], "with transpose": []}

    def timed(what: str, work: Callable[[], object]) -> None:
        begin = clock()
        work()
        spent[what].append(clock() - begin)

    def step_and_transpose() -> None:
        back = transposed_update(own.optimizer, params)
        own.optimizer.step()
        back([torch.ones_like(p) for p in params])

    for _ in range(rounds):
        timed("plain", plain.plain)
        own.backward()
        timed("step", own.optimizer.step)
        own.backward()
        timed("with transpose", step_and_transpose)
    unit, step, both = (min(values) for values in spent.values())
    return f"| {name} | {1e3 * unit:.1f} | {step / unit:.2f} | {(both - step) / unit:.2f} |"


def errors(name: str, make: Callable[[nn.Module], Optimizer]) -> list[str]:
    """Median relative error of both forms of `difference` over the seeds, with the largest."""
    cells = []
    for options in ({}, {"central": True}):
        off = []
        for seed in range(SEEDS):
            setting = Setting(name, make, seed)
            for _ in range(20):
                setting.plain()
            exact = setting.hypergradient("forward", {})
            off.append(float((setting.hypergradient("difference", options) - exact).norm() / exact.norm()))
        cells.append(f"{statistics.median(off):.2%} ({max(off):.2%})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall-time", action="store_true", help="count time as it passes: for a quiet machine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print("| network, batch 128 | plain step, ms | Muon's step, × plain | its transpose, × plain |\n|---|---|---|---|")
    for name in NETS:
        print(costs(name, args.rounds, time.perf_counter if args.wall_time else time.process_time), flush=True)
    print("\n| error of the hypergradient | difference: median (largest) | central: median (largest) |\n|---|---|---|")
    for name in OF_ERROR:
        for optimizer, make in (("SGD", sgd), ("Muon", muon)):
            print(f"| {name}, {optimizer} | {' | '.join(errors(name, make))} |", flush=True)


if __name__ == "__main__":
    main()
