"""`waits.py` in a process of its own: torch keeps a device that was added to it for the rest of a process, and takes it
for the accelerator from then on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("waits.py")


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_a_device_that_is_not_waited_for(which: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        which,
        str(CASES),
    ]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, env=plain, cwd=CASES.parents[2], timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
