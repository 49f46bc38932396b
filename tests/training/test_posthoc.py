"""`metacal.calibrate`: maps of predictions, and calibrated models trained here or elsewhere."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metacal
from metacal.calibration import SCALINGS, TemperatureScaling, nll
from metacal.errors import EXTRAS, InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*the scaling rests on")


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[2].weight *= 8  # overconfident
    return model


def data(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    with torch.no_grad():
        return x, torch.multinomial(torch.softmax(net()(x) / 3, 1), 1, generator=g).squeeze(1)


def test_logits_give_a_map() -> None:
    x, y = data(300, 1)
    with torch.no_grad():
        z = net()(x)
    scaling = metacal.calibrate(z.numpy(), y.numpy(), "temperature")
    assert isinstance(scaling, TemperatureScaling) and scaling.temperature == pytest.approx(3, rel=0.4)
    torch.testing.assert_close(scaling.predict_proba(z), torch.softmax(z.double() / scaling.temperature, 1))
    p = metacal.Predictions.from_logits(z, y)
    assert metacal.calibrate(p, method="temperature").temperature == scaling.temperature
    assert nll(metacal.calibrate(p).apply(p)) < nll(p) - 0.1  # auto
    for arguments, message in (
        ((p, y), "val is not given beside a Predictions"),
        ((z,), "logits .N, K. with their labels as val, got Tensor alone"),
        ((net(),), "val must be given: data .x, y. that the model was not trained on"),
        ((z, y, "platt"), "method must be one of auto, none, temperature, .*, got 'platt'"),
    ):
        with pytest.raises(InputError, match=message):
            metacal.calibrate(*arguments)


def test_a_model_from_elsewhere_is_calibrated_saved_and_loaded(tmp_path: Path) -> None:
    val, (x, _) = data(300, 1), data(200, 2)
    with torch.no_grad():
        z = net()(x)
        z_val = net()(val[0])
    for name in SCALINGS:
        model = metacal.calibrate(net(), TensorDataset(*val), name)
        expected = metacal.calibrate(z_val, val[1], name).predict_proba(z)
        probs = model.predict_proba(x)
        torch.testing.assert_close(probs.double(), expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(torch.softmax(model(x), 1), probs)
        torch.testing.assert_close(model.predict_proba(x, scaled=False), torch.softmax(z, 1))
        assert torch.equal(model.predict(x), probs.argmax(1))
        model.save(tmp_path / f"{name}.pt")
        loaded = metacal.load(tmp_path / f"{name}.pt", model=net())
        assert torch.equal(loaded.predict_proba(x), probs)
        again = metacal.calibrate(loaded, val, name)  # an earlier map is replaced
        torch.testing.assert_close(again.predict_proba(x), probs)
    from_loader = metacal.calibrate(net(), DataLoader(TensorDataset(*val), 64), "temperature")
    by_tensors = metacal.calibrate(net(), val, "temperature")
    assert from_loader.temperature == pytest.approx(by_tensors.temperature, rel=1e-6)
    with pytest.raises(InputError, match=r"inputs have shape .*, and the model was trained on"):
        by_tensors.predict_proba(x[:, :5])


def test_images_are_normalised_by_a_model_of_metacal_and_by_nobody_else() -> None:
    images = torch.randint(0, 256, (90, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = np.array(["cat", "dog", "eel"] * 30)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    result = metacal.fit(model, (images, labels), method="cross_entropy", epochs=1, progress=False)
    for trained in (result, result.calibrated, model):
        calibrated = metacal.calibrate(trained, (images, labels), "vector")
        assert calibrated.class_names == ["cat", "dog", "eel"]
        plain = calibrated.predict_proba(images, scaled=False)
        torch.testing.assert_close(plain, result.predict_proba(images, scaled=False))
    with pytest.raises(InputError, match="how this model's training normalised them is not known"):
        metacal.calibrate(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), (images, np.arange(90) % 3))


@pytest.mark.parametrize("method", SCALINGS)
def test_every_map_is_exported(method: str, tmp_path: Path) -> None:
    x, y = data(400, 1)
    model = metacal.calibrate(net(), (x, y), method)
    expected = model.predict_proba(x)
    if model.scaling is not None:
        z = (10 * torch.randn(300, expected.shape[1], generator=torch.Generator().manual_seed(2))).double()
        torch.testing.assert_close(model.scaling.calibrated(z), model.scaling.predict_proba(z), rtol=1e-12, atol=1e-14)
    model.export(tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), expected, rtol=0, atol=1e-5)
    model.export(tmp_path / "model.pt", "state_dict")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert (state["scaling"] is None) == (model.scaling is None)


@pytest.mark.slow
@pytest.mark.parametrize("method", SCALINGS)
def test_every_map_is_exported_as_onnx(method: str, tmp_path: Path) -> None:
    for name in EXTRAS["export"]:
        pytest.importorskip(name)
    x, y = data(400, 1)
    model = metacal.calibrate(net(), (x, y), method)
    model.export(tmp_path / "model.onnx", "onnx")
    session = importlib.import_module("onnxruntime").InferenceSession(str(tmp_path / "model.onnx"))
    (written,) = session.run(None, {"inputs": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(written), model.predict_proba(x), rtol=0, atol=1e-5)
