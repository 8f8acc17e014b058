"""`report`: one HTML file about one run, or about several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from truebatch.errors import ConfigError, RunError
from truebatch.reports.page import Section, render_page
from truebatch.reports.runsections import log_sections, read_log, run_sections
from truebatch.training.durable import write_text
from truebatch.training.runs import CONFIG, METRICS, STATUS

REPORT = "report.html"


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of runs and return its path: `report.html` in the run, or `out`.

    Several runs get their curves on top of each other first, then a part each.
    """
    if not runs:
        raise ConfigError("a report needs a run", seen="no folder", do="name the folder of a run")
    for run in runs:
        if not any((run / name).is_file() for name in (CONFIG, METRICS, STATUS)):
            raise RunError(
                f"{run} is not a run", seen="no settings, log or status in it", do="give the folder of a run"
            )
    names = _names(runs)
    sections: list[Section] = []
    if len(runs) > 1:
        sections += log_sections([read_log(run, name) for run, name in zip(runs, names, strict=True)])
    for run, name in zip(runs, names, strict=True):
        parts = run_sections(run)
        sections += [_titled(part, name) for part in parts] if len(runs) > 1 else list(parts)
    target = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, render_page(", ".join(names), sections))
    return target


def _names(runs: Sequence[Path]) -> list[str]:
    """The names of the folders, or their whole paths where two are called the same."""
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


def _titled(section: Section, name: str) -> Section:
    return Section(
        title=f"{name}: {section.title}", words=section.words, tables=section.tables, drawn=section.drawn,
        found=section.found, images=section.images,
    )  # fmt: skip
