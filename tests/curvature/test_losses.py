"""Curvature of focal losses and of label smoothing: S by autograd, products, spectra and traces by dense matrices."""

from __future__ import annotations

import pytest
import torch
from autodiff.nets import build
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import curvature as dense
from torch import Tensor

from metacal import losses
from metacal.curvature import (
    Curvature,
    Focal,
    LabelSmoothing,
    batch_sharpness,
    gn_sharpness,
    gn_trace,
    hessian_sharpness,
    hessian_trace,
)
from metacal.curvature.loss import (
    FactorColumns,
    LogitLoss,
    logit_factor,
    logit_gradient,
    logit_hessian,
    loss_of_rows,
    mean_loss,
)
from metacal.errors import InputError

PER_EXAMPLE = torch.tensor([0.0, 0.3, 1.0, 2.5, 6.0], dtype=torch.float64)
LOSSES: dict[str, LogitLoss] = {
    "focal": Focal(2.0),
    "focal by example": Focal(PER_EXAMPLE),
    "smoothing": LabelSmoothing(0.2),
    "smoothing by example": LabelSmoothing(PER_EXAMPLE / 10),
}


def per_sample(z: Tensor, y: Tensor, loss: LogitLoss) -> Tensor:
    """By the package's losses, whose own values other tests hold against their formulas."""
    if isinstance(loss, Focal):
        return losses.focal(z, y, loss.gamma)
    assert isinstance(loss, LabelSmoothing)
    return losses.label_smoothing(z, y, loss.alpha)


def hessians(z: Tensor, y: Tensor, loss: LogitLoss) -> Tensor:
    """S (N, K, K) by autograd."""

    def of_row(i: int) -> Tensor:
        own = loss_of_rows(loss, slice(i, i + 1))
        return torch.autograd.functional.hessian(lambda row: per_sample(row[None], y[i : i + 1], own).sum(), z[i])

    return torch.stack([of_row(i) for i in range(len(z))])


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(scale=st.sampled_from([0.1, 1.0, 5.0, 40.0]), seed=st.integers(0, 99))
def test_gradient_and_hessian_in_the_logits_are_autograds(name: str, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(5, 4, dtype=torch.float64, generator=generator)
    y, loss = torch.randint(4, (5,), generator=generator), LOSSES[name]
    at = z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(per_sample(at, y, loss).sum(), at)
    torch.testing.assert_close(logit_gradient(z, y, loss), slope, rtol=1e-9, atol=1e-12)
    s = hessians(z, y, loss)
    for w in torch.eye(4, dtype=torch.float64):
        torch.testing.assert_close(logit_hessian(z, y, w.expand(5, 4), loss), s @ w, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(mean_loss(z, y, loss), per_sample(z, y, loss).mean())


def test_the_hessian_of_a_focal_loss_is_indefinite_and_has_no_root() -> None:
    z, y = torch.tensor([[0.0, 6.0, 1.0]], dtype=torch.float64), torch.tensor([0])  # an improbable label
    assert torch.linalg.eigvalsh(hessians(z, y, Focal(2.0)))[0, 0] < -0.01
    for call in (lambda: logit_factor(z, z, Focal(2.0)), lambda: FactorColumns(z, Focal(2.0))):
        with pytest.raises(InputError, match="which for a focal loss may be indefinite"):
            call()
    smooth = torch.cat(list(FactorColumns(z, LabelSmoothing(0.3))))
    torch.testing.assert_close(smooth.T @ smooth, hessians(z, y, LabelSmoothing(0.3))[0])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("net", ["mlp tanh", "cnn groupnorm"])
def test_products_spectra_and_traces_against_dense_matrices(net: str, name: str) -> None:
    model, x, y = build(net, n=5)
    loss = LOSSES[name]
    params = dense.trainable(model)
    j = dense.jacobian(model, x)
    g = torch.einsum("nkp,nkl,nlq->pq", j, hessians(model(x).detach(), y, loss), j) / len(x)
    slopes = torch.autograd.grad(per_sample(model(x), y, loss).mean(), params, create_graph=True)
    flat = dense.flat(slopes)
    h = torch.stack([dense.flat(torch.autograd.grad(e, params, retain_graph=True)) for e in flat])
    v = torch.randn(len(flat), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with Curvature(model, x, y, loss=loss, chunk_size=2) as c:
        like = dense.unflat(v, params)
        torch.testing.assert_close(dense.flat(c.gn(like)), g @ v, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(dense.flat(c.hessian(like)), h @ v, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(dense.flat(c.gradient()), flat.detach())
        assert c.quadratic(like) == pytest.approx(float(v @ h @ v), rel=1e-8)
    top = torch.linalg.eigvalsh(g)[-1].item()
    assert gn_sharpness(model, x, y, tol=1e-4, loss=loss).value == pytest.approx(top, rel=1e-3)
    ends = torch.linalg.eigvalsh(h)[[0, -1]]
    largest = ends[ends.abs().argmax()].item()
    assert hessian_sharpness(model, x, y, tol=1e-4, loss=loss).value == pytest.approx(largest, rel=1e-3)
    gradient = flat.detach()
    along = float(gradient @ h @ gradient / gradient.square().sum())
    assert batch_sharpness(model, [(x, y, loss)]).value == pytest.approx(along, rel=1e-8)
    for trace, matrix in ((gn_trace, g), (hessian_trace, h)):
        estimate = trace(model, x, y, probes=40, loss=loss)
        assert abs(estimate.value - float(matrix.trace())) < 4 * estimate.stderr + 1e-9
        if isinstance(loss, LabelSmoothing) and trace is gn_trace:
            assert trace(model, x, y, exact=True, loss=loss).value == pytest.approx(float(matrix.trace()), rel=1e-9)


def test_bad_losses_are_named() -> None:
    model, x, y = build("mlp tanh", n=5)
    for loss, message in (
        (Focal(-1.0), "gamma must be >= 0, got values from -1 to -1"),
        (Focal(torch.ones(3)), r"gamma must be a number or one for each of 5 examples, got shape \(3,\)"),
        (LabelSmoothing(1.5), r"alpha must be in \[0, 1\], got values from 1.5"),
        ("focal", r"loss must be one of cross_entropy, mse, got 'focal'; with numbers it is metacal.curvature.Focal"),
    ):
        with pytest.raises(InputError, match=message):
            gn_sharpness(model, x, y, loss=loss)
    with pytest.raises(InputError, match="exact=True needs a root"):
        gn_trace(model, x, y, exact=True, loss=Focal(1.0))
