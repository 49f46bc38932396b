"""Gamma sources: what they return, what they learn from, what never changes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from metacal.errors import InputError
from metacal.gamma import FLSD, FixedGamma, GammaNet, ScalarGamma, StepGamma, cap, flsd_gamma, pool, uncap


def features(n: int = 40, d: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) * 3 + 7


@given(st.floats(1e-3, 40), st.floats(0.1, 10))
def test_uncap_inverts_cap(gamma: float, tau: float) -> None:
    score = torch.tensor(uncap(gamma, tau, 50.0), dtype=torch.float64)
    assert float(cap(score, tau, 50.0)) == pytest.approx(gamma, rel=1e-9)


def test_cap_is_as_defined() -> None:
    o = torch.linspace(-30, 300, 50, dtype=torch.float64)
    expected = [50 * math.tanh(math.log1p(math.exp(-abs(v))) / 50 + max(v, 0) / 50) for v in (o / 2).tolist()]
    torch.testing.assert_close(cap(o, 2.0, 50.0), torch.tensor(expected, dtype=torch.float64))
    assert (cap(o, 2.0, 50.0) > 0).all() and (cap(o, 2.0, 50.0) <= 50).all()


def test_gamma_net_starts_at_gamma_init_for_every_sample() -> None:
    for init in (0.1, 1.0, 20.0, 49.0):
        net = GammaNet(5, gamma_init=init)
        net.observe(features())
        gamma = net(features())
        assert gamma.shape == (40,)
        torch.testing.assert_close(gamma, torch.full((40,), init), rtol=1e-4, atol=0)


def test_gamma_net_is_the_two_layer_net_of_its_docstring() -> None:
    net = GammaNet(5, hidden=7, tau=2.0, gamma_max=10.0).double()
    nn.init.normal_(net.last.weight)
    h = features().double()
    net.observe(h)
    standard = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
    o = torch.relu(standard @ net.first.weight.T + net.first.bias) @ net.last.weight.T + net.last.bias
    expected = 10 * torch.tanh(torch.log1p(torch.exp(o / 2)) / 10)
    torch.testing.assert_close(net(h), expected.squeeze(1))


def test_gamma_does_not_depend_on_the_scale_of_the_features() -> None:
    a, b = GammaNet(5).double(), GammaNet(5).double()
    nn.init.normal_(a.last.weight)
    b.load_state_dict(a.state_dict())
    h = features().double()
    a.observe(h)
    b.observe(100 * h - 3)
    torch.testing.assert_close(a(h), b(100 * h - 3), rtol=1e-4, atol=1e-6)


def test_statistics_change_by_observe_alone() -> None:
    net = GammaNet(5)
    net(features())
    assert int(net.batches) == 0 and torch.equal(net.mean, torch.zeros(5))
    net.observe(features())
    torch.testing.assert_close(net.mean, features().mean(0))
    torch.testing.assert_close(net.var, features().var(0, correction=0))
    net.observe(features(seed=1))
    torch.testing.assert_close(net.mean, (features().mean(0) + features(seed=1).mean(0)) / 2)
    kept = {name: b.clone() for name, b in net.named_buffers()}
    net(features(seed=2))
    assert all(torch.equal(b, kept[name]) for name, b in net.named_buffers())


def test_statistics_forget() -> None:
    net = GammaNet(2, momentum=0.5)
    for value in (0.0, 0.0, 8.0):
        net.observe(torch.full((4, 2), value))
    torch.testing.assert_close(net.mean, torch.full((2,), 4.0))


def test_no_gradient_reaches_the_features() -> None:
    h = features().requires_grad_()
    net = GammaNet(5)
    nn.init.normal_(net.last.weight)
    net(h).sum().backward()
    assert h.grad is None
    assert all(p.grad is not None for p in net.parameters())


def test_half_precision_features() -> None:
    assert GammaNet(5)(features().bfloat16()).dtype == torch.float32


def test_label_aware_net_sees_labels() -> None:
    net = GammaNet(5, num_classes=3)
    nn.init.normal_(net.last.weight)
    h = features(1).expand(3, 5)
    gamma = net(h, labels=torch.arange(3))
    assert len(set(gamma.tolist())) == 3
    with pytest.raises(InputError, match="label-aware"):
        net(h)


def test_noise_is_the_same_between_two_training_batches() -> None:
    net = GammaNet(5, input="noise")
    nn.init.normal_(net.last.weight)
    state = torch.get_rng_state()
    a, b = net(features()), net(features(seed=1))
    assert torch.equal(a, b)
    net.observe(features())
    assert not torch.equal(a, net(features()))
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        other = GammaNet(5, input="noise", seed=1)
        other.load_state_dict(net.state_dict())
        assert not torch.equal(net(features()), other(features()))


def test_random_features_depend_on_the_input_and_the_seed_alone() -> None:
    x = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    net, other = GammaNet(5, input="random"), GammaNet(5, input="random", seed=1)
    nn.init.normal_(net.last.weight)
    other.load_state_dict(net.state_dict())
    a = net(features(6), inputs=x)
    assert torch.equal(a, net(features(6, seed=3), inputs=x))
    assert not torch.equal(a, net(features(6), inputs=x.flip(0)))
    assert not torch.equal(a, other(features(6), inputs=x))
    with pytest.raises(InputError, match="inputs must be given"):
        net(features(6))


def test_pool() -> None:
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(pool(x), x.mean((2, 3)))
    assert torch.equal(pool(x[:, :, 0, 0]), x[:, :, 0, 0])
    tokens = torch.randn(2, 7, 3)  # 7 tokens of width 3
    torch.testing.assert_close(pool(tokens), tokens.mean(1))


def test_pool_names_the_layer_whose_output_it_cannot_take() -> None:
    for output, match in [
        (torch.randn(2), r"layer 'net.0' must give shape \(N, D\), .* got \(2,\)"),
        (torch.randn(2, 3, 4, 5, 6), r"layer 'net.0' must give shape .* got \(2, 3, 4, 5, 6\)"),
        ((torch.randn(2, 3), None), "layer 'net.0' must give one tensor of shape .* got a tuple"),
    ]:
        with pytest.raises(InputError, match=match):
            pool(output, "net.0")


def test_fixed_step_and_scalar() -> None:
    assert float(FixedGamma(3.0)(features())) == 3.0
    source = StepGamma([10, 20], [5.0, 3.0, 1.0])
    values = [float(source(features(), epoch=e)) for e in (0, 9, 10, 19, 20, 99)]
    assert values == [5, 5, 3, 3, 1, 1]
    scalar = ScalarGamma(2.0)
    assert scalar(features()).item() == pytest.approx(2.0)
    scalar(features()).backward()
    assert scalar.score.grad is not None


def test_flsd() -> None:
    p = torch.tensor([[0.19, 0.81], [0.21, 0.79], [0.9, 0.1]])
    z, y = p.log().requires_grad_(), torch.zeros(3, dtype=torch.int64)
    assert flsd_gamma(z, y).tolist() == [5.0, 3.0, 3.0]
    assert FLSD()(None, logits=z, labels=y).requires_grad is False


def test_bad_arguments() -> None:
    for make, match in [
        (lambda: FixedGamma(-1.0), "value must be >= 0"),
        (lambda: StepGamma([1, 2], [1.0]), "one entry more than milestones"),
        (lambda: StepGamma([2, 1], [1.0, 2.0, 3.0]), "milestones must increase"),
        (lambda: GammaNet(5, gamma_init=0.0), "gamma_init must be between 0"),
        (lambda: GammaNet(5, gamma_init=50.0), "gamma_init must be between 0"),
        (lambda: GammaNet(5, tau=0.0), "tau must be > 0, got 0.0"),
        (lambda: GammaNet(0), "in_features must be >= 1"),
        (lambda: GammaNet(5, input="pixels"), "input must be one of features, noise, random, layer"),
        (lambda: GammaNet(5, layer="net.0"), "goes with input='layer'"),
        (lambda: GammaNet(5)(torch.randn(3, 4)), r"features must have shape \(N, 5\), got \(3, 4\)"),
    ]:
        with pytest.raises(InputError, match=match):
            make()
