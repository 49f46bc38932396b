"""Classifiers of other libraries, from training to a file for other programs: each for one epoch, weights at random."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import metacal
from metacal.errors import EXTRAS

pytestmark = pytest.mark.slow
N, K = 48, 3
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8, generator=GENERATOR)
TOKENS = torch.randint(0, 50, (N, 12), generator=GENERATOR)
LABELS = torch.arange(N) % K


def bert() -> nn.Module:
    """A text classifier: its inputs are tokens, and it returns an object that holds the logits."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, num_labels=K, max_position_embeddings=16, **sizes)
    return transformers.BertForSequenceClassification(config)


def timm_resnet() -> nn.Module:
    return pytest.importorskip("timm").create_model("resnet10t", num_classes=K)


def timm_vit() -> nn.Module:
    models = pytest.importorskip("timm.models")
    return models.VisionTransformer(32, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=K)


def torchvision_resnet() -> nn.Module:
    return pytest.importorskip("torchvision.models").resnet18(num_classes=K)


def torch_export(file: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(file).module()


def onnx(file: Path) -> Callable[[Tensor], Tensor]:
    session = importlib.import_module("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"inputs": x.numpy()})[0])


@pytest.mark.parametrize("make", [bert, timm_resnet, timm_vit, torchvision_resnet])
@pytest.mark.parametrize("method", ["gamma_net", "focal"])
def test_from_training_to_use(make: Callable[[], nn.Module], method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = TOKENS if make is bert else IMAGES
    result = metacal.fit(make(), (x, LABELS), method=method, epochs=1, batch_size=16, lr=1e-3, progress=False)
    expected = result.predict_proba(x)
    report = result.evaluate((x, LABELS), resamples=0).to_dict()
    assert report["nll_scaled"] == pytest.approx(-expected[range(N), LABELS].log().mean().item(), rel=1e-4)
    result.save(tmp_path / "model.pt")
    loaded = metacal.load(tmp_path / "model.pt", make())
    assert torch.equal(loaded.predict_proba(x), expected)
    if method == "focal":
        return
    loaded.export(tmp_path / "model.pt2", "torch-export")
    loaded.export(tmp_path / "state.pt", "state_dict")
    readers = {"model.pt2": torch_export}
    if all(importlib.util.find_spec(name) for name in EXTRAS["export"]):
        loaded.export(tmp_path / "model.onnx", "onnx")
        readers["model.onnx"] = onnx
    for name, read in readers.items():
        for n in (1, N):
            torch.testing.assert_close(read(tmp_path / name)(x[:n]), expected[:n], rtol=0, atol=1e-5)
