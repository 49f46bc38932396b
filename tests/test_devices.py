"""In which precision a GPU would compute: its settings are there without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import metacal
from metacal.curvature import Curvature
from metacal.devices import full_float32
from metacal.gamma import ScalarGamma

matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn


def precisions() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = precisions()
    yield
    torch.set_float32_matmul_precision(before[0])
    cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("given", [("highest", True), ("high", False), ("medium", True)])
def test_nothing_is_rounded_within_and_settings_come_back(given: tuple[str, bool]) -> None:
    torch.set_float32_matmul_precision(given[0])
    cudnn.allow_tf32 = given[1]
    with full_float32(), full_float32():
        assert precisions() == ("highest", False)
    assert precisions() == given


@pytest.mark.skipif(not hasattr(cudnn, "conv"), reason="names of torch >= 2.9")
def test_the_newer_names_of_torch_too() -> None:
    def named() -> list[str]:
        return [part.fp32_precision for part in (matmul, cudnn.conv, cudnn.rnn)]

    before = named()
    try:
        matmul.fp32_precision = "tf32"  # after which torch refuses to tell by the older names
        with full_float32():
            assert named() == ["ieee"] * 3
        assert named() == ["tf32", *before[1:]]
    finally:
        for part, value in zip((matmul, cudnn.conv, cudnn.rnn), before):
            part.fp32_precision = "ieee" if value == "none" else value


@pytest.mark.parametrize(
    ("work", "full"),
    [("forward", [False, False]), ("difference", [True, False, True, True]), ("curvature", [True])],
)
def test_passes_that_are_subtracted_or_compared_are_in_full(work: str, full: list[bool]) -> None:
    """The second pass of a step is that of the meta batch, which is neither."""
    noted: list[bool] = []

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noted.append(not cudnn.allow_tf32)
            return super().forward(x)

    net, source = Noting(4, 3), ScalarGamma()
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    if work == "curvature":
        with Curvature(net, x, y) as c:
            c.hessian([torch.ones_like(p) for p in c.params])
    else:
        optimizers = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, source))
        metacal.MetaStep(net, next(optimizers), source, next(optimizers), engine=work).step(x, y, x, y)
    assert noted == full
