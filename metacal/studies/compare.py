"""A study's runs as `metacal compare` shows them: a table with tests, every run named, and a page with figures."""

from __future__ import annotations

from pathlib import Path

from metacal.jsonio import to_json
from metacal.report.html import comparison_page, figures_of
from metacal.report.judge import judge_groups
from metacal.report.tables import methods_table
from metacal.report.verdict import verdict
from metacal.runs.record import group_runs, load_runs
from metacal.studies.footer import headline
from metacal.studies.grid import Study
from metacal.studies.methods import MEASURES, Rows, val_nll, with_choices

__all__ = ["report"]


def report(study: Study) -> list[Path]:
    """Write the table (Markdown), the page (HTML), its figures (PNG) and the numbers (JSON); returns the paths."""
    study.folder.mkdir(parents=True, exist_ok=True)
    runs, left_out = load_runs([job.folder.path for job in (*study.jobs, *study.unfinished)])
    result = judge_groups(group_runs(runs), sort="ece", left_out=left_out)
    said = f"Verdict: {verdict(result)}" if len(result.groups) > 1 else ""
    print(result.table("none").render("text"), said, sep="\n\n", end="\n\n")
    text = [result.table("none").render("markdown"), *filter(None, [said]), result.runs_table().render("markdown")]
    text += [_chosen(study), headline(study) + "\n"] if study.choices else [headline(study) + "\n"]
    paths = [study.folder / name for name in ("table.md", "report.html", "numbers.json")]
    paths[0].write_text("\n\n".join(text))
    paths[1].write_text(comparison_page(result, title=study.name, command=study.command))
    paths[2].write_text(to_json({"command": study.command, **result.to_dict()}))
    for name, _, figure in figures_of(result):
        paths.append(study.folder / f"{name.lower().replace(' ', '_')}.png")
        figure.savefig(paths[-1], dpi=130)
    return paths


def _chosen(study: Study) -> str:
    """The rows that take for each seed one run of several groups: the others' tests do not hold for what is chosen."""
    rows: Rows = {}
    for job in study.jobs:
        rows.setdefault(job.label, []).append(job.folder.read_summary() | {"val/nll": val_nll(job)})
    chosen = {label: runs for label, runs in with_choices(rows, study.choices).items() if label in study.choices}
    return methods_table(chosen, MEASURES, title="Chosen for each seed on validation").render("markdown")
