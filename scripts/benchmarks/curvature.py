"""Cost of the curvature measures, in plain training steps, beside curvlinops and PyHessian in the same run.

    python scripts/benchmarks/curvature.py [--threads 1] [--repeats 3] [--data cifar10.npz] [--quick]

Two networks in float32: an MLP 3072-200-200-10 with tanh on 5,000 images, and ResNet-20 on 512, both in evaluation
mode after a short training on the images (without --data: a synthetic problem of the same shape), so that their
spectra look like those of a run. A step is one forward and backward pass of the same batch. All methods take turns;
each number is the median over `repeats`; the peers, a hundred steps and more, run once unless --repeat-peers. `MB` is
the peak of the process above its level before the call, from an untimed first call. `error` is relative to a reference
computed by the same code to 1e-4 (traces: exactly), `bound` what the method itself vouches for.

Peers: curvlinops' operators under scipy's eigsh (tol 1e-2, k 1) and its Hutchinson trace with 30 products; PyHessian's
power iteration and trace with tol 1e-2. Both peers are optional; install the `bench` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal import curvature
from metacal.models.resnet import resnet

warnings.filterwarnings("ignore")


# -- data and networks -----------------------------------------------------------------------------------------


def images(path: str | None, n: int) -> tuple[Tensor, Tensor]:
    """n normalised images (n, 3, 32, 32) with labels in 0..9."""
    g = torch.Generator().manual_seed(0)
    if path:
        data = np.load(path)
        x = torch.from_numpy(data["x_train"][:n]).permute(0, 3, 1, 2).float() / 255
        y = torch.from_numpy(data["y_train"][:n]).long()
    else:
        y = torch.randint(0, 10, (n,), generator=g)
        means = F.interpolate(torch.randn(10, 3, 8, 8, generator=g), 32)
        x = means[y] * 0.5 + torch.randn(n, 3, 32, 32, generator=g)
    return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True), y


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, batch: int, seed: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        rows = torch.randint(0, len(x), (batch,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    optimizer.zero_grad()
    model.eval()


# -- measuring ---------------------------------------------------------------------------------------------------


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory(call: Callable[[], Any]) -> float:
    """Peak resident memory above the level before, in MB, sampled every 2 ms; nan where /proc is missing."""
    if not os.path.exists("/proc/self/statm"):
        return float("nan")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else what earlier calls freed hides what this one takes
    level, highest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(0, highest - level) / 1e6


def peers(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, dict[str, Callable[[], Any]]]:
    """quantity → name of the peer → a call that returns the value."""
    calls: dict[str, dict[str, Callable[[], Any]]] = {"gn": {}, "hessian": {}, "tr_gn": {}, "tr_hessian": {}}
    loss, params = nn.CrossEntropyLoss(), [p for p in model.parameters() if p.requires_grad]
    try:
        import curvlinops
        from scipy.sparse.linalg import eigsh
    except ImportError:
        print("curvlinops is not installed: left out")
    else:

        def operator(kind: str) -> Any:
            make = getattr(curvlinops, f"{kind}LinearOperator")
            return make(model, loss, params, [(x, y)], check_deterministic=False)

        def top(kind: str) -> float:
            return float(eigsh(operator(kind).to_scipy(), k=1, tol=1e-2, return_eigenvectors=False)[0])

        calls["gn"]["curvlinops"] = lambda: top("GGN")
        calls["hessian"]["curvlinops"] = lambda: top("Hessian")
        calls["tr_gn"]["curvlinops"] = lambda: float(curvlinops.hutchinson_trace(operator("GGN"), 30))
        calls["tr_hessian"]["curvlinops"] = lambda: float(curvlinops.hutchinson_trace(operator("Hessian"), 30))
    try:
        from pyhessian import hessian
    except ImportError:
        print("PyHessian is not installed: left out")
    else:

        def made() -> Any:
            model.zero_grad()
            return hessian(model, loss, data=(x, y), cuda=False)

        calls["hessian"]["PyHessian"] = lambda: made().eigenvalues(tol=1e-2)[0][0]
        calls["tr_hessian"]["PyHessian"] = lambda: float(np.mean(made().trace(tol=1e-2)))
    return calls


def run(name: str, model: nn.Module, x: Tensor, y: Tensor, step_batch: int, args: argparse.Namespace) -> None:
    params = list(model.parameters())

    def step() -> None:
        torch.autograd.grad(F.cross_entropy(model(x), y), params)

    before = curvature.gn_sharpness(model, x, y, tol=1e-3).vector
    before_h = curvature.hessian_sharpness(model, x, y, tol=1e-3).vector
    train(model, x, y, 10, step_batch, seed=1)  # the warm starts come from ten steps ago
    batches = [(x[i : i + step_batch], y[i : i + step_batch]) for i in range(0, 4 * step_batch, step_batch)]
    xb, yb = batches[0]

    def batch_step() -> None:
        torch.autograd.grad(F.cross_entropy(model(xb), yb), params)

    reference = {
        "gn": curvature.gn_sharpness(model, x, y, tol=1e-4).value,
        "hessian": curvature.hessian_sharpness(model, x, y, tol=1e-4).value,
        "tr_gn": curvature.gn_trace(model, x, y, exact=True).value,
        "tr_hessian": curvature.hessian_trace(model, x, y, exact=True).value,
    }
    ours: dict[str, tuple[str | None, Callable[[], Any]]] = {
        "GN sharpness, cold": ("gn", lambda: curvature.gn_sharpness(model, x, y)),
        "GN sharpness, warm": ("gn", lambda: curvature.gn_sharpness(model, x, y, start=before)),
        "Hessian sharpness, cold": ("hessian", lambda: curvature.hessian_sharpness(model, x, y)),
        "Hessian sharpness, warm": ("hessian", lambda: curvature.hessian_sharpness(model, x, y, start=before_h)),
        "Tr G, one probe": ("tr_gn", lambda: curvature.gn_trace(model, x, y)),
        "Tr G, exact": ("tr_gn", lambda: curvature.gn_trace(model, x, y, exact=True)),
        "Tr H, one probe": ("tr_hessian", lambda: curvature.hessian_trace(model, x, y)),
        "Tr H, exact": ("tr_hessian", lambda: curvature.hessian_trace(model, x, y, exact=True)),
        f"batch sharpness, 4 × {step_batch}": (None, lambda: curvature.batch_sharpness(model, batches)),
    }
    calls: dict[str, Callable[[], Any]] = {"step": step, "batch step": batch_step}
    calls.update({n: c for n, (_, c) in ours.items()})
    of_quantity = {} if args.quick else {q: c for q, c in peers(model, x, y).items() if q in args.peers}
    for quantity, by_peer in of_quantity.items():
        calls.update({f"{peer}: {quantity}": c for peer, c in by_peer.items()})

    times: dict[str, list[float]] = {n: [] for n in calls}
    values: dict[str, Any] = {}
    memory: dict[str, float] = {}
    for n, c in calls.items():  # untimed first calls give values and memory
        begin = time.perf_counter()
        memory[n] = peak_memory(lambda n=n, c=c: values.__setitem__(n, c()))
        if ":" in n:
            times[n].append(time.perf_counter() - begin)
    for _ in range(args.repeats):
        for n, c in calls.items():
            if ":" in n and not args.repeat_peers:
                continue
            repeat = 3 if "step" in n else 1
            begin = time.perf_counter()
            for _ in range(repeat):
                c()
            times[n].append((time.perf_counter() - begin) / repeat)
    seconds = {n: statistics.median(t) for n, t in times.items()}

    print(f"\n{name}: {len(x)} images, one step {seconds['step']:.3f} s, {memory['step']:.0f} MB")
    print(f"{'':34}{'steps':>8}{'value':>11}{'error':>9}{'bound':>9}{'MB':>7}  how")
    for n, (quantity, _) in ours.items():
        e = values[n]
        cost = seconds[n] / (4 * seconds["batch step"] if quantity is None else seconds["step"])
        error = "" if quantity is None else f"{abs(e.value / reference[quantity] - 1):.1e}"
        if isinstance(e, curvature.Eigen):
            bound, how = e.bound / abs(e.value), f"{e.products} products, {e.route}"
        else:
            bound, how = e.stderr / abs(e.value), e.method
        print(f"{n:34}{cost:8.2f}{e.value:11.4g}{error:>9}{bound:9.1e}{memory[n]:7.0f}  {how}")
    first = {"gn": "GN sharpness, cold", "hessian": "Hessian sharpness, cold", "tr_gn": "Tr G, one probe"}
    first["tr_hessian"] = "Tr H, exact"
    for quantity, by_peer in of_quantity.items():
        for peer in by_peer:
            n = f"{peer}: {quantity}"
            error = abs(values[n] / reference[quantity] - 1)
            ratio = seconds[n] / seconds[first[quantity]]
            print(
                f"{n:34}{seconds[n] / seconds['step']:8.2f}{values[n]:11.4g}{error:9.1e}{'':9}{memory[n]:7.0f}"
                f"  {ratio:.1f} times {first[quantity]!r}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", help="an npz file with x_train (N, 32, 32, 3) uint8 and y_train")
    parser.add_argument("--quick", action="store_true", help="leave the peers out")
    parser.add_argument("--repeat-peers", action="store_true")
    quantities = ("gn", "hessian", "tr_gn", "tr_hessian")
    parser.add_argument("--peers", nargs="*", choices=quantities, default=quantities, help="what the peers compute")
    parser.add_argument("--only", choices=("mlp", "resnet20"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x, y = images(args.data, 5000)
    if args.only != "resnet20":
        mlp = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 10)
        )
        train(mlp, x, y, 200, 128)
        run("MLP 3072-200-200-10 tanh", mlp, x, y, 128, args)
    if args.only != "mlp":
        net = resnet(20, 10, (3, 32, 32))
        train(net, x, y, 150, 64)
        run("ResNet-20, evaluation mode", net, x[:512], y[:512], 64, args)


if __name__ == "__main__":
    main()
