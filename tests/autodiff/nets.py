"""Small float64 networks, one for each kind of structure that the curvature code treats in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

K = 4


class Residual(nn.Module):
    """In-place ReLU and in-place sum, as torchvision's blocks write them."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


class Attention(nn.Module):
    """Tokens, position embedding, one pre-norm attention block with fused attention, mean pooling."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(3, d), nn.Parameter(torch.randn(1, 5, d) * 0.3)
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm2, self.fc, self.head = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        n, t, d = h.shape
        q, k, v = self.qkv(self.norm(h)).reshape(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))
        h = h + F.gelu(self.fc(self.norm2(h)))
        return self.head(h.mean(1))


class Tied(nn.Module):
    """One matrix used twice along the same path."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(torch.tanh(self.first(x)))))))


def _mlp(act: Callable[[], nn.Module], hidden: tuple[int, ...], bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    width = 6
    for h in hidden:
        layers += [nn.Linear(width, h, bias=bias), act()]
        width = h
    return nn.Sequential(*layers, nn.Linear(width, K, bias=bias))


def _cnn(norm: Callable[[int], nn.Module], act: Callable[[], nn.Module], **conv: object) -> nn.Sequential:
    options = {"padding": 1, **conv}
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, **options),  # type: ignore[arg-type]
        norm(4),
        act(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2, padding=1),
        act(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(K),
    )


def _resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        Residual(3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, K),
    )


def _mixed() -> nn.Sequential:
    acts = nn.Softplus(beta=2.0), nn.LeakyReLU(0.1), nn.Sigmoid()
    return nn.Sequential(nn.Linear(6, 5), acts[0], nn.Linear(5, 5), acts[1], nn.Linear(5, 4), acts[2], nn.Linear(4, K))


def _groupnorm() -> nn.Sequential:
    return _cnn(lambda c: nn.GroupNorm(2, c), nn.SiLU, padding="same", padding_mode="reflect")


VECTOR, IMAGE, TOKENS = (6,), (2, 8, 8), (5, 3)

# name → (network, shape of one example, training mode)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "linear": (lambda: _mlp(nn.Tanh, ()), VECTOR, False),
    "mlp tanh": (lambda: _mlp(nn.Tanh, (7, 5)), VECTOR, False),
    "mlp deep tanh": (lambda: _mlp(nn.Tanh, (6, 5, 5, 4)), VECTOR, False),
    "mlp gelu": (lambda: _mlp(nn.GELU, (7, 5, 6), bias=False), VECTOR, False),
    "mlp relu": (lambda: _mlp(nn.ReLU, (7, 5)), VECTOR, False),
    "mlp mixed": (_mixed, VECTOR, False),
    "cnn batchnorm eval": (lambda: _cnn(nn.BatchNorm2d, nn.ReLU), IMAGE, False),
    "cnn batchnorm train": (lambda: _cnn(nn.BatchNorm2d, nn.ReLU), IMAGE, True),
    "cnn tanh": (lambda: _cnn(nn.BatchNorm2d, nn.Tanh, dilation=2), IMAGE, False),
    "cnn groupnorm": (_groupnorm, IMAGE, False),
    "resnet in-place eval": (_resnet, IMAGE, False),
    "resnet in-place train": (_resnet, IMAGE, True),
    "attention": (Attention, TOKENS, False),
    "tied": (Tied, VECTOR, False),
}

DEPENDENT = {"cnn batchnorm train", "resnet in-place train"}
UNTAPED = DEPENDENT | {"cnn groupnorm", "attention"}  # normalised by statistics of their own: no rule on the tape


def build(name: str, n: int = 6, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """The network in float64, in its mode, with inputs and labels; BatchNorm with settled, uneven statistics."""
    make, shape, training = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        model(torch.randn(4, *shape))
        model = model.double()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(0, 0.3)
                m.running_var.uniform_(0.5, 2)
            if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
                nn.init.uniform_(m.weight, 0.5, 1.5)
                nn.init.normal_(m.bias, 0, 0.3)
        x, y = torch.randn(n, *shape, dtype=torch.float64) * 1.5, torch.randint(0, K, (n,))
    return model.train(training), x, y
