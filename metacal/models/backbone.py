"""From any classifier to `(logits, features)`: the features are what its last Linear layer receives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metacal.errors import InputError
from metacal.inputs import held_logits, logits_in

__all__ = ["Backbone"]


class Backbone(nn.Module):
    """`net` with its penultimate features: `forward(x) -> (logits (N, K), features (N, D))`.

    What `forward` is given, `net` is given. A head of one output z, which `net` may return as (N,), is one of two
    classes: logits are (0, z).

    Features are the input of the head, the Linear layer that makes the logits: `logits = features @ W.T + b`.
    The head is the last Linear layer that `net` registers, or the one named by `head`, as in
    `net.named_modules()`. Every forward pass checks that the head's output *is* what `net` returns, or what that holds
    as `logits`.

    `net` stays as it is: its state-dict keys, its class and its hooks. The features are caught by a hook that
    lives only during the forward pass, so nothing of a pass, and no graph, outlives it; copies, pickles,
    `torch.func.functional_call` and forward- or reverse-mode transforms see an ordinary module.

    Raises `InputError` when `net` has no Linear layer, `head` names none, or the logits are not the head's
    output.

    Examples:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
        >>> logits, features = Backbone(net)(torch.zeros(2, 3, 2, 2))
        >>> logits.shape, features.shape
        (torch.Size([2, 3]), torch.Size([2, 5]))
    """

    def __init__(self, net: nn.Module, head: str | None = None) -> None:
        super().__init__()
        linear = _linear_layers(net)
        if not linear:
            raise InputError(
                f"model {type(net).__name__} has no Linear layer, so its penultimate features are not defined; "
                "end it with a torch.nn.Linear that makes the logits"
            )
        if head is not None and head not in linear:
            raise InputError(f"head must name a Linear layer of the model, got {head!r}; it has {_listed(linear)}")
        self.net = net
        self.head_name = head if head is not None else next(reversed(linear))

    @property
    def head(self) -> nn.Linear:
        """The Linear layer that makes the logits."""
        return self.net.get_submodule(self.head_name)  # type: ignore[return-value]

    @property
    def in_features(self) -> int:
        """D, the number of features."""
        return self.head.in_features

    @property
    def n_classes(self) -> int:
        """K, the number of classes: that of the head's outputs, 2 for one output."""
        return max(2, self.head.out_features)

    def forward(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Logits `(N, K)` and features `(N, D)` of a batch."""
        seen: list[tuple[Tensor, Tensor]] = []

        def catch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen.append((args[0], output))

        hook = self.head.register_forward_hook(catch)
        try:
            return self._run(seen, inputs, named)
        finally:
            hook.remove()

    def _run(
        self, seen: list[tuple[Tensor, Tensor]], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        # A function of its own, so that torch.compile, which cannot trace the making of a hook, has the net in one
        # frame, and that frame in one graph.
        logits = held_logits(self.net(*inputs, **named))
        if not seen or not (seen[-1][1] is logits or _is_squeezed(logits, seen[-1][1])):
            self._explain(logits, inputs, named)
        return logits_in(logits), seen[-1][0].flatten(1)

    def extra_repr(self) -> str:
        return f"head={self.head_name!r}"

    def _explain(self, logits: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise the error for a head that does not make the logits, naming the layer that does, if one does."""
        name = type(self.net).__name__
        if not isinstance(logits, Tensor):
            raise InputError(f"model {name} must return a tensor of logits, got {type(logits).__name__}")
        makers = []
        hooks = [
            layer.register_forward_hook(lambda _m, _a, output, n=n: makers.append((n, output)))
            for n, layer in _linear_layers(self.net).items()
        ]
        try:
            with torch.no_grad():
                logits = held_logits(self.net(*inputs, **named))
        finally:
            for hook in hooks:
                hook.remove()
        remedy = "the model must return the output of its last Linear layer, unchanged"
        for layer, output in reversed(makers):
            if output is logits:
                remedy = f"they come from {layer!r}: pass head={layer!r}"
                break
        raise InputError(f"the logits of model {name} are not the output of its layer {self.head_name!r}; {remedy}")


def _is_squeezed(logits: Any, output: Tensor) -> bool:
    """Whether `logits` (N,) are the only column of a layer's output (N, 1)."""
    one = isinstance(logits, Tensor) and output.ndim == 2 and output.shape[1] == 1 and logits.shape == output.shape[:1]
    return one and torch.equal(logits.detach(), output.detach()[:, 0])


def _linear_layers(net: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}


def _listed(names: dict[str, nn.Linear]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[-10:])
    return shown if len(names) <= 10 else f"..., {shown}"
