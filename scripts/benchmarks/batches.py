"""Time of one augmented batch: ours against a DataLoader with torchvision's transforms, on the same images.

    python scripts/benchmarks/batches.py [--threads 1] [--batch 128] [--side 32] [--repeats 7]

Both crop at random with 4 pixels of reflection padding, mirror and normalise uint8 images `(N, 3, side, side)`. The
DataLoader works on PIL images, as torchvision's own datasets hand them out, in this process and with two workers; and
in its fastest form, torchvision's v2 transforms on tensors. The methods take turns; each number is the median over
`repeats` epochs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from metacal.data import Batches, Split, Transform

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Images(Dataset):
    """What torchvision's CIFAR10 does in `__getitem__`: array to PIL image or tensor, then the transforms."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, pil: bool) -> None:
        self.images = images.permute(0, 2, 3, 1).contiguous().numpy() if pil else images
        self.labels = labels.tolist()
        crop = [v2.RandomCrop(images.shape[-1], padding=4, padding_mode="reflect"), v2.RandomHorizontalFlip()]
        to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self.transform = v2.Compose([*crop, *to_float])
        self.pil = pil

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[i]) if self.pil else self.images[i]
        return self.transform(image), self.labels[i]


def milliseconds_a_batch(epoch: Callable[[], Iterable[object]]) -> float:
    start, n = time.perf_counter(), 0
    for _ in epoch():
        n += 1
    return 1e3 * (time.perf_counter() - start) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.integers(0, 256, (args.images, 3, args.side, args.side), dtype=np.uint8))
    y = torch.arange(args.images) % 10
    transform = Transform(1 / 255, torch.tensor(MEAN).double(), torch.tensor(STD).double(), crop_padding=4, flip=True)
    split = Split("train", x, y, transform)
    ours, plain = Batches(split, args.batch), Batches(split, args.batch, augment=False)

    def loader(pil: bool, workers: int) -> Callable[[], Iterable[object]]:
        data = Images(x, y, pil)
        keep = workers > 0
        made = DataLoader(data, args.batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=keep)
        return lambda: made

    methods: dict[str, Callable[[], Iterable[object]]] = {
        "metacal, crop + mirror + normalise": lambda: ours.epoch(0),
        "metacal, normalise only": lambda: plain.epoch(0),
        "DataLoader, PIL images, 0 workers": loader(True, 0),
        "DataLoader, PIL images, 2 workers": loader(True, 2),
        "DataLoader, tensors, 0 workers": loader(False, 0),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(args.repeats + 1):
        for name, epoch in methods.items():
            taken = milliseconds_a_batch(epoch)
            if repeat > 0:  # the first round warms up
                times[name].append(taken)
    base = statistics.median(times["metacal, crop + mirror + normalise"])
    print(f"batch {args.batch}, 3x{args.side}x{args.side}, {args.threads} thread(s), torch {torch.__version__}")
    print(f"{'method':38} {'ms a batch':>10} {'ratio':>8}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:38} {median:10.2f} {median / base:7.1f}x")


if __name__ == "__main__":
    main()
