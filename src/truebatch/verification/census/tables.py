"""The rows of a census as a summary for the terminal and as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from truebatch.language.columns import align

Row = Mapping[str, Any]

TITLES = {
    "causal_lm": "Causal language models",
    "masked_lm": "Encoders (masked language models)",
    "seq2seq": "Encoder-decoders",
    "vision_language": "Vision-language models",
    "speech_ctc": "Speech recognition (CTC)",
    "speech_seq2seq": "Speech encoder-decoders",
    "audio_classification": "Audio classification",
    "audio_language": "Audio-language models",
    "image_and_text": "Images and texts compared (CLIP and its kin)",
    "time_series": "Time series",
}
HEADS_OF_TEXT = ("causal_lm", "masked_lm", "seq2seq", "vision_language")
VERDICTS = ("equal", "fell back", "refused", "not proven", "wrong and not noticed", "killed", "crashed", "failed")
UNEXAMINED = ("not built", "not fed")
"""No model of this size, or one that needs more than a sample of its head has."""
TABLE = "segment table"
"""What is said of a row that is packed through our attention and nothing else."""
PACKED, MASKED, PADDED, GROUPED, LEFT = "packed", "packed under a dense mask", "padded", "grouped", "left padded"


def _is(row: Row, layout: str, verdict: str) -> bool:
    return bool(row.get("layouts", {}).get(layout, {}).get("verdict") == verdict)


def _plain(row: Row, layout: str) -> str:
    return str(row.get("plain", {}).get(layout, {}).get("verdict", ""))


def _only_second(row: Row) -> list[str]:
    """Layouts that `verify` called equal and the second check did not, beside the one that is used."""
    cells = {name: cell for name, cell in row.get("layouts", {}).items() if name != row["chosen"]}
    return [name for name, cell in cells.items() if cell.get("check", {}).get("verdict") == "different"]


def _ends_as(verdict: str) -> Callable[[Row], bool]:
    return lambda row: row["verdict"] == verdict


COUNTED: Mapping[str, Callable[[Row], bool]] = {
    "architectures": lambda row: True,
    "built tiny and examined": lambda row: row["verdict"] not in UNEXAMINED,
    "packed and equal": lambda row: _is(row, PACKED, "equal"),
    "packed and equal, every attention by the segment table": lambda row: (
        _is(row, PACKED, "equal") and row.get("how") == TABLE
    ),
    "packed and equal, some modules called by groups of samples": lambda row: (
        _is(row, PACKED, "equal") and row.get("how", TABLE) != TABLE
    ),
    "packed and equal, only under a dense mask": lambda row: (
        _is(row, MASKED, "equal") and not _is(row, PACKED, "equal")
    ),
    "right padded and equal": lambda row: _is(row, PADDED, "equal"),
    "left padded and equal": lambda row: _is(row, LEFT, "equal"),
    "equal in groups of one length": lambda row: _is(row, GROUPED, "equal"),
    **{f"verdict: {verdict}": _ends_as(verdict) for verdict in VERDICTS},
    "a layout that is not used differs in the second check only": lambda row: bool(_only_second(row)),
    "plain transformers: packed and silently wrong": lambda row: _plain(row, PACKED) == "different",
    "plain transformers: packed and raises": lambda row: _plain(row, PACKED) == "raised",
    "plain transformers: left padded and silently wrong": lambda row: _plain(row, LEFT) == "different",
}
"""What the summary counts, in words."""

OF_EVERY_LAYOUT = (
    "packed and equal, only under a dense mask",
    "right padded and equal",
    "left padded and equal",
    "equal in groups of one length",
    "a layout that is not used differs in the second check only",
)
"""Counts that only a census of every layout has."""

LEGEND = """\
How to read it. Every architecture is built tiny from its configuration with random weights; nothing is downloaded.
`verify` puts each layout to the proof against one sample at a time: per-sample outputs, loss and the gradient of a
whole step.

* **equal**: the same, within 1e-5 in fp32 (half precision: at most twice as far from fp32 as one by one is).
* **refused**: truebatch or the model raises and says why; nothing wrong comes out.
* **different**: it runs and gives something else; `verify` says so, and `choose_layout` never takes it.

*Used* is what `choose_layout` takes, the fastest layout that is equal. The verdict of a row is **equal** (packed is
used), **fell back** (another layout is used), **refused** (none is), **not proven** (a leak would have been hard to
see), or **wrong and not noticed**: the layout that is used is not equal after all, says a second check. That check is
written apart from `verify`, on other samples with other lengths: each sample alone through the plain model, its own
loss, cell by cell and over the whole gradient. It is put to every layout that `verify` calls equal, and where the two
disagree the table shows the stricter one.

*How* packed rows are made: *table*, attention reads where each sample begins and ends; *kernels*, so do the kernels or
convolutions of other modules; *groups*, some modules are called by groups of samples, each in a row of its own; *cut
masks*, the same with masks cut out of those of whole rows.

*Speed* is what a step (forward and backward) of 32 samples with heavy-tailed lengths costs padded, eight samples in
random order at a time, divided by what it costs in one packed row: processor time of the tiny model on one core, where
most of the time is spent between operations. It shows what packing costs an architecture, not what a GPU gains.

*Leak* is how far a sample moves when a neighbour is laid before it as if both were one, in tolerances; below 100 a row
is not proven (bf16, whose tolerance is wide: below 10, and the second check looks at typical cells, because rounding
sends some to other experts). *Plain* is what transformers does by itself: packed rows with restarting `position_ids`,
left padding with a mask, wrong by more than 1e-3. The reason for every cell is in the JSON file."""

LEGEND_OF_MEDIA = """\
Recordings, images with texts and series are given as their processors pad them, with the masks the model takes, in the
first form in which it runs (`fed` in the JSON file). They are not laid end to end, so *padded* is the fastest layout; *leak* is
how far a sample moves when half of its own recording is another. Gradients are those of a random projection of the
results, and the second check is made in evaluation mode."""


def wrong_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that must not exist: wrong, and nobody noticed."""
    return [row for row in rows if row["verdict"] == "wrong and not noticed"]


def summary_counts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Head -> what is counted -> how many."""
    heads = [head for head in TITLES if any(row["head"] == head for row in rows)]
    return {
        head: {words: sum(bool(holds(row)) for row in rows if row["head"] == head) for words, holds in COUNTED.items()}
        for head in heads
    }


def summary_lines(facts: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """The summary as an aligned table of text, with the rows that are wrong below it."""
    counts = summary_counts(rows)
    lines = [
        f"{_today(facts['command'])}: transformers {facts['transformers']}, torch {facts['torch']}, {facts['hardware']}"
    ]
    lines += align(
        [
            ["", *counts],
            *([words, *(_figure(rows, head, words, counts) for head in counts)] for words in _shown(counts, facts)),
        ]
    )
    lines += [f"WRONG: {row['head']} {row['model_type']}: {row['why']}" for row in wrong_rows(rows)]
    return lines


def markdown(facts: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The page: counts first, then a table for each kind of head, then what could not be built."""
    counts = summary_counts(rows)
    parts = [
        "# Census of Hugging Face architectures",
        f"Made by `{_today(facts['command'])}` on {facts['date']}: transformers {facts['transformers']}, "
        f"torch {facts['torch']}, "
        f"truebatch {facts['truebatch']}, {facts['python']}, {facts['hardware']}, {facts['dtype']}. Do not edit.",
        *(["Only the layout that is used was examined, and those tried before it."] if "layouts" in facts else []),
        markdown_table(
            ["", *(TITLES[head] for head in counts)],
            [[w, *(_figure(rows, h, w, counts) for h in counts)] for w in _shown(counts, facts)],
        ),
        LEGEND,
        *([LEGEND_OF_MEDIA] if any(head not in HEADS_OF_TEXT for head in counts) else []),
        *(part for head in counts for part in _head_part(head, rows)),
        *_unexamined_part(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _shown(counts: Mapping[str, Mapping[str, int]], facts: Mapping[str, Any]) -> list[str]:
    """Counts that are zero everywhere are left out, except the one that matters; a quick census has few layouts."""
    kept = "verdict: wrong and not noticed"
    shown = [words for words in COUNTED if any(count[words] for count in counts.values()) or words == kept]
    return [words for words in shown if "layouts" not in facts or words not in OF_EVERY_LAYOUT]


def _figure(rows: Sequence[Row], head: str, words: str, counts: Mapping[str, Mapping[str, int]]) -> str:
    """A count, or a dash where nothing was measured."""
    is_measured = not words.startswith("plain") or any(row.get("plain") for row in rows if row["head"] == head)
    return str(counts[head][words]) if is_measured else "-"


def _head_part(head: str, rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row["head"] == head and row["verdict"] not in UNEXAMINED]
    has_plain = any(row.get("plain") for row in own)
    header = [
        "architecture",
        "verdict",
        "used",
        "packed",
        "how",
        "speed",
        "dense mask",
        "right",
        "left",
        "grouped",
        "leak",
    ]
    header += ["plain packed", "plain left"] if has_plain else []
    body = [[*_cells(row), *([_plain(row, PACKED), _plain(row, LEFT)] if has_plain else [])] for row in own]
    reasons = Counter(_short(row["why"]) for row in own if row["why"])
    named = {why: [row["model_type"] for row in own if _short(row["why"]) == why] for why in reasons}
    why = [f"* {text}: {', '.join(names)}" for text, names in sorted(named.items(), key=lambda item: -len(item[1]))]
    explained = ["Why the others are not packed, or not used:", "\n".join(why)] if why else []
    explained = [*_how_part(own), *explained]
    second = [f"* {row['model_type']}: {', '.join(_seen_by_second(row))}" for row in own if _only_second(row)]
    late = (
        ["Layouts that are not used, where only the second check sees a difference:", "\n".join(second)]
        if second
        else []
    )
    return [f"## {TITLES[head]}", markdown_table(header, body), *explained, *late]


def _how_part(rows: Sequence[Row]) -> list[str]:
    """How packed rows are made where the segment table alone is not enough."""
    ways = [(row["how"], row["model_type"]) for row in rows if row.get("how", TABLE) != TABLE]
    named = {how: [name for one, name in ways if one == how] for how, _ in ways}
    lines = [
        f"* {how}: {', '.join(names)}"
        for how, names in sorted(named.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return (
        ["How rows are packed where the segment table alone does not keep samples apart:", "\n".join(lines)]
        if lines
        else []
    )


def _seen_by_second(row: Row) -> list[str]:
    checks = {name: row["layouts"][name]["check"] for name in _only_second(row)}
    return [f"{name} (outputs {check['outputs']}, gradient {check['gradient']})" for name, check in checks.items()]


def _unexamined_part(rows: Sequence[Row]) -> list[str]:
    left_out = [row for row in rows if row["verdict"] in UNEXAMINED]
    if not left_out:
        return []
    body = [[row["model_type"], TITLES[row["head"]], row["verdict"], _short(row["why"])] for row in left_out]
    return ["## Not examined", markdown_table(["architecture", "as", "verdict", "why"], body)]


def _cells(row: Row) -> list[str]:
    layouts = row.get("layouts", {})
    shown = [layouts.get(name, {}).get("verdict", "") for name in (PACKED, MASKED, PADDED, LEFT, GROUPED)]
    without_images = row["head"] == "vision_language" and row.get("fed") == "text"
    leak = row.get("leak", {}).get("planted")
    name = row["model_type"] + (" (text alone)" if without_images else "")
    return [
        name,
        row["verdict"],
        row.get("chosen") or "",
        shown[0],
        _how(row),
        _speed(row),
        *shown[1:],
        "" if leak is None else f"{float(leak):,.0f}x",
    ]


def _how(row: Row) -> str:
    """In a word or two; the modules are named below the table."""
    way, _, modules = row.get("how", "").partition("; ")
    kinds = [
        *(["table"] if way == TABLE else ["cut masks"] if "masks" in way else []),
        *(["kernels"] if "in one row with a table" in modules else []),
        *(["groups"] if " by groups of " in modules else []),
    ]
    return " + ".join(kinds) or way


def _speed(row: Row) -> str:
    times = row.get("speed", {}).get("times")
    return "" if times is None else f"{times:.1f}x"


def _short(why: str) -> str:
    return why.replace("|", "/").removeprefix("raises ")[:160]


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table as Markdown writes it; cells are put in as they are."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _today(command: str) -> str:
    """The command of a kept census as it is typed today: it was one of the benchmarks before."""
    return command.replace("truebatch bench census", "truebatch census")
