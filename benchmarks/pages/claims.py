"""The tables of the five notes people know, with what was measured beside what is claimed there.

A figure comes from a kept result or it does not appear: where there is no result, the cell says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
"""Kept results by the name of their file."""
Find = Callable[[str, Mapping[str, Any]], str | None]
"""From the first cell of a row and a result to the measured cell, if there is one."""
NOT_YET = "not measured yet"
ONE_UPDATE = "one update per forward pass"
OURS = "ours: one call a micro-batch"


@dataclass(frozen=True, slots=True)
class Claim:
    """A table of a note: its rows as they are written there, and columns to be filled from kept results."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    measured: tuple[tuple[str, str, Find], ...] = ()
    """Head of a column, the result it is read from, and how."""
    remark: str = ""


def note_tables(results: Results) -> list[tuple[Claim, list[str], list[list[str]]]]:
    """Every table with its measured columns: the claim, the header, the rows."""
    return [(claim, _header(claim), [_filled(claim, row, results) for row in claim.rows]) for claim in CLAIMS]


def _header(claim: Claim) -> list[str]:
    return [*claim.header, *([f"measured: {head}" for head, _, _ in claim.measured] or ["measured"])]


def _filled(claim: Claim, row: tuple[str, ...], results: Results) -> list[str]:
    if not claim.measured:
        return [*row, NOT_YET]
    found = [find(row[0], results[name]) if name in results else None for _, name, find in claim.measured]
    return [*row, *(text if text is not None else NOT_YET for text in found)]


def _row(result: Mapping[str, Any], key: str = "rows", **wanted: Any) -> Mapping[str, Any] | None:
    rows = [row for row in result.get(key, ()) if all(row.get(name) == value for name, value in wanted.items())]
    return rows[0] if rows else None


def _times(value: Any) -> str | None:
    return None if value is None else f"{value:.2f}x"


def _gpt_speed(way: str) -> Find:
    def find(batch: str, result: Mapping[str, Any]) -> str | None:
        asked = "one by one" if batch == "1" else way
        row = _row(result, corpus="statements", counted=ONE_UPDATE, way=asked, batch_size=int(batch))
        return _times(row and row["speedup"])

    return find


def _gpt_padding(batch_size: int) -> Find:
    names = {"fixed": "fixed", "dynamic": "dynamic", "dynamic + buckets": "bucketed"}

    def find(strategy: str, result: Mapping[str, Any]) -> str | None:
        row = _row(result, "padding", corpus="statements", batch_size=batch_size)
        return None if row is None else f"{row[names[strategy]]:.0%}"

    return find


def _vae_ratio(against: str) -> Find:
    return lambda batch, result: _times(result.get("ratios", {}).get(f"batch {batch} / {against}"))


def _vae_peak(batch: str, result: Mapping[str, Any]) -> str | None:
    row = _row(result, way=OURS, batch_size=int(batch))
    return None if row is None else f"{row['peak_gib']:.1f} GiB"


STITCHED = {
    "batch 1 (as found)": "as found: ",
    "batch 2 (wished for)": "wished for: ",
    "batch 1, accumulation 4 (recommended)": "the note: ",
    "ours: the same steps of 4 samples, packed": "packed, the note's own steps of 4 samples",
    "ours: batch 8": "batch 8, padded to the longest of it",
    "ours: packed, 8192 cells": "packed, 8192 cells",
}
"""Rows of the table and how the measured row of each begins."""


def _stitched(key: str) -> Find:
    def find(name: str, result: Mapping[str, Any]) -> str | None:
        rows = [row for row in result.get("rows", ()) if name in STITCHED and row["way"].startswith(STITCHED[name])]
        if not rows or not rows[0][key]:
            return None
        return f"{rows[0][key]:,.0f}" if key == "tokens_per_second" else f"{rows[0][key]:.1f} GiB"

    return find


def _pruning_speed(way: str, result: Mapping[str, Any]) -> str | None:
    ratios = result.get("ratios", {})
    measured = next(
        (ratios[name] for name in ("batch 10 / one by one", "batch 8 / one by one") if name in ratios), None
    )
    return "1.00x" if way == "one by one" else _times(measured)


def _pruning_memory(way: str, result: Mapping[str, Any]) -> str | None:
    more = result.get("ratios", {}).get("memory, batch 10 / one by one")
    return "1.00x" if way == "one by one" else _times(more)


def _judged_speed(way: str, result: Mapping[str, Any]) -> str | None:
    return _times(result.get("ratios", {}).get(f"{way} / one by one"))


def _judged_peak(way: str, result: Mapping[str, Any]) -> str | None:
    row = _row(result, way=way)
    return None if row is None or not row["peak_gib"] else f"{row['peak_gib']:.1f} GiB"


def _judged_minutes(stage: str, result: Mapping[str, Any]) -> str | None:
    ways = {"one by one": "one by one", "batch 4": "batch 4", "fitted": "fitted budget"}
    rows = {name: _row(result, way=way) for name, way in ways.items()} if stage == "judging" else {}
    told = [f"{row['minutes_for_270']:.2f} min {name}" for name, row in rows.items() if row is not None]
    return ", ".join(told) or None


def _edited_speed(stage: str, result: Mapping[str, Any]) -> str | None:
    found = result.get("ratios", {}).get("6 workers over 1") if stage.startswith("editing") else None
    return None if found is None else f"{found:.2f}x with 6 editors over 1"


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "chinese_gpt: training speed",
        ("batch size", "claimed samples/s", "claimed speedup", "claimed memory"),
        (
            ("1", "~2.0", "1.0x", "base"),
            ("2", "~3.5", "1.75x", "+50%"),
            ("4", "~5.5", "2.75x", "+100%"),
            ("8", "~7.0", "3.5x", "+200%"),
        ),
        (
            ("padded, CPU", "chinese_gpt_cpu", _gpt_speed("padded")),
            ("packed, CPU", "chinese_gpt_cpu", _gpt_speed("packed")),
            ("padded, H200", "chinese_gpt_cuda", _gpt_speed("padded")),
            ("packed, H200", "chinese_gpt_cuda", _gpt_speed("packed")),
        ),
        "Speedup over one by one on the embedded statements, one update per forward pass, as the note counts. Memory by "
        "batch size is not among the kept results.",
    ),
    Claim(
        "chinese_gpt: padding",
        ("strategy", "claimed mean length", "claimed share of padding"),
        (("fixed", "128", "~84%"), ("dynamic", "~30", "~33%"), ("dynamic + buckets", "~25", "~20%")),
        (
            ("batch 4", "chinese_gpt_cpu", _gpt_padding(4)),
            ("batch 8", "chinese_gpt_cpu", _gpt_padding(8)),
            ("batch 16", "chinese_gpt_cpu", _gpt_padding(16)),
        ),
        "Share of cells that are padding, embedded statements. Packed rows have none.",
    ),
    Claim(
        "seqset_vae: speed and memory",
        ("batch size", "claimed speed", "claimed memory"),
        (("1", "1.0x", "2.5 GB"), ("4", "2.5x", "6.0 GB"), ("8", "4.0x", "12.0 GB"), ("16", "6.0x", "very high")),
        (
            ("a small model of 97k parameters, over its batch 1, CPU", "seqset_vae_cpu", _vae_ratio("our batch 1")),
            ("the default model of 5.9M, over its batch 1, H200", "seqset_vae_cuda", _vae_ratio("our batch 1")),
            ("over the note's way, H200", "seqset_vae_cuda", _vae_ratio("the note's way")),
            ("peak memory, H200", "seqset_vae_cuda", _vae_peak),
        ),
        "The note's way calls the set encoder once a set; both are run on the same stays.",
    ),
    Claim(
        "stitched_llm: settings",
        ("configuration", "claimed memory", "claimed speed"),
        (
            ("batch 1 (as found)", "~8 GB", "base"),
            ("batch 1, accumulation 4 (recommended)", "~8 GB", "+40%"),
            ("batch 2 (wished for)", "~12 GB", "+80%"),
            ("ours: the same steps of 4 samples, packed", "-", "-"),
            ("ours: batch 8", "-", "-"),
            ("ours: packed, 8192 cells", "-", "-"),
        ),
        (
            ("tokens/s, H200", "stitched_llm_cuda", _stitched("tokens_per_second")),
            ("peak memory, H200", "stitched_llm_cuda", _stitched("peak_gib")),
            ("tokens/s, CPU", "stitched_llm_cpu", _stitched("tokens_per_second")),
        ),
        "Tokens that are no padding; rows of the note's three settings are padded to the longest sample. The note was written "
        "for a T4, which was not at hand. What it wished for, more than one row at a time, works.",
    ),
    Claim(
        "vl_reward: 50 images",
        ("way", "claimed time", "claimed speed", "claimed memory"),
        (
            ("one by one", "100 s", "1.0x", "~5 GB"),
            ("batch 2", "75 s", "1.3x", "~7 GB"),
            ("batch 4", "37.5 s", "2.7x", "~10 GB"),
            ("batch 8", "25 s", "4.0x", "~16 GB"),
            ("batch 16", "-", "6.0x", "very high"),
        ),
        (
            ("speed, CPU, tiny model", "vl_reward_cpu", _judged_speed),
            ("speed, H200, 8B", "vl_reward_cuda", _judged_speed),
            ("peak memory, H200, 8B", "vl_reward_cuda", _judged_peak),
        ),
        "Through the whole pipeline: planning, decoding, judging, parsing, the journal. The 8B model has random weights.",
    ),
    Claim(
        "vl_reward: the whole benchmark, 270 images",
        ("stage", "claimed before", "claimed after"),
        (("judging", "9 min", "3.4 min"), ("editing and judging", "30-40 min", "8.4 min")),
        (
            ("judging, H200, 8B", "vl_reward_cuda", _judged_minutes),
            ("editing, an editor that waits", "vl_reward_editing", _edited_speed),
        ),
        "Minutes are those of 270 pairs at the measured rate.",
    ),
    Claim(
        "vlm_pruning: image size, tokens and batch",
        ("image size", "claimed vision tokens", "claimed batch size on a V100 with 32 GB"),
        (("224", "144", "16-20"), ("336", "576", "10-12"), ("448", "1024", "6-8")),
    ),
    Claim(
        "vlm_pruning: speed at batch 10",
        ("way", "claimed speed", "claimed memory"),
        (("one by one", "1.0x", "base"), ("true batch", "3-5x", "+10-20%")),
        (
            ("batch 8, CPU, tiny model", "vlm_pruning_cpu", _pruning_speed),
            ("batch 10, H200, 7B", "vlm_pruning_cuda", _pruning_speed),
            ("its memory", "vlm_pruning_cuda", _pruning_memory),
        ),
    ),
)
"""The tables of the notes. What is not measured yet has no column to read from."""
