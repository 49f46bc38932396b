"""W&B and MLflow as sinks of a run: with stand-ins for their packages, and with the packages where they are there."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.run_folders import SMALL

import metacal
from metacal.cli import main
from metacal.config.compose import compose
from metacal.errors import InputError
from metacal.training.logging import RunLog

LOSSES = {5: 5.0, 10: 10.0, 15: 15.0, 20: 20.0, 25: 25.0}


class WandbRun:
    """What W&B's server knows of a run, and the object that logs to it: rows are merged by step, and never go back."""

    def __init__(self, **given: Any) -> None:
        self.id, self.given, self.offline, self.resumed = given["id"], given, False, False
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.exits: list[int] = []

    @property
    def step(self) -> int:
        return max(self.rows, default=-1) + 1

    def log(self, values: dict[str, Any], step: int) -> None:
        assert step >= max(self.rows, default=0), "W&B would drop it"
        row = self.rows.setdefault(step, {})
        assert not values.keys() - {"epoch"} & row.keys()
        row.update(values)

    def finish(self, exit_code: int) -> None:
        self.exits.append(exit_code)


class Updatable(dict):
    def update(self, values: Any, allow_val_change: bool = False) -> None:  # type: ignore[override]
        super().update(values)


@pytest.fixture
def wandb(monkeypatch) -> dict[str, WandbRun]:
    """W&B's server: id -> run."""
    server: dict[str, WandbRun] = {}

    def init(**given: Any) -> WandbRun:
        run = server.get(given["id"])
        if run is None:
            run = server[given["id"]] = WandbRun(**given)
            run.config = Updatable()
        else:
            run.resumed = True
        return run

    class Error(Exception):
        pass

    def picture(what: Any = None, **more: Any) -> tuple[Any, ...]:
        return (what, *more.values())

    stand_in("wandb", monkeypatch, init=init, Settings=dict, Histogram=picture, Image=picture, Html=picture,
             errors=types.SimpleNamespace(Error=Error))  # fmt: skip
    return server


class Mlflow:
    """MLflow's store, and its client."""

    def __init__(self) -> None:
        self.experiments: list[str] = []
        self.runs: dict[str, Any] = {}
        self.fail = False

    def __call__(self) -> Mlflow:
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        known = name in self.experiments
        return types.SimpleNamespace(experiment_id=str(self.experiments.index(name))) if known else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return str(len(self.experiments) - 1)

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "metrics": [], "params": {}, "tags": {}, "files": {}, "status": None}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        if self.fail:
            raise ConnectionError("no route to the server")
        assert len(params) <= 100 and len(metrics) <= 1000
        run = self.runs[run_id]
        for tag, value, when, step in metrics:
            assert (tag, step) not in [(t, s) for t, s, _ in run["metrics"]], "it would be there twice"
            assert when > 0
            run["metrics"].append((tag, step, value))
        run["params"].update(params)
        run["tags"].update(tags)

    def get_run(self, run_id: str) -> Any:
        tags = {tag: 0 for tag, _, _ in self.runs[run_id]["metrics"]}
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=tags))

    def get_metric_history(self, run_id: str, tag: str) -> list[Any]:
        return [types.SimpleNamespace(step=s) for t, s, _ in self.runs[run_id]["metrics"] if t == tag]

    def log_text(self, run_id: str, content: Any, file: str) -> None:
        self.runs[run_id]["files"][file] = content

    log_image = log_dict = log_text


@pytest.fixture
def mlflow(monkeypatch) -> Mlflow:
    store = Mlflow()
    stand_in("mlflow", monkeypatch, MlflowClient=store)
    stand_in("mlflow.exceptions", monkeypatch, MlflowException=type("MlflowException", (Exception,), {}))

    def entity(*values: Any) -> tuple[Any, ...]:
        return values

    stand_in("mlflow.entities", monkeypatch, Metric=entity, Param=entity, RunTag=entity)
    return store


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch, **contents: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def numbers(run: Path) -> dict[tuple[str, int], float]:
    """metrics.jsonl as (tag, step) -> value."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (f"{line['split']}/{name}", line["step"]): value
        for line in lines
        for name, value in line.items()
        if name not in ("step", "epoch", "split")
    }


def test_a_run_is_logged_to_all_of_them(wandb, mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "an experiment")
    folder = tmp_path / "focal" / "seed0"
    words = [*SMALL, "method=focal", "log=[tensorboard,wandb,mlflow]", f"run_dir={folder}"]
    assert main(["train", *words]) == 0
    assert list(folder.glob("events.out.tfevents.*"))
    summary = json.loads((folder / "summary.json").read_text())
    [run] = wandb.values()
    of_run = {(tag, step): v for step, row in run.rows.items() for tag, v in row.items()}
    assert numbers(folder).items() <= of_run.items()
    assert {row["epoch"] for row in run.rows.values() if "epoch" in row} == {0, 1, 2}
    assert run.config["optimizer"]["lr"] == compose([]).optimizer.lr and "method=focal" in run.config["command"]
    assert run.summary["test/ece"] == summary["test/ece"] and run.exits == [0]
    assert (run.given["project"], run.given["name"]) == ("metacal", "focal/seed0")
    pictures = {tag for row in run.rows.values() for tag, value in row.items() if isinstance(value, tuple)}
    histograms = {"val/confidence_values", "val/margin_values"}
    assert pictures == {"val/reliability", "test/reliability", "test"} | histograms
    [run_id] = mlflow.runs
    of_run = mlflow.runs[run_id]
    assert mlflow.experiments == ["an experiment"] and of_run["name"] == "focal/seed0"
    logged = {(tag, step): value for tag, step, value in of_run["metrics"]}
    assert numbers(folder).items() <= logged.items()
    assert logged["test/ece", summary["steps"]] == summary["test/ece"]
    assert of_run["params"]["optimizer.lr"] == "0.1" and of_run["params"]["loss.name"] == "focal"
    assert of_run["files"]["summary.json"]["test/nll"] == summary["test/nll"] and "config.yaml" in of_run["files"]
    [picture] = [p for name, p in of_run["files"].items() if name.startswith("test/reliability/")]
    assert picture.ndim == 3 and picture.shape[2] == 3
    assert of_run["status"] == "FINISHED"
    assert json.loads((folder / "sinks.json").read_text()) == {"wandb": next(iter(wandb)), "mlflow": run_id}


def first_half(folder: Path, sinks: list[str]) -> None:
    """Of a run that is killed after step 20, with a checkpoint at step 10."""
    folder.mkdir(parents=True)
    log = RunLog(folder, sinks=sinks)
    log.start(compose(["method=focal", "seed=5"]), "metacal train method=focal")
    for step in (5, 10):
        log.scalars({"train/loss": LOSSES[step]}, step, 0)
    (folder / "state.json").write_text(json.dumps(log.state_dict()))
    for step in (15, 20):
        log.scalars({"train/loss": LOSSES[step]}, step, 0)


def second_half(folder: Path, sinks: list[str], also: str = "") -> None:
    log = RunLog(folder, 10, json.loads((folder / "state.json").read_text()), [*sinks, *([also] if also else [])])
    log.start(compose(["method=focal", "seed=5"]), "metacal train method=focal")
    for step in (15, 20):
        log.scalars({"train/loss": LOSSES[step]}, step, 0)
    log.scalars({"val/ece": 0.5}, 20, 1)  # what the first half did not get to
    log.scalars({"train/loss": LOSSES[25]}, 25, 1)
    log.histogram("val/confidence_values", torch.linspace(0, 1, 9), 25)
    log.finish({"test/ece": 0.25, "method": "focal"}, 25)
    log.close()


def test_a_resumed_run_goes_on_in_the_same_one_and_sends_nothing_twice(wandb, mlflow, tmp_path):
    first_half(tmp_path / "run", ["wandb"])
    second_half(tmp_path / "run", ["wandb"], also="mlflow")
    [run] = wandb.values()
    assert {step: row["train/loss"] for step, row in run.rows.items()} == LOSSES
    assert run.given["resume"] == "allow" and run.exits == [0]
    [of_run] = mlflow.runs.values()
    assert [(step, v) for tag, step, v in of_run["metrics"] if tag == "train/loss"] == [*LOSSES.items()], (
        "a sink that is new when a run goes on has what came before too"
    )
    first_half(tmp_path / "other", ["mlflow"])
    second_half(tmp_path / "other", ["mlflow"])
    of_run = mlflow.runs["run1"]
    assert [(step, v) for tag, step, v in of_run["metrics"] if tag == "train/loss"] == [*LOSSES.items()]
    assert ("val/ece", 20, 0.5) in of_run["metrics"] and of_run["status"] == "FINISHED"


def test_a_service_that_fails_is_done_without(mlflow, tmp_path, capsys):
    log = RunLog(tmp_path, sinks=["tensorboard", "mlflow"])
    log.scalars({"train/loss": 1.0}, 1, 0)
    mlflow.fail = True
    log.scalars({"train/loss": 2.0}, 2, 0)
    log.scalars({"train/loss": 3.0}, 3, 0)
    state = log.state_dict()
    log.close()
    assert capsys.readouterr().err.count("log=[mlflow] failed: no route to the server; the run goes on without") == 1
    assert [*numbers(tmp_path).values()] == [1, 2, 3]
    mlflow.fail = False
    log = RunLog(tmp_path, 3, state, sinks=["mlflow"])
    log.start(compose([]))
    log.close()
    [of_run] = mlflow.runs.values()
    assert of_run["metrics"] == [("train/loss", step, float(step)) for step in (1, 2, 3)], "it has them once it is back"
    assert of_run["status"] == "KILLED"


def test_fit_logs_where_it_is_told(mlflow, tmp_path):
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    keys: dict[str, Any] = {"epochs": 1, "batch_size": 16, "progress": False, "method": "focal"}
    metacal.fit(torch.nn.Linear(4, 3), (x, y), run_dir=tmp_path / "run", log=["mlflow"], **keys)
    [of_run] = mlflow.runs.values()
    assert ("val/ece", 3) in [(tag, step) for tag, step, _ in of_run["metrics"]] and of_run["status"] == "FINISHED"
    assert not list((tmp_path / "run").glob("events*"))
    for log, run_dir, said in (
        (["mlflow"], None, r"log=\['mlflow'\] needs a run_dir"),
        ("mlflow", tmp_path / "b", "log must be a list of names, got the string 'mlflow'"),
        (["ml_flow"], tmp_path / "b", r"log must be one of tensorboard, wandb, mlflow, got 'ml_flow' \(did you mean"),
    ):
        with pytest.raises(InputError, match=said):
            metacal.fit(torch.nn.Linear(4, 3), (x, y), run_dir=run_dir, log=log, **keys)
    assert not (tmp_path / "b").exists()


def test_a_missing_package_is_told_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("metacal.errors.find_spec", lambda name: None if name in ("wandb", "mlflow") else ...)
    monkeypatch.chdir(tmp_path)
    said = "log=[wandb] needs wandb, which is not installed here: pip install 'metacal[wandb]'"
    for command in (["train", *SMALL], ["sweep", *SMALL, "seed=0,1"], ["study", "baselines"]):
        assert main([*command, "log=[wandb]"]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"pip install 'metacal\[mlflow\]'"):
        metacal.fit(torch.nn.Linear(4, 3), (torch.randn(9, 4), torch.arange(9) % 3), run_dir="run", log=["mlflow"])
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------ the packages themselves


def in_a_process(half: str, folder: Path, sink: str, environment: dict[str, str]) -> int:
    """Its exit status. The first half kills itself when it is done."""
    end = "os.kill(os.getpid(), signal.SIGKILL)" if half == "first_half" else ""
    code = f"import os, signal; from pathlib import Path; import test_sinks; test_sinks.{half}(Path({str(folder)!r}), "
    code += f"[{sink!r}]); {end}"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, **environment}, timeout=300
    ).returncode


def test_mlflow_itself_goes_on_after_a_kill(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow")
    environment = {"MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    assert in_a_process("first_half", tmp_path / "run", "mlflow", environment) == -signal.SIGKILL
    assert in_a_process("second_half", tmp_path / "run", "mlflow", environment) == 0
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = tracking.MlflowClient(environment["MLFLOW_TRACKING_URI"])
    run = client.get_run(json.loads((tmp_path / "run" / "sinks.json").read_text())["mlflow"])
    assert run.info.status == "FINISHED" and run.data.params["method"] == "focal" and run.data.params["seed"] == "5"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [*LOSSES.items()]
    assert run.data.metrics["val/ece"] == 0.5 and run.data.metrics["test/ece"] == 0.25
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.yaml", "summary.json"}


def test_wandb_itself_goes_on_after_a_kill(tmp_path):
    pytest.importorskip("wandb")
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    assert in_a_process("first_half", tmp_path / "run", "wandb", environment) == -signal.SIGKILL
    assert in_a_process("second_half", tmp_path / "run", "wandb", environment) == 0
    [offline] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    run_id = json.loads((tmp_path / "run" / "sinks.json").read_text())["wandb"]
    assert offline.name.endswith(run_id)
    losses, summary, configured, exits = {}, {}, set(), []
    for record in wandb_records(offline / f"run-{run_id}.wandb"):
        row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "train/loss" in row:
            losses[int(row["_step"])] = float(row["train/loss"])
        summary |= {item.key or "/".join(item.nested_key): item.value_json for item in record.summary.update}
        configured |= {item.key for item in record.config.update}
        exits += [record.exit.exit_code] if record.HasField("exit") else []
    assert losses == LOSSES and exits == [0]
    assert float(summary["test/ece"]) == 0.25 and {"method", "optimizer", "command"} <= configured


def wandb_records(file: Path) -> list[Any]:
    """W&B's file of an offline run: seven bytes, then a log of records in blocks of 32 KiB, as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(Record.FromString(part))
            part = b""
    return records
