"""Cost and error of the bilevel step: time over a plain training step, extra peak memory, relative error.

    OMP_WAIT_POLICY=passive python scripts/benchmarks/meta_step.py [--threads 1 2] [--models mlp resnet20
    resnet18] [--rounds 7]

Plain step: forward, focal loss with a fixed gamma, backward, SGD with momentum and weight decay. Meta step:
that and the outer part, on a meta batch as large as the training batch, gamma-net and its Adam included.
`library` is the same step in the way that users of `higher` write it: unroll, differentiate, copy the result
back. A horizon: the mean of so many steps, the last of which learns through all of them; `library` with it unrolls as
many. Tangent: one gamma for all, with an outer part at each step. Times: all engines in turn, round after round in one
process; the smallest of each (and the median). Memory: peak resident size of a process that takes three steps, less
that of the plain step, where glibc gives back what is freed: its heap would else keep some 100 MB, more or less from
one run to the next. Error: of the float32 hypergradient after 20 plain steps, against `higher` in float64 from the
same state.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from metacal import losses
from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import sece
from metacal.gamma import GammaNet, ScalarGamma
from metacal.models import Backbone, build_model
from metacal.models.options import ModelConfig

ENGINES: dict[str, tuple[str, dict[str, object]]] = {
    "forward": ("forward", {}),
    "forward, values recomputed": ("forward", {"reuse": False}),
    "reverse": ("reverse", {}),
    "difference": ("difference", {}),
    "difference, central": ("difference", {"central": True}),
}
HORIZON, TANGENT = 8, "tangent, one gamma"
BATCH = {"mlp": 128, "resnet20": 128, "resnet18": 64}


def network(model: str) -> nn.Module:
    torch.manual_seed(0)
    if model == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 10)
        )
    if model == "resnet18":
        from torchvision.models import resnet18

        return resnet18(num_classes=10)
    return build_model(ModelConfig(name=model), 10, (3, 32, 32))


class Setting:
    """One model with its batches and optimizers."""

    def __init__(self, model: str, dtype: torch.dtype = torch.float32) -> None:
        self.net = Backbone(network(model))
        self.gamma_net = GammaNet(self.net.in_features)
        nn.init.normal_(self.gamma_net.last.weight, std=0.1)
        self.net.to(dtype), self.gamma_net.to(dtype)  # drawn in float32: the same numbers in both precisions
        self.optimizer = SGD(self.net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.meta_optimizer = Adam(self.gamma_net.parameters(), lr=1e-3)
        n = BATCH[model]
        generator = torch.Generator().manual_seed(1)
        self.x, self.x_meta = (torch.randn(n, 3, 32, 32, generator=generator).to(dtype) for _ in range(2))
        self.y, self.y_meta = (torch.randint(10, (n,), generator=generator) for _ in range(2))

    @property
    def batches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.y, self.x_meta, self.y_meta

    def meta_step(self, engine: str, options: dict[str, object]) -> MetaStep:
        return MetaStep(
            self.net,
            self.optimizer,
            self.gamma_net,
            self.meta_optimizer,
            engine=engine,
            engine_options=options,
        )

    def plain(self) -> None:
        logits, _ = self.net(self.x)
        loss = losses.focal(logits, self.y, 3.0).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def horizon(self) -> MetaStep:
        return MetaStep(self.net, self.optimizer, self.gamma_net, self.meta_optimizer, every=HORIZON, horizon=HORIZON)

    def tangent(self) -> MetaStep:
        source = ScalarGamma()
        optimizer = Adam(source.parameters(), lr=1e-3)
        return MetaStep(self.net, self.optimizer, source, optimizer, engine="tangent", horizon_decay=0.9)

    def library(self, count: int = 1) -> None:
        import higher

        with higher.innerloop_ctx(self.net, self.optimizer, copy_initial_weights=False) as (functional, steps):
            for _ in range(count):
                logits, features = functional(self.x)
                self.gamma_net.observe(features.detach())
                steps.step(losses.focal(logits, self.y, self.gamma_net(features.detach())).mean())
            outer = sece(functional(self.x_meta)[0], self.y_meta)
            grads = torch.autograd.grad(outer, list(self.gamma_net.parameters()))
            with torch.no_grad():
                for p, new in zip(self.net.parameters(), functional.parameters()):
                    p.copy_(new)
                for p, state in zip(self.net.parameters(), steps.state[0].values()):
                    self.optimizer.state[p]["momentum_buffer"] = state["momentum_buffer"].detach().clone()
        for p, grad in zip(self.gamma_net.parameters(), grads):
            p.grad = grad
        self.meta_optimizer.step()


def runner(model: str, engine: str) -> Callable[[], object]:
    """What to time: one step, or as many as the horizon has."""
    setting = Setting(model)
    if engine == "plain":
        return setting.plain
    if engine == "library":
        return setting.library
    if engine == f"library, horizon {HORIZON}":
        return partial(setting.library, HORIZON)
    if engine == f"horizon {HORIZON}":
        several = setting.horizon()

        def window() -> None:
            for _ in range(HORIZON):
                several.step(*setting.batches)

        return window
    step = setting.tangent() if engine == TANGENT else setting.meta_step(*ENGINES[engine])
    return lambda: step.step(*setting.batches)


def times(model: str, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    several = [f"horizon {HORIZON}", f"library, horizon {HORIZON}"]
    steps = {engine: runner(model, engine) for engine in ("plain", *ENGINES, "library", TANGENT, *several)}
    for step in steps.values():
        step()
    spent: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(rounds):
        for engine, step in steps.items():
            start = clock()
            step()
            spent[engine].append((clock() - start) / (HORIZON if engine in several else 1))
    return {engine: sorted(values) for engine, values in spent.items()}


def errors(model: str) -> dict[str, float]:
    # a network fresh from its initialisation is too sensitive for any precision
    settled = Setting(model)
    for _ in range(20):
        settled.plain()

    def flat(dtype: torch.dtype, engine: str, options: dict[str, object]) -> Tensor:
        setting = Setting(model, dtype)
        setting.net.load_state_dict(settled.net.state_dict())
        setting.optimizer.load_state_dict(settled.optimizer.state_dict())
        hypergradient = setting.meta_step(engine, options).hypergradient(*setting.batches)
        return torch.cat([h.flatten() for h in hypergradient]).double()

    truth = flat(torch.float64, "higher", {})
    found = {name: flat(torch.float32, *spec) for name, spec in ENGINES.items()}
    found["library"] = flat(torch.float32, "higher", {})
    return {name: float((h - truth).norm() / truth.norm()) for name, h in found.items()}


def peak(model: str, engine: str, threads: int) -> float:
    """Peak resident size in MB of a process of its own, in which freed blocks from 64 kB on are not kept."""
    command = [sys.executable, __file__, "--peak", model, engine, "--threads", str(threads)]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.splitlines()[-1])


def report(
    model: str,
    threads: int,
    rounds: int,
    clock: Callable[[], float],
    memory: bool,
    accuracy: dict[str, float],
) -> None:
    spent = times(model, rounds, clock)
    plain = spent["plain"]
    base = peak(model, "plain", threads) if memory else 0.0
    print(f"\n{model}, batch {BATCH[model]}, {threads} thread(s): plain step {1e3 * plain[0]:.1f} ms (smallest)\n")
    print("| engine | time, × plain: smallest (median) | extra peak memory, MB | relative error |")
    print("|---|---|---|---|")
    for engine, values in spent.items():
        if engine == "plain":
            continue
        ratio = f"{values[0] / plain[0]:.2f} ({values[rounds // 2] / plain[rounds // 2]:.2f})"
        extra = f"{peak(model, engine, threads) - base:+.0f}" if memory else "–"
        name = "`higher` library" if engine == "library" else engine
        print(f"| {name} | {ratio} | {extra} | {accuracy.get(engine, math.nan):.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor time: for one thread on a busy machine"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure memory")
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "ENGINE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        torch.set_num_threads(args.threads[0])
        step = runner(*args.peak)
        for _ in range(3):
            step()
        status = Path("/proc/self/status").read_text().splitlines()
        print(json.dumps(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024))
        return
    clock = time.process_time if args.cpu_time else time.perf_counter
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for model in args.models:
        accuracy = errors(model)
        for threads in args.threads:
            torch.set_num_threads(threads)
            report(model, threads, args.rounds, clock, not args.no_memory, accuracy)


if __name__ == "__main__":
    main()
