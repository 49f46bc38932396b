"""Numbers that a step leaves on the device, read without making the host wait for the steps after it.

A GPU is kept busy by a host that queues work ahead of it; each look at a number empties that queue. On the CPU nothing
is queued and a look costs nothing, so there a step reads its numbers and fails at once. On any other device

- what a step reports is a `StepReport`, whose numbers are fetched when somebody looks, all of them in one transfer;
- whether it went well is copied to the host beside the running work, and read one step later;
- a step that must not count is taken back there, by the `Gate` (`state`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metacal.bilevel.state import Gate

__all__ = ["OUTER", "Check", "Ledger", "NonFiniteError", "StepReport", "read_all"]

OUTER = ("outer", "hypergradient_norm")
"""The numbers of an outer part that must be finite."""

Check = tuple[Tensor, Callable[[], Exception]]
"""A 0-d bool on the device, true where all is well, and what to raise where it is false."""


class StepReport(Mapping[str, float]):
    """Numbers by name, 0-d tensors on a device until one of them is looked at: then all are read in one transfer."""

    def __init__(self, values: Mapping[str, Tensor | float]) -> None:
        parts = values.raw if isinstance(values, StepReport) else values
        self.raw: dict[str, Tensor | float] = {
            name: v.detach() if isinstance(v, Tensor) else v for name, v in parts.items()
        }
        """The numbers as they are known: tensors where they were not read yet."""

    def __getitem__(self, name: str) -> float:
        if isinstance(self.raw[name], Tensor):
            read_all([self])
        return self.raw[name]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __or__(self, more: Mapping[str, Tensor | float]) -> StepReport:
        return StepReport({**self.raw, **StepReport(more).raw})

    def __repr__(self) -> str:
        return repr(dict(self))


def read_all(reports: Iterable[StepReport]) -> None:
    """Make numbers of everything in the reports, with one transfer."""
    reports = list(reports)
    unread = [(r, name, v) for r in reports for name, v in r.raw.items() if isinstance(v, Tensor)]
    if not unread:
        return
    device = next((v.device for _, _, v in unread if v.device.type != "cpu"), unread[0][2].device)
    numbers = torch.stack([v.double().to(device) for _, _, v in unread]).tolist()
    for (report, name, _), number in zip(unread, numbers):
        report.raw[name] = number


class NonFiniteError(RuntimeError):
    """A loss, gradient or hypergradient that is infinite or not a number.

    `quantity` says which and `value` what it is, `found` holds all numbers of the `step` by name.
    """

    def __init__(self, name: str, found: Mapping[str, float], step: int) -> None:
        quantity, value = _QUANTITY.get(name, name), found[name]
        super().__init__(f"non-finite {quantity} ({value}) at step {step}")
        self.quantity, self.value, self.found, self.step = quantity, value, found, step


_QUANTITY = {
    "grad_norm": "gradient norm",
    "hypergradient_norm": "hypergradient norm",
    "outer": "outer loss",
    "gamma_mean": "gamma",
}


def _non_finite(found: Mapping[str, float], names: Iterable[str]) -> str | None:
    """The first of `names` whose value is not finite."""
    return next((name for name in names if not math.isfinite(found[name])), None)


def _all_finite(report: StepReport, names: Iterable[str]) -> Tensor:
    """Whether the numbers are, a 0-d bool on their device."""
    values = [v for v in (report.raw[name] for name in names) if isinstance(v, Tensor)]
    return torch.stack([torch.isfinite(v) for v in values]).all()


class _Verdict:
    """What may be wrong with a step, on its way to the host.

    `conclude` waits for the device to have come as far as here, and for nothing that was queued since.
    """

    def __init__(self, checks: Sequence[Check]) -> None:
        self.errors = [error for _, error in checks]
        flags = torch.stack([well for well, _ in checks])
        self.flags = flags.to("cpu", non_blocking=True)  # from a GPU: into pinned memory, behind what was queued
        self.arrived: Any = None
        if flags.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(flags.device))

    def conclude(self) -> None:
        """Raise what the first of the checks that failed says."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for well, error in zip(self.flags.tolist(), self.errors):
            if not well:
                raise error()


class Ledger:
    """What the steps of one training found, and which of it was read.

    at_once: whether the numbers of the step under way are read within it. checks: of that step, where they are not.
    skips: a step with a number that is not finite is left out, and raises nothing.
    """

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self._verdict: _Verdict | None = None  # on the last step
        self._skipped = 0
        self._left_out: Tensor | None = None  # skipped steps that only the device has counted
        self.open(at_once=True)

    def open(self, at_once: bool, gates: Sequence[Gate] = ()) -> None:
        """A step begins. gates: for the changes that its first number undoes, if not finite, and that any undoes."""
        self.at_once, self.gates = at_once, gates
        self.checks: list[Check] = []
        self._finite: list[Tensor] = []

    def require_finite(self, report: StepReport, names: Sequence[str], step: int) -> None:
        """Raise `NonFiniteError` unless these numbers are finite: now, or in the verdict on the step."""
        if self.at_once:
            bad = _non_finite(report, names)
            if bad is not None:
                raise NonFiniteError(bad, dict(report), step)
            return
        well = _all_finite(report, names)
        if self.skips:
            self._finite.append(well)
        else:
            self.checks.append((well, lambda: NonFiniteError(str(_non_finite(report, names)), dict(report), step)))

    def close(self, report: StepReport) -> StepReport:
        """The step ends: undo on the device what is to be skipped, and raise what was wrong with the step before."""
        if self.at_once:
            return report
        if self.gates:
            first, *others = self._finite
            well = first
            for flag in others:
                well = well & flag
            self.gates[0].keep_if(first)
            self.gates[1].keep_if(well)
            missed = 1.0 - well.double()
            self._left_out = missed if self._left_out is None else self._left_out + missed
            report |= {"skipped": missed}
        verdict, self._verdict = self._verdict, _Verdict(self.checks) if self.checks else None
        if verdict is not None:
            verdict.conclude()
        return report

    def conclude(self) -> None:
        """Wait for the last step, and raise what was wrong with it."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            verdict.conclude()

    def skip(self, report: StepReport) -> StepReport:
        """The step under way is left out."""
        self._skipped += 1
        return report | {"skipped": 1.0}

    @property
    def skipped(self) -> int:
        """How many were left out."""
        if self._left_out is not None:
            self._skipped, self._left_out = self._skipped + int(self._left_out), None
        return self._skipped

    def load(self, skipped: int) -> None:
        """Go on after so many."""
        self._skipped, self._left_out, self._verdict = skipped, None, None
