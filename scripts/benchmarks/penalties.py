"""Cost of the penalties: time of a penalised training step over a plain one, and extra peak memory.

    OMP_WAIT_POLICY=passive python scripts/benchmarks/penalties.py [--threads 1] [--models mlp resnet20] [--rounds 5]

Plain step: forward, cross-entropy, backward, SGD with momentum. A penalised step adds the penalty to the loss, with
the logits of the training forward at its disposal, as in training. `naive` is Hutchinson's trace in the way it is
usually written: vᵀHv by double backward, differentiated once more. Where PyTorch lacks the third derivative (BatchNorm
in training mode), normalisation is spelled out for it.

Times: all in turn, round after round in one process, the ratio of each round's time to that of the same round's plain
step; the median (and the smallest). Memory: peak resident size of a process that takes three steps, less that of the
plain step. Noise: the relative standard deviation of a trace over `--draws` draws, one probe each, and the mean cosine
of the angle between the gradients of two draws: the share of a draw's gradient that is signal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from metacal.autodiff.plain import PlainNorms
from metacal.models.resnet import resnet
from metacal.models.small import mlp
from metacal.penalties import PENALTIES, TracePenalty

BATCH = {"mlp": 128, "resnet20": 64}
NAIVE = "naive Hutchinson"
ENTRIES: dict[str, tuple[str, dict[str, object]]] = {
    "mbls": ("mbls", {}),
    "margin_tail": ("margin_tail", {}),
    "margin_tail, robust": ("margin_tail", {"robust": True}),
    "margin_smoothness": ("margin_smoothness", {}),
    "robust_kl": ("robust_kl", {}),
    "gn_trace": ("gn_trace", {}),
    "hessian_trace": ("hessian_trace", {}),
    "hessian_trace, a quarter of the batch": ("hessian_trace", {"batch": -4}),
}
TRACES = ("gn_trace", "hessian_trace", NAIVE)


class Naive:
    """vᵀHv with signs v, by double backward."""

    def __init__(self) -> None:
        self.step = 0
        self.spelled_out = False

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        params = [p for p in model.parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(self.step)
        v = [torch.randint(2, p.shape, generator=generator) * 2.0 - 1 for p in params]
        if self.spelled_out:
            with PlainNorms():
                logits = model(x)
        slope = torch.autograd.grad(F.cross_entropy(logits, y), params, create_graph=True)
        product = torch.autograd.grad(sum((g * t).sum() for g, t in zip(slope, v)), params, create_graph=True)
        return torch.stack([(h * t).sum() for h, t in zip(product, v)]).sum()


class Setting:
    """A network at the start of its training, with one batch."""

    def __init__(self, model: str, entry: str | None = None) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = mlp(10, (3, 32, 32)) if model == "mlp" else resnet(20, 10, (3, 32, 32))
        n = BATCH[model]
        generator = torch.Generator().manual_seed(1)
        self.x = torch.rand(n, 3, 32, 32, generator=generator)
        self.y = torch.randint(10, (n,), generator=generator)
        self.optimizer = SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self.penalty: Callable[..., Tensor] | None = None
        if entry == NAIVE:
            self.penalty = Naive()
            self.penalty.spelled_out = model != "mlp"
        elif entry is not None:
            name, options = ENTRIES[entry]
            quarter = {"batch": n // 4} if options.get("batch") == -4 else {}
            built = PENALTIES[name](**{**options, **quarter})
            self.penalty = built if isinstance(built, TracePenalty) else lambda net, x, y, z: built(net, x, y, z, None)

    def step(self) -> None:
        logits = self.net(self.x)
        loss = F.cross_entropy(logits, self.y)
        if self.penalty is not None:
            # so small a weight that all settings stay at one point
            loss = loss + 1e-9 * self.penalty(self.net, self.x, self.y, logits)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def draw(self, i: int) -> tuple[float, Tensor]:
        """The penalty's value and gradient with the i-th signs."""
        assert self.penalty is not None
        self.penalty.step = i  # type: ignore[attr-defined]
        value = self.penalty(self.net, self.x, self.y, self.net(self.x))
        grads = torch.autograd.grad(value, list(self.net.parameters()), allow_unused=True)
        return float(value.detach()), torch.cat([g.flatten() for g in grads if g is not None])


def noise(model: str, entry: str, draws: int) -> str:
    setting = Setting(model)
    for _ in range(30):
        setting.step()
    setting.penalty = Setting(model, entry).penalty
    values, gradients = zip(*(setting.draw(i) for i in range(draws)))
    units = [g / g.norm() for g in gradients]
    cosines = [float(a @ b) for i, a in enumerate(units) for b in units[:i]]
    mean = statistics.mean(values)
    return f"{statistics.stdev(values) / abs(mean):.1%} | {statistics.mean(cosines):.2f}"


def peak(model: str, entry: str, threads: int) -> float:
    """Peak resident size in MB of a process of its own."""
    command = [sys.executable, __file__, "--peak", model, entry, "--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def report(model: str, entries: list[str], args: argparse.Namespace) -> None:
    clock = time.process_time if args.cpu_time else time.perf_counter
    steps = {"plain": Setting(model).step, **{entry: Setting(model, entry).step for entry in entries}}
    for step in steps.values():
        step()
    ratios: dict[str, list[float]] = {entry: [] for entry in entries}
    plain: list[float] = []
    for _ in range(args.rounds):
        spent = {}
        for entry, step in steps.items():
            repeats = args.repeats if entry == "plain" else 1
            begin = clock()
            for _ in range(repeats):
                step()
            spent[entry] = (clock() - begin) / repeats
        plain.append(spent["plain"])
        for entry in entries:
            ratios[entry].append(spent[entry] / spent["plain"])
    base = peak(model, "plain", args.threads) if not args.no_memory else 0.0
    print(
        f"\n{model}, batch {BATCH[model]}, {args.threads} thread(s): plain step {1e3 * min(plain):.1f} ms (smallest)\n"
    )
    print("| penalty | step, × plain: median (smallest) | extra peak memory, MB | std of one draw | cosine |")
    print("|---|---|---|---|---|")
    for entry in entries:
        extra = "–" if args.no_memory else f"{peak(model, entry, args.threads) - base:+.0f}"
        spread = noise(model, entry, args.draws) if entry in TRACES and args.draws > 1 else "– | –"
        cost = f"{statistics.median(ratios[entry]):.2f} ({min(ratios[entry]):.2f})"
        print(f"| {entry} | {cost} | {extra} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="plain steps a round")
    parser.add_argument("--draws", type=int, default=8, help="draws for the noise of a trace; 1: leave it out")
    parser.add_argument("--only", nargs="+", metavar="PENALTY", help="some of: " + "; ".join([*ENTRIES, NAIVE]))
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: for one thread, busy machine")
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure memory")
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "PENALTY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        model, entry = args.peak
        setting = Setting(model, None if entry == "plain" else entry)
        for _ in range(3):
            setting.step()
        status = Path("/proc/self/status").read_text().splitlines()
        print(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024)
        return
    entries = args.only or [*ENTRIES, NAIVE]
    unknown = [e for e in entries if e not in (*ENTRIES, NAIVE)]
    if unknown:
        parser.error(f"unknown penalty {unknown[0]!r}")
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for model in args.models:
        report(model, entries, args)


if __name__ == "__main__":
    main()
