"""Cost of the curvature measures, in plain training steps, beside curvlinops and PyHessian in the same run.

    python scripts/benchmarks/curvature.py [--threads 1] [--data cifar10.npz] [--only mlp | resnet20] [--quick]

Two networks in float32: an MLP 3072-200-200-10 with tanh on 5,000 images, and ResNet-20 on 512, both in evaluation
mode after a short training on the images (without --data: a synthetic problem of the same shape), so that their
spectra look like those of a run. A step is one forward and backward pass of the same batch. The clock is the
processor time of the process, and each call is set against the steps just before and after it, so that other load on
the machine moves the numbers little; the median over as many turns as `--repeats`, or as fit in `--budget` seconds.
`MB` is the peak of the process above its level before the first call. `error` is relative to a reference computed by
the same code to 1e-4 (traces: exactly), `bound` what the method itself vouches for.

Peers: curvlinops' operators under scipy's eigsh (tol 1e-2, k 1) and its Hutchinson trace with 30 products; PyHessian's
power iteration with tol 1e-2, and with the first tol of 1e-3, 1e-4, 1e-5 whose error is no greater than ours (100
iterations at most, its default), and its trace with tol 1e-2. They run once. On ResNet-20 the peers, and ours beside
them, measure sharpness only, on the first `--peer-images` images in units of a step on these. Both peers are optional;
install the `bench` extra. One thread of a slow core: about two minutes for the MLP, four for ResNet-20.
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
from collections.abc import Callable, Sequence
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
    """Peak resident memory above the level before, in MB, sampled every 5 ms; nan where /proc is missing."""
    if not os.path.exists("/proc/self/statm"):
        return float("nan")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else what earlier calls freed hides what this one takes
    level, highest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(0, highest - level) / 1e6


def peers(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, dict[str, Callable[[], float]]]:
    """quantity → name of the peer → a call that returns the value."""
    calls: dict[str, dict[str, Callable[[], float]]] = {"gn": {}, "hessian": {}, "tr_gn": {}, "tr_hessian": {}}
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
            torch.manual_seed(0)  # its start vector
            return hessian(model, loss, data=(x, y), cuda=False)

        for tol in (1e-2, 1e-3, 1e-4, 1e-5):
            calls["hessian"][f"PyHessian, tol {tol:.0e}"] = lambda tol=tol: made().eigenvalues(tol=tol)[0][0]
        calls["tr_hessian"]["PyHessian"] = lambda: float(np.mean(made().trace(tol=1e-2)))
    return calls


class Clock:
    """Costs of calls in plain steps, by processor time: each over the mean of the steps just before and after it."""

    def __init__(self, step: Callable[[], Any], repeats: int, budget: float) -> None:
        self.step, self.repeats, self.budget = step, repeats, budget
        self.steps: list[float] = []

    def seconds(self, call: Callable[[], Any]) -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    def cost(self, call: Callable[[], Any]) -> tuple[float, Any, float]:
        """(steps, value, MB) of `call`: the median over its turns."""
        kept: list[Any] = []
        times: list[float] = []
        around = [self.seconds(self.step)]
        memory = peak_memory(lambda: times.append(self.seconds(lambda: kept.append(call()))))
        around.append(self.seconds(self.step))
        while len(times) < self.repeats and sum(times) + times[-1] <= self.budget:
            times.append(self.seconds(call))
            around.append(self.seconds(self.step))
        self.steps += around
        ratios = [2 * t / (a + b) for t, a, b in zip(times, around, around[1:])]
        return statistics.median(ratios), kept[0], memory


def row(name: str, steps: float, value: float, error: str, bound: str, memory: float, how: str) -> None:
    print(f"{name:36}{steps:8.2f}{value:11.4g}{error:>9}{bound:>9}{memory:7.0f}  {how}", flush=True)


def compare(model: nn.Module, x: Tensor, y: Tensor, quantities: Sequence[str], args: argparse.Namespace) -> None:
    """Ours against the peers' on the same images."""
    clock = Clock(lambda: plain_step(model, x, y), args.repeats, args.budget)
    ours: dict[str, tuple[str, Callable[[], Any]]] = {
        "gn": ("GN sharpness, cold", lambda: curvature.gn_sharpness(model, x, y)),
        "hessian": ("Hessian sharpness, cold", lambda: curvature.hessian_sharpness(model, x, y)),
        "tr_gn": ("Tr G, one probe", lambda: curvature.gn_trace(model, x, y)),
        "tr_hessian": ("Tr H, one probe", lambda: curvature.hessian_trace(model, x, y)),
    }
    exactly: dict[str, Callable[[], float]] = {
        "gn": lambda: curvature.gn_sharpness(model, x, y, tol=1e-4).value,
        "hessian": lambda: curvature.hessian_sharpness(model, x, y, tol=1e-4).value,
        "tr_gn": lambda: curvature.gn_trace(model, x, y, exact=True).value,
        "tr_hessian": lambda: curvature.hessian_trace(model, x, y, exact=True).value,
    }
    print(f"\nBeside the peers, {len(x)} images")
    by_quantity = peers(model, x, y)
    for quantity in quantities:
        name, call = ours[quantity]
        reference = exactly[quantity]()
        steps, e, memory = clock.cost(call)
        own_error = abs(e.value / reference - 1)
        row(name, steps, e.value, f"{own_error:.1e}", "", memory, "ours")
        close = False
        for peer, of_peer in by_quantity[quantity].items():
            if close:
                break
            once = Clock(clock.step, 1, 0.0)
            their_steps, value, memory = once.cost(of_peer)
            error = abs(value / reference - 1)
            close = peer.startswith("PyHessian, tol") and error <= own_error
            how = f"{their_steps / steps:.1f} times ours" + (", at our error" if close else "")
            row(f"  {peer}", their_steps, value, f"{error:.1e}", "", memory, how)


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def run(name: str, model: nn.Module, x: Tensor, y: Tensor, batch: int, smooth: bool, args: argparse.Namespace) -> None:
    before = curvature.gn_sharpness(model, x, y).vector
    before_h = curvature.hessian_sharpness(model, x, y).vector
    train(model, x, y, 10, batch, seed=1)  # the warm starts come from ten steps ago
    batches = [(x[i : i + batch], y[i : i + batch]) for i in range(0, 4 * batch, batch)]
    on_all = Clock(lambda: plain_step(model, x, y), args.repeats, args.budget)
    on_batches = Clock(lambda: [plain_step(model, *b) for b in batches], args.repeats, args.budget)

    ours: list[tuple[str, str | None, Callable[[], Any]]] = [
        ("GN sharpness, cold", "gn", lambda: curvature.gn_sharpness(model, x, y)),
        ("GN sharpness, warm", "gn", lambda: curvature.gn_sharpness(model, x, y, start=before)),
        ("Hessian sharpness, cold", "hessian", lambda: curvature.hessian_sharpness(model, x, y)),
        ("Hessian sharpness, warm", "hessian", lambda: curvature.hessian_sharpness(model, x, y, start=before_h)),
        ("Tr G, one probe", "tr_gn", lambda: curvature.gn_trace(model, x, y)),
        ("Tr G, exact", "tr_gn", lambda: curvature.gn_trace(model, x, y, exact=True)),
        ("Tr H, one probe", "tr_hessian", lambda: curvature.hessian_trace(model, x, y)),
        ("Tr H, exact", "tr_hessian", lambda: curvature.hessian_trace(model, x, y, exact=True)),
        (f"batch sharpness, 4 × {batch}", None, lambda: curvature.batch_sharpness(model, batches)),
    ]
    if not smooth:
        ours = [entry for entry in ours if entry[1] != "tr_hessian"]  # Tr H = Tr G: the same computation
    found = {n: (on_batches if q is None else on_all).cost(call) for n, q, call in ours}

    def settled(search: Callable[..., curvature.Eigen], name: str) -> float:
        return search(model, x, y, tol=1e-4, start=found[name][1].vector).value

    reference = {
        "gn": settled(curvature.gn_sharpness, "GN sharpness, cold"),
        "hessian": settled(curvature.hessian_sharpness, "Hessian sharpness, cold"),
        "tr_gn": found["Tr G, exact"][1].value,
    }
    if smooth:
        reference["tr_hessian"] = found["Tr H, exact"][1].value
    unit, small = statistics.median(on_all.steps), statistics.median(on_batches.steps) / 4
    print(f"\n{name}: {len(x)} images, one step {unit:.3f} s, a mini-batch's {small:.3f} s")
    print(f"{'':36}{'steps':>8}{'value':>11}{'error':>9}{'bound':>9}{'MB':>7}")
    for n, quantity, _ in ours:
        steps, e, memory = found[n]
        error = "" if quantity is None else f"{abs(e.value / reference[quantity] - 1):.1e}"
        if isinstance(e, curvature.Eigen):
            bound, how = e.bound / abs(e.value), f"{e.products} products, {e.route}"
        else:
            bound, how = e.stderr / abs(e.value), e.method
        row(n, steps, e.value, error, f"{bound:.1e}", memory, how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds for the turns of one call")
    parser.add_argument("--data", help="an npz file with x_train (N, 32, 32, 3) uint8 and y_train")
    parser.add_argument("--quick", action="store_true", help="leave the peers out")
    parser.add_argument("--peers-only", action="store_true")
    parser.add_argument("--peer-images", type=int, default=64, help="images for the peers on ResNet-20")
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
        if not args.peers_only:
            run("MLP 3072-200-200-10 tanh", mlp, x, y, 128, True, args)
        if not args.quick:
            compare(mlp, x, y, ("gn", "hessian", "tr_gn", "tr_hessian"), args)
    if args.only != "mlp":
        torch.manual_seed(0)
        net = resnet(20, 10, (3, 32, 32))
        train(net, x, y, 100, 64)
        if not args.peers_only:
            run("ResNet-20, evaluation mode", net, x[:512], y[:512], 64, False, args)
        if not args.quick:
            compare(net, x[: args.peer_images], y[: args.peer_images], ("gn", "hessian"), args)


if __name__ == "__main__":
    main()
