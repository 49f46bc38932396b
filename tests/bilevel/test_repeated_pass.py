"""Networks whose second forward need not be the first: the hypergradient is that of double backward, or it is refused.

An engine that runs the training forward once more must see what the first pass saw: inputs, constants, random numbers,
buffers, attributes; and what `no_grad` and `detach` hold constant for the backward pass is constant for every engine.
"""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from reference import curvature as dense
from reference.whole_step import Setting, State, differences, double_backward, entries, same_entries, taken
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import nll
from metacal.curvature import Curvature
from metacal.errors import InputError
from metacal.gamma import GammaNet
from metacal.losses import focal
from metacal.models.backbone import Backbone
from metacal.optim import SAM, BulkSGD, Muon, muon_groups

N, N_META, INPUTS, K = 9, 7, 10, 3
ENGINES = ("forward", "reverse", "difference")
EXACT = ("forward", "reverse")


class Net(nn.Module):
    """a, tanh, what the case does to the hidden values, head."""

    width = 6

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(INPUTS, 6)
        self.b = nn.Linear(6, 6)
        self.head = nn.Linear(self.width, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.a(x))))

    def middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.b(h))


class Constants(Net):
    """Constants made in the forward, whose memory is free again at its end."""

    width = 18

    def middle(self, h: Tensor) -> Tensor:
        return torch.cat([h * torch.as_tensor(np.cos(np.arange(6) * k)) for k in (1, 2, 3)], 1)


class TensorConstants(Net):
    width = 18

    def middle(self, h: Tensor) -> Tensor:
        return torch.cat([h * torch.tensor([1.0, k, -k, 0.5, k * k, 2.0], dtype=h.dtype) for k in (1, 2, 3)], 1)


class InPlaceInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x -= 0.3
        x *= 2
        return super().forward(x)


class NoGradStatistics(Net):
    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            mean, deviation = h.mean(0), h.std(0)
        return (h - mean) / (deviation + 0.1)


class DetachedStatistics(Net):
    def middle(self, h: Tensor) -> Tensor:
        return (h - h.mean(0).detach()) / (h.detach().std(0) + 0.1)


class StraightThrough(Net):
    """A step function whose derivative is taken to be 1."""

    def middle(self, h: Tensor) -> Tensor:
        return h + (torch.sign(h) - h).detach()


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return torch.sign(h)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


class StraightThroughFunction(Net):
    def middle(self, h: Tensor) -> Tensor:
        return 0.5 * _Sign.apply(h) + torch.tanh(self.b(h))


class HardGumbel(Net):
    """One of the hidden values, drawn, with the derivative of the softmax: the detach is within torch's function."""

    def middle(self, h: Tensor) -> Tensor:
        return h * nn.functional.gumbel_softmax(self.b(h), hard=True)


class GradientHook(Net):
    def middle(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.b(h))
        if h.requires_grad:
            h.register_hook(lambda cotangent: 1.1 * cotangent)
        return h


class HookedOutput(Net):
    """A hook on the gradient of the logits themselves."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        if z.requires_grad:
            z.register_hook(lambda cotangent: 1.1 * cotangent)
        return z


class NodeHooked(Net):
    """Values whose graph has a hook, by each way there is; `register` is given tanh's result."""

    def middle(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.b(h))
        if h.requires_grad:
            self.register(h)
        return h

    def register(self, h: Tensor) -> None:
        h.grad_fn.register_prehook(lambda cotangents: (1.015 * cotangents[0],))


class NodeHookedAfter(NodeHooked):
    def register(self, h: Tensor) -> None:
        get_gradient_edge(h).node.register_hook(lambda gradients, cotangents: (1.015 * gradients[0],))


class HookedWithoutGradients(NodeHooked):
    def register(self, h: Tensor) -> None:
        with torch.no_grad():
            h.register_hook(lambda cotangent: 1.015 * cotangent)


class HookedTogether(NodeHooked):
    def register(self, h: Tensor) -> None:
        register_multi_grad_hook((h,), lambda cotangents: None)


class HookedModule(Net):
    """By PyTorch's older way, a hook on the node of the module's result."""

    register = "register_backward_hook"

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()
        getattr(self.tanh, self.register)(lambda module, *gradients: (1.015 * gradients[0][0],))

    def middle(self, h: Tensor) -> Tensor:
        return self.tanh(self.b(h))


class HookedModuleFully(HookedModule):
    register = "register_full_backward_hook"


class HookedModuleBefore(HookedModule):
    register = "register_full_backward_pre_hook"


class StoredCoarsely(Net):
    """What the backward pass needs is rounded."""

    def middle(self, h: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: (8 * t.detach()).round() / 8, lambda t: t):
            return torch.tanh(self.b(h))


class PythonsRandom(Net):
    """A layer that Python's random numbers skip, and a factor of theirs; on training batches alone."""

    def middle(self, h: Tensor) -> Tensor:
        if len(h) != N or random.random() < 0.5:
            h = h + 3 * torch.tanh(self.b(h))
        return h * (random.uniform(0.5, 2.0) if len(h) == N else 1.0)


class NumpysRandom(Net):
    def middle(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.b(h))
        return h * torch.as_tensor(np.random.rand(*h.shape)) if len(h) == N else h


class OwnGenerator(Net):
    """A generator of the network's, which nobody can know of."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def middle(self, h: Tensor) -> Tensor:
        if len(h) == N:
            h = h * torch.rand(h.shape, generator=self.generator, dtype=h.dtype)
        return torch.tanh(self.b(h))


class Counts(Net):
    """Every other training pass takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def middle(self, h: Tensor) -> Tensor:
        self.passes += len(h) == N
        return torch.tanh(self.b(h)) if self.passes % 2 else h


class ReassignedBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def middle(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        self.var = 0.9 * self.var + 0.1 * h.var(0).detach()
        return torch.tanh(self.b((h - self.mean) / (self.var + 1e-5).sqrt()))


class InPlaceBuffers(ReassignedBuffers):
    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return torch.tanh(self.b(h - self.mean))


class PlainState(Net):
    """Running statistics that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.steps = torch.zeros(6, dtype=torch.float64), torch.zeros(())

    def middle(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        self.steps += 1
        return torch.tanh(self.b(h - self.mean))


class PlainStateInPlace(PlainState):
    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.mean(0))
        return torch.tanh(self.b(h - self.mean))


class Profiled(Net):
    def middle(self, h: Tensor) -> Tensor:
        with torch.profiler.record_function("middle"):
            return torch.tanh(self.b(h))


class Checkpointed(Net):
    reentrant = False

    def middle(self, h: Tensor) -> Tensor:
        dropped = lambda h: nn.functional.dropout(torch.tanh(self.b(h)), 0.3, self.training)  # noqa: E731
        return checkpoint(dropped, h, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class _Cube(torch.autograd.Function):
    """x³ with a forward-mode derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


class _CubeBackward(torch.autograd.Function):
    """x³ without one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


class _CubeOnce(_CubeBackward):
    """x³ whose backward cannot be differentiated."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


class Cube(Net):
    function: type[torch.autograd.Function] = _Cube

    def middle(self, h: Tensor) -> Tensor:
        return self.function.apply(self.b(h))


class CubeBackward(Cube):
    function = _CubeBackward


class CubeOnce(Cube):
    function = _CubeOnce


class Complex(Net):
    """A filter in the frequency domain."""

    def middle(self, h: Tensor) -> Tensor:
        f = torch.fft.rfft(self.b(h), dim=1)
        return torch.fft.irfft(f * torch.exp(1j * torch.arange(f.shape[1])), n=6, dim=1) + f.abs().mean(1, keepdim=True)


class Embedded(Net):
    """Tokens from the sign of the inputs."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * INPUTS, 6, sparse=self.sparse)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x > 0).long() + 2 * torch.arange(INPUTS)
        return self.head(torch.tanh(self.b(self.table(tokens).mean(1))))


class SparseEmbedded(Embedded):
    sparse = True


class Bag(Net):
    """torch has no second derivative of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(2 * INPUTS, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(self.table((x > 0).long() + 2 * torch.arange(INPUTS)))))


class FrozenLayers(Net):
    """BatchNorm and Dropout in evaluation mode within a network in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.norm.eval(), self.dropout.eval()
        nn.init.normal_(self.norm.running_mean)

    def middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.b(self.dropout(self.norm(h))))


class WritesItself(Net):
    """Values that a later operation of the same pass overwrites."""

    def middle(self, h: Tensor) -> Tensor:
        early = h * self.b.weight.sum()
        h = torch.sin(self.b(h)) + 0.1
        h.mul_(self.b.bias)
        with torch.no_grad():
            early.detach().clone().add_(1.0)
        return h + early


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda module, args, output: output * torch.tensor(1.5, dtype=output.dtype))
        self.b.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0),))


CASES: dict[str, type[Net]] = {
    cls.__name__: cls
    for cls in (
        Constants, TensorConstants, InPlaceInput, NoGradStatistics, DetachedStatistics, StraightThrough,
        StraightThroughFunction, HardGumbel, GradientHook, HookedOutput, NodeHooked, NodeHookedAfter,
        HookedWithoutGradients, HookedTogether, HookedModule, HookedModuleFully, HookedModuleBefore, StoredCoarsely,
        PythonsRandom, NumpysRandom, OwnGenerator, Counts,
        ReassignedBuffers, InPlaceBuffers, PlainState, PlainStateInPlace, Profiled, Checkpointed, Reentrant, Cube,
        CubeBackward, CubeOnce, Complex, Embedded, SparseEmbedded, Bag, FrozenLayers, WritesItself, Hooked,
    )
}  # fmt: skip

NO_SECOND_DERIVATIVE = ("Reentrant", "CubeOnce", "SparseEmbedded", "Bag")

ALTERED = ("StoredCoarsely", *(name for name, case in CASES.items() if "Hook" in name and case is not Hooked))
"""What the backward pass gives is changed on its way, and no value is."""

MAY_BE_REFUSED: dict[str, tuple[str, ...]] = {
    # the pass cannot be had a second time
    "OwnGenerator": ("forward", "difference"),
    "Counts": ("forward", "difference"),
    "InPlaceInput": ("forward", "difference"),
    # the difference quotient is that of the values, where the backward pass has been told something else
    "NoGradStatistics": ("difference",),
    "DetachedStatistics": ("difference",),
    "StraightThrough": ("difference",),
    "StraightThroughFunction": ("forward", "difference"),
    "HardGumbel": ("difference",),
    **dict.fromkeys(ALTERED, ("difference",)),
    "ReassignedBuffers": ("difference",),
    "InPlaceBuffers": ("difference",),
    "PlainState": ("difference",),
    "PlainStateInPlace": ("difference",),
    # the derivative that the engine needs is missing
    "Reentrant": ("forward", "reverse", "difference"),  # it allows `backward()` alone
    "CubeBackward": ("forward",),
    "CubeOnce": ("forward", "reverse"),
    "Bag": ("forward", "reverse"),
}
"""Engines that may raise `InputError` for a case. All others have to be right."""


def build(case: str, parallel: bool = False) -> Setting:
    """The step on a network of this case, always the same one."""
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    net = CASES[case]().double()
    backbone = Backbone(nn.DataParallel(net) if parallel else net)
    source = GammaNet(net.width, hidden=2, gamma_init=2.0).double()
    nn.init.normal_(source.last.weight)
    x, x_meta = torch.randn(N, INPUTS).double(), torch.randn(N_META, INPUTS).double()
    y, y_meta = torch.randint(K, (N,)), torch.randint(K, (N_META,))
    optimizer = SGD(backbone.parameters(), lr=0.3, momentum=0.9)
    return Setting(backbone, optimizer, source, x, y, x_meta, y_meta, nll)


def metastep(setting: Setting, engine: str) -> MetaStep:
    options = {"relative": 1e-6} if engine == "difference" else {}
    outer = SGD(setting.source.parameters(), lr=1.0)
    return MetaStep(
        setting.net, setting.optimizer, setting.source, outer, outer="nll", engine=engine, engine_options=options
    )


@cache
def reference(case: str, parallel: bool = False) -> Tensor:
    return (differences if case in NO_SECOND_DERIVATIVE else double_backward)(lambda: build(case, parallel))


def hypergradient(meta: MetaStep, setting: Setting) -> Tensor:
    """Of copies of the batches: a network may write into its inputs."""
    found = meta.hypergradient(setting.x.clone(), setting.y, setting.x_meta.clone(), setting.y_meta)
    return torch.cat([h.flatten() for h in found])


def error(found: Tensor, truth: Tensor) -> float:
    assert truth.norm() > 1e-6
    return float((found - truth).norm() / truth.norm())


def tolerance(case: str, engine: str) -> float:
    return 1e-4 if engine == "difference" else 1e-7 if case in NO_SECOND_DERIVATIVE else 1e-8


def check_refusal(case: str, engine: str, error: InputError) -> None:
    """The message is one line and names an engine that will do."""
    assert engine in MAY_BE_REFUSED.get(case, ()), f"refused: {error}"
    message = str(error)
    assert "\n" not in message
    if case == "Reentrant":
        assert "use_reentrant=False" in message
    else:
        assert re.search(r"engine '?(forward|difference|reverse)", message), message


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_right_or_refused_and_nothing_moves(case: str, engine: str) -> None:
    truth = reference(case)
    setting = build(case)
    meta = metastep(setting, engine)
    before = State(setting.net, setting.source)
    try:
        assert error(hypergradient(meta, setting), truth) < tolerance(case, engine)
        if case not in ("OwnGenerator", "Counts"):  # what nobody can put back
            assert error(hypergradient(meta, setting), truth) < tolerance(case, engine)
    except InputError as refusal:
        check_refusal(case, engine, refusal)
    assert before.changes(State(setting.net, setting.source)) == []
    assert not setting.optimizer.state and all(p.grad is None for p in setting.params)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_the_step_is_one_training_pass_or_none(case: str, engine: str) -> None:
    """θ', buffers, attributes and random streams of plain training; after an error, those from before the step."""
    truth = reference(case)
    trained = taken(lambda: build(case)).after
    setting = build(case)
    meta = metastep(setting, engine)
    before, state = State(setting.net, setting.source), entries(setting.optimizer)
    phi = torch.cat([p.detach().flatten() for p in setting.phi])
    try:
        meta.step(setting.x, setting.y, setting.x_meta, setting.y_meta)
    except InputError as refusal:
        check_refusal(case, engine, refusal)
        assert before.changes(State(setting.net, setting.source)) == []
        assert same_entries(state, entries(setting.optimizer))
    else:
        assert trained.changes(State(setting.net), tolerance=1e-12) == []
        moved = phi - torch.cat([p.detach().flatten() for p in setting.phi])
        assert error(moved, truth) < max(tolerance(case, engine), 1e-7)  # of a difference of parameters


@pytest.mark.parametrize("case", ALTERED)
def test_curvature_is_that_of_the_altered_backward_pass(case: str) -> None:
    """G v and H v as double backward has them."""
    setting = build(case)
    net = setting.net.net
    v = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).double() for p in setting.params]
    with Curvature(net, setting.x, setting.y) as c:
        products = c.gn(v), c.hessian(v)
    for product, matrix in zip(products, (dense.ggn(net, setting.x), dense.hessian(net, setting.x, setting.y))):
        assert error(dense.flat(product), matrix @ dense.flat(v)) < 1e-8


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_on_parameters_and_of_losses_and_penalties(engine: str) -> None:
    """A parameter's is refused, also where the forward makes it; a loss's own counts as often as the loss is taken."""

    class Accumulating(Net):
        def middle(self, h: Tensor) -> Tensor:
            if self.b.weight.requires_grad:
                self.b.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(1.015))
            return super().middle(h)

    def hooked(logits: Tensor, labels: Tensor, gamma: Tensor) -> Tensor:
        if logits.requires_grad:
            logits.register_hook(lambda cotangent: 1.2 * cotangent)
            logits.grad_fn.register_prehook(lambda cotangents: (1.1 * cotangents[0],))
        return focal(logits, labels, gamma)

    def made(loss: Callable[..., Tensor] = focal, **keys: Any) -> tuple[Setting, MetaStep]:
        setting = build("Hooked")
        learned = SGD(setting.source.parameters(), lr=1.0)
        options = {"engine_options": {"relative": 1e-6}} if engine == "difference" else {}
        return setting, MetaStep(
            setting.net, setting.optimizer, setting.source, learned, "nll", engine, loss=loss, **keys, **options
        )

    twice = hypergradient(*made(lambda *args: 1.32 * focal(*args))[::-1])
    assert error(hypergradient(*made(hooked)[::-1]), twice) < (1e-4 if engine == "difference" else 1e-9)

    def watching(model: nn.Module, x: Tensor, y: Tensor, logits: Tensor, features: Tensor) -> Tensor:
        features.register_hook(lambda cotangent: 2 * cotangent)
        return features.square().mean()

    setting, meta = made(penalties={"mine": (watching, 0.1)})
    with pytest.raises(InputError, match=r"penalties\['mine'\] registers a hook"):
        hypergradient(meta, setting)
    setting, meta = made()
    setting.net.net.__class__ = Accumulating
    with pytest.raises(InputError, match=r"parameter net.b.weight has a gradient hook, which no engine"):
        hypergradient(meta, setting)


@pytest.mark.parametrize("engine", [*ENGINES, "tangent", "higher"])
def test_hooks_from_before_the_step(engine: str) -> None:
    """On a parameter or on its node in the graph, which lives on in the graphs of the passes while it is held."""
    setting = build("Hooked")
    meta = metastep(setting, engine)
    expected, weight = hypergradient(meta, setting), setting.net.net.b.weight
    node = get_gradient_edge(weight).node

    def after(*_: Any) -> None:
        weight.grad.mul_(1.015)

    for register, hook in (
        (node.register_prehook, lambda gradients: (1.015 * gradients[0],)),
        (node.register_hook, after),
        (weight.register_hook, lambda gradient: 1.015 * gradient),
        (weight.register_post_accumulate_grad_hook, after),
    ):
        handle = register(hook)
        for attempt in (lambda: hypergradient(meta, setting), lambda: metastep(setting, engine)):
            with pytest.raises(InputError, match=r"parameter net.b.weight has a gradient hook, which no engine"):
                attempt()
        handle.remove()
    handle = setting.optimizer.register_step_pre_hook(after)
    batches = setting.x.clone(), setting.y, setting.x_meta.clone(), setting.y_meta
    for attempt in (
        lambda: hypergradient(meta, setting),
        lambda: meta.step(*batches),
        lambda: metastep(setting, engine),
    ):
        with pytest.raises(InputError, match="optimizer has a hook that runs before its step"):
            attempt()
    handle.remove()
    assert torch.equal(hypergradient(meta, setting), expected)


def test_difference_looks_again_at_a_network_that_changes() -> None:
    """At products 1, 2, 4, … 64 and every 64th, and there nothing moves; a resumed step looks at the same ones."""

    class Turning(Net):
        straight = False

        def middle(self, h: Tensor) -> Tensor:
            h = torch.tanh(self.b(h))
            return h.detach() + 0.1 * h if Turning.straight else h

    setting = build("Hooked")
    setting.net.net.__class__ = Turning
    meta, looked = metastep(setting, "difference"), []
    batches = setting.x, setting.y, setting.x_meta, setting.y_meta
    for i in range(1, 8):
        looked += [i] if meta.engine.may_refuse else []
        meta.step(*batches)
        Turning.straight = i >= 5
    again = metastep(setting, "difference")
    again.load_state_dict(meta.state_dict())
    before = State(setting.net, setting.source)
    for step in (meta, again):
        with pytest.raises(InputError, match="detaches values"):
            step.step(*batches)
        assert before.changes(State(setting.net, setting.source)) == []
    for done in range(7, 200):
        meta.engine.load_state([1.0, done])
        looked += [done + 1] if meta.engine.may_refuse else []
    assert looked == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    again.load_state_dict({**meta.state_dict(), "engine": 0.25})  # of an older version
    assert again.engine.state() == [0.25, 0]


def test_a_pass_whose_derivatives_are_carried_along_keeps_nothing() -> None:
    """Of 40 layers the values of a few are in memory at a time."""

    class Counting(Net):
        def middle(self, h: Tensor) -> Tensor:
            seen = []
            for _ in range(40):
                h = torch.tanh(self.b(h))
                seen.append(weakref.ref(h))
                alive.append(sum(ref() is not None for ref in seen))
            return h

    truth, alive = {}, []
    for reuse in (True, False):
        setting = build("Hooked")
        setting.net.net.__class__ = Counting
        learned = SGD(setting.source.parameters(), lr=1.0)
        meta = MetaStep(setting.net, setting.optimizer, setting.source, learned, "nll", engine_options={"reuse": reuse})
        truth[reuse] = hypergradient(meta, setting)
    assert torch.equal(truth[True], truth[False])
    assert max(alive[-40:]) <= 2  # of the pass that was made once more


@pytest.mark.parametrize("engine", ENGINES)
def test_data_parallel(engine: str) -> None:
    setting = build("Profiled", parallel=True)
    found = hypergradient(metastep(setting, engine), setting)
    assert error(found, reference("Profiled", parallel=True)) < tolerance("Profiled", engine)


def squares(model: nn.Module, *_: Any) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


@pytest.mark.parametrize("engine", ENGINES)
def test_sparse_gradients_give_what_dense_ones_do(engine: str) -> None:
    """Clipped, with a penalty whose gradient is dense, under SAM, through two steps."""
    options = {"relative": 1e-6} if engine == "difference" else {}
    ways: list[dict[str, Any]] = [{"clip_norm": 0.01}, {"penalties": {"squares": (squares, 0.05)}}, {"sam": True}]
    if engine == "forward":
        ways.append({"horizon": 2, "every": 2})
    for way in ways:
        slopes = []
        for case in ("SparseEmbedded", "Embedded"):
            setting = build(case)
            keys = {key: value for key, value in way.items() if key != "sam"}
            optimizer = SAM(setting.optimizer, rho=0.1) if "sam" in way else setting.optimizer
            learned = SGD(setting.source.parameters(), lr=1.0)
            meta = MetaStep(
                setting.net, optimizer, setting.source, learned, "nll", engine, engine_options=options, **keys
            )
            slopes.append(hypergradient(meta, setting))
        assert error(*slopes) < (1e-6 if engine == "difference" else 1e-12), way


def test_sparse_gradients_that_an_optimizer_does_not_take_are_refused() -> None:
    steps: dict[str, Callable[[nn.Module], Optimizer]] = {
        "SGD with weight_decay=0.1": lambda net: SGD(net.parameters(), lr=0.3, weight_decay=0.1),
        "Adam": lambda net: Adam(net.parameters()),
        "AdamW": lambda net: SAM(AdamW(net.parameters())),
        "Muon": lambda net: Muon(muon_groups(net, lr=0.05)),
        "BulkSGD": lambda net: BulkSGD(net.parameters(), model=net, lr=0.1),
    }
    for told, make in steps.items():
        setting = build("SparseEmbedded")
        setting.optimizer = make(setting.net)
        before = State(setting.net, setting.source)
        for meta_optimizer in (SGD(setting.source.parameters(), lr=1.0), None):
            meta = MetaStep(setting.net, setting.optimizer, setting.source, meta_optimizer, outer="nll")
            with pytest.raises(InputError, match=rf"parameter net.table.weight has, got {told}: .*sparse=False"):
                meta.step(setting.x, setting.y, setting.x_meta, setting.y_meta)
            assert before.changes(State(setting.net, setting.source)) == []
            assert not setting.optimizer.state and all(p.grad is None for p in setting.params)


@pytest.mark.parametrize("engine", EXACT)
def test_constants_are_never_taken_for_one_another(engine: str) -> None:
    """Memory that is used again differs from call to call: many calls, each of them right."""
    truth, setting = reference("Constants"), build("Constants")
    meta, junk = metastep(setting, engine), []
    for i in range(20):
        assert error(hypergradient(meta, setting), truth) < 1e-8
        junk.append(torch.rand(6 * (1 + i % 3), dtype=torch.float64))


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_that_are_complex_are_refused_by_name(engine: str) -> None:
    class Phases(Net):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(6, dtype=torch.complex128))

        def middle(self, h: Tensor) -> Tensor:
            return (h * self.phase).real

    torch.manual_seed(0)
    backbone = Backbone(Phases().double())
    source = GammaNet(6, hidden=2).double()
    start = State(backbone)
    with pytest.raises(InputError, match="phase"):
        meta = MetaStep(backbone, Adam(backbone.parameters()), source, SGD(source.parameters(), lr=0.1), engine=engine)
        x, y = torch.randn(N, INPUTS).double(), torch.randint(K, (N,))
        start = State(backbone)
        meta.step(x, y, x.clone(), y)
    assert start.changes(State(backbone)) == []
