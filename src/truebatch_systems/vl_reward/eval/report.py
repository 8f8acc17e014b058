"""The report of a benchmark as JSON, Markdown and a gallery, from the two journals alone: it can be made again any time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from truebatch.errors import RunError, TruebatchError
from truebatch.io.atomic_files import write_json, write_text
from truebatch.language.console import one_line
from truebatch.reports.artifacts import keep_gallery, keep_table
from truebatch.reports.gallery import Exhibit, make_card
from truebatch.reports.page import Section, render_page
from truebatch.reports.tables import Table
from truebatch.scoring.store.export import read_status
from truebatch.scoring.store.manifest import read_manifest
from truebatch_systems.vl_reward.data.dataset import EditPair, source_hash
from truebatch_systems.vl_reward.eval.statistics import Row, summarise
from truebatch_systems.vl_reward.stages import EDITS, PICTURES, SCORES, has_begun, source_file, stage_rows

REPORT, MARKDOWN, GALLERY = "report.json", "report.md", "gallery.html"
AGGREGATION = {
    "number": "one number",
    "yes_no": "yes is 1, no is 0",
    "pair": "the smaller of two numbers",
}
"""How an answer becomes a score, by the kind of the metric."""
_SHOWN = 60
"""Pairs of a gallery at most: the file is to be sent."""


def write_reports(pairs: Sequence[EditPair], rows: Sequence[Row], run: Path) -> tuple[dict[str, Any], list[Path]]:
    """Write all three; the summary and the files. Equal journals give equal JSON and Markdown.

    What `truebatch report` shows of the run is kept beside them.
    """
    require_begun(run)
    summary = {
        **summarise(rows), "std_definition": "of a sample, n - 1", **_made_with(run), "samples": _details(pairs, rows, run)
    }  # fmt: skip
    write_json(run / REPORT, {**summary, "speed": _speed(run)})
    write_text(run / MARKDOWN, markdown(summary))
    write_text(run / GALLERY, gallery(pairs, rows, run))
    keep_for_report(pairs, rows, run)
    return summary, [run / name for name in (REPORT, MARKDOWN, GALLERY)]


def require_begun(run: Path) -> None:
    """Refuse a folder in which nothing was edited."""
    if not has_begun(run / EDITS):
        raise RunError(f"{run} is no run of this benchmark", seen=f"no {EDITS} in it", do="run it first")


def markdown(summary: dict[str, Any]) -> str:
    """The figures as a Markdown page."""
    lines = [
        "# Edit-then-judge benchmark",
        "",
        "| " + " | ".join(_header()) + " |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    lines += [_line(name, found) for name, found in summary["categories"].items()]
    lines.append(_line("all", summary["overall"]))
    lines += [
        "",
        f"Micro mean {_number(summary['micro_mean'])}, macro mean {_number(summary['macro_mean'])}; "
        f"std: {summary['std_definition']}.",
        f"The metric is {summary['metric'].get('kind', '-')}: {summary['metric'].get('aggregation', 'nothing was judged')}.",
        f"Best category: {summary['best_category'] or '-'}; worst: {summary['worst_category'] or '-'}.",
        f"Failures: {summary['failure_rate']:.1%} of the samples; they are in no mean. By status: "
        + ", ".join(f"{name} {number}" for name, number in summary["overall"]["statuses"].items())
        + ".",
        "",
    ]
    return "\n".join(lines)


def gallery(pairs: Sequence[EditPair], rows: Sequence[Row], run: Path) -> str:
    """Source, edit, score and raw answer of some pairs, failures and low scores first, as one HTML page."""
    exhibits = _exhibits(pairs, rows, run)
    more = [f"{len(rows) - len(exhibits)} further pairs are in {REPORT}"] if len(rows) > len(exhibits) else []
    figures = Section(title="Figures", tables=[_table(summarise(rows))])
    return render_page(
        "Gallery", [figures, Section(title="Pairs", words=more, cards=[make_card(one) for one in exhibits])]
    )


def keep_for_report(pairs: Sequence[EditPair], rows: Sequence[Row], run: Path) -> None:
    """What `truebatch report` shows of this run beside its two stages: figures by category, and the pairs themselves."""
    keep_table(run, "50-scores-by-category", replace(_table(summarise(rows)), title="Scores by category"))
    exhibits = [
        replace(one, images=[(path.relative_to(run), caption) for path, caption in one.images])
        for one in _exhibits(pairs, rows, run)
    ]
    keep_gallery(run, "60-gallery", exhibits, title="Gallery")


def _exhibits(pairs: Sequence[EditPair], rows: Sequence[Row], run: Path) -> list[Exhibit]:
    by_id = {pair.id: pair for pair in pairs}
    edits, answers = stage_rows(run / EDITS), stage_rows(run / SCORES)
    order = sorted(rows, key=lambda row: (row.status == "ok", row.score or 0.0))[:_SHOWN]
    return [
        _exhibit(row, by_id[row.id], edits.get(row.id, {}), answers.get(row.id) or edits.get(row.id, {}), run)
        for row in order
    ]


def _exhibit(row: Row, pair: EditPair, edit: Mapping[str, Any], last: Mapping[str, Any], run: Path) -> Exhibit:
    """One pair: before, after, score, and what was said of it."""
    said = str(last.get("output", {}).get("text", ""))
    score = f", score: {row.score:g}" if row.score is not None else ""
    words = [pair.instruction, f"status: {row.status}{score}"]
    words += [f"answer: {said}"] if said else []
    words += [f"why: {last['message']}"] if row.score is None and last.get("message") else []
    images = []
    try:
        images.append((source_file(pair, run), "before"))
    except (TruebatchError, OSError) as error:  # a page without this picture is better than no page
        words.append(f"a picture cannot be shown: {' '.join(str(error).split())[:200]}")
    if edit.get("status") == "ok":
        images.append((run / PICTURES / edit["output"]["file"], "after"))
    return Exhibit(title=f"{row.category}: {row.id}", words=words, images=images)


def _details(pairs: Sequence[EditPair], rows: Sequence[Row], run: Path) -> list[dict[str, Any]]:
    edits, scores = stage_rows(run / EDITS), stage_rows(run / SCORES)
    found = []
    for pair, row in zip(pairs, rows, strict=True):
        score = scores.get(row.id, {})
        last = edits.get(row.id, {}) if row.status == "edit_failed" else score
        found.append(
            {
                "id": row.id, "category": row.category, "status": row.status, "score": row.score,
                "answer": score.get("output", {}).get("text"), "kind": last.get("kind", ""),
                "message": last.get("message", ""), "source": source_hash(pair)[:16],
            }
        )  # fmt: skip
    return found


def _made_with(run: Path) -> dict[str, Any]:
    """The metric with its rule, the judge and the editor, as the journals' manifests tell them."""
    editor = dict(read_manifest(run / EDITS).fields)
    judge = dict(read_manifest(run / SCORES).fields) if has_begun(run / SCORES) else {}
    scale = judge.get("scale", {})
    metric = {**scale, "aggregation": AGGREGATION[scale["kind"]]} if scale else {}
    names = ("backend", "model", "weights", "dtype", "readout")
    return {
        "metric": {name: value for name, value in metric.items() if name != "pair"},
        "judge": {name: judge[name] for name in names if name in judge},
        "editor": {name: value for name, value in editor.items() if name != "sameness"},
    }


def _speed(run: Path) -> dict[str, Any]:
    """Measured, from the journals: seconds spent in batches."""
    found = {}
    for name in (EDITS, SCORES):
        if not has_begun(run / name):
            continue
        status = read_status(run / name)
        done = status.ok + status.failed
        rate = done / status.seconds if status.seconds else None
        found[name] = {"samples": done, "seconds": status.seconds, "samples_per_second": rate}
    return found


def _table(summary: dict[str, Any]) -> Table:
    groups = {**summary["categories"], "all": summary["overall"]}
    return Table(_header(), tuple((group, *_figures(found)) for group, found in groups.items()))


def _line(name: str, found: dict[str, Any]) -> str:
    cells = [name, *_figures(found)]
    return "| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _header() -> tuple[str, ...]:
    header = ("category", "samples", "valid", "mean", "95 % interval", "std", "median", "min", "max")
    return header  # noqa: RET504 (by this name the words are found that need a translation)


def _figures(found: dict[str, Any]) -> list[str]:
    """The cells of a group behind its name, the same in every report."""
    interval = " to ".join(_number(end) for end in found["interval"]) if found["interval"] else "-"
    cells = [str(found["samples"]), str(found["valid"]), _number(found["mean"]), interval]
    return cells + [_number(found[key]) for key in ("std", "median", "least", "most")]


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"
