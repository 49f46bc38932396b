"""What logging costs, as a ratio of training times with and without it.

    python scripts/benchmarks/logging_cost.py [--models mlp cnn] [--images 4000] [--epochs 10] [--repeats 5]

Every round trains the same run four times in one process, in an order that turns from round to round, on images of
CIFAR-10's shape (random pixels with a class-dependent mean: the cost does not depend on what they show), without
checkpoints:

    off       (twice) monitor=off and no files: only the validation that selects the epoch
    monitors  the default monitors, no files
    all       the default monitors, metrics.jsonl and TensorBoard's file, as any run writes them

The table has the median over the rounds of each round's ratio of training times, less 1: what `all` costs over `off`,
and what of it is the writing (`all` over `monitors`). `floor` is the same for a second `off` over `off`: differences of
its size are noise. The figures that every run draws once, when training is over, have a column of their own, in
seconds. Times of the whole process's CPU are compared, which other programs disturb less than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ARMS = ("off", "off again", "monitors", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"])
    parser.add_argument("--methods", nargs="+", default=["cross_entropy", "gamma_net"])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    import torch
    from images import write_images

    torch.set_num_threads(arguments.threads)
    print("| model | method | ms a step | all over off | all over monitors | floor | last figures, s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images.npz"
        write_images(data, arguments.images)
        for model in arguments.models:
            for method in arguments.methods:
                words = [f"model={model}", f"method={method}", f"epochs={arguments.epochs}", "data=npz"]
                words += [f"data.path={data}", "progress=false", "device=cpu"]
                rounds: list[dict[str, float]] = []
                end: list[float] = []
                train(words, "all", Path(folder) / "warm")  # imports and caches
                for i in range(arguments.repeats):
                    order = ARMS[i % len(ARMS) :] + ARMS[: i % len(ARMS)]
                    place = Path(folder) / model / method / str(i)
                    rounds.append({})
                    for arm in order:
                        rounds[-1][arm], last, steps = train(words, arm, place)
                        end += [last] if arm == "all" else []
                ratio = {
                    (a, b): statistics.median(r[a] / r[b] for r in rounds) - 1
                    for a, b in (("all", "off"), ("all", "monitors"), ("off again", "off"))
                }
                step = 1e3 * statistics.median(r["off"] for r in rounds) / steps
                print(
                    f"| {model} | {method} | {step:.2f} | {ratio['all', 'off']:+.2%} "
                    f"| {ratio['all', 'monitors']:+.2%} | {ratio['off again', 'off']:+.2%} "
                    f"| {statistics.median(end):.2f} |",
                    flush=True,
                )


def train(words: list[str], arm: str, place: Path) -> tuple[float, float, int]:
    """CPU seconds of one training, of the figures drawn when it is over, and its steps."""
    from metacal.config.compose import compose
    from metacal.training.logging import ConsoleLog, RunLog
    from metacal.training.loop import train as train_loop
    from metacal.training.run import build_watch
    from metacal.training.setup import (
        build_backbone,
        build_parts,
        choose_device,
        evaluation_batches,
        prepare_data,
        training_batches,
    )

    config = compose([*words, *(["monitor=off"] if arm.startswith("off") else [])])
    device = choose_device(config.device)
    data = prepare_data(config, device)
    backbone = build_backbone(config, data, device)
    parts = build_parts(config, backbone, *training_batches(config, data), evaluation_batches(data.val))
    if arm == "all":
        place.mkdir(parents=True, exist_ok=True)
    last = [0.0]

    class Log(RunLog):
        def figures(self, *given: Any) -> None:
            start = time.process_time()
            super().figures(*given)
            if len(given) == 2:  # not held to a share of the time
                last[0] += time.process_time() - start

    log = Log(place if arm == "all" else None)
    console = ConsoleLog("", 0, config.epochs, enabled=False)
    began = time.process_time()
    progress, _ = train_loop(config, parts, build_watch(config, parts), log, console)
    seconds = time.process_time() - began - last[0]
    log.close()
    return seconds, last[0], progress.step


if __name__ == "__main__":
    main()
