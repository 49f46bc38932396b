"""Whether two run folders hold the same run, to the last bit of whatever is no time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from metacal.runs import checkpoint


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl without the times, which differ from run to run."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["split"] != "time"]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: weights, gamma source, optimizers, generators, predictions and logged numbers."""
    for name in ("last.pt", "best.pt"):
        left, right = checkpoint.load(a / "checkpoints" / name), checkpoint.load(b / "checkpoints" / name)
        left.pop("log", None), right.pop("log", None)  # sizes of files and times
        for state in (left, right):
            if "progress" in state:
                state["progress"].pop("seconds")
                sums = state["progress"]["sums"]
                state["progress"]["sums"] = {name: sum for name, sum in sums.items() if not name.endswith("ms")}
                state.pop("watch")  # its account of times; its monitors' states have a test of their own
        assert_equal(left, right, name)
    for split in ("val", "test"):
        with np.load(a / "predictions" / f"{split}.npz") as x, np.load(b / "predictions" / f"{split}.npz") as y:
            assert np.array_equal(x["logits"], y["logits"]) and np.array_equal(x["labels"], y["labels"])
    assert lines(a) == lines(b)


def assert_equal(a, b, where):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_equal(x, y, f"{where}/{i}")
    else:
        assert a == b, where


def logged_events(run: Path) -> dict[str, list[tuple]]:
    """TensorBoard's event files as they lie on the disk: tag -> (step, value) of all events in order.

    Times differ from run to run, and so do the HParams tab's start and end, and the folder in the texts: of these only
    the tags are given.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple]] = {}
    for file in sorted(run.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag.startswith("time/"):
                    continue
                varies = value.tag.startswith("_hparams_") or value.tag.endswith("/text_summary")
                content = value.tag if varies else value.SerializeToString()
                found.setdefault(value.tag, []).append((event.step, content))
    return found
