"""Sentences about runs and comparisons: they say what the numbers beside them say."""

from __future__ import annotations

import math
from dataclasses import replace

from reference.run_folders import write_run

from metacal.report.judge import judge_groups
from metacal.report.verdict import direction, meaning, verdict
from metacal.runs.record import find_runs, group_runs, load_runs


def test_a_runs_numbers_in_words():
    scores = {"test/accuracy": 0.9, "test/confidence": 0.95, "test/ece": 0.0621, "test/n": 1200}
    assert meaning(scores) == (
        "90.0 % of 1,200 predictions on test are right, and their mean confidence is 95.0 %: 5.0 points too high. Bin "
        "by bin, confidence is off by 6.2 points (ECE)."
    )
    more = {"test/ece_low": 0.05, "test/ece_high": 0.07, "test/ece_scaled": 0.031, "test/temperature": 1.25}
    assert meaning(scores | more | {"test/confidence": 0.8}).endswith(
        "10.0 points too low. Bin by bin, confidence is off by 6.2 points (ECE), 95 % interval 5.0 to 7.0; after "
        "scaling (T = 1.25, fitted on val) by 3.1."
    )
    assert meaning({"accuracy": 0.5, "confidence": 0.5}) == "", "nothing is said of what is not known"


def test_better_and_worse_follow_the_measure():
    for name, size, word in (
        ("ece", 0.1, "worse"),
        ("ece", -0.1, "better"),
        ("accuracy", 0.1, "better"),
        ("accuracy", -0.1, "worse"),
        ("confidence", 0.1, ""),
        ("ece", 0.0, ""),
        ("ece", math.nan, ""),
    ):
        assert direction(name, size) == word


def test_the_verdict_names_those_that_the_table_marks(tmp_path):
    for method, sharpness in {"cross_entropy": 3.0, "focal": 1.0, "brier": 3.0}.items():
        for seed in range(3):
            write_run(tmp_path / method / f"seed{seed}", [f"method={method}"], seed, sharpness=sharpness)
    groups = group_runs(load_runs(find_runs([tmp_path]))[0])
    asked = {"measures": ["ece", "nll"], "resamples": 16}
    result = judge_groups(groups, baseline=["method=cross_entropy"], **asked)
    names = [g.short for g in result.groups]
    judged = result.against_baseline["none"]["ece"][names.index("focal")]
    assert judged is not None and judged.adjusted < 0.05
    assert verdict(result) == (
        f"Without scaling, focal ({100 * abs(judged.test.difference):.2f} points better) differs from cross_entropy in "
        "ECE beyond noise, no other does; after temperature scaling, no method differs from cross_entropy in ECE "
        "beyond noise (two-sided tests at 5 %, Holm-corrected for 2 comparisons, over 3 seeds)."
    )
    assert result.to_dict()["verdict"] == verdict(result)
    best = verdict(judge_groups(groups, scaling="none", **asked))
    assert "differ from focal (the best: ECE " in best and "worse" in best and "better" not in best
    tests = {s: {m: [j and j._replace(adjusted=math.nan) for j in of] for m, of in by.items()}
             for s, by in result.against_baseline.items()}  # fmt: skip
    untested = verdict(replace(result, against_baseline=tests))
    assert untested.startswith("Without scaling, brier and focal could not be tested against cross_entropy; after")
    assert verdict(judge_groups(groups[:1], **asked)) == ""
    single = judge_groups([replace(g, runs=g.runs[:1]) for g in groups], **asked)
    assert "over 1 seed, so another seed may give another result" in verdict(single)
