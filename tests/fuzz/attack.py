"""Many random cases from consecutive seeds: a count of outcomes, and every failure with what reruns it alone.

Environment: FUZZ_SEED (0), the first seed; FUZZ_COUNT, how many cases instead of the test's own number; FUZZ_MINUTES,
how long instead of how many.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable

from reference.frames import line_of_package

__all__ = ["attack"]


def attack(name: str, check: Callable[[int], str], count: int) -> None:
    """`check(seed)` for `count` seeds; it returns an outcome to be counted ("right", "refused") or raises.

    Raises AssertionError at the end if any check did. name: of the test's file without `.py`, for the command.
    """
    first = int(os.environ.get("FUZZ_SEED", "0"))
    count = int(os.environ.get("FUZZ_COUNT", str(count)))
    minutes = os.environ.get("FUZZ_MINUTES")
    end = time.monotonic() + 60 * float(minutes) if minutes else None
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    seed = first
    while time.monotonic() < end if end is not None else seed < first + count:
        try:
            outcomes[check(seed)] += 1
        except Exception as error:
            outcomes["FAILED"] += 1
            failures.append(f"seed {seed}: {_told(error)}")
            print(f"{name}: {failures[-1]}", flush=True)
        seed += 1
    counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
    print(f"{name}: {seed - first} cases from seed {first}: {counts}", flush=True)
    rerun = f"FUZZ_SEED=<seed> FUZZ_COUNT=1 pytest -m slow -s tests/fuzz/{name}.py"
    assert not failures, "\n".join([f"{len(failures)} failed; one alone: {rerun}", *failures])


def _told(error: Exception) -> str:
    """What was raised, in one line, and where if it was not by a check of the attack itself."""
    # pytest adds lines of its own to a failed assertion
    text = (str(error).splitlines() or [""])[0][:500]
    if isinstance(error, AssertionError) and text:
        return text
    line = line_of_package(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}{f' at {line}' if line else ''}: {text}"
