"""Measures under corruptions: the right pixels reach the model, and the tables and the figure say what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from metacal.calibration import TemperatureScaling, ece, nll
from metacal.data import Batches, Split, Transform
from metacal.data.corruptions import CORRUPTIONS, corrupt
from metacal.errors import InputError
from metacal.jsonio import to_json
from metacal.predictions import Predictions
from metacal.report.report import predict
from metacal.report.shift import Shift, corrupted_batches, measure_shift


class Stream:
    """The same images, read one by one."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.images[i]


def split_of(n: int = 60, channels: int = 3, side: int = 12, levels: int = 256, scale: float = 1 / 255) -> Split:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, levels, (n, channels, side, side), generator=g).to(torch.uint8)
    transform = Transform(scale, torch.full((channels,), 0.4).double(), torch.full((channels,), 0.3).double())
    return Split("test", images, torch.randint(0, 4, (n,), generator=g), transform)


def model_for(split: Split) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(split.storage[0].numel(), 4)).double()


class Double(nn.Module):
    """The model in float64, so that batches of another size give the same."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.double())


@pytest.fixture(scope="module")
def split() -> Split:
    return split_of()


@pytest.fixture(scope="module")
def model(split) -> nn.Module:
    return Double(model_for(split))


@pytest.fixture(scope="module")
def val() -> Predictions:
    g = torch.Generator().manual_seed(3)
    return Predictions.from_logits(4 * torch.randn(80, 4, generator=g), torch.randint(0, 4, (80,), generator=g))


@pytest.fixture(scope="module")
def shift(model, split, val) -> Shift:
    return measure_shift(model, split, val, corruptions=["contrast", "shot_noise"], severities=[5, 1, 3], seed=7)


def test_values_are_those_of_the_model_on_the_corrupted_and_then_normalised_images(shift, model, split, val):
    assert list(shift.values) == ["contrast", "shot_noise"] and shift.severities == [1, 3, 5]
    scaling = TemperatureScaling().fit(val)
    for name, of in shift.values.items():
        for severity, values in of.items():
            pixels = corrupt(split.storage, name, severity, seed=7).float() / 255
            p = predict(model, ((pixels - 0.4) / 0.3, split.labels))
            assert values["accuracy"] == pytest.approx(float(p.correct.double().mean()))
            assert values["nll"] == pytest.approx(nll(p), rel=1e-5)
            assert values["ece_scaled"] == pytest.approx(ece(scaling.apply(p)), rel=1e-4)
    p = predict(model, ((split.storage.float() / 255 - 0.4) / 0.3, split.labels))
    assert shift.clean["nll"] == pytest.approx(nll(p), rel=1e-5)
    assert shift.temperature == scaling.temperature != 1


def test_without_val_nothing_is_scaled(model, split):
    shift = measure_shift(model, split, corruptions=["contrast"], severities=[2])
    assert list(shift.clean) == ["accuracy", "nll", "ece"] and shift.temperature is None
    assert "Scaled" not in str(shift.table())


def test_batches_and_storage_do_not_matter(model, split, val):
    keys = {"corruptions": CORRUPTIONS, "severities": [4], "seed": 2}
    whole = measure_shift(model, split, val, **keys)
    in_parts = measure_shift(model, split, val, batch_size=7, **keys)
    streamed = measure_shift(model, replace(split, storage=Stream(split.storage)), val, batch_size=16, **keys)
    for name in CORRUPTIONS:
        for other in (in_parts, streamed):
            assert other.values[name][4] == pytest.approx(whole.values[name][4], rel=1e-9), name


@pytest.mark.parametrize("stored", ["memory", "stream"])
def test_a_subset_holds_the_same_corrupted_images(split, stored):
    seen = []

    def net(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return torch.zeros(len(x), 4)

    part = split if stored == "memory" else replace(split, storage=Stream(split.storage))
    shift = measure_shift(net, part, corruptions=["impulse_noise"], severities=[5], samples=20, seed=9)
    assert (shift.n, shift.total) == (20, 60)
    clean, noisy = seen
    all_clean = torch.cat([x for x, _ in Batches(split, 60, shuffle=False, augment=False).epoch(0)])
    all_noisy = torch.cat([x for x, _ in corrupted_batches(split, "impulse_noise", 5, seed=9)])
    places = [int((all_clean == x).flatten(1).all(1).nonzero()) for x in clean]
    assert len(set(places)) == 20 and places == sorted(places)
    assert torch.equal(noisy, all_noisy[places])
    again = measure_shift(net, part, corruptions=["contrast"], severities=[1], samples=20, seed=10)
    assert again.n == 20 and not torch.equal(seen[2], clean)  # another seed, other images


def test_images_of_few_levels_are_corrupted_on_the_scale_of_256():
    digits = split_of(channels=1, side=8, levels=17, scale=1 / 16)
    inputs = torch.cat([x for x, _ in Batches(digits, 60, shuffle=False, augment=False).epoch(0)])
    same = torch.cat([x for x, _ in corrupted_batches(digits, "gaussian_noise", 0)])
    noisy = torch.cat([x for x, _ in corrupted_batches(digits, "gaussian_noise", 1)])
    assert float((same - inputs).abs().max()) <= 0.5 / 255 / 0.3 + 1e-5
    assert len((noisy * 0.3 + 0.4).mul(255).round().unique()) > 100  # not the 17 of the source


def test_means_and_dictionary(shift):
    for measure in shift.clean:
        at_3 = [of[3][measure] for of in shift.values.values()]
        assert shift.mean(3)[measure] == pytest.approx(sum(at_3) / 2)
        everything = [values[measure] for of in shift.values.values() for values in of.values()]
        assert shift.mean()[measure] == pytest.approx(sum(everything) / 6)
    found = json.loads(to_json(shift.to_dict()))
    assert found["corruptions"]["contrast"]["5"] == pytest.approx(shift.values["contrast"][5])
    assert list(found["mean"]) == ["1", "3", "5", "all"] and found["seed"] == 7 and found["samples"] == 60
    with pytest.raises(InputError, match="severity must be one of 1, 3, 5, got 2"):
        shift.mean(2)


def test_tables_show_the_values(shift):
    rows = shift.table().render("csv").splitlines()
    assert rows[0] == "images,accuracy,nll,ece,nll_scaled,ece_scaled"
    assert [row.split(",")[0] for row in rows[1:]] == [
        "clean",
        "severity 1",
        "severity 3",
        "severity 5",
        "all severities",
    ]
    assert [float(c) for c in rows[2].split(",")[1:]] == pytest.approx(list(shift.mean(1).values()))
    by_corruption = shift.tables()
    assert len(by_corruption) == 5
    text = str(by_corruption[2])
    assert text.startswith("ECE % (clean: ") and f"{100 * shift.values['shot_noise'][5]['ece']:.2f}" in text
    assert f"T = {shift.temperature:.3f}" in str(shift.table())


def test_the_figure_draws_the_values(shift):
    figure = shift.figure("title")
    axes = figure.axes
    assert [ax.get_title() for ax in axes] == ["Accuracy", "NLL", "ECE"]
    for ax, measure, count in zip(axes, ("accuracy", "nll", "ece"), (3, 4, 4)):
        lines = {line.get_label(): line for line in ax.get_lines()}
        assert len(lines) == count
        noise = lines["shot noise"]
        assert list(noise.get_xdata()) == [0, 1, 3, 5]
        wanted = [shift.clean[measure], *(shift.values["shot_noise"][s][measure] for s in (1, 3, 5))]
        assert list(noise.get_ydata()) == pytest.approx(wanted)
        assert lines["mean"].get_ydata()[-1] == pytest.approx(shift.mean(5)[measure])
    dashed = next(line for line in axes[2].get_lines() if line.get_label().startswith("mean, T"))
    assert dashed.get_ydata()[0] == pytest.approx(shift.clean["ece_scaled"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"corruptions": ["contrst"]}, "did you mean 'contrast'"),
        ({"corruptions": []}, "corruptions must name at least one"),
        ({"severities": [0]}, "severities must be integers from 1 to 5, got 0"),
        ({"severities": [2.0]}, "severities must be integers from 1 to 5, got 2.0"),
        ({"severities": []}, "severities must name at least one"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
    ],
)
def test_bad_arguments_stop_before_the_model_runs(keys, message, split):
    def net(x):
        raise AssertionError("the model ran")

    with pytest.raises(InputError, match=message):
        measure_shift(net, split, **keys)


def test_inputs_without_pixels_are_refused(model, split):
    features = Split("test", torch.randn(10, 20), torch.zeros(10, dtype=torch.int64))
    with pytest.raises(InputError, match=r"pixel values, .* those of test are float32 of shape \(20,\)"):
        measure_shift(model, features)
    four = split_of(channels=4)
    with pytest.raises(InputError, match="jpeg_compression, which needs 1 or 3 channels; the images have 4"):
        measure_shift(model, four)
    assert measure_shift(Double(model_for(four)), four, corruptions=["brightness"]).n == 60
