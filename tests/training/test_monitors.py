"""Monitors: the numbers that they log, that they change nothing, and that a budget holds them back."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

from metacal.calibration import ece, kce
from metacal.cli import main
from metacal.curvature import Focal, gn_sharpness, hessian_sharpness
from metacal.margins import robust_margin
from metacal.models import Backbone
from metacal.monitors import CurvatureMonitor, GammaMonitor, MarginMonitor, State, SubsetMonitor, Watch
from metacal.optim import SAM, Muon
from metacal.pixels import Pixels
from metacal.predictions import Predictions


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(64, 5, generator=generator), torch.randint(3, (64,), generator=generator)
    return Backbone(net).train(), x, y


def test_monitors_leave_the_training_as_it_was(problem):
    backbone, x, y = problem
    before = copy.deepcopy(backbone.state_dict())
    optimizer = torch.optim.SGD(backbone.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    state = State(backbone, step=10, optimizer=optimizer)
    monitors = [SubsetMonitor("train_subset", x, y, 10, robust_eps=0.1), CurvatureMonitor(x, y, 5, certificate=16)]
    values = Watch(monitors).measure(state, validation=False)
    assert {"train_subset/ece", "train_subset/robust_margin", "curvature/gn_sharpness"} <= values.keys()
    assert torch.equal(torch.get_rng_state(), expected)
    assert backbone.training and all(p.grad is None for p in backbone.parameters())
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_robust_margins_and_their_moment_are_in_pixels(problem):
    backbone, x, y = problem
    pixels = Pixels(0.5, 0.25)
    x = (x.sigmoid() - 0.5) / 0.25
    values = SubsetMonitor("s", x, y, 1, robust_eps=0.1, pixels=pixels).measure(State(backbone))
    wide = SubsetMonitor("s", x, y, 1, robust_eps=0.1).measure(State(backbone))
    same = SubsetMonitor("s", x, y, 1, robust_eps=0.4).measure(State(backbone))
    assert values["s/robust_margin_first_order"] == pytest.approx(same["s/robust_margin_first_order"])
    assert values["s/robust_margin"] < wide["s/robust_margin"] - 0.01
    for end, margin in zip(("", "_first_order"), robust_margin(backbone, x, y, 0.1, clip=(0, 1), pixels=pixels)):
        assert values[f"s/robust_q{end}"] == pytest.approx((-margin.double()).exp().mean().item())
    assert values["s/certificate_q"] < values["s/robust_q"]  # the margins without a perturbation are larger


def test_subset_monitor_logs_the_measures_of_its_subset(problem):
    backbone, x, y = problem
    values = SubsetMonitor("val_subset", x, y, 1).measure(State(backbone))
    assert values["val_subset/certificate_value"] <= values["val_subset/certificate_mean_miss"]
    with torch.no_grad():
        p = Predictions.from_logits(backbone.eval()(x)[0], y)
    assert values["val_subset/ece"] == pytest.approx(float(ece(p)), rel=1e-9)
    assert values["val_subset/kce"] == pytest.approx(float(kce(p)), rel=1e-9)
    assert values["val_subset/margin_q05"] <= values["val_subset/margin_q50"] <= values["val_subset/margin_q95"]
    assert values["val_subset/predicted_margin_q05"] >= 0


@pytest.mark.parametrize(
    ("keys", "edge"),
    [
        ({"momentum": 0.0}, 2 / 0.1),
        ({"momentum": 0.9}, 2 * 1.9 / 0.1),
        ({"momentum": 0.9, "nesterov": True}, 2 * 1.9 / (0.1 * 2.8)),
        ({"momentum": 0.5, "dampening": 0.5}, 2 * 1.5 / (0.1 * 0.5)),
    ],
)
def test_the_edge_of_stability_is_where_the_optimizer_diverges_on_a_quadratic(keys, edge):
    """Just below the edge the optimizer itself converges on 1/2 a x², just above it diverges."""
    for factor, converges in ((0.98, True), (1.02, False)):
        at = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([at], lr=0.1, **keys)
        for _ in range(2000):
            optimizer.zero_grad()
            (0.5 * factor * edge * at**2).sum().backward()
            optimizer.step()
        assert (abs(float(at)) < 1) == converges
    net = Backbone(nn.Sequential(nn.Linear(2, 3)))
    x, y = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    state = State(net, optimizer=torch.optim.SGD(net.parameters(), 0.1, **keys))
    assert CurvatureMonitor(x, y, 1).measure(state)["curvature/edge"] == pytest.approx(edge)


def test_curvature_monitor_agrees_with_the_ground_floor_in_evaluation_mode(problem):
    backbone, x, y = problem
    monitor = CurvatureMonitor(x, y, 1, tol=1e-4)
    values = monitor.measure(State(backbone, optimizer=torch.optim.SGD(backbone.parameters(), 0.1)))
    backbone.eval()
    assert values["curvature/gn_sharpness"] == pytest.approx(gn_sharpness(backbone, x, y, 1e-6).value, rel=1e-3)
    top = hessian_sharpness(backbone, x, y, 1e-6).value
    assert values["curvature/hessian_sharpness"] == pytest.approx(top, rel=1e-3)
    assert values["curvature/edge_ratio"] == pytest.approx(values["curvature/hessian_sharpness"] / 20)
    again = monitor.measure(State(backbone))  # starts from the last eigenvectors
    assert again["curvature/gn_sharpness"] == pytest.approx(values["curvature/gn_sharpness"], rel=1e-3)


def test_the_curvature_of_a_model_trained_on_squares_is_that_of_squares(problem):
    backbone, x, y = problem
    values = CurvatureMonitor(x, y, 1, tol=1e-4, loss="mse").measure(State(backbone))
    backbone.eval()
    assert values["curvature/gn_sharpness"] == pytest.approx(
        gn_sharpness(backbone, x, y, 1e-6, loss="mse").value, rel=1e-3
    )
    top = hessian_sharpness(backbone, x, y, 1e-6, loss="mse").value
    assert values["curvature/hessian_sharpness"] == pytest.approx(top, rel=1e-3)


@pytest.mark.parametrize("make", [lambda p: SAM(torch.optim.SGD(p, 0.1)), lambda p: Muon([*p][:1])])
def test_an_optimizer_without_a_known_edge_has_none(problem, make):
    backbone, x, y = problem
    values = CurvatureMonitor(x, y, 1).measure(State(backbone, optimizer=make(backbone.parameters())))
    assert not any("edge" in name for name in values)


def test_adam_has_the_edge_of_the_preconditioned_sharpness(problem):
    backbone, x, y = problem
    optimizer = torch.optim.AdamW(backbone.parameters(), 1e-2)
    nn.functional.cross_entropy(backbone(x)[0], y).backward()
    optimizer.step()
    optimizer.zero_grad()
    values = CurvatureMonitor(x, y, 1).measure(State(backbone, optimizer=optimizer))
    assert values["curvature/edge"] == pytest.approx(38 / 1e-2)
    assert values["curvature/preconditioned_sharpness"] > 0


def test_gamma_monitor():
    logits = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    confidence = logits.softmax(1).amax(1)
    state = State(nn.Identity(), logits=logits, gamma=2 + 3 * confidence)
    values = GammaMonitor(1).measure(state)
    assert values["gamma/confidence_correlation"] == pytest.approx(1.0, abs=1e-5)
    assert values["gamma/min"] == pytest.approx(3.5) and values["gamma/q50"] == pytest.approx(
        float((2 + 3 * confidence).median() + (2 + 3 * confidence).sort().values[2]) / 2
    )
    assert GammaMonitor(1).measure(State(nn.Identity(), logits=logits, gamma=torch.tensor(3.0))) == {"gamma/mean": 3.0}
    constant = GammaMonitor(1).measure(State(nn.Identity(), logits=logits, gamma=torch.full((4,), 3.0)))
    assert "gamma/confidence_correlation" not in constant and constant["gamma/std"] == 0
    assert GammaMonitor(1).measure(State(nn.Identity())) == {}


def test_margin_monitor_certificates_hold():
    generator = torch.Generator().manual_seed(0)
    p = Predictions.from_logits(torch.randn(50, 4, generator=generator), torch.randint(4, (50,), generator=generator))
    values = MarginMonitor().measure(State(nn.Identity(), val=p))
    assert values["margin/value"] <= values["margin/mean_miss"] <= values["margin/upper"]
    assert not values.get("margin/violated", 0)


class Clocked:
    """A monitor that takes a second of a clock that tests set."""

    budgeted = True

    def __init__(self, name, now, every=1):
        self.name, self.every, self.now, self.calls = name, every, now, 0

    def measure(self, state):
        self.now[0] += 1.0
        self.calls += 1
        return {f"{self.name}/value": float(state.step)}


@pytest.fixture
def now(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("metacal.monitors.watch.time.perf_counter", lambda: clock[0])
    return clock


def test_a_budget_makes_dear_monitors_wait_together_and_cheap_ones_never(now):
    a, b, gamma = Clocked("a", now), Clocked("b", now), GammaMonitor(1)
    watch = Watch([a, b, gamma], 0.1, began=0.0)
    state = State(nn.Identity(), logits=torch.zeros(4, 2), gamma=torch.arange(4.0))
    seen = []
    for step in range(1, 1001):
        now[0] += 0.1  # a tenth of a second a step
        state.step = step
        values = watch.measure(state, validation=False)
        assert "gamma/mean" in values
        assert ("a/value" in values) == ("b/value" in values)  # their values pair
        seen.append("a/value" in values)
    assert 4 <= a.calls == b.calls <= 7  # 100 s of training pay for about 11 s of measuring, 2 s a turn
    assert seen[-300:].count(True) >= 1  # they do not starve
    assert watch.spent / now[0] <= 0.1
    assert watch.scalars() == {"time/monitor_share": watch.spent / now[0], "time/monitor_waited": 1000.0 - a.calls}


def test_without_a_budget_every_turn_is_taken(now):
    monitor = Clocked("a", now, every=2)
    watch = Watch([monitor])
    for step in range(1, 11):
        watch.measure(State(nn.Identity(), step=step), validation=False)
    assert monitor.calls == 5


def test_a_watch_resumes_with_its_account_and_its_monitors_state(now, problem):
    backbone, x, y = problem
    watch = Watch([CurvatureMonitor(x, y, 1)], 0.5, began=0.0)
    now[0] = 7.0
    watch.measure(State(backbone, step=1), validation=False)
    state = watch.state_dict()
    other = Watch([CurvatureMonitor(x, y, 1)], 0.5, began=0.0)
    now[0] = 100.0
    other.load_state_dict(state)
    assert other.began == 93.0 and other.state_dict() == state | {"monitors": other.state_dict()["monitors"]}
    a = watch.measure(State(backbone, step=2), validation=False)
    b = other.measure(State(backbone, step=2), validation=False)
    assert a["curvature/gn_sharpness"] == b["curvature/gn_sharpness"]  # from the same eigenvector


def test_full_monitor_in_a_run_and_curvature_of_its_checkpoints(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["train", "model.hidden=[8]", "data.train_size=200", "epochs=4", "keep_every=2", f"run_dir={folder}"]
    full = [
        "monitor=full",
        "monitor.every=2",
        "monitor.subset=64",
        "monitor.max_share=null",
        "monitor.resamples=0",
        "monitor.figures_every=0",
    ]
    assert main([*words, *full]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    splits = {line["split"] for line in lines}
    assert {"curvature", "train_subset", "val_subset", "margin", "time"} <= splits
    curvature = [line for line in lines if line["split"] == "curvature"]
    assert [line["step"] for line in curvature] == [2, 4]
    for line in curvature:
        assert line["certificate_ratio"] <= 1 and line["gn_sharpness"] > 0 and math.isfinite(line["hessian_trace"])
    capsys.readouterr()
    assert main(["curvature", str(folder), "--subset", "50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"best.pt", "last.pt", "epoch0002.pt", "epoch0004.pt"} == found.keys()
    assert found["last.pt"]["gn_sharpness"] == pytest.approx(found["epoch0004.pt"]["gn_sharpness"], rel=0.02)
    assert main(["curvature", str(folder), "--subset", "50"]) == 0
    assert "Tr H" in capsys.readouterr().out
    assert main(["curvature", str(folder), "--tolerance", "0"]) == 2


def test_the_curvature_of_the_loss_that_is_trained(problem, tmp_path, capsys):
    backbone, x, y = problem
    gamma = torch.linspace(0, 3, len(x))
    seen = []

    def trained(x, y, epoch):
        seen.append(epoch)
        return Focal(gamma[: len(x)])

    monitor = CurvatureMonitor(x, y, 1, tol=1e-4, certificate=8, loss=trained, held_out=(x[:20], y[:20]))
    values = monitor.measure(State(backbone, epoch=3))
    backbone.eval()
    for name, measure in (("gn_sharpness", gn_sharpness), ("hessian_sharpness", hessian_sharpness)):
        expected = measure(backbone, x, y, 1e-6, loss=Focal(gamma)).value
        assert values[f"curvature/{name}"] == pytest.approx(expected, rel=1e-3)
    assert seen == [3, 3] and "curvature/certificate_ratio" not in values
    words = [
        "train",
        "model.hidden=[8]",
        "data.train_size=200",
        "epochs=1",
        "monitor.resamples=0",
        "monitor.figures_every=0",
        "monitor=full",
    ]
    words += ["monitor.every=1", "monitor.subset=64", "monitor.max_share=null", "monitor.curvature_loss=trained"]
    assert main([*words, "method=dual_focal", f"run_dir={tmp_path / 'no'}"]) == 2
    assert "known for cross_entropy, mse, focal, label_smoothing, got dual_focal" in capsys.readouterr().err
    for method, more in (("gamma_net", []), ("label_smoothing", []), ("learned_smoothing", ["meta.lr=0.5"])):
        folder = tmp_path / method
        assert main([*words, f"method={method}", *more, f"run_dir={folder}"]) == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (logged,) = [line for line in lines if line["split"] == "curvature"]
        assert logged["gn_sharpness"] > 0 and math.isfinite(logged["hessian_trace"])
        capsys.readouterr()
        found = []
        for loss in ("trained", "cross_entropy"):
            assert main(["curvature", str(folder), "--subset", "50", "--json", "--loss", loss]) == 0
            found.append(json.loads(capsys.readouterr().out)["last.pt"]["hessian_trace"])
        assert found[0] != pytest.approx(found[1], rel=1e-3)


def test_monitors_do_not_touch_the_path_of_the_training(tmp_path):
    words = [
        "train",
        "model.hidden=[8]",
        "data.train_size=200",
        "epochs=2",
        "monitor.resamples=0",
        "monitor.figures_every=0",
    ]
    assert main([*words, f"run_dir={tmp_path / 'off'}", "monitor=off"]) == 0
    assert main([*words, f"run_dir={tmp_path / 'full'}", "monitor=full", "monitor.every=1"]) == 0
    weights = [torch.load(tmp_path / n / "checkpoints" / "last.pt")["backbone"] for n in ("off", "full")]
    for key in weights[0]:
        assert torch.equal(weights[0][key], weights[1][key])
