"""What importing costs: heavy packages are loaded by what uses them."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("matplotlib", "sklearn", "scipy", "tensorboard", "torchvision", "higher")
CODE = f"""
import sys
import metacal
assert "torch" not in sys.modules and "hydra" not in sys.modules
for name in metacal.__all__:
    getattr(metacal, name)
import metacal.training.run
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""


def test_the_whole_api_needs_none_of_the_heavy_packages() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
