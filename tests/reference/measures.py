"""The calibration measures written out as they are defined: loops over samples and bins, plain Python floats.

Each takes probabilities as a list of rows and labels as a list, and shares with the package only the definitions.
"""

from __future__ import annotations

import math
from fractions import Fraction


def top_label(probs, labels):
    """(confidence, correctness) of every sample; the lowest index wins a tie."""
    pairs = []
    for row, y in zip(probs, labels, strict=True):
        best = 0
        for k in range(1, len(row)):
            if row[k] > row[best]:
                best = k
        pairs.append((float(row[best]), int(best == y)))
    return pairs


def equal_width(value, n_bins):
    """m with (m/M, (m+1)/M] holding the value, by comparison with the rounded quotients."""
    for m in range(n_bins):
        if value <= (m + 1) / n_bins:
            return m
    return n_bins - 1


def equal_width_bins(pairs, n_bins):
    bins = [[] for _ in range(n_bins)]
    for c, a in pairs:
        bins[equal_width(c, n_bins)].append((c, a))
    return [b for b in bins if b]


def equal_mass_bins(pairs, n_bins):
    """Edges at the ceil(mN/M)-th smallest confidence; a value goes to the first bin whose edge it does not exceed."""
    ordered, n = sorted(c for c, _ in pairs), len(pairs)
    edges = [ordered[math.ceil(Fraction(m * n, n_bins)) - 1] for m in range(1, n_bins + 1)]
    bins = [[] for _ in range(n_bins)]
    for c, a in pairs:
        bins[next(m for m in range(n_bins) if c <= edges[m])].append((c, a))
    return [b for b in bins if b]


def gap(members):
    """conf_m - acc_m"""
    return math.fsum(c for c, _ in members) / len(members) - sum(a for _, a in members) / len(members)


def binned_error(bins, n, norm="l1"):
    if norm == "l1":
        return math.fsum(len(b) / n * abs(gap(b)) for b in bins)
    return math.sqrt(math.fsum(len(b) / n * gap(b) ** 2 for b in bins))


def ece(probs, labels, n_bins=15, norm="l1"):
    return binned_error(equal_width_bins(top_label(probs, labels), n_bins), len(labels), norm)


def adaptive_ece(probs, labels, n_bins=15, norm="l1"):
    return binned_error(equal_mass_bins(top_label(probs, labels), n_bins), len(labels), norm)


def mce(probs, labels, n_bins=15):
    return max(abs(gap(b)) for b in equal_width_bins(top_label(probs, labels), n_bins))


def overconfidence(probs, labels, n_bins=15):
    bins = equal_width_bins(top_label(probs, labels), n_bins)
    return math.fsum(len(b) / len(labels) * max(0.0, gap(b)) for b in bins)


def underconfidence(probs, labels, n_bins=15):
    bins = equal_width_bins(top_label(probs, labels), n_bins)
    return math.fsum(len(b) / len(labels) * max(0.0, -gap(b)) for b in bins)


def debiased_square(probs, labels, n_bins=15):
    total = 0.0
    for b in equal_width_bins(top_label(probs, labels), n_bins):
        accuracy = sum(a for _, a in b) / len(b)
        variance = accuracy * (1 - accuracy) / (len(b) - 1) if len(b) > 1 else 0.0
        total += len(b) / len(labels) * (gap(b) ** 2 - variance)
    return total


def debiased_ece(probs, labels, n_bins=15):
    return math.sqrt(max(0.0, debiased_square(probs, labels, n_bins)))


def classwise_ece(probs, labels, n_bins=15):
    n, k = len(labels), len(probs[0])
    per_class = []
    for j in range(k):
        pairs = [(float(row[j]), int(y == j)) for row, y in zip(probs, labels, strict=True)]
        per_class.append(binned_error(equal_width_bins(pairs, n_bins), n))
    return math.fsum(per_class) / k


def kernel_sum(pairs, diagonal):
    return math.fsum(
        (ci - ai) * (cj - aj) * math.exp(-abs(ci - cj) / 0.4)
        for i, (ci, ai) in enumerate(pairs)
        for j, (cj, aj) in enumerate(pairs)
        if diagonal or i != j
    )


def kce(probs, labels):
    return math.sqrt(max(0.0, kernel_sum(top_label(probs, labels), diagonal=True))) / len(labels)


def skce(probs, labels):
    n = len(labels)
    return kernel_sum(top_label(probs, labels), diagonal=False) / (n * (n - 1)) if n > 1 else 0.0


def sece(probs, labels, bandwidth=0.01, self_term=True, norm="l1"):
    pairs = top_label(probs, labels)
    gaps = []
    for i, (ci, _) in enumerate(pairs):
        others = [(cj, aj) for j, (cj, aj) in enumerate(pairs) if self_term or j != i]
        if not others:
            gaps.append(0.0)
            continue
        exponents = [-((ci - cj) ** 2) / (2 * bandwidth**2) for cj, _ in others]
        weights = [math.exp(e - max(exponents)) for e in exponents]
        smooth = math.fsum(w * a for w, (_, a) in zip(weights, others, strict=True)) / math.fsum(weights)
        gaps.append(smooth - ci)
    if norm == "l1":
        return math.fsum(map(abs, gaps)) / len(gaps)
    return math.sqrt(math.fsum(g * g for g in gaps) / len(gaps))


def smooth_ece(probs, labels, points=2000):
    """smECE by the trapezoid rule, images of the Gaussian summed one by one, and bisection to 1/1024 from above."""
    pairs = top_label(probs, labels)

    def error(sigma):
        total = 0.0
        reach = math.ceil(5 * sigma) + 1
        for step in range(points + 1):
            t = step / points
            value = math.fsum(
                (c - a) * math.exp(-((t - image) ** 2) / (2 * sigma**2))
                for c, a in pairs
                for shift in range(-reach, reach + 1)
                for image in (2 * shift + c, 2 * shift - c)
            )
            total += abs(value) * (0.5 if step in (0, points) else 1.0)
        return total / points / (len(pairs) * sigma * math.sqrt(2 * math.pi))

    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        if middle < error(middle):
            low = middle
        else:
            high = middle
    return error(high)


def nll(probs, labels):
    if any(row[y] == 0 for row, y in zip(probs, labels, strict=True)):
        return math.inf
    return -math.fsum(math.log(row[y]) for row, y in zip(probs, labels, strict=True)) / len(labels)


def brier(probs, labels):
    return math.fsum(
        (float(v) - (k == y)) ** 2 for row, y in zip(probs, labels, strict=True) for k, v in enumerate(row)
    ) / len(labels)


def accuracy(probs, labels):
    return sum(a for _, a in top_label(probs, labels)) / len(labels)


def confidence(probs, labels):
    return math.fsum(float(c) for c, _ in top_label(probs, labels)) / len(labels)


def error(probs, labels):
    return 1 - accuracy(probs, labels)


def auroc(probs, labels):
    pairs = top_label(probs, labels)
    right = [c for c, a in pairs if a]
    wrong = [c for c, a in pairs if not a]
    if not right or not wrong:
        return 0.5
    return sum((r > w) + (r == w) / 2 for r in right for w in wrong) / (len(right) * len(wrong))


def aurc(probs, labels):
    """Errors of equal confidences are spread evenly among them: the mean over their orders."""
    ordered = sorted(top_label(probs, labels), key=lambda pair: -pair[0])
    mean_error = {}
    for c, _ in ordered:
        group = [1 - a for value, a in ordered if value == c]
        mean_error[c] = sum(group) / len(group)
    errors, total = 0.0, 0.0
    for n, (c, _) in enumerate(ordered, 1):
        errors += mean_error[c]
        total += errors / n
    return total / len(ordered)
