"""Class weights: the mean of the loss is PyTorch's weighted one, in the step and through the hypergradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bilevel_problems import K, make_problem
from reference.hyper import central_differences
from torch import Tensor
from torch.optim import SGD

import metacal
from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import dece
from metacal.errors import InputError
from metacal.gamma import LearnedSmoothing
from metacal.mixing import mixup
from metacal.objective import class_weights

WEIGHTS = [0.2, 1.5, 4.0]


def halves(x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor, float]:
    return mixup(x, y, 0.8, torch.Generator().manual_seed(step))


@pytest.mark.parametrize("keys", [{}, {"chunk": 4}, {"mix": halves}])
def test_the_loss_is_pytorchs_weighted_mean(keys: dict[str, Any]) -> None:
    problem, weight = make_problem("mlp"), torch.tensor(WEIGHTS, dtype=torch.float64)
    twin = copy.deepcopy(problem.backbone)
    meta = MetaStep(
        problem.backbone,
        SGD(problem.backbone.parameters(), lr=0.2),
        loss="cross_entropy",
        class_weight=WEIGHTS,
        penalties={"norm": (lambda model, x, y, z, h: z.square().mean(), 0.3)},
        **keys,
    )
    found = meta.step(problem.x, problem.y)
    x, y = problem.x, problem.y
    if "mix" in keys:
        x, y, other, share = halves(x, y, 0)
        z = twin(x)[0]
        both = [share * F.cross_entropy(z, y, weight, reduction="sum")]
        both.append((1 - share) * F.cross_entropy(z, other, weight, reduction="sum"))
        loss = sum(both) / (share * weight[y] + (1 - share) * weight[other]).sum()
    else:
        z = twin(x)[0]
        loss = F.cross_entropy(z, y, weight)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
    grads = torch.autograd.grad(loss + 0.3 * z.square().mean(), list(twin.parameters()))
    for p, q, g in zip(problem.backbone.parameters(), twin.parameters(), grads, strict=True):
        torch.testing.assert_close(p, q - 0.2 * g, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("engine", "keys"),
    [("forward", {}), ("forward", {"chunk": 4}), ("reverse", {}), ("higher", {}), ("forward", {"horizon": 2})],
)
def test_hypergradient_by_central_differences(engine: str, keys: dict[str, Any]) -> None:
    problem = make_problem("mlp")
    source = LearnedSmoothing(True, K, init=0.5).double()  # a number for each class, here as the gamma
    optimizer = SGD(problem.backbone.parameters(), lr=0.2, momentum=0.9)
    steps = keys.get("horizon", 1)
    meta = MetaStep(problem.backbone, optimizer, source, None, dece, engine, class_weight=WEIGHTS, every=steps, **keys)
    meta.step(problem.x, problem.y)
    batches = [(problem.x, problem.y), (problem.x.flip(0), problem.y.flip(0))][:steps]

    def value() -> float:
        backbone, inner = copy.deepcopy((problem.backbone, optimizer))
        for x, y in batches:
            p_y = backbone(x)[0].softmax(1)[torch.arange(len(y)), y]
            w = torch.tensor(WEIGHTS, dtype=torch.float64)[y]
            inner.zero_grad()
            (-(w * (1 - p_y) ** source(labels=y).detach() * p_y.log()).sum() / w.sum()).backward()
            inner.step()
        with torch.no_grad():
            return float(dece(backbone(problem.x_meta)[0], problem.y_meta))

    truth = central_differences(value, list(source.parameters()))
    inputs = batches[0] if steps == 1 else tuple(zip(*batches, strict=True))
    found = meta.hypergradient(*inputs, problem.x_meta, problem.y_meta)
    assert truth.norm() > 1e-6
    assert (torch.cat([f.flatten() for f in found]) - truth).norm() < 1e-6 * truth.norm()


def test_balanced_listed_and_named_weights() -> None:
    labels = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2])
    assert class_weights(None, 4) is None and class_weights("none", 4) is None
    balanced = class_weights("balanced", 4, labels)
    assert balanced is not None and balanced.tolist() == [8 / (2 * 3), 1.0, 8 / (2 * 5), 1.0]
    named = class_weights({"cat": 3, 1: 2.0}, 4, names=["ant", "bee", "cat", "dog"])
    assert named is not None and named.tolist() == [1.0, 2.0, 3.0, 1.0]
    for spec, message in (
        ("balance", "class_weight must be none, balanced, or a list of numbers > 0"),
        ([1.0, 0.0, 1.0], "numbers > 0, one for each class, got"),
        ([1.0, 1.0], "class_weight must have one number for each of 3 classes, got 2"),
        ({5: 1.0}, "class_weight must name classes, one of 0, 1, 2, got 5"),
        ("balanced", "counts the training labels, which are not known here"),
    ):
        with pytest.raises(InputError, match=message):
            class_weights(spec, 3)
    problem = make_problem("mlp")
    meta = MetaStep(
        problem.backbone, SGD(problem.backbone.parameters(), lr=0.1), loss="brier", class_weight=[1.0] * (K + 1)
    )
    with pytest.raises(InputError, match=f"one number for each of {K} logits, got {K + 1}"):
        meta.step(problem.x, problem.y)


def test_fit_takes_them_as_scikit_learn_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 5, generator=generator)
    y = (torch.arange(80) % 8 == 0).long()

    def trained(**keys: Any) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 2)
        fit = metacal.fit(model, (x, y), val=(x, y), epochs=1, progress=False, method="cross_entropy", **keys)
        assert fit.config.loss.class_weight != "none"
        return model.weight.detach()

    n_k = [70, 10]
    listed = trained(class_weight=[80 / (2 * n) for n in n_k])
    assert torch.equal(trained(class_weight="balanced"), listed)
    assert torch.equal(trained(class_weight={1: 80 / 20, 0: 80 / 140}), listed)
    for keys, message in (
        ({"overrides": ["loss.class_weight=balanced"]}, "loss.class_weight: it is an argument of metacal.fit"),
        ({"class_weight": {"cat": 2.0}}, "class_weight must name classes, one of 0, 1, got 'cat'"),
    ):
        with pytest.raises(InputError, match=message):
            trained(**keys)
