"""Several processes that train one run: who is who, what each reads, and that the run is that of one process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from reference.same_run import assert_equal, assert_same_run, lines
from torch import Tensor
from torch.utils.data import Dataset

from metacal import ranks
from metacal.cli import main
from metacal.data import Batches, Split, Transform
from metacal.data.stores import ArrayStore
from metacal.data.wrap import as_split
from metacal.errors import InputError
from metacal.launch import Place, _require_own_gpu, backend_of, place
from metacal.runs import checkpoint
from metacal.training.saved import predict_run

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[03-04,07],login1",
    "SLURM_JOB_ID": "1000017",
    "SLURM_STEP_ID": "2",
}


# -- who is who --------------------------------------------------------------------------------------------------------


def test_the_environment_says_which_rank_this_is():
    assert place({}) is None
    assert place(TORCHRUN) == Place(3, 8, 1)
    assert place(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None  # alone, by whatever it was started
    assert place(SRUN | TORCHRUN) == Place(3, 8, 1), "srun may start torchrun"
    assert place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None, "the script of sbatch is no task of a step"
    with pytest.raises(InputError, match="got RANK=8 and WORLD_SIZE=8"):
        place(TORCHRUN | {"RANK": "8"})
    with pytest.raises(InputError, match="MASTER_PORT"):
        place({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-04,07],login1", "gpu03"), ("node1,node2", "node1"), ("a-[1,3]-ib", "a-1-ib"), ("host", "host")],
)
def test_tasks_of_srun_meet_on_the_first_node(nodes, first):
    from metacal.launch import _of_slurm

    assert place(SRUN) == Place(5, 8, 1)
    variables = _of_slurm(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert variables["MASTER_ADDR"] == first
    assert variables["MASTER_PORT"] == "20019"


def test_ranks_that_cannot_be_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert backend_of("auto", "auto", 2) == "nccl" and backend_of("auto", "cpu", 2) == "gloo"
    assert backend_of("gloo", "cuda", 3) == "gloo", "ranks can share a GPU by gloo"
    with pytest.raises(InputError, match="nccl needs a GPU for each rank of a machine, got 3 ranks and 2 GPUs"):
        backend_of("auto", "cuda", 3)
    with pytest.raises(InputError, match="0 GPUs with device=cpu"):
        backend_of("nccl", "cpu", 2)
    with pytest.raises(InputError, match="takes the GPU of its number, got cuda:1"):
        backend_of("auto", "cuda:1", 2)
    with monkeypatch.context() as other:
        other.setattr(ranks, "gather_objects", lambda value: [("node1", "a"), ("node2", "a"), ("node1", "a")])
        with pytest.raises(InputError, match="ranks 0 and 2 have the same one on node1"):
            _require_own_gpu("node1", "a")
    assert main(["train", "launch.ranks=0"]) == 2
    assert "launch.ranks must be >= 1, got 0" in capsys.readouterr().err
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "-m", "seed=1,2"]) == 2
    assert "is for one process, and this is one of 8 ranks" in capsys.readouterr().err


# -- what each rank reads ----------------------------------------------------------------------------------------------


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    monkeypatch.setattr(ranks, "size", lambda: size)


class Noisy(Dataset):
    """Pairs whose inputs are drawn by a random transform, from all the generators that such transforms use."""

    targets = torch.arange(24) % 4

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([i, random.random(), np.random.rand(), torch.rand(())]), i % 4


def split_of(kind: str) -> Split:
    if kind == "transforms":
        return as_split(Noisy(), "train")
    x = torch.randint(0, 256, (24, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean = torch.full((3,), 0.4, dtype=torch.float64)
    store = x if kind == "memory" else ArrayStore(x.numpy())
    return Split("train", store, torch.arange(24) % 4, Transform(1 / 255, mean, mean / 2, crop_padding=2, flip=True))


@pytest.mark.parametrize("kind", ["memory", "stream", "transforms"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranks_batches_are_those_of_one_process(kind, size, monkeypatch):
    """In the order of ranks, bit for bit, and each sample on one of them; also of folds and of the last short batch."""
    visits = {0: torch.arange(0, 24, 2), 1: torch.arange(1, 24, 2)}
    split = split_of(kind)
    for options in ({"drop_last": False}, {"steps": 9}, {"visits": visits.__getitem__, "steps": 2}):
        batches = Batches(split, 5, seed=1, with_index=True, shared=True, **options)
        whole = [list(batches.epoch(epoch, 1)) for epoch in (0, 1)]
        least = batches.smallest_batch()
        of_ranks = []
        for rank in range(size):
            as_rank(monkeypatch, rank, size)
            assert batches.smallest_batch() == least
            of_ranks.append([list(batches.epoch(epoch, 1)) for epoch in (0, 1)])
        monkeypatch.undo()
        for epoch, expected in enumerate(whole):
            for i, batch in enumerate(expected):
                parts = [of_rank[epoch][i] for of_rank in of_ranks]
                assert max(len(y) for _, y, _ in parts) - min(len(y) for _, y, _ in parts) <= 1
                for t, pieces in zip(batch, zip(*parts)):
                    assert torch.equal(t, torch.cat(pieces))


def test_evaluation_batches_are_shared_as_wholes():
    batches = Batches(split_of("stream"), 5, shuffle=False, augment=False)
    whole = list(batches.epoch(0))
    assert len(whole) == 5
    for size in (2, 3, 7):
        for rank in range(size):
            taken = list(batches.epoch(0, rank, size))
            assert len(taken) == len(whole[rank::size])
            assert all(torch.equal(x, other) for (x, _), (other, _) in zip(taken, whole[rank::size]))


# -- whole runs --------------------------------------------------------------------------------------------------------

# Two evaluation batches, uneven training batches, an outer problem whose bank must be that of all samples.
WORDS = [
    "method=gamma_net",
    "meta.reference_points=bank",
    "meta.bank_batches=2",
    "meta.every=2",
    "model.hidden=[16]",
    "data.train_size=300",
    "data.test_size=1200",
    "data.val_size=200",
    "data.batch_size=33",
    "optimizer.lr=0.02",
    "epochs=6",
    "threads=1",
    "monitor.resamples=20",
    "monitor.figures_every=0",
    "monitor.every=9",
    "monitor.subset=40",
    "monitor.max_share=null",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", *WORDS, f"run_dir={folder}"]) == 0
    return folder


def assert_close_runs(a: Path, b: Path, tolerance: float = 1e-6) -> None:
    """Weights, gamma source, logged numbers, predictions and the summary; and the folders hold the same files."""
    left, right = (checkpoint.load(folder / "checkpoints/last.pt") for folder in (a, b))
    assert left["config"] == right["config"]
    assert_equal(left["rng"], right["rng"], "the random stream is that of one process")
    for part in ("backbone", "gamma"):
        for name, values in left[part].items():
            torch.testing.assert_close(values, right[part][name], rtol=tolerance, atol=tolerance)
    assert len(lines(a)) == len(lines(b))
    for line, other in zip(lines(a), lines(b)):
        assert line.pop("split") == other.pop("split")
        assert line == pytest.approx(other, rel=1e-4, abs=10 * tolerance)
    for split in ("val", "test"):
        with np.load(a / f"predictions/{split}.npz") as x, np.load(b / f"predictions/{split}.npz") as y:
            assert np.array_equal(x["labels"], y["labels"])
            np.testing.assert_allclose(x["logits"], y["logits"], rtol=0, atol=10 * tolerance)
    told, other = (json.loads((folder / "summary.json").read_text()) for folder in (a, b))
    measured = [name for name in told if name.startswith(("test/", "last/", "val/"))]
    assert {name: told[name] for name in measured} == pytest.approx(
        {name: other[name] for name in measured}, rel=1e-4, abs=1e-3
    )
    files = [{p.relative_to(folder) for p in folder.rglob("*") if "tfevents" not in p.name} for folder in (a, b)]
    assert files[0] == files[1]


def test_two_ranks_make_the_run_of_one_process(alone, tmp_path, capfd):
    assert main(["train", *WORDS, "launch.ranks=2", f"run_dir={tmp_path}"]) == 0
    out, err = capfd.readouterr()
    assert "device: cpu, 2 ranks" in out and out.count("epoch 6/6") == 1, "one of them tells"
    assert err == ""
    assert_close_runs(alone, tmp_path)
    assert len(list(tmp_path.glob("*tfevents*"))) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 2 and "launch.ranks=2" in summary["command"]
    for split, p in predict_run(tmp_path).items():  # one process, the same weights
        with np.load(tmp_path / f"predictions/{split}.npz") as shared:
            assert np.array_equal(shared["logits"], p.logits.numpy()), "to the last bit"


def children_of(pid: int) -> list[int]:
    """In the order of their start."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_saved(folder: Path, beyond: int, runs: Callable[[], bool]) -> bool:
    """Wait for a checkpoint after more than `beyond` steps; whether there was one while it `runs`."""
    end = time.monotonic() + 120
    while time.monotonic() < end and runs():
        with suppress(InputError):
            if checkpoint.load(folder / "checkpoints/last.pt", of_run=False)["progress"]["step"] > beyond:
                return True
        time.sleep(0.01)
    return False


class Started:
    """`metacal train WORDS` as a process, by whatever `command` starts it."""

    def __init__(
        self, words: list[str], folder: Path, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.folder = folder
        command = command or (sys.executable, "-m", "metacal")
        self.process = subprocess.Popen(
            [*command, "train", *words, f"run_dir={folder}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self) -> list[int]:
        return children_of(self.process.pid)

    def has_saved(self, beyond: int = 0) -> None:
        """Wait for a checkpoint after more than `beyond` steps."""
        if not has_saved(self.folder, beyond, lambda: self.process.poll() is None):
            raise AssertionError(f"saved nothing: {self.process.communicate(timeout=60)}")

    def ended(self, seconds: float = 120) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks through /proc")


@needs_proc
def test_a_killed_rank_ends_the_run_and_one_process_goes_on_with_it(alone, tmp_path, capfd):
    others, ended = children_of(os.getpid()), threading.Event()

    def kill_the_second() -> None:
        if has_saved(tmp_path, 0, lambda: not ended.is_set()):
            os.kill([child for child in children_of(os.getpid()) if child not in others][1], signal.SIGKILL)

    thread = threading.Thread(target=kill_the_second)
    thread.start()
    status = main(["train", *WORDS, "launch.ranks=2", f"run_dir={tmp_path}"])
    ended.set()
    thread.join()
    assert status == 1
    _, err = capfd.readouterr()
    assert err == "metacal: rank 1 of 2 was killed (SIGKILL); the same command goes on from the last checkpoint\n"
    assert not (tmp_path / "summary.json").exists()
    assert main(["train", *WORDS, f"run_dir={tmp_path}"]) == 0
    assert_close_runs(alone, tmp_path)


@pytest.mark.slow
@needs_proc
def test_ctrl_c_stops_all_ranks_at_one_step_and_they_go_on_bit_for_bit(tmp_path):
    dropout = ["model=cnn", "model.width=4", "model.dropout=0.2"]
    words = [word for word in WORDS if not word.startswith("model.")] + [*dropout, "launch.ranks=2"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert Started(words, whole).ended(300)[0] == 0
    for signalled in ("the command", "a rank"):
        started = Started(words, stopped)
        step = (
            0 if signalled == "the command" else int(checkpoint.load(stopped / "checkpoints/last.pt")["step"]["count"])
        )
        started.has_saved(step)
        os.kill(started.process.pid if signalled == "the command" else started.ranks()[1], signal.SIGINT)
        status, out, err = started.ended()
        assert status == 130 and err == "" and out.count("interrupted; what was saved goes on with") == 1
    assert Started(words, stopped).ended(300)[0] == 0
    assert_same_run(whole, stopped)


@pytest.mark.slow
@needs_proc
def test_torchrun_names_a_killed_rank_and_four_ranks_go_on(alone, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "-m", "metacal"]
    started = Started(WORDS, tmp_path, *command)
    started.has_saved()
    os.kill(started.ranks()[1], signal.SIGKILL)
    status, _, err = started.ended()
    cause = err.partition("Root Cause")[2]
    assert status == 1 and "rank      : 1" in cause and "exitcode  : -9" in cause
    assert "metacal:" not in err and "Traceback" not in err.partition("local_rank: 1")[0]
    assert main(["train", *WORDS, "launch.ranks=4", f"run_dir={tmp_path}"]) == 0
    assert_close_runs(alone, tmp_path, 1e-5)


def srun(*of_ranks: tuple[list[str], Path], folder: Path) -> list[tuple[int, str, str]]:
    """What the tasks of a step of SLURM end with, each with words and a working directory of its own."""
    env = SRUN | {"SLURM_STEP_NUM_TASKS": str(len(of_ranks)), "SLURM_STEP_NODELIST": "localhost"}
    env["SLURM_JOB_ID"] = str(random.SystemRandom().randrange(10**6))  # a port of its own
    tasks = [
        Started(words, folder, env=env | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}, cwd=cwd)
        for rank, (words, cwd) in enumerate(of_ranks)
    ]
    return [task.ended(120) for task in tasks]


@pytest.mark.slow
def test_ranks_that_differ_end_with_one_sentence(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shift = float(name == "b")
        x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32) + shift
        np.savez(tmp_path / name / "data.npz", x_train=x, y_train=np.arange(200) % 2)
    words = ["method=cross_entropy", "model.hidden=[4]", "data=npz", "data.path=data.npz", "epochs=1", "progress=false"]
    words += ["monitor.resamples=0", "monitor.figures_every=0"]
    a, b = tmp_path / "a", tmp_path / "b"
    for second, cwd, sentence in (
        ([*words, "optimizer.lr=0.2"], a, "all ranks must be started alike: optimizer.lr is 0."),
        (words, b, "the test split (its fingerprint) must be the same on all ranks"),
    ):
        ended = srun((words, a), (second, cwd), folder=tmp_path / "run")
        assert sorted(status for status, _, _ in ended) == [2, 3]
        told = "".join(err for _, _, err in ended)
        assert told.startswith(f"metacal: {sentence}") and told.count("\n") == 1, told
    assert not (tmp_path / "run").exists()
    ended = srun((words, a), (words, a), folder=tmp_path / "run")
    assert [status for status, _, _ in ended] == [0, 0]
    assert ended[0][1] and ended[1][1:] == ("", "") and (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.slow
def test_an_error_is_told_once(tmp_path, capfd):
    from PIL import Image

    for i in range(80):
        file = tmp_path / "images" / f"class{i % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    damaged = ["data=folder", f"data.path={tmp_path / 'images'}", "data.storage=stream", "data.normalize=none"]
    for case, words, sentence in (
        ("on all ranks", ["optimizer.lr=1e30", "schedule=constant"], "non-finite"),
        ("on one", [*damaged, "model=cnn", "model.width=2"], "cannot be decoded"),
        ("before training", ["data.batch_size=1"], "data.batch_size must give each of 2 ranks a sample"),
    ):
        if case == "on one":
            for file in (tmp_path / "images").rglob("*.png"):  # the header can be read, the pixels cannot
                file.write_bytes(file.read_bytes()[:60])
        common = ["method=cross_entropy", "data.batch_size=8", "progress=false", "launch.ranks=2", "epochs=2"]
        status = main(["train", *common, *words, f"run_dir={tmp_path / 'run'}"])
        _, err = capfd.readouterr()
        assert status in (1, 2), case
        assert sentence in err and err.startswith("metacal: ") and err.count("\n") == 1, f"{case}: {err}"
