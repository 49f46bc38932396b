"""`metacal predict` and `metacal export`: from a run to probabilities of new inputs, here and in other programs."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import metacal
from metacal.cli import main
from metacal.data.kind import InputKind, InputKinds, Task
from metacal.data.reading import read_inputs
from metacal.errors import InputError

N, K = 30, 3
IMAGES = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
KEYS = {"epochs": 1, "progress": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on coloured images in folders, whose first class has a name that a spreadsheet takes for a formula."""
    place = tmp_path_factory.mktemp("predict")
    rng = np.random.default_rng(0)
    for i in range(36):
        folder = place / "train" / ["=1+1", "dog", "eel"][i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    words = ["data=folder", f"data.path={place / 'train'}", "data.image_size=8", "method=cross_entropy", "model=cnn"]
    words += ["data.meta_size=3", "data.val_size=6", "data.test_size=6", "data.workers=0"]
    words += [
        f"run_dir={place / 'run'}",
        "epochs=1",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "progress=false",
    ]
    assert main(["train", *words]) == 0
    return place / "run"


def test_images_of_a_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "new" / "deep").mkdir(parents=True)
    files = ["+a.png", "b.PNG", "deep/c.jpg"]
    for i, file in enumerate(files):
        Image.fromarray(IMAGES[i].permute(1, 2, 0).repeat(2, 1, 1).numpy()).save(tmp_path / "new" / file)
    (tmp_path / "new" / "notes.txt").write_text("no image")
    model = metacal.load(run)
    expected = model.predict_proba([Image.open(tmp_path / "new" / file) for file in files])
    for suffix in ("npz", "csv"):
        assert main(["predict", str(run), str(tmp_path / "new"), "--out", str(tmp_path / f"p.{suffix}")]) == 0
    assert f"3 predictions of 3 classes in {tmp_path / 'p.csv'}" in capsys.readouterr().out
    with np.load(tmp_path / "p.npz") as arrays:
        assert np.array_equal(arrays["probs"], expected.numpy()) and arrays["names"].tolist() == files
        assert arrays["class_names"].tolist() == ["=1+1", "dog", "eel"] and "labels" not in arrays
        assert np.array_equal(arrays["predicted"], expected.argmax(1).numpy())
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["'+a.png", *files[1:]]
    assert [row["predicted"] for row in rows] == [["'=1+1", "dog", "eel"][k] for k in expected.argmax(1)]
    read = torch.tensor([[float(row[f"p_{name}"]) for name in model.class_names] for row in rows])
    assert torch.equal(read, expected), "float32 survives the text"
    assert [float(row["probability"]) for row in rows] == pytest.approx(expected.amax(1).tolist())


def test_arrays_with_and_without_labels(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = metacal.load(run), tmp_path / "p.npz"
    expected = model.predict_proba(IMAGES)
    last, first = IMAGES.permute(0, 2, 3, 1).numpy(), IMAGES.numpy()
    labels = np.arange(N) % K
    np.save(tmp_path / "a.npy", last)
    np.savez(tmp_path / "b.npz", x=first, y=np.array(["=1+1", "dog", "eel"])[labels])
    np.savez(tmp_path / "c.npz", x_train=last[:3], y_train=labels[:3], x_test=last, y_test=labels)
    np.savez(tmp_path / "d.npz", pictures=last)
    for name, known in (("a.npy", False), ("b.npz", True), ("c.npz", True), ("d.npz", False)):
        words = ["predict", str(run), str(tmp_path / name), "--out", str(out), "--batch-size", "7", "--device", "cpu"]
        assert main(words) == 0
        with np.load(out) as arrays:
            np.testing.assert_allclose(arrays["probs"], expected.numpy(), rtol=1e-5, atol=1e-6)
            assert not known or np.array_equal(arrays["labels"], labels)
        if known:
            assert main(["evaluate", str(out), "--resamples", "0"]) == 0
            assert metacal.Predictions.load(out).labels.tolist() == labels.tolist()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # with a bar of progress
    assert main(["predict", str(run), str(tmp_path / "b.npz"), "--out", str(tmp_path / "p.csv")]) == 0
    with open(tmp_path / "p.csv", newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)][:3] == ["'=1+1", "dog", "eel"]


def test_no_file_is_read_for_a_model_of_several_inputs(tmp_path: Path) -> None:
    one = InputKind.of([torch.randn(4, 2)], None)
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 2), np.uint8))
    with pytest.raises(InputError, match="the model takes 'left', 'right' together, which no file holds"):
        read_inputs(tmp_path / "x.npz", InputKinds({"left": one, "right": one}), Task())


def test_slips_of_prediction_are_one_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    for name, pixels in (("broken", b"no image"), ("sizes", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(pixels or b"")
    for i in (8, 9):
        Image.fromarray(np.zeros((i, 8, 3), np.uint8)).save(tmp_path / "sizes" / "ab.png"[i - 8 :])
    np.save(tmp_path / "floats.npy", IMAGES.numpy() / 255)
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "two.npz", a=IMAGES, b=IMAGES)
    np.savez(tmp_path / "labels.npz", x=IMAGES, y=np.full(N, 3))
    np.savez(tmp_path / "few.npz", x=IMAGES, y=[0])
    (tmp_path / "damaged.npz").write_bytes(b"PK")
    (tmp_path / "words.txt").write_text("")
    result = metacal.fit(nn.Linear(4, K), (torch.randn(N, 4), torch.arange(N) % K), method="cross_entropy", **KEYS)
    result.save(tmp_path / "own.pt")
    out = str(tmp_path / "p.npz")
    for words, message in (
        ([str(run), "nowhere"], "nowhere does not exist"),
        (["nowhere", "none"], "nowhere does not exist"),
        ([str(tmp_path), "none"], "is no run folder"),
        ([str(tmp_path / "own.pt"), "two.npz"], "which only your own code can make"),
        ([str(run), "none"], "none has no image files (.jpg"),
        ([str(run), "broken"], "a.png cannot be decoded"),
        ([str(run), "floats.npy"], "floats.npy inputs are float64 in [0, 1], and the model was trained on uint8"),
        ([str(run), "objects.npy"], "cannot be read without unpickling"),
        ([str(run), "two.npz"], "must hold the inputs as x (and labels, if known, as y)"),
        ([str(run), "labels.npz"], "labels must be in 0..2 (the model's outputs), got 3 at index 0"),
        ([str(run), "few.npz"], "must be equally many, got 30 and 1"),
        ([str(run), "damaged.npz"], "damaged.npz"),
        ([str(run), "words.txt"], "inputs must be a folder of images, an .npz or an .npy file"),
        ([str(run), "two.npz", "--batch-size", "0"], "--batch-size must be >= 1, got 0"),
        ([str(run), "two.npz", "--device", "tpu"], "device 'tpu' cannot be used"),
        ([str(run), "two.npz", "--out", "p.txt"], "--out must end in .npz or .csv, got 'p.txt'"),
        ([str(run), "two.npz", "--out", str(tmp_path / "no" / "p.csv")], "does not exist"),
        ([str(run), str(tmp_path / "two.npz"), "--out", str(tmp_path / "two.npz")], "is the file of the inputs"),
    ):
        words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
        assert main(["predict", *words, *([] if "--out" in words else ["--out", out])]) == 2, words
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
    assert not Path(out).exists()


# ----------------------------------------------------------------------------------------------- export


class Steps(nn.Module):
    """What no exporter can trace: a path that depends on the values of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x if float(x.sum()) > 0 else -x)


def run_onnx(file: Path, x: torch.Tensor) -> torch.Tensor:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == ["=1+1", "dog", "eel"]
    return torch.from_numpy(session.run(None, {"inputs": x.numpy()})[0])


def test_a_run_is_exported(run: Path, tmp_path: Path) -> None:
    model = metacal.load(run)
    expected = model.predict_proba(IMAGES)
    file = tmp_path / "model.pt2"
    assert main(["export", str(run), "--format", "torch-export", "--out", str(file)]) == 0
    names = {"class_names.json": ""}
    program = torch.export.load(file, extra_files=names).module()
    assert json.loads(names["class_names.json"]) == model.class_names
    torch.testing.assert_close(program(IMAGES), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(program(IMAGES[:1]), expected[:1], rtol=0, atol=1e-6)
    model.export(tmp_path / "state.pt", "state_dict")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    net = metacal.load(run).backbone.net
    net.load_state_dict(state["weights"])
    mean, std = (state[key].view(-1, 1, 1) for key in ("mean", "std"))
    logits = net((state["scale"] * IMAGES - mean) / std) / state["temperature"]
    torch.testing.assert_close(torch.softmax(logits, 1), expected, rtol=0, atol=1e-5)
    assert not list(tmp_path.glob("*.tmp"))


def test_onnx_gives_the_same_probabilities(run: Path, tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    model = metacal.load(run)
    model.export(tmp_path / "model.onnx", "onnx")
    for n in (1, 5, N):
        gap = run_onnx(tmp_path / "model.onnx", IMAGES[:n]) - model.predict_proba(IMAGES[:n])
        assert gap.abs().max() < 1e-5


def test_export_of_features_and_tokens(tmp_path: Path) -> None:
    y = torch.arange(N) % K
    words = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, K))
    for net, x in ((nn.Linear(4, K), torch.randn(N, 4)), (words, torch.randint(0, 20, (N, 5)))):
        result = metacal.fit(net.double() if x.is_floating_point() else net, (x, y), method="focal", **KEYS)
        result.export(tmp_path / "model.pt2")
        x = x.double() if x.is_floating_point() else x
        given = torch.export.load(tmp_path / "model.pt2").module()(x)
        assert torch.equal(given, result.predict_proba(x)), "nothing is normalised: the same operations"


def test_what_cannot_be_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = metacal.fit(Steps(), (torch.randn(N, 4), torch.arange(N) % K), method="cross_entropy", **KEYS)
    with pytest.raises(InputError, match="model Steps cannot be exported as torch-export: "):
        result.export(tmp_path / "model.pt2")
    with pytest.raises(InputError, match=r"format must be one of torch-export, onnx, state_dict, got 'onx'.*'onnx'"):
        result.export(tmp_path / "model.pt2", "onx")
    import metacal.export as module

    wrong = lambda network, names: (b"", lambda x: network(x).roll(1, 1))  # noqa: E731
    monkeypatch.setitem(module.FORMATS, "state_dict", wrong)
    with pytest.raises(InputError, match=r"state_dict of the model differs from it by .*: nothing was written"):
        result.export(tmp_path / "model.pt", "state_dict")
    monkeypatch.setattr("metacal.errors.find_spec", lambda name: None)
    assert main(["export", str(run), "--format", "onnx", "--out", str(tmp_path / "a.onnx")]) == 2
    assert "needs onnx, which is not installed here: pip install 'metacal[export]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
