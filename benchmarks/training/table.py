"""The training benchmark as ratios and rows of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.training.peers import PEERS


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Case -> what the figures to reach are about."""
    found: dict[str, dict[str, float]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        of = {row["way"]: row for row in rows if row["case"] == case}
        speed = {way: row["tokens_per_second"] for way, row in of.items()}
        best = "ours packed, compiled" if "ours packed, compiled" in speed else "ours packed"
        pairs = [("ours packed", "uniform"), ("ours packed, compiled", "uniform, compiled")]
        pairs += [
            ("ours packed", "uniform, our kernel"), ("ours packed, compiled", "uniform, our kernel, compiled")
        ]  # fmt: skip
        pairs += [(way, other) for way in dict.fromkeys([best, "ours packed"]) for other in
                  ("HF default, 8", "HF group_by_length, 8", "one by one", "HF packed, sdpa")]  # fmt: skip
        pairs += [(best, other) for other in PEERS]
        here = {f"{a} / {b}": speed[a] / speed[b] for a, b in pairs if a in speed and b in speed}
        for name, kind in (
            ("new shapes", "new_shapes"), ("first epoch", "first_epoch"), ("one update a micro-batch", "updating_each")
        ):  # fmt: skip
            for other in ("HF default, 8", "HF group_by_length, 8", "one by one"):
                if of.get(best, {}).get(kind) and of.get(other, {}).get(kind):
                    here[f"{name}: {best} / {other}"] = of[best][kind] / of[other][kind]
        if best in of and "HF default, 8" in of and of["HF default, 8"]["peak_gib"]:
            here[f"memory, {best} / HF default, 8"] = of[best]["peak_gib"] / of["HF default, 8"]["peak_gib"]
        found[case] = here
    return found


def table(result: dict[str, Any]) -> list[str]:
    """The ratios first, then the rows."""
    lines = []
    for case, found in result["ratios"].items():
        lines += ["", case, *(f"  {ratio:8.3f}  {name}" for name, ratio in found.items())]
        lines.append(
            f"  {'way':31}{'tokens/s':>10}{'new shapes':>12}{'update each':>12}{'of peak':>9}{'GiB':>7}{'fill':>7}"
            f"{'recompiled':>11}"
        )
        for row in result["rows"]:
            if row["case"] == case:
                lines.append(
                    f"  {row['way']:31}{row['tokens_per_second']:10,.0f}{row['new_shapes']:12,.0f}"
                    f"{row['updating_each']:12,.0f}{row['share_of_peak']:9.1%}{row['peak_gib']:7.1f}{row['fill']:7.1%}"
                    f"{row['compilations']:11}"
                )
    return [*lines, *(f"left out: {what}" for what in result["left_out"])]
