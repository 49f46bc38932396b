"""Gamma sources: what they return, what they learn from, what never changes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from metacal.bilevel import Last, MetaStep
from metacal.errors import InputError
from metacal.gamma import (
    FLSD,
    AdaFocal,
    CurveGamma,
    FixedGamma,
    GammaNet,
    LearnedSmoothing,
    ScalarGamma,
    StepGamma,
    cap,
    flsd_gamma,
    pool,
    uncap,
)
from metacal.predictions import Predictions


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


@given(st.floats(-0.99, 40), st.floats(0.1, 10))
def test_uncap_inverts_cap_of_either_sign(gamma: float, tau: float) -> None:
    score = torch.tensor(uncap(gamma, tau, 50.0, -1.0), dtype=torch.float64)
    assert float(cap(score, tau, 50.0, -1.0)) == pytest.approx(gamma, rel=1e-9, abs=1e-12)


def test_cap_of_either_sign_passes_zero_undisturbed() -> None:
    score = torch.tensor([-1e-4, 0.0, 1e-4, -1e6, 1e6]).double().requires_grad_()
    gamma = cap(score, 0.5, 50.0, -2.0)
    (slope,) = torch.autograd.grad(gamma.sum(), score)
    torch.testing.assert_close(gamma[:3], 2 * score[:3].detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(slope[:3], torch.full((3,), 2.0).double(), rtol=1e-7, atol=0)
    assert gamma[3:].tolist() == [-2.0, 50.0]


@pytest.mark.parametrize(("low", "least"), [(0.0, 0.1), (-2.0, -1.96)])
def test_a_score_that_is_pushed_on_at_a_bound_does_not_wind_up(low: float, least: float) -> None:
    source = ScalarGamma(1.0, 0.1, 50.0, low).double()
    optimizer = torch.optim.Adam(source.parameters(), lr=0.05, betas=(0.5, 0.5))
    net = nn.Linear(3, 2).double()
    step = MetaStep(net, torch.optim.SGD(net.parameters(), lr=0.0), source, optimizer, loss="signed_focal")
    path = []
    for slope in [1.0] * 300 + [-1.0] * 20 + [-1.0] * 300:
        step.last = Last(*(torch.zeros(2, 2), torch.zeros(2).long()) * 3)
        step._learn([torch.tensor(slope).double()])
        path.append(float(source().detach()))
    assert path[299] == pytest.approx(least, rel=1e-6)
    assert path[318] > 0.3, "back within twenty steps, though it was pushed on for hundreds"
    assert path[-1] == pytest.approx(49.0, rel=1e-6)
    curve = CurveGamma(1.0, 0.1)
    with torch.no_grad():
        curve.last.bias.fill_(-1e3)
    curve.settle()
    assert float(curve(logits=torch.zeros(1, 3), labels=torch.tensor([0]))) == pytest.approx(0.1, rel=1e-4)


def test_curve_is_the_function_of_its_docstring() -> None:
    curve = CurveGamma(0.5, 2.0, 10.0, -1.0, units=4).double()
    z, y = 3 * torch.randn(30, 6, dtype=torch.float64), torch.arange(30) % 6
    torch.testing.assert_close(curve(logits=z, labels=y), torch.full((30,), 0.5).double())
    nn.init.normal_(curve.last.weight)
    p = z.softmax(1)
    entropy = -(p * p.log()).sum(1) / math.log(6)
    x = 2 * torch.stack([p.max(1).values, entropy, p[torch.arange(30), y]], 1) - 1
    score = torch.tanh(x @ curve.first.weight.T + curve.first.bias) @ curve.last.weight[0] + curve.last.bias
    expected = [10 * math.tanh(o / 20) if o > 0 else -math.tanh(-o / 2) for o in score.tolist()]
    torch.testing.assert_close(curve(logits=z, labels=y), torch.tensor(expected).double())
    assert len(set(expected)) == 30 and sum(p.numel() for p in curve.parameters()) == 21
    z[0, 1] = -math.inf  # a class that is ruled out
    assert torch.isfinite(curve(logits=z, labels=y)).all()


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


def test_learned_smoothing_for_all_and_per_class() -> None:
    labels = torch.tensor([2, 0, 2])
    one = LearnedSmoothing(init=0.1)
    assert one(features(3), labels=labels).shape == () and one().item() == pytest.approx(0.1)
    each = LearnedSmoothing(per_class=True, n_classes=3, init=0.1)
    with torch.no_grad():
        each.score.copy_(torch.tensor([0.0, -1.0, 2.0]))
    expected = [1 / (1 + math.exp(-2)), 0.5, 1 / (1 + math.exp(-2))]
    alpha = each(features(3), logits=None, labels=labels, inputs=None, epoch=0)
    assert alpha.tolist() == pytest.approx(expected)
    alpha.sum().backward()
    slope = expected[0] * (1 - expected[0])
    assert each.score.grad.tolist() == pytest.approx([0.25, 0.0, 2 * slope])  # class 1 is not in the batch
    with pytest.raises(InputError, match="labels must be given"):
        each(features(3))


def held_out(confidence: list[float], correct: list[bool]) -> Predictions:
    """Two classes; the predicted one is class 0."""
    c = torch.tensor(confidence, dtype=torch.float64)
    probs = torch.stack([c, 1 - c], 1)
    return Predictions.from_probabilities(probs, torch.tensor([0 if a else 1 for a in correct]))


def of(source: AdaFocal, p_y: list[float]) -> list[float]:
    """The gammas of samples whose true class has these probabilities."""
    p = torch.tensor(p_y, dtype=torch.float64)
    logits = torch.stack([p, 1 - p], 1).log()
    return source(None, logits=logits, labels=torch.zeros(len(p), dtype=torch.int64)).tolist()


def test_adafocal_starts_with_one_gamma_in_bins_of_equal_width() -> None:
    source = AdaFocal(n_bins=4, gamma_init=1.5)
    assert of(source, [0.01, 0.3, 0.6, 0.99]) == [1.5] * 4
    assert source.upper.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert not source(None, logits=torch.zeros(2, 3, requires_grad=True), labels=torch.tensor([0, 1])).requires_grad


def test_adafocal_follows_its_rule_by_hand() -> None:
    """Two bins of equal mass: {.6, .7}, of which none is right, and {.8, .9}, all right."""
    source = AdaFocal(n_bins=2, rate=0.5)
    predictions = held_out([0.6, 0.9, 0.7, 0.8], [False, True, False, True])
    low, high = 1.0, 1.0
    for _ in range(3):
        source.update(predictions)
        low, high = low * math.exp(0.5 * 0.65), high * math.exp(0.5 * -0.15)
        assert of(source, [0.699]) == pytest.approx([low], rel=1e-5)
        assert of(source, [0.701]) == pytest.approx([high], rel=1e-5)
    assert of(source, [0.001, 0.65, 0.8, 0.9999]) == pytest.approx([low, low, high, high], rel=1e-5)


@given(
    st.lists(st.tuples(st.floats(0.5, 1), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 6),
    st.floats(0.1, 30),
    st.sampled_from([1.0, 0.2, -0.2, -1.0, 19.0]),
)
def test_adafocal_equals_its_rule_in_loops(
    samples: list[tuple[float, bool]], n_bins: int, rate: float, start: float
) -> None:
    source = AdaFocal(n_bins, rate, start).double()
    confidence, correct = [c for c, _ in samples], [a for _, a in samples]
    n, ordered = len(samples), sorted(confidence)
    upper = [ordered[math.ceil(m * n / n_bins) - 1] for m in range(1, n_bins + 1)]
    gammas = source.gammas.tolist()
    for _ in range(4):
        source.update(held_out(confidence, correct))
        for b in range(n_bins):
            inside = [i for i, c in enumerate(confidence) if next(m for m in range(n_bins) if c <= upper[m]) == b]
            if not inside:
                continue
            gap = sum(confidence[i] - correct[i] for i in inside) / len(inside)
            moved = gammas[b] * math.exp(rate * gap if gammas[b] > 0 else -rate * gap)
            if abs(moved) < 0.2:
                moved = -0.2 if moved > 0 else 0.2
            gammas[b] = min(max(moved, -2.0), 20.0)
    assert source.gammas.tolist() == pytest.approx(gammas, rel=1e-9)


def test_adafocal_switches_to_inverse_focal_and_back() -> None:
    source = AdaFocal(n_bins=1, rate=1.0, gamma_init=0.3)
    under, over = held_out([0.5] * 4, [True] * 4), held_out([0.9] * 4, [False] * 4)
    source.update(under)  # .3 · exp(-.5) = .18 is below the threshold
    assert of(source, [0.5]) == pytest.approx([-0.2])
    source.update(under)  # more of inverse focal
    assert of(source, [0.5]) == pytest.approx([-0.2 * math.exp(0.5)])
    source.update(over)  # -.33 · exp(-.9) = -.13: back
    assert of(source, [0.5]) == pytest.approx([0.2])
    for _ in range(20):
        source.update(over)
    assert of(source, [0.5]) == [20.0]
    for _ in range(20):
        source.update(under)
    assert of(source, [0.5]) == [-2.0]


def test_adafocal_stays_where_the_predictions_are_calibrated() -> None:
    calibrated = held_out([0.75] * 4, [True, True, True, False])
    for gamma in (0.7, -0.7):  # at the threshold, which float32 rounds down
        source = AdaFocal(n_bins=3, gamma_init=gamma, threshold=0.7)
        source.update(calibrated)
        assert of(source, [0.3, 0.75, 0.9]) == pytest.approx([gamma] * 3)


def test_adafocal_is_restored_from_a_checkpoint() -> None:
    source = AdaFocal(n_bins=5)
    confidence = torch.linspace(0.5, 1, 50).tolist()
    source.update(held_out(confidence, [i % 3 > 0 for i in range(50)]))
    other = AdaFocal(n_bins=5)
    other.load_state_dict(source.state_dict())
    probe = torch.linspace(0.01, 0.99, 40).tolist()
    assert of(other, probe) == of(source, probe) and len(set(of(source, probe))) == 5
    assert [*source.parameters()] == []


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
        (lambda: LearnedSmoothing(init=1.0), "init must be between 0 and 1, both exclusive, got 1.0"),
        (lambda: LearnedSmoothing(per_class=True), "n_classes must be >= 2 with per_class, got 0"),
        (lambda: AdaFocal(n_bins=0), "n_bins must be an integer"),
        (lambda: AdaFocal(rate=-1.0), "rate must be > 0, got -1.0"),
        (lambda: AdaFocal(threshold=-1.0), "threshold must be >= 0"),
        (lambda: AdaFocal(gamma_init=0.1), "gamma_init must be in .* at least threshold = 0.2 in size, got 0.1"),
        (lambda: AdaFocal(gamma_init=21.0), r"gamma_init must be in \[-2.0, 20.0\]"),
        (lambda: AdaFocal(gamma_min=-0.1), "gamma_min and gamma_max must be at or beyond"),
        (lambda: GammaNet(5)(None), "features must be given: .* logits alone; give Backbone"),
        (lambda: GammaNet(5)(torch.randn(3, 4)), r"features must have shape \(N, 5\), got \(3, 4\)"),
    ]:
        with pytest.raises(InputError, match=match):
            make()


def test_negative_gammas_need_a_loss_that_takes_them() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(InputError, match="negative gammas, which loss='focal' does not take: use loss='signed_focal'"):
        MetaStep(net, optimizer, ScalarGamma(0.0, gamma_min=-1.0), loss="focal")
    MetaStep(net, optimizer, ScalarGamma(0.0, gamma_min=-1.0), loss="signed_focal")
