"""Memory that large images take: a run on an ImageNet-shaped folder, and predictions by size and many at a time.

    python scripts/benchmarks/large_images.py [--side 224] [--classes 1000]

Two JPEGs of each class to train and validate on and one to test, of smooth noise: their size is what counts. A
ResNet-18, batches of 32, one epoch of cross-entropy; then predictions of 1,024 such images, as many at a time as their
size allows and all at once. Each in a process of its own, whose largest resident set is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

PREDICT = """
import resource, sys, torch
from torchvision.models import resnet18
from metacal.predict import predict
side, classes, size = map(int, sys.argv[1:])
x, y = torch.rand(1024, 3, side, side), torch.arange(1024) % classes
predict(resnet18(num_classes=classes), (x, y), batch_size=size or None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write_folder(root: Path, side: int, classes: int) -> None:
    rng = np.random.default_rng(0)
    for part, each in (("train", 2), ("val", 1)):
        for k in range(classes):
            folder = root / part / f"n{k:08}"
            folder.mkdir(parents=True)
            for i in range(each):
                width, height = (int(n) for n in rng.integers(side, 2 * side, 2))
                noise = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                noise.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{i}.jpg", quality=85)


def peak_of_a_run(side: int, classes: int) -> float:
    """Gigabytes."""
    with tempfile.TemporaryDirectory() as name:
        data, run = Path(name, "data"), Path(name, "run")
        write_folder(data, side, classes)
        words = f"data=folder data.path={data} data.storage=stream data.image_size={side} data.workers=1 run_dir={run}"
        words += f" data.train_size={classes} data.val_size={classes} data.batch_size=32 model=torchvision/resnet18"
        words += " method=cross_entropy epochs=1 monitor=off monitor.resamples=0 progress=false"
        command = [sys.executable, "-m", "metacal", "train", *words.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads((run / "summary.json").read_text())["memory/peak_mb"]) / 1024


def peak_of_predictions(side: int, classes: int, size: int) -> float:
    """Gigabytes; size 0: as many at a time as the images' size allows."""
    command = [sys.executable, "-c", PREDICT, str(side), str(classes), str(size)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    words = parser.parse_args()
    print("| | GB |\n|---|---:|")
    print(
        f"| a run with batches of 32: trained on and measured | {peak_of_a_run(words.side, words.classes):.1f} |",
        flush=True,
    )
    for name, size in (("as many at a time as their size allows", 0), ("all at once", 1024)):
        peak = peak_of_predictions(words.side, words.classes, size)
        print(f"| predictions of 1,024 images, {name} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
