"""What only a GPU can show: its kernels, their masks, streams and memory. `waits.py` shows on a CPU what that can."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import metacal
from metacal.cli import main
from metacal.errors import InputError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda"


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into = nn.Linear(12, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.last(self.layer(self.into(patches)).mean(1))


def network(name: str) -> nn.Module:
    if name == "attention":
        return Attention(0.0)
    norm: nn.Module = {
        "batch": nn.BatchNorm2d(6),
        "group": nn.GroupNorm(2, 6),
        "bare": nn.BatchNorm2d(6, affine=False),
    }[name]
    layers = nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 4)
    return nn.Sequential(*layers)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


def step_on(
    device: str, net: nn.Module, optimizer: str = "sgd", dtype: torch.dtype = torch.float32, **settings: Any
) -> metacal.MetaStep:
    torch.manual_seed(0)
    backbone = metacal.Backbone(copy.deepcopy(net)).to(device, dtype).train()
    source = metacal.GammaNet(backbone.in_features, hidden=5).to(dtype)
    with torch.no_grad():
        for p in source.parameters():
            p += 0.3 * torch.randn_like(p)
    source = source.to(device)
    learner = torch.optim.SGD(source.parameters(), lr=0.1)
    made = OPTIMIZERS[optimizer](backbone.parameters())
    return metacal.MetaStep(backbone, made, source, learner, outer="nll", **settings)


def batches(device: str, steps: int, dtype: torch.dtype = torch.float32, size: int = 4) -> Iterator[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        pairs = [
            (torch.rand(n, 3, size, size, generator=draw).to(dtype), torch.randint(4, (n,), generator=draw))
            for n in (10, 14)
        ]
        yield [t.to(device) for pair in pairs for t in pair]


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().cpu().flatten() for t in tensors])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ["forward", "reverse"])
@pytest.mark.parametrize("name", ["batch", "bare", "group", "attention"])
def test_steps_and_hypergradients_are_those_of_a_cpu(name: str, engine: str, optimizer: str) -> None:
    torch.manual_seed(5)
    net, results = network(name), []
    for device in ("cpu", DEVICE):
        step = step_on(device, net, optimizer, torch.float64, engine=engine, clip_norm=0.5)
        *first, last = batches(device, 3, torch.float64)
        for batch in first:
            step.step(*batch)
        hypergradient = flat(step.hypergradient(*last))
        step.step(*last)
        results.append((hypergradient, flat(step.backbone.parameters())))
    for there, here in zip(*results):
        torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-9 * float(here.abs().max()))


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.1},
        {"engine": "reverse"},
        {"every": 2, "horizon": 2},
        {"autocast": torch.bfloat16},
        {"penalties": {"gn_trace": 1e-4, "margin_smoothness": 1e-3, "soft_ece": 0.1}},
        {"nonfinite": "skip"},
    ],
)
@pytest.mark.parametrize("name", ["batch", "group", "attention"])
def test_a_step_waits_for_nothing(name: str, settings: dict[str, Any]) -> None:
    step = step_on(DEVICE, network(name), **settings)
    for i, batch in enumerate(list(batches(DEVICE, 10))):
        if i < 4:
            step.step(*batch)
            continue
        with waiting_is_an_error():
            step.step(*batch)
    step.conclude()


@pytest.mark.parametrize(
    "settings", [{}, {"engine_options": {"reuse": False}}, {"every": 2, "horizon": 2}, {"engine": "difference"}]
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_masks_of_attention_are_drawn_again(settings: dict[str, Any], autocast: torch.dtype | None) -> None:
    step = step_on(DEVICE, Attention(0.3), autocast=autocast, **settings)
    for batch in batches(DEVICE, 6):
        step.step(*batch)
    step.conclude()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(12, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x.flatten(2).transpose(1, 2).reshape(len(x), -1, 12))[0][:, -1])


def test_recurrent_layers_without_a_second_derivative() -> None:
    (batch,) = batches(DEVICE, 1)
    with pytest.raises(InputError, match="engine 'difference'"):
        step_on(DEVICE, Recurrent()).step(*batch)
    step_on(DEVICE, Recurrent(), engine="difference").step(*batch)
    with torch.backends.cudnn.flags(enabled=False):
        step_on(DEVICE, Recurrent()).step(*batch)


def test_a_difference_of_logits_is_not_that_of_tf32() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.Tanh(), nn.Conv2d(32, 32, 3), nn.Tanh(), nn.Flatten(), nn.Linear(512, 4)
    )
    (batch,) = batches(DEVICE, 1, size=8)
    exact, difference = (flat(step_on(DEVICE, net, engine=e).hypergradient(*batch)) for e in ("forward", "difference"))
    assert float((exact - difference).norm() / exact.norm()) < 0.05


RUN = ["data.train_size=200", "epochs=2", "monitor=full", "monitor.every=5", "monitor.subset=32", "model=cnn", "log=[]"]
RUN += ["progress=false", "data.batch_size=32", "monitor.curvature=true"]


@pytest.mark.parametrize(
    "words", ["method=gamma_net optimizer=adamw precision=bf16", "method=metacal data.storage=stream"]
)
def test_a_run_and_what_reads_it(words: str, tmp_path: Path) -> None:
    assert main(["train", *RUN, *words.split(), f"device={DEVICE}", f"run_dir={tmp_path / 'run'}"]) == 0
    model = metacal.load(tmp_path / "run", device=DEVICE)
    x = (
        torch.rand(5, *model.kind.shape)
        if model.kind.dtype.is_floating_point
        else torch.zeros(5, *model.kind.shape, dtype=torch.uint8)
    )
    assert model.predict_proba(x, ranged=False).device.type == DEVICE


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks(backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("nccl needs a GPU for each rank")
    words = ["launch.ranks=2", f"launch.backend={backend}", f"device={DEVICE}", f"run_dir={tmp_path / 'run'}"]
    assert main(["train", *RUN, "method=gamma_net", "penalties.soft_ece.weight=0.1", *words]) == 0
