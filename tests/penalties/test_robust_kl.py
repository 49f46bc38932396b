"""robust_kl: its attack's limits and effect, its value and gradient, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from metacal.errors import InputError
from metacal.margins import true_margin
from metacal.models import Backbone
from metacal.penalties import Pixels, perturbed, robust_kl

PIXELS = Pixels(torch.tensor([0.4, 0.6]), torch.tensor([0.25, 0.2]))


def shaped(values):
    return torch.as_tensor(values, dtype=torch.float64).view(1, 2, 1, 1)


@given(
    st.sampled_from(["linf", "l2"]),
    st.floats(0, 0.5),
    st.floats(0.001, 0.5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 99),
)
def test_the_attack_stays_in_ball_and_box(norm, eps, alpha, steps, normalised, dtype, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).to(
            dtype
        )
        pixel = torch.rand(4, 2, 6, 6, dtype=dtype).round(decimals=1)  # many at the box's faces
        y = torch.randint(3, (4,))
    mean, std = shaped(PIXELS.mean).to(dtype), shaped(PIXELS.std).to(dtype)
    x = (pixel - mean) / std if normalised else pixel
    found = perturbed(model, x, y, eps, alpha, steps, norm, PIXELS if normalised else None)
    assert found.shape == x.shape and found.dtype == x.dtype and not found.requires_grad
    at = found * std + mean if normalised else found
    slack = 1e-5 if dtype is torch.float32 else 1e-12
    assert at.min() >= -slack and at.max() <= 1 + slack
    delta = (at - pixel).flatten(1)
    size = delta.abs().amax(1) if norm == "linf" else delta.norm(dim=1)
    assert size.max() <= min(eps, steps * alpha) + slack


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_attack_in_units_of_the_inputs(norm, batch):
    x, y = batch
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    std = PIXELS.std.double()
    even = Pixels(PIXELS.mean, torch.full_like(PIXELS.std, 0.25))
    pixel = x.clamp(0.2, 0.8)  # out of the limits' reach
    z = (pixel - shaped(even.mean)) / 0.25
    inputs = perturbed(net, z, y, 0.4, 0.2, 3, norm, even, units="inputs")
    torch.testing.assert_close(inputs, perturbed(net, z, y, 0.1, 0.05, 3, norm, even))  # a quarter of it in pixels
    assert torch.equal(inputs, perturbed(net, z, y, 0.4, 0.2, 3, norm, units="inputs"))  # no limits are known
    z = (x.round() - shaped(PIXELS.mean)) / shaped(std)  # at the limits
    moved = perturbed(net, z, y, 0.4, 0.2, 3, norm, PIXELS, units="inputs")
    at = moved * shaped(std) + shaped(PIXELS.mean)
    size = (moved - z).flatten(1)
    assert at.min() >= -1e-7 and at.max() <= 1 + 1e-7 and not torch.equal(moved, z)
    assert (size.abs().amax(1) if norm == "linf" else size.norm(dim=1)).max() <= 0.4 + 1e-7
    outside = 3 * torch.randn_like(x)
    assert robust_kl(net, outside, y, 0.4, 0.2, units="inputs").item() > 0
    with pytest.raises(InputError, match="units must be one of pixels, inputs, got 'pixel'"):
        robust_kl(net, x, y, units="pixel")


def trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A net that tells three noisy patterns apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        patterns = torch.rand(3, 2, 6, 6)
        y = torch.randint(3, (96,))
        x = (patterns[y] + 0.25 * torch.randn(96, 2, 6, 6)).clamp(0, 1)
        model = nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(30):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model, x, y


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("training", [False, True])
def test_the_attack_lowers_the_margin_of_a_trained_net(norm, training):
    model, x, y = trained()
    model.train(training)
    model[4].eval()  # the same function before and after
    assert (model(x).argmax(1) == y).float().mean() > 0.9
    eps = 8 / 255 if norm == "linf" else 0.5
    with torch.no_grad():
        before = true_margin(model(x), y)
        after = true_margin(model(perturbed(model, x, y, eps, eps / 4, norm=norm)), y)
        more = true_margin(model(perturbed(model, x, y, 2 * eps, eps / 2, norm=norm)), y)
    if not training:  # with batch statistics one sample may gain by the others' moves
        assert (after < before).float().mean() > 0.95
    assert more.mean() < after.mean() - 0.1 < before.mean() - 0.2
    assert 0 < robust_kl(model, x, y, eps, eps / 4, norm=norm) < robust_kl(model, x, y, 2 * eps, eps / 2, norm=norm)


def test_value_by_hand(net, batch):
    x, y = batch
    log_p, log_q = net(x).log_softmax(1), net(perturbed(net, x, y, 0.1, 0.05)).log_softmax(1)
    expected = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    assert robust_kl(net, x, y, 0.1, 0.05).item() == pytest.approx(expected.item(), rel=1e-9)
    assert robust_kl(net, x, y, 0.0).item() == pytest.approx(0.0, abs=1e-12)


def test_gradients_in_the_parameters(net, batch, check_gradient):
    # steps of signs stay the same under small moves of θ, so differences see no gradient of the attack either
    x, y = batch
    check_gradient(lambda: robust_kl(net, x, y, 0.1, 0.05), net)


def test_no_gradient_flows_through_an_l2_attack(net, batch):
    x, y = batch
    params = list(net.parameters())
    fixed = perturbed(net, x, y, 0.5, 0.2, norm="l2")
    log_p, log_q = net(x).log_softmax(1), net(fixed).log_softmax(1)
    expected = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(1).mean(), params)
    found = torch.autograd.grad(robust_kl(net, x, y, 0.5, 0.2, norm="l2"), params)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_given_logits_spare_a_forward_and_change_nothing(net, batch):
    x, y = batch
    params = list(net.parameters())
    calls = []
    logits = net(x)
    net.register_forward_hook(lambda *_: calls.append(1))
    with_logits = robust_kl(net, x, y, 0.1, 0.05, logits=logits)
    assert len(calls) == 4
    own = robust_kl(net, x, y, 0.1, 0.05)
    assert len(calls) == 9
    torch.testing.assert_close(with_logits, own)
    for a, b in zip(torch.autograd.grad(with_logits, params), torch.autograd.grad(own, params)):
        torch.testing.assert_close(a, b)


def test_networks_are_left_as_they_were(net, batch, untouched):
    x, y = batch
    net.requires_grad_(True)
    untouched(lambda: robust_kl(net, x, y), net)
    with torch.no_grad():
        untouched(lambda: perturbed(net, x, y), net)
    assert not x.requires_grad and x.grad is None


def test_backbones_and_modes_of_parts():
    model, x, y = trained()
    model.train()
    model[1].eval()
    backbone = Backbone(model)
    model[4].eval()
    torch.testing.assert_close(robust_kl(backbone, x, y), robust_kl(model, x, y))
    assert [m.training for m in model] == [True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eps": -0.1}, "eps must be >= 0, got -0.1"),
        ({"eps": float("nan")}, "eps must be >= 0"),
        ({"alpha": 0.0}, "alpha must be > 0, got 0.0"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 2.0}, "steps must be an integer >= 1"),
        ({"norm": "L2"}, "norm must be one of linf, l2"),
        ({"pixels": 0.5}, "pixels must be None"),
    ],
)
def test_bad_options_are_named(keys, message, batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    with pytest.raises(InputError, match=message):
        robust_kl(model, *batch, **keys)


def test_inputs_outside_the_box_say_what_to_set(batch):
    x, y = batch
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    with pytest.raises(InputError, match=r"pixels in \[0, 1\].*set pixels=Pixels"):
        robust_kl(model, 4 * x - 2, y)
    with pytest.raises(InputError, match="check pixels"):
        robust_kl(model, 10 * x, y, pixels=PIXELS)
    with pytest.raises(InputError, match="x must be floating point for robust_kl"):
        robust_kl(model, (255 * x).to(torch.uint8), y)
