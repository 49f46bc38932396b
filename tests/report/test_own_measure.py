"""A measure of one's own: one record in one file outside the package, and everything that measures knows it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json

import numpy as np
import pytest
import torch
from reference.run_folders import write_run

from metacal.calibration import MEASURES, CalibrationAccumulator, bootstrap, bootstrap_all, compare
from metacal.commands.compare import compare_command
from metacal.monitors import CalibrationMonitor, State
from metacal.predictions import Predictions
from metacal.report import Report
from metacal.report.html import comparison_page
from metacal.report.judge import judge_groups
from metacal.report.tables import column_of, methods_table
from metacal.runs.record import find_runs, group_runs, load_runs

FILE = """
from metacal.calibration import MEASURES, Measure, Streamed
from metacal.calibration.binned import bin_sums

def mean_miss(p):
    return float((1 - p.log_likelihood.exp()).mean())

def sums(p, n_bins):
    return {"miss_sum": (1 - p.log_likelihood.exp()).sum()}

MEASURES["mean_miss"] = Measure(
    mean_miss, "Mean miss", 1, percent=True, best="min", watched=True, compared=True,
    streamed=Streamed((bin_sums, sums), lambda s: float(s["miss_sum"]) / int(s["count"].sum())),
)
"""


@pytest.fixture
def registered(tmp_path):
    """The file above, imported as anybody's module is."""
    before = dict(MEASURES)
    (tmp_path / "own_measures.py").write_text(FILE)
    spec = importlib.util.spec_from_file_location("own_measures", tmp_path / "own_measures.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield MEASURES["mean_miss"]
    MEASURES.clear()
    MEASURES.update(before)


def predictions(n=60, seed=0):
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, 4, generator=g, dtype=torch.float64)
    return Predictions.from_logits(z, torch.multinomial(z.softmax(1), 1, generator=g).squeeze(1))


def test_reports_and_tables_show_it(registered):
    p, val = predictions(), predictions(seed=1)
    report = Report(p, val, resamples=20)
    value = registered(p)
    assert report.to_dict()["mean_miss"] == value and "mean_miss_scaled_low" in report.to_dict()
    line = next(line for line in str(report).splitlines() if line.startswith("Mean miss %"))
    assert line.split()[3] == f"{100 * value:.1f}"
    table = methods_table({"a": report.to_dict(), "b": {"mean_miss": 0.9, "mean_miss_scaled": 0.8}}, ["mean_miss"])
    assert column_of("mean_miss").header == "Mean miss %" and table.render("markdown").count("**") == 4


def test_the_bootstrap_resamples_it(registered):
    p = predictions()
    plain = bootstrap(lambda q: float((1 - q.log_likelihood.exp()).mean()), p, n=50)
    assert bootstrap("mean_miss", p, n=50) == pytest.approx(plain, rel=1e-12)
    assert bootstrap_all(["mean_miss", "ece"], p, n=50)["mean_miss"] == bootstrap("mean_miss", p, n=50)
    assert compare(p, p, "mean_miss", n=20).difference == 0


def test_streams_and_monitors_compute_it(registered):
    p = predictions()
    total = CalibrationAccumulator(4)
    for rows in torch.arange(60).split(7):
        total.add(p[rows])
    assert total.compute()["mean_miss"] == pytest.approx(registered(p), rel=1e-12)
    logged = CalibrationMonitor().measure(State(backbone=None, val=p))  # type: ignore[arg-type]
    assert logged["val/mean_miss"] == registered(p)


def test_comparisons_of_runs_test_it(registered, tmp_path, capsys):
    for method, sharpness in (("cross_entropy", 3.0), ("focal", 1.0)):
        for seed in range(2):
            write_run(tmp_path / method / f"seed{seed}", [f"method={method}"], seed, sharpness=sharpness, n=100)
    groups = group_runs(load_runs(find_runs([tmp_path]))[0])
    result = judge_groups(groups, resamples=20)
    assert "mean_miss" in result.measures and "nll" in result.measures  # with those that are compared by default
    for i, g in enumerate(result.groups):
        values = [registered(run.predictions("test")) for run in g.runs]
        assert result.results["none"]["mean_miss"][i].values == pytest.approx(values)
        assert np.isfinite(result.results["temperature"]["mean_miss"][i].resampled).all()
    assert result.best["none"]["mean_miss"] is not None and "Mean miss %" in comparison_page(result)
    rows = list(csv.DictReader(io.StringIO(result.table(csv=True).render("csv"))))
    assert rows[0]["mean_miss_mark"] in ("best", "as_good")
    assert compare_command([str(tmp_path), "--measures", "mean_miss", "--json", "--resamples", "20"]) == 0
    assert set(json.loads(capsys.readouterr().out)["groups"][0]["measures"]["none"]) == {"mean_miss"}
