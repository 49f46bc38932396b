"""Functions of a matrix a (3, 4), a matrix b (4, 4) and a vector c (4,), for the rules that they go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal.autodiff.tape import Tape

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {
    "linear": lambda a, b, c: F.linear(a @ b, b, c),
    "linear by name": lambda a, b, c: F.linear(input=a * c, weight=b, bias=c),
    "product of three": lambda a, b, c: (a * c) @ (b * c) * a,
    "sums": lambda a, b, c: 2 - torch.add(a @ b, a, alpha=3).sub(c, alpha=0.5) + c - (1 + a),
    "numbers": lambda a, b, c: 3 * (a * a) / 4 - (-a) * c,
    "in place": lambda a, b, c: (a * c).add_(a).sub_(c),
    "in-place sum of a constant": lambda a, b, c: torch.zeros(3, 4, dtype=a.dtype).add_(a * c),
    "in-place relu": lambda a, b, c: torch.relu_((a * c) @ b),
    "tanh": lambda a, b, c: torch.tanh(a * c) @ b,
    "sigmoid": lambda a, b, c: torch.sigmoid(a * c).mul(a),
    "silu": lambda a, b, c: F.silu(3 * a * c),
    "gelu": lambda a, b, c: F.gelu(a * c),
    "softplus": lambda a, b, c: F.softplus(a * c, beta=2.0, threshold=1.0),
    "leaky relu": lambda a, b, c: F.leaky_relu(a * c, 0.2) * c,
    "shapes": lambda a, b, c: (a * c).reshape(2, 6).t().transpose(0, 1).flatten().view(3, 4)[:, :2].unsqueeze(0),
    "means": lambda a, b, c: ((a * c).mean(0, keepdim=True) * c.sum()).squeeze(0).expand(2, 4).reshape(-1),
    "cat": lambda a, b, c: torch.cat([a * c, torch.ones_like(a), b * c], 0) * c,
    "pad": lambda a, b, c: F.pad(a * c, (1, 2), value=5.0),
    "convolution": lambda a, b, c: F.conv2d((a * c).view(1, 1, 3, 4), b[:2, :2].view(1, 1, 2, 2), c[:1], padding=1),
    "max pooling": lambda a, b, c: F.max_pool2d((a @ b).view(1, 1, 3, 4), 2, 1),
    "average pooling": lambda a, b, c: F.avg_pool2d((a * c).view(1, 1, 3, 4), 2),
    "dropout that is off": lambda a, b, c: F.dropout(a * c, 0.5, training=False),
    "normalisation": lambda a, b, c: F.batch_norm(a @ b, torch.ones(4).to(a), 2 * torch.ones(4).to(a), c, 1 + 0 * c),
    "normalisation, no scale": lambda a, b, c: F.batch_norm(a * c, torch.ones(4).to(a), torch.ones(4).to(a)),
    "detached": lambda a, b, c: (a * c).detach() * a + torch.zeros_like(a),
    "silu, in place": lambda a, b, c: F.silu(3 * a * c, inplace=True) @ b,
    "gelu by tanh": lambda a, b, c: F.gelu(3 * a * c, approximate="tanh"),
    "hardtanh": lambda a, b, c: F.hardtanh(a * c, -0.5, 0.7) * c,
    "relu6": lambda a, b, c: F.relu6(9 * a * c) * c,
    "exp": lambda a, b, c: torch.exp(a * c),
    "root": lambda a, b, c: torch.rsqrt(1 + (a * c).square()),
    "powers": lambda a, b, c: (a * c) ** 3 + torch.pow(a, 2) * c,
    "softmax": lambda a, b, c: (a * c).softmax(1) @ F.softmax(b, dim=0),
    "in-place product": lambda a, b, c: (a * c).mul_(b[:3]).mul_(2.0),
    "several results": lambda a, b, c: torch.stack([*(a * c).chunk(2, 1), (a @ b).split(2, 1)[0]]) * c[:2],
    "unbind": lambda a, b, c: (a * c).unbind(1)[2] @ b[:3],
    "transposed": lambda a, b, c: (a * c).T.mT @ b.mT,
    "max pooling of one image": lambda a, b, c: F.max_pool2d((a @ b).view(1, 3, 4), 2, 1),
    "convolution of one image": lambda a, b, c: F.conv2d((a * c).view(1, 3, 4), b[:2, :2].view(2, 1, 1, 2), c[:2]),
    "comparison": lambda a, b, c: a * c * (a > 0),
}


# what a tape knows if it is spelled out
SPELLED_OUT: dict[str, Function] = {
    "batch": lambda a, b, c: F.batch_norm(a @ b, None, None, c, b[0], True),
    "batch of images": lambda a, b, c: F.batch_norm((a * c).view(3, 2, 2), None, None, c[:2], None, True),
    "running statistics": lambda a, b, c: F.batch_norm(a * c, torch.ones(4).to(a), 2 * torch.ones(4).to(a), c, b[0]),
    "layer": lambda a, b, c: F.layer_norm(a @ b, (4,), c, b[1], 0.1),
    "groups": lambda a, b, c: F.group_norm(a @ b, 2, c, b[1], 0.1),
    "root mean square": lambda a, b, c: F.rms_norm(a @ b, (4,), c),
    "weight": lambda a, b, c: F.linear(a, torch._weight_norm(b, c.view(4, 1), 0)),
    "weight, one length": lambda a, b, c: F.linear(a, torch._weight_norm(b, c[0], -1)),
    "attention": lambda a, b, c: F.scaled_dot_product_attention((a * c)[None], b[None], (b * c)[None]),
    "attention, other scale": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], b[None], scale=2.0),
    "dropout": lambda a, b, c: F.dropout(a * c, 0.3) @ b,
    "dropout, in place": lambda a, b, c: F.dropout(a @ b, 0.3, inplace=True) * c,
    "dropout of channels": lambda a, b, c: F.dropout1d(a @ b, 0.3) * c,
}


def _assigned(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out, h = torch.ones(3, 4).to(a), a * c
    out[1] = c * c
    out[:, 2] = a[:, 0] * c[0]
    h[0, 0] = 5.0
    return out * h


def _assigned_twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = a * c
    out[[0, 0]] = b[:2] * c
    out[:, INDEX[0]] = c * a
    return out * a


def _statistics_as_constants(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    h = a * c
    with torch.no_grad():
        mean, deviation = h.mean(0), h.std(0)
    return (h - mean) / (deviation + 0.1)


def _heads(a: Tensor, b: Tensor, c: Tensor, p: float) -> Tensor:
    x, weight, bias = (a * c)[:, None], torch.cat([b, b * c, b.T]), torch.cat([c, c, c])
    out, weights = F.multi_head_attention_forward(
        x, x, a[:, None], 4, 2, weight, bias, None, None, False, p, b, c, need_weights=p > 0
    )
    return out if weights is None else out.sum() + weights


INDEX = torch.tensor([[0, 1, 1, 2]] * 3)
WORDS = torch.tensor([[0, 1], [2, 3], [1, 1]])
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()

# what networks contain beyond that: derivatives along a direction, not their own derivatives to third order
MORE: dict[str, Function] = {
    "quotient": lambda a, b, c: (a * a) / (c * c + 1) / (a.exp() + 1),
    "quotient, in place": lambda a, b, c: (a * c).div_(c * c + 1).div_(2.0),
    "number by a tensor": lambda a, b, c: 2 / (a * a + 1) + (1 + c * c).reciprocal() + 2**a,
    "roots and logarithms": lambda a, b, c: (a * a + c * c + 1).sqrt() * (a * a + c * c + 2).log() + torch.log1p(c * c),
    "exponential less one": lambda a, b, c: torch.expm1(a * c),
    "logarithm, in place": lambda a, b, c: (a * a + c * c + 1).log_() * c,
    "absolute, sine, error function": lambda a, b, c: (a * c).abs() * torch.sin(a) + torch.cos(a * c) + torch.erf(a),
    "clamp": lambda a, b, c: (a * c).clamp(-0.5, 0.5) * a + (a @ b).clamp_min(0) + (a * c).clamp_(max=0.2),
    "elu": lambda a, b, c: F.elu(a * c, 0.7) + F.selu(a) + F.celu(a * c, 2.0),
    "mish": lambda a, b, c: F.mish(a * c) + F.hardswish(a * 2) + F.logsigmoid(a * c),
    "soft": lambda a, b, c: F.softsign(a * c) + F.tanhshrink(a) + F.softshrink(a) * c,
    "hard": lambda a, b, c: F.hardshrink(a) * c + F.threshold(a, 0.1, 3.0) * c,
    "activations in place": lambda a, b, c: F.elu(F.leaky_relu(a * c, 0.3, True) * a, 1.0, True) + F.mish(a * c, True),
    "rectifiers": lambda a, b, c: F.relu(a * c) @ b + F.relu(a * c, True) @ b + (a @ b).relu_() * c,
    "prelu": lambda a, b, c: F.prelu(a @ b, c * a[0]) + F.prelu(a @ b, c[:1]),
    "gate": lambda a, b, c: F.glu(a @ b * c, 1) * F.glu(b[:, :3], 0).sum(),
    "straight through": lambda a, b, c: a * c + ((a * c).round() - a * c).detach(),
    "rounded": lambda a, b, c: (a * c).round() * c + (a * c).sign() * a,
    "maxima": lambda a, b, c: (a @ b).max(1)[0] * c[0] + (a * c).min(1, keepdim=True).values[:, 0] + (a * c).max(),
    "maxima of slices": lambda a, b, c: (a * c).amax(1) + (a @ b).amin((0, 1)),
    "ties": lambda a, b, c: torch.stack([a * c, a * c]).amax(0) * c + torch.maximum(a * c, c * a),
    "larger": lambda a, b, c: torch.minimum(a * c, a @ b) + torch.max(a, a * c),
    "sorted": lambda a, b, c: (a @ b).topk(2, 1)[0].sort(1, descending=True)[0] + (a * c).kthvalue(2, 1)[0][:, None],
    "median": lambda a, b, c: (a * c).median(1)[0] * c[0],
    "variances": lambda a, b, c: (a @ b).var(1) * c[0] + (a * c).var((0, 1), correction=0) + (a @ b).var(),
    "deviations": lambda a, b, c: (a * c).std(1, unbiased=False) + torch.std_mean(a * c, 1)[0],
    "variance and mean": lambda a, b, c: torch.var_mean(a * c, 1)[1] * torch.var_mean(a * c, 1)[0],
    "standardised": lambda a, b, c: (a @ b) / (a @ b).std(0, keepdim=True),
    "lengths": lambda a, b, c: (a * c).norm() * c + F.normalize(a @ b, dim=1) + torch.linalg.norm(a * c),
    "logarithm of sums": lambda a, b, c: (a @ b).logsumexp(1, keepdim=True) * c + (a * c).logsumexp((0, 1)),
    "log softmax": lambda a, b, c: (a @ b).log_softmax(1) + F.log_softmax(a * c, dim=0) + F.softmin(a * c, dim=1),
    "where": lambda a, b, c: torch.where(a > 0, a * c, a @ b) + torch.where(a > 0, torch.ones_like(a), a @ b),
    "where with numbers": lambda a, b, c: torch.where(a > 0, a * c, 0.0) + (a * c).masked_fill(a > 0, 2.0),
    "method where": lambda a, b, c: (a * c).where(a < 0, torch.zeros_like(a)),
    "places": lambda a, b, c: (a * c).index_select(1, INDEX[0]) @ b + (a @ b).gather(1, INDEX),
    "places along": lambda a, b, c: torch.take_along_dim(a * c, INDEX, 1) + (a * c)[[0, 1]][:, None].sum(1)[:1],
    "masked": lambda a, b, c: (a * c)[a > 0].sum() * c,
    "scattered": lambda a, b, c: torch.zeros(3, 4).to(a).scatter_add_(1, INDEX, a * c) * c,
    "scattered over constants": lambda a, b, c: torch.ones(3, 4).to(a).scatter(1, torch.arange(4)[None], (a * c)[:1]),
    "index add": lambda a, b, c: (a * c).index_add(0, torch.tensor([0, 0]), a[:2]),
    "scattered twice to a place": lambda a, b, c: (
        a.scatter(1, INDEX, b[:3] * c) + (a * c).index_copy(1, INDEX[0], b[:3])
    ),
    "assigned": _assigned,
    "assigned twice": _assigned_twice,
    "sums of products": lambda a, b, c: torch.einsum("ij,jk,k->ik", a, b, c) + torch.einsum("ij->ji", a * c).T,
    "plus a product": lambda a, b, c: torch.addmm(c, a, b, beta=2, alpha=0.5) + torch.addcmul(a, a, c, value=0.3),
    "plus a quotient": lambda a, b, c: torch.addcdiv(a, c, c * c + 1, value=0.5) + torch.addmv(c, b, c),
    "batches of products": lambda a, b, c: torch.baddbmm(a[None], a[None], b[None]),
    "products of vectors": lambda a, b, c: torch.dot(c, c @ b) * c + torch.mv(b, c) + torch.vdot(c, b[0]),
    "products of all entries": lambda a, b, c: torch.outer(c, c)[:1] + torch.inner(a, b)[:1] + torch.kron(c, c)[:4],
    "contraction": lambda a, b, c: torch.tensordot(a, b, 1),
    "between two": lambda a, b, c: torch.lerp(a, a * c, 0.3),
    "embedding": lambda a, b, c: F.embedding(WORDS, b, padding_idx=1).flatten(1)[:, :4] * c,
    "attention with a mask": lambda a, b, c: F.scaled_dot_product_attention((a * c)[None], b[None], b[None], MASK),
    "attention with a bias": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], b[None], a * c),
    "causal attention": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], b[None], is_causal=True),
    "attention with dropout": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], b[None], dropout_p=0.4),
    "grouped attention": lambda a, b, c: F.scaled_dot_product_attention(
        torch.stack([a * c, a]), b[None], (b * c)[None], enable_gqa=True
    ),
    "heads": lambda a, b, c: _heads(a, b, c, 0.0),
    "heads with dropout": lambda a, b, c: _heads(a, b, c, 0.3),
    "dropout": lambda a, b, c: F.dropout(a * c, 0.4) @ b + F.dropout(a * c, 0.4, inplace=True) + F.dropout(a * c, 1.0),
    "dropout of channels": lambda a, b, c: (
        F.dropout1d((a * c)[None], 0.4)[0] + F.dropout2d(b[None, :3, :, None])[0, :, :, 0]
    ),
    "alpha dropout": lambda a, b, c: (
        F.alpha_dropout(a * c, 0.3, True) + F.feature_alpha_dropout(b[:3, :, None], 0.3, True)[..., 0]
    ),
    "dropout with its mask": lambda a, b, c: torch.native_dropout(a * c, 0.4, True)[0] @ b,
    "samples of a softmax": lambda a, b, c: F.gumbel_softmax(a * c, hard=True) @ b,
    "max pooling, 1d": lambda a, b, c: F.max_pool1d((a @ b)[None], 2) + F.adaptive_max_pool1d((a * c)[None], 2),
    "max pooling, 3d": lambda a, b, c: F.max_pool3d((b @ b).view(1, 1, 2, 2, 4), 2),
    "max pooling to a size": lambda a, b, c: F.adaptive_max_pool2d((b @ b)[None, None], 2),
    "max pooling with places": lambda a, b, c: F.max_pool2d((b * c)[None, None], 2, return_indices=True)[0],
    "mean pooling": lambda a, b, c: F.avg_pool1d((a * c)[None], 2) + F.adaptive_avg_pool1d((a * c)[None], 2),
    "mean pooling to a size": lambda a, b, c: F.adaptive_avg_pool2d((b * c)[None, None], 3),
    "pooling of powers": lambda a, b, c: F.lp_pool1d((a * c)[None], 2, 2),
    "transposed convolution": lambda a, b, c: F.conv_transpose2d(
        (a * c).view(1, 3, 2, 2), b[:3].reshape(3, 1, 2, 2), c[:1], stride=2
    ),
    "convolution, 1d": lambda a, b, c: F.conv1d((a * c)[None], b[:, :3].reshape(4, 3, 1), c),
    "interpolation": lambda a, b, c: F.interpolate((a * c)[None, None], scale_factor=2, mode="bilinear"),
    "nearest neighbours": lambda a, b, c: F.interpolate((a * c)[None, None], scale_factor=2, mode="nearest"),
    "patches": lambda a, b, c: (
        F.pixel_shuffle((b @ b).view(1, 4, 2, 2), 2) * F.unfold((b * c)[None, None], 2).square().sum()
    ),
    "response normalisation": lambda a, b, c: F.local_response_norm((a @ b)[None], 2),
    "weights of given length": lambda a, b, c: (
        a @ torch._weight_norm(b, c.view(4, 1), 0) + torch._weight_norm(b, c[0], -1)[:3]
    ),
    "statistics as constants": _statistics_as_constants,
    "fourier": lambda a, b, c: torch.fft.fft2(a * c).real * c,
    "copies": lambda a, b, c: torch.zeros(3, 4).to(a).copy_(a * c) * c + (a * c).zero_() + (a * c).fill_(3.0),
    "views in place": lambda a, b, c: (a * c).unsqueeze_(0).squeeze_(0).t_().T * c,
    "shaped like another": lambda a, b, c: c.expand_as(a) * a.expand(2, 3, 4) + c.view_as(c) + (a * c).type_as(b),
    "triangles": lambda a, b, c: (b * c).tril() @ (b * c).triu() + torch.diag(c) + b.roll(1, 0).flip(1).cumsum(0),
    "differences": lambda a, b, c: (2 - a) * c + torch.rsub(a, c, alpha=2),
    "lists": lambda a, b, c: sum(torch.unbind(a * c, 1))[:, None] * c + torch.hstack([a * c, a])[:, :4],  # type: ignore
    "constants beside": lambda a, b, c: (
        torch.cat([torch.full((1, 4), 3.0).to(a), a * c]) * 2 + torch.vstack([c, b[:3]])
    ),
}

# the same without second derivatives
FIRST: dict[str, Function] = {
    "batch": lambda a, b, c: F.batch_norm(a @ b, None, None, c, b[0], True),
    "batch, no scale": lambda a, b, c: F.batch_norm(a @ b, None, None, None, None, True) * c,
    "batch of images": lambda a, b, c: F.batch_norm((a * c).view(3, 2, 2), None, None, c[:2], None, True),
    "batch by name": lambda a, b, c: F.batch_norm(a @ b, None, None, weight=c, bias=c, training=True, eps=0.1),
    "batch of constants": lambda a, b, c: F.batch_norm(
        torch.arange(12.0).view(3, 4).to(a) ** 2, None, None, c, b[0], True
    ),
    "batch, constant scale": lambda a, b, c: F.batch_norm(
        a @ b, None, None, torch.full_like(c, 2.0).detach(), None, True
    ),
    "layer": lambda a, b, c: F.layer_norm(a @ b, (4,), c, b[1], 0.1),
    "layer, both dimensions": lambda a, b, c: F.layer_norm(a @ b, (3, 4), None, None, 0.1) * c,
    "groups": lambda a, b, c: F.group_norm(a @ b, 2, c, b[1], 0.1),
    "groups of images": lambda a, b, c: F.group_norm((b @ b).view(1, 4, 2, 2) * a.view(3, 4, 1, 1), 2, c, b[1], 0.1),
    "instances": lambda a, b, c: F.instance_norm((b @ b).view(2, 2, 4), weight=c[:2], bias=c[2:]),
    "root mean square": lambda a, b, c: F.rms_norm(a @ b, (4,), c),
    "matrix functions": lambda a, b, c: torch.matrix_exp(b / 4) @ torch.linalg.solve(b, a.T),
    "reflections": lambda a, b, c: torch.linalg.householder_product(b[:, :3], c[:3]),
    "products of entries": lambda a, b, c: (a * c).prod(1) * c[0] + (b * c).cumprod(1)[:3, 0],
    "rare functions": lambda a, b, c: (
        torch.tan(a * c) + torch.atan2(a, a * a + 1 + c) + torch.logaddexp(a, c.expand(3, 4))
    ),
    "tensor powers": lambda a, b, c: (a.abs() + 1) ** c,
    "cosine": lambda a, b, c: F.cosine_similarity(a, (a * c) @ b, dim=1),
    "other lengths": lambda a, b, c: (
        (a * c).norm(3, dim=1) + (a * c).norm(1, dim=1) + (a * c).norm(float("inf"), dim=1)
    ),
    "bilinear": lambda a, b, c: F.bilinear(a, a @ b, b.view(1, 4, 4), c[:1]),
    "determinant": lambda a, b, c: torch.slogdet(b * c)[1] * c,
    "weighted by a tensor": lambda a, b, c: torch.lerp(a, a * c, torch.sigmoid(a)),
}

# for functions that reverse passes cannot differentiate twice: the same value from others
EQUAL: dict[str, tuple[Function, Function]] = {
    "bags": (
        lambda a, b, c: F.embedding_bag(WORDS, b * c) * c,
        lambda a, b, c: (b * c)[WORDS].mean(1) * c,
    ),
    "weighted bags": (
        lambda a, b, c: F.embedding_bag(WORDS, b, mode="sum", per_sample_weights=a[:, :2]),
        lambda a, b, c: (b[WORDS] * a[:, :2, None]).sum(1),
    ),
    "hard sigmoid": (lambda a, b, c: F.hardsigmoid(a) * c, lambda a, b, c: F.relu6(a + 3) / 6 * c),
    "layer, shift alone": (
        lambda a, b, c: F.layer_norm(a @ b, (4,), None, b[1], 0.1) * c,
        lambda a, b, c: (F.layer_norm(a @ b, (4,), None, None, 0.1) + b[1]) * c,
    ),
}


def inputs(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    shapes = (3, 4), (4, 4), (4,)
    params, v = ([torch.randn(s, generator=g, dtype=torch.float64) for s in shapes] for _ in range(2))
    return [p.requires_grad_() for p in params], v


def recorded(f: Function, params: list[Tensor], **options: Any) -> tuple[Tape, Tensor]:
    with Tape(params, **options) as tape:
        z = f(*params)
    return tape.close(z), z


def line(f: Function, params: list[Tensor], v: list[Tensor]) -> tuple[Tensor, Tensor]:
    """First and second derivative along v by reverse over reverse of every entry."""

    def along(e: Tensor) -> Tensor:
        return f(*[p.detach() + e * a for p, a in zip(params, v)]).reshape(-1)

    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    first, second = [], []
    for entry in along(e):
        if not entry.requires_grad:
            first.append(torch.zeros(()).to(entry))
            second.append(torch.zeros(()).to(entry))
            continue
        (d,) = torch.autograd.grad(entry, e, create_graph=True, retain_graph=True)
        first.append(d.detach())
        dd = torch.autograd.grad(d, e, retain_graph=True, allow_unused=True)[0] if d.requires_grad else None
        second.append(torch.zeros_like(d) if dd is None else dd)
    return torch.stack(first), torch.stack(second)


def entries(t: Tensor | None, z: Tensor) -> Tensor:
    return torch.zeros_like(z).detach().reshape(-1) if t is None else t.detach().reshape(-1)
