"""Against torchmetrics, netcal and relplot where these are right; docs/measures.md lists where they are not."""

from __future__ import annotations

import pytest
import torch

import metacal.calibration as calibration
from metacal.predictions import Predictions


def predictions(n=3000, k=10, seed=0, scale=1.5):
    """Moderately overconfident; next to no confidence at an edge of a bin or within 1e-3 of 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(0.6 * logits, 1), 1, generator=generator).squeeze(1)
    return Predictions.from_probabilities(torch.softmax(logits, 1), labels)


@pytest.mark.parametrize("n_bins", [5, 10, 15, 30])
@pytest.mark.parametrize(("norm", "name"), [("l1", "ece"), ("l2", "ece"), ("max", "mce")])
def test_torchmetrics_top_label(n_bins, norm, name):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    p = predictions()
    expected = functional.multiclass_calibration_error(p.probs, p.labels, 10, n_bins=n_bins, norm=norm)
    options = {} if norm == "max" else {"norm": norm}
    assert getattr(calibration, name)(p, n_bins=n_bins, **options) == pytest.approx(float(expected), abs=1e-6)


def test_torchmetrics_class_by_class():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    p = predictions()
    terms = [
        functional.binary_calibration_error(p.probs[:, k].contiguous(), (p.labels == k).long(), n_bins=15, norm="l1")
        for k in range(10)
    ]
    assert calibration.classwise_ece(p) == pytest.approx(float(sum(terms)) / 10, abs=1e-6)


def test_torchmetrics_accuracy_and_auroc():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    p = predictions()
    expected = functional.multiclass_accuracy(p.probs, p.labels, 10, average="micro")
    assert calibration.accuracy(p) == pytest.approx(float(expected), abs=1e-6)
    expected = functional.binary_auroc(p.confidence, p.correct.long())
    assert calibration.auroc(p) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(("name", "peer"), [("ece", "ECE"), ("mce", "MCE")])
def test_netcal(name, peer):
    metrics = pytest.importorskip("netcal.metrics")
    p = predictions()
    expected = getattr(metrics, peer)(15).measure(p.probs.numpy(), p.labels.numpy())
    assert getattr(calibration, name)(p) == pytest.approx(float(expected), abs=1e-12)


def test_netcal_equal_mass():
    """Without ties the two differ only in how a bin's share is rounded: equal at N a multiple of M."""
    metrics = pytest.importorskip("netcal.metrics")
    p = predictions()
    expected = metrics.ECE(15, equal_intervals=False).measure(p.probs.numpy(), p.labels.numpy())
    assert calibration.adaptive_ece(p) == pytest.approx(float(expected), abs=1e-3)


def test_netcal_kernel():
    metrics = pytest.importorskip("netcal.metrics")
    p = predictions(n=500)
    expected = metrics.MMCE().measure(p.probs.numpy(), p.labels.numpy())
    assert calibration.kce(p) == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("scale", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("n", [200, 3000, 20_000])
def test_relplot(n, scale):
    relplot = pytest.importorskip("relplot")
    p = predictions(n, seed=n, scale=scale)
    expected = relplot.smECE(p.confidence.numpy(), p.correct.double().numpy())
    assert calibration.smooth_ece(p) == pytest.approx(float(expected), abs=1e-4)


def test_sklearn_brier_and_nll():
    metrics = pytest.importorskip("sklearn.metrics")
    p = predictions()
    assert calibration.nll(p) == pytest.approx(metrics.log_loss(p.labels, p.probs), abs=1e-12)
    one_hot = torch.nn.functional.one_hot(p.labels, 10)
    expected = sum(metrics.brier_score_loss(one_hot[:, k], p.probs[:, k]) for k in range(10))
    assert calibration.brier(p) == pytest.approx(expected, abs=1e-12)
