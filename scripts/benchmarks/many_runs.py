"""Seconds of `metacal compare`, `compare --tensorboard`, `show` and `list` on a thousand run folders.

    python scripts/benchmarks/many_runs.py                  # 200 configurations of 5 seeds each
    python scripts/benchmarks/many_runs.py --runs 100 --profile compare

One run of digits is trained and copied: every five copies get a learning rate of their own, each a seed, and its
predictions other logits; its log goes on for `--lines` lines. Each command is a process of its own; its processor time
is that of it and its children, and that of `metacal list` is what a start of Python with metacal costs. A run that a
command leaves out ends it: the time would be that of fewer runs. `--profile NAME` prints where the time of one command
goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SEEDS = 5


def made(root: Path, count: int, lines: int) -> Path:
    """The folder that holds the runs."""
    import numpy as np
    import yaml

    from metacal.runs.folder import RunFolder

    one = RunFolder(root / "one")
    words = ["method=cross_entropy", "epochs=2", "threads=1", "monitor.resamples=0", "baselines=[]"]
    subprocess.run(
        [sys.executable, "-m", "metacal", "train", *words, f"run_dir={one.path}"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    _lengthen(one.metrics, lines)
    config, summary = yaml.safe_load(one.config.read_text()), one.read_summary()
    predictions = {file.name: dict(np.load(file)) for file in (one.path / "predictions").glob("*.npz")}
    left = shutil.ignore_patterns("checkpoints", "figures", "model*", "*.html", "predictions", "events*")
    for i in range(count):
        folder = RunFolder(root / "runs" / f"lr{i // SEEDS}" / f"seed{i % SEEDS}")
        shutil.copytree(one.path, folder.path, ignore=left)
        config["optimizer"]["lr"], config["seed"] = round(0.001 * (1 + i // SEEDS), 6), i % SEEDS
        folder.write_config(yaml.safe_dump(config))
        folder.write_summary(summary | {"seed": i % SEEDS})
        (folder.path / "predictions").mkdir()
        for name, arrays in predictions.items():
            logits = arrays["logits"] * np.float32(1 + 0.002 * i)
            np.savez(folder.path / "predictions" / name, labels=arrays["labels"], logits=logits)
    return root / "runs"


def _lengthen(log: Path, count: int) -> None:
    """Let a log go on with its lines at later steps."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    last = max(line["step"] for line in lines)
    longer = [
        lines[i % len(lines)] | {"step": lines[i % len(lines)]["step"] + last * (i // len(lines))} for i in range(count)
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in longer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=400, help="of each run's log")
    parser.add_argument("--profile", choices=("compare", "curves", "show"))
    parser.add_argument("--folder", type=Path, help="where the runs are, or are made; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = args.folder or Path(name)
        runs = root / "runs" if (root / "runs").is_dir() else made(root, args.runs, args.lines)
        shutil.rmtree(root / "curves", ignore_errors=True)
        commands = {
            "list": ["list", "methods"],
            "show": ["show", str(runs / "lr0" / "seed0")],
            "compare": ["compare", str(runs)],
            "curves": ["compare", str(runs), "--tensorboard", str(root / "curves")],
        }
        if args.profile:
            from metacal.cli import main as metacal

            profile = cProfile.Profile(time.process_time)  # not what other processes take
            profile.runcall(metacal, commands[args.profile])
            pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
            return
        print(f"| command, {len(list(runs.glob('*/seed*')))} runs | s of the processor |\n|---|---|")
        for words in commands.values():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            said = subprocess.run(
                [sys.executable, "-m", "metacal", *words], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if "Left out" in said:
                raise SystemExit(said[said.index("Left out") :].splitlines()[0])
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            shown = " ".join(word if not word.startswith(str(root)) else "…" for word in words)
            print(f"| `metacal {shown}` | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
