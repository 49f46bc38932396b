"""`metacal.fit` on people's own models and data."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import metacal
from metacal.config import Config
from metacal.config.compose import compose
from metacal.errors import InputError


def blobs(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three overlapping Gaussian classes in the plane."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    centres = torch.tensor([[0.0, 1.5], [1.5, -1.0], [-1.5, -1.0]])
    return centres[y] + torch.randn(n, 2, generator=generator), y


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def loader(n: int, size: int) -> DataLoader:
    return DataLoader(TensorDataset(*blobs(n)), batch_size=size)


class Late(Dataset):
    """One label out of range, which only reading shows."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return blobs(60)[0][i], 7 if i == 45 else i % 3


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1))


KEYS = {"epochs": 4, "batch_size": 50, "progress": False}
ONCE = KEYS | {"epochs": 1}


def test_a_model_is_trained_in_place_and_reported():
    model = net()
    before = [p.clone() for p in model.parameters()]
    result = metacal.fit(model, blobs(600), method="gamma_net", **KEYS)
    assert result.model is model and not model.training
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert isinstance(result.gamma, metacal.GammaNet)
    report = result.evaluate(blobs(600, seed=1), resamples=0)
    assert report.to_dict()["accuracy"] > 0.8 and "ece_scaled" in report.to_dict()
    x, _ = blobs(10, seed=2)
    p = result.predict_proba(x)
    assert p.shape == (10, 3) and torch.allclose(p.sum(1), torch.ones(10))
    raw = result.predict_proba(x, scaled=False)
    assert torch.allclose(torch.softmax(raw.log() / result.scaling.temperature, 1), p, atol=1e-6)
    assert [h["epoch"] for h in result.history] == [1, 2, 3, 4] and "val/ece" in result.history[0]
    assert result.best_epoch == min(result.history, key=lambda h: h["val/nll"])["epoch"]


def test_fit_trains_by_the_method_that_the_command_trains_by():
    result = metacal.fit(net(), blobs(60), **ONCE)
    assert result.config.method == compose([]).method == Config.method == "metacal"
    assert asdict(result.config.penalties) == asdict(compose([]).penalties)


def test_the_same_call_gives_the_same_model():
    a, b = metacal.fit(net(), blobs(300), **KEYS), metacal.fit(net(), blobs(300), **KEYS)
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        assert torch.equal(p, q)


def test_training_leaves_the_global_generators_alone():
    model, data = net(), blobs(300)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    metacal.fit(model, data, **KEYS)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("method", ["cross_entropy", "flsd53", "label_smoothing", "gamma_scalar"])
def test_every_method_trains(method):
    result = metacal.fit(net(), blobs(300), method=method, **KEYS)
    assert result.evaluate(blobs(300, seed=1), resamples=0).to_dict()["accuracy"] > 0.7


def test_loaders_datasets_and_own_optimizers():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = metacal.fit(
        model,
        DataLoader(TensorDataset(*blobs(300)), batch_size=50, shuffle=True),
        meta=DataLoader(TensorDataset(*blobs(90, 1)), batch_size=90),
        val=TensorDataset(*blobs(90, 2)),
        method="gamma_net",
        optimizer=optimizer,
        overrides=["meta.engine=difference", "monitor.histograms=false"],
        **KEYS,
    )
    assert optimizer.state, "the given optimizer took the steps"
    assert result.evaluate(TensorDataset(*blobs(90, 3)), resamples=0).to_dict()["accuracy"] > 0.7


def test_uint8_images_are_normalised_alike_in_training_and_prediction():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (120, 1, 4, 4), dtype=np.uint8))
    y = (x.float().mean((1, 2, 3)) > 127).long()
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    result = metacal.fit(model, (x, y), method="cross_entropy", **KEYS)
    report = result.evaluate((x, y), resamples=0)
    accuracy = (result.predict_proba(x).argmax(1) == y).double().mean()
    assert report.to_dict()["accuracy"] == pytest.approx(float(accuracy))


def test_grey_images_without_a_channel_dimension():
    x = torch.randint(256, (60, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    y = torch.arange(60) % 2
    result = metacal.fit(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), (x, y), method="focal", **KEYS)
    assert result.predict_proba(x).shape == (60, 2)


def test_methods_without_a_meta_split_train_on_it():
    """The same call for every method: all of them see the same images."""
    data, meta, val = blobs(150), blobs(50, 1), blobs(60, 2)
    both = (torch.cat([data[0], meta[0]]), torch.cat([data[1], meta[1]]))
    a = metacal.fit(net(), data, meta, val, method="focal", **KEYS)
    b = metacal.fit(net(), both, None, val, method="focal", **KEYS)
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        assert torch.equal(p, q)


def test_val_and_folds_serve_as_meta(capsys):
    data, val = blobs(150), blobs(60, 2)
    steps = {}
    for keys in ({}, {"meta_from": "val"}, {"meta_from": "folds", "overrides": ["data.meta_folds=4"]}):
        result = metacal.fit(net(), data, None, val, "gamma_net", **KEYS | {"progress": True} | keys)
        steps[keys.get("meta_from")] = result.history[-1]["step"]
        assert ("val serves as meta images too" in capsys.readouterr().out) == (keys.get("meta_from") == "val")
    assert set(steps.values()) == {12}, "of 150 samples in batches of 50, also where a tenth is set aside"
    metacal.fit(net(), loader(150, 50), None, loader(60, 60), "gamma_net", meta_from="val", **ONCE)
    for keys, message in (
        ({"meta_from": "val", "meta": val}, "meta_from says what serves as meta where none is given"),
        ({"meta_from": "valid"}, "data.meta_from must be one of train, val, folds"),
        ({"meta_from": "folds", "train": loader(150, 50)}, "meta must be given when train is a DataLoader"),
        ({"meta_from": "folds", "overrides": ["data.meta_folds=151"]}, r"data.meta_folds must be in \[2, 150\]"),
    ):
        with pytest.raises(InputError, match=message):
            metacal.fit(net(), **{"train": data, "val": val, "method": "gamma_net"} | ONCE | keys)


def test_a_run_folder_on_request(tmp_path):
    metacal.fit(net(), blobs(300), run_dir=tmp_path / "run", **KEYS)
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0
    assert (tmp_path / "run" / "checkpoints" / "best.pt").is_file()
    with pytest.raises(InputError, match="already holds a run"):
        metacal.fit(net(), blobs(300), run_dir=tmp_path / "run", **KEYS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": lambda x: x}, "model must be a torch.nn.Module"),
        ({"model": nn.Conv2d(1, 1, 1)}, "no Linear layer"),
        ({"model": nn.Linear(2, 2)}, "train labels must be in 0..1"),
        ({"head": "nothing"}, "head must name a Linear layer"),
        ({"method": "focl"}, "did you mean 'focal'"),
        ({"train": (torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))}, "equally many"),
        ({"train": (torch.full((30, 2), torch.nan), torch.arange(30) % 3)}, "NaN"),
        ({"train": DataLoader(TensorDataset(*blobs(30))), "method": "gamma_net"}, "meta and val must be given"),
        ({"train": (torch.zeros(30, 5), torch.arange(30) % 3)}, r"cannot take train inputs of shape \(N, 5\)"),
        ({"train": (blobs(300)[0], blobs(300)[1] + 1)}, "train labels must be in 0..2 .*, got 3"),
        ({"epochs": 0}, "epochs must be >= 1"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)}, "optimizer must hold parameters"),
        ({"overrides": ["meta.engin=reverse"]}, "did you mean 'meta.engine'"),
        ({"overrides": ["model=resnet20"]}, "overrides cannot hold model"),
        ({"overrides": ["data.crop_padding=2"]}, "overrides cannot hold data.crop_padding"),
        ({"optimizer": "adamv"}, "optimizer must be one of .*did you mean 'adam"),
        ({"optimizer": 3}, "optimizer must be the name of one, or a torch.optim.Optimizer"),
        ({"optimizer": "adam", "overrides": ["optimizer=sgd"]}, "overrides cannot hold optimizer: it is an argument"),
        ({"lr": 0.1, "overrides": ["optimizer.lr=0.2"]}, "overrides cannot hold optimizer.lr: it is an argument"),
        ({"lr": -0.1}, "optimizer.lr must be"),
        ({"lr": 0.1, "optimizer": torch.optim.SGD(net().parameters(), 0.1)}, "lr cannot be given beside an optimizer"),
        ({"freeze": "1.weight"}, "freeze must name modules of the model, got '1.weight'"),
        ({"freeze": ["0", "2"]}, "no trainable parameter"),
        ({"callbacks": [3]}, "callbacks must be functions"),
        (
            {"train": (blobs(300)[0].long(), blobs(300)[1])},
            r"inputs of shape \(N, 2\), int64: .* x.float\(\) for features",
        ),
        ({"model": normed(), "batch_size": 1}, "a train batch has one sample, .*Expected more than 1 .* batch_size"),
        ({"model": normed(), "train": loader(101, 10), "meta": blobs(50), "val": blobs(50)}, "drop_last=True"),
        ({"model": normed(), "meta": loader(101, 10)}, "a meta batch has one sample"),
        (
            {"val": DataLoader(Late(), 10), "method": "gamma_net"},
            "val labels must be in 0..2 .*, got 7 for sample 5 of batch 4",
        ),
        ({"meta": DataLoader(Late(), 10)}, "meta labels must be in 0..2 .*, got 7 for sample 5 of batch 4"),
    ],
)
def test_bad_input_is_refused_before_training(arguments, message):
    with pytest.raises(InputError, match=message):
        metacal.fit(**({"model": net(), "train": blobs(300)} | KEYS | arguments))


def test_a_late_label_of_a_loader_stops_the_training_with_its_place():
    model = net()
    data = {"meta": blobs(60), "val": blobs(60)}
    with pytest.raises(InputError, match=r"train labels must be in 0..2 .*, got 7 for sample 5 of batch 4"):
        metacal.fit(model, DataLoader(Late(), 10), **data, **ONCE)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("sampler", [[[0, 1, 2], [3], [4, 5]]])
def test_a_batch_of_one_that_nobody_could_foresee(sampler):
    batches = DataLoader(TensorDataset(*blobs(60)), batch_sampler=sampler)
    with pytest.raises(InputError, match="batch 1 of the train DataLoader has 1 sample, and the model needs 2"):
        metacal.fit(normed(), batches, meta=blobs(60), val=blobs(60), **ONCE)


@pytest.mark.parametrize("method", ["metacal", "gamma_net", "cross_entropy"])
def test_models_in_float64_and_batches_of_one_without_batch_statistics(method):
    x, y = blobs(61)
    result = metacal.fit(net().double(), loader(61, 10), (x, y), (x.numpy(), y.numpy()), method, **ONCE)
    assert result.predict_proba(x).dtype == torch.float64
    assert result.evaluate((x.half(), y), resamples=0).to_dict()["accuracy"] > 0.3


def test_tokens():
    x, y = torch.randint(20, (120, 5), generator=torch.Generator().manual_seed(0)), torch.arange(120) % 3
    result = metacal.fit(Words(), (x, y), **ONCE)
    assert torch.equal(result.predict_proba(x.int()), result.predict_proba(x))
    with pytest.raises(InputError, match=r"the model cannot take train inputs of shape \(N, 5\), int64: index out of"):
        metacal.fit(Words(), (x + 10, y), **ONCE)


def test_classes_that_do_not_occur_or_only_once():
    x, y = blobs(200)
    y = 2 * y  # 0, 2, 4 of seven
    y[17] = 5
    torch.manual_seed(0)
    result = metacal.fit(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 7)), (x, y), **ONCE)
    assert result.evaluate((x, y), resamples=0).to_dict()["accuracy"] > 0.3


@pytest.mark.parametrize("lr", [torch.tensor(0.01), np.float32(0.01)])
def test_settings_of_an_optimizer_may_be_tensors_and_come_back(lr, tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=np.float64(1e-4))
    numbers = {
        "epochs": np.int64(2),
        "batch_size": torch.tensor(50),
        "seed": np.int32(1),
        "device": torch.device("cpu"),
    }
    result = metacal.fit(model, blobs(200), optimizer=optimizer, run_dir=tmp_path / "run", progress=False, **numbers)
    assert optimizer.param_groups[0]["lr"] is lr and "initial_lr" not in optimizer.param_groups[0]
    other = net()
    same = torch.optim.Adam(other.parameters(), lr=float(lr), weight_decay=1e-4)
    again = metacal.fit(other, blobs(200), optimizer=same, progress=False, **numbers)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
    assert [h["val/nll"] for h in again.history] == [h["val/nll"] for h in result.history]


def test_optimizers_by_name():
    by_name = metacal.fit(net(), blobs(200), optimizer="adamw", lr=np.float32(0.01), weight_decay=0.1, **ONCE)
    words = ["optimizer=adamw", f"optimizer.lr={np.float32(0.01)}", "optimizer.weight_decay=0.1"]
    by_words = metacal.fit(net(), blobs(200), overrides=words, **ONCE)
    assert by_name.config.optimizer.name == "adamw" and by_name.config.optimizer.weight_decay == 0.1
    for p, q in zip(by_name.model.parameters(), by_words.model.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("own", [False, True])
def test_frozen_modules_stay_as_they_are(own):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)), nn.Tanh(), nn.Linear(16, 3)
    )
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1) if own else None
    result = metacal.fit(model, blobs(200), freeze="0", optimizer=optimizer, **ONCE)
    moved = {k for k, v in result.model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {"2.weight", "2.bias"}
    assert all(p.requires_grad for p in model.parameters()), "frozen for this training only"


def test_callbacks_see_what_validation_measured_and_can_end_the_training():
    model, seen = normed(), []

    def watch(measured):
        assert not model.training and not model[1].training
        seen.append(measured)
        return len(seen) == 2

    result = metacal.fit(model, blobs(200), callbacks=[watch, lambda measured: None], **KEYS)
    assert [line["epoch"] for line in seen] == [1, 2] and seen == result.history
