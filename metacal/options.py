"""Options: a default, what a value may be, and a line of help, once, beside what uses them.

A part of a run (a loss, a penalty, an optimizer, …) is a dataclass whose fields are its options,

    @dataclass
    class MbLS:
        margin: float = option(10.0, "logit distance from which on it costs", low=0)

or a function with arguments that say so:

    def confidence_penalty(logits, labels, beta: Annotated[float, Option("weight of the entropy", low=0)] = 0.1): ...

Fields and arguments without an `Option` are none: they are what the part works on. Whoever else has to know the
options, such as the schema of configs, their checks, the help and the docs, reads them here by `options_of`.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any

from metacal.errors import InputError, did_you_mean, require, require_choice

__all__ = [
    "Described",
    "Option",
    "built",
    "check_options",
    "check_value",
    "converted",
    "made",
    "option",
    "options_of",
]


@dataclass(frozen=True)
class Option:
    """What the value of an option may be.

    Attributes:
        help: one line, for somebody who reads a list of options.
        low, high: bounds that a number may reach; above, below: bounds that it may not. Numbers are finite, unless
            `infinite`.
        choices: of a string, or of each in a list of strings, if it must be one of some.
        valid, must: a further check of the value, and what it asks for, to follow "must be".
        parts: where the value is the name of another part: these by name. The options of the one that is named stand
            beside this one.
    """

    help: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    infinite: bool = False
    choices: tuple[str, ...] = ()
    valid: Callable[[Any], bool] | None = None
    must: str = ""
    parts: Mapping[str, Any] | None = None

    @property
    def range(self) -> str:
        """What a value must be, to follow "must be"; empty where anything will do."""
        if self.choices or self.parts is not None:
            return f"one of {', '.join(self.names)}"
        if self.must:
            return self.must
        low, high = (self.above if self.low is None else self.low), (self.below if self.high is None else self.high)
        if low is not None and high is not None:
            return f"in {'(' if self.low is None else '['}{low:g}, {high:g}{')' if self.high is None else ']'}"
        if low is not None:
            return f"{'>' if self.low is None else '>='} {low:g}"
        return "" if high is None else f"{'<' if self.high is None else '<='} {high:g}"

    @property
    def names(self) -> tuple[str, ...]:
        """What the value may be, where it is a name."""
        return self.choices if self.parts is None else tuple(self.parts)

    def allows(self, number: float) -> bool:
        """Whether a number is within the bounds."""
        return (
            (math.isfinite(number) or (self.infinite and not math.isnan(number)))
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )


class Described(typing.NamedTuple):
    """An option of a part: its type as annotated, its default (a fresh one), and what it may be."""

    type: Any
    default: Any
    option: Option

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return _plain(self.type)[1]


def option(default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **what: Any) -> Any:
    """A field of a dataclass that is an option; `what` goes to `Option`, factory makes defaults such as lists."""
    return field(default=default, default_factory=factory, metadata={"option": Option(help, **what)})


def options_of(part: Callable[..., Any], values: Mapping[str, Any] | None = None) -> dict[str, Described]:
    """The options of a part by name, in their order. What a `functools.partial` binds is no option any more.

    values: of the options, where they are known: an option that names another part brings the options of that one.
    """
    found = _own_options(part)
    for name, described in list(found.items()):
        if described.option.parts is not None:
            inner = described.option.parts.get((values or {}).get(name, described.default))
            found = (options_of(inner, values) if inner is not None else {}) | found
    return found


def _own_options(part: Callable[..., Any]) -> dict[str, Described]:
    kind, bound = _unbound(part)
    declared = _declared(kind)
    return {name: Described(hint, default(), what) for name, hint, default, what in declared if name not in bound}


@functools.cache
def _declared(kind: Any) -> list[tuple[str, Any, Callable[[], Any], Option]]:
    """Of each option its name, its type, what makes a default, and what it may be: asked for often, slow to read."""
    hints = typing.get_type_hints(kind, include_extras=True)
    declared: list[tuple[str, Any, Callable[[], Any], Option]] = []
    if is_dataclass(kind):
        for f in fields(kind):
            if (what := f.metadata.get("option")) is not None:
                default = partial(_same, f.default) if f.default_factory is MISSING else f.default_factory
                declared.append((f.name, hints[f.name], default, what))
        return declared
    for name, parameter in inspect.signature(kind).parameters.items():
        if typing.get_origin(hints.get(name)) is Annotated:
            annotated, *notes = typing.get_args(hints[name])
            what = next((note for note in notes if isinstance(note, Option)), None)
            if what is not None:
                declared.append((name, annotated, partial(_same, parameter.default), what))
    return declared


def _same(value: Any) -> Any:
    return value


def _unbound(part: Callable[..., Any]) -> tuple[Any, Mapping[str, Any]]:
    """What a `functools.partial` is of, and what it binds by name."""
    return (part.func, part.keywords) if isinstance(part, partial) else (part, {})


def made(part: Callable[..., Any], values: Any, **context: Any) -> Any:
    """The part with its options as `values` (an object with attributes) has them.

    A dataclass gives its instance, a function the function with its options bound. Where an option names another part,
    that one is made first and stands in the place of its name. Numbers of numpy and of tensors become Python's.
    context: further fields or arguments, those of them that the part has.
    """
    options = {}
    for name, described in _own_options(part).items():
        value = getattr(values, name)
        if described.option.parts is not None:
            require_choice(name, value, described.option.parts)
            value = made(described.option.parts[value], values, **context)
        options[name] = _python(value)
    kind, _ = _unbound(part)
    if not is_dataclass(kind):
        return partial(part, **options) if options else part
    context = {f.name: context[f.name] for f in fields(kind) if f.name in context and f.name not in options}
    return part(**options, **context)


def built(what: str, part: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """The part, called `what` in errors, with `given` options and the defaults of the others.

    Raises:
        InputError: for an option that it does not have.
    """
    kind, bound = _unbound(part)
    defaults = {name: described.default for name, described in options_of(part, given).items()}
    known = [*defaults]
    if is_dataclass(kind):
        positional = len(part.args) if isinstance(part, partial) else 0
        known += [f.name for f in fields(kind)[positional:] if f.name not in {*bound, *defaults}]
    for key in given:
        if key not in known:
            raise InputError(
                f"{what} has no option {key!r}{did_you_mean(key, known)}; it has {', '.join(known) or 'none'}"
            )
    return made(part, types.SimpleNamespace(**{**defaults, **given}), **given)


def check_options(part: Any, prefix: str = "", **given: Any) -> None:
    """Raise `InputError` for the first option that is not what it must be, named with the `prefix`.

    part: an instance of a dataclass; or a function, of whose options `given` are the values.
    """
    described = _own_options(type(part) if is_dataclass(part) else part)
    if is_dataclass(part):
        given = {name: getattr(part, name) for name in described}
    for name, value in given.items():
        check_value(prefix + name, value, described[name])


def check_value(name: str, value: Any, described: Described) -> None:
    """Raise `InputError` unless `value` is what the option must be."""
    kind, optional = _plain(described.type)
    what = described.option
    if value is None and optional:
        return
    if what.names and (what.parts is None or isinstance(value, str)):
        for entry in value if isinstance(value, list) else [value]:
            require_choice(name, entry, what.names)
    elif kind in (int, float):
        number = _number(value)
        whole = kind is not int or isinstance(number, Integral)
        kinds = "" if whole or what.must else "an integer "
        require(
            number is not None and whole and what.allows(float(number)),
            f"{name} must be {kinds}{what.range or 'a finite number'}, got {value!r}"
            if isinstance(value, str)
            else f"{name} must be {kinds}{what.range or 'a finite number'}, got {value}",
        )
    elif kind is bool:
        require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
    elif kind is str:
        require(isinstance(value, str), f"{name} must be a string, got {value!r}")
    if what.valid is not None:
        shown = list(value) if isinstance(value, (list, tuple)) else value
        require(what.valid(value), f"{name} must be {what.must}, got {shown}")


def _number(value: Any) -> Real | None:
    """A real number of Python, numpy or a tensor of one element as one; None for anything else."""
    value = _python(value)
    return value if isinstance(value, Real) and not isinstance(value, bool) else None


def _python(value: Any) -> Any:
    """Numbers of numpy, and tensors of one element, as numbers of Python, in lists too; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_python, value)) if type(value) in (list, tuple) else value
    one = type(value).__module__ in ("torch", "numpy") and getattr(value, "shape", None) in ((), (1,))
    return value.item() if one else value


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def converted(name: str, value: Any, kind: Any) -> Any:
    """A value from YAML or the command line as what the type says: numbers from strings, floats from integers.

    Raises:
        InputError: for one that is not.
    """
    plain, optional = _plain(kind)
    if value is None:
        require(optional or plain is Any, f"{name} must not be null")
        return None
    if typing.get_origin(plain) is list:
        require(isinstance(value, (list, tuple)), f"{name}: value {value!r} is no list")
        (entry,) = typing.get_args(plain)
        return [converted(name, v, entry) for v in value]
    if plain is bool:
        word = str(value).lower()
        require(word in (*_TRUE, *_FALSE), f"{name}: value {str(value)!r} is not true or false")
        return word in _TRUE
    if plain in (int, float):
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            number = plain(value)
            if plain is int and isinstance(value, float) and number != value:
                raise ValueError
        except (ValueError, OverflowError):
            what = "integer" if plain is int else "number"
            raise InputError(f"{name}: value {str(value)!r} is no {what}") from None
        return number
    if plain is str:
        require(not isinstance(value, (list, dict)), f"{name}: value {value!r} is no string")
        return str(value)
    return value


def _plain(kind: Any) -> tuple[Any, bool]:
    """(the type without None, whether None is allowed)."""
    if kind is Any:
        return Any, True
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not types.NoneType]
        return kinds[0], len(kinds) < len(typing.get_args(kind))
    return kind, False
