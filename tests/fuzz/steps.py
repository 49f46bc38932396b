"""Random bilevel steps: a network, an optimizer, a source of gamma, an outer objective, a penalty, clipping."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fuzz.nets import INPUTS, N_META, PLAIN, D, K, N, build, draw
from reference.whole_step import Setting, focal, smoothing
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from metacal import losses
from metacal.bilevel import MetaStep
from metacal.calibration import surrogates
from metacal.gamma import GammaNet, LearnedSmoothing, ScalarGamma
from metacal.models.backbone import Backbone
from metacal.optim import SAM, BulkSGD, Muon, muon_groups

__all__ = ["Step"]

TAME = [
    name
    for name in PLAIN
    if not any(word in name for word in ("random", "drop", "noise", "attention", "hooks", "depends_on_data"))
]
"""Blocks that draw nothing, and batch normalisation apart couple no samples."""


def _sgd(rng: random.Random) -> dict[str, Any]:
    keys: dict[str, Any] = {"lr": rng.choice([0.05, 0.3]), "weight_decay": rng.choice([0.0, 0.05])}
    if rng.random() < 0.7:
        keys |= {"momentum": rng.choice([0.5, 0.9]), "nesterov": rng.random() < 0.4}
        if not keys["nesterov"]:
            keys["dampening"] = rng.choice([0.0, 0.3])
    return keys | {"maximize": rng.random() < 0.2, "foreach": rng.choice([None, True, False])}


def _adam(rng: random.Random) -> dict[str, Any]:
    return {
        "lr": rng.choice([0.005, 0.02]),
        "betas": rng.choice([(0.9, 0.999), (0.8, 0.9)]),
        "eps": rng.choice([1e-3, 1e-5]),
        "weight_decay": rng.choice([0.0, 0.1]),
        "amsgrad": rng.random() < 0.3,
        "maximize": rng.random() < 0.2,
        "foreach": rng.choice([None, True, False]),
    }


def _optimizer(rng: random.Random) -> tuple[str, Callable[[nn.Module], Optimizer]]:
    """A name with its settings, and what makes it."""
    name = rng.choice(["sgd", "sgd", "groups", "adam", "adamw", "muon", "sam", "bulk"])
    if name == "sgd":
        keys = _sgd(rng)
        return f"SGD({keys})", lambda net: SGD(net.parameters(), **keys)
    if name == "groups":
        keys, rates = _sgd(rng), (0.3, 0.01)

        def grouped(net: nn.Module) -> Optimizer:
            params = list(net.parameters())
            return SGD([{"params": params[::2], "lr": rates[0]}, {"params": params[1::2], "lr": rates[1]}], **keys)

        return f"SGD({keys}, groups of lr {rates})", grouped
    if name in ("adam", "adamw"):
        cls, keys = (Adam, _adam(rng)) if name == "adam" else (AdamW, _adam(rng))
        return f"{cls.__name__}({keys})", lambda net: cls(net.parameters(), **keys)
    if name == "muon":
        keys = {"lr": 0.05, "weight_decay": rng.choice([0.0, 0.1]), "rest": rng.choice(["adamw", "sgd"])}
        keys["rest_options"] = {"eps": 1e-3} if keys["rest"] == "adamw" else {"momentum": 0.9}
        nesterov = rng.random() < 0.5
        return f"Muon({keys}, nesterov={nesterov})", lambda net: Muon(muon_groups(net, **keys), nesterov=nesterov)
    if name == "sam":
        keys = {"rho": rng.choice([0.01, 0.1, 0.5]), "adaptive": rng.random() < 0.4}
        base, make = _optimizer(rng)
        while base.startswith(("SAM", "BulkSGD")):
            base, make = _optimizer(rng)
        return f"SAM({base}, {keys})", lambda net: SAM(make(net), **keys)
    keys = _sgd(rng) | {"k": rng.choice([1, 2]), "matrix": rng.choice(["hessian", "gauss_newton"])}
    return f"BulkSGD({keys})", lambda net: BulkSGD(net.parameters(), model=net, **keys)


SOURCES: dict[str, Callable[[], nn.Module]] = {
    "scalar": lambda: ScalarGamma(2.0),
    "gamma_net": lambda: GammaNet(D, hidden=2, gamma_init=2.0),
    "label_aware": lambda: GammaNet(D, hidden=2, gamma_init=1.0, num_classes=K, tau=2.0),
    "noise": lambda: GammaNet(4, hidden=2, gamma_init=2.0, input="noise"),
    "random": lambda: GammaNet(4, hidden=2, gamma_init=2.0, input="random"),
    "layer": lambda: GammaNet(D, hidden=2, gamma_init=3.0, input="layer", layer="net.1"),
    "smoothing": lambda: LearnedSmoothing(init=0.2),
    "class_smoothing": lambda: LearnedSmoothing(per_class=True, n_classes=K, init=0.2),
}

OUTERS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    # what MetaStep is given, and the same as a function
    "nll": ("nll", F.cross_entropy),
    "brier": ("brier", lambda z, y: (z.softmax(1) - F.one_hot(y, K)).square().sum(1).mean()),
    "sum": ({"nll": 0.5, "soft_ece": 2.0}, lambda z, y: 0.5 * F.cross_entropy(z, y) + 2 * surrogates.soft_ece(z, y)),
    "sece": (lambda z, y: surrogates.sece(z, y, bandwidth=0.1, self_term=False),) * 2,
    "mmce": ("mmce", surrogates.mmce),
    "skce": ("skce", surrogates.skce),
    "callable": (lambda z, y: z.square().mean() - z[torch.arange(len(y)), y].mean(),) * 2,
}

PENALTIES: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "weights": lambda net, x, y, z, h: torch.stack([p.square().sum() for p in net.parameters()]).sum(),
    "logits": lambda net, x, y, z, h: z.square().sum(1).mean(),
    "features": lambda net, x, y, z, h: h.square().mean(),
    "tail": lambda net, x, y, z, h: torch.exp(-z[torch.arange(len(y)), y]).mean(),
}


@dataclass
class Step:
    """Everything of one random step; the seed says it all."""

    seed: int
    tame: bool = False

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.optimizer, self.make_optimizer = _optimizer(rng)
        tame = self.tame or "BulkSGD" in self.optimizer
        self.names = draw(rng, TAME if tame else PLAIN if rng.random() < 0.3 else None)
        self.writes_input = not tame and rng.random() < 0.04
        self.parallel = not tame and rng.random() < 0.04
        self.evaluation = rng.random() < 0.15
        self.source = rng.choice(sorted(SOURCES))
        if self.parallel and self.source == "layer":
            self.source = "gamma_net"
        self.outer = rng.choice(sorted(OUTERS))
        self.penalty = rng.choice(["none", "none", "none", *sorted(PENALTIES)])
        self.penalty_weight = 0.05
        self.clip_norm = rng.choice([None, None, 0.05, 0.5, 100.0])
        # torch's own optimizers refuse sparse gradients with most settings
        self.settle = 0 if "sparse_embedding" in self.names else rng.choice([0, 1, 3])

    @property
    def steep(self) -> bool:
        """Whether θ' is nearly a step function of g, as at Adam's first step: no place for differences."""
        return "'eps': 1e-05" in self.optimizer and self.settle == 0

    def __str__(self) -> str:
        kind = " parallel" * self.parallel + " writes_input" * self.writes_input + " eval" * self.evaluation
        return (
            f"[{' '.join(self.names)}]{kind}, {self.optimizer}, source {self.source}, outer {self.outer}, "
            f"penalty {self.penalty}, clip {self.clip_norm}, {self.settle} steps before"
        )

    def build(self) -> Setting:
        """A new network and all that belongs to it, after some plain steps; the random streams where they are then."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        net = Backbone(build(self.names, self.writes_input, self.parallel)).train(not self.evaluation)
        for frozen in [m for name, m in net.named_modules() if isinstance(m, (nn.BatchNorm1d, nn.Dropout))]:
            if "frozen" in " ".join(self.names) and self.seed % 2:
                frozen.eval()
        source = SOURCES[self.source]().double()
        if isinstance(source, GammaNet):
            nn.init.normal_(source.last.weight)
        x, x_meta = torch.randn(N, INPUTS).double(), torch.randn(N_META, INPUTS).double()
        y, y_meta = torch.randint(K, (N,)), torch.randint(K, (N_META,))
        if self.source == "random":
            source(None, inputs=x)  # it draws its projection at its first input
        optimizer = self.make_optimizer(net)
        for _ in range(self.settle):
            optimizer.zero_grad()
            F.cross_entropy(net(x.clone())[0], y).backward()
            if isinstance(optimizer, BulkSGD):
                optimizer.prepare(x, y)
            optimizer.step()
        optimizer.zero_grad()
        penalty = PENALTIES[self.penalty]
        weighted = None if penalty is None else lambda *args: self.penalty_weight * penalty(*args)
        loss = smoothing if "smoothing" in self.source else focal
        return Setting(
            net, optimizer, source, x, y, x_meta, y_meta, OUTERS[self.outer][1], loss, self.clip_norm, weighted
        )

    def metastep(self, setting: Setting, engine: str, **keys: Any) -> MetaStep:
        penalty = PENALTIES[self.penalty]
        return MetaStep(
            setting.net,
            setting.optimizer,
            setting.source,
            SGD(setting.source.parameters(), lr=1.0),
            outer=OUTERS[self.outer][0],
            engine=engine,
            loss=losses.label_smoothing if "smoothing" in self.source else "focal",
            penalties=None if penalty is None else {"p": (penalty, self.penalty_weight)},
            clip_norm=self.clip_norm,
            engine_options={"relative": 1e-6} if engine == "difference" else {},
            **keys,
        )
