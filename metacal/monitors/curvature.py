"""Curvature along a run: sharpness, traces, and where they stand against the edge of stability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from metacal.curvature import (
    batch_sharpness,
    gn_norm_certificate,
    gn_sharpness,
    gn_trace,
    hessian_sharpness,
    hessian_trace,
    preconditioned_sharpness,
)
from metacal.curvature.loss import LOSSES, Focal, LabelSmoothing, LogitLoss, loss_of_rows
from metacal.errors import require
from metacal.models.backbone import Backbone
from metacal.modes import evaluation_mode
from metacal.monitors.watch import Charts, Monitor, MonitorOptions, State, Watched, WatchedLoss
from metacal.options import option

__all__ = ["CurvatureMonitor", "CurvatureOptions", "curvature_values", "measurable"]


def measurable(name: str, value: float | Tensor | None = None) -> LogitLoss:
    """The loss of `metacal.losses` by this name as one whose curvature can be measured.

    value: its gamma or smoothing, a number or one for each example. Raises `InputError` for other losses.
    """
    with_value: dict[str, Callable[[float | Tensor], LogitLoss]] = {"focal": Focal, "label_smoothing": LabelSmoothing}
    require(
        name in (*LOSSES, *with_value),
        f"the curvature of the trained loss is known for {', '.join((*LOSSES, *with_value))}, got {name}: measure that "
        "of cross_entropy",
    )
    if name in LOSSES:
        return name
    return with_value[name](0.0 if value is None else value)


@dataclass
class CurvatureOptions(MonitorOptions):
    """`CurvatureMonitor`."""

    curvature: bool = option(False, "sharpness and traces on the train subset, every `monitor.every` steps")
    tolerance: float = option(0.01, "of the eigenvalues, relative", above=0, below=1)
    curvature_loss: str = option(
        "cross_entropy",
        "whose: cross_entropy (mse where it is trained), or trained, the per-sample loss, without class weights",
        choices=("cross_entropy", "trained"),
    )
    certificate: int = option(0, "samples for the margin bound on the Gauss-Newton sharpness; 0: none", low=0)

    charts: ClassVar[Charts] = {
        "curvature beside ECE": {
            "ECE": ["(train_subset|val_subset)/ece$"],
            "Gauss-Newton sharpness, train and held out": ["curvature/(gn_sharpness|held_out_gn_sharpness)$"],
            "sharpness over the edge of stability": ["curvature/edge_ratio$"],  # the edge itself would set the scale
            "Hessian and mini-batch sharpness": ["curvature/(hessian|batch|preconditioned)_sharpness$"],
            "traces": ["curvature/(gn_trace|hessian_trace)$"],
        },
        "margins": {"certificate ratios": ["curvature/certificate_ratio$"]},
    }
    needs: ClassVar[Mapping[str, str]] = {"curvature beside ECE": "curvature/"}

    def build(self, watched: Watched) -> Sequence[Monitor]:
        if not self.curvature or not watched.keys.every:
            return []
        loss: WatchedLoss = watched.loss
        if self.curvature_loss == "trained":
            assert watched.trained is not None
            loss = watched.trained
        return [
            CurvatureMonitor(
                *watched.subset("train"),
                watched.keys.every,
                tol=self.tolerance,
                batch_size=watched.batch_size,
                certificate=self.certificate,
                seed=watched.seed,
                held_out=watched.subset("val"),
                loss=loss,
            )
        ]


class CurvatureMonitor:
    """Curvature of the mean `loss` on a fixed training subset, in evaluation mode, every `every` steps.

    The loss is cross-entropy, whatever trains the model, so that methods compare; "mse" is for models trained on it,
    whose logits are no log-probabilities. A function of examples and epoch gives another one: that which is trained,
    with the present gammas or smoothing, whose edge of stability is the one that training meets. Searches start from
    the last measurement's vector. Logged under ``curvature/``:

    - gn_sharpness, hessian_sharpness: λ_max(G), λ_max(H), each with `_bound`, the relative error bound reached
    - gn_trace, hessian_trace, batch_sharpness, each with `_stderr`
    - edge: the sharpness at which the step on a quadratic diverges, 2 (1 + β)/η for SGD with momentum β
      (2 (1 + β)/((1 + 2β) η) with Nesterov's), and edge_ratio, hessian_sharpness over it; for Adam and AdamW the edge
      2 (1 + β₁)/((1 − β₁) η) of the preconditioned_sharpness (Cohen et al. 2022); for one η alone
    - held_out_gn_sharpness: λ_max(G) on the validation subset, where one is given
    - certificate_ratio: λ_max(G) over its margin bound, at most 1, on the first `certificate` samples; for
      cross-entropy alone

    The constructor takes all that `curvature_values` does, and its cadence.
    """

    name, budgeted = "curvature", True

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        every: int,
        tol: float = CurvatureOptions.tolerance,
        batch_size: int = 128,
        certificate: int = CurvatureOptions.certificate,
        seed: int = 0,
        held_out: tuple[Tensor, Tensor] | None = None,
        loss: WatchedLoss = "cross_entropy",
    ) -> None:
        self.held_out, self.loss = held_out, loss
        self.x, self.y, self.every, self.tol = x, y, every, tol
        self.batch_size, self.certificate, self.seed = batch_size, certificate, seed
        self._starts: dict[str, Sequence[Tensor]] = {}

    def measure(self, state: State) -> dict[str, float]:
        loss = self._loss_on(self.x, self.y, state)
        values = curvature_values(
            state.backbone,
            self.x,
            self.y,
            tol=self.tol,
            batch_size=self.batch_size,
            certificate=self.certificate,
            seed=self.seed + state.step,
            starts=self._starts,
            loss=loss,
        )
        if self.held_out is not None:
            with evaluation_mode(state.backbone):
                found = gn_sharpness(
                    state.backbone,
                    *self.held_out,
                    self.tol,
                    self._starts.get("held_out"),
                    loss=self._loss_on(*self.held_out, state),
                )
            self._starts["held_out"] = found.vector
            values["curvature/held_out_gn_sharpness"] = found.value
        if state.optimizer is not None:
            values |= self._edge(state, values["curvature/hessian_sharpness"], loss)
        return values

    def state_dict(self) -> dict[str, Any]:
        return {name: list(vector) for name, vector in self._starts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._starts = dict(state)

    def _loss_on(self, x: Tensor, y: Tensor, state: State) -> LogitLoss:
        return self.loss(x, y, state.epoch) if callable(self.loss) else self.loss

    def _edge(self, state: State, sharpness: float, loss: LogitLoss) -> dict[str, float]:
        assert state.optimizer is not None
        group = state.optimizer.param_groups[0]
        lr = group["lr"]
        if lr == 0:
            return {}
        one_rate = all(other["lr"] == lr for other in state.optimizer.param_groups)  # the edge is of one
        if isinstance(state.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            beta = group["betas"][0]
            with evaluation_mode(state.backbone):
                found = preconditioned_sharpness(
                    state.backbone,
                    self.x,
                    self.y,
                    state.optimizer,
                    self.tol,
                    self._starts.get("preconditioned"),
                    loss=loss,
                )
            self._starts["preconditioned"] = found.vector
            edge = 2 * (1 + beta) / ((1 - beta) * lr)
            at_edge = {"curvature/edge": edge, "curvature/edge_ratio": found.value / edge} if one_rate else {}
            return {"curvature/preconditioned_sharpness": found.value, **at_edge}
        if type(state.optimizer) is not torch.optim.SGD or not one_rate:  # where others diverge has no closed form
            return {}
        beta, dampening = group.get("momentum", 0.0), group.get("dampening", 0.0)
        edge = 2 * (1 + beta) / ((1 - dampening) * lr)
        if group.get("nesterov"):
            edge /= 1 + 2 * beta
        return {"curvature/edge": edge, "curvature/edge_ratio": sharpness / edge}


def curvature_values(
    backbone: Backbone,
    x: Tensor,
    y: Tensor,
    *,
    tol: float = CurvatureOptions.tolerance,
    batch_size: int = 128,
    certificate: int = CurvatureOptions.certificate,
    seed: int = 0,
    starts: dict[str, Sequence[Tensor]] | None = None,
    loss: LogitLoss = "cross_entropy",
) -> dict[str, float]:
    """One measurement of all that `CurvatureMonitor` describes; `starts` keeps eigenvectors from one to the next."""
    starts = {} if starts is None else starts
    values: dict[str, float] = {}
    with evaluation_mode(backbone):
        for name, search in (("gn_sharpness", gn_sharpness), ("hessian_sharpness", hessian_sharpness)):
            found = search(backbone, x, y, tol, starts.get(name), loss=loss)
            starts[name] = found.vector
            values[name] = found.value
            values[f"{name}_bound"] = found.bound / abs(found.value) if found.value else 0.0
        for name, trace in (("gn_trace", gn_trace), ("hessian_trace", hessian_trace)):
            estimate = trace(backbone, x, y, seed=seed, loss=loss)
            values[name], values[f"{name}_stderr"] = estimate.value, estimate.stderr
        rows = [slice(i, i + batch_size) for i in range(0, len(x), batch_size)]
        estimate = batch_sharpness(backbone, [(x[part], y[part], loss_of_rows(loss, part)) for part in rows])
        values["batch_sharpness"], values["batch_sharpness_stderr"] = estimate.value, estimate.stderr
        if certificate and loss == "cross_entropy":  # of which it is a bound
            c = gn_norm_certificate(backbone, x[:certificate], y[:certificate])
            values |= {"certificate_bound": c.bound, "certificate_ratio": c.ratio}
    return {f"curvature/{k}": float(v) for k, v in values.items()}
