"""Estimates of Tr G and Tr H with their graphs in θ, to be penalised: exact where a form of `traces` is, else sampled.

A chain of layers has a closed form, a network of covered layers its norms layer by layer; any other gives vᵀG v or
vᵀH v with signs v, and the exact trace over the last layer's own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from metacal.curvature.chain import Chain, Head, chain_from, ends_in_linear, head_from
from metacal.curvature.forms import closed_form, head_trace, quadratic_by_reverse, quadratic_by_tape
from metacal.curvature.layers import Captured, capture, column_norms, examples_depend
from metacal.curvature.loss import logit_gradient
from metacal.curvature.problem import OtherWay, Problem
from metacal.curvature.sampling import Probe
from metacal.curvature.structure import curved_activations
from metacal.errors import require

__all__ = ["Looked", "penalty_trace"]


@dataclass
class Looked:
    """What was found out about a network, once for all steps on a GPU, which is waited for: on the CPU in each step.

    rows: the modules whose input has a row an example, where the norms layer by layer give the trace; else None.
    """

    done: bool = False
    rows: set[nn.Module] | None = None


def penalty_trace(
    probe: Probe, model: nn.Module, x: Tensor, y: Tensor, rows: slice, logits: Tensor | None, looked: Looked
) -> tuple[Tensor, str, Tensor]:
    """An estimate with its graph in θ, the name of its route (`metacal.penalties.trace`), and logits with a graph.

    rows: the samples that count. logits: of all of x, with the graph of a plain forward, if there are any.
    """
    problem = Problem.of(model, x[rows], y[rows], probe.loss, randomness="freeze", seed=probe.stream, pairs=True)
    problem.compares = not looked.done or x.device.type == "cpu"
    params = problem.params
    with problem.math():
        fits = logits is not None and logits.requires_grad and logits.dtype == params[0].dtype
        fits = fits and problem.model is model  # the graph of a compiled network cannot be read
        z = logits if fits and logits is not None else problem.logits()
        require(z.requires_grad, "the logits do not depend on any trainable parameter")
        part = rows if fits else slice(None)
        chain = chain_from(z, params, part, copies=True)
        if chain is not None:
            return _chain_penalty(probe, chain, z[part], problem.y).mean(), "closed form", z
        if len(z) != len(problem):
            z = problem.logits()
        captured = _in_layers(problem, probe.hessian, looked)
        if captured is not None:
            columns, weight = probe.columns(captured.z)
            return (weight * column_norms(captured, columns, graph=True)).mean(), "layers", z
        head = head_from(z, params)
        if head is None and fits and ends_in_linear(z):
            # logits of copies of the parameters: the estimate must not depend on that
            z = problem.logits()
            head = head_from(z, params)
        try:
            return _general_penalty(probe, problem, head, z, quadratic_by_tape), "jets", z
        except NotImplementedError:  # no rule for an operation
            return _general_penalty(probe, problem, head, z, quadratic_by_reverse), "reverse", z


def _chain_penalty(probe: Probe, chain: Chain, z: Tensor, y: Tensor) -> Tensor:
    columns, weight = probe.columns(z)
    if not probe.hessian:
        return closed_form(chain, columns, weight)
    signs = None
    if chain.depth > 2:
        signs = [
            [probe.rows(i, l + 1, tuple(s.shape), z) for l, s in enumerate(chain.slope)] for i in range(probe.count)
        ]
    return closed_form(chain, columns, weight, logit_gradient(z, y, probe.loss), signs, smooth=True)


def _in_layers(problem: Problem, hessian: bool, looked: Looked) -> Captured | None:
    """A pass whose norms layer by layer give the trace, Tr H if piecewise linear."""
    if problem.compares:
        captured = None if problem.coupled is not None else _looked_at(problem, hessian)
        looked.done, looked.rows = True, None if captured is None else problem.row_modules
        return captured
    problem.row_modules = looked.rows
    return None if looked.rows is None else capture(problem, graph=True)


def _looked_at(problem: Problem, hessian: bool) -> Captured | None:
    """The same, with a look at two examples first, and at what each gives in all passes."""
    try:
        if examples_depend(problem) is not None:
            return None
        for part in (problem.part(slice(0, 2)), problem):
            captured = capture(part, graph=True)
            if captured.others or (hessian and curved_activations(captured) != []):
                return None
        problem.check_ways()
    except (OtherWay, RuntimeError, NotImplementedError, AttributeError, KeyError):
        return None
    return captured


Quadratic = Callable[[Problem, Sequence["Tensor | None"], bool], Tensor]


def _general_penalty(probe: Probe, problem: Problem, head: Head | None, z: Tensor, quadratic: Quadratic) -> Tensor:
    """The last layer's own trace, exactly, and the mean of vᵀHv or vᵀGv with signs v elsewhere, v = 0 there."""
    total = z.new_zeros(())
    exact: set[int] = set()
    if head is not None:
        exact = {id(p) for p in (head.weight, head.bias) if p is not None}
        total = head_trace(z, head, probe.loss).mean()
    params = problem.params
    if all(id(p) in exact for p in params):
        return total
    for i in range(probe.count):
        v = [None if id(p) in exact else probe.signs(i, l, (p.numel(),), p).view(p.shape) for l, p in enumerate(params)]
        total = total + quadratic(problem, v, probe.hessian) / probe.count
    return total
