"""Options that somebody has given and that no part of the run reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from metacal.config.parts import learns, source_of
from metacal.config.schema import Config, sections
from metacal.config.words import key_of
from metacal.errors import InputError
from metacal.gamma import SOURCES
from metacal.losses import LOSSES, takes

__all__ = ["check_read"]

_WITH: dict[str, tuple[str, str]] = {
    "meta.inner_steps": ("engine", "higher"),
    "meta.beta1": ("optimizer", "adam"),
    "meta.beta2": ("optimizer", "adam"),
    "monitor.tolerance": ("curvature", "true"),
    "monitor.curvature_loss": ("curvature", "true"),
}
"""Options that are read beside one value of another option of their section."""


def check_read(commands: Sequence[tuple[Config, Sequence[str]]]) -> None:
    """Raise `InputError` for a key that runs are given by hand, among their words, and that none of these runs reads.

    What a file sets, such as a method's options of a part that has given way to another, may go unread.
    """
    given: dict[str, list[str | None]] = {}
    for config, words in commands:
        for key in {key_of(word): word for word in words}:
            given.setdefault(key, []).append(_reader(config, key))
    for key, readers in given.items():
        if None not in readers:
            nothing = "nothing of this run" if len(commands) == 1 else "none of these runs"
            raise InputError(f"{key} would be ignored: {nothing} reads it; it belongs to {readers[0]}")


def _reader(config: Config, key: str) -> str | None:
    """What would read the key, None if something does."""
    path, _, name = key.rpartition(".")
    if "meta" in (path, key) and not learns(config):
        learned = _one_of(n for n, source in SOURCES.items() if source.learned)
        return f"an outer problem, of gamma.source={learned} or of loss.learn_smoothing"
    if path == "gamma" and name != "source" and source_of(config) is None:
        return f"loss.name={_one_of(n for n, loss in LOSSES.items() if takes(loss) == 'gamma')}"
    if path.startswith("penalties.") and name != "weight":
        penalty = getattr(config.penalties, path.partition(".")[2])
        return f"{path}.weight > 0" if penalty.weight == 0 else None
    if key in _WITH:
        other, value = _WITH[key]
        return None if str(getattr(getattr(config, path), other)).lower() == value else f"{path}.{other}={value}"
    if key == "meta.horizon_decay":
        several = config.meta.horizon > 1 or config.meta.engine == "tangent"
        return None if several else "meta.horizon > 1 or meta.engine=tangent"
    if key == "monitor.robust_units":
        return None if config.monitor.robust_eps is not None else "monitor.robust_eps"
    section = sections().get(path)
    if section is None or not section.of_method or hasattr(getattr(config, path), name):
        return None
    return f"{path}.{section.key}={_one_of(section.owners()[name])}"


def _one_of(names: Iterable[str]) -> str:
    return " or ".join(names)
