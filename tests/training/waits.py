"""What a run asks of a device that works while the host goes on: that it is never waited for, and loses nothing by it.

On `reference.far.FAR`, which shows every wait; `docs/device.md` has the table of what does wait, and how often.
`test_waits.py` runs this file.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any, get_args

import pytest
import torch
from reference.far import FAR, Waits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metacal
from metacal.bilevel import NonFiniteError
from metacal.calibration.surrogates import build_outer
from metacal.config.compose import compose
from metacal.data import InputKind, Task, as_batches, as_split
from metacal.data.wrap import loader_batches
from metacal.errors import InputError
from metacal.names import MethodName, OptimizerName
from metacal.training.logging import ConsoleLog, RunLog
from metacal.training.loop import train
from metacal.training.run import build_watch
from metacal.training.setup import (
    build_backbone,
    build_parts,
    evaluation_batches,
    pixels_of,
    prepare_data,
    training_batches,
)
from metacal.training.state import Progress

STEPS = 9
PENALTIES = ("hessian_trace", "gn_trace", "margin_smoothness", "margin_tail", "robust_kl")
EIGENVECTORS = ("curvature/", "autodiff/tape.py", "optim/bulk_sgd.py")
# Each kind of method and each optimizer is here or among the words below; the others are tried with the slow tests.
KINDS = ("adafocal", "calmo", "learned_smoothing", "mmce")
APART = ("adam", "gd")
# What a run may wait at, beside nothing: files, and how often in the steps that are watched.
KNOWN = {
    "optimizer=bulk_sgd": EIGENVECTORS,
    "optimizer=gd": ("bilevel/reading.py",),
    "gamma.input=noise": ("gamma/learned.py",),
    "optimizer=adam nonfinite=skip": ("bilevel/reading.py",),
    "meta.engine=difference": ("bilevel/difference.py",),  # products 1, 2, 4, … are compared with a backward pass
}


def watched(words: list[str]) -> Counter[str]:
    """The waits of `STEPS` steps between the first outer one and the first line of the log, within one epoch."""
    few = ["data.train_size=160", "data.batch_size=4", "data.meta_batch_size=8", "epochs=1"]
    few += [] if any(word.startswith("model=") for word in words) else ["model.hidden=[12]"]
    few += ["monitor=light", "monitor.log_every=1000", "monitor.figures_every=0"]
    with Waits() as waits:
        if "optimizer=gd" in words:  # an epoch is a step, and its end looks at what was reported
            few += ["epochs=40", "monitor.val_every=40", "checkpoint_every=40", "monitor=off", "data.batch_size=128"]
        config = compose([*few, *words])
        data = prepare_data(config, FAR)
        backbone = build_backbone(config, data, FAR)
        batches = training_batches(config, data)
        parts = build_parts(config, backbone, *batches, evaluation_batches(data.val), pixels=pixels_of(data))
        first, p = max(3, config.meta.every), Progress()

        def stop() -> bool:
            waits.watching = first <= p.step < first + STEPS
            return p.step >= first + STEPS

        with pytest.raises(KeyboardInterrupt):
            train(config, parts, build_watch(config, parts), RunLog(None), console(), None, p, stop)
    return waits.seen


def console() -> ConsoleLog:
    return ConsoleLog("test", 1, 1, enabled=False)


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(f"method={m}", marks=() if m in KINDS else pytest.mark.slow) for m in get_args(MethodName)),
        *(
            pytest.param(
                f"method=gamma_net optimizer={name} optimizer.lr=0.01 optimizer.clip_norm=0.1",
                marks=() if name in APART else pytest.mark.slow,
            )
            for name in get_args(OptimizerName)
            if name != "bulk_sgd"
        ),
        "method=gamma_net optimizer=bulk_sgd optimizer.every=8 optimizer.k=2",
        "method=metacal optimizer=sam optimizer.base=muon optimizer.clip_norm=0.1",
        "method=gamma_net optimizer.clip_norm=0.1 " + " ".join(f"penalties.{name}.weight=0.01" for name in PENALTIES),
        "method=focal model=cnn model.norm=group penalties.gn_trace.weight=0.01 penalties.hessian_trace.weight=0.01 "
        "penalties.hessian_trace.probes=2",
        "method=gamma_net meta.engine=difference",
        "method=gamma_net meta.engine=reverse meta.reference_points=bank optimizer=adamw optimizer.clip_norm=0.1",
        "method=gamma_scalar meta.engine=tangent optimizer=muon optimizer.clip_norm=0.1",
        "method=focal nonfinite=skip data.storage=stream data.workers=0",
        "method=gamma_net gamma.input=noise",
        "method=gamma_net optimizer=adam nonfinite=skip",
    ],
)
def test_a_step_waits_for_nothing(words: str) -> None:
    known: tuple[str, ...] = next((files for key, files in KNOWN.items() if set(key.split()) <= set(words.split())), ())
    seen = watched(words.split())
    assert not [what for what in seen if not what.startswith(known)]
    assert bool(seen) == bool(known)


# -- the same values, and the same errors a step later -----------------------------------------------------------------


class Net(nn.Module):
    """With buffers that move; an input of 1e30 overflows in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.norm(self.hidden(x)))
        return self.last(h) * (1 + x[:, :1] ** 2), h


def make(device: Any, **settings: Any) -> metacal.MetaStep:
    torch.manual_seed(0)
    net, source = Net(), metacal.GammaNet(8, hidden=4)
    net, source = copy.deepcopy(net).to(device), copy.deepcopy(source).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    learner = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.5)
    return metacal.MetaStep(net, optimizer, source, learner, outer="sece", clip_norm=0.05, **settings)


def batches(device: Any, bad: set[int] = frozenset(), bad_meta: set[int] = frozenset(), steps: int = 8) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    result = []
    for i in range(steps):
        (x, y), (x_meta, y_meta) = (
            (torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in (16, 12)
        )
        x[0, 0] = 1e30 if i in bad else x[0, 0]
        x_meta[0, 0] = math.nan if i in bad_meta else x_meta[0, 0]
        result.append([t.to(device) for t in (x, y, x_meta, y_meta)])
    return result


def state(step: metacal.MetaStep) -> torch.Tensor:
    assert step.gamma_net is not None and step.meta_optimizer is not None
    tensors = [*step.backbone.state_dict().values(), *step.gamma_net.state_dict().values()]
    for optimizer in (step.optimizer, step.meta_optimizer):
        tensors += [v for entries in optimizer.state.values() for v in entries.values()]
    return torch.cat([t.detach().cpu().double().flatten() for t in tensors])


@pytest.mark.parametrize("settings", [{}, {"engine": "difference"}, {"every": 2, "horizon": 2}])
def test_values_are_those_of_a_run_that_waits(settings: dict[str, Any]) -> None:
    with Waits() as waits:
        near, far = make("cpu", **settings), make(FAR, **settings)
        for i, (a, b) in enumerate(zip(batches("cpu"), batches(FAR))):
            expected = near.step(*a)
            waits.watching = i >= 2 and not far.engine.may_refuse
            found = far.step(*b)
            waits.watching = False
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=2e-3 if settings.get("engine") else 1e-4, abs=1e-6)
        far.conclude()
        assert not waits.seen
        torch.testing.assert_close(state(far), state(near), rtol=1e-3, atol=1e-5)


def test_an_error_comes_one_step_later_and_names_its_step() -> None:
    with Waits():
        far = make(FAR)
        first, second, third, *_ = batches(FAR, bad={1}, steps=4)
        far.step(*first)
        far.step(*second)
        with pytest.raises(NonFiniteError, match=r"non-finite loss \(.*\) at step 1") as caught:
            far.step(*third)
        assert caught.value.step == 1 and set(caught.value.found) >= {"loss", "grad_norm"}

        far = make(FAR)
        far.step(*first)
        far.step(*second)
        with pytest.raises(NonFiniteError, match="at step 1"):
            far.conclude()
        far.conclude()  # said once


def test_a_step_is_skipped_on_the_device_as_it_is_on_the_cpu() -> None:
    bad, bad_meta = {3, 6}, {5}
    with Waits() as waits:
        near, far = make("cpu", nonfinite="skip"), make(FAR, nonfinite="skip")
        left_out = []
        for i, (a, b) in enumerate(zip(batches("cpu", bad, bad_meta), batches(FAR, bad, bad_meta))):
            near.step(*a)
            waits.watching = i >= 2
            report = far.step(*b)
            waits.watching = False
            left_out.append(report.get("skipped", 0.0))
        assert not waits.seen
        assert left_out == [float(i in bad | bad_meta) for i in range(8)]
        assert far.skipped == near.skipped == 3
        torch.testing.assert_close(state(far), state(near), rtol=1e-4, atol=1e-6)


def test_a_state_goes_on_on_another_device() -> None:
    def trained(device: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        net, source = Net(), metacal.GammaNet(8, hidden=4)
        net, source = copy.deepcopy(net).to(device), copy.deepcopy(source).to(device)
        optimizer, learner = torch.optim.Adam(net.parameters()), torch.optim.Adam(source.parameters())
        outer = build_outer("sece", reference_points="bank")
        return metacal.MetaStep(net, optimizer, source, learner, outer=outer), net, source, optimizer, learner

    with Waits() as waits:
        near, far = trained("cpu"), trained(FAR)
        for batch in batches("cpu", steps=2):
            near[0].step(*batch)
        for a, b in zip(near, far):
            b.load_state_dict(copy.deepcopy(a.state_dict()))
        for i, (a, b) in enumerate(zip(batches("cpu", steps=4), batches(FAR, steps=4))):
            expected = near[0].step(*a)
            waits.watching = i > 0  # the first outer part of a process proves that its pass can be repeated
            found = far[0].step(*b)
            waits.watching = False
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-6)
        assert not waits.seen  # as of Adam's counts, had they been read to the device


def test_batches_of_a_loader_come_without_waiting() -> None:
    images = TensorDataset(torch.randint(256, (12, 3, 4, 4), dtype=torch.uint8), torch.arange(12) % 3)
    with Waits() as waits:
        task = Task(3, torch.float32)
        train, kind = loader_batches(DataLoader(images, 4), 0, FAR, task)
        # as those that a model is given whose training images, and their statistics, lie on the device
        val = as_batches(DataLoader(images, 4), device=FAR, like=as_split(images, device=FAR), task=task)
        assert isinstance(kind, InputKind) and kind.transform is not None and kind.transform.mean.device.type == "cpu"
        for batches in (train, val):
            waits.watching = True
            found = [x.device.type for x, _ in batches.epoch(1)]
            waits.watching = False
            assert found == ["far"] * 3
        assert not waits.seen


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_that_drops_is_not_fused_where_its_pass_is_repeated(dropout: float) -> None:
    """A GPU's fused kernels draw their masks in a way of their own; the first pass may draw, and is as the others."""
    fused: list[bool] = []

    class Attending(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            fused.append(torch.backends.cuda.flash_sdp_enabled())
            return super().forward(nn.functional.dropout(x, dropout, self.training))

    with Waits():
        net, source = Attending().to(FAR), metacal.GammaNet(8, hidden=4).to(FAR)
        optimizers = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (net, source))
        step = metacal.MetaStep(net, next(optimizers), source, next(optimizers), engine_options={"reuse": False})
        for batch in batches(FAR, steps=3):
            step.step(*batch)
    training, meta, repeated = fused[::3], fused[1::3], fused[2::3]
    assert training == [False, dropout == 0, dropout == 0]
    assert not any(meta) and not any(repeated)


def test_a_pass_that_cannot_be_repeated_is_found_out_a_step_later() -> None:
    """The first outer part proves it at once; a network that changes its ways later on is found out by the verdict."""

    class Fickle(Net):
        drawn, shifts = [0.0], iter(())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z, h = super().forward(x)
            return z + next(self.shifts, 0.0), h

    with Waits():
        torch.manual_seed(0)
        net, source = Fickle().to(FAR), metacal.GammaNet(8, hidden=4).to(FAR)
        step = metacal.MetaStep(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            source,
            torch.optim.SGD(source.parameters(), lr=0.1),
            engine_options={"reuse": False},
        )
        data = batches(FAR)
        step.step(*data[0])
        Fickle.shifts = iter([0.0, 5.0, 7.0])
        step.step(*data[1])
        with pytest.raises(InputError, match="gave other logits when its pass was repeated"):
            step.step(*data[2])
