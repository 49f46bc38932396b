"""Seconds of `metacal compare`, `compare --tensorboard`, `show` and `list` on a thousand run folders.

    python scripts/benchmarks/many_runs.py                  # 200 configurations of 5 seeds each
    python scripts/benchmarks/many_runs.py --runs 100 --profile compare

One run of digits is trained and copied: every five copies get a learning rate of their own, each a seed, and its
predictions other logits. Each command is a process of its own; its processor time is that of it and its children, and
that of `metacal list` is what a start of Python with metacal costs. `--profile NAME` prints where the time of one
command goes instead.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SEEDS = 5


def made(root: Path, count: int) -> Path:
    """The folder that holds the runs."""
    import numpy as np
    import yaml

    one = root / "one"
    words = ["method=cross_entropy", "epochs=2", "threads=1", "monitor.resamples=0", "baselines=[]", f"run_dir={one}"]
    subprocess.run([sys.executable, "-m", "metacal", "train", *words], check=True, stdout=subprocess.DEVNULL)
    config = yaml.safe_load((one / "config.yaml").read_text())
    summary = json.loads((one / "summary.json").read_text())
    runs = root / "runs"
    for i in range(count):
        folder = runs / f"lr{i // SEEDS}" / f"seed{i % SEEDS}"
        shutil.copytree(one, folder, ignore=shutil.ignore_patterns("checkpoints", "figures", "model*", "*.html"))
        config["optimizer"]["lr"], config["seed"] = round(0.001 * (1 + i // SEEDS), 6), i % SEEDS
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "summary.json").write_text(json.dumps(summary | {"seed": i % SEEDS}))
        for file in (folder / "predictions").glob("*.npz"):
            arrays = dict(np.load(file))
            np.savez(file, labels=arrays["labels"], logits=arrays["logits"] * np.float32(1 + 0.002 * i))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--profile", choices=("compare", "curves", "show"))
    parser.add_argument("--folder", type=Path, help="where the runs are, or are made; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = args.folder or Path(name)
        runs = root / "runs" if (root / "runs").is_dir() else made(root, args.runs)
        shutil.rmtree(root / "curves", ignore_errors=True)
        commands = {
            "list": ["list", "methods"],
            "show": ["show", str(runs / "lr0" / "seed0")],
            "compare": ["compare", str(runs)],
            "curves": ["compare", str(runs), "--tensorboard", str(root / "curves")],
        }
        if args.profile:
            from metacal.cli import main as metacal

            profile = cProfile.Profile()
            profile.runcall(metacal, commands[args.profile])
            pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
            return
        print(f"| command, {len(list(runs.glob('*/seed*')))} runs | s of the processor |\n|---|---|")
        for words in commands.values():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "metacal", *words], check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            shown = " ".join(word if not word.startswith(str(root)) else "…" for word in words)
            print(f"| `metacal {shown}` | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
