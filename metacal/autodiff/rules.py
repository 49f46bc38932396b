"""Which function of PyTorch carries a derivative along a direction by which rule (`jets`).

`RULES` goes by the function that PyTorch hands to a mode. In-place forms are carried out of place. Functions written in
Python need no entry: a tape opens them (`exposed.opened`) and sees what they call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metacal import ranks
from metacal.autodiff import arithmetic, attention, norms, reductions
from metacal.autodiff.activations import BY_INPUT, BY_RESULT
from metacal.autodiff.exposed import opened
from metacal.autodiff.jets import Rule
from metacal.autodiff.kinds import (
    by_reverse_passes,
    elementwise,
    jointly_linear,
    layer,
    linear,
    multilinear,
    shaped_like,
)
from metacal.autodiff.plain import mean_square

__all__ = ["RULES", "needs_old_value"]

OWNERS = (torch, torch._C._VariableFunctions, Tensor, torch._C.TensorBase, torch._C._nn, F, torch.linalg, torch.special)
APART, IN_PLACE = ("{}", "__{}__"), ("{}_", "__i{}__")


def _forms(names: str, forms: tuple[str, ...] = APART + IN_PLACE) -> Iterator[Any]:
    """The functions of these names in PyTorch's modules and as methods, as operators, and in place.

    Those that are written in Python are left out: what they call is looked up instead.
    """
    for name in names.split():
        module, _, last = name.rpartition(".")
        for owner in (operator.attrgetter(module)(torch),) if module else OWNERS:
            for form in forms:
                function = getattr(owner, form.format(last), None)
                if callable(function) and opened(function) is None:
                    yield function


LINEAR = """
    flatten unflatten reshape permute transpose swapaxes swapdims t adjoint movedim moveaxis squeeze unsqueeze expand
    broadcast_to repeat tile repeat_interleave contiguous clone to float double half bfloat16 getitem select narrow
    unbind chunk unsafe_chunk split unsafe_split split_with_sizes tensor_split hsplit vsplit dsplit flip fliplr flipud
    rot90 roll mean sum neg negative positive cumsum trace tril triu diagonal diag diag_embed index_select gather take
    take_along_dim masked_select unfold avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle im2col col2im
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa real imag view_as_real view_as_complex conj resolve_conj resolve_neg
    fft.fft fft.ifft fft.rfft fft.irfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.fftn fft.ifftn fft.rfftn fft.irfftn
    fft.fftshift fft.ifftshift
"""
BY_REVERSE_PASSES = """
    prod cumprod logcumsumexp logaddexp atan2 hypot xlogy tan asin acos atan sinh cosh asinh acosh atanh erfc exp2 log2
    log10 logit matrix_exp inverse det logdet slogdet cholesky linalg.inv linalg.solve linalg.det linalg.slogdet
    linalg.cholesky linalg.householder_product linalg.matrix_exp linalg.solve_triangular linalg.multi_dot
    linalg.qr cosine_similarity pairwise_distance bilinear copysign corrcoef cov cross diff digamma dist erfinv
    float_power fmax fmin fmod frac lgamma logaddexp2 nan_to_num nanmean nansum quantile nanquantile remainder sinc
"""


def _linear_functions() -> dict[Any, Rule]:
    properties = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag)
    joint = {
        "cat concat concatenate stack": ("tensors dim", "tensors"),
        "hstack vstack dstack column_stack": ("tensors", "tensors"),
        "scatter_add": ("input dim index src", "input src"),
        "index_add": ("input dim index source", "input source"),
        "masked_scatter": ("input mask source", "input source"),
        "select_scatter": ("input src dim index", "input src"),
        "slice_scatter": ("input src dim start end step", "input src"),
    }
    return {
        **{f: linear(f) for f in _forms(LINEAR, APART)},
        **{getattr(Tensor, f"{f}_"): linear(getattr(Tensor, f)) for f in ("unsqueeze", "squeeze", "t", "transpose")},
        **{f.__get__: linear(f.__get__) for f in properties},  # type: ignore[attr-defined]
        **dict.fromkeys(_forms("view view_as reshape_as ravel", APART), shaped_like),  # an expanded jet has no view
        Tensor.unflatten: shaped_like,  # in Python, around a method that goes by the same name
        **dict.fromkeys(_forms("expand_as type_as", APART), arithmetic.expanded),
        F.pad: linear(arithmetic.zero_padded),
        **{
            f: jointly_linear(getattr(torch, name), *signature)
            for names, signature in joint.items()
            for name in names.split()
            for f in _forms(name)
        },
        **dict.fromkeys(_forms("scatter"), jointly_linear(arithmetic.scattered, "input dim index src", "input src")),
        **dict.fromkeys(
            _forms("index_copy"), jointly_linear(arithmetic.index_copied, "input dim index source", "input source")
        ),
        ranks.summed: linear(ranks.summed),
        torch.where: arithmetic.where(torch),
        Tensor.where: arithmetic.where(Tensor),
        Tensor.__setitem__: arithmetic.assigned,
        Tensor.copy_: arithmetic.copied,
        **dict.fromkeys(_forms("zero fill", IN_PLACE), arithmetic.constant),
        **dict.fromkeys(_forms("masked_fill"), arithmetic.masked),
        **dict.fromkeys(_forms("add radd"), arithmetic.weighted_sum(1)),
        **dict.fromkeys(_forms("sub subtract"), arithmetic.weighted_sum(-1)),
        **dict.fromkeys(_forms("rsub"), arithmetic.weighted_sum(-1, reverse=True)),
        **dict.fromkeys(_forms("lerp"), arithmetic.lerp),
        **dict.fromkeys(_forms("embedding", APART), arithmetic.embedding),
        torch.embedding_bag: arithmetic.embedding_bag,
        torch.native_dropout: arithmetic.native_dropout,
    }


def _products() -> dict[Any, Rule]:
    layers = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    return {
        **dict.fromkeys(_forms("mul multiply rmul"), multilinear(torch.mul)),
        **dict.fromkeys(_forms("div divide truediv true_divide"), arithmetic.quotient),
        **dict.fromkeys(_forms("matmul mm bmm mv", APART), multilinear(torch.matmul)),
        **{
            f: multilinear(getattr(torch, name))
            for name in ("dot", "vdot", "inner", "outer", "ger", "kron", "tensordot")
            for f in _forms(name, APART)
        },
        torch._C._VariableFunctions.tensordot: multilinear(torch._C._VariableFunctions.tensordot),  # type: ignore[attr-defined]
        torch.einsum: multilinear(torch.einsum, None),
        **{f: layer(f) for f in layers},
        **dict.fromkeys(_forms("addmm addmv baddbmm"), arithmetic.plus_product(torch.matmul, 2)),
        **dict.fromkeys(_forms("addr"), arithmetic.plus_product(torch.outer, 2)),
        **dict.fromkeys(_forms("addcmul"), arithmetic.plus_product(torch.mul, 2)),
        **dict.fromkeys(_forms("addcdiv"), arithmetic.plus_product(torch.div, 2, inverse=True)),
        **dict.fromkeys(_forms("prelu", APART), arithmetic.prelu),
        **dict.fromkeys(_forms("glu", APART), arithmetic.gated),
        **dict.fromkeys(_forms("pow"), arithmetic.power),
        **dict.fromkeys(_forms("batch_norm", APART), norms.batch_norm),
        **dict.fromkeys(_forms("layer_norm", APART), norms.layer_norm),
        **dict.fromkeys(_forms("group_norm", APART), norms.group_norm),
        **dict.fromkeys(_forms("instance_norm", APART), norms.instance_norm),
        **dict.fromkeys(_forms("rms_norm", APART), norms.rms_norm),
        torch._weight_norm: norms.weight_norm,
        attention.fused_attention: attention.attention_rule,
        torch._scaled_dot_product_attention_math: attention.attention_with_dropout_rule,
    }


def _reductions() -> dict[Any, Rule]:
    deviation, spread = reductions.standard_deviation, reductions.variance
    return {
        mean_square: reductions.mean_square_rule,
        **dict.fromkeys(_forms("var", APART), spread),
        **dict.fromkeys(_forms("std", APART), deviation),
        **dict.fromkeys(_forms("var_mean", APART), reductions.with_mean(spread)),
        **dict.fromkeys(_forms("std_mean", APART), reductions.with_mean(deviation)),
        torch.linalg.vector_norm: reductions.vector_norm,
        torch.linalg.norm: reductions.norm,
        **dict.fromkeys(_forms("softmax", APART), attention.softmax),
        **dict.fromkeys(_forms("log_softmax", APART), attention.log_softmax),
        **dict.fromkeys(_forms("logsumexp", APART), attention.logsumexp),
        **dict.fromkeys(_forms("amax", APART), reductions.extreme(torch.amax)),
        **dict.fromkeys(_forms("amin", APART), reductions.extreme(torch.amin)),
        **dict.fromkeys(_forms("max", APART), reductions.maximum_or_entries(torch.amax, 1)),
        **dict.fromkeys(_forms("min", APART), reductions.maximum_or_entries(torch.amin, -1)),
        **dict.fromkeys(_forms("maximum", APART), reductions.maximum(1)),
        **dict.fromkeys(_forms("minimum", APART), reductions.maximum(-1)),
        **dict.fromkeys(_forms("median mode cummax cummin", APART), reductions.selected("input dim keepdim")),
        **dict.fromkeys(_forms("kthvalue", APART), reductions.selected("input k dim keepdim")),
        **dict.fromkeys(_forms("topk", APART), reductions.selected("input k dim largest sorted")),
        **dict.fromkeys(_forms("sort msort", APART), reductions.selected("input dim descending stable")),
        **{
            getattr(F, f"{kind}max_pool{dims}d_with_indices"): reductions.chosen_by_pooling(dims)
            for dims in (1, 2, 3)
            for kind in ("", "adaptive_")
        },
    }


RULES: dict[Any, Rule] = {
    **{f: by_reverse_passes(f) for f in _forms(BY_REVERSE_PASSES, APART)},
    **{
        getattr(torch, name): arithmetic.recurrent(getattr(torch, name))
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
    },
    **{f: elementwise(slopes, True) for name, slopes in BY_RESULT.items() for f in _forms(name)},
    **{f: elementwise(slopes, False) for name, slopes in BY_INPUT.items() for f in _forms(name)},
    **dict.fromkeys(_forms("relu"), arithmetic.relu),
    **dict.fromkeys(_forms("leaky_relu"), arithmetic.leaky_relu),
    **_linear_functions(),
    **_products(),
    **_reductions(),
}

_READS_FIRST = set(_forms(" ".join(BY_INPUT), IN_PLACE))
_READS_FIRST_OF_TWO = set(_forms("mul multiply div divide truediv true_divide", IN_PLACE))


def needs_old_value(func: Any, args: Any) -> bool:
    """Whether this call works in place on a first argument whose old value its rule reads."""
    if func in _READS_FIRST_OF_TWO:
        return any(isinstance(a, Tensor) and a.requires_grad for a in args[1:])
    return func in _READS_FIRST
