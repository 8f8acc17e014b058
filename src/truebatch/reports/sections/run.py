"""Sections of a report from a run folder: every file found becomes a section, none is required."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from truebatch.config.yaml_files import read_yaml
from truebatch.errors import DataError
from truebatch.io.atomic_files import corrupt_file_errors, read_json
from truebatch.io.text_encoding import open_file, read_start
from truebatch.reports.artifacts import FOLDER, Gallery, kept_findings
from truebatch.reports.gallery import make_card
from truebatch.reports.page import Drawing, Section
from truebatch.reports.plots import curves
from truebatch.reports.sections.fit import fit_sections
from truebatch.reports.sections.headline import headline_section
from truebatch.reports.sections.lengths import length_sections
from truebatch.reports.sections.scores import read_scored, scoring_sections, stages_of
from truebatch.reports.sections.verification import VERIFICATION, proof_sections
from truebatch.reports.tables import Table, figures_table
from truebatch.training.memory.cost_model import FIT
from truebatch.training.run_dir.run_dir import CONFIG, METRICS, STATUS, read_status

_MOST_POINTS = 1500
"""Points per curve: more cannot be seen, and a long run would make a large file."""
_TOLD_POINTS = 2
"""So many are told in words, more are drawn."""
_MOST_BYTES = 1 << 28
_LONGEST_LINE = 1 << 22


@dataclass(frozen=True, slots=True)
class RunLog:
    """`metrics.jsonl` of a run: the records of its steps."""

    name: str
    records: Sequence[Mapping[str, Any]]

    def line(self, key: str, x: str = "step") -> tuple[list[float], list[float]]:
        """The values of one column over another, where both are numbers; thinned to what a picture can show."""
        both = [(r[x], r[key]) for r in self.records if _is_number(r.get(x)) and _is_number(r.get(key))]
        kept = both[:: max(1, len(both) // _MOST_POINTS)]
        return [float(a) for a, _ in kept], [float(b) for _, b in kept]

    def numbers(self, key: str) -> list[float]:
        """All values of one column that are numbers."""
        return [float(r[key]) for r in self.records if _is_number(r.get(key))]


def is_run(folder: Path) -> bool:
    """True if a folder has anything a report could show."""
    files = (CONFIG, METRICS, STATUS, FIT, VERIFICATION)
    return any((folder / name).is_file() for name in files) or (folder / FOLDER).is_dir() or bool(stages_of(folder))


def read_log(run: Path, name: str | None = None) -> RunLog:
    """The records of a run; a line that is not a JSON object raises `DataError` with its number."""
    records = []
    path = run / METRICS
    if path.is_file():
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
                if len(line) == _LONGEST_LINE:
                    raise DataError(
                        f"{path} is damaged in line {number}",
                        seen=f"over {_LONGEST_LINE:,} bytes without an end",
                        do="restore the file from a backup",
                    )
                records += (
                    [_record(path, number, line)] if line.endswith(b"\n") else []
                )  # a torn last line is no record
    return RunLog(name or run.name, records)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged in line {number}", seen=str(error), do="restore it from a backup"
        ) from error
    if not isinstance(found, dict):
        raise DataError(
            f"{path} is damaged in line {number}", seen=f"a {type(found).__name__}", do="write one object per line"
        )
    return found


def run_sections(run: Path) -> Iterator[Section]:
    """Every part of one run's report, in reading order."""
    settings = read_yaml(run / CONFIG).values if (run / CONFIG).is_file() else {}
    log = read_log(run)
    yield from headline_section(run, log)
    yield from log_sections([log])
    for stage in stages_of(run):
        for section in scoring_sections(read_scored(stage)):
            if stage == run:
                yield section
            elif not section.cards:  # what a stage was about, the run itself knows how to show
                yield replace(section, title=f"{stage.name}: {section.title}")
    yield from proof_sections(run)
    yield from length_sections(run, settings)
    yield from fit_sections(run)
    yield from _evaluation(run)
    yield from _findings(run)
    if settings:
        yield Section(title="Settings", tables=[figures_table(settings, name="setting")], is_folded=True)
    yield from _end(run)


def log_sections(logs: Sequence[RunLog]) -> Iterator[Section]:
    """Curves of one run or of several on top of each other."""
    logs = [log for log in logs if log.records]
    if not logs:
        return
    terms = sorted({key for log in logs for r in log.records for key in r if key == "loss" or key.startswith("loss/")})
    shown = [key for key in terms if key == "loss" or len(terms) > 2]
    drawn = [_curve(logs, key, "loss") for key in shown]
    held = _named(logs, "validation")
    if len(held) == 2:  # the sum, and its only term
        held.remove(next(key for key in held if key != "validation_loss"))
    drawn += [_curve(logs, key, key) for key in held]
    words = _few(logs, [*shown, *held])
    yield Section(title="Loss", words=words, tables=[runs_table(logs)], drawn=[draw for draw in drawn if draw])
    rest = ["tokens_per_second", "fill", "memory_gib", *_named(logs, "grad_norm/"), *_named(logs, "learning_rate/")]
    flat = [key for key in rest if is_flat(logs, key)]
    pictures = [draw for key in rest if key not in flat and (draw := _curve(logs, key, key))]
    words = [f"{key}: {logs[0].numbers(key)[0]:.6g} at every step" for key in flat]
    words += _few(logs, [key for key in rest if key not in flat])
    if pictures or words:
        yield Section(title="Speed, fill and memory", words=words, drawn=pictures)


def is_flat(logs: Sequence[RunLog], key: str) -> bool:
    """One value at every step of every run: a sentence says it, a picture would be empty."""
    values = {value for log in logs for value in log.numbers(key)}
    return len(values) == 1 and all(math.isfinite(value) for value in values)


def runs_table(logs: Sequence[RunLog]) -> Table:
    """Start and end of every run, one per row."""
    held = [key for key in ("validation_loss",) if any(log.numbers(key) for log in logs)]
    header = ("run", "steps", "first loss", "last loss", *(f"lowest {key}" for key in held), "tokens/s", "fill")
    return Table(header, tuple(_run_row(log, held) for log in logs))


def _run_row(log: RunLog, held: Sequence[str]) -> tuple[str, ...]:
    losses, steps = log.numbers("loss"), log.numbers("step")
    seconds, tokens = sum(log.numbers("seconds")), sum(log.numbers("tokens"))
    fills = log.numbers("fill")
    return (
        log.name,
        f"{steps[-1]:,.0f}" if steps else "-",
        *((f"{losses[0]:.4f}", f"{losses[-1]:.4f}") if losses else ("-", "-")),
        *(f"{min(values):.4f}" if (values := log.numbers(key)) else "-" for key in held),
        f"{tokens / seconds:,.0f}" if seconds else "-",
        f"{sum(fills) / len(fills):.1%}" if fills else "-",
    )


def _named(logs: Sequence[RunLog], start: str) -> list[str]:
    return sorted({key for log in logs for r in log.records for key in r if key.startswith(start)})


def _curve(logs: Sequence[RunLog], key: str, y: str) -> Drawing | None:
    lines = {log.name: line for log in logs if (line := log.line(key))[0]}
    if not any(len(xs) > _TOLD_POINTS for xs, _ in lines.values()):
        return None
    return partial(curves, lines, title=key, x="step", y=y, smooth=key.startswith("loss"))


def _few(logs: Sequence[RunLog], keys: Sequence[str]) -> list[str]:
    """One or two values of a column are a sentence: a picture of them would be empty."""
    said = []
    for key in keys:
        lines = [(log.name, *log.line(key)) for log in logs]
        if max(len(xs) for _, xs, _ in lines) > _TOLD_POINTS:
            continue
        for name, xs, ys in lines:
            values = ", ".join(f"{y:.6g} at step {x:,.0f}" for x, y in zip(xs, ys, strict=True))
            said += [f"{key}: {values}" if len(logs) == 1 else f"{name}, {key}: {values}"] if values else []
    return said


def _end(run: Path) -> Iterator[Section]:
    """How the run stands or ended, with its exit code."""
    if (run / STATUS).is_file():
        status = read_status(run)
        names = ("state", "step", "num_steps", "starts", "exit_code", "message", "time")
        rows = [(name, str(status[name])) for name in names if status.get(name) not in (None, "")]
        yield Section(title="Run", tables=[Table(("run", run.resolve().name), tuple(rows))])


def _evaluation(run: Path) -> Iterator[Section]:
    folder = run / "evaluation"
    if not (folder / "figures.json").is_file():
        return
    with corrupt_file_errors(folder / "figures.json", do="evaluate again: `truebatch evaluate RUN`"):
        figures = dict(read_json(folder / "figures.json", max_bytes=_MOST_BYTES))
    pictures = [read_start(path, max_bytes=1 << 22) for path in sorted(folder.glob("*.svg"))]
    yield Section(title="Evaluation", tables=[figures_table(figures)], found=pictures)


def _findings(run: Path) -> Iterator[Section]:
    for title, group in groupby(kept_findings(run), key=_finding_title):
        found: list[str] = []
        for _, finding in group:
            if isinstance(finding, Table):
                yield Section(title=title, tables=[Table(finding.header, finding.rows)])
            elif isinstance(finding, Gallery):
                yield Section(title=title, cards=[make_card(one) for one in finding.exhibits])
            else:
                found.append(finding)
        if found:
            yield Section(title=title, found=found)


def _finding_title(named: tuple[str, Table | Gallery | str]) -> str:
    """Its own title, else its name in words; pictures of a series, told apart by a number at the end, share one."""
    name, finding = named
    if not isinstance(finding, str) and finding.title:
        return finding.title
    return re.sub(r"^\d+-|-\d+$", "", name).replace("_", " ").replace("-", " ")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
