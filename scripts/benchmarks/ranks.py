"""What several ranks tell each other in one training step: bytes, in units of the parameters θ, and messages.

    python scripts/benchmarks/ranks.py [--ranks 2] [--model resnet20] [--batch 64]
    python scripts/benchmarks/ranks.py --cases --theta-mb 44.7 --step-ms 100 [--alpha 2e-5] [--beta 12.5e9]

Ranks are processes of this machine (gloo). The counts do not depend on the machine, nor on the number of ranks but for
a gather, whose messages are a rank's own rows. A sum counts its bytes once, whatever way the backend carries them.

The second form is a model of R ranks, of which none waits for another and nothing overlaps: M messages of together S
bytes take

    M · 2 ⌈log₂ R⌉ α  +  2 (R − 1) / R · S / β

with α seconds of latency of a link and β bytes a second over it, by trees where messages are short and by rings where
they are long. `--step-ms`: what a meta step computes of one rank's samples, or of all where the batch is divided.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from metacal import ranks
from metacal.batchnorm import synchronise
from metacal.config.compose import compose
from metacal.data import Batches
from metacal.data.splits import Split
from metacal.models import Backbone
from metacal.models.factory import build_model
from metacal.models.options import ModelConfig
from metacal.pixels import Pixels
from metacal.training.setup import build_parts

K, SHAPE = 10, (3, 32, 32)
META = "method=gamma_net meta.every=1"
CASES = {
    "plain step": ("method=cross_entropy", "g"),
    "calmo": ("method=calmo", "g; penalties add to it before it is summed"),
    "soft_ece": ("method=soft_ece", "g; the batch's logits, and their cotangents back"),
    "mixup": ("method=mixup", "g; the batch's inputs, since a partner may be another rank's"),
    "meta step, forward": (META, "g, u"),
    "meta step, difference": (f"{META} meta.engine=difference", "g, u; norms of J v"),
    "meta step, reverse": (f"{META} meta.engine=reverse", "g, u"),
    "meta step, adamw": (f"{META} optimizer=adamw", "g, u"),
    "meta step, muon": (f"{META} optimizer=muon", "g, u; its iterations see the whole gradient on each rank"),
    "meta step, sam": (f"{META} optimizer=sam", "g at θ and at θ + ε, u"),
    "meta step, inputs seen": (f"{META} gamma.input=random", "g, u; the inputs, of which the source keeps statistics"),
    "horizon of 4, its last step": ("method=gamma_net meta.every=4 meta.horizon=4", "g, u; H λ of 3 steps"),
    "tangent of one gamma": ("method=gamma_scalar meta.every=4 meta.engine=tangent", "g, u; H T and ∂g/∂φ, one a step"),
    "meta step, bulk_sgd": (f"{META} optimizer=bulk_sgd", "g, u; one H v for each product of Lanczos"),
    "meta step, normalised together": (META, "g, u; two sums a layer and pass, and as many back"),
}
OF_THETA, MESSAGES = 2.02, 10  # of a meta step: the table's "meta step, forward"
NORMALISED = "meta step, normalised together"


def measure(name: str, net_name: str, batch: int, steps: int) -> tuple[float, float, float]:
    """Bytes over those of θ and messages of one step with its outer part, and median seconds of a step."""
    torch.manual_seed(0)
    config = compose(CASES[name][0].split())
    net = build_model(ModelConfig(name=net_name), K, SHAPE)
    backbone = Backbone(synchronise(net) if name == NORMALISED else net)
    images, labels = torch.rand(2 * batch, *SHAPE), torch.arange(2 * batch) % K
    data = Batches(Split("train", images, labels), batch)
    parts = build_parts(config, backbone, data, data, data, pixels=Pixels((0.0,) * 3, (1.0,) * 3))
    here, seconds = ranks.share(batch), []
    for _ in range(steps):
        sent, began = (ranks.bytes_sent(), ranks.messages_sent()), time.perf_counter()
        parts.step.step(images[:batch][here], labels[:batch][here], images[batch:][here], labels[batch:][here])
        seconds.append(time.perf_counter() - began)
    theta = sum(p.numel() * p.element_size() for p in backbone.parameters())
    return (ranks.bytes_sent() - sent[0]) / theta, ranks.messages_sent() - sent[1], statistics.median(seconds)


def rank(number: int, size: int, folder: str, names: list[str], net_name: str, batch: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=size)
    if number == 0:
        print(f"{net_name}, batch {batch}, {size} ranks\n\n| step | bytes / θ | messages | s a step | sent |")
        print("|---|---|---|---|---|", flush=True)
    for name in names:
        of_theta, messages, seconds = measure(name, net_name, batch, steps)
        if number == 0:
            print(f"| {name} | {of_theta:.2f} | {messages:.0f} | {seconds:.2f} | {CASES[name][1]} |", flush=True)
    dist.destroy_process_group()


def model(theta: float, step: float, alpha: float, beta: float) -> None:
    """Efficiency of R ranks in a meta step, where each has a batch of the same size, and where one batch is divided."""
    print("| ranks | ms of messages | efficiency, a batch each | speed-up, one batch divided |\n|---|---|---|---|")
    for r in (1, 2, 4, 8, 16, 32, 64):
        spoken = MESSAGES * 2 * math.ceil(math.log2(r)) * alpha + 2 * (r - 1) / r * OF_THETA * theta / beta
        print(f"| {r} | {1e3 * spoken:.1f} | {step / (step + spoken):.2f} | {step / (step / r + spoken):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=64, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=4, help="the last one is counted")
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="none: the model of many ranks alone")
    parser.add_argument("--theta-mb", type=float, default=44.7, help="10⁶ bytes of parameters; ResNet-18: 44.7")
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--alpha", type=float, default=2e-5, help="seconds")
    parser.add_argument("--beta", type=float, default=12.5e9, help="bytes a second")
    args = parser.parse_args()
    if not args.cases:
        return model(1e6 * args.theta_mb, 1e-3 * args.step_ms, args.alpha, args.beta)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (args.ranks, folder, args.cases, args.model, args.batch, args.steps), nprocs=args.ranks)


if __name__ == "__main__":
    main()
