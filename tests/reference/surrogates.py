"""The surrogates as their formulas read: float64, loops over pairs of samples, no gradient, no cleverness."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["brier", "confidence_gap", "dece", "mdca", "mmce", "nll", "sece", "skce", "soft_ece"]


def _softmax(logits):
    z = np.asarray(logits, dtype=np.float64)
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _top(logits, labels):
    p = _softmax(logits)
    predicted = np.asarray(logits).argmax(axis=1)
    return [row[k] for row, k in zip(p, predicted)], [float(k == y) for k, y in zip(predicted, np.asarray(labels))]


def sece(logits, labels, bandwidth=0.01, self_term=True, norm="l1", bank=None):
    c, a = _top(logits, labels)
    references = [(cj, aj, j) for j, (cj, aj) in enumerate(zip(c, a))]
    if bank is not None:
        references += [(float(cj), float(aj), -1) for cj, aj in zip(*bank)]
    gaps = []
    for i, ci in enumerate(c):
        others = [(cj, aj) for cj, aj, j in references if self_term or j != i]
        if not others:
            return 0.0
        # The ratio is unchanged when all weights are divided by the largest, which keeps them from vanishing together.
        nearest = min((ci - cj) ** 2 for cj, _ in others)
        weights = [math.exp(-((ci - cj) ** 2 - nearest) / (2 * bandwidth**2)) for cj, _ in others]
        gaps.append(sum(w * aj for w, (_, aj) in zip(weights, others)) / sum(weights) - ci)
    if norm == "l1":
        return sum(abs(g) for g in gaps) / len(gaps)
    return math.sqrt(sum(g * g for g in gaps) / len(gaps))


def mmce(logits, labels, bandwidth=0.4, weighted=False):
    c, a = _top(logits, labels)
    n, right = len(c), sum(a)
    total = 0.0
    for ci, ai in zip(c, a):
        for cj, aj in zip(c, a):
            kernel = math.exp(-abs(ci - cj) / bandwidth)
            if not weighted:
                total += (ci - ai) * (cj - aj) * kernel / n**2
            elif ai and aj:
                total += (1 - ci) * (1 - cj) * kernel / right**2
            elif not ai and not aj:
                total += ci * cj * kernel / (n - right) ** 2
            else:
                total -= (ci if not ai else 1 - ci) * (cj if not aj else 1 - cj) * kernel / (right * (n - right))
    return math.sqrt(max(total, 0.0))


def skce(logits, labels, bandwidth=0.4):
    c, a = _top(logits, labels)
    n = len(c)
    if n == 1:
        return 0.0
    total = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                total += (c[i] - a[i]) * (c[j] - a[j]) * math.exp(-abs(c[i] - c[j]) / bandwidth)
    return total / (n * (n - 1))


def _from_memberships(c, a, members, norm):
    n, total = len(c), 0.0
    for m in range(len(members[0])):
        mass = sum(u[m] for u in members)
        if mass == 0:
            continue
        accuracy = sum(u[m] * ai for u, ai in zip(members, a)) / mass
        confidence = sum(u[m] * ci for u, ci in zip(members, c)) / mass
        total += mass / n * abs(accuracy - confidence) ** (1 if norm == "l1" else 2)
    return total if norm == "l1" else math.sqrt(total)


def dece(logits, labels, n_bins=15, t_a=100.0, t_b=0.01, norm="l1"):
    c, _ = _top(logits, labels)
    accuracies = []
    for row, y in zip(_softmax(logits), np.asarray(labels)):
        rank = 1 + sum(1 / (1 + math.exp(-t_a * (row[k] - row[y]))) for k in range(len(row)) if k != y)
        accuracies.append(max(0.0, 2 - rank))
    members = []
    for ci in c:
        scores = [((m + 1) * ci - sum(k / n_bins for k in range(m + 1))) / t_b for m in range(n_bins)]
        members.append(_softmax([scores])[0])
    return _from_memberships(c, accuracies, members, norm)


def soft_ece(logits, labels, n_bins=15, temperature=0.01, norm="l2"):
    c, a = _top(logits, labels)
    members = []
    for ci in c:
        scores = [-((ci - (m + 0.5) / n_bins) ** 2) / temperature for m in range(n_bins)]
        members.append(_softmax([scores])[0])
    return _from_memberships(c, a, members, norm)


def confidence_gap(logits, labels, squared=False):
    c, a = _top(logits, labels)
    gap = sum(c) / len(c) - sum(a) / len(a)
    return gap**2 if squared else abs(gap)


def mdca(logits, labels):
    p, total = _softmax(logits), 0.0
    for k in range(p.shape[1]):
        confidence = sum(row[k] for row in p) / len(p)
        frequency = sum(int(y) == k for y in labels) / len(p)
        total += abs(confidence - frequency)
    return total / p.shape[1]


def nll(logits, labels):
    return sum(-math.log(row[y]) for row, y in zip(_softmax(logits), np.asarray(labels))) / len(labels)


def brier(logits, labels):
    p = _softmax(logits)
    total = 0.0
    for row, y in zip(p, np.asarray(labels)):
        total += sum((pk - (k == y)) ** 2 for k, pk in enumerate(row))
    return total / len(p)
