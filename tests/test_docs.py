"""The documentation names nothing that is not there: pages, links, anchors, images, commands, keys and choices."""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import io
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import metacal
from metacal.cli import COMMANDS, TRAINING, main
from metacal.config.schema import keys
from metacal.config.words import check_words, config_dir, groups, key_of
from metacal.studies.grid import load_study

ROOT = Path(metacal.__file__).parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*ROOT_PAGES, *sorted(DOCS.rglob("*.md"))]
LIMIT = 160

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose_and_code(text: str) -> tuple[str, list[str], list[str]]:
    """A page without its blocks of code; the lines of these; and what stands in code within sentences."""
    fence = re.compile(r"^```([a-z]*)[^\n]*\n(.*?)^```", re.M | re.S)
    blocks = [block for language, block in fence.findall(text) if language in ("", "sh")]
    text = fence.sub("", text)
    indented = re.compile(r"(?:(?<=\n\n)|^)(?: {4}[^\n]*\n)+")
    blocks += [block for block in indented.findall(text) if "metacal" in block]
    prose = indented.sub("", text)
    lines = re.sub(r"\\\n *", "", "\n".join(blocks)).splitlines()
    return prose, [line.strip() for line in lines], re.findall(r"`([^`\n]+)`", prose)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and scripts/docs_hooks.py make them."""
    headings = re.findall(r"^#+ (.+)$", prose_and_code(page.read_text())[0], re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `metacal …` command of a page, as a shell would split them."""
    _, lines, spans = prose_and_code(page.read_text())
    for line in [*lines, *spans]:
        if line.startswith("metacal "):
            line = re.split(r" {4,}| \| ", line.replace("[key=value …]", "").replace("[group=name …]", ""))[0]
            yield shlex.split(line, comments=True)[1:]


@each_page
def test_links_and_images_exist(page: Path) -> None:
    prose = prose_and_code(page.read_text())[0]
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'src="([^"]+)"', prose)
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert page in ROOT_PAGES or file.is_relative_to(DOCS), f"{target} is not on the site"
        assert not anchor or anchor in anchors(file), target


@each_page
def test_lines_can_be_read(page: Path) -> None:
    """Of prose; tables and code have theirs."""
    if page.name == "README.md":
        pytest.skip("the README is read on GitHub alone")
    lines = prose_and_code(page.read_text())[0].splitlines()
    assert not [line for line in lines if len(line) > LIMIT and not line.startswith("|")]


@functools.cache
def flags(command: str) -> set[str]:
    """The flags that a command's help lists; what takes keys has Hydra's, of which the pages name one."""
    if command in TRAINING:
        return {"--help", "--cfg"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[a-z-]+", said.getvalue()))


@each_page
def test_commands_their_flags_keys_and_choices_exist(page: Path) -> None:
    for command, *arguments in commands(page):
        if command in ("--version", "COMMAND", "…"):
            continue
        assert command in COMMANDS
        assert {word for word in arguments if re.fullmatch(r"--[a-z-]+", word)} <= flags(command), arguments
        if command == "study":
            study = arguments.pop(0) if arguments else "NAME"
            known = study.isupper() or study.endswith(".yaml") or study in ("list", "redraw")
            assert known or (config_dir() / "study" / f"{study}.yaml").is_file()
        if command in TRAINING:
            passed = ("group", "key", *(("jobs", "variant") if command != "train" else ()))
            words = [w for w in arguments if re.match(r"[+~]?[a-z./_]+=[^…]*$", w) and key_of(w) not in passed]
            check_words(words)
            for key, _, values in (word.partition("=") for word in words):
                if key in groups() and re.fullmatch(r"[a-z0-9_,]+", values):
                    check_words([f"{key}={choice}" for choice in values.split(",")])


@each_page
def test_keys_within_sentences_exist(page: Path) -> None:
    """`meta.lr=1e-3` or `data.flip`, in code within a sentence, where its first part is a section's."""
    sections = {key.partition(".")[0] for key in keys() if "." in key} - {"model"}  # `model.pt` is a file
    for span in prose_and_code(page.read_text())[2]:
        match = re.match(r"([a-z_]+(?:\.[a-z_]+)+)(=|$)", span)
        if match and match[1].partition(".")[0] in sections and "NAME" not in span:
            name = match[1]
            assert name in keys() or any(key.startswith(f"{name}.") for key in keys()), span


def test_every_page_is_in_the_navigation_once() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry if isinstance(entry, list) else entry.values():  # type: ignore[attr-defined]
                yield from pages(part)

    listed = sorted(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    expected = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | {"changelog.md", "contributing.md"}
    assert listed == sorted(expected)


def test_the_api_pages_show_every_public_name() -> None:
    """Those of `import metacal` one by one; of a module its `__all__`, but what a submodule hides."""
    shown = [name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]
    modules = [f"metacal.{name}" for name in ("calibration.surrogates", "gamma", "sklearn")]
    modules += [f"metacal.{name}" for name in metacal.__all__ if isinstance(getattr(metacal, name), ModuleType)]
    hidden = [
        f"{module}.{name}.{name}"
        for module in modules
        for name in importlib.import_module(module).__all__
        if (ROOT / module.replace(".", "/") / f"{name}.py").is_file()
    ]
    names = [f"metacal.{name}" for name in metacal.__all__ if name != "__version__"]
    assert sorted(shown) == sorted({*names, *modules, *hidden})


EXAMPLES = re.compile(r"^```pycon\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_the_api_pages_have_an_example_of_every_name_that_runs(page: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    examples = "\n".join(EXAMPLES.findall(text))
    for shown in re.findall(r"^::: (\S+)", text, re.M):
        named = getattr(pkgutil.resolve_name(shown), "__all__", [shown.rpartition(".")[2]])
        lacking = [name for name in named if not re.search(rf"\b{name}\b", examples)]
        assert not lacking, f"{shown} has no example of {', '.join(lacking)}"
    said = io.StringIO()
    tests = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    with contextlib.redirect_stderr(io.StringIO()):
        failed, _ = doctest.DocTestRunner(verbose=False).run(tests, out=said.write)
    assert not failed, said.getvalue()


def test_the_tutorials_study_can_be_loaded(tmp_path: Path) -> None:
    (block,) = re.findall(
        r'^```yaml title="mine.yaml"\n(.*?)^```', (DOCS / "tutorials/own_study.md").read_text(), re.M | re.S
    )
    (tmp_path / "mine.yaml").write_text(block)
    study = load_study(str(tmp_path / "mine.yaml"))
    assert len(study.jobs) == 9
