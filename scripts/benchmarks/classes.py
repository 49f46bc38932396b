"""Time and extra memory of measures, losses, surrogates and traces with a thousand classes or more.

    python scripts/benchmarks/classes.py                                     # 50,000 samples of 1,000 classes (minutes)
    python scripts/benchmarks/classes.py --size 2000x21000
    python scripts/benchmarks/classes.py --only classwise_ece "gn_trace, exact"

Every row is a process of its own, which makes float32 logits 2 N(0, 1) and labels that are right half of the time,
runs the part once on a few rows, resets the kernel's high-water mark and reports by how much the peak of the full run
exceeds the resident size before it (Linux only), and the processor's time. Losses and surrogates include the gradient
in the logits; the mixed derivative is that of ⟨∂ℓ/∂z, v⟩ in gamma, which the bilevel step takes, with v = z. Traces and
robust margins are of a perceptron with 64 inputs and 128 hidden units on as many examples.

    python scripts/benchmarks/classes.py --stream --size 1000000x1000         # beside torchmetrics, batch by batch

`--stream` gives 1,024 probabilities at a time to metacal's accumulator, whose state is the sums per bin and class, and
to torchmetrics' calibration error, which keeps every confidence: seconds of all updates, the making of the batches left
out, and how much the peak grows after the first batch. `--limit MB` makes the script fail where a row takes more.
"""

from __future__ import annotations

import argparse
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

from metacal import gamma, losses, margins
from metacal.calibration import differentiable
from metacal.calibration.accumulate import CalibrationAccumulator
from metacal.calibration.measures import MEASURES
from metacal.curvature import gn_sharpness, gn_trace, hessian_trace
from metacal.predictions import Predictions

Run = Callable[[Tensor, Tensor], object]
STEP = 1 << 22  # entries of the logits that are drawn, or streamed, at a time


def data(n: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z, y = torch.empty(n, k), torch.empty(n, dtype=torch.int64)
    for rows in torch.arange(n).split(max(1, STEP // k)):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        torch.randn(len(rows), k, generator=generator, out=z[part]).mul_(2)
        drawn = torch.randint(k, (len(rows),), generator=generator)
        y[part] = torch.where(torch.rand(len(rows), generator=generator) < 0.5, z[part].argmax(1), drawn)
    return z, y


def measured(name: str, z: Tensor, y: Tensor) -> object:
    return MEASURES[name](Predictions.from_logits(z, y))


def streamed(z: Tensor, y: Tensor) -> object:
    total = CalibrationAccumulator(z.shape[1])
    for rows in range(0, len(z), 1024):
        total.update(z[rows : rows + 1024], y[rows : rows + 1024])
    return total.compute()


def loss_gradient(loss: Callable[[Tensor, Tensor], Tensor], z: Tensor, y: Tensor) -> object:
    z = z.detach().requires_grad_()
    return torch.autograd.grad(loss(z, y).mean(), z)


def mixed(loss: Callable[..., Tensor], z: Tensor, y: Tensor) -> object:
    z, g = z.detach().requires_grad_(), torch.full((len(y),), 2.0, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(z, y, g).sum(), z, create_graph=True)
    return torch.autograd.grad(slope, g, z.detach())


def perceptron(k: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, k))


def of_network(part: Callable[..., object], z: Tensor, y: Tensor) -> object:
    x = torch.randn(len(y), 64, generator=torch.Generator().manual_seed(1))
    return part(perceptron(z.shape[1]), x, y)


def source(make: Callable[[int], nn.Module], z: Tensor, y: Tensor) -> object:
    x = torch.randn(len(y), 64)
    return make(z.shape[1])(x, logits=z, labels=y, inputs=x, epoch=0)


CASES: dict[str, Run] = {
    **{name: partial(measured, name) for name in MEASURES},
    "all that stream, in batches of 1,024": streamed,
    "ece certificate": lambda z, y: margins.ece_certificate(Predictions.from_logits(z, y)),
    **{f"loss {name}": partial(loss_gradient, f) for name, f in losses.LOSSES.items() if losses.takes(f) != "gamma"},
    "loss focal": partial(loss_gradient, partial(losses.focal, gamma=2.0)),
    **{
        f"mixed {name}": partial(mixed, losses.LOSSES[name])
        for name, f in losses.LOSSES.items()
        if losses.takes(f) == "gamma"
    },
    **{f"surrogate {name}": partial(loss_gradient, f) for name, f in differentiable.SURROGATES.items()},
    "gamma_net": partial(source, lambda k: gamma.GammaNet(64)),
    "gamma_net, label_aware": partial(source, lambda k: gamma.GammaNet(64, num_classes=k)),
    "gamma flsd": partial(source, lambda k: gamma.FLSD()),
    "gamma curve": partial(source, lambda k: gamma.CurveGamma()),
    "gamma adafocal": partial(source, lambda k: gamma.AdaFocal()),
    "robust margin": partial(of_network, partial(margins.robust_margin, eps=0.1)),
    "gn_trace": partial(of_network, gn_trace),
    "gn_trace, exact": partial(of_network, partial(gn_trace, exact=True)),
    "hessian_trace": partial(of_network, hessian_trace),
    "hessian_trace, exact": partial(of_network, partial(hessian_trace, exact=True)),
    "gn_sharpness": partial(of_network, gn_sharpness),
}


def ours() -> tuple[Callable[[Tensor, Tensor], object], Callable[[], object]]:
    total = CalibrationAccumulator(None, measures=["ece", "mce", "accuracy"])
    return lambda p, y: total.update(probs=p, labels=y), total.compute


def ours_with_classes(k: int) -> tuple[Callable[[Tensor, Tensor], object], Callable[[], object]]:
    total = CalibrationAccumulator(k)
    return lambda p, y: total.update(probs=p, labels=y), total.compute


def torchmetrics_ece(k: int) -> tuple[Callable[[Tensor, Tensor], object], Callable[[], object]]:
    from torchmetrics.classification import MulticlassCalibrationError

    metric = MulticlassCalibrationError(k, n_bins=15, norm="l1")
    return metric.update, metric.compute


STREAMS: dict[str, Callable[[int], tuple[Callable[[Tensor, Tensor], object], Callable[[], object]]]] = {
    "metacal: ece, mce, accuracy": lambda k: ours(),
    "metacal: all eleven, classwise_ece too": ours_with_classes,
    "torchmetrics: ece": torchmetrics_ece,
}


def stream(name: str, n: int, k: int) -> None:
    update, compute = STREAMS[name](k)
    generator = torch.Generator().manual_seed(0)
    seconds, before = 0.0, 0
    z = torch.empty(1024, k)
    for at in range(0, n, 1024):
        rows = min(1024, n - at)
        p = torch.randn(rows, k, generator=generator, out=z[:rows]).mul_(2).softmax(1)
        y = torch.randint(k, (rows,), generator=generator)
        start = time.process_time()
        update(p, y)
        seconds += time.process_time() - start
        if at == 0:
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
    start = time.process_time()
    compute()
    print(seconds + time.process_time() - start, (status("VmHWM") - before) / 1024)


def status(key: str) -> int:
    """kB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def cell(name: str, n: int, k: int) -> None:
    z, y = data(n, k)
    CASES[name](z[:64].clone(), y[:64].clone())  # imports, thread pools, first allocations
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present size
    before, start = status("VmRSS"), time.process_time()
    CASES[name](z, y)
    print(time.process_time() - start, (status("VmHWM") - before) / 1024)


def extra(name: str, size: str, threads: int = 1) -> tuple[float, float]:
    """Seconds of the processor and MB of one row, in a process of its own."""
    command = [sys.executable, __file__, "--cell", name, "--size", size, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    seconds, megabytes = done.stdout.split()[-2:]
    return float(seconds), float(megabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="50000x1000", metavar="NxK")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="PART")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, help="MB that no part may take beside its inputs")
    parser.add_argument("--stream", action="store_true", help="the accumulators, batch by batch")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.cell:
        (stream if args.cell in STREAMS else cell)(args.cell, *map(int, args.size.split("x")))
        return
    print("| part | s of the processor | extra MB |\n|---|---|---|")
    above = []
    for name in STREAMS if args.stream else args.only:
        seconds, megabytes = extra(name, args.size, args.threads)
        print(f"| {name} | {seconds:.2f} | {megabytes:.0f} |", flush=True)
        if args.limit is not None and megabytes > args.limit:
            above.append(name)
    if above:
        sys.exit(f"above {args.limit:g} MB: {', '.join(above)}")


if __name__ == "__main__":
    main()
