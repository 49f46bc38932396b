"""What a user's program calls, under `mypy --strict`: every public function, and the type that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import metacal
from metacal import CalibratedModel, Fit, GammaNet, MetaStep, Predictions, Report, curvature, losses, margins, penalties
from metacal import calibration as c
from metacal.calibration import Comparison, FitReport, Interval, TemperatureScaling, surrogates
from metacal.curvature import Eigen, Estimate
from metacal.sklearn import CalibratedClassifier

x, y = torch.randn(100, 4), torch.randint(3, (100,))
net = nn.Linear(4, 3)


def predictions_and_measures() -> None:
    p = Predictions.from_logits(x @ net.weight.T, y)
    q = Predictions.from_probabilities(np.full((100, 3), 1 / 3), y.numpy())
    assert_type(p.probs, Tensor)
    assert_type(p.labels, Tensor)
    assert_type(len(p), int)
    p.save("p.npz")
    assert_type(Predictions.load("p.npz"), Predictions)
    values: Sequence[float] = [
        c.ece(p, n_bins=15, norm="l1"), c.mce(p), c.adaptive_ece(p), c.classwise_ece(p), c.debiased_ece(p), c.kce(p),
        c.skce(p), c.smooth_ece(p), c.nll(p), c.brier(p), c.accuracy(p), c.auroc(p), c.aurc(p), c.overconfidence(p),
        c.underconfidence(p), c.sece(p), c.error(p), c.confidence(p),
    ]  # fmt: skip
    print(sum(values))
    assert_type(c.bootstrap("ece", p, n=100), Interval)
    assert_type(c.bootstrap(c.ece, p, n_bins=10), Interval)
    assert_type(c.compare(p, q, "nll"), Comparison)
    scaling = TemperatureScaling().fit(p)
    assert_type(scaling, TemperatureScaling)
    assert_type(scaling.apply(q), Predictions)
    assert_type(scaling.temperature, float)
    assert_type(scaling.report, FitReport | None)
    running = c.CalibrationAccumulator(3, measures=["ece", "nll"])
    print(running)
    print(c.scale_by(p, 1.5), c.reliability_bins(p))


def losses_and_surrogates() -> None:
    z = net(x)
    for loss in (losses.focal(z, y, 2.0), losses.cross_entropy(z, y), losses.label_smoothing(z, y), losses.brier(z, y)):
        assert_type(loss, Tensor)
    for value in (surrogates.sece(z, y), surrogates.dece(z, y), surrogates.soft_ece(z, y), surrogates.mmce(z, y)):
        assert_type(value, Tensor)
    assert_type(margins.true_margin(z, y), Tensor)
    assert_type(margins.predicted_margin(z), Tensor)
    assert_type(margins.margin_moment(z, y), float)
    print(margins.robust_margin(net, x, y, eps=0.1), margins.ece_certificate(Predictions.from_logits(z, y)))
    assert_type(penalties.margin_tail(z, y), Tensor)
    assert_type(penalties.robust_kl(net, x, y), Tensor)
    assert_type(penalties.margin_smoothness(net, x, y), Tensor)
    assert_type(penalties.hessian_trace(net, x, y), Tensor)
    assert_type(penalties.gn_trace(net, x, y), Tensor)


def curvature_of_a_network() -> None:
    assert_type(curvature.gn_sharpness(net, x, y), Eigen)
    assert_type(curvature.hessian_sharpness(net, x, y), Eigen)
    assert_type(curvature.gn_trace(net, x, y), Estimate)
    assert_type(curvature.hessian_trace(net, x, y, probes=2), Estimate)
    assert_type(curvature.batch_sharpness(net, [(x, y)]), Estimate)
    v = [torch.randn_like(p) for p in net.parameters()]
    assert_type(curvature.ggn_product(net, x, y, v), list[Tensor])
    assert_type(curvature.hessian_product(net, x, y, v), list[Tensor])


def steps() -> None:
    backbone = metacal.Backbone(net)
    gamma = GammaNet(backbone.in_features)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
    step = MetaStep(backbone, optimizer, gamma, torch.optim.Adam(gamma.parameters()), outer=surrogates.sece)
    numbers: Mapping[str, float] = step.step(x, y, x, y)
    assert_type(numbers["loss"], float)
    assert_type(step.hypergradient(x, y, x, y), list[Tensor])


def training() -> None:
    result = metacal.fit(net, (x, y), method="focal", optimizer="adamw", lr=1e-3, callbacks=[print])
    assert_type(result, Fit)
    assert_type(result.evaluate((x, y), resamples=0), Report)
    assert_type(result.predict_proba(x), Tensor)
    assert_type(result.predict(x), Tensor)
    result.save("model.pt")
    result.export("model.onnx", format="onnx")
    model = metacal.load("model.pt", model=nn.Linear(4, 3), device="cpu")
    assert_type(model, CalibratedModel)
    assert_type(model.predict_proba(x.numpy()), Tensor)
    assert_type(model.class_names, list[str])
    model.export("model.pt2")
    report = metacal.evaluate(model, (x, y), measures=["ece", "nll"])
    assert_type(report, Report)
    assert_type(report.to_dict(), dict[str, float])
    assert_type(report.temperature, float | None)
    metacal.fit(net, (x, y), method="focl")  # type: ignore[arg-type]
    metacal.fit(net, (x, y), optimizer="adamv")  # type: ignore[arg-type]
    c.bootstrap("ecee", Predictions.from_logits(net(x), y))  # type: ignore[arg-type]
    classifier = CalibratedClassifier(net, method="brier", epochs=3).fit(x.numpy(), y.numpy())
    assert_type(classifier, CalibratedClassifier)
    print(classifier.predict(x.numpy()), classifier.predict_proba(x.numpy()))
