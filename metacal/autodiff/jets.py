"""How functions of PyTorch carry derivatives along a direction; `rules` says which of them does it how.

Along the line θ + εv every intermediate value is a(ε) = a + ε a₁ + ½ε² a₂ + …; write (a₁, a₂) for its *jet*. A linear
operation applies to both parts; a bilinear one (layers, products) and an elementwise one give

    (A B)₁ = A₁B + A B₁     (A B)₂ = A₂B + 2 A₁B₁ + A B₂     φ(a)₁ = φ'a₁     φ(a)₂ = φ'a₂ + φ''a₁²

A *rule* gets the arguments of one call and its result, tensors as `Operand`s, and returns what computes the result's
jet in a `Run`; it raises NotImplementedError for a call that it does not cover. What it keeps of an operand's value
stays in memory with the tape: it keeps only what it will read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ZERO",
    "Jet",
    "Operand",
    "Part",
    "Push",
    "Rule",
    "Run",
    "added",
    "bare",
    "bound",
    "each",
    "like",
    "moving",
    "operands",
    "product_jet",
    "tensors",
    "total",
]

Part = Any  # a derivative: a tensor, or a tuple of them for a function with several results; None is zero
Jet = tuple[Part, Part]  # (first, second derivative)
ZERO: Jet = (None, None)


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor as an argument: its value, and the number of its jet (None: it does not depend on the parameters)."""

    tensor: Tensor
    version: int
    slot: int | None

    @property
    def moves(self) -> bool:
        return self.slot is not None

    @property
    def intact(self) -> bool:
        return self.tensor._version == self.version


class Run:
    """One walk along a tape: the jets so far, and the values that the rules ask for.

    params: the tensors whose jets are the first ones; at: their values, where they are no longer those of the pass.
    """

    def __init__(
        self, v: Sequence[Tensor | None], second: bool, params: Sequence[Tensor], at: Sequence[Tensor] | None
    ) -> None:
        self.second = second
        self.jets: dict[int, Jet] = {i: (a, None) for i, a in enumerate(v)}
        self._params, self._at = params, at

    def jet(self, x: Any) -> Jet:
        """Of an operand; zero for whatever does not depend on the parameters."""
        return self.jets[x.slot] if isinstance(x, Operand) and x.slot is not None else ZERO

    def value(self, x: Any) -> Any:
        """What the pass had in place of x: an operand, a list or mapping of them, or something else, which stays."""
        if isinstance(x, Operand):
            return self._tensor(x)
        if isinstance(x, (list, tuple)):
            return like(x, [self.value(v) for v in x])
        return {k: self.value(v) for k, v in x.items()} if isinstance(x, dict) else x

    def _tensor(self, x: Operand) -> Tensor:
        if self._at is not None and x.slot is not None and x.slot < len(self._params):
            return self._at[x.slot]
        if x.intact:
            return x.tensor
        if self._at is not None:
            # memory that an optimizer has written to: a view of a parameter, as of the old one
            for p, old in zip(self._params, self._at):
                if lies_in(x.tensor, p) and old.stride() == p.stride():
                    offset = old.storage_offset() + x.tensor.storage_offset() - p.storage_offset()
                    return old.as_strided(x.tensor.shape, x.tensor.stride(), offset)
        raise NotImplementedError("a value that a derivative needs was overwritten in place")


def like(sequence: list[Any] | tuple[Any, ...], entries: list[Any]) -> list[Any] | tuple[Any, ...]:
    """Entries in a list or in a tuple: an index makes a difference between them."""
    return entries if isinstance(sequence, list) else tuple(entries)


def lies_in(view: Tensor, whole: Tensor) -> bool:
    """Whether the entries of `view` are among those of `whole`, which is dense."""
    if view.dtype != whole.dtype or view.numel() == 0 or whole.numel() == 0:
        return False
    if view.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return False
    first = view.storage_offset() - whole.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(view.shape, view.stride()))
    return bool(first >= 0 and last < whole.numel())


Push = Callable[[Run], Jet]
Rule = Callable[[Any, Any, Any], Push]  # (arguments, keywords, result), tensors as `Operand`s

NOTHING = torch.empty(0)


def bare(x: Any) -> Any:
    """The operand without its value, which a rule that does not read it would otherwise keep alive."""
    return Operand(NOTHING, 0, x.slot) if isinstance(x, Operand) else x


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def operands(values: Iterable[Any]) -> Iterator[Operand]:
    """All operands in nested lists."""
    for value in values:
        if isinstance(value, Operand):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from operands(value)


def moving(values: Any) -> bool:
    """Whether anything in nested lists and mappings depends on the parameters."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return any(moving(v) for v in values)
    return isinstance(values, Operand) and values.moves


def bound(names: str, args: Sequence[Any], kwargs: Mapping[str, Any], **defaults: Any) -> list[Any]:
    """The values of the arguments `names` (separated by spaces), given by position or by name, else their default."""
    order = names.split()
    if len(args) > len(order) or not set(kwargs) <= set(order):
        raise NotImplementedError("unknown arguments")
    values = defaults | dict(zip(order, args)) | dict(kwargs)
    return [values.get(n) for n in order]


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum of those that are not zero."""
    result: Tensor | None = None
    for term in terms:
        if term is not None:
            result = term if result is None else result + term
    return result


def each(f: Callable[[Tensor], Any], jet: Jet) -> Jet:
    """A linear function of one tensor."""
    first, second = jet
    return (None if first is None else f(first)), (None if second is None else f(second))


def product_jet(f: Callable[..., Tensor], values: Sequence[Any], jets: Sequence[Jet], second: bool) -> Jet:
    """The jet of f(a, b, …), linear in each argument: Σ f(a₁, b, …), and Σ f(a₂, b, …) + 2 Σ f(a₁, b₁, …).

    A value whose partners all stand still is not read, and may be missing.
    """

    def term(**replaced: Tensor) -> Tensor:
        return f(*[replaced.get(f"at{i}", a) for i, a in enumerate(values)])

    firsts = [(i, jet[0]) for i, jet in enumerate(jets) if jet[0] is not None]
    first: Tensor | None = None
    for i, d in firsts:
        first = added(first, term(**{f"at{i}": d}))
    if not second:
        return first, None
    other = total(*[term(**{f"at{i}": jet[1]}) for i, jet in enumerate(jets) if jet[1] is not None])
    for n, (i, a) in enumerate(firsts):
        for j, b in firsts[n + 1 :]:
            a2, b2 = (2 * a, b) if a.numel() <= b.numel() else (a, 2 * b)
            other = total(other, term(**{f"at{i}": a2, f"at{j}": b2}))
    return first, other


def added(sum_so_far: Tensor | None, term: Tensor) -> Tensor:
    """Their sum, in the memory of the first where no graph is made."""
    if sum_so_far is None:
        return term
    fits = sum_so_far.shape == term.shape and sum_so_far.dtype == term.dtype
    return sum_so_far + term if torch.is_grad_enabled() or not fits else sum_so_far.add_(term)
