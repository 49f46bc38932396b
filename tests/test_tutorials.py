"""The pages that say that their blocks run as they stand: they are run, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import pytest

import metacal
from metacal.cli import main

DOCS = Path(metacal.__file__).parents[1] / "docs"
BLOCK = re.compile(r'^```(python|sh|yaml)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


def run_page(page: Path, shell: bool) -> None:
    """Execute a page's Python in one namespace, write its titled files, and call its commands, if `shell`."""
    names = {"__name__": "tutorial"}
    text = page.read_text()
    assert "as they stand, in order" in " ".join(text.split())
    for match in BLOCK.finditer(text):
        language, title, code = match.groups()
        if language == "python":
            line = text[: match.start(3)].count("\n")
            exec(compile("\n" * line + code, str(page), "exec"), names)
        elif language == "yaml":
            Path(title).write_text(code)
        elif shell:
            for command in code.splitlines():
                assert main(shlex.split(command)[1:]) == 0, command


@pytest.mark.parametrize("name", ["tutorials/own_model", "tutorials/bilevel_loop", "tutorials/calibrate_and_export"])
def test_tutorials_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_page(DOCS / f"{name}.md", shell=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "tutorials/own_study"])
def test_pages_that_train_from_the_command_line_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / f"{name}.md", shell=True)
