"""The error that bad input raises, on every floor, and the checks that raise it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from importlib.util import find_spec

__all__ = [
    "EXTRAS",
    "InputError",
    "RunError",
    "did_you_mean",
    "missing_package",
    "note",
    "require",
    "require_choice",
    "require_packages",
]

EXTRAS = {
    "train": ("torchvision", "PIL", "hydra", "omegaconf", "rich", "tensorboard", "matplotlib"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "higher": ("higher",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""What extras of setup.cfg bring, by the names that are imported."""


class InputError(ValueError):
    """Input that cannot be worked with.

    The message is one line that names the argument, the value and what would be right, e.g.
    ``bandwidth must be > 0, got -0.1``. The command line prints it and exits with status 2.
    """


class RunError(RuntimeError):
    """A run that had to stop by itself (a non-finite loss, a folder that cannot be written).

    The message says where it stopped and what is kept; the command line prints it and exits with status 1.
    """


def require(condition: bool, message: str) -> None:
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def note(message: str) -> None:
    """Tell on standard error what was done otherwise than one would expect, such as what was left out and why."""
    print(f"metacal: {message}", file=sys.stderr)


def did_you_mean(value: str, options: Iterable[str]) -> str:
    """`` (did you mean 'focal'?)`` when an option is close to `value`, else an empty string."""
    near = difflib.get_close_matches(str(value), list(options), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def require_choice(name: str, value: object, options: Iterable[str]) -> None:
    """Raise `InputError` unless `value` is one of `options`; the message names the nearest one."""
    options = list(options)
    if value not in options:
        hint = did_you_mean(str(value), options)
        raise InputError(f"{name} must be one of {', '.join(options)}, got {value!r}{hint}")


def require_packages(what: str, *names: str) -> None:
    """Raise `InputError` unless the packages `names`, which extras of metacal bring, are there for `what`."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(_missing(what, name))


def missing_package(what: str, error: ImportError) -> str | None:
    """The sentence for a package that `what` could not import; None where no extra of metacal brings it."""
    name = (error.name or "").split(".")[0]
    known = isinstance(error, ModuleNotFoundError) and any(name in names for names in EXTRAS.values())
    return _missing(what, name) if known else None


def _missing(what: str, name: str) -> str:
    extra = next(extra for extra, names in EXTRAS.items() if name in names)
    return f"{what} needs {name}, which is not installed here: pip install 'metacal[{extra}]'"
