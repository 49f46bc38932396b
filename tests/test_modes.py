"""Modes of modules: whoever runs a network leaves frozen layers frozen, and every mode as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import metacal
from metacal.modes import evaluation_mode, training_mode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.body(x))))


class KeepsItsBodyFixed(Net):
    """The usual way to freeze BatchNorm: a `train` of the class's own."""

    def train(self, mode: bool = True) -> KeepsItsBodyFixed:
        super().train(mode)
        self.body.eval()
        return self


def modes(net: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in net.named_modules()}


def frozen(net: nn.Module) -> nn.Module:
    net.body.requires_grad_(False)  # type: ignore[union-attr]
    net.body.eval()  # type: ignore[union-attr]
    return net


@pytest.mark.parametrize(
    ("net", "evaluating"),
    [
        (Net(), set()),
        (Net().eval(), set()),  # as a loaded model, or one that was trained before: nothing was singled out
        (frozen(Net()), {"body", "body.0", "body.1", "body.2"}),
        (frozen(Net()).eval(), {"body", "body.0", "body.1", "body.2"}),
        (KeepsItsBodyFixed(), {"body", "body.0", "body.1", "body.2"}),
    ],
    ids=["training", "evaluation", "frozen", "frozen in evaluation", "its own train"],
)
def test_modes_in_training_and_after_it(net: nn.Module, evaluating: set[str]) -> None:
    before = modes(net)
    with pytest.raises(ZeroDivisionError), training_mode(net):
        during = modes(net)
        with evaluation_mode(net):
            assert not any(modes(net).values())
        assert modes(net) == during
        raise ZeroDivisionError
    assert {name for name, training in during.items() if not training} == evaluating
    assert modes(net) == before


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("gamma_net", []),
        ("gamma_net", ["optimizer=sam", "meta.engine=difference", "monitor=full", "monitor.every=2"]),
        ("gamma_net", ["gamma.input=layer", "gamma.layer=body.0", "optimizer=adamw"]),
        ("adafocal", []),
    ],
)
def test_training_leaves_frozen_layers_as_they_are(method: str, overrides: list[str]) -> None:
    """Whatever runs the network beside the step: monitors, penalties, SAM's second pass, a look at a layer's width."""
    torch.manual_seed(0)
    net = frozen(Net())
    running, dropped = [], []
    net.body[2].register_forward_hook(lambda module, _args, _output: dropped.append(module.training))  # type: ignore
    net.norm.register_forward_hook(lambda module, _args, _output: running.append(module.training))  # type: ignore
    before = {k: v.clone() for k, v in net.body.state_dict().items()}  # type: ignore[union-attr]
    x = torch.randn(120, 8)
    data = x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    result = metacal.fit(
        net, data, method=method, epochs=2, batch_size=50, progress=False, overrides=["monitor.subset=16", *overrides]
    )
    assert all(torch.equal(v, before[k]) for k, v in net.body.state_dict().items())  # type: ignore[union-attr]
    assert not any(dropped) and any(running) and not all(running)
    assert not any(modes(net).values()), "a trained model is in evaluation mode"

    net.norm.train()
    given = modes(net)
    result.predict_proba(x)
    result.evaluate(data, resamples=0)
    metacal.evaluate(net, data, resamples=0)
    assert modes(net) == given


def test_an_error_hands_back_the_modes() -> None:
    net = frozen(Net())
    given = modes(net)
    with pytest.raises(metacal.InputError, match="cannot take"):
        metacal.fit(net, (torch.randn(60, 5), torch.arange(60) % 3), progress=False)
    assert modes(net) == given


def test_a_frozen_batchnorm_couples_no_samples() -> None:
    """Gradient descent in parts is exact where every BatchNorm is frozen."""
    net = frozen(Net())
    net.norm.eval()  # type: ignore[union-attr]
    data = torch.randn(120, 8), torch.arange(120) % 3
    metacal.fit(net, data, method="focal", epochs=1, batch_size=50, progress=False, overrides=["optimizer=gd"])
