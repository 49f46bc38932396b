"""Whether a network tells its backward pass something else than its values say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from metacal.autodiff.exposed import opened
from metacal.autodiff.jets import tensors

__all__ = ["Alterations", "Cuts"]

_REGISTERING: dict[Any, str] = {
    Tensor.register_hook: "registers a hook on the gradient of a value",
    Tensor.register_post_accumulate_grad_hook: "registers a hook on the gradient of a parameter",
    # also where torch itself attaches the backward hooks of modules
    Tensor.grad_fn.__get__: "reads the graph of a value (grad_fn), where hooks on gradients are registered",  # type: ignore[union-attr]
}
_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch >= 2.8


class Alterations:
    """What of the calls of a forward pass changes gradients and no value.

    Attributes: `how`, in words that follow "model"; None: nothing that was seen.
    """

    def __init__(self) -> None:
        self.how: str | None = None
        self._known: Any = None  # hooks that give back what they store

    def see(self, func: Any, values: Iterable[Any]) -> None:
        """Note a call of `func` on `values`, or for None what is in force outside of any call."""
        if self.how is None:
            self.how = _REGISTERING.get(func) or self._stored(values)

    def _stored(self, values: Iterable[Any]) -> str | None:
        hooks = None if _saved_tensors_hooks is None else _saved_tensors_hooks(True)
        if hooks is None or hooks == self._known:
            return None
        # torch's own, of checkpoints and of memory of the CPU, give back what they store; so may others
        if not str(getattr(hooks[0], "__module__", "")).startswith(("torch.", "metacal.")):
            value = next((t.detach() for t in tensors(values) if t.is_floating_point()), None)
            if value is None:
                return None
            if not torch.equal(value, hooks[1](hooks[0](value))):
                return "stores what its backward pass needs in a form of its own (saved_tensors_hooks)"
        self._known = hooks
        return None


_SHAPE_ONLY = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip


class Cuts(TorchFunctionMode):
    """Inside `with Cuts() as cuts: z = model(x)`, follows what `detach`, `.data` and `no_grad` made of values with a
    graph, within functions of torch.nn.functional too; `cuts.reach(z)` says whether z was computed from any of it, and
    `cuts.altered` how it changes gradients and no value, or None.

    A backward pass takes such values as constants and runs such hooks, a difference of two forward passes does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alterations = Alterations()
        self._cut: Any = WeakTensorKeyDictionary()  # whether it had a graph when it was made
        self._open: list[Any] = []  # functions whose parts are being followed: one that calls itself has no parts

    @property
    def altered(self) -> str | None:
        return self._alterations.how

    def reach(self, z: Tensor) -> bool:
        # a value made without a graph that has one now came out of an autograd Function, whose derivative is its own
        return z in self._cut and (self._cut[z] or not z.requires_grad)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._alterations.see(func, (*args, *kwargs.values()))
        if func not in _REGISTERING and func not in self._open and (parts := opened(func)) is not None:
            self._open.append(func)
            try:
                with self:
                    return parts(*args, **kwargs)
            finally:
                self._open.pop()
        inputs = list(tensors((*args, *kwargs.values())))
        graph = any(t.requires_grad for t in inputs)
        result = func(*args, **kwargs)
        if func in _SHAPE_ONLY:
            return result
        constant = not torch.is_grad_enabled() or func in (Tensor.detach, Tensor.detach_, Tensor.data.__get__)  # type: ignore[attr-defined]
        if (graph and constant) or any(self.reach(t) for t in inputs):
            for t in tensors((result,)):
                if t.is_floating_point() or t.is_complex():  # a comparison has no derivative either way
                    self._cut[t] = t.requires_grad
        return result
