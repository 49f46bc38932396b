"""The wheel works outside the checkout: configs inside, nothing taken from the source tree."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_package_goes_into_the_wheel():
    listed = configparser.ConfigParser()
    listed.read(ROOT / "setup.cfg")
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "metacal").rglob("__init__.py")}
    assert set(listed["options"]["packages"].split()) == found | {"metacal.configs"}


@pytest.mark.slow
def test_the_wheel_trains_outside_the_checkout(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("metacal", "configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-qq", "--no-deps", "-w", str(tmp_path / "wheels"), str(source)], check=True)
    (wheel,) = (tmp_path / "wheels").glob("metacal-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-qq", "--no-deps", "--target", str(site), str(wheel)], check=True)
    shutil.rmtree(source)
    code = (
        "import sys, metacal; from metacal.cli import main; assert metacal.__file__.startswith(sys.argv[1]), metacal;"
        "sys.exit(main(['train', 'epochs=1', 'data.train_size=200', 'monitor.resamples=0']))"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "default" / "metacal,data.train_size=200,epochs=1" / "seed0" / "summary.json").is_file()
