"""What a run folder holds, as parts of a report: each file that is there becomes a section, none is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.reports.findings import kept_findings
from truebatch.reports.page import Section
from truebatch.reports.pictures import curves
from truebatch.reports.tables import Table
from truebatch.training.durable import read_json
from truebatch.training.runs import CONFIG, METRICS, read_status
from truebatch.yamlfiles import read_yaml

_MOST_POINTS = 1500
"""Of one curve: more cannot be seen, and a long run would make a large file."""
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Log:
    """`metrics.jsonl` of a run: the records of its steps."""

    name: str
    records: Sequence[Mapping[str, Any]]

    def line(self, key: str, x: str = "step") -> tuple[list[float], list[float]]:
        """The values of one column over another, where both are numbers; thinned to what a picture can show."""
        both = [(r[x], r[key]) for r in self.records if _is_number(r.get(x)) and _is_number(r.get(key))]
        kept = both[:: max(1, len(both) // _MOST_POINTS)]
        return [float(a) for a, _ in kept], [float(b) for _, b in kept]


def read_log(run: Path, name: str | None = None) -> Log:
    """The records of a run; a line that is no JSON object raises `DataError` with its number."""
    records = []
    path = run / METRICS
    if path.is_file():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                records += (
                    [_record(path, number, line)] if line.endswith(b"\n") else []
                )  # a torn last line is no record
    return Log(name or run.name, records)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged in line {number}", seen=str(error), do="bring it back from a copy"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged in line {number}", seen=f"a {type(found).__name__}", do="one object a line")
    return found


def run_sections(run: Path) -> Iterator[Section]:
    """Every part of one run's report, in reading order."""
    yield from _overview(run)
    yield from log_sections([read_log(run)])
    yield from _fit(run)
    yield from _evaluation(run)
    for name, finding in kept_findings(run):
        if isinstance(finding, Table):
            yield Section(title=finding.title or name, tables=[Table(finding.header, finding.rows)])
        else:
            yield Section(title=name.lstrip("0123456789-").replace("_", " ").replace("-", " "), found=[finding])


def log_sections(logs: Sequence[Log]) -> Iterator[Section]:
    """Curves of one run or of several on top of each other."""
    logs = [log for log in logs if log.records]
    if not logs:
        return
    terms = sorted({key for log in logs for r in log.records for key in r if key == "loss" or key.startswith("loss/")})
    shown = [key for key in terms if key == "loss" or len(terms) > 2]
    drawn = [_curve(logs, key, "loss") for key in shown]
    held = sorted({key for log in logs for r in log.records for key in r if key.startswith("validation")})
    drawn += [_curve(logs, key, key) for key in held]
    yield Section(title="Loss", drawn=[svg for svg in drawn if svg])
    rest = ["tokens_per_second", "fill", "memory_gib", *_named(logs, "grad_norm/"), *_named(logs, "learning_rate/")]
    yield Section(title="Speed, fill and memory", drawn=[svg for key in rest if (svg := _curve(logs, key, key))])


def _named(logs: Sequence[Log], start: str) -> list[str]:
    return sorted({key for log in logs for r in log.records for key in r if key.startswith(start)})


def _curve(logs: Sequence[Log], key: str, y: str) -> str:
    lines = {log.name: line for log in logs if (line := log.line(key))[0]}
    return curves(lines, title=key, x="step", y=y) if lines else ""


def _overview(run: Path) -> Iterator[Section]:
    status = read_status(run)
    rows = [
        (name, str(status[name]))
        for name in ("state", "step", "exit_code", "message", "time")
        if status.get(name) not in (None, "")
    ]
    tables = [Table(("run", run.name), tuple(rows))]
    if (run / CONFIG).is_file():
        values = read_yaml(run / CONFIG).values
        tables.append(Table(("setting", "value"), tuple(flat_rows(values)), "Settings"))
    yield Section(title="Run", tables=tables)


def flat_rows(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """A nested mapping as rows of dotted names and texts."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_rows(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)


def _fit(run: Path) -> Iterator[Section]:
    if not (run / "fit.json").is_file():
        return
    fit = read_json(run / "fit.json", max_bytes=_MOST_BYTES)
    points = sorted(fit["points"], key=lambda point: point["cells"])
    cells = [float(point["cells"]) for point in points]
    measured = [point["num_bytes"] / 2**30 for point in points]
    fitted = [_predicted(fit, point) / 2**30 for point in points]
    lines = {"measured": (cells, measured), "fitted": (cells, fitted)}
    words = [f"the fit is off by at most {fit['uncertainty']:.1%} on its own points"]
    picture = curves(lines, title="Memory a forward and backward pass adds", x="cells", y="GiB")
    yield Section(title="Memory fit", words=words, drawn=[picture])


def _predicted(fit: Mapping[str, Any], point: Mapping[str, Any]) -> float:
    grown = sum(fit[f"per_{name}"] * point[f"{name}s"] for name in ("cell", "pair", "sample"))
    return float(max(fit.get("floor", 0.0), fit["fixed"] + grown))


def _evaluation(run: Path) -> Iterator[Section]:
    folder = run / "evaluation"
    if not (folder / "figures.json").is_file():
        return
    figures = read_json(folder / "figures.json", max_bytes=_MOST_BYTES)
    pictures = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.svg"))]
    yield Section(title="Evaluation", tables=[Table(("figure", "value"), tuple(flat_rows(figures)))], found=pictures)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
