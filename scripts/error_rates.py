"""How often the tests between methods err: the simulations behind the appendix of docs/compare.md.

    python scripts/error_rates.py [--experiments 1000] [--only runs normal many marks]

runs: two methods alike, predictions on 500 new test samples. normal: the same on normal values. many: G methods alike,
seed variances moderated; family, single, lost and power as docs/compare.md explains them. marks: five equal methods,
how often some and how often a given one loses its mark. The level is 5 %; with E experiments a rate of 5 % has a
standard error of √(.05 · .95 / E), which is printed. The simulations are those that the tests hold to their bounds.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from reference.error_rates import NULLS, alike, many_nulls, power, rejections

from metacal.report.significance import Sampled, difference, holm

NORMAL = {
    "only seeds vary, S = 2": (2, 1, 0, 0),
    "only seeds vary, S = 3": (3, 1, 0, 0),
    "only seeds vary, S = 5": (5, 1, 0, 0),
    "only the shared samples vary, S = 3": (3, 0, 0, 1),
    "each run's own sampling noise alone, S = 3": (3, 0, 1, 0),
    "seeds and shared samples in equal parts, S = 3": (3, 1, 0, 1 / 3),
}
MANY = {
    "equal, G = 8": (8, 0.0, 1.0),
    "equal, G = 31": (31, 0.0, 1.0),
    "log-normal (0.35), G = 31": (31, 0.35, 1.0),
    "log-normal (0.7), G = 31": (31, 0.7, 1.0),
    "log-normal (1), G = 31": (31, 1.0, 1.0),
    "three times the others' for the first, G = 31": (31, 0.0, 3.0),
    "ten times the others' for the first, G = 31": (31, 0.0, 10.0),
    "ten times the others' for the first, G = 8": (8, 0.0, 10.0),
}


def runs(experiments: int) -> None:
    measures = ["ece", "nll", "kce"]
    print("| what varies | " + " | ".join(measures) + " |\n|---|" + "---|" * len(measures))
    for name, how in NULLS.items():
        rates = rejections(measures, experiments, 500, **how)
        print(f"| {name} | " + " | ".join(f"{rates[m]:.1%}" for m in measures) + " |", flush=True)


def normal(experiments: int) -> None:
    print("| normal values | rejections |\n|---|---|")
    for name, how in NORMAL.items():
        print(f"| {name} | {alike(experiments, *how):.1%} |", flush=True)


def many(experiments: int) -> None:
    print("| G equal methods | family | single | lost | power |\n|---|---|---|---|---|")
    for name, (g, spread, first) in MANY.items():
        rates = many_nulls(experiments, g, 3, spread, first)
        cells = [*rates.values(), power(experiments, g, 3, spread, first)]
        print(f"| {name} | " + " | ".join(f"{rate:.1%}" for rate in cells) + " |", flush=True)


def marks(experiments: int) -> None:
    """Five equal methods, three seeds; marks as `metacal compare` sets them below eight methods."""
    r = np.random.default_rng(0)
    lost = np.zeros(5)
    some = 0
    for _ in range(experiments):
        values = r.normal(size=(5, 3))
        best = int(values.mean(1).argmin())
        others = [i for i in range(5) if i != best]
        none = np.zeros((3, 2))
        p = [difference(Sampled(values[i], none), Sampled(values[best], none)).p_value for i in others]
        gone = [i for i, adjusted in zip(others, holm(p)) if adjusted < 0.05]
        lost[gone] += 1
        some += bool(gone)
    each = lost / experiments
    print(
        f"some of five loses its mark in {some / experiments:.1%}, a given one in {each.min():.1%} to {each.max():.1%}"
    )


PARTS = {"runs": runs, "normal": normal, "many": many, "marks": marks}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    print(f"{args.experiments} experiments: ± {math.sqrt(0.05 * 0.95 / args.experiments):.1%} on a rate of 5 %")
    for name in args.only:
        print()
        PARTS[name](args.experiments)


if __name__ == "__main__":
    main()
