"""The cost of a training step of every method and optimizer, in plain cross-entropy steps under SGD.

    python scripts/benchmarks/methods.py [--models mlp cnn resnet20] [--rounds 5] [--steps 4] [--threads 1] [--skip …]

Each is set up as `metacal train` would, on images of CIFAR-10's shape, with batches of 128 and meta batches of 256.
They take turns of `steps` steps, so that a busy moment of the machine hits all alike; a number is the median over the
rounds of the ratio to the plain steps of the same round. `steps` is a multiple of 4, the default interval of the
Hessian's trace. Processor time with `--clock process`, for machines that are not quiet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "resnet20"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument("--skip", nargs="*", default=[], help="optimizers or methods to leave out, such as bulk_sgd")
    arguments = parser.parse_args()

    import torch

    from metacal.config.compose import config_dir

    torch.set_num_threads(arguments.threads)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    methods = sorted(file.stem for file in (config_dir() / "method").glob("*.yaml"))
    contenders = {"cross_entropy": ["method=cross_entropy"]}
    contenders |= {name: [f"method={name}"] for name in methods}
    for optimizer in ("adamw", "muon", "sam", "bulk_sgd"):
        contenders[f"cross_entropy, {optimizer}"] = ["method=cross_entropy", f"optimizer={optimizer}"]
        contenders[f"gamma_net, {optimizer}"] = ["method=gamma_net", f"optimizer={optimizer}"]

    for word in arguments.skip:
        contenders = {name: words for name, words in contenders.items() if word not in name.split(", ")}

    table: dict[str, list[str]] = {name: [] for name in contenders}
    for model in arguments.models:
        loops = {name: Loop([*words, f"model={model}", "optimizer.lr=0.001"]) for name, words in contenders.items()}
        ratios: dict[str, list[float]] = {name: [] for name in loops}
        for loop in loops.values():
            loop.run(arguments.steps)
        for _ in range(arguments.rounds):
            times = {}
            for name, loop in loops.items():
                start = clock()
                loop.run(arguments.steps)
                times[name] = clock() - start
            for name, seconds in times.items():
                ratios[name].append(seconds / times["cross_entropy"])
        for name, values in ratios.items():
            table[name].append(f"{statistics.median(values):.2f}")
    print(f"| method | {' | '.join(arguments.models)} |")
    print("|---|" + "---|" * len(arguments.models))
    for name, cells in table.items():
        print(f"| {name} | {' | '.join(cells)} |")


class Loop:
    """The training steps of one run, without logs."""

    def __init__(self, words: list[str]) -> None:
        import torch

        from metacal.config.compose import compose
        from metacal.data import as_batches
        from metacal.models import Backbone, build_model
        from metacal.training.fit import pixels_as_said
        from metacal.training.setup import build_parts

        config = compose(words)
        generator = torch.Generator().manual_seed(0)

        def batches(n: int, size: int, name: str) -> Any:
            x = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)
            return as_batches((x, torch.arange(n) % 10), size, 0, name)

        train, meta = batches(1280, 128, "train"), batches(512, 256, "meta")
        torch.manual_seed(0)
        backbone = Backbone(build_model(config.model, 10, (3, 32, 32)))
        pixels = pixels_as_said(None, train.split, torch.device("cpu"))
        self.parts = build_parts(config, backbone, train, meta, meta, pixels=pixels)
        self.train, self.meta = train.forever(), meta.forever()
        backbone.train()

    def run(self, steps: int) -> None:
        step = self.parts.step
        for _ in range(steps):
            step.epoch = 10.0  # after every ramp
            x, y = next(self.train)
            if step.due:
                step.step(x, y, *next(self.meta))
            else:
                step.step(x, y)


if __name__ == "__main__":
    main()
