"""The results of `verify`, saved in the run folder and shown in its report.

runs/<name>/verification.json: what `truebatch verify --json` prints
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.atomic_files import read_json, write_json
from truebatch.reports.page import Section
from truebatch.reports.tables import Table

VERIFICATION = "verification.json"
_MOST_BYTES = 1 << 24
_HEADLINES = {
    "equal": "EQUAL: every sample gets what it gets alone, in all {number} arrangements.",
    "broken": "BROKEN: a sample's result depends on its micro-batch.",
    "unproven": "UNPROVEN: {why}",
}

_BITS_HEADLINES = {
    "equal": "EQUAL TO THE LAST BIT: loss and gradients of a step, under all {number} cuts.",
    "broken": "BROKEN: the cut of a step changes bits of its loss or gradient.",
    "unproven": "UNPROVEN: {why}",
}


def keep_verification(run: Path, values: Mapping[str, Any]) -> Path:
    """Save `VerifyReport.as_dict()` in a folder for its report, replacing an earlier one."""
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / VERIFICATION, dict(values))
    return run / VERIFICATION


def proof_sections(run: Path) -> Iterator[Section]:
    """The kept verification: the verdict, every arrangement, causes and notes."""
    path = run / VERIFICATION
    if not path.is_file():
        return
    try:
        yield _section(read_json(path, max_bytes=_MOST_BYTES))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} does not hold a verification",
            seen=f"{type(error).__name__}: {error}",
            do="verify again, or remove the file; the report does not need it",
        ) from error


def arrangements_table(values: Mapping[str, Any]) -> Table:
    """Every arrangement with its verdict, the largest difference of each part, and the tolerance."""
    parts = list(dict.fromkeys(d["part"] for one in values["arrangements"] for d in one["differences"]))
    header = ("arrangement", "verdict", *(str(part) for part in parts), "allowed", "moved samples")
    return Table(header, tuple(_row(one, parts) for one in values["arrangements"]))


def _row(one: Mapping[str, Any], parts: list[str]) -> tuple[str, ...]:
    by_part = {d["part"]: d for d in one["differences"]}
    limits = [float(d["limit"]) for d in one["differences"]]
    moved = ", ".join(str(sample) for sample in one["moved_samples"][:12])
    verdict = f"raised {str(one['error']).splitlines()[0][:90]}" if one["error"] else str(one["verdict"])
    cells = [_number(by_part[part]["value"]) if part in by_part else "" for part in parts]
    return (str(one["name"]), verdict, *cells, f"{min(limits):.0e}" if limits else "", moved)


def _number(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, int | float) else str(value)


def _section(values: Mapping[str, Any]) -> Section:
    known = _BITS_HEADLINES if values.get("exactness") == "bits" else _HEADLINES
    headline = known[values["verdict"]].format(number=len(values["arrangements"]), why=values["unproven"])
    words = [headline]
    if values["first_module"]:
        module = values["first_module"]
        words.append(f"first difference: {module['name']} ({module['kind']}), sample {module['sample']}")
    for cause in values["causes"]:
        words += [f"likely cause: {cause['words']}", f"do: {cause['fix']}"]
    words += [f"note: {note}" for note in values["notes"]]
    return Section(title="Verification", words=words, tables=[arrangements_table(values)])
