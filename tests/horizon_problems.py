"""Problems two steps into their training, and the hypergradient through several steps of them, in float64."""

from __future__ import annotations

from typing import Any

import torch
from bilevel_problems import Problem, make_problem
from reference.hyper import central_differences, outer_value
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from metacal.bilevel import MetaStep
from metacal.calibration.surrogates import nll
from metacal.optim import SAM, Muon, muon_groups


class ByLabel(nn.Module):
    """A gamma for each class: several parameters, and nothing that depends on θ."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]).double())

    def forward(self, features: Tensor | None = None, *, labels: Tensor, **_: object) -> Tensor:
        return nn.functional.softplus(self.score)[labels]


OPTIMIZERS = ("sgd", "momentum", "nesterov", "maximize", "adam", "amsgrad", "adamw", "muon")


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    made: dict[str, Any] = {
        "sgd": lambda: SGD(params, lr=0.3),
        "momentum": lambda: SGD(params, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.05),
        "nesterov": lambda: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
        "maximize": lambda: SGD(params, lr=0.1, momentum=0.5, weight_decay=0.1, maximize=True),
        "adam": lambda: Adam(params, lr=0.02, weight_decay=0.1, eps=1e-3),
        "amsgrad": lambda: Adam(params, lr=0.02, amsgrad=True, betas=(0.5, 0.6), eps=1e-3),
        "adamw": lambda: AdamW(params, lr=0.02, weight_decay=0.2, eps=1e-3),
        "muon": lambda: Muon(muon_groups(model, lr=0.02)),
        "sam": lambda: SAM(SGD(params, lr=0.1, momentum=0.9), rho=0.0),
    }
    return made[name]()


def batches_of(problem: Problem, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(count)
    pick = [torch.randperm(len(problem.x), generator=generator)[:7] for _ in range(count)]
    return [(problem.x[i], problem.y[i]) for i in pick]


def settled(net: str, name: str) -> tuple[Problem, Optimizer]:
    """A problem two steps into its training, so that the optimizer has a state."""
    problem = make_problem(net)
    problem.gamma_net = ByLabel()
    optimizer = optimizer_of(name, problem.backbone)
    torch.manual_seed(5)
    meta = MetaStep(problem.backbone, optimizer, problem.gamma_net, None, outer="nll")
    for _ in range(2):
        meta.step(problem.x, problem.y)
    return problem, optimizer


def by_sweep(problem: Problem, optimizer: Optimizer, batches: list[tuple[Tensor, Tensor]], **keys: Any) -> Tensor:
    k = len(batches)
    meta = MetaStep(
        problem.backbone, optimizer, problem.gamma_net, None, outer="nll", every=k, **({"horizon": k} | keys)
    )
    torch.manual_seed(11)
    slopes = meta.hypergradient([x for x, _ in batches], [y for _, y in batches], problem.x_meta, problem.y_meta)
    return torch.cat([h.flatten() for h in slopes])


def by_differences(problem: Problem, optimizer: Optimizer, batches: list[Any], **keys: Any) -> Tensor:
    def value() -> float:
        torch.manual_seed(11)
        source = problem.gamma_net
        return outer_value(problem.backbone, optimizer, source, batches, problem.x_meta, problem.y_meta, nll, **keys)

    return central_differences(value, list(problem.gamma_net.parameters()))


def error(slopes: Tensor, truth: Tensor) -> float:
    assert truth.norm() > 1e-9
    return float((slopes - truth).norm() / truth.norm())
