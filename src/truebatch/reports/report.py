"""`report`: one HTML file about one run or several side by side; or its tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from truebatch.errors import ConfigError, RunError
from truebatch.io.atomic_files import write_text
from truebatch.language.console import one_line
from truebatch.language.translate import in_words
from truebatch.progress import stage
from truebatch.reports.page import Section, render_page
from truebatch.reports.sections.run import is_run, log_sections, read_log, run_sections
from truebatch.reports.sections.scores import compared_sections, read_scored, stages_of
from truebatch.reports.tables import print_table

REPORT = "report.html"


@stage("drawing the report")
def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of runs and return its path: `report.html` in the run, or `out`.

    Several runs get their figures and curves side by side first, then a section each.
    """
    names, sections = check_names(runs), list(report_sections(runs))
    target = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, render_page(", ".join(names), sections))
    return target


def print_report(runs: Sequence[Path], out: TextIO) -> None:
    """The words and tables of the same report, without its pictures."""
    check_names(runs)
    for section in report_sections(runs):
        if not (section.words or section.tables or section.cards):
            continue
        out.write(f"\n== {one_line(in_words(section.title))}\n")
        for line in section.words:
            out.write(f"{one_line(in_words(line))}\n")
        for table in section.tables:
            out.write("\n")
            print_table(table, file=out)
        for card in section.cards:
            out.write("\n" + "\n  ".join(one_line(line) for line in (card.title, *card.words)) + "\n")


def report_sections(runs: Sequence[Path]) -> Iterator[Section]:
    """All parts of a report, in reading order."""
    names = check_names(runs)
    if len(runs) == 1:
        yield from run_sections(runs[0])
        return
    yield from log_sections([read_log(run, name) for run, name in zip(runs, names, strict=True)])
    stages = [(name, stage) for run, name in zip(runs, names, strict=True) for stage in stages_of(run)]
    if stages:
        scored = [read_scored(stage, name if stage in runs else f"{name}/{stage.name}") for name, stage in stages]
        yield from compared_sections(scored)
    for run, name in zip(runs, names, strict=True):
        for section in run_sections(run):
            yield replace(section, title=f"{name}: {section.title}")


def check_names(runs: Sequence[Path]) -> list[str]:
    """The names of the folders, or their whole paths if two have the same name; raises for a folder that is not a
    run."""
    if not runs:
        raise ConfigError("a report needs a run", seen="no folder", do="name the folder of a run")
    for run in runs:
        if not is_run(run):
            raise RunError(
                f"{run} is not a run",
                seen="no settings, log, status, scores, fit or verification in it",
                do="give the folder of a run",
            )
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]
