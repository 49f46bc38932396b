"""The README's picture: two runs' reliability diagrams on test, side by side.

python scripts/before_after.py RUN_BEFORE RUN_AFTER docs/images/before_after.png [--epoch last]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib.figure import Figure

from metacal.predictions import Predictions
from metacal.report.figures import reliability_diagram
from metacal.runs.folder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, metavar="RUN")
    parser.add_argument("picture")
    parser.add_argument("--epoch", choices=("selected", "last"), default="last")
    parser.add_argument("--titles", nargs=2, metavar="TITLE", help="above the diagrams (default: the methods)")
    options = parser.parse_args()
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    for i, (ax, run) in enumerate(zip(figure.subplots(1, 2, sharey=True), options.runs)):
        folder = RunFolder(run)
        title = options.titles[i] if options.titles else str(folder.read_summary()["method"])
        reliability_diagram(Predictions.load(folder.predictions("test", options.epoch)), ax=ax, title=title)
        if i:
            ax.set_ylabel("")
    figure.savefig(options.picture, dpi=150)


if __name__ == "__main__":
    main()
