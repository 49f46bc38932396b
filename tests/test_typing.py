"""Type hints as a user's type checker sees them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from metacal.calibration import MEASURES
from metacal.config.compose import config_dir
from metacal.names import MeasureName, MethodName, OptimizerName
from metacal.optim import OPTIMIZERS


@pytest.mark.parametrize(
    ("names", "registry"),
    [
        (MethodName, [file.stem for file in (config_dir() / "method").glob("*.yaml")]),
        (OptimizerName, OPTIMIZERS),
        (MeasureName, MEASURES),
    ],
)
def test_names_for_type_checkers_are_those_of_the_registry(names: Any, registry: Any) -> None:
    assert sorted(get_args(names)) == sorted(registry), "metacal/names.py lists them for type checkers"


@pytest.mark.slow
def test_a_users_program_passes_a_strict_type_checker(pytestconfig: pytest.Config) -> None:
    api = pytest.importorskip("mypy.api")
    file = Path(__file__).parent / "typing" / "snippet.py"
    options = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--warn-unused-ignores"]
    cache = pytestconfig.cache.mkdir("mypy") if pytestconfig.cache else ""  # half a minute without it
    options += ["--python-executable", sys.executable, "--cache-dir", str(cache), "--config-file", ""]
    said, errors, status = api.run([*options, str(file)])
    assert status == 0, said + errors
