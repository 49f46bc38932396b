"""A trained model in use: one file, from which another process makes the same probabilities, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import metacal
from metacal.cli import main
from metacal.errors import InputError
from metacal.models import build_model
from metacal.models.options import ModelConfig

N, K = 60, 3
IMAGES = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = ["cat", "dog", "eel"] * (N // K)
KEYS = {"epochs": 1, "progress": False}


def own_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, K)
    return nn.Sequential(*layers).to(dtype)


def elsewhere(code: str, *arguments: object) -> None:
    """Run code in a process of its own."""
    words = [sys.executable, "-c", "import sys, torch, metacal\n" + code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr


def test_another_process_makes_the_same_probabilities(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        result = metacal.fit(own_net(dtype), (IMAGES, LABELS), **KEYS)
        result.save(tmp_path / f"{dtype}.pt")
        expected = result.predict_proba(IMAGES)
        assert expected.dtype == dtype and torch.equal(result.predict(IMAGES), expected.argmax(1))
        torch.save((IMAGES, expected), tmp_path / f"{dtype} expected.pt")
    elsewhere(
        "from test_deploy import own_net\n"
        "for dtype in (torch.float32, torch.float64):\n"
        "    model = metacal.load(f'{sys.argv[1]}/{dtype}.pt', own_net())\n"
        "    images, expected = torch.load(f'{sys.argv[1]}/{dtype} expected.pt')\n"
        "    assert torch.equal(model.predict_proba(images), expected)\n"
        "    assert torch.equal(torch.softmax(model(images), 1), expected)\n"
        "    assert model.class_names == ['cat', 'dog', 'eel'] and not model.training\n",
        tmp_path,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "digits"
    assert (
        main(
            [
                "train",
                f"run_dir={folder}",
                "epochs=1",
                "monitor.resamples=0",
                "monitor.figures_every=0",
                "progress=false",
            ]
        )
        == 0
    )
    return folder


def test_a_run_is_loaded_without_its_data_and_config(run: Path, tmp_path: Path) -> None:
    test = metacal.Predictions.load(run / "predictions" / "test.npz")
    from metacal.training.saved import load_run

    stored = load_run(run, "cpu").data.test.storage
    torch.save((stored, test.logits), tmp_path / "expected.pt")
    alone = tmp_path / "elsewhere.pt"
    alone.write_bytes((run / "model.pt").read_bytes())
    elsewhere(
        "stored, logits = torch.load(sys.argv[2])\n"
        "model = metacal.load(sys.argv[1])\n"
        "torch.testing.assert_close(model(stored) * model.temperature, logits, rtol=1e-5, atol=1e-5)\n"
        "assert model.class_names == [str(k) for k in range(10)]\n"
        "assert not any(name in sys.modules for name in ('sklearn', 'matplotlib', 'torchvision'))\n",
        alone,
        tmp_path / "expected.pt",
    )
    # a run from before it kept such a file, and one that is not finished
    model = metacal.load(run)
    kept = (run / "model.pt").rename(tmp_path / "kept.pt")
    again = metacal.load(run)
    kept.rename(run / "model.pt")
    assert torch.equal(again.predict_proba(stored), model.predict_proba(stored))
    with pytest.raises(InputError, match="is a run folder, whose config says what the model is"):
        metacal.load(run, own_net())
    with pytest.raises(InputError, match="is no saved model, but the state of a training"):
        metacal.load(run / "checkpoints" / "best.pt")


def test_models_by_their_name_need_no_code(tmp_path: Path) -> None:
    net = build_model(ModelConfig("cnn", width=4), K, (3, 8, 8))
    result = metacal.fit(net, (IMAGES, LABELS), method="cross_entropy", **KEYS)
    result.save(tmp_path / "model.pt")
    before = torch.get_rng_state()
    model = metacal.load(tmp_path / "model.pt")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.predict_proba(IMAGES), result.predict_proba(IMAGES))


def test_inputs_come_as_they_are(tmp_path: Path) -> None:
    result = metacal.fit(own_net(), (IMAGES, LABELS), method="cross_entropy", **KEYS)
    model, expected = result.calibrated, result.predict_proba(IMAGES)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in IMAGES]
    for x in (IMAGES.numpy(), IMAGES.long(), list(IMAGES), pictures):
        assert torch.equal(model.predict_proba(x), expected)
    torch.testing.assert_close(model.predict_proba(IMAGES, batch_size=7), expected)
    for x in (IMAGES / 255, IMAGES.float(), IMAGES.permute(0, 2, 3, 1)):
        with pytest.raises(InputError, match="new inputs"):
            model.predict_proba(x)
    with pytest.raises(InputError, match="new inputs are empty"):
        model.predict_proba(IMAGES[:0])
    with pytest.raises(InputError, match="batch_size must be >= 1"):
        model.predict_proba(IMAGES, batch_size=0)
    report = metacal.evaluate(model, (IMAGES, torch.arange(N) % K), resamples=0)
    assert report.to_dict()["nll"] == pytest.approx(
        -expected[range(N), torch.arange(N) % K].log().mean().item(), rel=1e-5
    )
    model.train()
    assert torch.equal(model.predict_proba(IMAGES), expected) and model.training


def test_pictures_are_resized_as_in_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(24):
        folder = tmp_path / "images" / ["cat", "dog"][i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    words = ["data=folder", f"data.path={tmp_path / 'images'}", "data.image_size=8", "method=cross_entropy"]
    words += ["data.meta_size=2", "data.val_size=4", "data.test_size=4"]
    words += [
        f"run_dir={tmp_path / 'run'}",
        "epochs=1",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "progress=false",
        "data.workers=0",
    ]
    assert main(["train", *words]) == 0
    from metacal.training.saved import load_run

    data, model = load_run(tmp_path / "run", "cpu").data, metacal.load(tmp_path / "run")
    assert model.class_names == ["cat", "dog"]
    test = metacal.Predictions.load(tmp_path / "run" / "predictions" / "test.npz")
    files = sorted((tmp_path / "images").rglob("*.png"))
    shown = [Image.open(file) for file in files]
    every = model.predict_proba(shown, scaled=False)
    for stored, probs in zip(data.test.storage, test.probs):
        x = model.predict_proba(stored[None], scaled=False)
        torch.testing.assert_close(x[0].double(), probs, rtol=1e-4, atol=1e-5)
        assert float((every - x).abs().sum(1).min()) < 1e-5, "the file is among those that were shown"


class Named(nn.Module):
    """A state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    x, y = torch.randn(N, 4), torch.arange(N) % K
    with pytest.raises(InputError, match="model Named cannot be saved: its state '_extra_state' is no tensor"):
        metacal.fit(Named(), (x, y), method="cross_entropy", **KEYS).save(tmp_path / "a.pt")
    metacal.fit(nn.Linear(4, K), (x, y), method="cross_entropy", **KEYS).save(tmp_path / "a.pt")
    for path, model, message in (
        (tmp_path / "b.pt", None, "b.pt does not exist"),
        (tmp_path, None, "is no run folder"),
        (tmp_path / "a.pt", None, r"holds the weights of a torch.nn.*Linear, which only your own code .* model=…\)"),
        (tmp_path / "a.pt", nn.Linear(5, K), r"is of another model: 'weight' has shape \(3, 4\)"),
        (tmp_path / "a.pt", nn.Sequential(nn.Linear(4, K)), "head must name a Linear layer of the model"),
    ):
        with pytest.raises(InputError, match=message):
            metacal.load(path, model)
    whole = bytearray((tmp_path / "a.pt").read_bytes())
    whole[len(whole) // 2] ^= 1
    (tmp_path / "b.pt").write_bytes(whole)
    with pytest.raises(InputError, match=r"checkpoint .*b\.pt is damaged: .* was written with them$"):
        metacal.load(tmp_path / "b.pt", nn.Linear(4, K))
