"""Two finished runs beside each other: only where they judged the same pairs on the same scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from truebatch.errors import RunError
from truebatch.io.atomic_files import read_json
from truebatch_systems.vl_reward.eval.report import REPORT
from truebatch_systems.vl_reward.eval.statistics import Comparison, Row, compare

_NAMED = 5


def compare_runs(first: Path, second: Path) -> tuple[Comparison, str]:
    """The comparison by sample id, and a note where the judges are not the same; other benchmarks are refused."""
    one, two = _report(first), _report(second)
    if one.get("metric") != two.get("metric"):
        raise RunError(
            "the runs were judged on different scales",
            seen=f"{first}: {one.get('metric')}; {second}: {two.get('metric')}",
            do="compare runs with the same evaluation.metric",
        )
    _require_same_pairs(one, two, f"{first} and {second}")
    note = "" if one.get("judge") == two.get("judge") else f"the judges differ: {one.get('judge')}, {two.get('judge')}"
    return compare(_rows(one), _rows(two)), note


def _require_same_pairs(one: dict[str, Any], two: dict[str, Any], names: str) -> None:
    sources = [{row["id"]: row.get("source") for row in report["samples"]} for report in (one, two)]
    common = sources[0].keys() & sources[1].keys()
    other = sorted(name for name in common if sources[0][name] != sources[1][name])
    if not common or other:
        seen = f"other pictures under one id: {', '.join(other[:_NAMED])}" if other else "no id in common"
        raise RunError(
            f"{names} are runs over different benchmarks", seen=seen, do="compare runs over the same benchmark file"
        )


def _report(run: Path) -> dict[str, Any]:
    if not (run / REPORT).is_file():
        raise RunError(f"{run} has no {REPORT}", seen="not a finished run of this system", do="run it first")
    found = read_json(run / REPORT, max_bytes=1 << 30)
    if not isinstance(found, dict) or not isinstance(found.get("samples"), list):
        raise RunError(f"{run / REPORT} is no report of this system", seen="no samples in it", do="run it again")
    return found


def _rows(report: dict[str, Any]) -> list[Row]:
    return [Row(one["id"], one["category"], one["status"], one["score"]) for one in report["samples"]]
