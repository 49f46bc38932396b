"""What monitors cost, as a share of a run's time.

    python scripts/benchmarks/monitors.py [--models mlp cnn resnet20] [--images 4000] [--threads 1]

Trains each model with `monitor=light` and `monitor=full` at their default cadence on images of CIFAR-10's shape (random
pixels with a class-dependent mean: the cost does not depend on what they show) and adds up the times that the run
logged, `time/monitor_*_ms`. The method is plain cross-entropy, whose cheap steps make the shares largest. For `light`
the times include what every validation computes from the predictions, not the predictions themselves, which the
selection of the epoch needs.

`full` measures curvature on fixed subsets every 50 steps, and waits rather than exceed `monitor.max_share` of the time.
Its first measurement is always taken, and a few hundred steps are too few to earn a second one of a convolutional
network; so the runs are as short as one measurement allows, and the table gives

    a turn         seconds of one turn of the subset and curvature monitors (the least one)
    in steps       the same in training steps
    unbounded      share if it measured at every 50th step, turn / (turn + 50 steps)
    in a long run  share with the budget: unbounded, or max_share where that is less; plus the other monitors' share
    one in         steps from one measurement to the next in a long run
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

EPOCHS = {"mlp": 10, "cnn": 6}  # others: as many as the first measurement needs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "resnet20"])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    from images import write_images

    from metacal.config.compose import compose
    from metacal.runs.folder import RunFolder
    from metacal.studies.grid import load_series
    from metacal.training.run import run

    print("| model | monitor | training, s | steps | a turn, s | in steps | unbounded | in a long run | one in |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images.npz"
        write_images(data, arguments.images)
        for model in arguments.models:
            for monitor in ("light", "full"):
                words = [f"model={model}", f"monitor={monitor}", "progress=false", "data=npz", f"data.path={data}"]
                words += [
                    f"threads={arguments.threads}",
                    "method=cross_entropy",
                    "monitor.resamples=0",
                    f"epochs={EPOCHS.get(model, 2)}",
                ]
                place = RunFolder(Path(folder) / model / monitor)
                config = compose([*words, f"run_dir={place.path}"])
                summary = run(config, place, words).summary
                costs = {
                    k.removeprefix("time/monitor_").removesuffix("_ms"): [v / 1e3 for v in turns.values()]
                    for k, turns in load_series(place).items()
                    if k.startswith("time/monitor_") and k.endswith("_ms")
                }
                steps = int(summary["steps"])
                seconds = summary["time/train_s"]
                step = (seconds - sum(map(sum, costs.values()))) / steps
                dear = {k: v for k, v in costs.items() if k in ("curvature", "train_subset", "val_subset")}
                rest = sum(sum(v) for k, v in costs.items() if k not in dear) / (steps * step)
                row = f"| {model} | {monitor} | {seconds:.1f} | {steps} |"
                if dear:
                    turn, every = sum(map(min, dear.values())), config.monitor.every
                    unbounded = turn / (turn + every * step)
                    limit = config.monitor.max_share
                    share = unbounded if limit is None else min(unbounded, limit)
                    wait = max(every, turn * (1 - share) / share / step)
                    print(f"{row} {turn:.2f} | {turn / step:.0f} | {unbounded:.1%} | {share + rest:.1%} | {wait:.0f} |")
                else:
                    print(f"{row} – | – | – | {rest:.2%} | – |", flush=True)


if __name__ == "__main__":
    main()
