"""Other people's tensors, datasets and loaders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from metacal.data import Batches, LoaderBatches, Split, as_batches, as_split
from metacal.errors import InputError

X = torch.arange(40.0).reshape(20, 2)
Y = torch.arange(20) % 3


class Noisy(Dataset):
    """Adds noise from the global generator, as random transforms do."""

    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return X[i] + torch.rand(2) + np.random.rand(), int(Y[i])


def equal(a: list[tuple[Tensor, ...]], b: list[tuple[Tensor, ...]]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for p, q in zip(a, b) for s, t in zip(p, q))


@pytest.mark.parametrize(
    "data", [(X, Y), [X.numpy(), Y.numpy()], TensorDataset(X, Y)], ids=["pair", "numpy", "dataset"]
)
def test_floats_are_used_as_they_are(data: object) -> None:
    split = as_split(data, "val")
    assert split.name == "val" and torch.equal(split.labels, Y)
    x = torch.cat([x for x, _ in Batches(split, 6, shuffle=False).epoch(0)])
    assert torch.equal(x, X)


def test_uint8_images_are_normalised_by_the_training_statistics() -> None:
    x = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8)
    train = as_split((x, Y))
    images, _ = next(Batches(train, 20).epoch(0))
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(3))
    other = as_split((x // 2, Y), like=train)
    assert other.transform is not None and train.transform is not None
    assert torch.equal(other.transform.mean, train.transform.mean)
    assert as_split((x[:, 0], Y)).input_shape == (1, 4, 4)


def test_split_and_batches_pass_through() -> None:
    split = Split("train", X, Y)
    assert as_split(split) is split
    batches = Batches(split, 4)
    assert as_batches(batches) is batches
    assert isinstance(as_batches(split, 4), Batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_read_afresh_each_pass_but_repeatably(workers: int) -> None:
    split = as_split(Noisy(), workers=workers)
    assert torch.equal(split.labels, Y) and split.input_shape == (2,)
    batches = Batches(split, 6, seed=1)
    first, second = list(batches.epoch(0)), list(batches.epoch(1))
    assert equal(first, list(batches.epoch(0)))
    assert equal(first[2:], list(batches.epoch(0, start=2)))
    assert not equal(first, second)
    x, y, _ = next(Batches(split, 20, shuffle=False, with_index=True).epoch(0))
    assert torch.equal(y, Y) and ((x - X) > 0).all() and ((x - X) < 2).all()


def test_labels_of_a_dataset_come_from_its_attribute() -> None:
    data = Noisy()
    data.targets = (Y * 0 + 2).tolist()  # type: ignore[attr-defined]
    assert as_split(data).labels.tolist() == [2] * 20


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_shuffles_anew_each_epoch_and_is_repeatable(workers: int) -> None:
    loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=workers)
    batches = as_batches(loader, seed=3)
    assert isinstance(batches, LoaderBatches) and len(batches) == 4
    first, second = list(batches.epoch(0)), list(batches.epoch(1))
    assert equal(first, list(batches.epoch(0))) and not equal(first, second)
    assert equal(first[1:], list(batches.epoch(0, start=1)))
    assert equal(list(itertools.islice(batches.forever(2), 4)), [*first[2:], *second[:2]])
    assert not equal(first, list(as_batches(loader, seed=4).epoch(0)))


def test_a_loader_leaves_the_global_generator_alone() -> None:
    batches = as_batches(DataLoader(Noisy(), batch_size=6, shuffle=True))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(batches.epoch(0))
    assert torch.rand(1) == expected


class Endless(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([(X[0], 0)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:5]), "train inputs and labels must be equally many, got 20 and 5"),
        ((X, Y - 1), "train labels must be >= 0, got -1 at index 0"),
        ((X, 2 * Y.float()), "train labels must be integers, got torch.float32"),
        ((X, Y[:, None, None]), r"shape \(N,\), got \(20, 1, 1\)"),
        ((X * float("nan"), Y), "train inputs have NaN or infinite values in 20 samples, the first at index 0"),
        ((X.long(), Y), "train inputs must be floating point, or uint8 images, got torch.int64"),
        ((torch.zeros(20, 4, 4, 3, dtype=torch.uint8), Y), r"must be \(N, C, H, W\).*use x.permute\(0, 3, 1, 2\)"),
        ((X[:0], Y[:0]), "train data are empty"),
        ("cifar10", "train data must be a pair of tensors .* got str"),
        (Endless(), "train data must be a pair of tensors .* got Endless"),
        (Noisy(0), "train dataset is empty"),
        ([(X[0], 1)] * 3, "train data must be a pair"),
    ],
)
def test_bad_data(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_split(data)


def test_bad_loaders() -> None:
    with pytest.raises(InputError, match="the val DataLoader must have a length"):
        as_batches(DataLoader(Endless()), stream="val")
    with pytest.raises(InputError, match="the train DataLoader is empty"):
        as_batches(DataLoader(Noisy(3), batch_size=6, drop_last=True))
    with pytest.raises(InputError, match=r"must give batches \(inputs, labels\), .*, got Tensor"):
        next(as_batches(DataLoader(TensorDataset(X), collate_fn=lambda b: b[0][0])).epoch(0))
