"""What bfloat16 costs the hypergradient: relative error and cosine against float64, by where it is used.

    python scripts/benchmarks/precision.py [--models resnet20 mlp] [--batch 128] [--device cpu]

After 20 plain float32 steps the hypergradient of one further step is taken in float64, in float32, with a bfloat16
training forward, and with bfloat16 outer passes too. Data are random images with random labels. Sums, gradients, the
optimizer's step and the gamma source are in float32 in all but the first.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from meta_step import network
from torch import Tensor, nn
from torch.optim import SGD, Adam

from metacal.bilevel import MetaStep
from metacal.devices import full_float32
from metacal.gamma import GammaNet
from metacal.models import Backbone

CASES: dict[str, tuple[torch.dtype, dict[str, object]]] = {
    "float32": (torch.float32, {}),
    "tf32": (torch.float32, {}),  # what a GPU makes of float32 in convolutions; on a CPU left out
    "bf16": (torch.float32, {"autocast": torch.bfloat16}),
    "bf16_outer": (torch.float32, {"autocast": torch.bfloat16, "outer_autocast": True}),
}


def hypergradient(
    model: str, batch: int, device: str, dtype: torch.dtype, settings: dict[str, object], full: bool = True
) -> Tensor:
    """Of a step after 20 plain float32 ones, which are the same for every precision."""
    net = Backbone(network(model)).to(device)
    torch.manual_seed(1)
    gamma_net = GammaNet(net.in_features).to(device)
    nn.init.normal_(gamma_net.last.weight, std=0.1)
    draw = torch.Generator().manual_seed(2)
    x, y, x_meta, y_meta = (
        t.to(device)
        for _ in range(2)
        for t in (torch.randn(batch, 3, 32, 32, generator=draw), torch.randint(10, (batch,), generator=draw))
    )
    optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    plain = MetaStep(net, optimizer, gamma_net)
    for _ in range(20):
        with full_float32():
            plain.step(x, y)
    net.to(dtype), gamma_net.to(dtype)
    for entries in optimizer.state.values():
        entries["momentum_buffer"] = entries["momentum_buffer"].to(dtype)
    for p in net.parameters():
        p.grad = None
    learner = Adam(gamma_net.parameters(), lr=1e-3)
    step = MetaStep(net, optimizer, gamma_net, learner, **settings)  # type: ignore[arg-type]
    with full_float32() if full else nullcontext():
        found = step.hypergradient(x.to(dtype), y, x_meta.to(dtype), y_meta)
    return torch.cat([h.flatten() for h in found]).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet20"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    words = parser.parse_args()
    torch.backends.cudnn.deterministic = True  # else the plain steps are others in each row
    print("| model | precision | relative error | cosine |\n|---|---|---|---|")
    for model in words.models:
        exact = hypergradient(model, words.batch, words.device, torch.float64, {})
        for name, (dtype, settings) in CASES.items():
            if name == "tf32" and words.device == "cpu":
                continue
            found = hypergradient(model, words.batch, words.device, dtype, settings, full=name == "float32")
            error = float((found - exact).norm() / exact.norm())
            cosine = float(found @ exact / (found.norm() * exact.norm()))
            print(f"| {model} | {name} | {error:.1e} | {cosine:.5f} |", flush=True)


if __name__ == "__main__":
    main()
