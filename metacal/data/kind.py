"""What a model's training inputs were, so that later inputs are made like them or refused.

Training records facts: type, shape and range of the inputs, and the transform that they went through. Whatever the
model is given afterwards, in validation, evaluation or use, is held against these: the same kind goes through the same
transform, a kind that can be converted without a doubt is converted, and any other is refused by a sentence that names
both. Nothing is guessed from one image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from metacal.data.arrays import as_inputs, as_tensor
from metacal.data.splits import Transform
from metacal.errors import InputError, require
from metacal.inputs import Inputs

__all__ = ["AnyKind", "InputKind", "InputKinds", "Task", "kind_of", "remember", "require_finite", "trained_on"]

_BOXES = ((0.0, 1.0), (-8.0, 8.0))  # where pixels in [0, 1] lie, and where normalised ones do
_NEARLY_ALL = 0.95
_UNLIKELY = 1e-3


@dataclass(frozen=True)
class Task:
    """What a model needs of its data, as far as it is known.

    Attributes:
        n_classes: K; labels must lie in 0..K−1.
        dtype: of its parameters, and so of inputs that are floating point; None: they stay as they are.
        class_names: of the classes 0, 1, ..., where the training labels were names.
        ignore_index: the label of samples that are left out; None: there is none.
        soft: labels that are probabilities (N, K) are wanted as such, and not as the most probable class.
    """

    n_classes: int | None = None
    dtype: torch.dtype | None = None
    class_names: Sequence[str] | None = None
    ignore_index: int | None = None
    soft: bool = False


@dataclass(frozen=True, eq=False)
class InputKind:
    """The kind of inputs that a model was trained on.

    Attributes:
        shape: of one input as it was given, (C, H, W) for images.
        dtype: as it was given: uint8, a floating type, or int64 for tokens.
        transform: from inputs as given to what the model sees; None: they are the same.
        low, high: the range of what the model saw.
        outside: the shares of inputs with a value outside [0, 1], and outside [-8, 8].
        normalised_too: uint8 inputs may also come as floats that went through the transform elsewhere: for a bare
            module, which is a function of those.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    transform: Transform | None
    low: float
    high: float
    outside: tuple[float, ...]
    normalised_too: bool = False

    @classmethod
    def of(cls, inputs: Iterable[Tensor], transform: Transform | None) -> InputKind:
        """The kind of training inputs, given in batches `(n, ...)` as they were before `transform`; at least one."""
        least, largest = [], []
        for x in inputs:
            low, high = _ends(x, transform)
            least.append(low)
            largest.append(high)
        smallest, greatest = torch.cat(least), torch.cat(largest)
        n = len(smallest)
        if transform is not None:  # where inputs come, be it in a process that loads them
            transform = replace(transform, mean=transform.mean.cpu(), std=transform.std.cpu())
        return cls(
            shape=tuple(x.shape[1:]),
            dtype=x.dtype,
            transform=transform,
            low=float(smallest.min()),
            high=float(greatest.max()),
            outside=tuple((int(((smallest < a) | (greatest > b)).sum()) + 0.5) / (n + 1) for a, b in _BOXES),
        )

    def prepare(self, x: Any, name: str, ranged: bool = True) -> Tensor:
        """Inputs `(N, ...)` of this kind as the model takes them, on their device; `name` is theirs, in messages.

        ranged: whether to compare their values with those of training.

        Raises:
            InputError: for inputs of another kind: type, range, layout or shape.
        """
        x = self.accept(x, name, ranged)
        transform = self.transform_of(x)
        return x if transform is None else transform(x)

    def transform_of(self, x: Tensor) -> Transform | None:
        """What takes `x`, which `accept` gave, to what the model sees; None where it is that."""
        return None if x.is_floating_point() and self.dtype == torch.uint8 else self.transform

    def accept(self, x: Any, name: str, ranged: bool = True) -> Tensor:
        """Inputs of this kind as a tensor of the recorded layout and type, before the transform.

        Raises:
            InputError: as `prepare`.
        """
        single = isinstance(x, Mapping) and len(x) == 1
        x = as_tensor(next(iter(x.values())) if single else x, f"{name} inputs")
        require(x.ndim >= 1 and len(x) > 0, f"{name} inputs are empty (shape {tuple(x.shape)})")
        x = self._of_type(self._of_shape(x, name), name)
        if x.is_floating_point():
            require_finite(x, name)
            if ranged:
                self._check_range(x, name)
        return x

    def _of_shape(self, x: Tensor, name: str) -> Tensor:
        shape, given = self.shape, tuple(x.shape)
        if self.dtype == torch.uint8 and shape[:1] == (1,) and x.ndim == 3:
            x = x[:, None]  # grey images, as training takes them
        hint = ""
        if given == shape:
            hint = "; one input alone needs a batch dimension: x[None]"
        elif len(shape) == 3 and x.ndim == 4 and x.shape[1] != shape[0] and x.shape[3] == shape[0]:
            hint = "; use x.permute(0, 3, 1, 2)"
        fits = x.ndim == len(shape) + 1
        if len(shape) == 3:
            fits = fits and x.shape[1] == shape[0]  # sides may differ: the model says which it takes
        elif len(shape) == 1 and self.dtype.is_floating_point:
            fits = fits and x.shape[1] == shape[0]
        wanted = ", ".join(["N", *map(str, shape)])
        require(fits, f"{name} inputs have shape {given}, and the model was trained on ({wanted}){hint}")
        return x

    def _of_type(self, x: Tensor, name: str) -> Tensor:
        """`x` with the recorded type, where its values mean the same in it."""
        given = x.dtype
        if self.dtype == torch.bool:
            require(given == torch.bool, f"{name} inputs are {_shown(x)}, and the model was trained on bools")
            return x
        if self.dtype == torch.uint8:
            if given == torch.uint8 or (x.is_floating_point() and self.normalised_too):
                return x
            require(
                given == torch.int64 and int(x.min()) >= 0 and int(x.max()) <= 255,
                f"{name} inputs are {_shown(x)}, and the model was trained on uint8 images, which it normalises "
                f"itself: give these{_as_bytes(x)}",
            )
            return x.to(torch.uint8)
        if self.dtype == torch.int64:
            require(
                given in (torch.int64, torch.uint8),
                f"{name} inputs are {_shown(x)}, and the model was trained on integers; use x.long() if they are",
            )
            return x.to(torch.int64)
        bytes_alike = self.low >= 0 and 2 < self.high <= 255 and self.transform is None
        require(
            x.is_floating_point() or given == torch.int64 or (given == torch.uint8 and bytes_alike),
            f"{name} inputs are {_shown(x)}, and the model was trained on {self._shown()}: make them from these bytes "
            "as the training inputs were made" + (", by x.float() / 255" if self.low >= 0 and self.high <= 1 else ""),
        )
        return x if x.is_floating_point() else x.to(torch.get_default_dtype())

    def _check_range(self, x: Tensor, name: str) -> None:
        """Refuse values far beyond those of training, and images in a box that nearly none was in there.

        Far is beyond the range of training by more than its width for images, by more than ten times that for others. A
        box says another scale where so few training images lie in it that N of them together would be a wonder.
        """
        transform = self.transform_of(x)
        x = x if transform is None else transform(x)
        image = len(self.shape) == 3
        low, high = float(x.min()), float(x.max())
        reach = (self.high - self.low) * (1 if image else 10)
        strange = reach > 0 and not self.low - reach <= low <= high <= self.high + reach
        for (a, b), share in zip(_BOXES, self.outside):
            boxed = image and a <= low < high <= b
            strange |= boxed and share > _NEARLY_ALL and (1 - share) ** len(x) < _UNLIKELY
        require(
            not strange,
            f"{name} inputs lie in [{low:.4g}, {high:.4g}], and the model was trained on {self._shown()}: scale them "
            "as the training inputs were scaled",
        )

    def _shown(self) -> str:
        if self.dtype == torch.uint8:
            return f"uint8 images, normalised to [{self.low:.4g}, {self.high:.4g}]"
        return f"{str(self.dtype).removeprefix('torch.')} in [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True, eq=False)
class InputKinds:
    """The kinds of the several tensors that a model was trained on, each the argument of its forward by that key."""

    kinds: Mapping[str | int, InputKind]
    transform: None = None
    dtype: None = None
    normalised_too: bool = False

    def accept(self, x: Any, name: str, ranged: bool = True) -> Inputs:
        """Inputs of these kinds. Raises `InputError` for other arguments, or for one of another kind."""
        x = as_inputs(x, f"{name} inputs", by_place=True)
        given = list(x.tensors) if isinstance(x, Inputs) else None
        require(
            given is not None and set(given) == set(self.kinds),
            f"{name} inputs must hold {', '.join(map(repr, self.kinds))}, as those that the model was trained on, got "
            f"{'one tensor' if given is None else ', '.join(map(repr, given))}",
        )
        return Inputs({key: k.accept(x.tensors[key], f"{name} {key!r}", ranged) for key, k in self.kinds.items()})

    prepare = accept

    def transform_of(self, x: Inputs) -> None:
        """Several tensors go to the model as they are."""


AnyKind = InputKind | InputKinds


def kind_of(inputs: Iterable[Tensor | Inputs], transform: Transform | None) -> AnyKind:
    """As `InputKind.of`, for inputs of several tensors too."""
    batches: list[Any] = list(inputs)
    if not isinstance(batches[0], Inputs):
        return InputKind.of(batches, transform)
    return InputKinds({key: InputKind.of([x.tensors[key] for x in batches], None) for key in batches[0].tensors})


def _ends(x: Tensor, transform: Transform | None) -> tuple[Tensor, Tensor]:
    """The least and the largest value of every input, (n,), in what the model sees of it."""
    if transform is None:
        values = x.reshape(len(x), -1)
        return values.amin(1), values.amax(1)
    channels = x.reshape(*x.shape[:2], -1)
    # The transform increases, so the ends of a channel are the ends of what it becomes.
    return transform(channels.amin(2)).amin(1), transform(channels.amax(2)).amax(1)


def _shown(x: Tensor) -> str:
    kind = str(x.dtype).removeprefix("torch.")
    return f"{kind} in [{float(x.min()):.4g}, {float(x.max()):.4g}]"


def _as_bytes(x: Tensor) -> str:
    """How such values become bytes, for messages."""
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 255 or x.dtype == torch.bool:
        return ", not what a transform of your own made of them"
    return ", by (255 * x).round().to(torch.uint8)" if high <= 1 else ", by x.round().to(torch.uint8)"


def require_finite(x: Tensor, name: str) -> None:
    """Raise `InputError` naming the first of the inputs `(N, ...)` that has a NaN or an infinite value."""
    bad = ~torch.isfinite(x.flatten(1) if x.ndim > 1 else x[:, None]).all(1)
    if bool(bad.any()):
        raise InputError(
            f"{name} inputs have NaN or infinite values in {int(bad.sum())} samples, the first at index "
            f"{int(bad.int().argmax())}"
        )


_TRAINED: WeakKeyDictionary[nn.Module, tuple[AnyKind, Task]] = WeakKeyDictionary()


def remember(model: nn.Module, kind: AnyKind, task: Task) -> None:
    """Keep, for as long as `model` lives, what it was trained on."""
    _TRAINED[model] = replace(kind, normalised_too=True), task


def trained_on(model: Any) -> tuple[AnyKind, Task] | None:
    """What `model`, or the module that it wraps as `net`, was trained on in this process; None where nobody knows."""
    for module in (model, getattr(model, "net", None)):
        if isinstance(module, nn.Module) and module in _TRAINED:
            return _TRAINED[module]
    return None
