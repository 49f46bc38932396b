"""`metacal study`: run a study's missing runs and write its report."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from metacal.commands.words import take_count
from metacal.errors import InputError, require

if TYPE_CHECKING:
    from metacal.studies.grid import Study

__all__ = ["study_command"]

USAGE = """usage: metacal study NAME|FILE.yaml [variant=NAME] [jobs=N] [threads=N] [key=value ...]
       metacal study list
       metacal study redraw NUMBERS.json [FOLDER]

Runs what a study's grid still misses (interrupted runs go on, finished ones are kept) and writes its report.
A run that fails does not stop the others: the report is then made of those that are finished, and the status is 1.
  FILE.yaml       a study of your own; docs/training.md has the format
  variant=fast    a version named in the study's file
  jobs=2          runs at a time, the cores shared out among them
  threads=1       of each run, instead
  key=value       added to the command of every run, such as data=npz data.path=cifar10.npz
  list            what each study shows, on what, and how long that took
  redraw          tables, pictures and page from the numbers of a report, without its runs; beside them, or in FOLDER
"""


def study_command(argv: Sequence[str]) -> int:
    """Run `metacal study ARGV`; returns the exit status."""
    from metacal.studies.grid import load_study, study_names

    words = list(argv)
    if not words or not {"-h", "--help"}.isdisjoint(words):
        print(USAGE + "\nstudies: " + ", ".join(study_names()))
        return 0
    name, *words = words
    if name == "list":
        return _list(words)
    if name == "redraw":
        return _redraw(words)
    n_jobs, threads = take_count(words, "jobs"), take_count(words, "threads")
    variant = None
    for word in [w for w in words if w.startswith("variant=")]:
        variant = word.partition("=")[2]
        words.remove(word)

    from metacal.studies.runner import require_all_done, run_missing

    study = load_study(name, variant or None, words)
    if study.report == "measured":
        from metacal.studies.measured import check

        check(study)
    states = run_missing(study.jobs, n_jobs or 1, threads)
    done = [s.job for s in states if s.state == "done"]
    if done:
        _report(replace(study, jobs=done, unfinished=[s.job for s in states if s.state != "done"]))
    require_all_done(states)
    return 0


def _list(words: Sequence[str]) -> int:
    """Every study with what its file says of it."""
    require(not words, f"metacal study list takes no more words, got {' '.join(words)}")

    from metacal.config.compose import config_dir
    from metacal.configs import comment_of
    from metacal.studies.grid import study_names
    from metacal.studies.spec import read_spec

    for name in study_names():
        file = config_dir() / "study" / f"{name}.yaml"
        spec = read_spec(file)
        lines = [comment_of(file), *(f"{key}: {spec[key]}" for key in ("setting", "takes") if key in spec)]
        lines += [f"variants: {', '.join(spec['variants'])}"] if spec.get("variants") else []
        print(name)
        for line in lines:
            print(textwrap.fill(line, 116, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False))
    return 0


def _redraw(words: Sequence[str]) -> int:
    require(1 <= len(words) <= 2, f"metacal study redraw takes NUMBERS.json and maybe a folder, got {len(words)} words")

    from metacal.studies.pages import redraw

    for path in redraw(*words):
        print(path)
    return 0


def _report(study: Study) -> None:
    """Write the report and print the paths. What makes one of unfinished grids impossible must not hide the reason."""
    try:
        for path in importlib.import_module(f"metacal.studies.{study.report}").report(study):
            print(path)
    except InputError as error:
        if not study.unfinished:
            raise
        print(f"metacal: no report: {error}", file=sys.stderr)
