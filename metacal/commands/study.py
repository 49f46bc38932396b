"""`metacal study`: run a study's missing runs and write its report."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from metacal.commands.sweep import take_count

__all__ = ["study_command"]

USAGE = """usage: metacal study NAME [variant=NAME] [jobs=N] [threads=N] [key=value ...]

Runs what a study's grid still misses (interrupted runs go on, finished ones are kept) and writes its report.
  variant=fast    a version named in the study's file
  jobs=2          runs at a time, the cores shared out among them
  threads=1       of each run, instead
  key=value       added to the command of every run, such as data=npz data.path=cifar10.npz
"""


def study_command(argv: Sequence[str]) -> int:
    """Run `metacal study ARGV`; returns the exit status."""
    from metacal.studies.grid import load_study, study_names

    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE + "\nstudies: " + ", ".join(study_names()))
        return 0
    name, *words = words
    n_jobs, threads = take_count(words, "jobs"), take_count(words, "threads")
    variant = None
    for word in [w for w in words if w.startswith("variant=")]:
        variant = word.partition("=")[2]
        words.remove(word)

    from metacal.studies.runner import require_all_done, run_missing

    study = load_study(name, variant or None, words)
    require_all_done(run_missing(study.jobs, n_jobs or 1, threads))
    report = importlib.import_module(f"metacal.studies.{study.report}").report
    for path in report(study):
        print(path)
    return 0
