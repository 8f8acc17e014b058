"""`docs/benchmarks.md`, and beside it `docs/benchmarks/`, from the kept results and from nothing else.

    python -m benchmarks tables --out docs/benchmarks.md

docs/results/*.json -> command, date and hardware of each -> its tables -> a page for each topic, and a summary
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command_line import present_command
from benchmarks.pages.claims import note_tables
from benchmarks.pages.figures import figure_rows
from benchmarks.pages.topics import FOLDER, REST, TOPICS, first_figures, link, linked, title_of, topic_of
from truebatch.errors import DataError
from truebatch.verification.census.tables import markdown_table

RESULTS, PAGE = Path("docs/results"), Path("docs/benchmarks.md")
NOTES = "notes.md"
FIGURE = re.compile(r"`(\w+)\.json: ([^`]+)` = ([\d.,e+-]*\d)")
"""A figure in prose, with the place in a kept result that it is from."""
MADE_BY = "python -m benchmarks tables"
NOT_RECORDED = "not recorded"
ORIGIN = ("command", "date", "hardware")
"""What a kept result must say about itself."""
MACHINE = ("machine", "cpus", "cores", "threads", "memory_gib", "accelerator")
VERSIONS = ("torch", "transformers")
UNSHOWN = {
    *ORIGIN,
    *VERSIONS,
    "versions",
    "config",
    "settings",
    "facts",
    "python",
    "numpy",
    "dtype",
    "threads",
    "target",
}
UNSHOWN |= {"rounds", "fit", "curves", "note_claims", "texts", "texts collected", "work", "choice", "what", "seeds"}
UNSHOWN_OF_ROWS = {"rounds", "fit", "command", "date"}
REMARKS = {
    "vl_reward_editing": "The editor waits instead of computing: the sharing out of work is measured, not a model.",
    "census_cuda_fp32": "What is counted as wrong and not noticed here was measured again, in census_cuda_fp32_qwen3_5, "
    "when fp64 meant fp64 also where a model writes fp32 into its code.",
}
"""What a reader of one result must know about another."""
NOTED = ("left_out", "problems")
MOST_NOTES, LONGEST_NOTE = 6, 140
HEAD = """\
# Benchmarks

Made by `{made_by}` from the files in `{folder}`; do not edit. All rows are behind the links, each
table under the command that makes it again, the day and the hardware. What was not measured is not here. Ratios come
first; times are of the machine that is named. [lab.md](lab.md) says what was tried and why, [census.md](census.md) is
the census in full."""


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The kept results by name, in the order of their names."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(
            "there are no kept results", seen=f"no .json file in {folder}", do="run this in the root of the repository"
        )
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def missing_origin(result: Mapping[str, Any]) -> list[str]:
    """Which of command, date and hardware a result does not say."""
    about = {**result, **result.get("facts", {})}
    return [name for name in ORIGIN if not about.get(name)]


def pages(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every page by its place beside the summary: the summary, and the tables of the results by topic."""
    topics: dict[str, list[str]] = {}
    for name, result in results.items():
        parts = [f"## {name}", *_origin(name, result), *_tables(name, result)]
        topics.setdefault(topic_of(name), []).extend([*parts, *([REMARKS[name]] if name in REMARKS else [])])
    ordered = sorted(topics, key=[*TOPICS, REST].index)
    made = {f"{FOLDER}/{topic}.md": _topic_page(topic, topics[topic]) for topic in ordered}
    return {PAGE.name: _summary(results, ordered), **made}


def _topic_page(topic: str, parts: Sequence[str]) -> str:
    head = f"# {title_of(topic)}: measured\n\nMade by `{MADE_BY}`; do not edit. [All benchmarks](../{PAGE.name})."
    return "\n\n".join([head, *parts]) + "\n"


def _summary(results: Mapping[str, Mapping[str, Any]], topics: Sequence[str]) -> str:
    """What stands first, the notes' tables with the measured columns, and where every figure is."""
    parts = [HEAD.format(made_by=MADE_BY, folder=RESULTS)]
    first = [[what, f"{figure_text(value)} {unit}", link(name)] for what, value, unit, name in first_figures(results)]
    parts += ["## In short", markdown_table(["what", "figure", "rows"], first)] if first else []
    parts.append("## The tables of the notes")
    for claim, header, rows in note_tables(results):
        parts += [f"### {claim.title}", markdown_table(header, rows), *([claim.remark] if claim.remark else [])]
    rows = [[what, command, linked(kept, results.keys())] for what, command, kept in figure_rows(results)]
    parts += ["## Which command makes which figure", markdown_table(["figure", "command", "kept"], rows)]
    listed = "\n".join(f"{FOLDER}/{topic}" for topic in topics)
    parts.append(f"```{{toctree}}\n:caption: All rows\n:maxdepth: 1\n\n{listed}\n```")
    return "\n\n".join(parts) + "\n"


def _origin(name: str, result: Mapping[str, Any]) -> Iterable[str]:
    """The command on lines of its own; day, machine and versions."""
    about = {**result, **result.get("facts", {})}
    command = _repeatable(present_command(about["command"]), f"{RESULTS}/{name}.json") if about.get("command") else ""
    versions = {**about.get("versions", {}), **{key: about[key] for key in VERSIONS if key in about}}
    yield f"`{command}`" if command else f"command {NOT_RECORDED}"
    said = [about.get("date") or f"date {NOT_RECORDED}", _machine(about.get("hardware")) or f"hardware {NOT_RECORDED}"]
    yield "; ".join([*said, *(f"{key} {value}" for key, value in versions.items())])


def _repeatable(command: str, file: str) -> str:
    """The command as it was given, with the file it wrote to at its place in the repository."""
    words = shlex.split(command)
    for option in ("--out", "--json"):
        if option in words[:-1]:
            words[words.index(option) + 1] = file
    return shlex.join(words)


def _machine(hardware: Any) -> str:
    if isinstance(hardware, Mapping):
        return ", ".join(f"{key} {hardware[key]}" for key in MACHINE if key in hardware)
    return str(hardware or "")


def _tables(name: str, result: Mapping[str, Any]) -> Iterable[str]:
    if name.startswith("census"):
        yield _census(result["rows"])
        return
    single = {key: one for key, one in result.items() if key not in UNSHOWN and key != "seconds" and _is_single(one)}
    single = {key: one for key, one in single.items() if _was_measured(key, [single])}
    if single:
        yield _named("figure", single)
    for key, value in sorted(result.items(), key=lambda item: item[0] != "ratios"):
        if key in UNSHOWN or key in NOTED or _is_single(value):
            continue
        yield from _part(key, value)
    yield from (text for key in NOTED if (text := _notes(key, result.get(key) or [])))


def _part(key: str, value: Any) -> Iterable[str]:
    """A list of rows, rows by name, or values by name as a table; anything else is left in the file."""
    if not value:
        return
    if isinstance(value, Mapping) and any(_is_single(one) for one in value.values()):
        yield _named(_words(key), {name: one for name, one in value.items() if _is_single(one)})
    elif isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values()):
        rows = [{_words(key): name, **one} for name, one in value.items() if one]
        is_even = len({tuple(row)[1:] for row in rows}) == 1
        if not rows:
            return
        yield _rows(rows if is_even else _turned(_words(key), {name: _flat(one) for name, one in value.items()}))
    elif isinstance(value, Sequence) and value and all(isinstance(one, Mapping) for one in value):
        yield f"{_words(key)}:"
        yield _rows(value)


def _turned(head: str, columns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A column for each name and a row for each figure: names that have different figures."""
    figures = dict.fromkeys(figure for one in columns.values() for figure in one)
    return [{head: _words(figure), **{name: one.get(figure) for name, one in columns.items()}} for figure in figures]


def _named(head: str, values: Mapping[str, Any]) -> str:
    return markdown_table([head, "value"], [[_words(key), figure_text(value)] for key, value in values.items()])


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    flat = [_flat(row) for row in rows]
    names = [name for name in dict.fromkeys(name for row in flat for name in row) if _was_measured(name, flat)]
    body = [[figure_text(row.get(name)) for name in names] for row in flat]
    return markdown_table([_words(name) for name in names], body)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the mappings in it laid out; lists and what is told elsewhere stay in the file."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key in UNSHOWN_OF_ROWS:
            continue
        if isinstance(value, Mapping):
            flat |= {f"{key} {inner}": one for inner, one in value.items() if _is_single(one)}
        elif _is_single(value):
            flat[key] = value
    return flat


def _was_measured(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """What is zero everywhere was not taken: CPUs keep no account of memory, and have no host to wait for."""
    return name not in ("peak_gib", "card_gib", "host_seconds") or any(row.get(name) for row in rows)


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _census(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter((row["head"], row["verdict"]) for row in rows)
    heads, verdicts = (list(dict.fromkeys(pair[i] for pair in counts)) for i in (0, 1))
    body = [[head, *(str(counts[head, verdict]) for verdict in verdicts)] for head in heads]
    return markdown_table(["architectures", *verdicts], body)


def _notes(key: str, lines: Sequence[str]) -> str:
    shown = [f"* {_words(key)}: {_cut(line)}" for line in lines[:MOST_NOTES]]
    more = [f"* {_words(key)}: {len(lines) - MOST_NOTES} more, in the file"] if len(lines) > MOST_NOTES else []
    return "\n".join([*shown, *more])


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_NOTE else line[:LONGEST_NOTE].rsplit(" ", 1)[0] + " ..."


def _words(name: str) -> str:
    return name.replace("_", " ") if name.isidentifier() else name


def figure_text(value: Any) -> str:
    """Three digits that matter, thousands apart."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return _cell(str(value))
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(text: str) -> str:
    return _cut(" ".join(text.split())).replace("|", "\\|")


def kept_value(results: Mapping[str, Mapping[str, Any]], name: str, path: str) -> Any:
    """A value of a kept result: keys one after another; of a list the first row in which all `key=value` hold."""
    value: Any = results
    for part in (name, *path.split(" > ")):
        wanted = [pair.split("=") for pair in part.split(" & ")] if isinstance(value, list) else []
        rows = [row for row in value if all(str(row.get(key)) == text for key, text in wanted)] if wanted else []
        if not rows and (wanted or part not in value):
            raise DataError(
                "a figure is named that no result keeps",
                seen=f"{part!r} of {name}.json: {path}",
                do="correct its place in docs/notes.md, or measure it",
            )
        value = rows[0] if wanted else value[part]
    return value


def with_figures(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The text with every figure that names its place in a kept result as it is kept there."""
    return FIGURE.sub(lambda m: f"`{m[1]}.json: {m[2]}` = {figure_text(kept_value(results, m[1], m[2]))}", text)


def write_page(*, folder: Path = RESULTS, out: Path = PAGE) -> list[str]:
    """Write the page, and the figures of the notes beside it; the lines that say what the results lack."""
    results = read_results(folder)
    for place, text in pages(results).items():
        file = out if place == PAGE.name else out.parent / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    notes = out.with_name(NOTES)
    if notes.is_file():
        notes.write_text(with_figures(notes.read_text(encoding="utf-8"), results), encoding="utf-8")
    lacking = {name: missing_origin(result) for name, result in results.items()}
    return [f"wrote {out}: {len(results)} results"] + [
        f"{name} does not say its {', '.join(lacks)}" for name, lacks in lacking.items() if lacks
    ]


def main() -> None:
    """The command line of this file alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args()
    sys.stdout.write("\n".join(write_page(folder=args.results, out=args.out)) + "\n")


if __name__ == "__main__":
    main()
