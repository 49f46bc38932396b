"""Last-layer Laplace against the Hessian and the closed form of logistic regression; Monte-Carlo dropout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from metacal.errors import InputError
from metacal.models import Backbone
from metacal.posterior import LastLayerLaplace, dropout_predictions, outputs_of


def data(n: int = 40, d: int = 3, k: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    weights = torch.randn(k, d + 1, generator=g, dtype=torch.float64)
    return x, weights, torch.randint(k, (n,), generator=g)


def with_one(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def test_the_covariance_is_the_inverse_hessian_of_a_logistic_regression() -> None:
    x, weights, y = data()
    new = data(5, seed=1)[0]
    tau = 0.3

    def objective(w: torch.Tensor) -> torch.Tensor:
        nll = nn.functional.cross_entropy(with_one(x) @ w.view(3, 4).t(), y, reduction="sum")
        return nll + tau / 2 * w.square().sum()

    sigma = torch.linalg.inv(torch.autograd.functional.hessian(objective, weights.flatten())).view(3, 4, 3, 4)
    expected = torch.einsum("nd,kdle,ne->nkl", with_one(new), sigma, with_one(new))
    laplace = LastLayerLaplace(tau).fit(x, with_one(x) @ weights.t())
    torch.testing.assert_close(laplace.covariance(new), expected, rtol=1e-9, atol=1e-12)
    z = with_one(new) @ weights.t()
    variances = expected.diagonal(dim1=1, dim2=2)
    probit = torch.softmax(z / (1 + math.pi / 8 * variances).sqrt(), 1)
    torch.testing.assert_close(laplace.probabilities(new, z), probit, rtol=1e-9, atol=1e-12)
    # Draws of the logits themselves, from their covariance.
    g = torch.Generator().manual_seed(5)
    draws = torch.linalg.cholesky(expected) @ torch.randn(5, 3, 40_000, generator=g, dtype=torch.float64)
    sampled = torch.softmax(z[:, :, None] + draws, 1).mean(2)
    torch.testing.assert_close(laplace.probabilities(new, z, samples=40_000), sampled, rtol=0, atol=0.01)


def test_two_classes_are_the_bayesian_logistic_regression() -> None:
    """Var(z_1 − z_0) = φᵀ (Σ p (1 − p) φ φᵀ + τ/2)⁻¹ φ: a difference of weights has half their prior's precision."""
    x, weights, _ = data(k=2)
    new = with_one(data(6, seed=1)[0])
    z = with_one(x) @ weights.t()
    p = torch.softmax(z, 1)
    hessian = (with_one(x) * (p[:, :1] * p[:, 1:])).t() @ with_one(x) + 0.35 * torch.eye(4, dtype=torch.float64)
    expected = (new @ torch.linalg.inv(hessian) * new).sum(1)
    s = LastLayerLaplace(0.7).fit(x, z).covariance(new[:, :-1])
    torch.testing.assert_close(s[:, 0, 0] + s[:, 1, 1] - 2 * s[:, 0, 1], expected, rtol=1e-9, atol=1e-12)


def test_the_precision_has_the_least_nll_of_those_tried() -> None:
    x, weights, y = data(60)
    z = 5 * with_one(x) @ weights.t()
    laplace = LastLayerLaplace().fit(x, z).choose(x, z, y)

    def nll(precision: float) -> float:
        return -float(laplace.probabilities(x, z, precision=precision).gather(1, y[:, None]).log().mean())

    assert all(nll(laplace.precision) <= nll(10.0**e) for e in (-3, -1, 0, 1, 3, 5))
    with pytest.raises(InputError, match=r"at most 4,096 weights, K \(D \+ 1\), got 3 · 2001"):
        LastLayerLaplace().fit(torch.zeros(2, 2000), torch.zeros(2, 3))
    with pytest.raises(InputError, match="fitted first"):
        LastLayerLaplace().covariance(x)
    with pytest.raises(InputError, match="features must have 3 columns, got 2"):
        laplace.probabilities(x[:, :2], z)


def test_all_is_worked_out_where_the_features_are() -> None:
    features, logits = torch.randn(6, 3, device="meta"), torch.randn(6, 2, device="meta")
    laplace = LastLayerLaplace().fit(features, logits)
    for p in (laplace.probabilities(features, logits, samples=4), laplace.probabilities(features, logits)):
        assert p.shape == (6, 2) and p.device.type == "meta"
    assert laplace.covariance(features).device.type == "meta"


def test_dropout_is_averaged_and_all_else_left_alone() -> None:
    """Dropout of one input with probability 1/2 has two outcomes, whose mean is known."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 2), nn.BatchNorm1d(2)).double()
    x, y = torch.ones(4, 1, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    before = {key: value.clone() for key, value in net.state_dict().items()}
    state = torch.random.get_rng_state()
    p = dropout_predictions(net, [(x, y)], samples=5000)
    assert torch.equal(torch.random.get_rng_state(), state) and net.training and net[0].training
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    net.eval()
    with torch.no_grad():
        expected = (torch.softmax(net(2 * x), 1) + torch.softmax(net(0 * x), 1)) / 2
    torch.testing.assert_close(p.probs, expected, rtol=0, atol=0.02)
    assert torch.equal(p.labels, y)
    with pytest.raises(InputError, match="has no Dropout with p > 0"):
        dropout_predictions(nn.Sequential(nn.Linear(1, 2)), [(x, y)])


def test_outputs_are_those_of_the_backbone() -> None:
    def backbone(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ torch.ones(2, 3), x

    x, y = torch.randn(5, 2), torch.arange(5) % 3
    out = outputs_of(backbone, [(x[:2], y[:2]), (x[2:], y[2:])])
    assert torch.equal(out.features, x.double()) and torch.equal(out.labels, y) and out.logits.dtype == torch.float64


def test_the_posterior_is_that_of_laplace_torch() -> None:
    """Whole last-layer Gauss-Newton matrix, the same prior: covariances and probit probabilities."""
    laplace = pytest.importorskip("laplace")
    from laplace.curvature import AsdlGGN
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x, y = torch.randn(120, 4, dtype=torch.float64), torch.arange(120) % 3
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    theirs = laplace.Laplace(
        net, "classification", "last_layer", "full", prior_precision=torch.tensor(2.5).double(), backend=AsdlGGN
    )
    theirs.fit(DataLoader(TensorDataset(x[:90], y[:90]), batch_size=40))
    train, new = (outputs_of(Backbone(net), [(x[rows], y[rows])]) for rows in (slice(90), slice(90, None)))
    ours = LastLayerLaplace(2.5).fit(train.features, train.logits)
    _, covariance = theirs._glm_predictive_distribution(x[90:])
    torch.testing.assert_close(ours.covariance(new.features), covariance, rtol=1e-9, atol=1e-12)
    probabilities = theirs(x[90:], pred_type="glm", link_approx="probit")
    torch.testing.assert_close(ours.probabilities(new.features, new.logits), probabilities, rtol=1e-9, atol=1e-12)
