"""Random networks, optimizers, sources, objectives and penalties: every engine against a step written plainly.

Right is: equal to double backward, or an `InputError` that says what to do instead; and nothing has moved.
"""

from __future__ import annotations

import re

import pytest
import torch
from fuzz.attack import attack
from fuzz.nets import BLOCKS, HIDDEN_STATE, NO_SECOND_DERIVATIVE, PLAIN
from fuzz.steps import Step
from reference.whole_step import State, differences, double_backward, entries, same_entries, taken
from torch import Tensor
from torch.optim import SGD

from metacal.errors import InputError

pytestmark = pytest.mark.slow

ENGINES = ("forward", "reverse", "difference")
NAMES_A_WAY_OUT = re.compile(r"engine '?(forward|difference|reverse)|use_reentrant|sparse|optimizer|remove it")


def reference(step: Step) -> tuple[Tensor, float]:
    """dM/dφ and its relative error."""
    if NO_SECOND_DERIVATIVE.isdisjoint(step.names):
        return double_backward(step.build), 1e-8
    near, nearer = differences(step.build, 5e-5), differences(step.build, 2e-5)
    # they disagree where a kink lies between
    return nearer, max(1e-2 if step.steep else 1e-6, 10 * float((near - nearer).norm() / nearer.norm()))


def close(found: Tensor, truth: Tensor, tolerance: float) -> bool:
    return float((found - truth).norm()) <= tolerance * float(truth.norm()) + 1e-11


def tolerance_of(step: Step, engine: str, exact: float) -> float:
    """The quotient's own error is about 1e-5 on smooth networks, and more near kinks."""
    return 2e-3 if engine == "difference" else exact


def must_work(step: Step, engine: str) -> bool:
    """Whether a refusal would be one without a reason."""
    plain = not step.writes_input and all(name in PLAIN for name in step.names)
    return plain and engine in ENGINES


def refused(step: Step, engine: str, error: InputError) -> None:
    message = str(error)
    assert "\n" not in message, f"{engine}: a message of several lines: {message} {step}"
    assert NAMES_A_WAY_OUT.search(message), f"{engine}: no way out is named: {message} {step}"
    assert not must_work(step, engine), f"{engine}: refused without need: {message} {step}"


def hypergradient(step: Step, engine: str, truth: Tensor, exact: float) -> str:
    """The outcome for one engine: right or refused, with everything as it was."""
    if not bool(truth.isfinite().all()):
        return "left out: saturated"
    setting = step.build()
    before, state = State(setting.net, setting.source), entries(setting.optimizer)
    outcome = f"{engine} right"
    try:
        meta = step.metastep(setting, engine)
        found = meta.hypergradient(setting.x.clone(), setting.y, setting.x_meta.clone(), setting.y_meta)
    except InputError as error:
        refused(step, engine, error)
        outcome = f"{engine} refused"
    else:
        flat = torch.cat([h.flatten() for h in found])
        wrong = float((flat - truth).norm() / truth.norm().clamp(min=1e-300))
        assert close(flat, truth, tolerance_of(step, engine, exact)), f"{engine}: off by {wrong:.1e}: {step}"
    moved = before.changes(State(setting.net, setting.source))
    assert not moved, f"{engine}: hypergradient moved {', '.join(moved)}: {step}"
    assert same_entries(state, entries(setting.optimizer)), f"{engine}: hypergradient moved the optimizer: {step}"
    assert all(p.grad is None for p in setting.params), f"{engine}: hypergradient left gradients: {step}"
    return outcome


@pytest.mark.parametrize("engine", ENGINES)
def test_hypergradients(engine: str) -> None:
    def check(seed: int) -> str:
        step = Step(seed)
        return hypergradient(step, engine, *reference(step))

    attack("test_hypergradients", check, 500)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_block_alone(engine: str) -> None:
    def check(seed: int) -> str:
        step = Step(seed)
        step.names = [sorted(BLOCKS)[seed % len(BLOCKS)]]
        step.optimizer, step.make_optimizer = "SGD", lambda net: SGD(net.parameters(), lr=0.3, momentum=0.9)
        step.writes_input = step.parallel = step.evaluation = False
        step.settle = 0
        return hypergradient(step, engine, *reference(step))

    attack("test_hypergradients", check, len(BLOCKS))


def test_steps() -> None:
    """One step of MetaStep is the training pass of a loop of one's own, and moves φ against the hypergradient."""

    def check(seed: int) -> str:
        step, engine = Step(seed), ENGINES[seed % 3]
        (truth, exact), trained = reference(step), taken(step.build).after
        if not bool(truth.isfinite().all()):
            return "left out: saturated"
        setting = step.build()
        before, state = State(setting.net, setting.source), entries(setting.optimizer)
        phi = torch.cat([p.detach().flatten() for p in setting.phi])
        try:
            meta = step.metastep(setting, engine)
            meta.step(setting.x, setting.y, setting.x_meta, setting.y_meta)
        except InputError as error:
            refused(step, engine, error)
            moved = before.changes(State(setting.net, setting.source))
            assert not moved, f"{engine}: an error after {', '.join(moved)} had moved: {step}"
            assert same_entries(state, entries(setting.optimizer)), f"{engine}: an error after the step: {step}"
            return "refused"
        moved = trained.changes(State(setting.net), tolerance=1e-9)
        assert not moved, f"{engine}: the step left others of {', '.join(moved)}: {step}"
        went = phi - torch.cat([p.detach().flatten() for p in setting.phi])
        assert close(went, truth, max(tolerance_of(step, engine, exact), 1e-6)), f"{engine}: φ went elsewhere: {step}"
        return "right"

    attack("test_hypergradients", check, 300)


def test_second_calls() -> None:
    """What one call leaves in memory must not reach the next: three calls, the same numbers."""

    def check(seed: int) -> str:
        step, engine = Step(seed), ENGINES[seed % 3]
        if not HIDDEN_STATE.isdisjoint(step.names):
            return "left out"
        setting = step.build()
        batches = setting.x, setting.y, setting.x_meta, setting.y_meta

        def call() -> Tensor:
            copies = [t.clone() for t in batches]
            return torch.cat([h.flatten() for h in meta.hypergradient(*copies)])

        try:
            meta = step.metastep(setting, engine)
            first = call()
        except InputError:
            return "refused"
        for _ in range(2):
            assert close(call(), first, 1e-10), f"{engine}: a second call gives other numbers: {step}"
        return "right"

    attack("test_hypergradients", check, 200)


def test_parts_and_the_reference_engine() -> None:
    """chunk, and engine "higher", on networks that draw nothing."""

    def check(seed: int) -> str:
        step = Step(seed, tame=True)
        truth, exact = reference(step)
        setting = step.build()
        engine, keys = ("forward", {"chunk": 4}) if seed % 2 else ("higher", {})
        try:
            meta = step.metastep(setting, engine, **keys)
            found = meta.hypergradient(setting.x, setting.y, setting.x_meta, setting.y_meta)
        except InputError as error:
            assert "\n" not in str(error), f"{engine}: a message of several lines: {error} {step}"
            return f"{engine} refused"
        flat = torch.cat([h.flatten() for h in found])
        wrong = float((flat - truth).norm() / truth.norm().clamp(min=1e-300))
        assert close(flat, truth, exact), f"{engine} {keys}: off by {wrong:.1e}: {step}"
        return f"{engine} right"

    attack("test_hypergradients", check, 200)


def test_the_two_references_agree() -> None:
    """Double backward and differences share the pass and the optimizer's formula, and nothing else."""

    def check(seed: int) -> str:
        step = Step(seed)
        if step.steep or "BulkSGD" in step.optimizer or not NO_SECOND_DERIVATIVE.isdisjoint(step.names):
            return "left out"
        a, b = double_backward(step.build), differences(step.build)
        wrong = float((a - b).norm() / a.norm().clamp(min=1e-300))
        assert close(a, b, 1e-5), f"off by {wrong:.1e}: {step}"
        return "agree"

    attack("test_hypergradients", check, 60)
