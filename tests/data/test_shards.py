"""Images in shards: the same data as from folders, an order that reads shard by shard, bad shards, and a whole run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reference.same_run import assert_same_run
from torch import Tensor

from metacal.cli import main
from metacal.data import Batches, build_data
from metacal.data.options import DataConfig
from metacal.data.shards import class_indices
from metacal.data.splits import by_shard
from metacal.errors import InputError


def pixels(number: int, side: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_shards(root: Path, n: int, k: int, side: int, shards: int, first: int = 0, label: str = "cls") -> None:
    """n images, image i of class i mod k, dealt out to the shards in turn."""
    for shard in range(shards):
        members: dict[str, bytes] = {}
        for i in range(first + shard, first + n, shards):
            text = str(i % k) if label == "cls" else json.dumps({"label": f"class{i % k}"})
            members |= {f"a/{i:06}.png": png(pixels(i, side)), f"a/{i:06}.{label}": text.encode()}
            members[f"a/{i:06}.txt"] = b"a caption, which nobody reads"
        write_shard(root / f"part-{shard:03}.tar", members)


def stored(split) -> list[bytes]:
    return sorted(split.storage[i].numpy().tobytes() + bytes([int(split.labels[i])]) for i in range(len(split)))


@pytest.mark.parametrize("label", ["cls", "json"])
def test_shards_are_the_same_data_as_folders(label: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards/train", 60, 3, 6, shards=4, label=label)
    write_shards(tmp_path / "shards/val", 9, 3, 6, shards=1, first=60, label=label)
    for part, numbers in (("train", range(60)), ("val", range(60, 69))):
        for i in numbers:
            file = tmp_path / "folders" / part / f"class{i % 3}" / f"{i:06}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(i, 6)).save(file)
    cfg = DataConfig("shards", path=str(tmp_path / "shards"), storage="stream", workers=0)
    of_shards = build_data(cfg)
    of_folders = build_data(replace(cfg, name="folder", path=str(tmp_path / "folders")))
    assert of_shards.class_names == (["0", "1", "2"] if label == "cls" else of_folders.class_names)
    names = ("train", "meta", "val", "test")
    assert [len(getattr(of_shards, name)) for name in names] == [len(getattr(of_folders, name)) for name in names]
    assert stored(of_shards.test) == stored(of_folders.test)
    every = [sorted(x for name in names for x in stored(getattr(data, name))) for data in (of_shards, of_folders)]
    assert every[0] == every[1] and len(every[0]) == 69
    in_memory = build_data(replace(cfg, storage="memory"))
    assert stored(in_memory.train) == stored(of_shards.train) and in_memory.fingerprints == of_shards.fingerprints


def test_the_order_reads_shard_by_shard_and_moves_no_sample_by_more_than_the_buffer() -> None:
    shard = torch.arange(40).repeat_interleave(25)
    positions = torch.arange(1000)[torch.rand(1000) < 0.9]
    order = by_shard(shard, 50, positions, torch.Generator().manual_seed(0))
    assert torch.equal(order.sort().values, positions)
    visits = shard[order]
    first_seen = [int((visits == s).nonzero()[0]) for s in range(40)]
    turn = torch.tensor(first_seen).argsort()
    assert not torch.equal(turn, torch.arange(40)), "the shards come in a random order"
    ideal = torch.cat([positions[shard[positions] == s] for s in turn])
    place = torch.empty(1000, dtype=torch.int64)
    place[ideal] = torch.arange(len(ideal))
    # the turn of two neighbouring shards may be told wrongly here, by what their ends have exchanged
    assert int((place[order] - torch.arange(len(order))).abs().max()) < 50 + 2 * 25
    assert not torch.equal(order, by_shard(shard, 50, positions, torch.Generator().manual_seed(1)))


def test_batches_of_a_stream_start_anywhere_and_open_few_shards_at_a_time(tmp_path: Path) -> None:
    write_shards(tmp_path, 400, 2, 2, shards=20)
    cfg = DataConfig("shards", path=str(tmp_path), storage="stream", workers=0, shuffle_buffer=10)
    data = build_data(cfg)

    def batches(workers: int, start: int = 0) -> list[tuple[Tensor, ...]]:
        split = replace(data.train, workers=workers)
        return list(Batches(split, 16, seed=3, with_index=True).epoch(5, start))

    whole, with_workers = batches(0), batches(2)
    for one, two in zip(whole, with_workers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for one, two in zip(whole[7:], batches(1, start=7), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    shard = data.train.storage.files.shard
    for _, y, index in whole:
        assert len(set(shard[index.numpy()])) <= 5 and torch.equal(y, data.train.labels[index])


def bad_shards(root: Path) -> dict[str, str]:
    """What is written below `root`, one folder each, and what the message must say."""
    image = png(pixels(0, 4))
    cases = {
        "lonely image": ({"1.png": image}, "sample 1 of shard .* has no label"),
        "lonely label": ({"1.png": image, "1.cls": b"0", "2.cls": b"0"}, "sample 2 of shard .* has no image"),
        "two images": ({"1.png": image, "1.jpg": image, "1.cls": b"0"}, "sample 1 of shard .* has two images"),
        "no label inside": ({"1.png": image, "1.json": b"{}"}, "1.json of shard .* must be UTF-8 text of a JSON"),
        "empty label": ({"1.png": image, "1.cls": b" "}, "must hold a class index or name"),
        "a number": ({"1.png": image, "1.json": b'{"label": 1.5}'}, "must hold a class index or name, got 1.5"),
        "nothing": ({"1.txt": b""}, "hold no images with labels"),
    }
    for name, (members, _) in cases.items():
        write_shard(root / name / "0.tar", members)
    write_shard(root / "links" / "0.tar", {"1.png": image, "1.cls": b"0"})
    with tarfile.open(root / "links" / "0.tar", "a") as tar:  # a sample that would be left out with its label
        for suffix in ("png", "cls"):
            link = tarfile.TarInfo(f"2.{suffix}")
            link.type, link.linkname = tarfile.LNKTYPE, f"1.{suffix}"
            tar.addfile(link)
    return {name: message for name, (_, message) in cases.items()} | {"links": "2.png of shard .* is a link or sparse"}


def test_bad_shards_are_named(tmp_path: Path) -> None:
    for name, message in bad_shards(tmp_path).items():
        with pytest.raises(InputError, match=message):
            build_data(DataConfig("shards", path=str(tmp_path / name)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no \.tar files"):
        build_data(DataConfig("shards", path=str(tmp_path / "empty")))
    with tarfile.open(tmp_path / "empty/0.tar", "w:gz") as tar:
        tar.add(__file__)
    with pytest.raises(InputError, match="must be a plain"):
        build_data(DataConfig("shards", path=str(tmp_path / "empty")))
    write_shards(tmp_path / "cut", 20, 2, 30, shards=1)
    path = tmp_path / "cut/part-000.tar"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(InputError, match=r"part-000\.tar"):
        build_data(DataConfig("shards", path=str(tmp_path / "cut")))
    write_shards(tmp_path / "other/train", 20, 2, 4, shards=1)
    write_shards(tmp_path / "other/test", 20, 3, 4, shards=1)
    with pytest.raises(InputError, match="has the label '2', unknown in train, which has 2 classes"):
        build_data(DataConfig("shards", path=str(tmp_path / "other")))
    with pytest.raises(InputError, match=r"train has the label 10000000000, and 2 samples for 0\.\.1"):
        class_indices(["0", "10000000000"], None, "train")
    for texts in (["007", "1"], ["9" * 5000, "1"]):  # names
        assert class_indices(texts, None, "train")[1] == sorted(texts)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["shards", "folder"])
def test_a_thousand_classes_stream_train_stop_and_resume_bit_for_bit(source: str, tmp_path: Path) -> None:
    """ImageNet's shape but for the sides: 1,000 classes, few images of each, decoded and resized when they are read."""
    root = tmp_path / "data"
    for part, first, n in (("train", 0, 2000), ("val", 2000, 1000)):
        if source == "shards":
            write_shards(root / part, n, 1000, 9, shards=10, first=first)
        else:
            for i in range(first, first + n):
                (root / part / f"n{i % 1000:04}").mkdir(parents=True, exist_ok=True)
                (root / part / f"n{i % 1000:04}" / f"{i}.png").write_bytes(png(pixels(i, 9)))
    words = [
        "method=gamma_net",
        f"data={source}",
        f"data.path={root}",
        "data.storage=stream",
        "data.image_size=8",
        "data.workers=1",
        "data.val_size=1000",
        "data.meta_from=val",
        "data.meta_batch_size=64",
        "data.batch_size=64",
        "data.flip=true",
        "model=mlp",
        "model.hidden=[16]",
        "epochs=2",
        "checkpoint_every=0.1",
        "threads=1",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "baselines=[]",
    ]
    assert main(["train", *words, f"run_dir={tmp_path / 'whole'}"]) == 0
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "metacal", "train", *words, f"run_dir={stopped}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not (stopped / "checkpoints" / "last.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (stopped / "summary.json").exists(), "the run ended before the signal: give it more epochs"
    assert main(["train", *words, f"resume={stopped}"]) == 0
    assert_same_run(tmp_path / "whole", stopped)
    assert json.loads((stopped / "summary.json").read_text())["last/classwise_ece"] < 0.01
