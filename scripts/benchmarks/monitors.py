"""What monitors cost, as a share of a run's time.

    python scripts/benchmarks/monitors.py [--models mlp cnn resnet20] [--epochs 6] [--images 4000] [--threads 1]

Trains each model with `monitor=light` and `monitor=full` at their default cadence and budget on images of CIFAR-10's
shape (random pixels with a class-dependent mean: the cost does not depend on what they show) and adds up the times that
the run logged: `time/monitor_*_ms`, over the whole training time of the run. For `light` that includes what every
validation computes from the predictions, not the predictions themselves, which the selection of the epoch needs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "resnet20"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    import numpy as np

    from metacal.compose import compose
    from metacal.studies.grid import load_series
    from metacal.training.folder import RunFolder
    from metacal.training.run import run

    rng = np.random.default_rng(0)
    y = np.arange(arguments.images) % 10
    x = rng.integers(0, 156, (arguments.images, 32, 32, 3)) + 10 * y[:, None, None, None]
    print("| model | monitor | share of the time | training, s | measurements | waited |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images.npz"
        np.savez(data, x_train=x.astype(np.uint8), y_train=y, x_test=x[:200].astype(np.uint8), y_test=y[:200])
        for model in arguments.models:
            for monitor in ("light", "full"):
                words = [f"model={model}", f"monitor={monitor}", f"epochs={arguments.epochs}", "progress=false"]
                words += ["data=npz", f"data.path={data}", f"threads={arguments.threads}", "monitor.resamples=0"]
                place = RunFolder(Path(folder) / model / monitor)
                summary = run(compose([*words, f"run_dir={place.path}"]), place, words).summary
                series = load_series(place)
                costs = {
                    k: sum(v.values()) / 1e3 for k, v in series.items() if k.startswith("time/monitor_") and "_ms" in k
                }
                waited = max(series.get("time/monitor_waited", {0: 0.0}).values())
                turns = len(series.get("curvature/gn_sharpness", {}))
                share = sum(costs.values()) / summary["time/train_s"]
                print(
                    f"| {model} | {monitor} | {share:.2%} | {summary['time/train_s']:.1f} | {turns} | {waited:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
