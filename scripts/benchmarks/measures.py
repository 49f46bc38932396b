"""Time and extra memory of the calibration measures against torchmetrics, netcal and relplot, in one run.

    python scripts/benchmarks/measures.py                                   # every measure, every size (minutes)
    python scripts/benchmarks/measures.py --measures ece smooth_ece --sizes 1000000x10
    python scripts/benchmarks/measures.py --threads 4 --repeats 9 --no-memory

Data: K-class logits 2 N(0, 1), labels drawn from softmax(0.6 z), so that the model is overconfident. Every library is
given float32 probabilities and labels, and metacal's time covers its checks of them. Each peer gets the form that it
takes: tensors, arrays, or for relplot the confidences that its own helper makes, that step included. torchmetrics has
no class-wise error: its binary one is called for each class, and likewise netcal's.

Time: the runs of all libraries are interleaved, the column is the minimum over the repeats; a run of more than 3 s is
not repeated. Memory: a process of its own for each cell loads the data, runs the measure once on a few rows, resets the
kernel's high-water mark and reports by how much the peak of the full run exceeds the resident size before it (Linux
only). `dense` is the formula as it is written, with an N x N matrix.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SIZES = ("10000x10", "1000000x10", "1000000x100", "100000x1000")
BINS = 15
# A cell beyond these is left out: these peers need N x N matrices, or hours.
DENSE_LIMIT = 10_000
NETCAL_LIMIT = 2_000_000  # entries, for its per-class loop


def ours(name: str) -> Callable:
    if name == "smooth_ece, made":
        return ours_made

    def run(probs, labels):
        import metacal.calibration as calibration
        from metacal.predictions import Predictions

        return getattr(calibration, name)(Predictions.from_probabilities(probs, labels))

    return run


# What "smooth_ece, made" starts from, by the identity of the probabilities.
_made: dict[int, object] = {}


def ours_made(probs, labels):
    import metacal.calibration as calibration
    from metacal.predictions import Predictions

    key = id(probs)
    if key not in _made:
        _made.clear()
        _made[key] = Predictions.from_probabilities(probs, labels)
    return calibration.smooth_ece(_made[key])


def torchmetrics_ece(probs, labels):
    from torchmetrics.functional.classification import multiclass_calibration_error

    return multiclass_calibration_error(probs, labels, probs.shape[1], n_bins=BINS, norm="l1")


def torchmetrics_classwise(probs, labels):
    from torchmetrics.functional.classification import binary_calibration_error

    k = probs.shape[1]
    return (
        sum(
            binary_calibration_error(probs[:, j], (labels == j).long(), n_bins=BINS, norm="l1", validate_args=False)
            for j in range(k)
        )
        / k
    )


def netcal_ece(probs, labels, equal_intervals=True):
    from netcal.metrics import ECE

    return ECE(BINS, equal_intervals=equal_intervals).measure(probs.numpy(), labels.numpy())


def netcal_adaptive(probs, labels):
    return netcal_ece(probs, labels, equal_intervals=False)


def netcal_classwise(probs, labels):
    from netcal.metrics import ECE

    p, y, k = probs.numpy(), labels.numpy(), probs.shape[1]
    return sum(ECE(BINS).measure(p[:, j].copy(), (y == j).astype(int)) for j in range(k)) / k


def netcal_kce(probs, labels):
    from netcal.metrics import MMCE

    return MMCE().measure(probs.numpy(), labels.numpy())


def relplot_smooth(probs, labels):
    import relplot

    confidence, correct = relplot.multiclass_logits_to_confidences(probs.numpy(), labels.numpy(), probs=True)
    return relplot.smECE(confidence, correct)


_pairs: dict[int, tuple] = {}


def relplot_made(probs, labels):
    import relplot

    key = id(probs)
    if key not in _pairs:
        _pairs.clear()
        _pairs[key] = relplot.multiclass_logits_to_confidences(probs.numpy(), labels.numpy(), probs=True)
    return relplot.smECE(*_pairs[key])


def dense_sece(probs, labels):
    confidence, predicted = probs.double().max(1)
    kernel = (-((confidence[:, None] - confidence) / 0.01).square() / 2).exp()
    smooth = kernel @ (predicted == labels).double() / kernel.sum(1)
    return (smooth - confidence).abs().mean()


PEERS: dict[str, dict[str, Callable]] = {
    "ece": {"torchmetrics": torchmetrics_ece, "netcal": netcal_ece},
    "adaptive_ece": {"netcal": netcal_adaptive},
    "classwise_ece": {"torchmetrics": torchmetrics_classwise, "netcal": netcal_classwise},
    "smooth_ece": {"relplot": relplot_smooth},
    "smooth_ece, made": {"relplot": relplot_made},  # confidences and correctness already there
    "kce": {"netcal": netcal_kce},
    "sece": {"dense": dense_sece},
}


def allowed(peer: Callable, n: int, k: int) -> bool:
    if peer in (netcal_kce, dense_sece):
        return n <= DENSE_LIMIT
    return peer is not netcal_classwise or n * k <= NETCAL_LIMIT


def data(n: int, k: int, folder: Path):
    """Probabilities and labels, made chunk by chunk and kept as npy files for the processes that measure memory."""
    import numpy as np
    import torch

    files = folder / f"probs_{n}x{k}.npy", folder / f"labels_{n}x{k}.npy"
    if not files[0].exists():
        generator = torch.Generator().manual_seed(0)
        probs = np.lib.format.open_memmap(files[0], "w+", np.float32, (n, k))
        labels = np.empty(n, np.int64)
        step = max(1, (1 << 22) // k)
        for start in range(0, n, step):
            z = 2 * torch.randn(min(step, n - start), k, generator=generator)
            probs[start : start + len(z)] = z.softmax(1).numpy()
            drawn = torch.multinomial((0.6 * z).softmax(1), 1, generator=generator)
            labels[start : start + len(z)] = drawn.squeeze(1).numpy()
        del probs
        np.save(files[1], labels)
    return tuple(torch.from_numpy(np.load(file)) for file in files)


def extra_memory(measure: str, library: str, n: int, k: int, folder: Path, threads: int) -> float:
    """MB by which a fresh process's peak exceeds what it held before the call; NaN if that process failed."""
    command = [
        sys.executable,
        __file__,
        "--cell",
        measure,
        library,
        str(n),
        str(k),
        str(folder),
        "--threads",
        str(threads),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(done.stdout.split()[-1])
    except (IndexError, ValueError):
        return float("nan")


def cell(measure: str, library: str, n: int, k: int, folder: Path) -> None:
    probs, labels = data(n, k, folder)
    run = ours(measure) if library == "metacal" else PEERS[measure][library]
    run(probs[:64].clone(), labels[:64].clone())  # imports, thread pools, first allocations

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present size
    before = status("VmRSS")
    run(probs, labels)
    print((status("VmHWM") - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measures", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="NxK")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true", help="skip the processes that measure memory")
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch

    torch.set_num_threads(args.threads)
    if args.cell:
        measure, library, n, k, folder = args.cell
        cell(measure, library, int(n), int(k), Path(folder))
        return

    header = ("measure", "N x K", "library", "ms", "times metacal's", "extra MB", "value", "minus metacal's")
    print(f"threads {args.threads}, torch {torch.__version__}, minimum of {args.repeats} interleaved runs")
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in args.sizes:
            n, k = map(int, size.split("x"))
            probs, labels = data(n, k, folder)
            for measure in args.measures:
                peers = {name: f for name, f in PEERS[measure].items() if allowed(f, n, k)}
                runs = {"metacal": ours(measure), **peers}
                best: dict[str, float] = dict.fromkeys(runs, float("inf"))
                values = {}
                for run in runs.values():
                    run(probs[:64], labels[:64])  # imports
                    if measure == "smooth_ece, made":
                        run(probs, labels)
                slow: set[str] = set()
                for _ in range(args.repeats):
                    for library, run in runs.items():
                        if library in slow:
                            continue
                        start = time.perf_counter()
                        values[library] = float(run(probs, labels))
                        best[library] = min(best[library], time.perf_counter() - start)
                        if best[library] > 3:
                            slow.add(library)
                for library in runs:
                    memory = "–"
                    if not args.no_memory:
                        memory = f"{extra_memory(measure, library, n, k, folder, args.threads):.0f}"
                    row = (
                        measure,
                        f"{n:.0e} x {k}".replace("e+0", "e"),
                        library,
                        f"{1e3 * best[library]:.1f}",
                        f"{best[library] / best['metacal']:.2f}",
                        memory,
                        f"{values[library]:.6f}",
                        f"{values[library] - values['metacal']:+.1e}" if library != "metacal" else "",
                    )
                    print("| " + " | ".join(row) + " |", flush=True)
            for file in folder.glob(f"*_{n}x{k}.npy"):
                file.unlink()


if __name__ == "__main__":
    main()
