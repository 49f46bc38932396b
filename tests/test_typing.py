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


STRICT = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--warn-unused-ignores"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param("", [*STRICT, "tests/typing/snippet.py"], id="a user's program, strictly"),
        pytest.param("pyproject.toml", [], id="the package"),
    ],
)
def test_a_type_checker_passes(
    config: str, options: list[str], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(Path(__file__).parents[1])
    cache = pytestconfig.cache.mkdir("mypy") if pytestconfig.cache else ""  # a minute without it
    options = ["--config-file", config, "--python-executable", sys.executable, "--cache-dir", str(cache), *options]
    said, errors, status = api.run(options)
    assert status == 0, said + errors
