"""What a step may change and what it must not: the training path, gradients, buffers, random streams, memory."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bilevel_problems import NETS, Problem, make_problem
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from metacal import losses
from metacal.bilevel import ENGINES, MetaStep, NonFiniteError
from metacal.errors import InputError
from metacal.gamma import FLSD, FixedGamma, GammaNet, ScalarGamma
from metacal.models.backbone import Backbone

WITHOUT_HIGHER = [name for name in ENGINES if name != "higher"]


def make_step(problem: Problem, lr: float = 0.05, **keys: Any) -> MetaStep:
    params = [p for p in problem.backbone.parameters() if p.requires_grad]
    optimizer = SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)
    return MetaStep(problem.backbone, optimizer, problem.gamma_net, Adam(problem.gamma_net.parameters(), lr=lr), **keys)


def everything(meta: MetaStep) -> list[Tensor]:
    """Copies of all state that a step can reach."""
    tensors = [*meta.backbone.state_dict().values(), *meta.gamma_net.state_dict().values()]
    for entries in meta.optimizer.state.values():
        tensors += [v for v in entries.values() if isinstance(v, Tensor)]
    tensors += [p.grad for p in meta.backbone.parameters() if p.grad is not None]
    return [t.clone() for t in tensors] + [torch.get_rng_state()]


@pytest.mark.parametrize("engine", ["forward", "difference", "higher"])
@pytest.mark.parametrize("net", ["mlp", "cnn", "dropout", "residual", "attention"])
def test_with_outer_rate_zero_the_path_is_plain_training_bit_for_bit(net: str, engine: str) -> None:
    problem = make_problem(net)
    nn.init.zeros_(problem.gamma_net.last.weight)  # one constant gamma
    plain = copy.deepcopy(problem.backbone)
    meta = make_step(problem, lr=0.0, engine=engine, clip_norm=0.5)
    gamma = problem.gamma_net(problem.backbone(problem.x)[1]).detach()
    problem.backbone.load_state_dict(plain.state_dict())

    torch.manual_seed(3)
    for _ in range(4):
        meta.step(*problem.batches)
    after = torch.get_rng_state()

    torch.manual_seed(3)
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for _ in range(4):
        logits, _ = plain(problem.x)
        loss = losses.focal(logits, problem.y, gamma).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    for (name, a), b in zip(problem.backbone.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(a, b), name
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("net", ["cnn", "dropout"])
def test_hypergradient_changes_nothing(net: str, engine: str) -> None:
    problem = make_problem(net)
    meta = make_step(problem, engine=engine)
    for _ in range(2):
        meta.step(*problem.batches)
    kept, grads = everything(meta), [p.grad for p in problem.backbone.parameters()]
    last = meta.last
    first = meta.hypergradient(*problem.batches)
    assert all(torch.equal(a, b) for a, b in zip(kept, everything(meta), strict=True))
    assert all(a is b.grad for a, b in zip(grads, problem.backbone.parameters()))
    assert meta.last is last and meta.count == 2
    assert all(torch.equal(a, b) for a, b in zip(first, meta.hypergradient(*problem.batches)))


@pytest.mark.parametrize("engine", ENGINES)
def test_step_takes_the_hypergradient_that_is_reported(engine: str) -> None:
    problem = make_problem("cnn")
    meta = make_step(problem, engine=engine)
    meta.meta_optimizer = SGD(problem.gamma_net.parameters(), lr=0.5)
    expected = meta.hypergradient(*problem.batches)
    before = [p.detach().clone() for p in problem.gamma_net.parameters()]
    found = meta.step(*problem.batches)
    for p, b, h in zip(problem.gamma_net.parameters(), before, expected):
        torch.testing.assert_close(p.detach(), b - 0.5 * h, rtol=1e-6, atol=1e-12)
    assert found["hypergradient_norm"] == pytest.approx(math.sqrt(sum(float(h.square().sum()) for h in expected)))


@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_see_the_training_batch_once_and_grad_only_the_training_loss(engine: str) -> None:
    problem = make_problem("cnn")
    plain = copy.deepcopy(problem.backbone)
    make_step(problem, engine=engine).step(*problem.batches)
    logits, features = plain(problem.x)
    for name, b in plain.named_buffers():
        torch.testing.assert_close(dict(problem.backbone.named_buffers())[name], b)
    observer = make_problem("cnn").gamma_net
    observer.observe(features)
    gamma = observer(features).detach()
    losses.focal(logits, problem.y, gamma).mean().backward()
    for p, q in zip(problem.backbone.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_without_gamma_or_meta_batch_it_is_the_plain_step() -> None:
    problem = make_problem("cnn")
    plain = copy.deepcopy(problem.backbone)
    meta = MetaStep(problem.backbone, RMSprop(problem.backbone.parameters()), loss="cross_entropy")
    optimizer = RMSprop(plain.parameters())
    for _ in range(3):
        found = meta.step(problem.x, problem.y)
        optimizer.zero_grad()
        F.cross_entropy(plain(problem.x)[0], problem.y).backward()
        optimizer.step()
    assert set(found) == {"loss", "grad_norm"}
    assert meta.last is not None and meta.last.gamma is None
    for a, b in zip(problem.backbone.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("source", [FixedGamma(3.0), FLSD()])
def test_fixed_sources_run_in_the_same_step(source: nn.Module) -> None:
    problem = make_problem("mlp")
    meta = MetaStep(problem.backbone, Adam(problem.backbone.parameters()), source)
    assert 3 <= meta.step(problem.x, problem.y)["gamma_mean"] <= 5
    assert not meta.due


def test_plain_models_without_features() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).double()
    problem = make_problem("mlp")
    meta = MetaStep(net, SGD(net.parameters(), lr=0.1), FixedGamma(1.0))
    assert meta.step(problem.x, problem.y)["loss"] > 0
    assert meta.last is not None and meta.last.features is None


def test_every() -> None:
    problem = make_problem("mlp")
    meta = make_step(problem, every=3)
    with_outer = []
    for _ in range(6):
        due = meta.due
        with_outer.append("outer" in meta.step(*problem.batches))
        assert due == with_outer[-1]
    assert with_outer == [False, False, True] * 2


@pytest.mark.parametrize("engine", WITHOUT_HIGHER)
def test_compiled_or_mixed_precision_training_forward(engine: str) -> None:
    problem = make_problem("mlp")
    problem.backbone.float(), problem.gamma_net.float()
    x, x_meta = problem.x.float(), problem.x_meta.float()
    exact = make_step(problem, outer="nll").hypergradient(x, problem.y, x_meta, problem.y_meta)
    for outer in (False, True):
        meta = make_step(problem, engine=engine, outer="nll", autocast=torch.bfloat16, outer_autocast=outer)
        mixed = meta.hypergradient(x, problem.y, x_meta, problem.y_meta)
        for a, b in zip(exact, mixed):
            assert b.dtype == torch.float32
            assert 0 < (a - b).norm() <= 0.2 * a.norm() + 1e-6
    meta.step(x, problem.y, x_meta, problem.y_meta)
    assert meta.last is not None and meta.last.logits.dtype == torch.bfloat16


@pytest.mark.parametrize("input", ["noise", "random", "layer"])
def test_ablation_inputs(input: str) -> None:
    problem = make_problem("cnn")
    gamma_net = GammaNet(4, input=input, layer="net.0" if input == "layer" else None, num_classes=3).double()
    nn.init.normal_(gamma_net.last.weight)
    problem.gamma_net = gamma_net
    meta = make_step(problem)
    found = meta.step(*problem.batches)
    assert found["hypergradient_norm"] > 0
    assert meta.last is not None and meta.last.gamma is not None and meta.last.gamma.std() > 0


class Blocks(nn.Module):
    """Layers of every kind of output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Linear(4, 6), nn.Conv2d(3, 5, 1)
        self.rows, self.head = nn.Linear(6, 2), nn.Linear(6, 3)
        self.attend, self.spare = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.conv(x)
        tokens = self.embed(x.flatten(1).reshape(len(x), -1, 4))
        self.rows(tokens.flatten(0, 1))
        return self.head(tokens + self.attend(tokens, tokens, tokens)[0]).mean(1)


@pytest.mark.parametrize(("layer", "width"), [("embed", 6), ("conv", 5)])
def test_gamma_reads_a_layer_of_tokens_or_of_space(layer: str, width: int) -> None:
    problem = make_problem("mlp")
    problem.backbone = Blocks().double()
    problem.gamma_net = GammaNet(width, input="layer", layer=layer).double()
    meta = make_step(problem, engine="reverse")
    assert "outer" in meta.step(*problem.batches)


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        ("attend", r"layer 'attend' must give one tensor of shape .* got a tuple"),
        ("rows", r"layer 'rows' must give one output per sample, got 108 for 9 samples"),
        ("spare", r"layer 'spare' is not run"),
    ],
)
def test_a_layer_that_gives_no_features_is_named(layer: str, match: str) -> None:
    problem = make_problem("mlp")
    problem.backbone = Blocks().double()
    problem.gamma_net = GammaNet(2, input="layer", layer=layer).double()
    meta = make_step(problem, engine="reverse")
    kept = everything(meta)
    with pytest.raises(InputError, match=match):
        meta.step(*problem.batches)
    assert all(torch.equal(a, b) for a, b in zip(kept, everything(meta), strict=True))


class Poisoned(nn.Module):
    """Logits that become NaN when asked to."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.bad = net, False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = self.net(x)
        return (logits * math.nan if self.bad else logits), features


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_non_finite_loss_changes_nothing(nonfinite: str, engine: str) -> None:
    problem = make_problem("cnn")
    problem.backbone = Poisoned(problem.backbone)
    meta = make_step(problem, engine=engine, nonfinite=nonfinite)
    meta.step(*problem.batches)
    meta.optimizer.zero_grad()
    kept = everything(meta)
    problem.backbone.bad = True
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match=r"non-finite \w+.* at step 1") as caught:
            meta.step(*problem.batches)
        assert engine == "higher" or caught.value.quantity == "loss"
    else:
        assert meta.step(*problem.batches)["skipped"] == 1.0
        assert meta.skipped == 1
    for a, b in zip(kept, everything(meta), strict=True):
        assert torch.equal(a, b)
    problem.backbone.bad = False
    assert math.isfinite(meta.step(*problem.batches)["outer"])


def test_non_finite_outer_loss_withholds_the_gamma_step() -> None:
    problem = make_problem("mlp")
    meta = make_step(problem, outer=lambda logits, labels: logits.sum() * math.inf)
    before = [p.clone() for p in problem.gamma_net.parameters()]
    start = [p.clone() for p in problem.backbone.parameters()]
    with pytest.raises(NonFiniteError, match=r"outer loss .* at step 0"):
        meta.step(*problem.batches)
    assert all(torch.equal(a, b) for a, b in zip(before, problem.gamma_net.parameters()))
    # the backbone's step was taken, and counts
    assert meta.count == 1 and meta.skipped == 0
    assert not any(torch.equal(a, b) for a, b in zip(start, problem.backbone.parameters()))
    meta.nonfinite = "skip"
    assert meta.step(*problem.batches)["skipped"] == 1.0
    assert meta.count == 2 and meta.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, problem.gamma_net.parameters()))


@pytest.mark.parametrize("engine", WITHOUT_HIGHER)
def test_memory_is_flat(engine: str) -> None:
    problem = make_problem("residual")
    meta = make_step(problem, engine=engine)

    def tensors() -> int:
        return sum(count for kind, count in Counter(map(type, gc.get_objects())).items() if issubclass(kind, Tensor))

    for _ in range(5):
        meta.step(*problem.batches)
    gc.collect()
    before = tensors()
    gc.disable()
    try:
        for _ in range(20):
            meta.step(*problem.batches)
        # without the collector: no reference cycle keeps a step's graph
        assert tensors() <= before
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_resident_memory_is_flat_over_500_steps(engine: str) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    net = Backbone(nn.Sequential(nn.Flatten(), nn.Linear(3072, 100), nn.Tanh(), nn.Linear(100, 3)))
    gammas = ScalarGamma() if engine == "tangent" else GammaNet(net.in_features)
    meta = MetaStep(net, SGD(net.parameters(), lr=0.1, momentum=0.9), gammas, Adam(gammas.parameters()), engine=engine)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(3, (32,))
    for step in range(550):
        if step == 50:
            before = resident()
        meta.step(x, y, x, y)
        if step % 10 == 0:
            gc.collect()  # as often as it would of itself: the tests have it run seldom
    assert resident() - before < 4 * 2**20  # one copy of the parameters has 1.2 MB


def test_state_returns() -> None:
    problem = make_problem("mlp")
    meta = make_step(problem, every=2)
    meta.step(*problem.batches)
    other = make_step(make_problem("mlp"), every=2)
    other.load_state_dict(meta.state_dict())
    assert other.due and other.count == 1


def windowed(seed: int = 0, **keys: Any) -> MetaStep:
    """Three of every four steps unrolled together, of a net with dropout and a gamma-net that keeps statistics."""
    problem = make_problem("dropout", seed)
    problem.backbone = Poisoned(problem.backbone)
    return make_step(problem, engine="higher", every=4, engine_options={"steps": 3}, clip_norm=1.0, **keys)


def some_batches(n: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    return [make_problem("dropout", seed=100 + i).batches for i in range(n)]


def saved(meta: MetaStep) -> io.BytesIO:
    file = io.BytesIO()
    modules = (meta.backbone, meta.gamma_net, meta.optimizer, meta.meta_optimizer, meta)
    torch.save([*(m.state_dict() for m in modules), torch.get_rng_state()], file)
    file.seek(0)
    return file


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("meta_first", [False, True])
def test_a_run_resumed_within_a_window_is_the_unstopped_one_bit_for_bit(stop: int, meta_first: bool) -> None:
    batches, meta = some_batches(9), windowed()
    torch.manual_seed(4)
    for i, batch in enumerate(batches):
        if i == stop:
            file = saved(meta)
        meta.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        meta.step(*batch)
    other = windowed(seed=1)
    *states, stream = torch.load(file, weights_only=True)
    owners = [other.backbone, other.gamma_net, other.optimizer, other.meta_optimizer, other]
    pairs = list(zip(owners, states, strict=True))
    for owner, state in reversed(pairs) if meta_first else pairs:
        owner.load_state_dict(state)
    torch.set_rng_state(stream)
    for i in range(stop, len(batches)):
        other.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        other.step(*batches[i])
    assert all(torch.equal(a, b) for a, b in zip(everything(meta), everything(other), strict=True))
    assert meta.count == other.count == 9


def test_a_saved_window_holds_its_batches_and_not_what_they_are_views_of() -> None:
    meta = windowed()
    data, labels = torch.randn(10_000, 3, 4, 4).double(), torch.zeros(10_000, dtype=torch.int64)
    meta.step(data[:9], labels[:9])
    before = len(saved(meta).getbuffer())
    meta.step(data[:9], labels[:9])
    assert len(saved(meta).getbuffer()) - before < 100_000


@pytest.mark.parametrize("bad", [{1}, {2}, {1, 2}, {3}])
@pytest.mark.parametrize("how", ["skip", "raise", "input"])
def test_a_step_that_is_not_taken_is_not_unrolled(bad: set[int], how: str) -> None:
    """The gamma source then learns through the steps that were taken, as if the batch had not come."""
    batches, meta = some_batches(4), windowed(nonfinite="raise" if how == "raise" else "skip")
    meta.backbone.eval()  # no dropout: the comparison draws from another place of the random stream
    taken = [i for i in range(4) if i not in bad] if how == "skip" else list(range(4))
    meta.meta_optimizer = SGD(meta.gamma_net.parameters(), lr=1.0)
    before = [p.detach().clone() for p in meta.gamma_net.parameters()]
    expected = None
    for i, batch in enumerate(batches):
        if i == 1 and 3 in taken:
            xs, ys = zip(*((batches[j][0], batches[j][1]) for j in taken if j >= 1))
            expected = meta.hypergradient(list(xs), list(ys), *batches[3][2:])
        if i in bad:
            if how == "input":
                with pytest.raises(InputError, match="same number"):
                    meta.step(batch[0], batch[1][:-1], *batch[2:])
            else:
                meta.backbone.bad = True
                if how == "raise":
                    with pytest.raises(NonFiniteError):
                        meta.step(*batch)
                else:
                    assert meta.step(*batch)["skipped"] == 1.0
                meta.backbone.bad = False
            if how == "skip":
                continue
        meta.step(*batch)
    assert meta.count == 4
    moved = [b - p.detach() for b, p in zip(before, meta.gamma_net.parameters())]
    if expected is None:
        assert all(not m.any() for m in moved)
    else:
        for m, h in zip(moved, expected):
            torch.testing.assert_close(m, h, rtol=1e-7, atol=1e-12)


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Once(NoForwardMode):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Grid(nn.Module):
    """Holds an operation that has no rule of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.head, self.kind = nn.Conv2d(3, 3, 1), nn.Linear(48, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.kind != "grid_sample":
            return self.head((Once if self.kind == "once" else NoForwardMode).apply(x).flatten(1))
        grid = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))


def gridded(kind: str) -> Problem:
    problem = make_problem("mlp")
    problem.backbone = Backbone(Grid(kind)).double()
    problem.gamma_net = GammaNet(48).double()
    nn.init.normal_(problem.gamma_net.last.weight)
    return problem


@pytest.mark.parametrize("kind", ["grid_sample", "function"])
def test_an_operation_without_a_rule_is_differentiated_twice(kind: str) -> None:
    problem = gridded(kind)
    try:
        exact = {e: make_step(problem, engine=e).hypergradient(*problem.batches) for e in ("forward", "reverse")}
    except InputError as refusal:  # torch 2.4 has no second derivative of grid_sample
        assert kind == "grid_sample" and "second derivative, which is missing" in str(refusal)
        pytest.skip(str(refusal))
    for a, b in zip(exact["forward"], exact["reverse"]):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14)


def test_an_operation_without_second_derivative_is_named_and_nothing_has_changed() -> None:
    problem = gridded("once")
    for engine in ("forward", "reverse"):
        meta = make_step(problem, engine=engine)
        kept = everything(meta)
        with pytest.raises(InputError, match=r"second derivative, which is missing .*graph node.* engine 'difference'"):
            meta.step(*problem.batches)
        assert all(torch.equal(a, b) for a, b in zip(kept, everything(meta), strict=True))
    assert make_step(problem, engine="difference").step(*problem.batches)["hypergradient_norm"] > 0


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"engine": "backward"}, "engine must be one of forward, difference, reverse, tangent, higher, got 'backward'"),
        ({"every": 0}, "every must be >= 1, got 0"),
        ({"nonfinite": "ignore"}, "nonfinite must be"),
        ({"clip_norm": -1.0}, "clip_norm must be > 0"),
        ({"loss": "hinge"}, "loss must be"),
        ({"loss": "mse"}, "gamma_net must be None with loss='mse'"),
        ({"penalties": {"no_such": 1.0}}, "penalty must be one of .*got 'no_such'"),
        ({"penalties": {"mine": (lambda *_: 0, -1.0)}}, "must have a weight >= 0"),
        ({"engine_options": {"depth": 1}}, "engine_options must be options of engine 'forward'"),
        ({"engine": "higher", "engine_options": {"steps": 2}}, "steps must be between 1 and every = 1"),
        ({"engine": "difference", "engine_options": {"relative": 0.0}}, "relative must be > 0"),
    ],
)
def test_bad_arguments(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make_step(make_problem("mlp"), **keys)


def test_bad_optimizers() -> None:
    problem = make_problem("mlp")
    params = list(problem.backbone.parameters())
    meta_optimizer = Adam(problem.gamma_net.parameters())
    with pytest.raises(InputError, match=r"one of Adam, AdamW, BulkSGD, Muon, SAM, SGD .* got RMSprop"):
        MetaStep(problem.backbone, RMSprop(params), problem.gamma_net, meta_optimizer)
    with pytest.raises(InputError, match=r"SGD with engine 'higher'.*use engine 'forward'"):
        MetaStep(problem.backbone, AdamW(params), problem.gamma_net, meta_optimizer, engine="higher")
    with pytest.raises(InputError, match="maximize"):
        MetaStep(problem.backbone, SGD(params, maximize=True), problem.gamma_net, meta_optimizer, engine="higher")
    with pytest.raises(InputError, match="others"):
        MetaStep(problem.backbone, SGD([*params, nn.Parameter(torch.ones(1))]), problem.gamma_net, meta_optimizer)
    with pytest.raises(InputError, match="meta_optimizer must be None"):
        MetaStep(problem.backbone, SGD(params), FixedGamma(1.0), meta_optimizer)


def test_bad_batches() -> None:
    problem = make_problem("mlp")
    meta = make_step(problem)
    with pytest.raises(InputError, match="same number of samples"):
        meta.step(problem.x, problem.y[:-1])
    with pytest.raises(InputError, match="y must be int64"):
        meta.step(problem.x, problem.y.float())
    with pytest.raises(InputError, match="y_meta must be given"):
        meta.step(problem.x, problem.y, problem.x_meta)
    with pytest.raises(InputError, match="one batch"):
        meta.hypergradient([problem.x] * 2, [problem.y] * 2, problem.x_meta, problem.y_meta)


@pytest.mark.parametrize("net", NETS)
def test_float32_agrees_with_float64(net: str) -> None:
    problem = make_problem(net)
    torch.manual_seed(2)
    exact = torch.cat([h.flatten() for h in make_step(problem, outer="nll").hypergradient(*problem.batches)])
    if net in ("dropout", "attention"):
        return  # masks are drawn otherwise in float32
    problem.backbone.float(), problem.gamma_net.float()
    batches = (problem.x.float(), problem.y, problem.x_meta.float(), problem.y_meta)
    single = torch.cat([h.flatten() for h in make_step(problem, outer="nll").hypergradient(*batches)])
    assert (single.double() - exact).norm() < 1e-4 * exact.norm()
