"""Planning against its peers, in one process on the same lengths: time, waste, balance, memory, resuming.

    python -m benchmarks planning --out docs/results/planning.json

LightBinPack and TRL are measured where they are installed (extra `bench`), ours with numba where that is. Times are
CPU seconds of this process, the best of the repeats, compilation apart; ours includes checking the lengths, the random
order, packing, dealing to steps and balancing over ranks, theirs is the call that packs.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import today
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.plan_file import load_plan, save_plan
from truebatch.testing.length_distributions import Distribution, example_lengths

NAMES: tuple[Distribution, ...] = ("chat", "bimodal", "patient")
CELLS, RANKS = 8192, 8
FIXED = PlanConfig(layout="packed", cells=CELLS, rows_per_step=64)
STEPS = PlanConfig(layout="packed", cells=CELLS, samples_per_step=1024)
PADDED = PlanConfig(cells=2 * CELLS, micro_batches_per_step=64)
LONG = PlanConfig(layout="packed", cells=CELLS, samples_per_step=4)
Row = dict[str, Any]


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """CPU seconds of the best repeat, and what the last one returned."""
    best, answer = float("inf"), None
    for _ in range(repeats):
        del answer
        gc.collect()
        start = time.process_time()
        answer = call()
        best = min(best, time.process_time() - start)
    return best, answer


def plan_timed(lengths: np.ndarray, config: PlanConfig, repeats: int) -> tuple[float, Plan]:
    return timed(lambda: build_plan(lengths, config, ranks=RANKS), repeats)


def lightbinpack_seconds(lengths: np.ndarray, repeats: int) -> Row:
    if importlib.util.find_spec("lightbinpack") is None:
        return {}
    import lightbinpack

    listed = lengths.tolist()
    seconds, rows = timed(lambda: lightbinpack.obfd(listed, CELLS), repeats)
    return {"lightbinpack_seconds": seconds, "lightbinpack_waste": 1 - lengths.sum() / (len(rows) * CELLS)}


def trl_seconds(lengths: np.ndarray) -> Row:
    """TRL as shipped, on samples of one-byte tokens."""
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        return {}
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    datasets.disable_caching()
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    tokens = pa.LargeListArray.from_arrays(offsets, np.zeros(int(offsets[-1]), dtype=np.int8))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    seconds, packed = timed(lambda: pack_dataset(dataset, CELLS, strategy="bfd"), 1)
    return {"trl_seconds": seconds, "trl_waste": float(1 - lengths.sum() / (len(packed) * CELLS))}


def fixed_rows(name: Distribution, args: argparse.Namespace) -> Row:
    lengths = example_lengths(name, args.num)
    peer = lightbinpack_seconds(lengths, args.repeats)
    seconds, plan = plan_timed(lengths, FIXED, args.repeats)
    said = plan.statistics
    row: Row = {"lengths": name, "num": args.num}
    if peer:
        row["ours_over_lightbinpack"] = seconds / peer["lightbinpack_seconds"]
    row |= {
        "seconds": seconds,
        "waste": said.waste,
        "rank_imbalance": said.rank_imbalance,
        "over_budget": said.over_budget,
    }
    few = lengths[: args.trl_num]
    trl = trl_seconds(few) if args.trl_num else {}
    if trl:
        ours = plan_timed(few, FIXED, args.repeats)[0]
        row |= {"trl_over_ours": trl["trl_seconds"] / ours, "trl_num": len(few)}
    return row | peer | trl


def steps(name: Distribution, args: argparse.Namespace) -> Row:
    seconds, plan = plan_timed(example_lengths(name, args.num), STEPS, args.repeats)
    said = plan.statistics
    return {
        "lengths": name,
        "micro_batches_over_bound": said.micro_batches / said.micro_batches_at_least,
        "rank_imbalance": said.rank_imbalance,
        "waste": said.waste,
        "ms_per_step": 1000 * seconds / said.steps,
        "over_budget": said.over_budget,
    }


def padded(name: Distribution, args: argparse.Namespace) -> Row:
    seconds, plan = plan_timed(example_lengths(name, args.num), PADDED, args.repeats)
    said = plan.statistics
    names = ("waste", "budget_use", "rank_imbalance", "over_budget")
    return {"lengths": name, **{key: getattr(said, key) for key in names}, "seconds": seconds}


def growth(args: argparse.Namespace) -> Row:
    """Ten times as many samples: time in this process, peak memory in one of its own."""
    small, _ = plan_timed(example_lengths("chat", args.num), FIXED, args.repeats)
    large, plan = plan_timed(example_lengths("chat", 10 * args.num), FIXED, args.repeats)
    command = [sys.executable, "-m", "benchmarks.scripts.planning", "--num", str(10 * args.num), "--peak"]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "ratio_10x": large / small,
        "peak_gib": peak / 2**30,
        "num": 10 * args.num,
        "seconds": large,
        "waste": plan.statistics.waste,
    }


def peak_bytes(num: int) -> int:
    """The most memory this process held while it planned, its libraries and the lengths included."""
    build_plan(example_lengths("chat", num), FIXED, ranks=RANKS)
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count what the parent held when it forked
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def resuming() -> Row:
    """A step in the middle of a plan of very many steps, from its file."""
    num_steps = 500_000 + 1000
    plan = build_plan(example_lengths("chat", 4 * num_steps), LONG, ranks=RANKS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan"
        save_plan(plan, path)
        start = time.perf_counter()
        checked = load_plan(path)
        opened = time.perf_counter()
        first = load_plan(path, check=False)
        mapped = time.perf_counter()
        first.step(500_000)
        read = time.perf_counter()
        checked.step(500_000, ranks=3)
        again = time.perf_counter()
        return {
            "resume_ms": 1000 * (read - mapped),
            "resume_other_ranks_ms": 1000 * (again - read),
            "open_ms": 1000 * (mapped - opened),
            "open_checked_ms": 1000 * (opened - start),
            "steps": plan.num_steps,
            "file_mib": path.stat().st_size / 2**20,
        }


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    texts = [[_text(row.get(key)) for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in texts)) for i, key in enumerate(keys)]
    for line in [keys, *texts]:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5f}" if abs(value) < 0.1 else f"{value:.4g}"
    return "-" if value is None else str(value)


def about(command: str) -> Row:
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("numba", "trl", "lightbinpack"):
        if importlib.util.find_spec(name):
            from importlib.metadata import version

            versions[name] = version(name)
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    return {
        "command": command,
        "date": today(),
        "hardware": hardware,
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1_000_000, help="samples")
    parser.add_argument("--trl-num", type=int, default=1_000_000, help="samples given to TRL; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which the best counts")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--peak", action="store_true", help="print the peak memory of one plan in bytes and stop")
    args = parser.parse_args()
    if args.peak:
        print(peak_bytes(args.num))
        return
    for config in (FIXED, STEPS, PADDED, LONG):
        build_plan(example_lengths("chat", 50_000), config, ranks=RANKS)  # compiles
    grown, resumed = growth(args), resuming()  # before the peers fill the memory
    results: Row = {
        "fixed_rows": [fixed_rows(name, args) for name in NAMES],
        "steps": [steps(name, args) for name in NAMES],
        "padded": [padded(name, args) for name in NAMES],
        "growth": [grown],
        "resume": [resumed],
    }
    for title, rows in results.items():
        show(title, rows)
    if args.out:
        command = " ".join(["python", "-m", "benchmarks", "planning", *sys.argv[1:]])
        args.out.write_text(json.dumps({**about(command), **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
