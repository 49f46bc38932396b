"""Networks that do not give the same logits in every pass: the value is that of the batch's own pass, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference.curvature import ggn, hessian
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from metacal.curvature import Curvature, gn_trace, hessian_trace
from metacal.errors import InputError

N, D, K = 6, 5, 3


class Net(nn.Module):
    """a, what the case does to the hidden values, head."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head, self.middle = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, K), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self, self.a(x)))


def build(middle: Callable[[Net, Tensor], Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net(middle).double()
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randint(K, (N,))
    means = model.a(x).mean(1).detach()
    model.limit = float(means.min() + means.mean()) / 2  # the first example alone lies below it, all together above
    return model, x[means.argsort()], y


def draws_itself() -> Callable[[Net, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda net, h: torch.tanh(net.b(h * torch.rand(h.shape, generator=generator, dtype=h.dtype)))


def counts_itself() -> Callable[[Net, Tensor], Tensor]:
    passes = [0]

    def middle(net: Net, h: Tensor) -> Tensor:
        passes[0] += len(h) == N
        return torch.tanh(net.b(h)) if passes[0] % 2 else h

    return middle


@pytest.mark.parametrize("make", [draws_itself, counts_itself])
def test_passes_that_differ_are_refused(make: Callable[[], Callable[[Net, Tensor], Tensor]]) -> None:
    """By the products where a pass is repeated, by the traces always."""
    model, x, y = build(make())
    v = [torch.ones_like(p) for p in model.parameters()]
    with Curvature(model, x, y) as c:
        c.gn(v), c.hessian(v)  # one pass serves both
        c.release()
        with pytest.raises(InputError, match="other logits when its pass was repeated"):
            c.gn(v)
    for trace in (gn_trace, hessian_trace):
        for exact in (True, False):
            model, x, y = build(make())
            with pytest.raises(InputError, match="other logits when its pass was repeated"):
                trace(model, x, y, exact=exact, probes=2)


def gradient_of_energy(net: Net, h: Tensor) -> Tensor:
    """The weight of b is read twice, by its layer and by that layer's derivative."""
    with torch.enable_grad():
        at = h if h.requires_grad else h.clone().requires_grad_()
        return torch.autograd.grad(torch.tanh(net.b(at)).square().sum(), at, create_graph=True)[0]


def bends_above(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(net.b(h)) if h.mean() > net.limit else torch.relu(net.b(h))


def adds_above(net: Net, h: Tensor) -> Tensor:
    """A chain for one example, none for all."""
    return torch.tanh(net.b(h)) + h * h if h.mean() > net.limit else torch.tanh(net.b(h))


def weakly_coupled(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(net.b(h + 1e-4 * h.mean(0)))


@pytest.mark.parametrize("middle", [gradient_of_energy, bends_above, adds_above, weakly_coupled])
def test_exact_traces_of_the_batchs_own_pass(middle: Callable[[Net, Tensor], Tensor]) -> None:
    model, x, y = build(middle)
    for trace, dense in ((gn_trace, ggn(model, x, "cross_entropy")), (hessian_trace, hessian(model, x, y))):
        expected = float(dense.trace())
        value = trace(model, x, y, exact=True)
        assert value.value == pytest.approx(expected, rel=1e-9), value.method
        estimate = trace(model, x, y, probes=64)
        assert abs(estimate.value - expected) <= 6 * estimate.stderr + 1e-9, estimate.method
    if middle is not gradient_of_energy:
        with pytest.raises(InputError, match="chunk_size=3 < 6 examples changes the result"):
            gn_trace(model, x, y, exact=True, chunk_size=3)


def test_reentrant_checkpoints_are_refused_in_a_sentence() -> None:
    model, x, y = build(lambda net, h: checkpoint(lambda h: torch.tanh(net.b(h)), h, use_reentrant=True))
    v = [torch.ones_like(p) for p in model.parameters()]
    calls: list[Callable[[], object]] = [
        lambda: Curvature(model, x, y).gn(v),
        lambda: Curvature(model, x, y).hessian(v),
        lambda: Curvature(model, x, y).gradient(),
        lambda: gn_trace(model, x, y, exact=True),
        lambda: hessian_trace(model, x, y),
    ]
    for call in calls:
        with pytest.raises(InputError, match="set use_reentrant=False") as error:
            call()
        assert "\n" not in str(error.value)
