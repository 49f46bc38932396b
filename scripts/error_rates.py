"""How often the tests between methods err: the simulations behind the appendix of docs/compare.md.

    python scripts/error_rates.py [--experiments 1000] [--only runs normal many two_seeds one_variance marks]

runs: two methods alike, predictions on 500 new test samples. normal: the same on normal values. many: G methods alike,
seed variances moderated; family, single, lost and power as docs/compare.md explains them. two_seeds, one_variance: the
same with two seeds, and with one pooled variance for all methods in place of moderated ones. marks: five equal methods,
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
from reference.error_rates import NULLS, Variances, alike, many_nulls, pooled, power, rejections

from metacal.report.significance import Sampled, difference, holm, moderated

NORMAL = {
    "only seeds vary": (1, 0, 0),
    "only the shared samples vary": (0, 0, 1),
    "each run's own sampling noise alone": (0, 1, 0),
    "seeds and shared samples in equal parts": (1, 0, 1 / 3),
}
SEEDS = (2, 3, 5)
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
    print("| normal values | " + " | ".join(f"S = {seeds}" for seeds in SEEDS) + " |\n|---|" + "---|" * len(SEEDS))
    for name, how in NORMAL.items():
        rates = [alike(experiments, seeds, *how) for seeds in SEEDS]
        print(f"| {name} | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |", flush=True)


def many(experiments: int) -> None:
    _table("three seeds, moderated", experiments, 3, moderated)


def two_seeds(experiments: int) -> None:
    _table("two seeds, moderated", experiments, 2, moderated)


def one_variance(experiments: int) -> None:
    _table("three seeds, one variance for all", experiments, 3, pooled)


def _table(title: str, experiments: int, seeds: int, variances: Variances) -> None:
    print(f"| G equal methods, {title} | family | single | lost | power |\n|---|---|---|---|---|")
    for name, (g, spread, first) in MANY.items():
        rates = many_nulls(experiments, g, seeds, spread, first, variances)
        cells = [*rates.values(), power(experiments, g, seeds, spread, first, variances)]
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


PARTS = {
    "runs": runs,
    "normal": normal,
    "many": many,
    "two_seeds": two_seeds,
    "one_variance": one_variance,
    "marks": marks,
}


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
