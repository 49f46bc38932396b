"""Networks for the penalties, and directional derivatives in θ against central differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


def images(n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(n, 2, 6, 6) pixels in [0, 1] and labels of 3 classes, float64."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, 2, 6, 6, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def _net(kind: str) -> nn.Module:
    act = nn.Tanh if "tanh" in kind else nn.ReLU
    body: list[nn.Module] = [nn.Conv2d(2, 4, 3), *([nn.BatchNorm2d(4)] if "batchnorm" in kind else []), act()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 6), act(), nn.Linear(6, 3))


KINDS = ["tanh", "relu", "tanh batchnorm train", "relu batchnorm train", "relu batchnorm eval"]


@pytest.fixture(params=KINDS)
def net(request: pytest.FixtureRequest) -> nn.Module:
    """Float64, with uneven BatchNorm statistics, in the mode that its name says."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = _net(request.param).double()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(0, 0.3)
                m.running_var.uniform_(0.5, 2)
                nn.init.uniform_(m.weight, 0.5, 1.5)
                nn.init.normal_(m.bias, 0, 0.3)
    return model.train("train" in request.param)


def _check_gradient(f: Callable[[], Tensor], model: nn.Module, directions: int = 3, h: float = 1e-6) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(f(), params, allow_unused=True)
    g = torch.Generator().manual_seed(7)
    for _ in range(directions):
        d = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in params]
        slope = sum(float((a * b).sum()) for a, b in zip(grads, d) if a is not None)
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                torch._foreach_add_(params, d, alpha=sign * h)
            sides.append(float(f().detach()))
            with torch.no_grad():
                torch._foreach_add_(params, d, alpha=-sign * h)
        assert slope == pytest.approx((sides[0] - sides[1]) / (2 * h), rel=2e-6, abs=1e-8)


@pytest.fixture
def check_gradient() -> Callable[..., None]:
    """`check_gradient(f, model)`: the gradient in θ of the scalar f() equals central differences."""
    return _check_gradient


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return images()


@pytest.fixture
def untouched() -> Callable[..., None]:
    """`untouched(f, model)`: f() changes no mode, buffer, parameter or `.grad` of the model."""

    def check(f: Callable[[], object], model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 2.0)
        grads = [p.grad for p in model.parameters()]
        buffers = list(model.buffers())
        state = {k: v.clone() for k, v in model.state_dict().items()}
        versions = [b._version for b in buffers]
        modes = [m.training for m in model.modules()]
        f()
        assert [m.training for m in model.modules()] == modes
        assert all(a is b for a, b in zip(model.buffers(), buffers)) and [b._version for b in buffers] == versions
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert all(p.grad is a and bool((a == 2).all()) for p, a in zip(model.parameters(), grads))

    return check
