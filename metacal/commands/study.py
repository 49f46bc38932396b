"""`metacal study`: run a study's missing runs and write its report."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from metacal.errors import InputError

__all__ = ["study_command"]

USAGE = """usage: metacal study NAME [variant=NAME] [jobs=N] [key=value ...]

Runs what a study's grid still misses (interrupted runs go on, finished ones are kept) and writes its report.
  variant=fast    a version named in the study's file
  jobs=2          runs at a time, the cores shared out among them
  key=value       added to the command of every run, such as data=npz data.path=cifar10.npz
"""


def study_command(argv: Sequence[str]) -> int:
    """Run `metacal study ARGV`; returns the exit status."""
    from metacal.studies.grid import load_study, run_missing, study_names

    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE + "\nstudies: " + ", ".join(study_names()))
        return 0
    name, *words = words
    options = {"variant": "", "jobs": "1"}
    for key in options:
        for word in [w for w in words if w.startswith(f"{key}=")]:
            options[key] = word.partition("=")[2]
            words.remove(word)
    if not options["jobs"].isdigit() or int(options["jobs"]) < 1:
        raise InputError(f"jobs must be an integer >= 1, got {options['jobs']!r}")
    study = load_study(name, options["variant"] or None, words)
    run_missing(study.jobs, int(options["jobs"]))
    report = importlib.import_module(f"metacal.studies.{study.report}").report
    for path in report(study):
        print(path)
    return 0
