"""The plan of the house: which room may import which. Imports go down only, so that no two rooms need each other."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import metacal

ROOT = Path(metacal.__file__).parent
MAY_IMPORT = {
    "errors": "",
    "names": "",
    "configs": "",  # the YAML files, which lie beside the package in the checkout
    # what everything stands on: numbers with labels, options, files, one way to run a network
    "files": "errors",
    "jsonio": "errors",
    "options": "errors",
    "predictions": "errors files",
    "ranks": "errors",
    "batchnorm": "errors ranks",
    "network": "errors inputs",
    "modes": "errors",
    "devices": "",
    "pixels": "devices errors",
    "folds": "",
    "predict": "errors inputs modes network predictions ranks",
    "launch": "errors options ranks",
    "inputs": "errors",
    "posterior": "errors modes predictions",
    # pure mathematics
    "autodiff": "errors network ranks",
    "losses": "errors options",
    "mixing": "devices errors",
    "calibration": "errors files folds names options predictions",
    "margins": "calibration errors inputs modes network pixels predictions",
    "curvature": "autodiff devices errors losses network ranks",
    # what is trained, and on what
    "data": "devices errors files folds inputs options ranks",
    "models": "errors inputs network options",
    "gamma": "calibration devices errors inputs losses models modes options predictions",
    "penalties": "autodiff calibration curvature errors margins network options pixels",
    "objective": "calibration errors losses options penalties",
    "optim": "curvature errors models network options ranks",
    "bilevel": "autodiff batchnorm calibration devices errors gamma inputs losses mixing network objective optim ranks",
    "monitors": "calibration curvature errors margins models modes options pixels predict predictions",
    # runs
    "config": "bilevel calibration configs data errors gamma launch losses models monitors names objective optim "
    "options penalties",
    "runs": "config errors files jsonio predictions",
    "report": "calibration data errors files names network predict predictions runs",
    "export": "calibration data errors files inputs network",
    "deploy": "calibration config data errors export inputs models modes predictions runs",
    "training": "batchnorm bilevel calibration config curvature data deploy errors gamma inputs jsonio launch losses "
    "margins mixing models modes monitors names network objective optim options pixels predict predictions ranks "
    "report runs",
    "sklearn": "errors models names training",
    "studies": "calibration config configs curvature data errors jsonio margins names predict predictions report "
    "runs training",
    "commands": "calibration config configs curvature data deploy errors export files jsonio launch models monitors "
    "posterior predict predictions ranks report runs studies training",
    "cli": "commands errors",
}
LINES = 400


def imports(file: Path) -> set[str]:
    """The rooms of the package that a file imports, at its top or within functions."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "metacal":
            path = (node.module or "").split(".")
            rooms |= {path[1]} if len(path) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("metacal.")}
    return rooms - {"__version__"}


def test_imports_go_down_only() -> None:
    upward = []
    for file in sorted(ROOT.rglob("*.py")):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            allowed = {room, *MAY_IMPORT[room].split()}
            upward += [f"{file.relative_to(ROOT)} imports {other}" for other in sorted(imports(file) - allowed)]
    assert not upward


def test_the_plan_has_no_circle() -> None:
    order = list(TopologicalSorter({room: below.split() for room, below in MAY_IMPORT.items()}).static_order())
    assert set(order) == set(MAY_IMPORT)


def test_files_fit_in_the_head() -> None:
    longer = [str(f.relative_to(ROOT)) for f in ROOT.rglob("*.py") if len(f.read_text().splitlines()) > LINES]
    assert not longer


def test_functions_fit_a_screen() -> None:
    """60 lines beside the docstring."""
    longer = []
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                text = ast.get_docstring(node, clean=False)
                length = node.end_lineno - node.lineno + 1 - (len(text.splitlines()) if text else 0)
                longer += [f"{file.relative_to(ROOT)}: {node.name} has {length} lines"] if length > 60 else []
    assert not longer
