"""Conformal sets and out-of-distribution scores: exact coverage, and scikit-learn's ROC."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve

from metacal.calibration.conformal import SCORES, ConformalSets, share_interval
from metacal.calibration.novelty import OOD_SCORES, novelty
from metacal.errors import InputError
from metacal.predictions import Predictions


def sample(n: int, k: int = 5, seed: int = 0, scale: float = 2.0) -> Predictions:
    g = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, k, generator=g, dtype=torch.float64)
    return Predictions.from_logits(z, torch.randint(k, (n,), generator=g))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("n", "alpha"), [(4, 0.2), (4, 0.35), (5, 0.1), (3, 0.25)])
def test_coverage_is_exact_over_all_orders(score: str, n: int, alpha: float) -> None:
    """Of n + 1 exchangeable samples each order is as likely: the share in which the last is covered is the coverage."""
    p = sample(n + 1)
    hits = [
        bool(sets.of(p[torch.tensor(order[-1:])])[0, p.labels[order[-1]]])
        for order in itertools.permutations(range(n + 1))
        for sets in [ConformalSets(score, alpha, randomised=False).fit(p[torch.tensor(order[:-1])])]
    ]
    k = math.ceil((n + 1) * (1 - alpha) - 1e-9)
    expected = 1.0 if k > n else k / (n + 1)
    assert np.mean(hits) == pytest.approx(expected, abs=1e-12) and expected >= 1 - alpha - 1e-12


def test_scores_are_those_of_the_papers() -> None:
    p = sample(40)
    val, test = p[:30], p[30:]
    probs = test.probs.numpy()

    def score(name: str, row: np.ndarray, k: int) -> float:
        if name == "thr":
            return 1 - row[k]
        total = row[row >= row[k]].sum()  # u = 1
        return total + (0.3 * max(0, (row >= row[k]).sum() - 2) if name == "raps" else 0)

    for name in SCORES:
        sets = ConformalSets(name, 0.2, penalty=0.3, free=2, randomised=False).fit(val)
        of_val = sorted(score(name, row, y) for row, y in zip(val.probs.numpy(), val.labels.tolist()))
        assert sets.threshold == pytest.approx(of_val[math.ceil(31 * 0.8) - 1], abs=1e-12)
        expected = [[score(name, row, k) <= sets.threshold + 1e-12 for k in range(5)] for row in probs]
        assert sets.of(test).tolist() == expected
        measured = sets.measure(test)
        assert measured.size == pytest.approx(np.mean(np.sum(expected, 1)))
        assert measured.coverage == np.mean([row[y] for row, y in zip(expected, test.labels.tolist())])
    small = ConformalSets("aps", 0.01).fit(val)
    assert small.threshold == math.inf and bool(small.of(test).all())


def test_random_sets_cover_what_they_should_and_not_more() -> None:
    big, test = sample(4000, seed=1), sample(4000, seed=2)
    for name in SCORES:
        drawn, plain = (ConformalSets(name, 0.3, randomised=r).fit(big) for r in (True, False))
        assert abs(drawn.measure(test).coverage - 0.7) < 0.03
        assert drawn.measure(test).size <= plain.measure(test).size + 0.05
        assert torch.equal(drawn.of(test), drawn.of(test))


def test_intervals_of_shares_are_scipys() -> None:
    for hits, n in ((0, 5), (5, 5), (3, 10), (950, 1000)):
        known = binomtest(hits, n).proportion_ci(method="wilson")
        assert share_interval(hits, n) == pytest.approx((known.low, known.high), abs=1e-12)


def test_bad_sets_are_refused() -> None:
    p = sample(10)
    for keys, message in (({"score": "raps "}, "did you mean 'raps'"), ({"alpha": 1.0}, r"alpha must lie in \(0, 1\)")):
        with pytest.raises(InputError, match=message):
            ConformalSets(**keys)
    with pytest.raises(InputError, match="must be fitted"):
        ConformalSets().of(p)
    with pytest.raises(InputError, match="5 classes of the fit, got 3"):
        ConformalSets().fit(p).of(sample(4, 3))


def test_novelty_is_the_roc_of_scikit_learn() -> None:
    inside, outside = sample(200, scale=3.0), sample(150, seed=1, scale=1.0)
    z = [p.logits.numpy() for p in (inside, outside)]
    probs = [p.probs.numpy() for p in (inside, outside)]
    scores = {
        "max_probability": [q.max(1) for q in probs],
        "energy": [np.log(np.exp(x).sum(1)) for x in z],
        "entropy": [(q * np.log(q)).sum(1) for q in probs],
    }
    measured = novelty(inside, outside)
    assert list(measured) == list(OOD_SCORES)
    known = np.r_[np.ones(200), np.zeros(150)]
    for name, (s, other) in scores.items():
        fpr, tpr, _ = roc_curve(known, np.r_[s, other], drop_intermediate=False)
        assert measured[name].auroc == pytest.approx(roc_auc_score(known, np.r_[s, other]), abs=1e-12)
        assert measured[name].fpr == pytest.approx(fpr[np.argmax(tpr >= 0.95)], abs=1e-12)
    coarse = [Predictions.from_logits(p.logits.round(), p.labels) for p in (inside, outside)]
    c = np.concatenate([p.confidence.numpy() for p in coarse])
    assert novelty(*coarse)["max_probability"].auroc == pytest.approx(roc_auc_score(known, c), abs=1e-12)  # ties
    without_logits = [Predictions.from_probabilities(p.probs, p.labels) for p in (inside, outside)]
    assert list(novelty(*without_logits)) == ["max_probability", "entropy"]
