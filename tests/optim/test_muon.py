"""Muon against torch.optim.Muon, closed forms and the optimizers that its other groups are."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from metacal.errors import InputError
from metacal.models import Backbone
from metacal.optim.muon import Muon, muon_groups, newton_schulz, newton_schulz_vjp

needs_torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
SHAPES = [(6, 4), (4, 6), (5, 5), (1, 3)]


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@needs_torch_muon
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw", "spectral_unclamped"])
def test_equals_torch_step_by_step(adjust: str | None, nesterov: bool, dtype: torch.dtype) -> None:
    """Bit for bit with torch's dtype of Newton–Schulz; nearly so with another."""
    theirs = [nn.Parameter(t) for t in draw(0, *SHAPES, dtype=dtype)]
    ours, precise = copy.deepcopy(theirs), copy.deepcopy(theirs)
    keys = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    reference = torch.optim.Muon(theirs, **keys)
    optimizer, exact = Muon(ours, ns_dtype=torch.bfloat16, **keys), Muon(precise, **keys)
    for step in range(4):
        for params in (theirs, ours, precise):
            for p, g in zip(params, draw(10 + step, *SHAPES, dtype=dtype)):
                p.grad = g
        reference.step()
        optimizer.step()
        exact.step()
        for a, b, c in zip(theirs, ours, precise):
            assert torch.equal(a, b)
            # ‖update‖_rms is about lr, and bfloat16 has 8 bits
            torch.testing.assert_close(a, c, rtol=0, atol=0.05 * (step + 1) * 0.05)


@needs_torch_muon
def test_equals_torch_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the rounding: torch's own step with its cast to bfloat16 taken away."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    theirs = [nn.Parameter(t) for t in draw(0, *SHAPES)]
    ours = copy.deepcopy(theirs)
    pair = torch.optim.Muon(theirs, lr=0.05), Muon(ours, lr=0.05)
    for step in range(5):
        for params, optimizer in zip((theirs, ours), pair):
            for p, g in zip(params, draw(10 + step, *SHAPES)):
                p.grad = g
            optimizer.step()
        for a, b in zip(theirs, ours):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 6), st.floats(1e-3, 1e3))
def test_newton_schulz_acts_on_singular_values(seed: int, rows: int, columns: int, scale: float) -> None:
    """U f(S) Vᵀ with the polynomial f, for any scale and for the transpose."""
    (g,) = draw(seed, (rows, columns))
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    x = newton_schulz(g * scale)
    torch.testing.assert_close(x, u @ torch.diag(s) @ vh, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(newton_schulz(g.T), x.T, rtol=1e-9, atol=1e-9)


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1e-7, 100.0]))
def test_newton_schulz_vjp_is_that_of_autograd(seed: int, rows: int, columns: int, steps: int, eps: float) -> None:
    g, cotangent = draw(seed, (rows, columns), (rows, columns))
    g.requires_grad_()
    settings = ((3.0, -4.0, 2.0), steps, eps)
    (expected,) = torch.autograd.grad(newton_schulz(g, *settings), g, cotangent)
    found = newton_schulz_vjp(g.detach(), cotangent, *settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_zero_gradient_only_decays() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    p.grad = torch.zeros(2, 3)
    Muon([p], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(p.detach(), torch.full((2, 3), 0.95))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_is_its_matrix(layout: torch.memory_format) -> None:
    (start,) = draw(0, (4, 3, 2, 2))
    kernel = nn.Parameter(start.clone(memory_format=layout))
    matrix = nn.Parameter(start.flatten(1).clone())
    optimizers = Muon([kernel], lr=0.1), Muon([matrix], lr=0.1)
    for step in range(3):
        (g,) = draw(1 + step, (4, 3, 2, 2))
        kernel.grad, matrix.grad = g.clone(memory_format=layout), g.flatten(1).clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_other_groups_are_the_optimizers_of_torch(kind: str) -> None:
    ours = [nn.Parameter(t) for t in draw(0, (4, 3), (3,), (2, 3))]
    theirs = copy.deepcopy(ours[1:])
    keys = {"lr": 0.1, "weight_decay": 0.2}
    keys.update({"betas": (0.5, 0.9), "amsgrad": True} if kind == "adamw" else {"momentum": 0.9, "nesterov": True})
    optimizer = Muon([{"params": ours[:1]}, {"params": ours[1:], "kind": kind, **keys}], lr=0.02)
    reference = (AdamW if kind == "adamw" else SGD)(theirs, **keys)
    for step in range(4):
        for p, g in zip(ours, draw(5 + step, (4, 3), (3,), (2, 3))):
            p.grad = g
        for p, q in zip(theirs, ours[1:]):
            p.grad = q.grad.clone()
        optimizer.step()
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(theirs, ours[1:]))
    defaults = reference.defaults.keys() | {"params", "kind"}
    assert optimizer.param_groups[1].keys() == defaults


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def train(model: nn.Module, optimizer: Muon, steps: range, scheduler: object = None) -> Tensor:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 1, 4, 4, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
def test_a_resumed_run_is_the_same_run(rest: str) -> None:
    """Through a file that holds tensors and plain Python only, into an optimizer with other settings; by a copy too."""
    options = {"momentum": 0.9} if rest == "sgd" else {"betas": (0.8, 0.99)}

    def make(model: nn.Module, lr: float = 0.02) -> Muon:
        return Muon(muon_groups(model, lr=lr, rest=rest, rest_lr=lr / 10, rest_options=options), ns_dtype="bfloat16")

    model = small_net()
    optimizer = make(model)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    expected = train(model, optimizer, range(3, 6))
    assert torch.equal(train(twin, twins_optimizer, range(3, 6)), expected)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small_net()
    resumed = make(other, lr=1.0)
    train(other, resumed, range(1))
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert torch.equal(train(other, resumed, range(3, 6)), expected)


def test_a_schedule_scales_every_group() -> None:
    model, reference = small_net(), small_net()
    optimizer = Muon(muon_groups(model, lr=0.02, rest_lr=1e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    found = train(model, optimizer, range(3), scheduler)
    other = Muon(muon_groups(reference, lr=0.02, rest_lr=1e-3))
    start = [group["lr"] for group in other.param_groups]
    for step in range(3):
        for group, lr in zip(other.param_groups, start):
            group["lr"] = lr * 0.5**step
        expected = train(reference, other, range(step, step + 1))
    assert torch.equal(found, expected)


def names_of(model: nn.Module, groups: list[dict]) -> list[set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in groups]


def test_groups_of_a_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.positions = nn.Parameter(torch.zeros(1, 3, 4))
            self.attention = nn.MultiheadAttention(4, 2)
            self.norm = nn.LayerNorm((3, 4))
            self.column = nn.Linear(1, 4, bias=False)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.fc = nn.Linear(4, 2)

    net = Net()
    groups = muon_groups(net, lr=0.02, weight_decay=0.3, rest="sgd", rest_lr=0.1, rest_options={"momentum": 0.9})
    muon, rest = names_of(net, groups)
    assert muon == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert muon | rest == {name for name, p in net.named_parameters() if p.requires_grad}
    assert [(g["kind"], g["lr"], g["weight_decay"]) for g in groups] == [("muon", 0.02, 0.3), ("sgd", 0.1, 0.0)]
    assert groups[1]["momentum"] == 0.9
    Muon(groups)


def test_the_head_is_the_backbones() -> None:
    net = small_net()
    for module in (net, Backbone(net)):
        first, _ = muon_groups(module, lr=0.1)
        assert {id(p) for p in first["params"]} == {id(net[0].weight), id(net[4].weight)}
    for module, head in ((Backbone(net, head="4"), None), (net, "4"), (Backbone(net), "4")):
        first, _ = muon_groups(module, lr=0.1, head=head)
        assert {id(p) for p in first["params"]} == {id(net[0].weight), id(net[6].weight)}
    convolutional = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3))
    assert names_of(convolutional, muon_groups(convolutional, lr=0.1))[0] == {"0.weight", "1.weight"}


def test_decay_of_norms_and_biases() -> None:
    net = small_net()
    groups = muon_groups(net, lr=0.1, rest_weight_decay=0.2, decay_norm_and_bias=False)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.2, 0.0]
    assert names_of(net, groups)[1:] == [{"6.weight"}, {"0.bias", "1.weight", "1.bias", "4.bias", "6.bias"}]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr": -0.1}, "lr must be >= 0, got -0.1"),
        ({"weight_decay": -1}, "weight_decay must be >= 0, got -1"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"ns_steps": 0}, "ns_steps must be a whole number from 1 to 99, got 0"),
        ({"ns_dtype": "bfloat"}, "ns_dtype must be one of bfloat16, .*did you mean 'bfloat16'"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be one of original"),
        ({"eps": 0.0}, "eps must be > 0, got 0.0"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
    ],
)
def test_settings_out_of_range(keys: dict, message: str) -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(InputError, match=message):
        Muon(params, **keys)
    with pytest.raises(InputError, match=message):
        Muon([{"params": params, **keys}])


def test_bad_input() -> None:
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
    with pytest.raises(InputError, match=r"two dimensions or more, got torch.float32 \(3,\); .*muon_groups"):
        Muon([matrix, vector])
    with pytest.raises(InputError, match="kind must be one of muon, adamw, sgd, got 'adam'"):
        Muon([{"params": [matrix], "kind": "adam"}])
    with pytest.raises(InputError, match="group of kind 'sgd': Nesterov momentum requires"):
        Muon([{"params": [matrix], "kind": "sgd", "nesterov": True}])
    with pytest.raises(InputError, match=r"state_dict must be one of Muon, but its param_groups\[0\] has no kind"):
        Muon([matrix]).load_state_dict(SGD([matrix]).state_dict())
    with pytest.raises(InputError, match="muon with no matrix parameters: model Linear"):
        muon_groups(nn.Linear(3, 2), lr=0.1)
    with pytest.raises(InputError, match="head must name a layer of the model, got 'fc'"):
        muon_groups(small_net(), lr=0.1, head="fc")
    with pytest.raises(InputError, match="rest must be one of adamw, sgd, got 'adam'"):
        muon_groups(small_net(), lr=0.1, rest="adam")
    with pytest.raises(InputError, match="rest_lr must be >= 0, got -1"):
        muon_groups(small_net(), lr=0.1, rest_lr=-1)
    with pytest.raises(InputError, match="rest_options must not have lr"):
        muon_groups(small_net(), lr=0.1, rest_options={"lr": 1.0})
