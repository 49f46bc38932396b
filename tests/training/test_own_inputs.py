"""Inputs and labels beyond one tensor and class indices, from training to use: each by two methods."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import metacal
from metacal.errors import InputError

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*the scaling rests on")
N, LENGTH = 64, 6
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.arange(N) % 2
X = torch.randn(N, 3, generator=GENERATOR) + 2.0 * LABELS[:, None]
TOKENS = torch.randint(1, 9, (N, LENGTH), generator=GENERATOR) + 10 * LABELS[:, None]
MASK = (torch.rand(N, LENGTH, generator=GENERATOR) < 0.7).long()
MASK[:, 0] = 1
SOFT = 0.8 * nn.functional.one_hot(LABELS, 2) + 0.1
UNKNOWN = torch.randperm(N, generator=GENERATOR)[:20]
SOME = LABELS.index_fill(0, UNKNOWN, -100)


class Text(nn.Module):
    """The mean of embeddings under a mask; the answer holds logits beside other things."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask[:, :, None].to(self.head.weight.dtype)
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return Answer(self.head(torch.tanh(pooled)))


class Answer(NamedTuple):
    logits: Tensor


class Table(nn.Module):
    def __init__(self, outputs: int = 2, squeezed: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.squeezed = nn.Linear(3, 4), nn.Linear(4, outputs), squeezed

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(torch.tanh(self.body(x)))
        return z.squeeze(1) if self.squeezed else z


class Rows(Dataset):
    def __init__(self, *columns: Any, names: tuple[str, ...] = ()) -> None:
        self.columns, self.names = columns, names

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, i: int) -> Any:
        row = [column[i] for column in self.columns]  # of a slice too
        return dict(zip(self.names, row)) if self.names else ((row[0], row[1]), row[2])


def texts(batch_size: int | None = 10) -> Any:
    rows = Rows(TOKENS, MASK, LABELS, names=("input_ids", "attention_mask", "labels"))
    return DataLoader(rows, batch_size, shuffle=True) if batch_size else rows


def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batches as long as their longest text."""
    ids, mask, labels = (torch.stack([row[key] for row in batch]) for key in batch[0])
    longest = int((mask * torch.arange(1, LENGTH + 1)).max())
    return {"input_ids": ids[:, :longest], "attention_mask": mask[:, :longest], "labels": labels}


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    train: Any
    inputs: Any
    labels: Any = LABELS
    options: dict[str, Any] = {}  # noqa: RUF012
    val: Any = None


FIELDS = {"input_ids": TOKENS, "attention_mask": MASK}
CASES = {
    "dictionaries of a loader": Case(Text, texts(), FIELDS, val=texts()),
    "texts of several lengths": Case(
        Text, DataLoader(texts(None), 10, collate_fn=padded), FIELDS, val=DataLoader(texts(None), 9, collate_fn=padded)
    ),
    "tuples of a loader": Case(
        Text, DataLoader(Rows(TOKENS, MASK, LABELS), 10), (TOKENS, MASK), val=DataLoader(Rows(TOKENS, MASK, LABELS), 64)
    ),
    "a dictionary of arrays": Case(Text, (FIELDS, LABELS), FIELDS),
    "items that are dictionaries": Case(Text, texts(None), FIELDS),
    "one logit": Case(lambda: Table(1), (X, LABELS), X),
    "one logit, squeezed": Case(lambda: Table(1, True), (X, LABELS[:, None].float()), X),
    "names": Case(Table, (X, [["no", "yes"][y] for y in LABELS]), X, [["no", "yes"][y] for y in LABELS]),
    "ignored": Case(Table, (X, SOME), X, SOME, {"ignore_index": -100}),
    "ignored in a loader": Case(
        Table,
        DataLoader(TensorDataset(X, SOME), 5),
        X,
        SOME,
        {"ignore_index": -100},
        DataLoader(TensorDataset(X, SOME), 5),
    ),
    "ignored items": Case(Table, Rows(X, SOME, names=("x", "y")), X, SOME, {"ignore_index": -100}),
    "soft": Case(Table, (X, SOFT), X),
    "soft items": Case(Table, Rows(X, SOFT, names=("x", "y")), X),
    "soft in a loader": Case(Table, DataLoader(TensorDataset(X, SOFT), 10), X, val=(X, SOFT)),
}


# A plain step on some, and no step on what is like another one; these are tried with the slow tests.
PLAIN = ("texts of several lengths", "one logit, squeezed", "soft in a loader")
ALIKE = ("dictionaries of a loader", "one logit", "ignored", "soft")


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *(
            pytest.param(case, "metacal", id=f"metacal-{name}", marks=slow if name in ALIKE else ())
            for name, case in CASES.items()
        ),
        *(
            pytest.param(case, "cross_entropy", id=f"cross_entropy-{name}", marks=() if name in PLAIN else slow)
            for name, case in CASES.items()
        ),
    ],
)
def test_from_training_to_use(case: Case, method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    more = {"epochs": 6, "batch_size": 10, "lr": 0.05, "optimizer": "adamw", "progress": False, "device": "cpu"}
    result = metacal.fit(case.model(), case.train, val=case.val, method=method, **more, **case.options)
    probabilities = result.predict_proba(case.inputs)
    assert probabilities.shape == (N, 2)
    accuracy = (result.predict(case.inputs) == LABELS).double()
    assert accuracy.mean() > 0.8
    used = SOME == LABELS if case.options else torch.ones(N, dtype=torch.bool)
    for evaluated in (case.train, (case.inputs, case.labels)):
        report = result.evaluate(evaluated, resamples=0)
        assert len(report.predictions) == used.sum()
        assert report.to_dict()["accuracy"] == pytest.approx(accuracy[used].mean().item())
        again = metacal.evaluate(result.model, evaluated, resamples=0).to_dict()
        assert again["nll"] == pytest.approx(report.to_dict()["nll"], rel=1e-5)
    result.save(tmp_path / "model.pt")
    loaded = metacal.load(tmp_path / "model.pt", case.model())
    assert torch.equal(loaded.predict_proba(case.inputs), probabilities)
    calibrated = metacal.calibrate(loaded, (case.inputs, LABELS), "temperature")
    assert torch.equal(calibrated.predict(case.inputs), result.predict(case.inputs))
    if not isinstance(case.train, DataLoader):
        calibrated.export(tmp_path / "model.pt2")
        inputs = case.inputs.values() if isinstance(case.inputs, dict) else [case.inputs]
        written = torch.export.load(tmp_path / "model.pt2").module()(*inputs)
        torch.testing.assert_close(written, calibrated.predict_proba(case.inputs), rtol=0, atol=1e-5)


class ByHand(nn.Module):
    """A network of one output as one of two logits and features."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.net.body(x))
        return nn.functional.pad(self.net.head(features), (1, 0)), features


@pytest.mark.parametrize("squeezed", [False, True])
def test_one_logit_is_one_of_two(squeezed: bool) -> None:
    """Logits and hypergradients: with and without the head's own two columns, and by double backward."""
    torch.manual_seed(0)
    net, gamma_net = Table(1, squeezed).double(), metacal.GammaNet(4).double()
    for p in gamma_net.parameters():
        nn.init.normal_(p, std=0.5)
    x, y, nets = X.double(), LABELS, {"one": metacal.Backbone(net), "two": ByHand(net)}
    assert torch.equal(nets["one"](x)[0], nets["two"](x)[0]) and nets["one"].n_classes == 2
    torch.testing.assert_close(torch.softmax(nets["one"](x)[0], 1)[:, 1], torch.sigmoid(net(x).flatten()))
    gradients = []
    for name, engine in product(nets, ("forward", "reverse", "higher")):
        step = metacal.MetaStep(
            nets[name],
            torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9),
            gamma_net,
            torch.optim.SGD(gamma_net.parameters(), 0.1),
            engine=engine,
            engine_options={"steps": 1} if engine == "higher" else None,
        )
        gradients.append(torch.cat([h.flatten() for h in step.hypergradient(x[::2], y[::2], x[1::2], y[1::2])]))
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[-1], rtol=1e-9, atol=1e-14)
    assert gradients[-1].abs().max() > 0


def test_models_trained_elsewhere() -> None:
    """A bare module is given dictionaries, tuples and one logit too, and labels as people have them."""
    torch.manual_seed(0)
    text, table = Text(), Table(1, True)
    expected = metacal.Predictions.from_logits(text(TOKENS, MASK).logits, LABELS)
    for data in (texts(), texts(None), (FIELDS, LABELS), ((TOKENS, MASK), LABELS[:, None]), [texts(None)[:]]):
        p = metacal.evaluate(text, data, resamples=0).to_dict()
        assert p["brier"] == pytest.approx(metacal.calibration.brier(expected), rel=1e-5)
    z = table(X).detach()
    nll = nn.functional.binary_cross_entropy_with_logits(z, LABELS.float())
    for labels in (LABELS, LABELS[:, None].float(), SOFT):
        assert metacal.evaluate(table, (X, labels), resamples=0).to_dict()["nll"] == pytest.approx(float(nll), rel=1e-5)
    rest = metacal.evaluate(table, (X, SOME), resamples=0, ignore_index=-100).predictions
    assert torch.equal(rest.labels, SOME[SOME >= 0])


def refused(model: nn.Module, train: Any, message: str, **options: Any) -> None:
    with pytest.raises(InputError, match=message):
        metacal.fit(model, train, progress=False, device="cpu", **{"epochs": 1, "method": "cross_entropy"} | options)


def test_what_cannot_be_trained_on() -> None:
    refused(Table(), (X, SOFT), "which loss 'dual_focal' does not take", method="dual_focal")
    refused(Table(), (X, SOFT), "class_weight goes with labels that are classes", class_weight="balanced")
    refused(Table(), (X, torch.full_like(SOME, -1)), "train labels are all -1, which is to be ignored", ignore_index=-1)
    refused(Text(), ({"input_ids": TOKENS, "mask": MASK}, LABELS), "cannot take train inputs .*unexpected .*mask")
    refused(Text(), (FIELDS | {"mask": MASK[:5]}, LABELS), "equally many samples, got .*'mask': 5")
    late = DataLoader(TensorDataset(X, torch.full_like(SOME, -100)), 8)
    refused(Table(), late, "no sample of the train DataLoader has a label", val=(X, LABELS), ignore_index=-100)
    result = metacal.fit(Text(), (FIELDS, LABELS), method="cross_entropy", epochs=1, progress=False, device="cpu")
    for x in (TOKENS, {"input_ids": TOKENS}, FIELDS | {"more": MASK}):
        with pytest.raises(InputError, match="must hold 'input_ids', 'attention_mask', as those that the model was"):
            result.predict_proba(x)
    with pytest.raises(InputError, match=r"'attention_mask' inputs are float32 .* trained on integers"):
        result.predict_proba(FIELDS | {"attention_mask": MASK.float()})
    net = Table()
    step = metacal.MetaStep(
        net, torch.optim.SGD(net.parameters(), 0.1), loss="cross_entropy", mix=lambda x, y, _: (x, y, y, 0.5)
    )
    with pytest.raises(InputError, match=r"class indices \(N,\) where batches are mixed"):
        step.step(X, SOFT)
