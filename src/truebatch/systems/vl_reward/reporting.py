"""The report of a benchmark as JSON, Markdown and a gallery, from the two journals alone: it can be made again any time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truebatch.reports.page import Section, render_page
from truebatch.reports.tables import Table
from truebatch.scoring.exporting import read_rows, read_status
from truebatch.systems.vl_reward.benchmark import Pair, decode_image
from truebatch.systems.vl_reward.stages import EDITS, PICTURES, SCORES
from truebatch.systems.vl_reward.statistics import Row, summarise
from truebatch.training.durable import write_json, write_text

REPORT, MARKDOWN, GALLERY = "report.json", "report.md", "gallery.html"
_SHOWN = 60
"""Pairs of a gallery at most: the file is to be sent."""
_SIDE = 220


def write_reports(pairs: Sequence[Pair], rows: Sequence[Row], run: Path) -> tuple[dict[str, Any], list[Path]]:
    """Write all three; the summary and the files. Equal journals give equal JSON and Markdown."""
    scores = {row["id"]: row for row in read_rows(run / SCORES)}
    summary = {**summarise(rows), "std_definition": "of a sample, n - 1", "samples": _details(rows, scores)}
    write_json(run / REPORT, {**summary, "speed": _speed(run)})
    write_text(run / MARKDOWN, markdown(summary))
    write_text(run / GALLERY, gallery(pairs, rows, run))
    return summary, [run / name for name in (REPORT, MARKDOWN, GALLERY)]


def markdown(summary: dict[str, Any]) -> str:
    """The figures as a Markdown page."""
    lines = [
        "# Edit-then-judge benchmark",
        "",
        "| category | samples | valid | mean | 95 % interval | std | median | min | max |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    lines += [_line(name, found) for name, found in summary["categories"].items()]
    lines.append(_line("all", summary["overall"]))
    lines += [
        "",
        f"Micro mean {_number(summary['micro_mean'])}, macro mean {_number(summary['macro_mean'])}; "
        f"std: {summary['std_definition']}.",
        f"Best category: {summary['best_category'] or '-'}; worst: {summary['worst_category'] or '-'}.",
        f"Failures: {summary['failure_rate']:.1%} of the samples; they are in no mean. By status: "
        + ", ".join(f"{name} {number}" for name, number in summary["overall"]["statuses"].items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def gallery(pairs: Sequence[Pair], rows: Sequence[Row], run: Path) -> str:
    """Source, edit, score and raw answer of the first pairs, failures first, as one HTML page."""
    by_id = {pair.id: pair for pair in pairs}
    answers = {row["id"]: row for row in read_rows(run / SCORES)}
    edits = {row["id"]: row for row in read_rows(run / EDITS)}
    order = sorted(rows, key=lambda row: row.status == "ok")
    sections = [Section(title="Figures", tables=[_table(summarise(rows))])]
    for row in order[:_SHOWN]:
        pair, answer, edit = by_id[row.id], answers.get(row.id), edits[row.id]
        said = str((answer or {}).get("output", {}).get("text", "")) or str((answer or edit).get("message", ""))
        words = [
            pair.instruction,
            f"status: {row.status}" + (f", score: {row.score:g}" if row.score is not None else ""),
        ]
        images = [("image/png", _small(decode_image(pair)), "before")] if edit["kind"] != "source_image" else []
        if edit["status"] == "ok":
            images.append(("image/png", _small(_opened(run / PICTURES / edit["output"]["file"])), "after"))
        words += [f"answer: {said}"] if said else []
        sections.append(Section(title=f"{row.category}: {row.id}", words=words, images=images))
    if len(order) > _SHOWN:
        sections.append(Section(title="More", words=[f"{len(order) - _SHOWN} further pairs are in {REPORT}"]))
    return render_page("Gallery", sections)


def _details(rows: Sequence[Row], scores: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "id": row.id, "category": row.category, "status": row.status, "score": row.score,
            "answer": scores[row.id]["output"].get("text") if row.id in scores else None,
        }
        for row in rows
    ]  # fmt: skip


def _speed(run: Path) -> dict[str, Any]:
    """Measured, from the journals: seconds spent in batches."""
    found = {}
    for name in (EDITS, SCORES):
        status = read_status(run / name)
        done = status.ok + status.failed
        rate = done / status.seconds if status.seconds else None
        found[name] = {"samples": done, "seconds": status.seconds, "samples_per_second": rate}
    return found


def _table(summary: dict[str, Any]) -> Table:
    names = ("samples", "valid", "mean", "std", "median", "least", "most")
    groups = {**summary["categories"], "all": summary["overall"]}
    return Table(("category", *names), tuple((g, *(_number(f[n]) for n in names)) for g, f in groups.items()))


def _line(name: str, found: dict[str, Any]) -> str:
    interval = " to ".join(_number(end) for end in found["interval"]) if found["interval"] else "-"
    cells = [name, str(found["samples"]), str(found["valid"]), _number(found["mean"]), interval]
    cells += [_number(found[key]) for key in ("std", "median", "least", "most")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def _opened(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as opened:
        return opened.convert("RGB")


def _small(image: Any) -> bytes:
    held = io.BytesIO()
    image.thumbnail((_SIDE, _SIDE))
    image.save(held, "PNG", optimize=True)
    return held.getvalue()
