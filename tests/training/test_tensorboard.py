"""TensorBoard itself, on runs that the trainer made: what its server answers on the routes that the browser reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.run_folders import SMALL

from metacal.cli import main
from metacal.config.compose import compose
from metacal.training import dashboards
from metacal.training.logging import RunLog
from metacal.training.running import RunningMeasures

CE, NET, HALF = "cross_entropy/seed0", "gamma_net/seed3", "unfinished"


class Server:
    """A TensorBoard server on a port of its own, and its answers."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
        self._log = open(log, "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--reload_interval", "1", *options], stdout=self._log, stderr=subprocess.STDOUT
        )
        self._path = log
        self.url = self._wait(self._address, "its address")

    def _address(self) -> str | None:
        found = re.search(r"http://127\.0\.0\.1:\d+/", self._path.read_text())
        return found.group() if found else None

    def _wait(self, ready: Any, what: str, seconds: float = 60) -> Any:
        """What `ready` gives, as soon as it gives something."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = ready()
            if found:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"TensorBoard did not show {what}:\n{self._path.read_text()}")

    def wait_for(self, run: str, tag: str) -> None:
        self._wait(lambda: tag in self.get("scalars/tags").get(run, {}), f"{tag} of {run}")

    def raw(self, route: str, body: Any = None, **query: Any) -> bytes:
        url = f"{self.url}data/plugin/{route}" + ("?" + urllib.parse.urlencode(query) if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def get(self, route: str, body: Any = None, **query: Any) -> Any:
        return json.loads(self.raw(route, body, **query))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        self._log.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    assert main(["train", *SMALL, "method=cross_entropy", f"run_dir={root / CE}"]) == 0
    more = ["monitor=full", "monitor.every=6", "monitor.subset=32", "monitor.certificate=4", "monitor.max_share=null"]
    more += ["penalties.margin_tail.weight=0.1"]
    assert main(["train", *SMALL, *more, "method=gamma_net", "seed=3", f"run_dir={root / NET}"]) == 0
    unfinished_run(root / HALF)
    return root


def unfinished_run(folder: Path) -> None:
    """Killed after step 20, gone on from its checkpoint at step 10, and not over."""
    folder.mkdir(parents=True)
    log = RunLog(folder)
    log.start(compose(["method=focal", "gamma.value=2", "seed=5"]), "metacal train method=focal")
    for step in (5, 10):
        log.scalars({"train/loss": float(step), "penalty/margin_tail": 1.0}, step, 0)
    checkpoint = log.state_dict()
    for step in (15, 20):
        log.scalars({"train/loss": float(step), "val/ece": 0.5}, step, 0)
    log.close()
    log = RunLog(folder, 10, checkpoint)
    for step in (15, 20):
        log.scalars({"train/loss": -float(step), "val/ece": 0.25}, step, 0)
    log.close()


@pytest.fixture(scope="module")
def server(runs, tmp_path_factory):
    server = Server(runs, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        server.wait_for(CE, "time/train_s")
        server.wait_for(NET, "time/train_s")
        server.wait_for(HALF, "train/loss")
        yield server
    finally:
        server.stop()


def logged(run: Path) -> dict[str, dict[int, float]]:
    """metrics.jsonl as tag -> step -> value."""
    found: dict[str, dict[int, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        step, split = entry.pop("step"), entry.pop("split")
        entry.pop("epoch")
        for name, value in entry.items():
            found.setdefault(f"{split}/{name}", {})[step] = value
    return found


def layout(server: Server) -> dict[str, dict[str, list[str]]]:
    answer = server.get("custom_scalars/layout")
    return {c["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in c["chart"]} for c in answer["category"]}


@pytest.mark.parametrize("run", [CE, NET])
def test_scalars_are_those_of_metrics_jsonl(runs, server, run):
    tags = server.get("scalars/tags")[run]
    expected = logged(runs / run)
    assert set(expected) <= set(tags)
    assert all(re.fullmatch(r"[a-z_]+/[a-z0-9_]+", tag) for tag in tags), "every tag is split/measure"
    for tag in ("train/loss", "train/ece", "val/ece", "time/step_ms"):
        answer = server.get("scalars/scalars", run=run, tag=tag)
        assert {step: value for _, step, value in answer} == pytest.approx(expected[tag], rel=1e-6)
    for name in ("accuracy", "ece", "nll"):  # what the tab opens with, over epochs
        answer = server.get("scalars/scalars", run=run, tag=f"by_epoch/val_{name}")
        assert [step for _, step, _ in answer] == [1, 2]
        assert [v for _, _, v in answer] == pytest.approx([*expected[f"val/{name}"].values()], rel=1e-6)
    assert sorted(tags)[:3] == [f"by_epoch/val_{name}" for name in ("accuracy", "ece", "nll")]
    assert not [tag for tag in tags if not dashboards.describe(tag)], "every scalar says what it is"
    summary = json.loads((runs / run / "summary.json").read_text())
    for tag in ("test/accuracy", "test/ece_scaled"):
        [[_, step, value]] = server.get("scalars/scalars", run=run, tag=tag)
        assert (step, value) == (summary["steps"], pytest.approx(summary[tag], rel=1e-6))


def test_train_and_val_share_their_steps(runs):
    found = logged(runs / NET)
    for measure in ("accuracy", "nll", "ece", "confidence"):
        assert found[f"train/{measure}"].keys() == found[f"val/{measure}"].keys()
        assert len(found[f"val/{measure}"]) == 2


def test_custom_scalars_hold_no_empty_chart_and_show_the_logged_values(runs, server):
    found = layout(server)
    assert {"calibration", "curvature beside ECE", "gammas", "outer problem", "margins", "penalties"} <= set(found)
    expected = {run: logged(runs / run) for run in (CE, NET, HALF)}
    for category, charts in found.items():
        for chart, patterns in charts.items():
            series = 0
            for run in (CE, NET, HALF):
                for pattern in patterns:
                    answer = server.get("custom_scalars/scalars", run=run, tag=pattern)
                    assert answer["regex_valid"], pattern
                    series += len(answer["tag_to_events"])
                    for tag, events in answer["tag_to_events"].items():
                        values = {step: value for _, step, value in events}
                        assert values == pytest.approx(expected[run][tag], rel=1e-6), (category, chart, tag)
            assert series > 0, f"{category}: {chart} is empty"


def test_custom_scalars_put_train_and_val_on_one_chart(server):
    charts = layout(server)["calibration"]
    for chart, measure in (("ECE", "ece"), ("NLL", "nll"), ("accuracy", "accuracy")):
        tags = {
            tag
            for pattern in charts[chart]
            for tag in server.get("custom_scalars/scalars", run=NET, tag=pattern)["tag_to_events"]
        }
        assert tags == {f"train/{measure}", f"val/{measure}"}


def test_custom_scalars_tell_a_penalty_from_its_share_and_gradient(server):
    charts = layout(server)["penalties"]
    for chart, tag in (
        ("value", "penalty/margin_tail"),
        ("share of the objective", "penalty/margin_tail_share"),
        ("norm of the gradient", "penalty/margin_tail_grad_norm"),
    ):
        [pattern] = charts[chart]
        assert set(server.get("custom_scalars/scalars", run=NET, tag=pattern)["tag_to_events"]) == {tag}


def test_images_are_pictures_by_epoch(runs, server):
    tags = server.get("images/tags")
    assert set(tags[CE]) == {"val/reliability", "test/reliability"}
    assert set(tags[NET]) == {"val/reliability", "test/reliability", "gamma/against_confidence"}
    steps = sorted(logged(runs / NET)["val/ece"])
    for tag in ("val/reliability", "gamma/against_confidence"):
        images = server.get("images/images", run=NET, tag=tag, sample=0)
        assert [image["step"] for image in images] == steps
        pictures = [server.raw("images/individualImage?" + image["query"]) for image in images]
        assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in pictures)
        assert pictures[0] != pictures[1]


def test_histograms_count_every_sample(runs, server):
    tags = server.get("histograms/tags")
    assert set(tags[CE]) == {"val/confidence_values", "val/margin_values"}
    assert set(tags[NET]) == {"val/confidence_values", "val/margin_values", "gamma/values"}
    data = json.loads((runs / NET / "summary.json").read_text())["data"]
    steps = logged(runs / NET)["val/ece"]
    for tag, count in (
        ("val/confidence_values", data["val"]),
        ("val/margin_values", data["val"]),
        ("gamma/values", (data["train"] + data["meta"]) // 32 * 32),
    ):
        for _, step, buckets in server.get("histograms/histograms", run=NET, tag=tag):
            total = sum(number for _, _, number in buckets)
            seen = count * step // min(steps) if tag == "gamma/values" else count  # the last thousand, which are all
            assert total == seen
            assert all(low <= high for low, high, _ in buckets)
            assert tag != "val/confidence_values" or (buckets[0][0] > 0.1 and buckets[-1][1] <= 1)


def session_groups(server: Server, columns: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    statuses = ["STATUS_SUCCESS", "STATUS_RUNNING", "STATUS_UNKNOWN", "STATUS_FAILURE"]
    body = {"experimentName": "", "allowedStatuses": statuses, "colParams": columns, "startIndex": 0, "sliceSize": 99}
    return server.get("hparams/session_groups", body | more).get("sessionGroups", [])


def names(groups: list[dict[str, Any]]) -> list[str]:
    return [group["sessions"][0]["name"] for group in groups]


def test_hparams_name_their_columns_and_what_they_may_be(server):
    answer = server.get("hparams/experiment", {"experimentName": ""})
    infos = {info["name"]: info for info in answer["hparamInfos"]}
    assert set(infos) == set(dashboards.hyperparameters(compose([])))
    assert [name for name, info in infos.items() if info.get("differs")] == [
        "lr", "method", "optimizer", "penalties", "seed",
    ]  # fmt: skip
    for name, info in infos.items():  # without one of these the browser has no filter for the column
        assert info["type"] == "DATA_TYPE_FLOAT64" or len(info["domainDiscrete"]) > 0, name
    assert {"cross_entropy", "focal", "gamma_net"} <= set(infos["method"]["domainDiscrete"])
    assert [metric["name"]["tag"] for metric in answer["metricInfos"]] == list(dashboards.METRICS)


def test_hparams_hold_every_run_with_its_final_metrics(runs, server):
    groups = {group["sessions"][0]["name"]: group for group in session_groups(server, [])}
    assert set(groups) == {CE, NET, HALF}
    for run, method, seed, weight in ((CE, "cross_entropy", 0, 0.0), (NET, "gamma_net", 3, 0.1)):
        values = groups[run]["hparams"]
        assert (values["method"], values["seed"], values["optimizer"]) == (method, seed, "sgd")
        assert values["lr"] == compose([]).optimizer.lr
        assert values["penalties"] == ("margin_tail" if weight else "none")
        assert values["penalty_margin_tail"] == weight and values["penalty_robust_kl"] == 0
        session = groups[run]["sessions"][0]
        assert session["status"] == "STATUS_SUCCESS" and session["endTimeSecs"] >= session["startTimeSecs"]
        metrics = {metric["name"]["tag"]: metric["value"] for metric in groups[run]["metricValues"]}
        summary = json.loads((runs / run / "summary.json").read_text())
        assert set(metrics) == set(dashboards.METRICS)
        for tag in ("test/accuracy", "test/ece", "test/ece_scaled", "time/train_s"):
            assert metrics[tag] == pytest.approx(summary[tag], rel=1e-6)
    assert groups[HALF]["sessions"][0].get("status", "STATUS_UNKNOWN") == "STATUS_UNKNOWN"
    assert groups[HALF]["hparams"]["gamma_value"] == 2 and "meta_lr" not in groups[HALF]["hparams"]


def test_hparams_filter_and_sort(runs, server):
    def column(name: str, **keys: Any) -> dict[str, Any]:
        return {"hparam": name, **keys}

    assert names(session_groups(server, [column("method", filterDiscrete=["gamma_net"])])) == [NET]
    assert set(names(session_groups(server, [column("method", filterRegexp="net|focal")]))) == {NET, HALF}
    assert names(session_groups(server, [column("seed", filterInterval={"minValue": 1, "maxValue": 4})])) == [NET]
    done = session_groups(server, [], allowedStatuses=["STATUS_SUCCESS"])
    assert set(names(done)) == {CE, NET}
    ece = {run: json.loads((runs / run / "summary.json").read_text())["test/ece"] for run in (CE, NET)}
    by_ece = [{"metric": {"tag": "test/ece"}, "order": "ORDER_ASC", "missingValuesFirst": False}]
    assert names(session_groups(server, by_ece))[:2] == sorted(ece, key=ece.__getitem__)


def test_text_holds_the_config_and_the_command(server):
    assert set(server.get("text/tags")[CE]) == {
        "config/text_summary",
        "command/text_summary",
        "test/text_summary",
        "scalars/text_summary",
    }
    [scalars] = server.get("text/text", run=CE, tag="scalars/text_summary")
    assert "ECE, a fraction, of the validation images, at each validation; less is better." in scalars["text"]
    [test] = server.get("text/text", run=CE, tag="test/text_summary")
    assert "<table>" in test["text"] and "ECE %" in test["text"] and "predictions on test are right" in test["text"]
    [config] = server.get("text/text", run=CE, tag="config/text_summary")
    assert "method: cross_entropy" in config["text"] and "batch_size: 32" in config["text"]
    [command] = server.get("text/text", run=CE, tag="command/text_summary")
    assert "metacal train data.train_size=300" in command["text"]


def assert_went_on(server: Server, run: str) -> None:
    for tag, expected in (
        ("train/loss", [(5, 5.0), (10, 10.0), (15, -15.0), (20, -20.0)]),
        ("val/ece", [(15, 0.25), (20, 0.25)]),
    ):
        answer = server.get("scalars/scalars", run=run, tag=tag)
        assert [(step, value) for _, step, value in answer] == expected
    assert layout(server)["penalties"]["value"], "of the time before the interruption"
    [group] = [g for g in session_groups(server, []) if g["sessions"][0]["name"] == run]
    assert group["hparams"]["method"] == "focal"


def test_a_resumed_run_goes_on_where_its_checkpoint_was(runs, server):
    assert logged(runs / HALF)["train/loss"] == {5: 5.0, 10: 10.0, 15: -15.0, 20: -20.0}
    assert_went_on(server, HALF)


def test_a_resumed_run_goes_on_for_the_loader_in_python_too(tmp_path):
    """TensorBoard has two: which one it takes depends on the platform."""
    unfinished_run(tmp_path / "runs" / HALF)
    server = Server(tmp_path / "runs", tmp_path / "log.txt", "--load_fast", "false")
    try:
        server.wait_for(HALF, "val/ece")
        assert_went_on(server, HALF)
        tags = server.get("scalars/tags")[HALF]
        assert all(dashboards.describe(tag) in tags[tag]["description"] for tag in ("val/ece", "train/loss"))
    finally:
        server.stop()


@pytest.mark.parametrize("run", [CE, NET])
def test_one_event_file_a_run(runs, run):
    assert len(list((runs / run).rglob("events.out.tfevents.*"))) == 1


# ------------------------------------------------------------------------------------------------ its parts


def test_a_layout_holds_the_charts_that_its_tags_fill():
    assert dashboards.layout(["val/ece", "train/ece"]).keys() == {"calibration"}
    found = dashboards.layout(["val/ece", "penalty/mbls", "penalty/mbls_share", "penalty/mbls_grad_norm"])
    for chart, own in (
        ("value", "mbls"),
        ("share of the objective", "mbls_share"),
        ("norm of the gradient", "mbls_grad_norm"),
    ):
        matching = [
            name
            for name in ("mbls", "mbls_share", "mbls_grad_norm")
            if any(re.match(pattern, f"penalty/{name}") for pattern in found["penalties"][chart])
        ]
        assert matching == [own]
    assert dashboards.layout([]) == {}


def test_running_measures_are_those_of_all_samples(seed=0):
    from metacal.calibration import accuracy, ece, nll
    from metacal.predictions import Predictions

    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(997, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (997,), generator=generator)
    gamma = torch.rand(997, generator=generator)
    found = []
    for size, save_every in ((31, 4), (1, 100), (997, 1)):
        running = RunningMeasures(15)
        for i, (z, y, g) in enumerate(zip(logits.split(size), labels.split(size), gamma.split(size))):
            running.add(z, y, g)
            if i % save_every == 0:
                state = json.loads(json.dumps(running.state_dict()))
                running = RunningMeasures(15)
                running.load_state_dict(state)
        found.append(running.values())
        assert running.values() == {}, "the next ones start anew"
    p = Predictions.from_logits(logits, labels)
    expected = {"train/accuracy": accuracy(p), "train/nll": nll(p), "train/ece": ece(p, n_bins=15)}
    assert found[0] == pytest.approx({**expected, "train/confidence": p.confidence.mean().item()}, abs=1e-8)
    assert found[0] == found[1] == found[2], "not a bit depends on how the samples come, nor on checkpoints between"


def test_running_measures_keep_about_the_last_thousand_gammas():
    running = RunningMeasures()
    logits, labels = torch.zeros(64, 3), torch.zeros(64, dtype=torch.int64)
    for i in range(100):
        running.add(logits, labels, torch.full((64,), float(i)))
    sample = running.gammas()
    assert sample is not None and all(len(part) == len(sample[0]) for part in sample)
    assert 1000 <= len(sample[0]) < 1000 + 640 and sample[0].max() == 99 and sample[0].min() >= 99 - 1640 / 64
    running = RunningMeasures()
    running.add(logits, labels, torch.tensor(2.0))
    assert running.gammas() is None


def test_a_histogram_of_outliers_stays_small(tmp_path):
    log = RunLog(tmp_path)
    log.histogram("val/confidence", torch.cat([torch.ones(1000) - 1e-9 * torch.rand(1000), torch.zeros(1)]), 1)
    log.histogram("val/margin", torch.full((10,), 3.0), 1)
    log.close()
    [file] = tmp_path.glob("events.*")
    assert file.stat().st_size < 5000


def test_dear_figures_wait_for_their_share_of_the_time(tmp_path, monkeypatch):
    from metacal.report.figures import gamma_scatter

    log = RunLog(tmp_path)
    now = log._began
    monkeypatch.setattr("metacal.training.logging.time.perf_counter", lambda: now)
    drawn = []

    def draw():
        nonlocal now
        now += 0.5
        drawn.append(now)
        return gamma_scatter(torch.rand(9), torch.rand(9), torch.rand(9) > 0.5)

    now += 10
    log.figures({"a": draw}, 1, share=0.01)
    assert log.figures_wait and not drawn
    now += 40
    log.figures({"a": draw}, 2, share=0.01)  # the first is taken to cost 0.25 s
    assert not log.figures_wait and len(drawn) == 1
    log.figures({"a": draw}, 3, share=0.01)  # by now known to cost 0.5 s
    assert log.figures_wait and len(drawn) == 1
    now += 60
    log.figures({"a": draw}, 4, share=0.01)
    assert not log.figures_wait and len(drawn) == 2
    log.figures({"a": draw}, 5)
    assert len(drawn) == 3
    log.close()
