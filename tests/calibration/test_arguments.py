"""What measures may be called with, and what importing them brings along."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

import metacal
from metacal.calibration import MEASURES, TemperatureScaling, bootstrap, compare, ece, kce
from metacal.errors import InputError
from metacal.predictions import Predictions

PROBS = torch.softmax(2 * torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1)
LABELS = torch.multinomial(PROBS, 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
P = Predictions.from_probabilities(PROBS, LABELS)


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_takes_probabilities_and_labels(name):
    measure = getattr(metacal.calibration, name)
    expected = measure(P)
    arrays = [(PROBS, LABELS), (PROBS.numpy(), LABELS.numpy()), (PROBS.tolist(), LABELS.tolist())]
    for probs, labels in arrays:
        assert measure(probs, labels) == measure(probs, labels=labels) == expected
    assert MEASURES[name](PROBS, LABELS) == expected
    assert "(p: " in str(inspect.signature(measure)) and measure.__doc__  # what help() shows


def test_options_follow_the_arrays_as_they_follow_predictions():
    assert ece(PROBS, LABELS, 7, "l2") == ece(P, 7, "l2") == ece(PROBS, LABELS, n_bins=7, norm="l2") != ece(P)
    assert ece(p=P, n_bins=7) == ece(P, 7)


def test_logits_are_refused_and_never_guessed():
    logits = PROBS.log()
    for batch in (logits, logits.abs(), 2 * PROBS):
        with pytest.raises(
            InputError, match=r"^ece of two arrays takes probabilities.*row 0.*Predictions\.from_logits\("
        ):
            ece(batch, LABELS)
    # Logits that happen to be probabilities are taken for what two arrays are, whatever else they might be.
    assert ece(PROBS, LABELS) != ece(Predictions.from_logits(PROBS, LABELS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (PROBS,),
            r"kce takes a Predictions, or probabilities \(N, K\) and labels \(N,\), got Tensor alone; for ",
        ),
        ((LABELS, PROBS), r"kce takes probabilities \(N, K\) first and labels \(N,\) second, got them reversed"),
        ((PROBS[:, 0], LABELS), r"for a binary problem give both columns"),
        ((PROBS, LABELS[:-1]), r"labels must have shape \(60,\), got \(59,\)"),
        (([[0.5, 0.5], [1.0]], [0, 1]), "probs must be a numeric array"),
        ((np.full((60, 4), math.nan), LABELS), "got NaN in row 0"),
    ],
)
def test_other_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        kce(*arguments)


def test_labels_beside_predictions_and_arrays_beside_them_are_refused():
    with pytest.raises(InputError, match="ece of a Predictions takes no labels"):
        ece(P, labels=LABELS)
    for call in (
        lambda: bootstrap("ece", PROBS),
        lambda: compare(P, PROBS, "ece"),
        lambda: TemperatureScaling().fit(PROBS),
    ):
        with pytest.raises(InputError, match=r"^p2? must be a Predictions, got Tensor: .*from_logits"):
            call()
