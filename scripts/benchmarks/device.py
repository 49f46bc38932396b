"""Images per second and how busy a GPU is kept, by method, way of running and precision.

    python scripts/benchmarks/device.py [--models resnet20 resnet18 resnet50 vit] [--batch 128 512] [--seconds 3]
    python scripts/benchmarks/device.py --device cpu --small        # that it runs

Rows: a plain loop in ten lines (forward, loss, backward, SGD), the same loop's kernels replayed as a CUDA graph, which
is the limit for it, the step of `higher` as its users write it, and `MetaStep` as each method sets it. A method's meta
batch is as large as its training batch; times are per training step, outer steps in their share. Busy: kernel time over
wall time, by torch's profiler; "–" where there is no GPU or a row cannot be made, with the reason on standard error.
Waits: calls that made the host wait for the GPU, a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from meta_step import network
from torch import Tensor, nn
from torch.optim import SGD

from metacal.config.compose import compose
from metacal.models import Backbone
from metacal.pixels import Pixels
from metacal.training.setup import Parts, build_parts

METHODS = {"plain": "focal", "gamma_net": "gamma_net", "metacal": "metacal", "calmo": "calmo"}
PRECISIONS = ("float32", "bf16", "bf16_outer")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


class Fixed:
    """The same batch over and over, in place of a data set: what is measured is the step."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.batch = x, y

    def __len__(self) -> int:
        return 1000

    def epoch(self, epoch: int, start: int = 0) -> Any:
        return iter([self.batch])


def made(model: str, device: torch.device) -> Backbone:
    if model == "resnet50":
        from torchvision.models import resnet50

        return Backbone(resnet50(num_classes=10)).to(device)
    return Backbone(network(model)).to(device)


def batch_of(size: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.rand(size, 3, 32, 32, generator=draw), torch.randint(10, (size,), generator=draw)
    return x.to(device), y.to(device)


def plain_loop(model: str, size: int, device: torch.device, autocast: bool) -> Callable[[], Any]:
    net, (x, y) = made(model, device), batch_of(size, device, 1)
    optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(net(x)[0], y)
        loss.backward()
        optimizer.step()

    return step


def graphed(step: Callable[[], Any]) -> Callable[[], Any]:
    """The kernels of one call, replayed; warmed up on a stream of its own, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def method(
    model: str, size: int, device: torch.device, name: str, precision: str, compiled: bool, engine: str | None = None
) -> Callable[[], Any]:
    """One training step of a method after the other, with its outer steps where it has them."""
    words = [f"method={METHODS[name]}", f"precision={precision}", f"compile={str(compiled).lower()}"]
    words += [f"meta.engine={engine}"] if engine else []
    train, meta = (Fixed(*batch_of(size, device, seed)) for seed in (1, 2))
    parts: Parts = build_parts(  # type: ignore[arg-type]
        compose(words), made(model, device), train, meta, meta, pixels=Pixels(0.0, 1.0)
    )
    (x, y), others = train.batch, meta.batch

    def step() -> None:
        parts.step.step(x, y, *(others if parts.step.due else ()))

    return step


def measured(step: Callable[[], Any], device: torch.device, seconds: float) -> tuple[float, float | None, float | None]:
    """(seconds a step, busy share, waits a step), after the steps of two outer periods."""
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    for _ in range(2 if seconds == 0 else 20):
        step()
    wait()
    count, began = 0, time.perf_counter()
    while count < 2 or time.perf_counter() - began < seconds:
        step()
        count += 1
    wait()
    each = (time.perf_counter() - began) / count
    if not cuda:
        return each, None, None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(16):
            step()
        wait()
    on_gpu = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # the optimizer's step is there as a span too, beside its kernels
    kernels = sum(e.device_time for e in on_gpu if not getattr(e, "is_user_annotation", False)) / 16e6
    waits = sum(e.count for e in found.key_averages() if e.key in WAITS) / 16
    return each, min(1.0, kernels / each), waits


def rows(model: str, size: int, device: torch.device, small: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
    """What is measured, by name: functions that make a step."""
    table: dict[str, Callable[[], Callable[[], Any]]] = {}
    for autocast in (False, True):
        name = f"plain loop | {'bf16' if autocast else 'float32'}"
        table[f"eager {name}"] = partial(plain_loop, model, size, device, autocast)
        if device.type == "cuda":
            table[f"graph {name}"] = lambda autocast=autocast: graphed(plain_loop(model, size, device, autocast))
    table["higher gamma_net | float32"] = partial(method, model, size, device, "gamma_net", "float32", False, "higher")
    for name in METHODS:
        for precision in PRECISIONS[: 1 if small else 3]:
            for compiled in (False,) if small else (False, True):
                way = "compile" if compiled else "eager"
                table[f"{way} {name} | {precision}"] = partial(method, model, size, device, name, precision, compiled)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet20", "resnet18", "resnet50", "vit"])
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a perceptron, 4 images, eager float32: that it runs")
    words = parser.parse_args()
    device, seconds = torch.device(words.device), 0.0 if words.small else words.seconds
    models, sizes = (["mlp"], [4]) if words.small else (words.models, words.batch)
    print("| model | batch | what | precision | ms a step | images/s | busy | waits a step |\n|" + "---|" * 8)
    for model in models:
        for size in sizes:
            for name, make in rows(model, size, device, words.small).items():
                try:
                    each, busy, waits = measured(make(), device, seconds)
                except Exception as error:  # a row that cannot be made is said, and the others go on
                    print(f"{model} {size} {name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                    print(f"| {model} | {size} | {name} | – | – | – | – |", flush=True)
                    continue
                shown = ["–" if v is None else f"{v:.2f}" for v in (busy, waits)]
                cells = [model, size, name, f"{1e3 * each:.2f}", f"{size / each:.0f}", *shown]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
