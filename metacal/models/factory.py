"""A model by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from weakref import WeakKeyDictionary

from torch import nn

from metacal.errors import InputError, did_you_mean, require
from metacal.models.densenet import densenet
from metacal.models.options import ModelConfig
from metacal.models.resnet import resnet, wide_resnet
from metacal.models.small import cnn, mlp
from metacal.models.torchvision_nets import PREFIX, torchvision_net
from metacal.models.vit import vit

__all__ = ["Architecture", "architecture_of", "build_model", "model_names"]

# Name -> function (n_classes, input_shape, *, options) -> module. The options are the ModelConfig keys that it takes.
_MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    **{f"resnet{depth}": partial(resnet, depth) for depth in (20, 32, 44, 56, 110)},
    "wide_resnet": wide_resnet,
    "densenet": densenet,
    "vit": vit,
}


def model_names() -> list[str]:
    """The names that `build_model` knows, besides `torchvision/<name>`."""
    return list(_MODELS)


def build_model(cfg: ModelConfig, n_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """The model that `cfg` describes, for inputs `(N, *input_shape)` and logits `(N, n_classes)`.

    Weights are drawn from torch's global generator: for given weights, call this inside
    `torch.random.fork_rng` after `torch.manual_seed`.

    Raises `InputError` for an unknown name, an option that the model does not have, or inputs that it cannot
    take.
    """
    require(n_classes >= 2, f"n_classes must be >= 2, got {n_classes}")
    name = cfg.name
    if name.startswith(PREFIX):
        build: Callable[..., nn.Module] = partial(torchvision_net, name.removeprefix(PREFIX))
    elif name in _MODELS:
        build = _MODELS[name]
    else:
        hint = did_you_mean(name, _MODELS)
        raise InputError(f"model.name must be one of {', '.join(_MODELS)}, {PREFIX}<name>, got {name!r}{hint}")
    known = [p.name for p in inspect.signature(build).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    options = {}
    for field in fields(ModelConfig):
        value = getattr(cfg, field.name)
        if field.name == "name" or value is None:
            continue
        require(
            field.name in known,
            f"model {name} has no option {field.name} (set to {value!r}); it has {', '.join(known)}",
        )
        options[field.name] = tuple(value) if field.name == "hidden" else value
    net = build(n_classes, tuple(input_shape), **options)
    _BUILT[net] = Architecture(replace(cfg), n_classes, tuple(input_shape))
    return net


@dataclass(frozen=True)
class Architecture:
    """How `build_model` made a network: its arguments."""

    config: ModelConfig
    n_classes: int
    input_shape: tuple[int, ...]


_BUILT: WeakKeyDictionary[nn.Module, Architecture] = WeakKeyDictionary()


def architecture_of(net: nn.Module) -> Architecture | None:
    """How `net` can be made again, if `build_model` made it in this process; None for any other network."""
    return _BUILT.get(net)
