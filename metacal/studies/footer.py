"""What the reports of studies say alike: which runs they are made of, by which versions, and over how many seeds."""

from __future__ import annotations

from collections.abc import Iterable

from metacal.report.tables import Cell, Column, Spread, Table
from metacal.runs.record import Run, load_runs
from metacal.studies.grid import Study

__all__ = ["NO_MARKS", "footer", "headline", "over_seeds", "published_cell", "versions_of"]

NO_MARKS = "No value is marked as the best: `metacal compare` tests which differences are more than chance."


def over_seeds(counts: Iterable[int]) -> str:
    """How the cells of a table are made, `counts` being the number of runs behind each row."""
    known = sorted(set(counts))
    if known == [1]:
        return "One run each"
    return f"Mean ± standard deviation over {' or '.join(map(str, known))} seeds"


def published_cell(value: float | list[float] | None) -> Cell:
    """A value of `published` in a study's file: a number, [mean, standard deviation], or none."""
    return Spread(*value) if isinstance(value, list) else value


def headline(study: Study) -> str:
    """The command of the study, how many runs it has, and their time: one line of Markdown."""
    minutes = sum(job.folder.read_summary()["time/train_s"] for job in study.jobs) / 60
    runs = f"{len(study.jobs)} run{'s' * (len(study.jobs) != 1)}"
    missing = f", {len(study.unfinished)} more not finished" if study.unfinished else ""
    return f"`{study.command}`: {runs}{missing}, {minutes:.0f} minutes of training in all."


def versions_of(study: Study) -> list[str]:
    """The versions that made its runs, each once."""
    summaries = ((job.folder.path, job.folder.read_summary()) for job in study.jobs)
    return list(dict.fromkeys(Run(path, {}, summary).versions for path, summary in summaries))


def footer(study: Study) -> str:
    """The headline, the versions, every run with its seed and folder, and what is left out: Markdown."""
    summaries = [job.folder.read_summary() for job in study.jobs]
    made_by = [Run(job.folder.path, {}, s).versions for job, s in zip(study.jobs, summaries)]
    versions = versions_of(study)
    lines = [headline(study), f"Versions: {versions[0]}."]
    columns = [Column("seed"), Column("minutes", digits=1), Column("folder")]
    if len(versions) > 1:
        columns.append(Column("versions"))
        lines[1] = "Versions: not the same for all runs; they are listed with them."
    rows = [
        (job.title, [s["seed"], s["time/train_s"] / 60, str(job.folder.path), *([said] if len(versions) > 1 else [])])
        for job, s, said in zip(study.jobs, summaries, made_by)
    ]
    lines.append(Table(columns, rows, "run", "Where the numbers come from").render("markdown"))
    if study.unfinished:
        _, left_out = load_runs([job.folder.path for job in study.unfinished])
        reason = {left.path: left.reason for left in left_out}
        for job in study.unfinished:
            path = job.folder.path
            lines.append(f"Left out: {job.title}: {path}: {reason.get(path, 'failed; its log.txt says why')}.")
    return "\n\n".join(lines) + "\n"
