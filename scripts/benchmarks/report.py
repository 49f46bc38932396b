"""Time of a `Report` with intervals, and of the resampled form of every measure in it.

    python scripts/benchmarks/report.py                        # 10,000 x 10, 1,000 resamples, before and after scaling
    python scripts/benchmarks/report.py --size 50000x100 --resamples 200

Data: K-class logits 2 N(0, 1), labels drawn from softmax(0.6 z), so that the model is overconfident. Seconds of
processor time of one thread, the minimum over the repeats, so that a busy machine matters little; of the report also by
the clock with all threads. The rows of measures are the intervals of one set of predictions, drawing left out; the
report has two sets.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path


def seconds(run: Callable[[], object], repeats: int, clock: Callable[[], float] = time.process_time) -> float:
    """The least time of `repeats` calls."""
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        run()
        best = min(best, clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10000x10", metavar="NxK")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch

    from metacal.calibration import MEASURES, bootstrap_all
    from metacal.predictions import Predictions
    from metacal.report import Report

    n_threads = torch.get_num_threads()
    n, k = map(int, args.size.split("x"))
    generator = torch.Generator().manual_seed(0)

    def made() -> Predictions:
        z = 2 * torch.randn(n, k, generator=generator)
        return Predictions.from_logits(z, torch.multinomial((0.6 * z).softmax(1), 1, generator=generator).squeeze(1))

    val, test = made(), made()
    print(f"{n} x {k}, {args.resamples} resamples, torch {torch.__version__}, minimum of {args.repeats}")
    print("| what | s |\n|---|---|")
    report = functools.partial(Report, test, val, resamples=args.resamples)
    print(f"| report by the clock, {n_threads} threads | {seconds(report, args.repeats, time.perf_counter):.2f} |")
    torch.set_num_threads(1)
    print(f"| report | {seconds(report, args.repeats):.2f} |", flush=True)
    plain = functools.partial(Report, test, val, resamples=0)
    print(f"| report without intervals | {seconds(plain, args.repeats):.2f} |", flush=True)
    # A measure's row is what it adds to `confidence`, whose form is one small product.
    base = seconds(lambda: bootstrap_all(["confidence"], test, n=args.resamples), args.repeats)
    print(f"| drawing, confidence | {base:.3f} |")
    for name in MEASURES:
        both = seconds(lambda name=name: bootstrap_all(["confidence", name], test, n=args.resamples), args.repeats)
        print(f"| {name} | {both - base:.3f} |", flush=True)


if __name__ == "__main__":
    main()
