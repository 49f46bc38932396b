"""A learned scale of the logits in the place of γ: what it costs and gains beside a learned γ.

    python scripts/logit_scale.py cifar10.npz [--seed 0] [--only WORD]

With a scale s the loss is CE(s z, y)/s or CE(s z, y), or a focal loss in CE's place; the network still answers
softmax(z), which is s times flatter. Here s is what a source of gammas gives: a fixed number, or one that the outer
problem of method metacal learns, from 1 on. The two networks are those of `metacal study gamma` on CIFAR-10, its
variant cnn and its MLP. Printed: the test images at the last epoch. About ten minutes; --only takes some of the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from torch import Tensor

from metacal.cli import main as metacal
from metacal.losses import LOSSES, focal
from metacal.options import Option

COMMON = (
    "data=npz data.test_size=5000 data.crop_padding=0 data.flip=false optimizer.lr=0.05 epochs=30 select=nll_scaled "
    "monitor.figures_every=0 monitor.histograms=false monitor.resamples=0 progress=false"
)
NETS = {
    "cnn": "data.train_size=5000 data.val_size=1500 model=cnn model.width=16 model.pool=4 schedule=step",
    "mlp": "data.train_size=3000 data.val_size=1000 model=mlp",
}
FIXED = "method=focal loss.name=scaled gamma.value=2"
LEARNED = "method=metacal loss.name=scaled meta.lr=0.05"
ROWS = {
    "cnn, cross_entropy": "method=cross_entropy",
    "cnn, metacal": "method=metacal",
    "cnn, CE(2 z)/2": FIXED,
    "cnn, CE(2 z)": f"{FIXED} loss.power=0",
    "cnn, CE(s z), learned": f"{LEARNED} loss.power=0",
    "mlp, cross_entropy": "method=cross_entropy",
    "mlp, metacal": "method=metacal",
    "mlp, CE(s z)/s, learned": LEARNED,
    "mlp, focal 3 (s z)/s, learned": f"{LEARNED} loss.focus=3",
}


def scaled(
    logits: Tensor,
    labels: Tensor,
    gamma: Tensor | float = 1.0,
    power: Annotated[float, Option("k in ℓ(s z, y)/s^k")] = 1.0,
    focus: Annotated[float, Option("γ of the focal loss ℓ; 0 is cross-entropy", low=0)] = 0.0,
) -> Tensor:
    """ℓ(s z, y)/s^k, with the scale s for `gamma`."""
    column = gamma[:, None] if isinstance(gamma, Tensor) and gamma.ndim == 1 else gamma
    return focal(logits * column, labels, focus) / gamma**power


LOSSES["scaled"] = scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    args = parser.parse_args()
    print("| | Accuracy % | NLL | ECE % | NLL scaled |\n|---|---:|---:|---:|---:|")
    for name, words in ROWS.items():
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            run = Path(folder, "run")
            common = [f"data.path={args.data}", f"seed={args.seed}", f"run_dir={run}", *COMMON.split()]
            status = metacal(["train", *common, *NETS[name[:3]].split(), *words.split()])
            if status:
                raise SystemExit(status)
            summary = json.loads((run / "summary.json").read_text())
        last = {key: summary[f"last/{key}"] for key in ("accuracy", "nll", "ece", "nll_scaled")}
        shares = (f"{100 * last['accuracy']:.2f}", f"{last['nll']:.3f}", f"{100 * last['ece']:.2f}")
        print(f"| {name} | {' | '.join(shares)} | {last['nll_scaled']:.3f} |", flush=True)


if __name__ == "__main__":
    main()
