"""Editing and judging end to end with an editor that takes its time: one, two and six workers, and one slow among three.

The editor waits instead of computing, so that the scheduling is measured and not this machine. "ideal" is the work shared
out with nothing lost; "barrier" is what rounds of one pair a worker would take, as the note's way does.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Row, option
from truebatch.errors import ConfigError
from truebatch.scoring.runner import RunConfig
from truebatch_systems.vl_reward.data.dataset import EditPair, Wanted, read_benchmark
from truebatch_systems.vl_reward.data.toy_pictures import PROMPTS, ShapesJudge, edit_picture, make_records
from truebatch_systems.vl_reward.editors import ScriptedEditor
from truebatch_systems.vl_reward.stages import Judging, edit_all, judge_all_edits, read_results

SPEEDS = {"1 worker": (1.0,), "2 workers": (1.0,) * 2, "6 workers": (1.0,) * 6, "3 workers, one slow": (1.0, 1.0, 0.25)}


@dataclass(frozen=True, kw_only=True, slots=True)
class EditingOptions:
    """How much is edited."""

    pairs: int = option(60, "Pictures and instructions.")
    seconds: float = option(0.5, "Of one edit.")

    def __post_init__(self) -> None:
        if self.pairs < 1 or not self.seconds > 0:
            raise ConfigError(
                "there is nothing to time",
                seen=f"{self.pairs} pairs of {self.seconds} s",
                do="give at least one, and some time",
            )


def timed_editor(seconds: float) -> ScriptedEditor:
    """An editor that takes this long for every picture."""

    def edited(image: Any, instruction: str, seed: int) -> Any:
        time.sleep(seconds)
        return edit_picture(image, instruction)

    return ScriptedEditor(edited, name="timed")


def run_once(pairs: Sequence[EditPair], speeds: Sequence[float], seconds: float) -> dict[str, Any]:
    """Both stages with one editor a speed; the seconds of each and what they could be at best."""
    took = [seconds / speed for speed in speeds]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        began = time.monotonic()
        edit_all(pairs, [timed_editor(one) for one in took], run, seed=0, how=RunConfig(threads=1))
        edited = time.monotonic()
        judge_all_edits(pairs, ShapesJudge, run, Judging(prompts=PROMPTS), RunConfig(threads=1))
        judged = time.monotonic()
        rows = read_results(pairs, run)
    ideal = len(pairs) / sum(1 / one for one in took)
    barrier = -(-len(pairs) // len(took)) * max(took)
    return {
        "workers": len(took), "speeds": list(speeds), "pairs": len(pairs), "edit_seconds": round(edited - began, 3),
        "judge_seconds": round(judged - edited, 3), "ideal_seconds": round(ideal, 3), "barrier_seconds": round(barrier, 3),
        "over_ideal": round((edited - began) / ideal, 3), "valid": sum(row.status == "ok" for row in rows),
    }  # fmt: skip


def prepare(options: EditingOptions, case: str) -> tuple[EditingOptions, str, Sequence[EditPair]]:
    """The pairs that are edited."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark.json"
        path.write_text(json.dumps(make_records(options.pairs)))
        return options, case, read_benchmark(path, Wanted()).pairs


def measure(prepared: tuple[EditingOptions, str, Sequence[EditPair]], method: str) -> Row:
    """Both stages, end to end."""
    options, case, pairs = prepared
    return run_once(pairs, SPEEDS[case], options.seconds)


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """How many times as fast several workers edit."""
    seconds = {row["case"]: row["edit_seconds"] for row in rows}
    faster = [case for case in ("2 workers", "6 workers") if case in seconds and "1 worker" in seconds]
    return {"ratios": {f"{case} over 1": round(seconds["1 worker"] / seconds[case], 2) for case in faster}}


BENCHMARK = Benchmark(
    name="vl_reward_editing",
    about=__doc__,
    options=EditingOptions,
    cases=lambda options: list(SPEEDS),
    methods=lambda options: ["shared out"],
    prepare=prepare,
    measure=measure,
    summary=summarize,
)
