"""The comparison of groups of runs: values, tests, marks, tables in every format, figures and the page."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import warnings

import numpy as np
import pytest
from omegaconf import OmegaConf
from reference.run_folders import write_run
from scipy import stats

from metacal.calibration import MEASURES, TemperatureScaling
from metacal.config.compose import config_dir
from metacal.errors import InputError
from metacal.jsonio import to_json
from metacal.report.html import comparison_page, figures_of
from metacal.report.judge import judge_groups, load_predictions
from metacal.report.run_figures import (
    accuracy_ece_plane,
    curves_of,
    overlaid_reliability,
    risk_coverage,
    training_curves,
)
from metacal.report.significance import difference, moderated
from metacal.report.verdict import verdict
from metacal.runs.record import find_runs, group_runs, load_runs

METHODS = {"cross_entropy": 3.0, "focal": 1.0, "brier": 1.05}  # sharpness of the logits: 1 is calibrated


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for method, sharpness in METHODS.items():
        for seed in range(3):
            write_run(root / method / f"seed{seed}", [f"method={method}"], seed, sharpness=sharpness, n=400)
    return root


@pytest.fixture(scope="module")
def groups(folder):
    return groups_of(folder)


@pytest.fixture(scope="module")
def result(groups):
    return judge_groups(groups, measures=["accuracy", "ece", "nll"], baseline=["method=cross_entropy"], resamples=40)


def groups_of(*words):
    return group_runs(load_runs(find_runs(words))[0])


def index(result, method):
    return [g.method for g in result.groups].index(method)


def test_values_are_those_of_the_saved_predictions(result):
    for i, g in enumerate(result.groups):
        for s, run in enumerate(g.runs):
            p, val = run.predictions("test"), run.predictions("val")
            scaled = TemperatureScaling().fit(val).apply(p)
            for name in ("accuracy", "ece", "nll"):
                assert result.results["none"][name][i].values[s] == MEASURES[name](p)
                assert result.results["temperature"][name][i].values[s] == pytest.approx(MEASURES[name](scaled))


def test_what_was_measured_is_not_measured_again(folder, tmp_path, monkeypatch):
    """Unless predictions, resamples, code or options are others, or a measure is not of the package."""
    from metacal.report import remembered

    shutil.copytree(folder / "focal", tmp_path / "focal", ignore=shutil.ignore_patterns("measured.npz"))
    measured = []
    sample = remembered.sample_one

    def counted(measures, p, counts):
        measured.extend(measures)
        return sample(measures, p, counts)

    monkeypatch.setattr(remembered, "sample_one", counted)

    def compared(names=("ece", "nll"), **options):
        measured.clear()
        result = judge_groups(groups_of(tmp_path), measures=names, **{"resamples": 40} | options)
        return [[s.tolist() for s in sampled[0]] for of in result.results.values() for sampled in of.values()]

    first = compared()
    assert len(measured) == 3 * 2 * 2, "of three runs two measures, before and after scaling"
    assert compared() == first and measured == []
    assert compared(["ece"], n_bins=10) != first[::2] and measured == ["ece"] * 6
    assert compared() == first and measured == [], "both are kept"
    assert len(compared(resamples=41)[0][1][0]) == 41 and len(measured) == 12
    kept = tmp_path / "focal/seed1/predictions/measured.npz"
    for damage in (kept.read_bytes()[:-30], b"", None):
        compared()
        kept.unlink() if damage is None else kept.write_bytes(damage)
        assert compared() == first and len(measured) == 4
    monkeypatch.setattr(remembered, "_code", lambda: "another version")
    assert compared() == first and len(measured) == 12
    other = folder / "focal/seed1/predictions/val.npz"
    shutil.copy(other, tmp_path / "focal/seed2/predictions/val.npz")
    assert compared() == first and measured == [], "val is not asked for"
    assert compared(split="val") != first and len(measured) == 3 * 2
    monkeypatch.setitem(MEASURES, "ece", MEASURES["ece"].__class__(lambda p: 0.5, "Mine"))
    for _ in range(2):
        assert compared()[0][0] == [0.5] * 3 and set(measured) >= {"ece"}


def test_the_best_and_what_does_not_differ_from_it_are_marked(result):
    best = result.best["none"]["nll"]
    assert result.groups[best].method in ("focal", "brier")
    marked = {g.method for i, g in enumerate(result.groups) if result.is_among_best("none", "nll", i)}
    # Calibrated and nearly calibrated runs cannot be told apart; three times too sharp ones can.
    assert marked == {"focal", "brier"}
    ce = result.against_best["none"]["nll"][index(result, "cross_entropy")]
    assert ce.adjusted < 0.05 and ce.test.low > 0 and result.against_best["none"]["nll"][best] is None


def test_p_values_are_adjusted_over_the_comparisons_of_a_column(result):
    judged = [j for j in result.against_baseline["none"]["ece"] if j is not None]
    small, large = sorted(judged, key=lambda j: j.test.p_value)
    assert small.adjusted == pytest.approx(2 * small.test.p_value)
    assert large.adjusted == pytest.approx(max(small.adjusted, large.test.p_value))


def test_seeds_are_paired_where_they_are_the_same(folder, result):
    """What seeds add to the variance is that of the paired differences, or of each group on its own."""
    ce, focal = (result.groups[index(result, m)] for m in ("cross_entropy", "focal"))
    nll = {m: result.results["none"]["nll"][index(result, m)].values for m in ("cross_entropy", "focal")}
    paired = result.against_baseline["none"]["nll"][index(result, "focal")].test
    others = judge_groups(
        group_runs([*ce.runs, *focal.runs[:2]]), measures=["nll"], baseline=["method=cross_entropy"], resamples=40
    )
    assert "seeds are taken as independent" in " ".join(others.notes())
    unpaired = others.against_baseline["none"]["nll"][index(others, "focal")].test
    d = nll["focal"] - nll["cross_entropy"]
    assert paired.difference == pytest.approx(d.mean())
    half = (paired.high - paired.low) / 2
    assert half >= stats.t.ppf(0.975, 2) * d.std(ddof=1) / np.sqrt(3) * 0.999
    wide = nll["focal"][:2].var(ddof=1) / 2 + nll["cross_entropy"].var(ddof=1) / 3
    assert (unpaired.high - unpaired.low) / 2 >= 1.96 * np.sqrt(wide)


def test_runs_without_any_temperature_are_compared_unscaled(tmp_path):
    for method in ("cross_entropy", "focal"):
        write_run(tmp_path / method / "seed0", [f"method={method}"], n=60, **{"test/temperature": None})
    result = judge_groups(groups_of(tmp_path), measures=["nll"], resamples=20)
    assert result.scalings == ["none"] and not result.left_out
    with pytest.raises(InputError, match="no temperature"):
        judge_groups(groups_of(tmp_path), measures=["nll"], resamples=20, scaling="temperature")


def test_one_run_a_method_speaks_of_these_runs_only(folder):
    result = judge_groups(groups_of(f"{folder}/*/seed0"), measures=["nll"], resamples=40)
    assert "speak of these runs only" in result.test_note() and "over seeds" not in result.test_note()
    judged = result.against_best["none"]["nll"][index(result, "cross_entropy")]
    assert np.isnan(judged.test.seed_share) and judged.adjusted < 0.05


def test_sorting_and_scalings(groups):
    result = judge_groups(groups, measures=["ece", "accuracy"], sort="ece", resamples=4)
    for scaling in ("none", "temperature"):
        means = [result.results[scaling]["ece"][i].mean for i in result.order[scaling]]
        assert means == sorted(means)
    by_accuracy = judge_groups(groups, measures=["accuracy"], sort="accuracy", scaling="none", resamples=4)
    means = [by_accuracy.results["none"]["accuracy"][i].mean for i in by_accuracy.order["none"]]
    assert means == sorted(means, reverse=True) and by_accuracy.scalings == ["none"]
    val = judge_groups(groups, measures=["ece"], split="val", resamples=4)
    assert val.scalings == ["none"] and "Val split" in val.notes()[0]
    run = groups[0].runs[0]
    assert val.results["none"]["ece"][0].values[0] == MEASURES["ece"](run.predictions("val"))


def test_one_scaling_is_still_named(groups):
    result = judge_groups(groups, measures=["ece"], split="val", resamples=4, baseline=["method=focal"])
    for table in (result.table(), result.difference_table()):
        assert table.columns[0].name == "scaling" and all(cells[0] == "none" for _, cells in table.rows)
    assert result.table().title == "Val split" and result.difference_table().title.endswith("focal, val split")


def test_the_note_says_what_the_tests_take_as_given(groups):
    both = judge_groups(groups, measures=["ece"], resamples=4).test_note()
    none = judge_groups(groups, measures=["ece"], resamples=4, scaling="none").test_note()
    assert both.endswith("takes as given the one split of the images and each run's one fitted temperature.")
    assert none.endswith("takes as given the one split of the images.")


def test_step_cost_is_relative_to_the_baseline_or_the_cheapest(tmp_path):
    write_run(tmp_path / "a", ["method=focal"], **{"time/train_s": 6.0})
    write_run(tmp_path / "b", ["method=brier"], **{"time/train_s": 3.0})
    groups = groups_of(tmp_path)
    assert judge_groups(groups, measures=["ece"], resamples=4).step_costs() == [2.0, 1.0]
    given = judge_groups(groups, measures=["ece"], resamples=4, baseline=["method=focal"], sort="step_cost")
    assert given.step_costs() == [1.0, 0.5] and list(given.order["none"]) == [1, 0]
    assert "the baseline focal = 1 (200 ms)" in " ".join(given.notes())
    write_run(tmp_path / "c", ["method=mmce"], step_ms=[50.0, 5000.0, 60.0], device="cuda")
    logged = judge_groups(groups_of(tmp_path), measures=["ece"], resamples=4)
    assert logged.step_costs()[2] == 1.0 and "the cheapest mmce = 1 (60 ms)" in " ".join(logged.notes())
    assert "not taken alike: different device (cpu, cuda)" in " ".join(logged.notes())
    shutil.rmtree(tmp_path / "c")
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    del summary["time/train_s"]
    (tmp_path / "b" / "summary.json").write_text(json.dumps(summary))
    assert judge_groups(groups_of(tmp_path), measures=["ece"], resamples=4).step_costs() == [1.0, None]


# ------------------------------------------------------------------------------------------------ refusals


def test_bad_arguments_are_named(groups):
    for keys, message in (
        ({"measures": ["ecee"]}, r"measures must be one of .* \(did you mean 'ece'\?\)"),
        ({"sort": "speed"}, "sort must be one of"),
        ({"split": "train"}, "split must be one of test, val"),
        ({"split": "val", "scaling": "temperature"}, "needs split=test"),
        ({"baseline": ["method"]}, "baseline must be KEY=VALUE"),
        ({"baseline": ["methd=focal"]}, "the runs have no key 'methd'"),
        ({"baseline": ["method=mmce"]}, "must pick one of the groups, none fits: brier; cross_entropy; focal"),
        ({"baseline": ["epochs=30"]}, "must pick one of the groups"),
        ({"alpha": 0.0}, "alpha must lie in"),
        ({"resamples": 1}, "resamples must be an integer >= 2"),
        ({"n_bins": 0}, "n_bins must be >= 1"),
    ):
        with pytest.raises(InputError, match=message):
            judge_groups(groups, **keys)
    with pytest.raises(InputError, match="no finished run to compare"):
        judge_groups([])


def test_runs_without_good_predictions_are_left_out_and_other_labels_refused(tmp_path):
    for seed in range(2):
        write_run(tmp_path / "a" / f"seed{seed}", ["method=focal"], seed)
    write_run(tmp_path / "b", ["method=brier"])
    (tmp_path / "a" / "seed1" / "predictions" / "test.npz").write_bytes(b"cut off")
    result = judge_groups(groups_of(tmp_path), measures=["ece"], resamples=4)
    assert [g.seeds for g in result.groups] == [(0,), (0,)]
    assert [(left.path.name, "npz" in left.reason) for left in result.left_out] == [("seed1", True)]
    assert any(note.startswith("Left out: ") and "seed1" in note for note in result.notes())
    write_run(tmp_path / "c", ["method=brier"], 1, labels_seed=0, n=150)
    with pytest.raises(InputError, match=r"test split of .*/c \(150 samples\) is not that of .* \(200 samples\)"):
        judge_groups(groups_of(tmp_path), measures=["ece"], resamples=4)


def test_other_val_sets_are_refused_where_val_is_compared(tmp_path):
    for i, method in enumerate(("focal", "brier")):
        data = {"fingerprint": "0", "fingerprints": {"train": "a", "meta": None, "val": f"val{i}"}}
        write_run(tmp_path / method, [f"method={method}"], data=data)
    assert len(judge_groups(groups_of(tmp_path), measures=["ece"], resamples=4).groups) == 2
    with pytest.raises(InputError, match=r"2 different val sets .*/brier; .*/focal"):
        judge_groups(groups_of(tmp_path), split="val", measures=["ece"], resamples=4)


def test_many_groups_share_what_they_tell_about_seeds(tmp_path):
    for gamma in range(1, 9):
        for seed in range(2):
            words = ["method=focal", f"gamma.value={gamma}"]
            write_run(tmp_path / f"{gamma}" / f"seed{seed}", words, seed, sharpness=gamma, n=60)
    write_run(tmp_path / "one", ["method=brier"], n=60)
    one, *many = groups_of(tmp_path)
    groups = [*many, one]
    keys = {"measures": ["ece"], "scaling": "none", "resamples": 8, "baseline": ["method=focal", "gamma.value=1"]}
    result = judge_groups(groups, **keys)
    assert result.moderated and "moderated" in result.test_note()
    samples = result.results["none"]["ece"]
    known = moderated(np.stack([r.values for r in samples[:8]]))
    for i in range(1, 8):
        pooled = known.variances[i], known.variances[0], known.df
        want = difference(samples[i], samples[0], seed_variance=pooled)
        assert result.against_baseline["none"]["ece"][i].test == want
    # A group of other seeds is tested as ever.
    last = result.against_baseline["none"]["ece"][8].test
    np.testing.assert_equal(last, difference(samples[8], samples[0], paired=False))
    few = judge_groups(groups[:7], **keys)
    want = difference(samples[1], samples[0])
    assert not few.moderated and few.against_baseline["none"]["ece"][1].test == want


def test_what_cannot_be_tested_has_a_sign_of_its_own(groups):
    """AUROC of runs without errors in some resample is not finite: unmarked would read as worse."""
    result = judge_groups(groups, measures=["auroc", "ece"], resamples=8, baseline=["method=cross_entropy"])
    i = next(i for i in range(3) if i != result.best["none"]["auroc"])
    broken = result.against_best["none"]["auroc"][i]._replace(adjusted=np.nan)
    for which in (result.against_best, result.against_baseline):
        which["none"]["auroc"] = [broken if k == i else judged for k, judged in enumerate(which["none"]["auroc"])]
    assert result.is_untested("none", "auroc", i) and not result.is_among_best("none", "auroc", i)
    text = result.table("none").render("text")
    (row,) = [line for line in text.splitlines() if line.startswith(f"{result.groups[i].method} ") and " none " in line]
    assert " ? " in row and "?: not tested" in text
    rows = list(csv.DictReader(io.StringIO(result.table(csv=True).render("csv"))))
    assert rows[i]["auroc_mark"] == "untested" and rows[i]["auroc_p"] == "" and float(rows[i]["auroc"]) > 0
    if i != result.baseline:
        assert " ?" in result.difference_table().render("text")
    else:
        assert "?" not in judge_groups(groups, measures=["ece"], resamples=4).table("none").render("text")


def test_what_makes_groups_less_comparable_is_said(tmp_path):
    write_run(tmp_path / "a", ["method=focal"], device="cuda")
    data = {"name": "digits", "fingerprint": "00000000", "train": 90, "meta": 5, "val": 9, "test": 9}
    write_run(tmp_path / "b", ["method=brier", "data.split_seed=3"], data=data, versions={"metacal": "0.2"})
    said = " ".join(judge_groups(groups_of(tmp_path), measures=["ece"], resamples=4).warnings())
    for text in (
        "training images: 100 (focal, split_seed=0); 95 (brier, split_seed=3)",
        "data.split_seed",
        "different device (cpu, cuda)",
        "different versions",
    ):
        assert text in said


# ------------------------------------------------------------------------------------------------ forms


def test_text_and_markdown_name_every_run(result):
    text = result.table().render("text")
    assert "cross_entropy, seed 2: " in text and "metacal train method=cross_entropy seed=2" in text
    assert text.count("Versions: metacal 0.1.0, torch 2.0.") == 1
    assert result.table("folders").render("text").count("{seed0,seed1,seed2}") == 3
    runs = list(csv.DictReader(io.StringIO(result.runs_table().render("csv"))))
    assert len(runs) == 9 and {r["seed"] for r in runs} == {"0", "1", "2"}
    markdown = result.table("none").render("markdown")
    assert re.search(r"\| cross_entropy \| none \|.* \| \d", markdown) and "**" in markdown


def test_csv_stands_alone(result):
    rows = list(csv.DictReader(io.StringIO(result.table(csv=True).render("csv"))))
    assert len(rows) == 6
    first = rows[0]
    i = index(result, first["method"])
    assert float(first["ece"]) == pytest.approx(result.results["none"]["ece"][i].mean)
    assert (first["scaling"], first["split"], first["seeds"]) == ("none", "test", "0, 1, 2")
    marks = {name: [row[f"{name}_mark"] for row in rows] for name in ("accuracy", "ece", "nll")}
    assert all(m[:3].count("best") == m[3:].count("best") == 1 for m in marks.values())
    assert {m for ms in marks.values() for m in ms} == {"best", "as_good", "worse"}
    assert all((row["nll_p"] == "") == (row["nll_mark"] == "best") for row in rows)
    assert all(float(row["nll_p"]) < 0.05 for row in rows if row["nll_mark"] == "worse")
    judged = result.against_baseline["none"]["nll"][index(result, "focal")]
    assert float(rows[index(result, "focal")]["nll_p_baseline"]) == judged.adjusted
    assert first["runs"].count("seed") == 3 and "metacal train" in first["commands"] and "torch" in first["versions"]


def test_differences_from_the_baseline(result):
    table = result.difference_table()
    assert len(table.rows) == 4 and all(name != "cross_entropy" for name, _ in table.rows)
    cells = dict(zip([c.name for c in table.columns], table.rows[0][1]))
    i = index(result, table.rows[0][0])
    assert cells["ece"].value == result.against_baseline["none"]["ece"][i].test.difference
    with pytest.raises(InputError, match="there is no baseline"):
        judge_groups(result.groups, measures=["ece"], resamples=4).difference_table()


def test_json_holds_every_value(result):
    found = json.loads(to_json(result.to_dict()))
    entry = found["groups"][index(result, "focal")]
    assert entry["seeds"] == [0, 1, 2] and len(entry["runs"]) == 3
    ece = entry["measures"]["none"]["ece"]
    assert ece["mean"] == pytest.approx(np.mean(ece["values"])) and ece["std"] == pytest.approx(
        np.std(ece["values"], ddof=1)
    )
    assert 0 <= ece["against_baseline"]["p_value"] <= ece["against_baseline"]["p_adjusted"] <= 1
    assert found["equal"]["model.name"] == "mlp"


def test_wide_tables_repeat_what_names_a_row(result):
    from rich.console import Console

    console = Console(width=70, file=io.StringIO(), record=True)
    console.print(result.table("folders"))
    text = console.export_text()
    assert len(re.findall("^method +Scaling", text, re.M)) > 1
    assert len(re.findall("^focal +temperature", text, re.M)) == len(re.findall("^method +Scaling", text, re.M))


def test_page_is_self_contained_and_says_what_the_table_says(result):
    page = comparison_page(result, "a < b", "metacal compare 'runs'")
    assert "a &lt; b" in page and "metacal compare &#x27;runs&#x27;" in page
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r'(?:src|href)="(?!data:|#part)|https?://|@import|url\(', page)
    for row in result.table("none").grid():
        assert all(f">{text.replace('>', '&gt;')}<" in page for text, _ in row)
    assert page.count(' best"><b>') == len(result.table().marked)  # bold and blue mean one thing
    assert not result.difference_table().marked and verdict(result) in page and verdict(result) in result._repr_html_()
    parts = re.findall(r'<h2 id="(part\d+)">', page)
    assert parts == re.findall(r'<a href="#(part\d+)">', page) and len(parts) == 7
    said = {word for row in result.difference_table().grid()[1:] for text, _ in row for word in text.split()[-1:]}
    assert {"better", "worse"} & said
    for g in result.groups:
        assert all(str(run.path) in page and run.summary["command"] in page for run in g.runs)


# ------------------------------------------------------------------------------------------------ figures


def legend_of(figure):
    (legend,) = figure.legends
    return [" ".join(t.get_text().split()) for t in legend.get_texts()]


def test_figures_show_the_numbers_of_the_table(result):
    figures = {name: figure for name, _, figure in figures_of(result)}
    assert list(figures) == ["Reliability", "Accuracy and ECE", "Risk and coverage", "Training"]
    i = index(result, "focal")
    for ax, scaling in zip(figures["Reliability"].axes, ("none", "temperature")):
        values = 100 * result.results[scaling]["ece"][i].values
        (text,) = [t for t in legend_of(figures["Reliability"]) if t.startswith("focal ")]
        place = 0 if scaling == "none" else 1
        assert text.removeprefix("focal ").split(" | ")[place] == f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
        assert ax.get_title() and ax.get_legend() is None
    # A reliability line ends within its band, which holds every seed.
    assert len(figures["Reliability"].axes[0].collections) == 2 * 3


def test_figures_leave_pyplot_alone(result):
    import sys

    figures_of(result)
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_risk_coverage_ends_at_the_error_and_is_flat_for_equal_confidences(groups):
    p = load_predictions(groups[0].runs[0], "test", "none")
    line = risk_coverage({"a": [p]}, points=len(p)).axes[0].lines[0].get_ydata()
    assert line[-1] == pytest.approx(MEASURES["error"](p)) and np.mean(line) == pytest.approx(MEASURES["aurc"](p))
    import torch

    from metacal.predictions import Predictions

    same = Predictions.from_logits(torch.tensor([[1.0, 0.0]] * 8), torch.tensor([0, 1, 0, 0, 1, 1, 0, 0]))
    np.testing.assert_allclose(risk_coverage({"a": [same]}).axes[0].lines[0].get_ydata(), 3 / 8)


def test_training_curves_have_the_mean_and_the_band_of_the_seeds(groups):
    figure = training_curves({g.label: g.runs for g in groups}, {"val/ece": "val ECE"})
    (ax,) = figure.axes
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3]  # epochs
    np.testing.assert_allclose(ax.lines[0].get_ydata(), np.array([0.1, 0.05, 0.1 / 3]) + 0.01)
    assert len(ax.collections) == len(groups)
    assert training_curves({g.label: g.runs for g in groups}, {"val/nothing": ""}) is None


def test_training_curves_are_of_nll_and_ece_where_runs_measured_them(tmp_path, groups):
    runs = {g.label: g.runs for g in groups}
    curves, said = curves_of(runs)
    assert list(curves) == ["train/loss", "val/nll", "val/ece", "val/accuracy"] and "each method's own" in said
    write_run(tmp_path / "a", ["method=focal"], train_measures=True)
    new = {g.label: g.runs for g in groups_of(tmp_path)}
    curves, said = curves_of(new)
    assert "train/loss" not in curves and "measured at every validation" in said
    titles = [ax.get_title(loc="left") or ax.get_title() for ax in training_curves(new, curves).axes]
    assert titles == ["training NLL", "val NLL", "training ECE", "val ECE"]  # of val/accuracy these runs have none
    assert curves_of(runs | {"new": new["focal"]})[1].endswith("3 of 4 groups lack them.")
    assert "each method's own" in {n: c for n, c, _ in figures_of(judge_groups(groups, resamples=4))}["Training"]


def test_figures_of_many_groups_have_readable_axes(tmp_path):
    """Those of the study `baselines`, among them other optimizers and long labels: nothing collapses or overlaps."""
    spec = OmegaConf.to_container(OmegaConf.load(config_dir() / "study" / "baselines.yaml"))
    for i, (label, group) in enumerate(spec["groups"].items()):
        write_run(tmp_path / label, group["words"], sharpness=1 + i / 20, n=60)
    groups = groups_of(tmp_path)
    assert len(groups) == len(spec["groups"]) > 30 and max(len(g.short) for g in groups) <= 60
    lr = [g.label for g in groups if "optimizer.lr" in g.differs]
    assert all("bulk_sgd" in label for label in lr) and len(lr) == 1
    result = judge_groups(groups, measures=["accuracy", "ece"], resamples=4, baseline=["method=mmce"])
    best = result.groups[result.best["none"]["ece"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, caption, figure in figures_of(result):
            assert "In colour: the 5 best by ECE, the baseline, and one group each of cross_entropy" in caption
            figure.draw_without_rendering()
            texts = legend_of(figure)
            assert len(texts) <= 11 and texts[-1].endswith(" others"), name
            assert any(t.startswith(best.short) for t in texts) and any(t.startswith("mmce") for t in texts)
            legend = figure.legends[0].get_window_extent()
            assert legend.x1 <= figure.bbox.width and legend.y0 >= 0
            for ax in figure.axes:
                box = ax.get_window_extent()
                assert box.height / figure.dpi >= 2.0 and box.width / figure.dpi >= 3.0, (name, box)
                assert box.x1 <= legend.x0, name


def test_many_groups_and_single_seeds_can_be_drawn(groups):
    p = load_predictions(groups[0].runs[0], "test", "none")
    many = {f"method {i}": [p] for i in range(25)}
    figure = overlaid_reliability({"": many})
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines[1:]}
    assert len(styles) == 25
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert figure.axes[0].get_window_extent().height / figure.dpi >= 3.5
    assert legend.y0 >= 0 and legend.x0 >= 0 and legend.x1 <= figure.bbox.width
    values = {label: (np.array([0.9]), np.array([0.1])) for label in many}
    assert len(legend_of(accuracy_ece_plane(values))) == 25
    assert len(legend_of(accuracy_ece_plane(values, highlight=["method 3"]))) == 2
    with pytest.raises(InputError, match="highlight must name groups, method x are none"):
        risk_coverage(many, highlight=["method x"])
    with pytest.raises(InputError):
        risk_coverage({})
