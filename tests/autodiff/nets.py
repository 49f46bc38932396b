"""Small float64 networks, one for each kind of structure that the curvature code treats in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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

    def __init__(self, d: int = 4) -> None:
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
        self.first, self.shared, self.head = nn.Linear(6, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, K)

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


# -- what training networks contain, for J v of a training pass ------------------------------------------------------


class Then(nn.Module):
    """Layers made by `make`, and a forward that is a function of them."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _conv_net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, K)
    )


def _tokens_net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), *layers, nn.Flatten(), nn.Linear(40, K))


def _vector_net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, K))


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)


def _parametrised(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, K))


def _straight_through(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h + (torch.round(h) - h).detach())


def _batch_statistics(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.a(x))
    with torch.no_grad():
        mean, deviation = h.mean(0), h.std(0)
    return net.b((h - mean) / (deviation + 0.1))


def _constants(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.a(x))
    return net.b(sum(h * torch.as_tensor(np.cos(np.arange(8) * k)) for k in (1, 2, 3)))


def _in_place(net: Any, x: Tensor) -> Tensor:
    x -= 0.3
    h = net.a(x)
    h[:, 1] = 0.0
    h *= 2.0
    h.mul_(torch.sigmoid(h))
    return net.b(h.clamp_(min=-1))


def _squeezed(net: Any, x: Tensor) -> Tensor:
    h = F.silu(net.a(x))
    gate = torch.sigmoid(net.up(F.relu(net.down(h.mean((2, 3))))))
    return net.head((h * gate[:, :, None, None]).amax((2, 3)))


def _dense_blocks(net: Any, x: Tensor) -> Tensor:
    h = torch.cat([x, F.relu(net.norm(net.a(x)))], 1)
    return net.head(torch.cat([h.flatten(1), F.pad(net.b(h), (1, 0, 0, 1)).flatten(1)], 1))


def _decoder(net: Any, x: Tensor) -> Tensor:
    h = F.interpolate(net.a(x), scale_factor=2, mode="bilinear", align_corners=False)
    h = F.pixel_shuffle(net.up(h), 2) + F.interpolate(net.b(x), size=(16, 16))
    return net.head(F.adaptive_max_pool2d(F.avg_pool2d(h, 2), 2).flatten(1))


def _rotations(net: Any, x: Tensor) -> Tensor:
    q, k, v = net.qkv(x).chunk(3, -1)
    logits = torch.einsum("nid,njd->nij", F.normalize(q, dim=-1), F.normalize(k, dim=-1)) / net.temperature
    weights = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    return net.head(torch.einsum("nij,njd->nid", weights, v).flatten(1))


def _words(net: Any, x: Tensor) -> Tensor:
    ids = (x * 3).long() % 7
    h = (net.table(ids) * net.weights[:, None]).mean(1)
    return net.head(torch.tanh(h))


def _volumes(net: Any, x: Tensor) -> Tensor:
    h = net.a(x.view(len(x), 1, 2, 8, 8))
    return net.head(F.max_pool3d(F.avg_pool3d(h, (1, 2, 2)), (1, 2, 2)).flatten(1))


def _sequences(net: Any, x: Tensor) -> Tensor:
    h = F.max_pool1d(F.gelu(net.a(x.transpose(1, 2))), 2)
    return net.head(F.adaptive_avg_pool1d(net.up(h), 3).flatten(1))


def _mixtures(net: Any, x: Tensor) -> Tensor:
    scores = net.gate(x).log_softmax(1)
    top, places = scores.topk(2, 1)
    experts = torch.stack([e(x) for e in net.experts], 1)
    chosen = experts.gather(1, places[:, :, None].expand(-1, -1, K))
    return torch.where(top[:, :1] > -5, (chosen * top.exp()[:, :, None]).sum(1), chosen[:, 0])


def _prototypes(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    distance = (h[:, None] - net.centres).pow(2).sum(-1)
    return -distance.sqrt() * net.scale.exp() + F.cosine_similarity(h[:, None], net.centres, dim=-1)


def _translated(net: Any, x: Tensor) -> Tensor:
    h, mask = net.embed(x), torch.ones(5, 5).triu(1).bool()
    return net.head(net.decoder(h, net.encoder(h), tgt_mask=mask, memory_key_padding_mask=x[..., 0] > 2)[:, -1])


def _unrolled(net: Any, x: Tensor) -> Tensor:
    h = cell = x.new_zeros(len(x), 4)
    for t in range(x.shape[1]):
        h, cell = net.cell(x[:, t], (h, cell))
    return net.head(h)


def _recurrent(kind: type[nn.Module]) -> nn.Module:
    return Then(
        lambda net, x: net.head(net.cell(x)[0][:, -1]), cell=kind(3, 4, 2, batch_first=True), head=nn.Linear(4, K)
    )


parametrizations = nn.utils.parametrizations

# name → (network, shape of one example), in training mode
TRAINING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: _conv_net(nn.BatchNorm2d(4), nn.ReLU()), IMAGE),
    "batch norm, no scale": (lambda: _conv_net(nn.BatchNorm2d(4, affine=False), nn.ReLU(inplace=True)), IMAGE),
    "batch norm, no running statistics": (lambda: _vector_net(nn.BatchNorm1d(8, track_running_stats=False)), VECTOR),
    "residual, in place": (_resnet, IMAGE),
    "layer norm": (lambda: _vector_net(nn.LayerNorm(8), nn.GELU()), VECTOR),
    "group norm": (lambda: _conv_net(nn.GroupNorm(2, 4), nn.SiLU()), IMAGE),
    "instance norm": (lambda: _conv_net(nn.InstanceNorm2d(4, affine=True), nn.ELU()), IMAGE),
    "rms norm": (lambda: _vector_net(nn.RMSNorm(8), nn.Softplus()), VECTOR),
    "response norm": (lambda: _conv_net(nn.LocalResponseNorm(2), nn.Hardtanh()), IMAGE),
    "dropout": (lambda: _vector_net(nn.Dropout(0.3), nn.SiLU(), nn.Dropout(0.2, inplace=True)), VECTOR),
    "dropout of channels": (lambda: _conv_net(nn.Dropout2d(0.3), nn.PReLU(4)), IMAGE),
    "self-normalising": (lambda: _vector_net(nn.SELU(), nn.AlphaDropout(0.2)), VECTOR),
    "attention": (Attention, TOKENS),
    "encoder": (lambda: _tokens_net(_encoder(dropout=0.0)), TOKENS),
    "encoder with dropout": (lambda: _tokens_net(_encoder(dropout=0.2, norm_first=True, activation="gelu")), TOKENS),
    "encoder and decoder": (
        lambda: Then(
            _translated,
            embed=nn.Linear(3, 8),
            encoder=_encoder(),
            decoder=nn.TransformerDecoderLayer(8, 2, 12, batch_first=True),
            head=nn.Linear(8, K),
        ),
        TOKENS,
    ),
    "normalised attention": (
        lambda: Then(
            _rotations, qkv=nn.Linear(3, 12), temperature=nn.Parameter(torch.tensor(0.5)), head=nn.Linear(20, K)
        ),
        TOKENS,
    ),
    "embeddings": (
        lambda: Then(
            _words,
            table=nn.Embedding(7, 5, padding_idx=2),
            weights=nn.Parameter(torch.rand(6)),
            head=nn.Linear(5, K),
        ),
        VECTOR,
    ),
    "weight norm": (lambda: _parametrised(parametrizations.weight_norm), VECTOR),
    "spectral norm": (lambda: _parametrised(parametrizations.spectral_norm), VECTOR),
    "spectral norm by a hook": (lambda: _parametrised(nn.utils.spectral_norm), VECTOR),
    "orthogonal": (lambda: _parametrised(parametrizations.orthogonal), VECTOR),
    "reflections": (
        lambda: _parametrised(lambda m: parametrizations.orthogonal(m, orthogonal_map="householder")),
        VECTOR,
    ),
    "cayley": (lambda: _parametrised(lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley")), VECTOR),
    "straight through": (lambda: Then(_straight_through, a=nn.Linear(6, 8), b=nn.Linear(8, K)), VECTOR),
    "statistics as constants": (lambda: Then(_batch_statistics, a=nn.Linear(6, 8), b=nn.Linear(8, K)), VECTOR),
    "constants made anew": (lambda: Then(_constants, a=nn.Linear(6, 8), b=nn.Linear(8, K)), VECTOR),
    "in place": (lambda: Then(_in_place, a=nn.Linear(6, 8), b=nn.Linear(8, K)), VECTOR),
    "squeeze and excitation": (
        lambda: Then(_squeezed, a=nn.Conv2d(2, 6, 3), down=nn.Linear(6, 3), up=nn.Linear(3, 6), head=nn.Linear(6, K)),
        IMAGE,
    ),
    "dense blocks": (
        lambda: Then(
            _dense_blocks,
            a=nn.Conv2d(2, 3, 3, padding=1),
            norm=nn.BatchNorm2d(3),
            b=nn.Conv2d(5, 2, 3, stride=2),
            head=nn.Linear(5 * 64 + 2 * 16, K),
        ),
        IMAGE,
    ),
    "decoder": (
        lambda: Then(
            _decoder,
            a=nn.ConvTranspose2d(2, 3, 3, 2),
            up=nn.Conv2d(3, 8, 3, 4),
            b=nn.Conv2d(2, 2, 1),
            head=nn.Linear(8, K),
        ),
        IMAGE,
    ),
    "volumes": (lambda: Then(_volumes, a=nn.Conv3d(1, 2, (2, 3, 3)), head=nn.Linear(2, K)), IMAGE),
    "sequences": (
        lambda: Then(_sequences, a=nn.Conv1d(3, 4, 2), up=nn.ConvTranspose1d(4, 2, 2), head=nn.Linear(6, K)),
        TOKENS,
    ),
    "mixture of experts": (
        lambda: Then(_mixtures, gate=nn.Linear(6, 3), experts=nn.ModuleList([_mlp(nn.Tanh, (4,)) for _ in range(3)])),
        VECTOR,
    ),
    "prototypes": (
        lambda: Then(
            _prototypes, a=nn.Linear(6, 5), centres=nn.Parameter(torch.randn(K, 5)), scale=nn.Parameter(torch.zeros(()))
        ),
        VECTOR,
    ),
    "gated units": (lambda: nn.Sequential(nn.Linear(6, 16), nn.GLU(), nn.Mish(), nn.Linear(8, K)), VECTOR),
    "hard units": (lambda: _conv_net(nn.Hardswish(), nn.Threshold(0.1, 0.0), nn.MaxPool2d(2), nn.LogSigmoid()), IMAGE),
    "bilinear": (
        lambda: Then(
            lambda net, x: net.b(net.a(x[:, :3], torch.tanh(x[:, 3:]))), a=nn.Bilinear(3, 3, 5), b=nn.Linear(5, K)
        ),
        VECTOR,
    ),
    "maxout": (
        lambda: Then(lambda net, x: net.b(net.a(x).view(len(x), 4, 2).max(2)[0]), a=nn.Linear(6, 8), b=nn.Linear(4, K)),
        VECTOR,
    ),
    "lstm": (lambda: _recurrent(nn.LSTM), TOKENS),
    "cells": (lambda: Then(_unrolled, cell=nn.LSTMCell(3, 4), head=nn.Linear(4, K)), TOKENS),
    "gru": (lambda: _recurrent(nn.GRU), TOKENS),
    "shared weights": (Tied, VECTOR),
}


def build_training(name: str, n: int = 6, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """The network in float64 and training mode, with inputs and labels."""
    make, shape = TRAINING[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
        for m in model.modules():
            if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)) and m.weight is not None:
                nn.init.uniform_(m.weight, 0.5, 1.5)
                nn.init.normal_(m.bias, 0, 0.3)
        x, y = torch.randn(n, *shape, dtype=torch.float64) * 1.5, torch.randint(0, K, (n,))
    return model.train(), x, y
