"""What the table of a grid shows, from metrics files as runs write them."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from metacal.studies.grid import grid_jobs
from metacal.studies.progress import Board, RunState, caption, choose_rows, progress_table


def states(tmp_path, n=1, epochs=4):
    seeds = ",".join(str(i) for i in range(n))
    jobs = grid_jobs([f"runs={tmp_path}", "method=focal", f"epochs={epochs}", f"seed={seeds}"])
    for job in jobs:
        job.folder.path.mkdir(parents=True)
    return [RunState(job) for job in jobs]


def write(s, *lines, mode="a", tail=""):
    with open(s.job.folder.metrics, mode) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + tail)


def train(step, epoch):
    return {"step": step, "epoch": epoch, "split": "train", "loss": 1.0}


def val(step, epoch, nll=0.5):
    return {"step": step, "epoch": epoch, "split": "val", "nll": nll, "accuracy": 0.75, "ece": 0.125}


def text(*parts, width=120):
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def test_a_run_is_read_line_by_line(tmp_path):
    (s,) = states(tmp_path)
    s.read(0.0)  # no file yet
    assert (s.epoch, s.values, s.fraction) == (0, {}, 0.0)
    s.start(0.0)
    write(s, train(5, 0))
    s.read(1.0)
    assert (s.epoch, s.fraction, s.left(1.0)) == (0, 0.0, None)
    write(s, val(10, 1), tail='{"step": 15, "epo')  # a line that is still being written
    s.read(10.0)
    assert (s.epoch, s.fraction) == (1, 0.25)
    assert s.values == {"nll": 0.5, "accuracy": 0.75, "ece": 0.125}
    write(s, tail='ch": 1, "split": "train"}\n')
    s.read(14.0)
    assert s.fraction == 15 / 40
    # An eighth of the run in 4 s, and five eighths to go; a second later, a second less.
    assert s.left(14.0) == pytest.approx(20.0)
    assert s.left(15.0) == pytest.approx(19.0)


def test_a_resumed_run_is_read_again_from_where_it_was_cut(tmp_path):
    (s,) = states(tmp_path)
    write(s, val(10, 1), val(20, 2, nll=0.4))
    s.read(0.0)
    assert (s.epoch, s.values["nll"]) == (2, 0.4)
    write(s, val(10, 1), mode="w")
    s.read(1.0)
    assert (s.epoch, s.values["nll"], s.fraction) == (1, 0.5, 0.25)


def test_damaged_lines_and_nulls_are_passed_over(tmp_path):
    (s,) = states(tmp_path)
    write(s, val(10, 1), tail="{nonsense\n[1]\n")
    write(s, val(20, 2) | {"ece": None})
    s.read(0.0)
    assert s.epoch == 2 and set(s.values) == {"nll", "accuracy"}


def test_table_and_caption(tmp_path):
    running, done, failed, _ = all_states = states(tmp_path, 4)
    for s, ending in ((running, None), (done, "done"), (failed, "failed")):
        s.start(0.0)
        if ending:
            write(s, val(40, 4))
            s.read(59.0)
            s.end(ending, 0 if ending == "done" else 1, 60.0)
    write(running, val(10, 1, nll=0.1234))
    running.read(30.0)
    write(running, val(20, 2, nll=0.1234))
    running.read(60.0)
    lines = text(progress_table(all_states, 60.0)).splitlines()
    heads = ("run", "state", "epoch", "val NLL", "val Accuracy %", "val ECE %", "minutes", "left")
    assert lines[0].split() == " ".join(heads).split()
    assert lines[1].split() == ["seed=0", "running", "2/4", "0.1234", "75.00", "12.50", "1.0", "1.0"]
    assert lines[2].split() == ["seed=1", "done", "4/4", "0.5000", "75.00", "12.50", "1.0"]
    assert lines[4].split() == ["seed=3", "waiting"]
    # The running one takes 60 s more and the waiting one the mean of 60 and 120 s: 150 s on two slots.
    words = caption(all_states, 2, 60.0, 0.0)
    assert words == "4 runs: 1 waiting, 1 running, 1 done, 1 failed; 1.0 min so far, about 1 min left"


def test_a_low_terminal_shows_what_matters(tmp_path):
    all_states = states(tmp_path, 8)
    for i, s in enumerate(all_states[:5]):
        s.start(0.0)
        if i != 3:
            s.end("failed" if i == 1 else "done", 0, float(i))
    seeds = [s.job.config.seed for s in choose_rows(all_states, 4)]
    assert seeds == [1, 2, 3, 4]  # failed 1, the running 3, and the latest done, 4 and 2
    assert choose_rows(all_states, 8) == all_states
    assert len(choose_rows(all_states, 0)) == 1
    assert len(text(progress_table(all_states, 9.0, room=4)).splitlines()) == 5


def test_board_writes_plain_lines_without_a_terminal(tmp_path):
    all_states = states(tmp_path, 2)
    console = Console(file=io.StringIO(), width=120)
    with Board(all_states, 1, console) as board:
        all_states[0].start(0.0)
        board.event(all_states[0])
        write(all_states[0], val(40, 4))
        all_states[0].read(60.0)
        all_states[0].end("failed", 3, 120.0)
        board.event(all_states[0])
    lines = console.file.getvalue().splitlines()
    assert lines[1] == "seed=0: running"
    assert lines[2] == "seed=0: failed (status 3) after 2.0 min  val: NLL 0.5000  Accuracy 75.00 %  ECE 12.50 %"
    assert lines[3].startswith("run ") and lines[-1].startswith("2 runs: 1 waiting, 1 failed")
    assert "\x1b" not in console.file.getvalue()


def test_board_is_live_on_a_terminal(tmp_path):
    all_states = states(tmp_path, 30)
    console = Console(file=io.StringIO(), width=100, height=12, force_terminal=True)
    with Board(all_states, 1, console) as board:
        all_states[0].start(0.0)
        board._shown = 0.0
        board.refresh()
        live = console.file.getvalue()
    assert "running" in live and "29 waiting" in live
    assert live.count("seed=") <= 12  # within the terminal's height
    assert console.file.getvalue().count("seed=29") == 1  # the last table has them all
