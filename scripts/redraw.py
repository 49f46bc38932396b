"""Draws the pictures of docs/ again from what is saved beside them: python scripts/redraw.py

    docs/studies/NAME_*.png                    from the numbers in docs/studies/NAME.json, with NAME.md's tables
    docs/studies/optimizers_plane.png          from the tables of docs/studies/optimizers.md
    docs/images/concepts_*.png                 from formulas: scripts/draw_concepts.py

CONTRIBUTING.md says how the pictures that need runs are made.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metacal.studies.optimizers import plane
from metacal.studies.pages import DRAWN, redraw

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "docs" / "studies"
Row = dict[str, str]


def main() -> None:
    for file in sorted(STUDIES.glob("*.json")):
        numbers = json.loads(file.read_text())
        if numbers.get("report") in DRAWN:
            print(*redraw(file), sep="\n")
    print(draw_optimizers(STUDIES / "optimizers.md", STUDIES / "optimizers_plane.png"))
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_concepts.py"], check=True)


def draw_optimizers(page: Path, picture: Path) -> Path:
    """A point for each method under each optimizer: the means over seeds of the tables under `### OPTIMIZER`."""
    points = []
    for name, text in re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", page.read_text(), re.M | re.S):
        for row in table(text):
            values = {"accuracy": "Accuracy %", "ece": "ECE %", "hessian_trace": "Tr H"}
            means = {key: mean_std(row[column])[0] for key, column in values.items()}
            shares = {key: means[key] / 100 for key in ("accuracy", "ece")}
            points.append({"method": row["method"], "optimizer": name, **means, **shares})
    plane(list(dict.fromkeys(point["optimizer"] for point in points)), points).savefig(picture, dpi=130)
    return picture


def table(text: str) -> list[Row]:
    """The first Markdown table of a text: a row's cells by their headers."""
    (block,) = re.findall(r"(?:^\|.*\n)+", text, re.M)[:1]
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return [dict(zip(header, cells)) for cells in lines]


def mean_std(cell: str) -> tuple[float, float]:
    """`**45.55 ± 1.26**` as two numbers."""
    mean, std = cell.strip("*").split(" ± ")
    return float(mean), float(std)


if __name__ == "__main__":
    main()
