"""torchvision's classification models, made to fit small images and any number of channels."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from metacal.errors import InputError, require
from metacal.models.layers import check_image_shape

__all__ = ["PREFIX", "torchvision_net"]

PREFIX = "torchvision/"
_SMALL = 64  # up to this side the stem is the small one
_FIRST_POOLS = ("maxpool", "maxpool1", "features.pool0")


def torchvision_net(name: str, n_classes: int, input_shape: tuple[int, ...], *, stem: str | None = None) -> nn.Module:
    """torchvision's model `name`, untrained, for images `(N, C, H, W) -> (N, K)`.

    `stem`: `original`, or `small` (the default up to 64 pixels a side), which halves the images less often:

    - convolutional stems (resnet, resnext, densenet, regnet, mobilenet, efficientnet, googlenet, ...): the
      first convolution becomes 3x3 with stride 1, and a max-pool right behind it is dropped;
    - patch stems (convnext, swin): patches of 4 become patches of 2;
    - vit_*: patches of 16 or more become patches of 4, with as many positions as that makes.

    Either way the first convolution takes C channels, and nothing works in place. The aux heads of googlenet
    and inception are left out.

    Raises `InputError` for an unknown name, and for images that the model cannot take.
    """
    import torchvision.models  # over a second to import

    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names[:8])}, ..."
        raise InputError(f"torchvision has no classification model {name!r}; {hint}")
    channels, height, width = check_image_shape(PREFIX + name, input_shape)
    require(stem in (None, "small", "original"), f"model.stem must be small or original, got {stem!r}")
    small = max(height, width) <= _SMALL if stem is None else stem == "small"

    options: dict[str, Any] = {"weights": None, "num_classes": n_classes}
    patch = 4 if small else None
    if name.startswith(("googlenet", "inception")):
        options.update(aux_logits=False, init_weights=True)
    if name.startswith(("vit", "maxvit")):
        require(height == width, f"model {PREFIX}{name} needs square images, got {height}x{width}")
    if name.startswith("vit"):
        # Built for an image that makes as many of its own patches as ours makes small ones.
        own = int(name.rsplit("_", 1)[1])
        options["image_size"] = height if patch is None else own * (height // patch)
    if name.startswith("maxvit"):
        options["input_size"] = (height, width)
    try:
        net = torchvision.models.get_model(name, **options)
        if name.startswith("vit") and patch is not None:
            net.image_size, net.patch_size = height, patch
            net.conv_proj = _conv_like(net.conv_proj, channels, patch, patch, 0)
        else:
            _adapt_stem(net, channels, small)
        for layer in net.modules():
            if getattr(layer, "inplace", False) is True:
                layer.inplace = False
        net.eval()
        with torch.no_grad():
            logits = net(torch.zeros(2, channels, height, width))
    except InputError:
        raise
    except Exception as error:
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model {PREFIX}{name} cannot take images of shape {tuple(input_shape)} with stem "
            f"{'small' if small else 'original'}: {what}"
        ) from error
    require(logits.shape == (2, n_classes), f"model {PREFIX}{name} does not return logits (N, {n_classes})")
    return net.train()


def _adapt_stem(net: nn.Module, channels: int, small: bool) -> None:
    """Replace the first convolution by one for `channels`, and by a gentler one if `small`."""
    path, conv = next((p, m) for p, m in net.named_modules() if isinstance(m, nn.Conv2d))
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    if not small or stride == 1:
        if channels == conv.in_channels:
            return
        new = _conv_like(conv, channels, kernel, stride, int(conv.padding[0]))
    elif kernel == stride:
        new = _conv_like(conv, channels, stride // 2, stride // 2, 0)
    else:
        new = _conv_like(conv, channels, 3, 1, 1)
    _set(net, path, new)
    if small and stride > 1:
        for pool in _FIRST_POOLS:
            if isinstance(_get(net, pool), nn.MaxPool2d):
                _set(net, pool, nn.Identity())


def _conv_like(conv: nn.Conv2d, channels: int, kernel: int, stride: int, padding: int) -> nn.Conv2d:
    bias = conv.bias is not None
    new = nn.Conv2d(channels, conv.out_channels, kernel, stride=stride, padding=padding, bias=bias)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    return new


def _get(net: nn.Module, path: str) -> nn.Module | None:
    try:
        return net.get_submodule(path)
    except AttributeError:
        return None


def _set(net: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(net.get_submodule(parent), name, new)
