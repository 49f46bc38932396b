"""Checkpoints: atomic, loadable with weights_only, and refused in one line when they do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metacal.errors import InputError, RunError
from metacal.runs import checkpoint


def test_what_is_saved_is_loaded(tmp_path):
    state = {"a": torch.arange(3.0), "b": {"c": (1, 2.5, "x", None, True)}}
    checkpoint.save(tmp_path / "folder" / "c.pt", state)
    loaded = checkpoint.load(tmp_path / "folder" / "c.pt")
    assert torch.equal(loaded["a"], state["a"]) and loaded["b"] == state["b"]
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["c.pt"]


def test_a_failing_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"a": torch.ones(2)})

    def write(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"No space left on device .*the one written before is kept"):
        checkpoint.write_atomically(path, write)
    assert torch.equal(checkpoint.load(path)["a"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_a_flipped_bit_is_noticed_wherever_it_is_and_the_last_good_one_named(tmp_path):
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"a": torch.arange(50.0), "progress": {"epoch": 3}})
    checkpoint.save(tmp_path / "best.pt", {"a": torch.arange(2.0), "epoch": 2})
    torch.load(path, weights_only=True)  # the digest is an archive's comment, which nobody minds
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"the last good one is .*best\.pt, of epoch 2"):
            checkpoint.load(path)
    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(InputError, match="no other one there is whole: start the run again"):
        checkpoint.load(path)


def test_a_checkpoint_without_a_digest_is_one_of_an_older_run(tmp_path):
    torch.save({"format": 1, "a": torch.ones(2)}, tmp_path / "old.pt")
    assert torch.equal(checkpoint.load(tmp_path / "old.pt")["a"], torch.ones(2))


def test_truncated_missing_or_foreign_files_are_named(tmp_path):
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"a": torch.ones(1000)})
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"c\.pt is truncated or no checkpoint"):
            checkpoint.load(path)
    with pytest.raises(InputError, match="does not exist"):
        checkpoint.load(tmp_path / "none.pt")
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises(InputError, match="must be of format 1, got None"):
        checkpoint.load(path)


def test_weights_of_another_model():
    a, b = nn.Linear(3, 4), nn.Linear(3, 5)
    with pytest.raises(InputError, match=r"x\.pt is of another model: 'weight' has shape \(5, 3\)"):
        checkpoint.load_weights(a, b.state_dict(), "x.pt")
    with pytest.raises(InputError, match="it has no 'bias'"):
        checkpoint.load_weights(a, nn.Linear(3, 4, bias=False).state_dict(), "x.pt")
    with pytest.raises(InputError, match="this one has no 'bias'"):
        checkpoint.load_weights(nn.Linear(3, 4, bias=False), a.state_dict(), "x.pt")
