"""Surrogates against loops, finite differences and their limits."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import surrogates as reference

from metacal.calibration import measures
from metacal.calibration import surrogates as S
from metacal.errors import InputError
from metacal.predictions import Predictions

CASES = [
    ("sece", {}),
    ("sece", {"self_term": False}),
    ("sece", {"bandwidth": 0.05, "norm": "l2"}),
    ("sece", {"bandwidth": 0.003, "self_term": False, "norm": "l2"}),
    ("dece", {}),
    ("dece", {"n_bins": 5, "t_a": 20.0, "t_b": 0.1, "norm": "l2"}),
    ("soft_ece", {}),
    ("soft_ece", {"n_bins": 7, "temperature": 0.003, "norm": "l1"}),
    ("mmce", {}),
    ("mmce", {"weighted": True}),
    ("mmce", {"bandwidth": 0.01}),
    ("skce", {}),
    ("skce", {"bandwidth": 0.05}),
    ("mdca", {}),
    ("nll", {}),
    ("brier", {}),
    ("confidence_gap", {}),
    ("confidence_gap", {"squared": True}),
]
cases = pytest.mark.parametrize(
    ("name", "keys"), CASES, ids=[f"{n}-{'-'.join(map(str, k.values()))}" for n, k in CASES]
)
names = pytest.mark.parametrize("name", list(S.SURROGATES))
PAIRS = ("sece", "mmce", "skce")


def batch(n: int, k: int = 4, seed: int = 0, scale: float = 2.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, k, generator=g, dtype=torch.float64)
    return logits.to(dtype), torch.randint(k, (n,), generator=g)


def value_and_grad(f, logits, labels, **keys):
    z = logits.detach().clone().requires_grad_()
    value = f(z, labels, **keys)
    return value.detach(), torch.autograd.grad(value, z)[0]


# ------------------------------------------------------------------------------------------------ values


@cases
@pytest.mark.parametrize("n", [1, 2, 3, 40])
def test_equals_the_loops(name, keys, n):
    logits, labels = batch(n, seed=n)
    expected = getattr(reference, name)(logits.numpy(), labels.numpy(), **keys)
    got = S.SURROGATES[name](logits, labels, **keys)
    assert got.shape == () and got.dtype == torch.float64
    assert got.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("self_term", [True, False])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_sece_with_a_bank_equals_the_loops(self_term, norm):
    logits, labels = batch(30)
    g = torch.Generator().manual_seed(5)
    bank = (torch.rand(25, generator=g, dtype=torch.float64), torch.randint(2, (25,), generator=g).double())
    keys = {"self_term": self_term, "norm": norm, "bank": bank}
    expected = reference.sece(logits.numpy(), labels.numpy(), **keys)
    assert S.sece(logits, labels, **keys).item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(lambda z: S.sece(z, labels, **keys), (logits.requires_grad_(),))


def test_sece_over_several_blocks_of_rows_equals_the_dense_formula():
    logits, labels = batch(700, scale=3)
    z = logits.clone().requires_grad_()
    for h, self_term in itertools.product((0.002, 0.01, 0.3), (True, False)):
        p, predicted = z.softmax(1).max(1)
        score = -((p[:, None] - p) ** 2) / (2 * h * h)
        if not self_term:
            score = score.masked_fill(torch.eye(700, dtype=torch.bool), -math.inf)
        dense = (score.softmax(1) @ (predicted == labels).double() - p).abs().mean()
        value, grad = value_and_grad(S.sece, logits, labels, bandwidth=h, self_term=self_term)
        assert value.item() == pytest.approx(dense.item(), abs=1e-13)
        torch.testing.assert_close(grad, torch.autograd.grad(dense, z)[0], rtol=1e-9, atol=1e-12)


def test_sece_without_self_term_gives_an_isolated_sample_its_neighbours_correctness():
    # confidences .55 and .99 are 44 bandwidths apart: the kernel between them underflows even in float64
    p = torch.tensor([[0.55, 0.45], [0.99, 0.01]], dtype=torch.float64)
    value, grad = value_and_grad(S.sece, p.log(), torch.tensor([0, 1]), bandwidth=0.01, self_term=False)
    assert value.item() == pytest.approx((abs(0 - 0.55) + abs(1 - 0.99)) / 2)
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0


@pytest.mark.parametrize("n", [20, 200, 2000])
def test_the_bandwidth_follows_the_batch(n):
    logits = torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).double()
    labels = torch.arange(n) % 4
    c = logits.softmax(1).max(1).values
    h = 1.06 * float(c.std(correction=0)) * n**-0.2
    assert S.batch_bandwidth(c) == pytest.approx(h, rel=1e-12)
    # a constant in the gradient, so that value and gradient are those at that h
    for by_batch in ({"adaptive": True}, {"adaptive": True, "norm": "l2"}):
        fixed = {**by_batch, "bandwidth": h, "adaptive": False}
        pairs = zip(*(value_and_grad(S.sece, logits, labels, **keys) for keys in (by_batch, fixed)))
        for one, other in pairs:
            torch.testing.assert_close(one, other)
    soft = value_and_grad(S.soft_ece, logits, labels, adaptive=True)
    for one, other in zip(soft, value_and_grad(S.soft_ece, logits, labels, temperature=2 * h * h)):
        torch.testing.assert_close(one, other)
    assert S.batch_bandwidth(torch.full((7,), 0.3)) == S.BANDWIDTHS[0]


def test_sece_tends_to_mean_absolute_error_as_the_bandwidth_vanishes():
    logits, labels = batch(50)
    c, predicted = logits.softmax(1).max(1)
    limit = ((predicted == labels).double() - c).abs().mean()
    assert S.sece(logits, labels, bandwidth=1e-7).item() == pytest.approx(limit.item())


def test_sece_tends_to_the_distance_from_the_accuracy_for_a_wide_kernel():
    logits, labels = batch(50)
    c, predicted = logits.softmax(1).max(1)
    limit = ((predicted == labels).double().mean() - c).abs().mean()
    assert S.sece(logits, labels, bandwidth=1e4).item() == pytest.approx(limit.item())


def test_a_perfect_predictor_scores_zero():
    labels = torch.arange(12) % 3
    logits = 800 * torch.nn.functional.one_hot(labels, 3).double()
    for name, f in S.SURROGATES.items():
        value, grad = value_and_grad(f, logits, labels)
        assert value.item() == pytest.approx(0, abs=1e-12), name
        assert torch.isfinite(grad).all(), name


def test_mmce_and_skce_are_two_averages_of_one_sum():
    logits, labels = batch(30)
    c, predicted = logits.softmax(1).max(1)
    diagonal = ((c - (predicted == labels).double()) ** 2).sum()
    total = S.mmce(logits, labels) ** 2 * 30**2
    assert ((total - diagonal) / (30 * 29)).item() == pytest.approx(S.skce(logits, labels).item())


def test_soft_bins_of_dece_are_those_of_soft_ece():
    # with ranks that are nearly hard (a large t_a) the two differ only in how the bins are written
    logits, labels = batch(40)
    keys = {"n_bins": 10, "norm": "l1"}
    a = S.dece(logits, labels, t_a=1e7, t_b=0.02, **keys)
    b = S.soft_ece(logits, labels, temperature=2 * 0.02 / 10, **keys)
    assert a.item() == pytest.approx(b.item(), abs=1e-9)


def test_surrogates_equal_the_measures_of_the_same_name():
    logits, labels = batch(300)
    p = Predictions.from_logits(logits, labels)
    pairs = [
        (S.mmce(logits, labels), measures.kce(p)),
        (S.skce(logits, labels), measures.skce(p)),
        (S.nll(logits, labels), measures.nll(p)),
        (S.brier(logits, labels), measures.brier(p)),
        (S.sece(logits, labels), measures.sece(p)),
        (S.sece(logits, labels, 0.05, self_term=False, norm="l2"), measures.sece(p, 0.05, self_term=False, norm="l2")),
        (S.confidence_gap(logits, labels), measures.ece(p, n_bins=1)),
    ]
    for surrogate, measure in pairs:
        assert surrogate.item() == pytest.approx(measure, abs=1e-6)


def test_weighted_mmce_balances_right_and_wrong():
    """Two confidences: MMCE_w² = wrong² + right² − 2 k wrong·right, whatever the numbers of either."""
    right, wrong = 0.9, 0.6
    rows = [[right, 1 - right]] * 9 + [[wrong, 1 - wrong]] * 2
    logits, labels = torch.tensor(rows, dtype=torch.float64).log(), torch.tensor([0] * 9 + [1] * 2)
    k = math.exp(-(right - wrong) / 0.4)
    square = wrong**2 + (1 - right) ** 2 - 2 * k * wrong * (1 - right)
    assert S.mmce(logits, labels, weighted=True).item() == pytest.approx(math.sqrt(square))
    for rows in (slice(0, 9), slice(9, 11)):  # a batch all right, all wrong
        expected = (1 - right) if rows.start == 0 else wrong
        assert S.mmce(logits[rows], labels[rows], weighted=True).item() == pytest.approx(expected)


def test_mdca_sees_classes_that_the_confidence_does_not():
    # the same confidences and correctness, but in the second case class 1 gets what belongs to class 2
    logits = torch.tensor([[0.6, 0.4, 0.0], [0.6, 0.0, 0.4]], dtype=torch.float64).add(1e-12).log()
    labels = torch.tensor([0, 0])
    assert S.mdca(logits, labels).item() == pytest.approx((0.4 + 0.2 + 0.2) / 3)
    assert S.mdca(logits, torch.tensor([0, 1])).item() == pytest.approx((0.1 + 0.3 + 0.2) / 3)


def test_effective_neighbours():
    identical = torch.zeros(7, 3) + torch.tensor([1.0, 0.0, 0.0])
    assert S.effective_neighbours(identical) == pytest.approx(7)
    far = torch.tensor([[0.55, 0.45], [0.99, 0.01], [0.75, 0.25]]).log()
    assert S.effective_neighbours(far) == pytest.approx(1)
    bank = (torch.full((3,), 0.75), torch.ones(3))
    assert S.effective_neighbours(far, bank=bank) == pytest.approx((1 + 1 + 4) / 3, rel=1e-4)


# --------------------------------------------------------------------------------------------- gradients


@cases
def test_gradient_equals_finite_differences(name, keys):
    logits, labels = batch(12, seed=3)
    f = S.SURROGATES[name]
    assert torch.autograd.gradcheck(lambda z: f(z, labels, **keys), (logits.requires_grad_(),), check_forward_ad=True)


@cases
def test_repeated_samples_have_equal_gradients(name, keys):
    """Equal confidences: the Laplacian kernel is differentiated at distance 0, where |u| has the subgradient 0."""
    logits, labels = batch(6, seed=1)
    logits, labels = logits.repeat(2, 1), labels.repeat(2)
    _, grad = value_and_grad(S.SURROGATES[name], logits, labels, **keys)
    torch.testing.assert_close(grad[:6], grad[6:])
    if name in ("mmce", "skce"):
        z = logits.clone().requires_grad_()
        c, predicted = z.softmax(1).max(1)
        a = (predicted == labels).double()
        n, right = len(a), a.sum()
        w = torch.where(a > 0, 1 / right, 1 / (n - right)) if keys.get("weighted") else 1 / n
        e = w * (c - a)
        kernel = (-(c[:, None] - c).abs() / keys.get("bandwidth", 0.4)).exp()
        square = e @ kernel @ e
        dense = square.sqrt() if name == "mmce" else (square - e @ e) * n / (n - 1)
        torch.testing.assert_close(grad, torch.autograd.grad(dense, z)[0], rtol=1e-9, atol=1e-12)


@names
def test_torch_func_transforms_agree_with_autograd(name):
    f = S.SURROGATES[name]
    logits, labels = batch(9)
    several, other = torch.stack([logits, logits / 2]), torch.stack([labels, labels.flip(0)])
    _, grad = value_and_grad(f, logits, labels)
    torch.testing.assert_close(torch.func.grad(f)(logits, labels), grad)
    tangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, push = torch.func.jvp(lambda z: f(z, labels), (logits,), (tangent,))
    torch.testing.assert_close(value, f(logits, labels))
    torch.testing.assert_close(push, (grad * tangent).sum())
    expected = torch.stack([f(z, y) for z, y in zip(several, other)])
    torch.testing.assert_close(torch.func.vmap(f)(several, other), expected)
    grads = torch.func.vmap(torch.func.grad(f), in_dims=(0, None))(several, labels)
    torch.testing.assert_close(grads[1], value_and_grad(f, logits / 2, labels)[1])


@pytest.mark.parametrize("name", PAIRS)
def test_a_second_derivative_of_a_pair_sum_is_refused(name):
    logits, labels = batch(9)
    z = logits.requires_grad_()
    (grad,) = torch.autograd.grad(S.SURROGATES[name](z, labels), z, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(grad.square().sum(), z)
    with pytest.raises(RuntimeError):
        torch.func.hessian(lambda z: S.SURROGATES[name](z, labels))(logits.detach())


@pytest.mark.parametrize("name", [n for n in S.SURROGATES if n not in PAIRS])
def test_the_others_have_second_derivatives(name):
    logits, labels = batch(5, k=3)
    f = S.SURROGATES[name]
    assert torch.autograd.gradgradcheck(lambda z: f(z, labels), (logits.requires_grad_(),))


def test_the_bank_is_constant():
    logits, labels = batch(5)
    c = torch.full((4,), 0.6, dtype=torch.float64, requires_grad=True)
    value = S.sece(logits.requires_grad_(), labels, bank=(c, torch.ones(4)))
    assert torch.autograd.grad(value, c, allow_unused=True)[0] is None


# -------------------------------------------------------------------------------------------- invariances


@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 5.0, 40.0]))
def test_order_of_samples_and_names_of_classes_do_not_matter(n, k, seed, scale):
    logits, labels = batch(n, k, seed, scale)
    g = torch.Generator().manual_seed(seed)
    rows, classes = torch.randperm(n, generator=g), torch.randperm(k, generator=g)
    renamed = torch.empty_like(classes)
    renamed[classes] = torch.arange(k)
    for name, f in S.SURROGATES.items():
        value, grad = value_and_grad(f, logits, labels)
        v1, g1 = value_and_grad(f, logits[rows], labels[rows])
        v2, g2 = value_and_grad(f, logits[:, classes], renamed[labels])
        assert torch.isfinite(value) and torch.isfinite(grad).all(), name
        assert value >= 0 or name == "skce"
        assert name == "nll" or value <= (2 if name == "brier" else 1) + 1e-12, name
        # MMCE near 0 is the root of a rounding error, which depends on the order.
        torch.testing.assert_close(v1, value, rtol=1e-8, atol=1e-7)
        torch.testing.assert_close(v2, value, rtol=1e-8, atol=1e-7)
        if value > 1e-6:
            torch.testing.assert_close(g1, grad[rows], rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(g2, grad[:, classes], rtol=1e-6, atol=1e-8)


@names
def test_shifting_all_logits_of_a_sample_changes_nothing(name):
    logits, labels = batch(20)
    shift = 50 * torch.arange(20, dtype=torch.float64)[:, None]
    f = S.SURROGATES[name]
    torch.testing.assert_close(f(logits + shift, labels), f(logits, labels), rtol=1e-9, atol=1e-12)


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_agrees_within_its_own(name, dtype):
    logits, labels = batch(64, scale=3, dtype=dtype)
    f = S.SURROGATES[name]
    value, grad = value_and_grad(f, logits, labels)
    exact, exact_grad = value_and_grad(f, logits.double(), labels)
    assert value.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-6)
    scale, atol = exact_grad.abs().max(), 3e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(grad.double() / scale, exact_grad / scale, rtol=0, atol=atol)


def test_autocast_does_not_lower_the_precision():
    logits, labels = batch(64, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = S.sece(logits, labels)
    torch.testing.assert_close(inside, S.sece(logits, labels))


# ---------------------------------------------------------------------------------------- added penalties


@pytest.mark.parametrize("name", S.BATCH_PENALTIES)
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_penalties_are_finite_for_every_batch(name, n, kind):
    logits, _ = batch(n, k=3, scale=8, dtype=torch.float32)
    best, worst = logits.argmax(1), logits.argmin(1)
    labels = (
        best if kind == "right" else worst if kind == "wrong" else torch.where(torch.arange(n) % 2 == 0, best, worst)
    )
    value, grad = value_and_grad(S.BATCH_PENALTIES[name], logits, labels)
    assert value.shape == () and torch.isfinite(value) and torch.isfinite(grad).all()


@pytest.mark.parametrize("name", S.BATCH_PENALTIES)
def test_a_penalty_lowers_what_it_names(name):
    """A few steps down its gradient, from logits that are far too large."""
    logits, labels = batch(60, scale=6)
    penalty = S.BATCH_PENALTIES[name]
    z = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        penalty(z, labels).backward()
        optimizer.step()
    assert penalty(z, labels) < 0.95 * penalty(logits, labels)


def test_the_weighted_mmce_penalty_is_the_surrogate_with_its_key():
    logits, labels = batch(20)
    expected = S.build_outer({"mmce": {"weight": 1.0, "weighted": True}})(logits, labels)
    assert S.BATCH_PENALTIES["mmce_weighted"](logits, labels) == expected != S.mmce(logits, labels)


# ------------------------------------------------------------------------------------- degenerate batches


@cases
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradient_are_finite(name, keys, n, kind, dtype):
    for gap in (0.0, 1e-3, 1.0, 20.0, 1e4):
        logits = torch.zeros(n, 3, dtype=dtype)
        logits[:, 1] = gap
        labels = torch.full((n,), int(logits[0].argmax()) if kind != "wrong" else 2)
        if kind == "mixed":
            labels[0] = 2
        value, grad = value_and_grad(S.SURROGATES[name], logits, labels, **keys)
        assert torch.isfinite(value) and torch.isfinite(grad).all(), gap


def test_a_batch_of_one_without_self_term_is_worth_nothing():
    logits, labels = batch(1)
    value, grad = value_and_grad(S.sece, logits, labels, self_term=False)
    assert value == 0 and (grad == 0).all()


@pytest.mark.parametrize(("name", "keys"), [("sece", {}), ("sece", {"self_term": False}), ("mmce", {}), ("skce", {})])
def test_nan_logits_give_nan_and_no_indexing_error(name, keys):
    logits, labels = batch(9)
    logits[3, 1] = math.nan
    assert S.SURROGATES[name](logits, labels, **keys).isnan()


@names
def test_bad_input_is_named(name):
    f = S.SURROGATES[name]
    logits, labels = batch(4)
    for bad, message in [
        ((logits[0], labels), "logits must be"),
        ((logits.long(), labels), "logits must be"),
        ((logits[:0], labels[:0]), "N >= 1"),
        ((logits[:, :1], labels), "K >= 2"),
        ((logits, labels[:3]), "labels must be"),
        ((logits, labels.double()), "labels must be"),
        ((logits, labels + 4), r"labels must lie in 0\.\.3"),
        ((logits, labels - 4), r"labels must lie in 0\.\.3"),
    ]:
        with pytest.raises(InputError, match=message):
            f(*bad)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("sece", {"bandwidth": -0.1}, "bandwidth must be > 0, got -0.1"),
        ("sece", {"bandwidth": math.nan}, "bandwidth must be > 0"),
        ("sece", {"norm": "l3"}, "norm must be"),
        ("mmce", {"bandwidth": 0.0}, "bandwidth must be >= 0.002, got 0.0"),
        ("skce", {"bandwidth": 1e-9}, "bandwidth must be >= 0.002"),
        ("dece", {"n_bins": 0}, "n_bins must be >= 1, got 0"),
        ("dece", {"t_b": 0.0}, "t_b must be > 0"),
        ("soft_ece", {"temperature": -1.0}, "temperature must be > 0"),
    ],
)
def test_bad_keys_are_named(name, keys, message):
    with pytest.raises(InputError, match=message):
        S.SURROGATES[name](*batch(4), **keys)
    with pytest.raises(InputError, match=message):
        S.build_outer(name, **keys)


# ------------------------------------------------------------------------------- bank and outer objective


def test_memory_bank_keeps_the_last_batches_and_its_state_returns():
    bank = S.MemoryBank(2)
    assert bank.reference() is None
    batches = [batch(n, seed=n) for n in (3, 4, 5)]
    for logits, labels in batches:
        bank.add(logits.requires_grad_(), labels)
    confidence, correct = bank.reference()
    assert len(bank) == 2 and confidence.shape == correct.shape == (9,) and not confidence.requires_grad
    torch.testing.assert_close(confidence[:4], batches[1][0].softmax(1).amax(1).detach())
    copy = S.MemoryBank(2)
    copy.load_state_dict(bank.state_dict())
    torch.testing.assert_close(copy.reference()[0], confidence)
    with pytest.raises(InputError, match="size must be that of the saved bank, 2, got 3"):
        S.MemoryBank(3).load_state_dict(bank.state_dict())


def test_state_loads_with_weights_only(tmp_path):
    outer = S.build_outer("sece", reference_points="bank", bank_size=3)
    outer.update(*batch(6))
    torch.save(outer.state_dict(), tmp_path / "state.pt")
    again = S.build_outer("sece", reference_points="bank", bank_size=3)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again(*batch(5)) == outer(*batch(5)) != S.sece(*batch(5))


def test_outer_is_the_weighted_sum():
    logits, labels = batch(20)
    outer = S.build_outer({"sece": 2.0, "nll": 0.5, "mmce": 0.0}, bandwidth=0.05)
    expected = 2 * S.sece(logits, labels, bandwidth=0.05) + 0.5 * S.nll(logits, labels)
    torch.testing.assert_close(outer(logits, labels), expected)
    assert set(outer.terms(logits, labels)) == {"sece", "nll"}


def test_outer_takes_a_name_a_callable_and_keys_for_one_term():
    logits, labels = batch(20)
    assert S.build_outer("dece")(logits, labels) == S.dece(logits, labels)
    assert S.build_outer(S.brier)(logits, labels) == S.brier(logits, labels)
    outer = S.build_outer({"sece": {"weight": 3.0, "bandwidth": 0.1}, "mmce": 1})
    expected = 3 * S.sece(logits, labels, bandwidth=0.1) + S.mmce(logits, labels)
    torch.testing.assert_close(outer(logits, labels), expected)


def test_a_call_of_outer_does_not_feed_its_bank():
    logits, labels = batch(20)
    outer = S.build_outer("sece", reference_points="bank", bank_size=2)
    first = outer(logits, labels)
    assert outer(logits, labels) == first == S.sece(logits, labels)
    outer.update(*batch(30, seed=9))
    assert outer(logits, labels) == S.sece(logits, labels, bank=outer.bank.reference()) != first


@pytest.mark.parametrize(
    ("spec", "keys", "message"),
    [
        ("sec", {}, "did you mean 'sece'"),
        ({"sece": 1, "soft_ec": 1}, {}, "did you mean 'soft_ece'"),
        ({"sece": -1.0}, {}, "weight of sece must be a number >= 0, got -1.0"),
        ({"sece": "1"}, {}, "weight of sece"),
        ({"sece": 0.0}, {}, "weight > 0"),
        ({}, {}, "outer must be"),
        (3, {}, "outer must be"),
        ("sece", {"bandwith": 0.1}, "did you mean 'bandwidth'"),
        ("nll", {"bandwidth": 0.1}, "got 'bandwidth'"),
        ({"nll": {"weight": 1.0, "bandwidth": 0.1}}, {}, "nll takes no keys"),
        ("sece", {"bandwidth": "wide"}, "sece cannot work with"),
        ("sece", {"reference_points": "banks"}, "reference_points must be"),
        ("nll", {"reference_points": "bank"}, "is for sece"),
        ("sece", {"reference_points": "bank", "bank_size": 0}, "size must be >= 1"),
        (S.sece, {"bandwidth": 0.1}, "takes no keys"),
    ],
)
def test_a_bad_outer_objective_is_named(spec, keys, message):
    with pytest.raises(InputError, match=message):
        S.build_outer(spec, **keys)


# ------------------------------------------------------------------------------------------------- bias


def test_skce_is_unbiased_on_calibrated_data_and_sece_is_not():
    path = Path(__file__).resolve().parents[2] / "scripts" / "surrogate_bias.py"
    spec = importlib.util.spec_from_file_location("surrogate_bias", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    batches = script.calibrated_batches(64, 400, 1)
    values = torch.tensor([[S.skce(z, y), S.sece(z, y), S.sece(z, y, self_term=False)] for z, y in batches])
    mean, stderr = values.mean(0), values.std(0) / 20
    assert mean[0].abs() < 4 * stderr[0]
    assert (mean[1:] > 20 * stderr[1:]).all()
