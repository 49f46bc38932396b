"""Small float64 networks of every kind that the bilevel step must take, and a problem around each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metacal.gamma import GammaNet
from metacal.models.backbone import Backbone
from metacal.models.factory import build_model
from metacal.models.options import ModelConfig

K = 3


class Attention(nn.Module):
    """Tokens, self-attention with dropout, layer norm, mean pooling, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, K)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(1).reshape(len(x), -1, 4))
        tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(F.gelu(self.norm(tokens)).mean(1))


class Residual(nn.Module):
    """A residual block as torchvision writes it: in-place ReLU and in-place addition, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.bn(self.stem(x)))
        out = self.bn2(self.conv(x))
        out += x
        out = F.max_pool2d(F.relu_(out), 2)
        return self.head(out.mean((2, 3)))


class Tied(nn.Module):
    """One matrix used twice, and one parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 6)
        self.twice = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.twice.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.twice(torch.tanh(self.inner(x.flatten(1))))))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, K))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(4, K),
    )


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 6), nn.Tanh(), nn.Dropout(0.2),
        nn.Linear(6, K),
    )  # fmt: skip


def frozen() -> nn.Module:
    net = mlp()
    net[1].requires_grad_(False)
    return net


def evaluation() -> nn.Module:
    return cnn().eval()


def vit() -> nn.Module:
    """The package's own: patches by a strided convolution, learned positions, attention as matrix products."""
    net = build_model(ModelConfig(name="vit", width=4, depth=1, heads=2, patch_size=2), K, (3, 4, 4))
    for p in net.parameters():
        # as drawn, the attention is uniform to a part in a thousand
        nn.init.normal_(p, std=0.4)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "dropout": dropout,
    "attention": Attention,
    "vit": vit,
    "residual": Residual,
    "tied": Tied,
    "frozen": frozen,
    "evaluation": evaluation,
}


@dataclass
class Problem:
    backbone: nn.Module
    gamma_net: nn.Module
    x: Tensor
    y: Tensor
    x_meta: Tensor
    y_meta: Tensor

    @property
    def batches(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.y, self.x_meta, self.y_meta


def make_problem(net: str, seed: int = 0) -> Problem:
    """Backbone, a gamma-net with gammas that differ, a training and a meta batch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        backbone = Backbone(NETS[net]()).double()
        gamma_net = GammaNet(backbone.in_features, hidden=2, gamma_init=2.0).double()
        nn.init.normal_(gamma_net.last.weight)
        x, x_meta = torch.randn(9, 3, 4, 4).double(), torch.randn(7, 3, 4, 4).double()
        y, y_meta = torch.randint(K, (9,)), torch.randint(K, (7,))
    return Problem(backbone, gamma_net, x, y, x_meta, y_meta)


@pytest.fixture
def problem() -> Problem:
    return make_problem("cnn")
