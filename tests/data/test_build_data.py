"""From a config to splits: every source, normalisation, folding, fingerprints, and bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from metacal.data import Batches, Data, build_data
from metacal.data.options import DataConfig
from metacal.errors import InputError


def tagged(n: int, shape: tuple[int, ...] = (4, 4, 3), start: int = 0, seed: int = 0) -> np.ndarray:
    """Random images whose first two pixels tell their number, so that splits can be told apart."""
    x = np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)
    flat = x.reshape(n, -1)
    flat[:, 0], flat[:, 1] = divmod(np.arange(start, start + n), 256)
    return x


def save(path: Path, n: int = 200, n_test: int | None = 50, k: int = 4, **changes: Any) -> DataConfig:
    arrays: dict[str, Any] = {"x_train": tagged(n), "y_train": np.arange(n) % k}
    if n_test:
        arrays |= {"x_test": tagged(n_test, start=n), "y_test": np.arange(n_test) % k}
    arrays |= changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return DataConfig("npz", path=str(path))


def numbers(data: Data, name: str) -> set[int]:
    """Which samples are in a split, by their first two pixels."""
    stored = getattr(data, name).storage.permute(0, 2, 3, 1).flatten(1).long()
    return set((256 * stored[:, 0] + stored[:, 1]).tolist())


class TestSplits:
    def test_four_disjoint_parts_of_the_asked_sizes(self, tmp_path: Path) -> None:
        data = build_data(save(tmp_path / "d.npz"))
        sizes = {name: len(getattr(data, name)) for name in ("train", "meta", "val", "test")}
        assert sizes == {"train": 162, "meta": 18, "val": 20, "test": 50}
        parts = [numbers(data, name) for name in sizes]
        assert set.union(*parts) == set(range(250)) and sum(map(len, parts)) == 250
        for name in sizes:
            split = getattr(data, name)
            assert split.labels.dtype == torch.int64
            counts = torch.bincount(split.labels, minlength=4)
            assert counts.max() - counts.min() <= 1
            assert len(split.storage) == len(split)

    def test_inputs_keep_their_labels(self, tmp_path: Path) -> None:
        data = build_data(save(tmp_path / "d.npz", n_test=None))
        for split in (data.train, data.meta, data.val, data.test):
            assert split is not None
            stored = split.storage.permute(0, 2, 3, 1).flatten(1).long()
            assert torch.equal((256 * stored[:, 0] + stored[:, 1]) % 4, split.labels)

    def test_test_set_is_carved_where_there_is_none(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz", n_test=None)
        data = build_data(replace(cfg, test_size=0.25, val_size=30, meta_size=20))
        assert [len(s) for s in (data.test, data.val, data.meta, data.train) if s] == [50, 30, 20, 100]

    def test_train_size_is_for_train_and_meta_together(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        full = build_data(cfg)
        for size in (100, 0.5):
            data = build_data(replace(cfg, train_size=size))
            total = 100 if size == 100 else 90
            assert data.meta is not None
            assert (len(data.meta), len(data.train)) == (total // 10, total - total // 10)
            assert numbers(data, "val") == numbers(full, "val")
        assert len(build_data(replace(cfg, train_size=180)).train) == 162

    def test_splits_depend_on_split_seed_alone(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        a, b = build_data(cfg, seed=0), build_data(cfg, seed=1)
        other = build_data(replace(cfg, split_seed=1))
        for name in ("train", "meta", "val"):
            assert numbers(a, name) == numbers(b, name) != numbers(other, name)
        follows = replace(cfg, split_seed=None)
        assert numbers(build_data(follows, seed=1), "val") == numbers(other, "val")

    def test_folding_gives_the_meta_split_back(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        apart = build_data(cfg)
        folded = build_data(cfg, needs_meta=False)
        assert folded.meta is None
        assert numbers(folded, "train") == numbers(apart, "train") | numbers(apart, "meta")
        assert all(torch.equal(a, b) for a, b in zip(folded.normalization, apart.normalization))
        kept = build_data(replace(cfg, fold_meta_into_train="false"), needs_meta=False)
        assert kept.meta is not None and numbers(kept, "train") == numbers(apart, "train")
        assert build_data(replace(cfg, fold_meta_into_train="True"), needs_meta=False).meta is None
        with pytest.raises(InputError, match="leaves no meta split, which this method needs"):
            build_data(replace(cfg, fold_meta_into_train="true"))

    def test_val_and_folds_as_meta_cost_no_training_image(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        folded = build_data(cfg, needs_meta=False)
        assert build_data(cfg).meta_from == "train" and build_data(cfg).set_aside == 18 and folded.meta_from is None
        for meta_from in ("val", "folds"):
            data = build_data(replace(cfg, meta_from=meta_from))
            assert numbers(data, "train") == numbers(folded, "train") and data.fingerprints == folded.fingerprints
            assert data.meta_from == meta_from and data.set_aside == 0
            plain = build_data(replace(cfg, meta_from=meta_from), needs_meta=False)
            assert numbers(plain, "train") == numbers(folded, "train")
            assert plain.meta is None and plain.folds is None and plain.meta_from is None
        assert numbers(build_data(replace(cfg, meta_from="val")), "meta") == numbers(folded, "val")
        folds = data.folds
        assert data.meta is None and folds is not None and folds.count == 10 and len(folds.number) == 180
        again = build_data(replace(cfg, meta_from="folds", meta_folds=10), seed=3).folds
        assert again is not None and torch.equal(again.number, folds.number), "the split_seed draws them"
        with pytest.raises(InputError, match=r"data.meta_folds must be in \[2, 180\], the training samples, got 181"):
            build_data(replace(cfg, meta_from="folds", meta_folds=181))
        with pytest.raises(InputError, match=r"data.fold_meta_into_train=false sets .* data.meta_from=val"):
            build_data(replace(cfg, meta_from="val", fold_meta_into_train="false"))

    def test_only_train_and_meta_are_augmented(self, tmp_path: Path) -> None:
        data = build_data(replace(save(tmp_path / "d.npz"), crop_padding=2, flip=True, meta_augment=True))
        assert data.meta is not None
        for split, padding in ((data.train, 2), (data.meta, 2), (data.val, 0), (data.test, 0)):
            assert split.transform is not None
            assert (split.transform.crop_padding, split.transform.flip) == (padding, padding > 0)
        data = build_data(replace(save(tmp_path / "d.npz"), crop_padding=2, flip=True))
        assert data.meta is not None and data.meta.transform == data.val.transform


class TestNormalization:
    def test_statistics_are_of_the_training_images_only(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        data = build_data(cfg)
        assert data.meta is not None
        stored = torch.cat([data.train.storage, data.meta.storage]).double() / 255
        mean, std = data.normalization
        torch.testing.assert_close(mean, stored.mean((0, 2, 3)).float())
        torch.testing.assert_close(std, stored.std((0, 2, 3), correction=0).float())

    def test_given_none_and_range(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        given = build_data(replace(cfg, mean=[0.1, 0.2, 0.3], std=[0.5, 0.5, 0.25]))
        assert given.pixel_range is not None
        torch.testing.assert_close(given.pixel_range[0], torch.tensor([-0.2, -0.4, -1.2]))
        torch.testing.assert_close(given.pixel_range[1], torch.tensor([1.8, 1.6, 2.8]))
        plain = build_data(replace(cfg, normalize="none"))
        x, _ = next(Batches(plain.test, 50, shuffle=False).epoch(0))
        torch.testing.assert_close(x, plain.test.storage / 255)
        assert plain.pixel_range is not None
        assert [t.tolist() for t in plain.pixel_range] == [[0.0] * 3, [1.0] * 3]

    def test_pixel_range_is_what_0_and_255_become(self, tmp_path: Path) -> None:
        data = build_data(save(tmp_path / "d.npz"))
        assert data.pixel_range is not None and data.test.transform is not None
        for value, bound in zip((0, 255), data.pixel_range):
            x = data.test.transform(torch.full((1, 3, 1, 1), value, dtype=torch.uint8))
            torch.testing.assert_close(x.flatten(), bound)

    def test_float_features_are_standardised_each(self, tmp_path: Path) -> None:
        x = np.random.default_rng(0).normal(3, [1, 10, 0.1], (200, 3))
        data = build_data(save(tmp_path / "d.npz", x_train=x, x_test=x[:50]))
        assert data.pixel_range is None and data.input_shape == (3,)
        x, _ = next(Batches(data.train, 1000).epoch(0))
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.mean(0), torch.zeros(3), atol=0.1, rtol=0)
        torch.testing.assert_close(x.std(0), torch.ones(3), atol=0.1, rtol=0)


class TestFingerprint:
    def test_is_of_the_test_content(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        base = build_data(cfg).fingerprint
        assert base == build_data(replace(cfg, split_seed=1, normalize="none", storage="stream"), seed=3).fingerprint
        changed = tagged(50, start=200)
        changed[0, 3, 3, 0] ^= 1
        labels = (np.arange(50) + 1) % 4
        assert base != build_data(save(tmp_path / "x.npz", x_test=changed)).fingerprint
        assert base != build_data(save(tmp_path / "y.npz", y_test=labels)).fingerprint

    def test_of_a_carved_test_set_follows_the_split_seed(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz", n_test=None)
        assert build_data(cfg).fingerprint == build_data(cfg, needs_meta=False).fingerprint
        assert build_data(cfg).fingerprint != build_data(replace(cfg, split_seed=1)).fingerprint

    def test_the_other_splits_have_their_own(self, tmp_path: Path) -> None:
        cfg = save(tmp_path / "d.npz")
        own = build_data(cfg).fingerprints
        assert own.keys() == {"train", "meta", "train_and_meta", "val"} and len(set(own.values())) == 4
        assert own == build_data(replace(cfg, normalize="none", storage="stream"), seed=3).fingerprints
        other = build_data(replace(cfg, split_seed=1)).fingerprints
        assert all(other[name] != own[name] for name in own)
        both = own["train_and_meta"]
        assert build_data(cfg, needs_meta=False).fingerprints == {
            "train": both, "train_and_meta": both, "val": own["val"]
        }  # fmt: skip

    def test_of_training_images_follows_inputs_and_labels(self, tmp_path: Path) -> None:
        inputs, labels = tagged(200), np.arange(200) % 4
        own = build_data(save(tmp_path / "d.npz", x_train=inputs, y_train=labels)).fingerprints
        inputs[:, 3, 3, 0] ^= 1
        changed = build_data(save(tmp_path / "x.npz", x_train=inputs, y_train=labels)).fingerprints
        assert all(changed[name] != own[name] for name in own)


def test_digits() -> None:
    data = build_data(DataConfig())
    assert data.input_shape == (1, 8, 8) and data.n_classes == 10 and data.class_names[3] == "3"
    assert sum(len(s) for s in (data.train, data.meta, data.val, data.test) if s) == 1797
    assert data.train.storage.max() == 16 and data.train.storage.dtype == torch.uint8
    x, _ = next(Batches(data.train, 2000).epoch(0))
    assert float(x.mean()) == pytest.approx(0, abs=0.01) and float(x.std()) == pytest.approx(1, abs=0.01)


class TestNpz:
    def test_grey_images_and_class_names(self, tmp_path: Path) -> None:
        names = np.array(["ant", "bee", "cat", "dog"])
        cfg = save(
            tmp_path / "d.npz", x_train=tagged(200, (4, 5)), x_test=tagged(50, (4, 5)), class_names=names,
            y_train=(np.arange(200) % 4).astype(np.uint8)[:, None], y_test=(np.arange(50) % 4).astype(float),
        )  # fmt: skip
        data = build_data(cfg)
        assert data.input_shape == (1, 4, 5) and data.class_names == list(names)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"y_train": None}, r"d.npz lacks the array y_train; it has x_test, x_train, y_test"),
            ({"x_test": None}, r"must have both of x_test and y_test or neither; it has x_train, y_test, y_train"),
            ({"x_train": np.where(np.arange(200) == 7, np.nan, 1.0), "x_test": np.ones(50)},
             "x_train of .* has NaN or infinite values in 1 samples, the first at index 7"),
            ({"x_train": np.full((200, 2), 1e300), "x_test": np.ones((50, 2))}, "x_train of .* infinite values in 200"),
            ({"y_train": np.arange(200) % 4 - 1}, r"y_train of .* must hold integers in 0..K-1, got -1 at index 0"),
            ({"y_train": np.arange(200) % 4 + 0.5}, r"must hold integers in 0..K-1, got 0.5 at index 0"),
            ({"y_train": np.arange(200) * 10**15}, "got 1000000000000000 at index 1: 200 samples have fewer classes"),
            ({"y_test": np.arange(50) % 5}, r"y_test of .* must hold integers in 0..3, got 4 at index 4"),
            ({"y_train": np.eye(4)[np.arange(200) % 4]}, r"shape \(n,\), got shape \(200, 4\)"),
            ({"y_train": np.array(["a"] * 200)}, "must hold integers 0..K-1, got <U1"),
            ({"y_train": np.arange(199) % 4}, "must have as many entries as there are inputs, 200, got 199"),
            ({"y_train": np.where(np.arange(200) % 4 == 1, 3, np.arange(200) % 4)}, "class '1' has no training"),
            ({"y_train": np.zeros(200, int), "y_test": np.zeros(50, int)}, "has 1 class; at least 2 are needed"),
            ({"class_names": np.array(["a", "b"])}, r"must hold integers in 0..1, got 2 at index 2"),
            ({"x_test": tagged(50, (5, 4, 3))}, "x_train and x_test of .* must have the same shape"),
            ({"x_train": tagged(200, (3, 8, 8))}, r"must be NHWC \(channels last\), got shape \(200, 3, 8, 8\)"),
            ({"x_train": np.zeros((200, 8, 8, 3))}, "images must be uint8 NHWC, or floats NCHW"),
            ({"x_train": np.zeros((200, 3), complex)}, "must hold numbers, got complex128"),
            ({"x_train": np.zeros((0, 4, 4, 3), np.uint8)}, "x_train of .* is empty"),
            ({"x_train": np.array([[1, 2], [1]], dtype=object)}, "images of different shapes"),
        ],
    )  # fmt: skip
    def test_bad_content(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        cfg = save(tmp_path / "d.npz", **changes)
        with pytest.raises(InputError, match=message) as info:
            build_data(cfg)
        assert "\n" not in str(info.value)

    def test_bad_files(self, tmp_path: Path) -> None:
        path = tmp_path / "d.npz"
        with pytest.raises(InputError, match="does not exist"):
            build_data(DataConfig("npz", path=str(path)))
        with pytest.raises(InputError, match=r"data.path is missing: data=npz needs data.path="):
            build_data(DataConfig("npz"))
        with pytest.raises(InputError, match="not a readable"):
            build_data(DataConfig("npz", path=str(tmp_path)))
        save(path)
        for content in (path.read_bytes()[:5000], b"", b"nothing of the kind"):
            path.write_bytes(content)
            with pytest.raises(InputError, match=str(path)) as info:
                build_data(DataConfig("npz", path=str(path)))
            assert "\n" not in str(info.value)
        np.save(tmp_path / "a.npy", np.zeros(3))
        with pytest.raises(InputError, match="holds a single array"):
            build_data(DataConfig("npz", path=str(tmp_path / "a.npy")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "digit"}, "data.name must be one of .*got 'digit'.*did you mean 'digits'"),
        ({"val_size": 1.5}, "data.val_size must be a fraction"),
        ({"meta_size": 0}, "data.meta_size must be a fraction"),
        ({"train_size": "all"}, "data.train_size must be a fraction"),
        ({"val_size": 5}, "data.val_size gives 5 samples, fewer than the 10 classes"),
        ({"test_size": 1790}, "data.test_size takes 1790 of 1797 samples"),
        ({"train_size": 5000}, "data.train_size must be below the 1294 samples that it is taken from, got 5000"),
        ({"train_size": 15}, "data.meta_size gives 2 samples"),
        ({"batch_size": 0}, "data.batch_size must be >= 1, got 0"),
        ({"meta_batch_size": 0}, "data.meta_batch_size must be >= 1, got 0"),
        ({"split_seed": -1}, "data.split_seed must be >= 0, got -1"),
        ({"crop_padding": -1}, "data.crop_padding must be >= 0, got -1"),
        ({"crop_padding": 8}, "data.crop_padding must be below the image's sides 8x8, got 8"),
        ({"workers": -1}, "data.workers must be >= 0, got -1"),
        ({"storage": "disk"}, "data.storage must be one of auto, memory, stream, got 'disk'"),
        ({"normalize": "yes"}, "data.normalize must be one of auto, none, got 'yes'"),
        ({"fold_meta_into_train": "maybe"}, "data.fold_meta_into_train must be one of"),
        ({"mean": [0.5]}, "data.mean and data.std must be given together"),
        ({"mean": [0.5], "std": [0.0]}, "data.std must be > 0"),
        ({"mean": [0.5] * 3, "std": [0.5] * 3}, "data.mean must have one number per channel, 1, got 3"),
        ({"image_size": 16}, "data.image_size works with data=folder and shards only, got 16"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as info:
        build_data(replace(DataConfig(), **changes))
    assert "\n" not in str(info.value)


def test_features_cannot_be_cropped(tmp_path: Path) -> None:
    cfg = save(tmp_path / "d.npz", x_train=np.random.rand(200, 3), x_test=np.random.rand(50, 3))
    with pytest.raises(InputError, match="need images"):
        build_data(replace(cfg, flip=True))


def write_images(folder: Path, n: int, side: tuple[int, int] = (6, 6), seed: int = 0) -> None:
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(seed)
    for i in range(n):
        Image.fromarray(pixels.integers(0, 256, (*side, 3), dtype=np.uint8)).save(folder / f"{i:03}.png")


class TestFolder:
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        for k, name in enumerate(("ant", "bee")):
            write_images(tmp_path / "train" / name, 30, seed=k)
            write_images(tmp_path / "test" / name, 5, seed=10 + k)
        return tmp_path

    def test_train_and_test(self, tree: Path) -> None:
        data = build_data(DataConfig("folder", path=str(tree), workers=0))
        assert data.class_names == ["ant", "bee"] and data.input_shape == (3, 6, 6)
        assert [len(s) for s in (data.train, data.meta, data.val, data.test) if s] == [49, 5, 6, 10]
        first = np.asarray(Image.open(tree / "test" / "ant" / "000.png")).transpose(2, 0, 1)
        assert np.array_equal(data.test.storage[0].numpy(), first)
        assert data.test.labels.tolist() == [0] * 5 + [1] * 5

    def test_a_single_tree(self, tree: Path) -> None:
        data = build_data(DataConfig("folder", path=str(tree / "train"), workers=0))
        assert len(data.test) == 12 and len(data.val) == 5

    def test_val_is_the_test_set_or_joins_the_pool(self, tree: Path) -> None:
        for k, name in enumerate(("ant", "bee")):
            write_images(tree / "val" / name, 10, seed=20 + k)
        cfg = DataConfig("folder", path=str(tree), workers=0)
        both = build_data(cfg)
        assert len(both.test) == 10 and len(both.val) == 8
        (tree / "test").rename(tree / "unused")
        assert len(build_data(cfg).test) == 20

    def test_tiny_imagenets_layout(self, tmp_path: Path) -> None:
        lines = []
        for k, name in enumerate(("n01", "n02")):
            write_images(tmp_path / "train" / name / "images", 20, seed=k)
            (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("0 0 1 1")
            lines += [f"{i + 4 * k:03}.png\t{name}\t0\t0\t5\t5" for i in range(4)]
        write_images(tmp_path / "val" / "images", 8, seed=5)
        write_images(tmp_path / "test" / "images", 3, seed=6)
        (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(lines))
        data = build_data(DataConfig("folder", path=str(tmp_path), workers=0))
        assert len(data.test) == 8 and data.test.labels.tolist() == [0] * 4 + [1] * 4
        assert data.class_names == ["n01", "n02"]
        (tmp_path / "val" / "val_annotations.txt").write_text("000.png\tn99")
        with pytest.raises(InputError, match="names class 'n99', unknown in train"):
            build_data(DataConfig("folder", path=str(tmp_path), workers=0))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_streaming_equals_memory(self, tree: Path, workers: int) -> None:
        cfg = DataConfig("folder", path=str(tree), workers=workers, image_size=4, crop_padding=1, flip=True)
        memory = build_data(replace(cfg, storage="memory", workers=0))
        stream = build_data(replace(cfg, storage="stream"))
        assert memory.train.in_memory and not stream.train.in_memory
        assert memory.fingerprint == stream.fingerprint
        assert all(torch.equal(a, b) for a, b in zip(memory.normalization, stream.normalization))
        for (x, y), (u, v) in zip(Batches(memory.train, 8).epoch(0), Batches(stream.train, 8).epoch(0), strict=True):
            assert torch.equal(x, u) and torch.equal(y, v)

    def test_resizing_keeps_the_middle(self, tmp_path: Path) -> None:
        """Left third red, middle green, right blue: the middle square of a 3:1 image is green."""
        stripes = np.zeros((10, 30, 3), np.uint8)
        for k in range(3):
            stripes[:, 10 * k : 10 * k + 10, k] = 255
        for name in ("a", "b"):
            write_images(tmp_path / name, 20, (8, 8))
            Image.fromarray(stripes).save(tmp_path / name / "z.png")
        data = build_data(DataConfig("folder", path=str(tmp_path), image_size=5, workers=0, test_size=0.4))
        everything = torch.cat([s.storage for s in (data.train, data.meta, data.val, data.test) if s])
        green = torch.tensor([0, 255, 0], dtype=torch.uint8).view(3, 1, 1)
        assert int((everything == green)[:, :, 1:-1, 1:-1].flatten(1).all(1).sum()) == 2

    @pytest.mark.parametrize("storage", ["memory", "stream"])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_bad_images(self, tree: Path, storage: str, workers: int) -> None:
        cfg = DataConfig("folder", path=str(tree), storage=storage, workers=workers)
        odd = tree / "train" / "bee" / "odd.png"
        Image.fromarray(np.zeros((7, 6, 3), np.uint8)).save(odd)
        with pytest.raises(InputError, match=r"odd\.png is 7x6, the first 6x6 .*; set data.image_size") as info:
            build_data(cfg)
        assert "\n" not in str(info.value)
        odd.write_bytes((tree / "train" / "bee" / "000.png").read_bytes()[:60])
        with pytest.raises(InputError, match=r"odd\.png cannot be") as info:
            build_data(cfg)
        assert "\n" not in str(info.value)

    def test_bad_trees(self, tree: Path) -> None:
        cfg = DataConfig("folder", path=str(tree), workers=0)
        with pytest.raises(InputError, match="is not a folder"):
            build_data(replace(cfg, path=str(tree / "nowhere")))
        with pytest.raises(InputError, match="has no class folders"):
            build_data(replace(cfg, path=str(tree / "train" / "ant")))
        (tree / "train" / "cat").mkdir()
        with pytest.raises(InputError, match=r"class folder .*cat has no image files"):
            build_data(cfg)
        (tree / "train" / "cat").rmdir()
        write_images(tree / "test" / "dog", 1)
        with pytest.raises(InputError, match=r"dog is no class of the training folder"):
            build_data(cfg)
        with pytest.raises(InputError, match=r"data\.image_size must be >= 1, got 0"):
            build_data(replace(cfg, image_size=0))


class TestTorchvision:
    @pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist", "svhn"])
    def test_absent_data_say_how_to_get_them(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=rf"{name} is not in data\.path = .*; get it with data\.download=true"):
            build_data(DataConfig(name, path=str(tmp_path)))
        assert not list(tmp_path.rglob("*.gz"))

    @pytest.mark.parametrize(
        ("name", "kind", "shape", "attribute"),
        [
            ("cifar10", "CIFAR10", (8, 8, 3), "targets"),
            ("mnist", "MNIST", (8, 8), "targets"),
            ("svhn", "SVHN", (3, 8, 8), "labels"),
        ],
    )
    def test_layouts(
        self, name: str, kind: str, shape: tuple[int, ...], attribute: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Fake:
            def __init__(self, root: str, train: bool = True, split: str = "train", download: bool = False) -> None:
                n = 100 if train and split == "train" else 40
                self.data = tagged(n, shape, seed=n)
                setattr(self, attribute, list(range(4)) * (n // 4))
                if name != "svhn":
                    self.classes = ["a", "b", "c", "d"]

        monkeypatch.setattr(torchvision.datasets, kind, Fake)
        data = build_data(DataConfig(name, path="x"))
        channels = 1 if name == "mnist" else 3
        assert data.input_shape == (channels, 8, 8) and len(data.test) == 40
        assert data.class_names == (["0", "1", "2", "3"] if name == "svhn" else ["a", "b", "c", "d"])
        expected = tagged(40, shape, seed=40)[5]
        expected = expected.reshape(1, 8, 8) if name == "mnist" else expected
        expected = expected.transpose(2, 0, 1) if name == "cifar10" else expected
        assert np.array_equal(data.test.storage[5].numpy(), expected)
        if name == "cifar10":
            torch.testing.assert_close(data.normalization[0], torch.tensor([0.4914, 0.48216, 0.44653]))
