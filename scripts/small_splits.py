"""What post-hoc scaling does to the test NLL when its validation split is small.

    python scripts/small_splits.py [--seeds 1] [--summary]

Tables are scikit-learn's four bundled classification sets × five combinations of a model and of a split size × seeds:
40 % of the rows are test, the split is drawn from the others, and the model is trained on a third of what is left (60
rows at least). For each table it prints how many of the split's predictions are wrong, T with its interval, and the
test NLL without scaling, after temperature scaling by maximum likelihood (`shrink=False`), after each map of
`metacal.calibration` as it is by default, and after the one that cross-validation chooses (`auto`); then of each map
the mean and the largest change. It ends with status 1 if one of them but the first raised the NLL on average, or that
of any table by more than 0.02.

    --seeds S    5 tables of each set and seed; one seed gives the twenty tables of docs/measures.md
    --summary    the last lines only
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from sklearn import datasets
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from metacal.calibration import SCALINGS, Scaling, TemperatureScaling, fit_scaling, nll
from metacal.predictions import Predictions
from metacal.report.tables import Cell, Column, Table

DATA: dict[str, Callable[..., Any]] = {
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
    "breast cancer": datasets.load_breast_cancer,
    "digits": datasets.load_digits,
}
MODELS: dict[str, Callable[[int], Any]] = {
    "logistic": lambda seed: LogisticRegression(max_iter=1000),
    "logistic, C = 10^4": lambda seed: LogisticRegression(C=1e4, max_iter=3000),
    "MLP 64": lambda seed: MLPClassifier((64,), max_iter=60, random_state=seed),
    "MLP 64, 600 epochs": lambda seed: MLPClassifier(
        (64,), max_iter=600, random_state=seed, alpha=0, n_iter_no_change=600
    ),
}
CASES = (
    ("logistic", 11),
    ("MLP 64", 13),
    ("logistic, C = 10^4", 20),
    ("MLP 64, 600 epochs", 30),
    ("logistic", 40),
)
MAPS = ("T, ML", *(name for name in SCALINGS if name != "none"), "auto")
LARGEST = 0.02  # nats by which no map may raise the test NLL


class Outcome(NamedTuple):
    """One table: the split's size and wrong predictions, T with its interval, the test NLL without and after maps."""

    data: str
    model: str
    n: int
    wrong: int
    temperature: float
    low: float
    high: float
    plain: float
    scaled: dict[str, float]


def outcomes(seeds: int) -> Iterator[Outcome]:
    for seed in range(seeds):
        for data, load in DATA.items():
            x, y = load(return_X_y=True)
            for case, (model, n) in enumerate(CASES):
                yield measure(data, model, n, x, y, len(CASES) * seed + case)


def val_and_test(model: str, n: int, x: Any, y: Any, seed: int) -> tuple[Predictions, Predictions]:
    """The predictions of a model, trained anew, of n held-out rows and of the test rows."""
    x_others, x_test, y_others, y_test = train_test_split(x, y, test_size=0.4, random_state=seed, stratify=y)
    x_train, x_val, y_train, y_val = train_test_split(x_others, y_others, test_size=n, random_state=seed)
    few = max(60, len(x_train) // 3)
    scaler = StandardScaler().fit(x_train[:few])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that training stopped before it converged is meant
        fitted = MODELS[model](seed).fit(scaler.transform(x_train[:few]), y_train[:few])
    val, test = (
        Predictions.from_logits(np.log(np.maximum(fitted.predict_proba(scaler.transform(x)), 1e-15)), y)
        for x, y in ((x_val, y_val), (x_test, y_test))
    )
    return val, test


def measure(data: str, model: str, n: int, x: Any, y: Any, seed: int) -> Outcome:
    """Train, fit every map on n held-out rows, and measure on the test rows."""
    val, test = val_and_test(model, n, x, y, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that splits are small is meant
        maps: dict[str, Scaling] = {"T, ML": TemperatureScaling(shrink=False).fit(val)}
        maps |= {name: fit_scaling(val, name) for name in MAPS if name not in maps}
    wrong = len(val) - int(val.correct.sum())
    scaled = {name: nll(maps[name].apply(test)) for name in MAPS}
    temperature = maps["temperature"]
    assert isinstance(temperature, TemperatureScaling)
    return Outcome(data, model, n, wrong, temperature.temperature, *temperature.interval, nll(test), scaled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--summary", action="store_true")
    arguments = parser.parse_args()
    found = list(outcomes(arguments.seeds))
    columns = [Column("model"), Column("n", "val"), Column("wrong"), Column("T", digits=2), Column("interval")]
    columns += [Column(name, digits=3) for name in ("unscaled", *MAPS)]
    rows: list[tuple[str, list[Cell]]] = [
        (o.data, [o.model, o.n, o.wrong, o.temperature, f"{o.low:.2f} to {o.high:.2f}", o.plain, *o.scaled.values()])
        for o in found
    ]
    if not arguments.summary:
        print(Table(columns, rows, "data", "Test NLL after scaling fitted on a small split").render("markdown"))
        print()
    changes = {name: [o.scaled[name] - o.plain for o in found] for name in MAPS}
    of_maps: list[tuple[str, list[Cell]]] = [
        (name, [statistics.fmean(d), min(d), max(d), sum(x > LARGEST for x in d)]) for name, d in changes.items()
    ]
    columns = [Column("mean", digits=4), Column("least", digits=3), Column("largest", digits=3), Column("above .02")]
    title = f"Change of the test NLL by scaling, {len(found)} tables"
    print(Table(columns, of_maps, "map", title).render("markdown"))
    shrunk = [change for name, change in changes.items() if name != "T, ML"]
    return int(any(statistics.fmean(d) >= 0 or max(d) > LARGEST for d in shrunk))


if __name__ == "__main__":
    sys.exit(main())
