"""Report sections of a scoring run: counts, failures and reasons, score distribution, and samples to view."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from truebatch.errors import TruebatchError
from truebatch.io.atomic_files import read_json
from truebatch.reports.gallery import Exhibit, make_card
from truebatch.reports.page import Section
from truebatch.reports.plots import histogram, histograms
from truebatch.reports.sections.headline import scoring_headline
from truebatch.reports.tables import Table, figures_table
from truebatch.scoring.backends.interface import ScoreRequest
from truebatch.scoring.inputs.read_samples import read_requests
from truebatch.scoring.store.content_key import sample_key
from truebatch.scoring.store.export import Row, Status, read_rows, read_status
from truebatch.scoring.store.input_index import load_list
from truebatch.scoring.store.manifest import CALL, MANIFEST, read_manifest
from truebatch.scoring.windows import window_folders

SHOWN, SHOWN_FAILED = 30, 9
"""Samples of a gallery: spread over the scores from lowest to highest, and failures."""
_MOST_SCORES = 100_000


@dataclass(frozen=True, slots=True)
class Scored:
    """A scoring run as it was read."""

    name: str
    run: Path
    status: Status
    scores: Sequence[float]
    """Those there are, in the order of the samples."""
    first_failed: Mapping[str, Row]
    """By stage/kind."""
    shown: Sequence[Row]
    """For the gallery."""


def is_scoring_run(folder: Path) -> bool:
    """True if a folder is a run of `truebatch score`."""
    return (folder / MANIFEST).is_file()


def stages_of(folder: Path) -> list[Path]:
    """The scoring runs in a folder: itself, or those below it, in the order in which they were begun."""
    if is_scoring_run(folder):
        return [folder]
    inner = [path.parent for path in folder.glob(f"*/{MANIFEST}")] if folder.is_dir() else []
    return sorted(inner, key=lambda path: ((path / MANIFEST).stat().st_mtime, path.name))


def read_scored(run: Path, name: str | None = None) -> Scored:
    """Everything a report needs of one run; of its rows no more than are shown are held."""
    scores, places, other, failed = array("d"), array("q"), array("q"), array("q")
    first_failed: dict[str, Row] = {}
    for row in read_rows(run):
        if row["status"] == "failed":
            first_failed.setdefault(f"{row['stage']}/{row['kind']}", row)
            failed.append(row["index"])
        elif row["score"] is not None:
            scores.append(row["score"])
            places.append(row["index"])
        elif row["status"] == "ok":
            other.append(row["index"])
    wanted = choose_shown(scores, places) or other[:SHOWN].tolist()
    wanted = [*failed[:SHOWN_FAILED], *wanted]
    rows = {row["index"]: row for row in read_rows(run) if row["index"] in set(wanted)} if wanted else {}
    return Scored(name or run.name, run, read_status(run), scores, first_failed, [rows[index] for index in wanted])


def scoring_sections(scored: Scored) -> Iterator[Section]:
    """Counts and settings, failures, scores, and a gallery; sections without data are omitted."""
    yield scoring_headline(scored.status)
    yield Section(title="Samples", tables=[status_table([scored])])
    if scored.status.failed:
        yield Section(title="Failures", tables=[failures_table(scored)])
    if scored.status.damaged:
        words = "records of the journal that are not what was written; their samples count as pending"
        yield Section(title="Damaged records", words=[words, *scored.status.damaged[:SHOWN]])
    if scored.scores:
        picture = partial(histogram, scored.scores[:_MOST_SCORES], title="Scores", x="score")
        yield Section(title="Scores", tables=[scores_table([scored])], drawn=[picture])
    yield from _gallery(scored)
    manifest = figures_table(dict(read_manifest(scored.run).fields), name="setting")
    yield Section(title="Made with", tables=[manifest], is_folded=True)


def compared_sections(several: Sequence[Scored]) -> Iterator[Section]:
    """Several runs side by side."""
    yield Section(title="Samples of the runs", tables=[status_table(several)])
    scores = {one.name: one.scores[:_MOST_SCORES] for one in several if one.scores}
    if scores:
        picture = partial(histograms, scores, title="Scores", x="score")
        yield Section(title="Scores of the runs", tables=[scores_table(several)], drawn=[picture])


def status_table(several: Sequence[Scored]) -> Table:
    """Progress of runs, one per row."""
    header = (
        "run",
        "samples",
        "done",
        "failed",
        "pending",
        "duplicates",
        "batches",
        "tokens",
        "seconds",
        "samples/s",
        "level",
    )
    return Table(header, tuple(_status_row(one) for one in several))


def _status_row(scored: Scored) -> tuple[str, ...]:
    found = scored.status
    numbers = (found.samples, found.ok, found.failed, found.pending, found.duplicates, found.batches, found.tokens_done)
    rate = f"{(found.ok + found.failed) / found.seconds:,.1f}" if found.seconds else "-"
    return (scored.name, *(f"{number:,}" for number in numbers), f"{found.seconds:,.1f}", rate, found.level)


def failures_table(scored: Scored) -> Table:
    """Failures by kind: how often, and the first sample of each."""
    first = scored.first_failed
    rows = [
        (kind, f"{number:,}", str(first[kind]["id"]), str(first[kind]["message"])[:200])
        for kind, number in sorted(scored.status.kinds.items(), key=lambda item: -item[1])
    ]
    return Table(("failure", "samples", "first", "message"), tuple(rows))


def scores_table(several: Sequence[Scored]) -> Table:
    """Score distribution, one run per row."""
    header = ("run", "scores", "mean", "std", "lowest", "median", "highest")
    return Table(header, tuple((one.name, *_spread(one.scores)) for one in several))


def _spread(scores: Sequence[float]) -> tuple[str, ...]:
    if not scores:
        return ("0", "-", "-", "-", "-", "-")
    std = f"{statistics.stdev(scores):.4g}" if len(scores) > 1 else "-"
    ends = (min(scores), statistics.median(scores), max(scores))
    return (f"{len(scores):,}", f"{statistics.fmean(scores):.4g}", std, *(f"{value:.4g}" for value in ends))


def _gallery(scored: Scored) -> Iterator[Section]:
    if not scored.shown:
        return
    asked, seen = _asked_of(scored.run, scored.shown), list[tuple[object, ...]]()
    cards = []
    for row in scored.shown:
        found = asked.get(row["index"])
        content = (row["score"], row["kind"], found and (found.content(), found.images))
        if found is None or content not in seen:  # those of equal content have one result, and are shown once
            cards.append(make_card(_exhibit(row, found)))
            seen.append(content)
    words = [
        f"{len(cards)} of {scored.status.samples:,} samples: failures first, then from the lowest score to the highest"
    ]
    yield Section(title="Gallery", words=words, cards=cards)


def choose_shown(scores: Sequence[float], places: Sequence[int]) -> list[int]:
    """The places of samples at equal distances from the lowest score to the highest."""
    order = sorted(range(len(scores)), key=lambda at: (scores[at], places[at]))
    if len(order) > SHOWN:
        order = [order[at * (len(order) - 1) // (SHOWN - 1)] for at in range(SHOWN)]
    return [places[at] for at in order]


def _exhibit(row: Row, asked: ScoreRequest | None) -> Exhibit:
    state = f"score {row['score']:.4g}" if row["score"] is not None else str(row["status"])
    words = [row["message"] and f"{row['stage']}/{row['kind']}: {row['message']}", _question(asked), _answer(row)]
    images = [(image, "") for image in asked.images] if asked is not None else []
    return Exhibit(title=f"{row['id']}: {state}", words=[line for line in words if line], images=images)


def _question(asked: ScoreRequest | None) -> str:
    if asked is None:
        return ""
    if not asked.messages:
        return asked.user
    content = asked.messages[-1]["content"]
    parts = [content] if isinstance(content, str) else [str(part.get("text", "")) for part in content]
    return " ".join(parts)


def _answer(row: Row) -> str:
    output = row["output"]
    if isinstance(output.get("text"), str):
        return f"answer: {output['text']}"
    found = output.get("probabilities")
    if isinstance(found, dict):
        return ", ".join(f"{name} {share:.3g}" for name, share in found.items())
    return ""


def _asked_of(run: Path, rows: Sequence[Row]) -> dict[int, ScoreRequest]:
    """The prompts of these samples from the run's data file, if it still has the same samples."""
    file = Path(str(read_json(run / CALL)["data"])) if (run / CALL).is_file() else None
    if file is None or not file.is_file():
        return {}
    wanted = {row["index"] for row in rows}
    keys = {x.index: x.key for folder in window_folders(run) for x in load_list(folder) if x.index in wanted}
    last = max(wanted)
    found = {}
    for index, asked in enumerate(islice(read_requests(file), last + 1)):
        if index in wanted and isinstance(asked, ScoreRequest) and _key(asked) == keys.get(index):
            found[index] = asked
    return found


def _key(asked: ScoreRequest) -> Any:
    try:
        return sample_key(asked.content(), asked.images)
    except TruebatchError:  # a picture that is gone: the sample is then shown without it
        return None
