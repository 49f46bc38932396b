"""predict, evaluate and Report."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metacal
from metacal.calibration import MEASURES, ece
from metacal.calibration.bootstrap import bootstrap
from metacal.calibration.scaling import TemperatureScaling
from metacal.errors import InputError
from metacal.predictions import Predictions
from metacal.report import Report, evaluate, predict
from metacal.report.verdict import meaning


def predictions(n: int = 400, scale: float = 2.0, seed: int = 0, k: int = 4) -> Predictions:
    """Labels drawn from softmax(z), logits scale·z: overconfident for scale > 1."""
    g = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(n, k, generator=g)
    return Predictions.from_logits(scale * z, torch.multinomial(z.softmax(1), 1, generator=g).squeeze(1))


@pytest.fixture(scope="module")
def report() -> Report:
    return Report(predictions(), predictions(300, seed=1), resamples=50)


# ------------------------------------------------------------------------------------------------ predict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.modes: list[bool] = []

    def forward(self, x):
        self.modes.append(self.training or torch.is_grad_enabled())
        return self.head(self.body(x))


def test_predict_takes_loaders_iterables_and_tensors_alike():
    torch.manual_seed(0)
    net, x, y = Net(), torch.randn(23, 5), torch.randint(3, (23,))
    net.body[2].eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    sources = [
        (x, y),
        [x, y],
        DataLoader(TensorDataset(x, y), batch_size=4),
        [(x[:10], y[:10]), [x[10:], y[10:]]],
        (batch for batch in [(x, y)]),
    ]
    found = [predict(net, data, batch_size=7) for data in sources]
    for p in found:
        torch.testing.assert_close(p.logits, found[0].logits)
        assert torch.equal(p.labels, y) and len(p) == 23 and not p.logits.requires_grad
    assert not any(net.modes)  # evaluation mode, no gradients
    assert net.training and net.body[1].training and not net.body[2].training
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    torch.testing.assert_close(found[0].logits, net.eval()(x).detach())


def test_predict_takes_the_logits_of_a_backbone_and_of_a_function():
    x, y = torch.randn(6, 3), torch.randint(3, (6,))
    torch.testing.assert_close(predict(lambda t: (2 * t, t), (x, y)).logits, 2 * x)


def test_modes_return_when_the_model_fails():
    net = Net()
    with pytest.raises(RuntimeError):
        predict(net, (torch.randn(4, 2), torch.zeros(4, dtype=torch.long)))
    assert all(m.training for m in net.modules())


def test_data_that_cannot_be_used_are_named():
    net = nn.Linear(2, 2)
    with pytest.raises(InputError, match="at least one batch"):
        predict(net, [])
    with pytest.raises(InputError, match=r"batches \(x, y\).*got Tensor"):
        predict(net, [torch.zeros(2, 2)])
    with pytest.raises(InputError, match="equal length, got 3 and 2"):
        predict(net, (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long)))


# ------------------------------------------------------------------------------------------------- report


def test_values_are_those_of_the_measures(report):
    p = report.predictions
    assert set(report.values) == set(MEASURES)
    for name, measure in MEASURES.items():
        assert report.values[name].value == pytest.approx(measure(p)), name
    assert report.values["ece"] == bootstrap("ece", p, n=50, seed=0)


def test_scaled_values_use_the_temperature_fitted_on_val(report):
    scaling = TemperatureScaling().fit(predictions(300, seed=1))
    assert report.temperature == pytest.approx(scaling.temperature)
    assert report.temperature == pytest.approx(2.0, rel=0.25)  # the scale that the logits were multiplied by
    after = scaling.apply(report.predictions)
    for name in ("ece", "nll", "brier"):
        assert report.scaled[name].value == pytest.approx(MEASURES[name](after))
        assert report.scaled[name].value < report.values[name].value
    assert report.scaled["accuracy"].value == report.values["accuracy"].value


def test_to_dict_is_flat_and_fits_json(report):
    d = report.to_dict()
    assert d["ece"] == report.values["ece"].value and d["ece_scaled"] == report.scaled["ece"].value
    assert d["ece_low"] <= d["ece_high"] and d["ece_scaled_low"] <= d["ece_scaled_high"]
    assert d["temperature"] == report.temperature and d["n"] == 400
    assert json.loads(json.dumps(d, allow_nan=False)) == d
    assert 0 < d["accuracy"] < 1  # a fraction


def test_without_val_and_resamples():
    r = Report(predictions(60), resamples=0, measures=["nll", "ece"])
    assert r.scaled is None and r.temperature is None and math.isnan(r.values["ece"].low)
    assert set(r.to_dict()) == {"n", "nll", "ece"}
    assert "interval" not in str(r) and "T =" not in str(r)


def test_n_bins_reaches_the_measures_and_the_diagram():
    p = predictions(60)
    r = Report(p, resamples=10, measures=["ece"], n_bins=4)
    assert r.values["ece"].value == ece(p, n_bins=4) != ece(p)
    assert f"ECE {100 * ece(p, n_bins=4):.2f}" in r.reliability_diagram().axes[0].texts[0].get_text()


def test_print_and_markdown_show_the_same_numbers(report):
    text, markdown = str(report), report.to_markdown()
    value = f"{100 * report.values['ece'].value:.2f}"
    assert f"T = {report.temperature:.3f}" in text and "95 % interval" in text and "400 predictions" in text
    line = next(line for line in text.splitlines() if line.startswith("ECE %"))
    assert line.split()[2] == value
    assert f"| ECE % | {value} | [" in markdown
    assert all(len(row) == len(text.splitlines()[2]) or row for row in text.splitlines())


def test_evaluate_is_predict_and_report():
    torch.manual_seed(0)
    net, x, y = nn.Linear(5, 3), torch.randn(40, 5), torch.randint(3, (40,))
    r = metacal.evaluate(net, (x, y), val=(x, y), resamples=0, measures=["nll", "ece"], split="digits")
    assert isinstance(r, Report) and r.values["nll"].value == pytest.approx(
        nn.functional.cross_entropy(net(x), y).item()
    )
    assert "digits" in str(r) and r.scaled is not None
    assert evaluate(net, (x, y), resamples=0, measures=["ece"]).values["ece"] == pytest.approx(
        r.values["ece"], nan_ok=True
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"measures": ["ecce"]}, "measures must be among .* got 'ecce'"),
        ({"resamples": -1}, "resamples must be an integer >= 0, got -1"),
        ({"level": 1.0}, r"level must lie in \(0, 1\), got 1.0"),
        ({"val": predictions(20, k=3)}, "val must have 4 classes as the predictions have, got 3"),
    ],
)
def test_bad_options_are_named(keys, message):
    with pytest.raises(InputError, match=message):
        Report(predictions(20), **keys)


def test_a_notebook_gets_html_and_a_frame(monkeypatch):
    p, r = predictions(200), Report(predictions(200), predictions(200, seed=1), resamples=8)
    page = r._repr_html_()
    assert page.count("<tr>") == 1 + len(MEASURES) and f"<p>{meaning(r.to_dict()).replace('&', '&amp;')}</p>" in page
    assert "<td" in page and ">ECE %<" in page and r.table().title in page
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="to_frame needs pandas, which is not installed here: pip install pandas"):
        r.to_frame()
    monkeypatch.undo()
    pytest.importorskip("pandas")
    frame = r.to_frame()
    assert list(frame.index) == list(MEASURES) and frame.index.name == "measure"
    assert list(frame.columns) == ["title", "value", "low", "high", "scaled", "scaled_low", "scaled_high"]
    for name, interval in r.values.items():
        assert tuple(frame.loc[name, ["low", "value", "high"]]) == tuple(interval)
        assert r.scaled is not None and frame.loc[name, "scaled"] == r.scaled[name].value
    assert "low" not in Report(p, resamples=0).to_frame()
