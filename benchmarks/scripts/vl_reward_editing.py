"""Editing and judging end to end with an editor that takes its time: one, two and six workers, and one slow among three.

    python -m benchmarks vl_reward_editing --out docs/results/vl_reward_editing.json

The editor waits instead of computing, so that the scheduling is measured and not this machine. "ideal" is the work shared
out with nothing lost; "barrier" is what rounds of one pair a worker would take, as the note's way does.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.command_line import command_line
from truebatch.scoring.runner import Running
from truebatch_systems.vl_reward.data.dataset import EditPair, Wanted, read_benchmark
from truebatch_systems.vl_reward.data.toy_pictures import PROMPTS, ShapesJudge, edit_picture, make_records
from truebatch_systems.vl_reward.editors import ScriptedEditor
from truebatch_systems.vl_reward.stages import Judging, edit_all, judge_all_edits, read_results


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
        edit_all(pairs, [timed_editor(one) for one in took], run, seed=0, how=Running(threads=1))
        edited = time.monotonic()
        judge_all_edits(pairs, ShapesJudge, run, Judging(prompts=PROMPTS), Running(threads=1))
        judged = time.monotonic()
        rows = read_results(pairs, run)
    ideal = len(pairs) / sum(1 / one for one in took)
    barrier = -(-len(pairs) // len(took)) * max(took)
    return {
        "workers": len(took), "speeds": list(speeds), "pairs": len(pairs), "edit_seconds": round(edited - began, 3),
        "judge_seconds": round(judged - edited, 3), "ideal_seconds": round(ideal, 3), "barrier_seconds": round(barrier, 3),
        "over_ideal": round((edited - began) / ideal, 3), "valid": sum(row.status == "ok" for row in rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one edit")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark.json"
        path.write_text(json.dumps(make_records(args.pairs)))
        pairs = read_benchmark(path, Wanted()).pairs
        rows = []
        for speeds in ((1.0,), (1.0,) * 2, (1.0,) * 6, (1.0, 1.0, 0.25)):
            rows.append(run_once(pairs, speeds, args.seconds))
            print(json.dumps(rows[-1]), flush=True)
    ratios = {
        f"{row['workers']} workers over 1": round(rows[0]["edit_seconds"] / row["edit_seconds"], 2) for row in rows[1:3]
    }
    result = {
        "ratios": ratios, "rows": rows, "command": command_line("benchmarks.scripts.vl_reward_editing"),
        "date": datetime.now(UTC).date().isoformat(), "hardware": platform.machine(), "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(ratios))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
