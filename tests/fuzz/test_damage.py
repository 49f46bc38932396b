"""Damaged checkpoints and run folders: what is whole gives the right numbers, what is not is refused in a line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from fuzz.attack import attack
from reference.same_run import assert_equal

from metacal.cli import main
from metacal.errors import InputError
from metacal.runs import checkpoint

pytestmark = pytest.mark.slow

WORDS = ["method=gamma_net", "model.hidden=[6]", "data.train_size=150", "epochs=2", "monitor.resamples=0", "threads=1"]
WORDS += ["progress=false", "optimizer.lr=0.05", "keep_every=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs, of seeds 0 and 1."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        assert main(["train", *WORDS, f"seed={seed}", f"run_dir={root / f'seed{seed}'}"]) == 0
    return root


def damage(file: Path, rng: random.Random) -> str:
    """Damage `file` in one of the ways in which disks, copies and editors do; tells how."""
    content = bytearray(file.read_bytes())
    size = len(content)
    how = rng.choice(["bit", "bit", "bit", "cut", "empty", "zeros", "garbage", "longer", "lost", "swapped", "folder"])
    at = rng.randrange(size) if size else 0
    if how == "bit" and size:
        content[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "empty":
        content.clear()
    elif how == "zeros":
        content[at : at + 512] = bytes(min(512, size - at))
    elif how == "garbage":
        content[at : at + 64] = rng.randbytes(64)
    elif how == "longer":
        content += rng.randbytes(rng.randrange(1, 100))
    elif how == "swapped":
        other = rng.choice([f for f in file.parent.iterdir() if f.is_file()])
        content = bytearray(other.read_bytes())
    file.write_bytes(content)
    if how in ("lost", "folder"):
        file.unlink()
    if how == "folder":
        file.mkdir()
    return f"{file.name}: {how} at {at} of {size}"


def told(*argv: str) -> tuple[int, str, str]:
    """Status, output and complaints of a command, which must not raise."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(argv))
    return status, out.getvalue(), err.getvalue()


def test_flipped_bits_in_checkpoints(runs, tmp_path):
    source = runs / "seed0" / "checkpoints"
    states = {name: checkpoint.load(source / name) for name in ("last.pt", "best.pt")}

    def check(seed: int) -> str:
        rng = random.Random(seed)
        name = rng.choice(list(states))
        path = tmp_path / name
        shutil.copyfile(source / name, path)
        how = damage(path, rng)
        if not path.is_file():
            path.rmdir() if path.is_dir() else None
            return "lost"
        try:
            state = checkpoint.load(path)
        except InputError as error:
            assert "\n" not in str(error), error
            return "refused"
        same = path.read_bytes() in [(source / other).read_bytes() for other in os.listdir(source)]
        assert same, f"{how}: loaded"
        if path.read_bytes() == (source / name).read_bytes():
            assert_equal(state, states[name], how)
        return "not damaged"

    attack("test_damage", check, 600)


def test_damaged_run_folders(runs, tmp_path):
    torch.set_num_threads(1)
    expected = json.loads(told("evaluate", str(runs / "seed0"), "--json", "--resamples", "0")[1])

    def check(seed: int) -> str:
        rng = random.Random(seed)
        root = tmp_path / str(seed)
        shutil.copytree(runs, root)
        run = root / "seed0"
        files = [f for f in sorted(run.rglob("*")) if f.is_file() and f.name != ".lock"]
        named = [f for f in files if f.parent == run and not f.name.startswith("events")]  # the more often
        done = [
            damage(file, rng) for file in {rng.choice(rng.choice([files, named])) for _ in range(rng.choice([1, 1, 2]))}
        ]
        kinds = {
            "evaluate": ["evaluate", str(run), "--json", "--resamples", "0"],
            "evaluate last": ["evaluate", str(run), "--json", "--resamples", "0", "--checkpoint", "last"],
            "ensemble": ["evaluate", *map(str, (run, root / "seed1")), "--ensemble", "--json", "--resamples", "0"],
            "resume": ["train", f"resume={run}"],
            "again": ["train", *WORDS, "seed=0", f"run_dir={run}"],
            "over": ["train", *WORDS, "seed=0", f"run_dir={run}", "overwrite=true"],
            "config": ["train", str(run / "config.yaml"), "--cfg", "job"],
            "compare": ["compare", str(root), "--json"],
            "curvature": ["curvature", str(run), "--subset", "10"],
        }
        kind = rng.choice(list(kinds))
        where = f"{kind} after {'; '.join(done)}"
        before = {f.name for f in run.rglob("*")}
        try:
            status, out, err = told(*kinds[kind])
            assert status in (0, 1, 2), f"status {status}"
            assert status == 0 or err.strip().count("\n") <= 3, f"no line but {err[-500:]}"
            if status == 0 and kind == "evaluate":
                assert json.loads(out) == expected, "other numbers"
            if status == 0 and kind in ("again", "resume", "over"):
                assert json.loads(told(*kinds["evaluate"])[1]) == expected, "other numbers after training"
            gone = {name for name in before if not name.startswith((".lock", "events."))} - {
                f.name for f in run.rglob("*")
            }
            assert status == 0 or kind == "over" or not gone, f"{gone} have gone"
        except Exception as error:
            error.args = (f"{where}: {error}",)
            raise
        shutil.rmtree(root)
        return f"{kind} {'done' if status == 0 else 'refused'}"

    attack("test_damage", check, 60)
