"""Other people's data, a line for each way to give them: the right answer, or the sentence that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import metacal
from metacal.data import Batches, LoaderBatches, Split, Task, as_batches, as_split
from metacal.data.wrap import input_kind, loader_batches
from metacal.errors import InputError
from metacal.margins import log_margin_moment, margin_moment, true_margin

N, K = 24, 3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=GENERATOR)
Y = torch.arange(N) % K
NAMES = [["cat", "dog", "eel"][k] for k in Y]
PIXELS = torch.randint(0, 256, (N, 3, 6, 5), dtype=torch.uint8, generator=GENERATOR)
GREY = PIXELS[:, 0]
TASK = Task(K, torch.float32)


class Items(Dataset):
    """Pairs (x, y), with attributes as datasets have them."""

    def __init__(self, x: Any, y: Any, target_transform: Callable[[Any], Any] = lambda y: y, **attributes: Any) -> None:
        self.x, self.y, self.target_transform = x, y, target_transform
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.x[i], self.target_transform(self.y[i])


class Dictionaries(Dataset):
    """Items that are dictionaries, as many libraries of text have them."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: column[i] for name, column in self.columns.items()}


class Frame:
    """A data frame, as far as numpy is concerned."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.values, dtype=dtype)


def pictures(mode: str) -> list[Image.Image]:
    return [Image.fromarray(p.permute(1, 2, 0).numpy()).convert(mode) for p in PIXELS]


def rows(split: Split) -> Tensor:
    return torch.cat([x for x, _ in Batches(split, 7, shuffle=False).epoch(0)])


def labels_in_batches(split: Split) -> Tensor:
    return torch.cat([y for _, y in Batches(split, 7, shuffle=False).epoch(0)])


# -------------------------------------------------------------------------------------------------- labels

ONE_HOT = nn.functional.one_hot(Y)
SOFT = torch.softmax(2.0 * ONE_HOT, 1)

LABELS = {
    "int64": (X, Y),
    "uint8": (X, Y.to(torch.uint8)),
    "int16 array": (X.numpy(), Y.numpy().astype(np.int16)),
    "big-endian": (X, Y.numpy().astype(">i4")),
    "uint32": (X, Y.numpy().astype(np.uint32)),
    "list": (X.tolist(), Y.tolist()),
    "reversed twice": (X, np.ascontiguousarray(Y.numpy()[::-1])[::-1]),
    "objects that are numbers": (X, np.array(Y.tolist(), dtype=object)),
    "one-hot": (X, ONE_HOT),
    "one-hot floats": (X, ONE_HOT.float()),
    "one-hot bools": (X, ONE_HOT.bool()),
    "column": (X, Y[:, None]),
    "column of names": (X, np.array(NAMES)[:, None]),
    "frame of names": (X, Frame(np.array(NAMES, dtype=object)[:, None])),
    "probabilities": (X, SOFT),
    "items of probabilities": Items(X, SOFT),
    "a dictionary of one": ({"features": X}, Y),
    "items that are dictionaries": Dictionaries({"features": X, "label": Y}),
    "names": (X, NAMES),
    "array of names": (X, np.array(NAMES)),
    "tensor dataset": TensorDataset(X, Y),
    "items of ints": Items(X, Y.tolist()),
    "items of tensors": Items(X, Y),
    "items of one-element tensors": Items(X, Y[:, None]),
    "items of lists of one": Items(X, Y[:, None].tolist()),
    "items of numpy integers": Items(X.numpy(), Y.numpy()),
    "items of one-hot vectors": Items(X, ONE_HOT.float()),
    "items of names": Items(X, NAMES),
    "items of names in the order of classes": Items(X, NAMES, classes=["cat", "dog", "eel"]),
    "items after a transform of targets": Items(X, (Y + 1).tolist(), lambda y: y - 1, targets=(Y + 1).tolist()),
    "items after a transform to fewer classes": Items(
        X, (3 * Y + 1).tolist(), lambda y: y // 3, targets=(3 * Y + 1).tolist()
    ),
    "items beside names": Items(X, Y.tolist(), labels=NAMES),
    "items beside true targets": Items(X, Y.tolist(), targets=Y.numpy()),
    "items beside other targets": Items(X, Y.tolist(), targets=Y.flip(0).tolist()),
    "items beside too few targets": Items(X, Y.tolist(), targets=[0]),
    "items beside one-hot targets": Items(X, Y.tolist(), targets=ONE_HOT),
    "a part of a dataset": Subset(Items(X.flip(0), Y.flip(0).tolist()), list(range(N))[::-1]),
}


@pytest.mark.parametrize("data", LABELS.values(), ids=LABELS)
def test_labels_are_what_the_items_say(data: Any) -> None:
    split = as_split(data, task=TASK)
    assert torch.equal(split.labels, Y) and split.labels.dtype == torch.int64
    assert torch.equal(labels_in_batches(split), Y)
    torch.testing.assert_close(rows(split), X)


BAD_LABELS = {
    "too large": ((X, Y + 1), r"train labels must be in 0..2 \(the model's outputs\), got 3 at index 2; .* subtract 1"),
    "negative": ((X, Y - 1), "must be in 0..2 .*, got -1 at index 0"),
    "ignored": ((X, Y.where(Y < 2, -100)), "got -100 at index 2; -100, .* give ignore_index=-100"),
    "column of floats": ((X, Y.float()[:, None]), r"must be integers, got torch.float32; for class indices use y.long"),
    "tokens": ((X, Y[:, None, None]), r"shape \(N,\), got \(24, 1, 1\)"),
    "floats": ((X, Y.float()), r"must be integers, got torch.float32; for class indices use y.long\(\)"),
    "fractions": ((X, Y + 0.6), "must be integers, got torch.float32, 0.6 at index 0"),
    "bools": ((X, Y > 0), "must be integers, got torch.bool; for classes 0 and 1"),
    "logits": (
        (X, X[:, :3]),
        "must be one-hot, or probabilities that are >= 0 and sum to 1; .* at index 0",
    ),
    "several": ((X, torch.ones(N, K).long()), "not one-hot; several labels"),
    "several as floats": ((X, torch.ones(N, K)), "must be one-hot, or probabilities .* sum to 3 at index 0"),
    "probabilities of two": ((X, torch.full((N, 2), 0.5)), "are probabilities of 2 classes, and the model has 3"),
    "one-hot too wide": ((X, nn.functional.one_hot(Y + 1)), "must be in 0..2 .*, got 3 at index 2"),
    "too many names": (
        (X, [*NAMES[:-1], "fox"]),
        r"name 4 classes \(cat, dog, eel, fox\), and the model has 3 outputs",
    ),
    "names and numbers": ((X, [*NAMES[:-1], 2]), "train labels must be numbers of one shape, got list of text"),
    "complex": ((X, Y * 1j), "train labels must be real numbers"),
    "missing": ((X, [*Y.tolist()[:-1], None]), "train labels must be numbers of one shape, got list of objects"),
    "none": ((X, None), "train labels must be numbers of one shape, got None"),
    "items without": (Items(X, [*Y.tolist()[:-1], None]), "train labels must be numbers of one shape"),
    "ragged": ((X, [[0], *[[0, 1]] * (N - 1)]), "train labels must be numbers of one shape"),
    "too few": ((X, Y[:-1]), "equally many, got 24 and 23"),
    "items too large": (Items(X, (Y + 1).tolist(), targets=Y.tolist()), "got 3 at index 2; labels start at 0"),
    "items too large, targets too": (Items(X, (Y + 1).tolist(), targets=(Y + 1).tolist()), "got 3 at index 2"),
    "items of fractions": (Items(X, Y + 0.6), "must be integers, got torch.float64, 0.6 at index 0"),
    "items of bools": (Items(X, (Y > 0).tolist()), "must be integers, got torch.bool"),
    "list of dictionaries": ([{"x": x, "y": 0} for x in X], "train data must be a pair"),
    "items of dictionaries": (Items([{"x": x} for x in X], [None] * N), "train labels must be numbers of one shape"),
    "items of three classes": (
        Items(X, [*NAMES[:-1], "fox"], classes=["cat", "dog", "eel"]),
        "'fox' at index 23 is none",
    ),
    "a split": (Split("train", X, Y + 1), "got 3 at index 2"),
}


@pytest.mark.parametrize(("data", "message"), BAD_LABELS.values(), ids=BAD_LABELS)
def test_labels_that_are_no_classes(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_split(data, task=TASK)


def test_a_late_item_is_named() -> None:
    """Where a look at the items finds nothing, the batch does."""
    n = 2000
    labels = (torch.arange(n) % K).tolist()
    given = labels.copy()
    given[1234] = 7
    split = as_split(Items(torch.randn(n, 4), given, targets=labels), task=TASK)
    with pytest.raises(InputError, match=r"train labels must be in 0..2 .*, got 7 in sample 1234"):
        list(Batches(split, 128).epoch(0))


def test_names_mean_the_same_in_every_split() -> None:
    train = as_split((X, NAMES), task=TASK)
    assert list(train.class_names or []) == ["cat", "dog", "eel"]
    task = Task(K, torch.float32, train.class_names)
    assert as_split((X[:2], ["eel", "dog"]), "val", task=task).labels.tolist() == [2, 1]
    loader = DataLoader(Items(X, NAMES), batch_size=10)
    assert torch.equal(torch.cat([y for _, y in LoaderBatches(loader, task=task).epoch(0)]), Y)
    with pytest.raises(InputError, match="val label 'fox' at index 1 is none of the classes: cat, dog, eel"):
        as_split((X[:2], ["eel", "fox"]), "val", task=task)
    numbers = as_split((X, Y), task=TASK)
    for data in ((X, NAMES), Items(X, NAMES), DataLoader(Items(X, NAMES))):
        with pytest.raises(
            InputError, match="val labels are names such as 'cat', and the classes they stand for are not"
        ):
            list(as_batches(data, stream="val", like=numbers, task=TASK).epoch(0))


# ------------------------------------------------------------------------------------------ labels in loaders

BAD = Y.clone()
BAD[17] = 7

LOADERS = {
    "tensors, seen at once": (TensorDataset(X, BAD), {}, "got 7 at index 17"),
    "part of tensors": (Subset(TensorDataset(X, BAD), [3, 17]), {}, "got 7 at index 1"),
    "items": (Items(X, BAD), {}, "got 7 for sample 7 of batch 1"),
    "ignored": (TensorDataset(X, BAD.where(BAD < 7, -100)), {}, "got -100 at index 17; -100, with which"),
    "tokens": (Items(X, Y[:, None, None]), {}, r"shape \(N,\), got \(10, 1, 1\)"),
    "fractions": (Items(X, Y + 0.6), {}, "must be integers, got torch.float32, 0.6 for sample 0 of batch 0"),
    "names": (Items(X, [*NAMES[:-1], "fox"]), {}, "label 'fox' for sample 3 of batch 2 is none of the classes"),
    "dictionaries": (Items(X, Y), {"collate_fn": lambda b: {"x": X}}, r"dictionaries with one of labels, .*'x'"),
    "too few labels": (Items(X, Y), {"collate_fn": lambda b: (X[:10], Y[:9])}, "equally many, got 10 and 9"),
}


@pytest.mark.parametrize(("data", "options", "message"), LOADERS.values(), ids=LOADERS)
def test_labels_of_loaders(data: Any, options: dict[str, Any], message: str) -> None:
    loader = DataLoader(data, batch_size=10, **options)
    with pytest.raises(InputError, match=message):
        list(LoaderBatches(loader, stream="val", task=Task(K, torch.float32, ["cat", "dog", "eel"])).epoch(0))


def test_one_hot_labels_in_loaders() -> None:
    loader = DataLoader(TensorDataset(X, ONE_HOT.double()), batch_size=10)
    assert torch.equal(torch.cat([y for _, y in LoaderBatches(loader, task=TASK).epoch(0)]), Y)


# ----------------------------------------------------------------------------------------------- arrays

WIDE = np.zeros((N, 8), dtype=np.float32)
WIDE[:, ::2] = X.numpy()
READ_ONLY = X.numpy().copy()
READ_ONLY.flags.writeable = False

ARRAYS = {
    "float64": X.double(),
    "float16": X.half(),
    "bfloat16": X.bfloat16(),
    "big-endian": X.numpy().astype(">f4"),
    "big-endian double": X.numpy().astype(">f8"),
    "long double": X.numpy().astype(np.longdouble),
    "strided": WIDE[:, ::2],
    "backwards": np.ascontiguousarray(X.numpy()[::-1])[::-1],
    "columns first": np.asfortranarray(X.numpy()),
    "transposed": X.t().contiguous().t(),
    "read only": READ_ONLY,
    "lists": X.tolist(),
    "list of tensors": list(X),
    "with a gradient": X.clone().requires_grad_(),
    "objects that are numbers": X.numpy().astype(object),
}


@pytest.mark.parametrize("x", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_come_in_the_type_of_the_model(x: Any, dtype: torch.dtype) -> None:
    split = as_split((x, Y), task=Task(K, dtype))
    half = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    assert split.storage.dtype == dtype and not split.storage.requires_grad
    torch.testing.assert_close(split.storage, X.to(dtype), rtol=1e-2 if half else 1e-6, atol=1e-2 if half else 1e-6)
    items = as_split(Items(x, Y.tolist()), task=Task(K, dtype))
    torch.testing.assert_close(rows(items), split.storage)


def test_data_frames() -> None:
    split = as_split((Frame(X.numpy()), Frame(np.array(NAMES, dtype=object))), task=TASK)
    assert torch.equal(split.storage, X) and torch.equal(split.labels, Y)
    with pytest.raises(InputError, match="train inputs must be numbers of one shape, got Frame of text"):
        as_split((Frame([["a", 1.0]] * N), Y))


BAD_INPUTS = {
    "text": ([["a"]] * N, "train inputs must be numbers of one shape, got list of text"),
    "ragged": ([[0.0], *[[0.0, 1.0]] * (N - 1)], "train inputs must be numbers of one shape"),
    "tensors of two shapes": ([X[0], *X[1:, :3]], r"train inputs must have one shape, got \(4,\) and \(3,\)"),
    "complex": (X * 1j, "train inputs must be real numbers"),
    "sparse": (X.to_sparse(), r"train inputs must be a dense tensor.*x.to_dense\(\)"),
    "dates": (np.array(["2024-01-01"] * N, dtype="datetime64[D]"), "train inputs must be numbers of one shape"),
    "bools": (X > 0, "train inputs must be floating point, or uint8 images, got torch.bool"),
    "infinite": (X.where(X < 1, torch.inf), "train inputs have NaN or infinite values in"),
    "uint8 features": (PIXELS[:, 0, 0], r"uint8 inputs must be images .*; use x.float\(\) for features"),
    "channels last": (PIXELS.permute(0, 2, 3, 1), r"must be \(N, C, H, W\).*use x.permute\(0, 3, 1, 2\)"),
    "16 bits": ([Image.fromarray(np.zeros((4, 4), np.uint16))] * N, "must be images with 8 bits a channel"),
}


@pytest.mark.parametrize(("x", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_inputs_that_are_none(x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_split((x, Y), task=TASK)


def test_datasets_of_images_are_normalised_as_tensors_are() -> None:
    for x, expected in (
        (PIXELS, PIXELS),
        (pictures("RGB"), PIXELS),
        (GREY, GREY),
        (GREY.numpy(), GREY),
        ([Image.fromarray(p.numpy()) for p in GREY], GREY),
    ):
        split, wanted = as_split(Items(x, Y.tolist()), task=TASK), as_split((expected, Y), task=TASK)
        torch.testing.assert_close(rows(split), rows(wanted))
        loader = DataLoader(TensorDataset(expected, Y), batch_size=7)
        batches, kind = loader_batches(loader, 0, "cpu", TASK)
        torch.testing.assert_close(torch.cat([x for x, _ in batches.epoch(0)]), rows(wanted))
        assert (kind.shape, kind.low, kind.outside) == (
            wanted.input_shape,
            input_kind(wanted).low,
            input_kind(wanted).outside,
        )
    mixed = pictures("RGB")
    mixed[3] = mixed[3].convert("L")
    assert as_split(Items(mixed, Y.tolist())).input_shape == (3, 6, 5)
    assert rows(as_split(Items(mixed, Y.tolist()))).shape == (N, 3, 6, 5)


# ------------------------------------------------------------------------------ inputs of another kind

UNIT = PIXELS / 255
MEAN = UNIT.mean((0, 2, 3), keepdim=True)
NORMAL = (UNIT - MEAN) / UNIT.std((0, 2, 3), correction=0, keepdim=True)
BYTES = PIXELS.float()
FEATURES = torch.rand(N, 4, generator=GENERATOR)

SAME = {  # trained on, given, what the model must be given then
    "uint8 for uint8": (PIXELS, PIXELS[:5], NORMAL[:5]),
    "array for uint8": (PIXELS, PIXELS[:5].numpy(), NORMAL[:5]),
    "pictures for uint8": (PIXELS, pictures("RGB")[:5], NORMAL[:5]),
    "integers for uint8": (PIXELS, PIXELS[:5].long(), NORMAL[:5]),
    "one image for uint8": (PIXELS, PIXELS[:1], NORMAL[:1]),
    "larger images for uint8": (PIXELS, PIXELS[:5].repeat(1, 1, 2, 2), NORMAL[:5].repeat(1, 1, 2, 2)),
    "grey for grey": (GREY, GREY[:5], NORMAL[:5, :1]),
    "grey with its channel for grey": (GREY, GREY[:5, None], NORMAL[:5, :1]),
    "unit for unit": (UNIT, UNIT[:5], UNIT[:5]),
    "noisy unit for unit": (UNIT, UNIT[:5] + 0.2 * NORMAL[:5], UNIT[:5] + 0.2 * NORMAL[:5]),
    "double for unit": (UNIT, UNIT[:5].double(), UNIT[:5]),
    "black for normalised": (NORMAL, NORMAL[:5] * 0, NORMAL[:5] * 0),
    "black for unit": (UNIT, UNIT[:5] * 0, UNIT[:5] * 0),
    "normalised for normalised": (NORMAL, NORMAL[:5], NORMAL[:5]),
    "brighter for normalised": (NORMAL, NORMAL[:5] * 1.5, NORMAL[:5] * 1.5),
    "floats of bytes for floats of bytes": (BYTES, BYTES[:5], BYTES[:5]),
    "bytes for floats of bytes": (BYTES, PIXELS[:5], BYTES[:5]),
    "features": (FEATURES, 3 * FEATURES[:5], 3 * FEATURES[:5]),
    "integers for features": (3 * X, X[:5].long(), X[:5].long().float()),
    "tokens": (X.long().abs(), X[:5].long().abs(), X[:5].long().abs()),
}


@pytest.mark.parametrize(("trained", "given", "expected"), SAME.values(), ids=SAME)
def test_inputs_of_the_same_kind(trained: Tensor, given: Any, expected: Tensor) -> None:
    train = as_split((trained, Y), task=TASK)
    kind = input_kind(train)
    torch.testing.assert_close(kind.prepare(given, "new").to(expected.dtype), expected, rtol=1e-5, atol=1e-5)
    y = Y[: len(given)]
    split = as_split((given, y), "val", like=train, task=TASK)
    torch.testing.assert_close(rows(split).to(expected.dtype), expected, rtol=1e-5, atol=1e-5)
    items = as_split(Items(given, y.tolist()), "val", like=kind, task=TASK)
    torch.testing.assert_close(rows(items).to(expected.dtype), expected, rtol=1e-5, atol=1e-5)


OTHER = {  # trained on, given, the sentence
    "unit for uint8": (PIXELS, UNIT[:5], r"float32 in \[0.*trained on uint8 images.*by \(255 \* x\).round"),
    "floats of bytes for uint8": (PIXELS, BYTES[:5], r"trained on uint8 images.*by x.round\(\).to\(torch.uint8\)"),
    "normalised for uint8": (PIXELS, NORMAL[:5], "trained on uint8 images.*not what a transform of your own"),
    "channels last for uint8": (
        PIXELS,
        PIXELS[:5].permute(0, 2, 3, 1),
        r"shape \(5, 6, 5, 3\).*x.permute\(0, 3, 1, 2\)",
    ),
    "grey for colour": (PIXELS, GREY[:5], r"have shape \(5, 6, 5\), and the model was trained on \(N, 3, 6, 5\)"),
    "colour for grey": (GREY, PIXELS[:5], r"have shape \(5, 3, 6, 5\), and the model was trained on \(N, 1, 6, 5\)"),
    "no batch": (PIXELS, PIXELS[0], r"one input alone needs a batch dimension: x\[None\]"),
    "uint8 for unit": (UNIT, PIXELS[:5], r"uint8 in .* trained on float32 in \[0, 1\].*by x.float\(\) / 255"),
    "dark uint8 for unit": (UNIT, PIXELS[:5] // 200, r"uint8 in \[0, 1\]"),
    "uint8 for normalised": (NORMAL, PIXELS[:5], "uint8 in .* trained on float32 in .*make them from these bytes"),
    "floats of bytes for unit": (
        UNIT,
        BYTES[:5],
        r"lie in \[0, 255\], and the model was trained on float32 in \[0, 1\]",
    ),
    "integers of bytes for unit": (UNIT, PIXELS[:5].long(), r"lie in \[0, 255\]"),
    "normalised for unit": (UNIT, NORMAL[:5], r"lie in \[-1.*, and the model was trained on float32 in \[0, 1\]"),
    "unit for normalised": (NORMAL, UNIT, r"lie in \[0, 1\], and the model was trained on float32 in \[-1"),
    "floats of bytes for normalised": (NORMAL, BYTES[:5], "scale them as the training inputs were scaled"),
    "unit for floats of bytes": (BYTES, UNIT[:5], r"lie in \[0.*trained on float32 in \[0, 255\]"),
    "normalised for floats of bytes": (BYTES, NORMAL[:5], "scale them as the training inputs were scaled"),
    "channels last for unit": (UNIT, UNIT[:5].permute(0, 2, 3, 1), r"x.permute\(0, 3, 1, 2\)"),
    "flattened bytes for flattened unit": (UNIT.flatten(1), BYTES[:5].flatten(1), r"lie in \[0, 255\]"),
    "fewer features": (X, X[:, :3], r"have shape \(24, 3\), and the model was trained on \(N, 4\)"),
    "floats for tokens": (X.long().abs(), X, r"trained on integers; use x.long\(\) if they are"),
    "empty": (X, X[:0], "inputs are empty"),
    "NaN": (X, X * torch.nan, "have NaN or infinite values in 24 samples"),
}


@pytest.mark.parametrize(("trained", "given", "message"), OTHER.values(), ids=OTHER)
def test_inputs_of_another_kind(trained: Tensor, given: Any, message: str) -> None:
    train = as_split((trained, Y), task=TASK)
    kind = input_kind(train)
    y = torch.zeros(len(given), dtype=torch.int64)
    with pytest.raises(InputError, match=message):
        kind.prepare(given, "new")
    if not len(given):
        return
    for data in ((given, y), DataLoader(TensorDataset(given, y), batch_size=len(given))):
        with pytest.raises(InputError, match=message):
            list(as_batches(data, stream="val", like=train, task=TASK).epoch(0))


def test_a_scale_is_not_guessed_from_one_image() -> None:
    """What one image says may be chance: normalised images can lie in [0, 1]."""
    kind = input_kind(as_split((NORMAL, Y)))
    assert torch.equal(kind.prepare(UNIT[:1], "new"), UNIT[:1])


def test_a_fitted_model_is_given_what_it_was_trained_on() -> None:
    """`evaluate` of the result, of the module, and `predict_proba` are one function of the same images."""
    for channels, x in ((3, PIXELS), (1, GREY)):
        net = nn.Sequential(nn.Flatten(), nn.Linear(channels * 30, K))
        result = metacal.fit(net, (x, Y), method="cross_entropy", epochs=1, progress=False)
        p = result.predict_proba(x, scaled=False)
        loader = DataLoader(TensorDataset(x, Y), batch_size=9)
        wanted = -p.gather(1, Y[:, None]).log().mean().item()
        normalised = result.calibrated.kind.prepare(x, "new")
        for report in (
            result.evaluate((x, Y), resamples=0),
            result.evaluate(loader, resamples=0),
            result.evaluate(Items(x, Y.tolist()), resamples=0),
            metacal.evaluate(net, (x, Y), resamples=0),
            metacal.evaluate(net, loader, resamples=0),
            metacal.evaluate(result.backbone, [(x[:9], Y[:9]), (x[9:], Y[9:])], resamples=0),
            metacal.evaluate(net, (normalised, Y), resamples=0),  # a bare module is a function of these
        ):
            assert report.to_dict()["nll"] == pytest.approx(wanted, rel=1e-5)
        unit = x.reshape(N, channels, 6, 5) / 255
        for wrong in (unit, 255 * unit):
            with pytest.raises(InputError, match="uint8 images"):
                result.predict_proba(wrong)
            with pytest.raises(InputError, match="uint8 images"):
                result.evaluate((wrong, Y))
            with pytest.raises(InputError, match="data inputs lie in"):
                metacal.evaluate(net, (wrong, Y))


# ------------------------------------------------------------------------------------- margins' labels


@pytest.mark.parametrize("measure", [true_margin, margin_moment, log_margin_moment])
@pytest.mark.parametrize("label", [-100, -1, 3])
def test_margins_name_a_label_out_of_range(measure: Callable[..., Any], label: int) -> None:
    with pytest.raises(InputError, match=rf"labels must be in 0..2, got {label} in row 2"):
        measure(torch.randn(4, 3), torch.tensor([0, 1, label, 2]))


def test_a_model_of_unknown_training_is_given_arrays_and_datasets_too() -> None:
    net = nn.Linear(4, K)
    wanted = metacal.evaluate(net, (X, Y), resamples=0).to_dict()
    batches = [(X[:9], Y[:9]), (X[9:], Y[9:])]

    class Batched(Items):
        def __getitem__(self, i: int) -> tuple[Any, Any]:
            return batches[i]

    for data in (
        (X.numpy(), Y.tolist()),
        (X.double(), Y),
        Items(X, Y.tolist()),
        TensorDataset(X.half().double(), Y),
        batches,
        Batched(X, [0, 1]),
    ):
        assert metacal.evaluate(net, data, resamples=0).to_dict() == pytest.approx(wanted, abs=1e-3)
