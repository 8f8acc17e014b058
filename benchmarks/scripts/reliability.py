"""The long sweeps of the tests, one after another, and what each came to.

    python -m benchmarks reliability --out docs/results/reliability.json

A sweep that has passed before is kept; `--only NAME` runs that one anew. The file is written after every sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness.result_file import describe_hardware, today

ROOT = Path(__file__).parents[2]
DRILL, RESUME = "tests/testing/drills/test_kill_drill.py", "tests/training/checkpoint/test_resume.py"
SWEEPS = {
    "corrupted checkpoints": ("tests/training/checkpoint/test_store.py::test_two_thousand_damages_are_seen",),
    "requests to stop": (f"{RESUME}::test_sixty_requests_to_stop_at_random_moments",),
    "signals to commands": ("tests/test_interrupts_sweep.py",),
    "nan cells": (
        "tests/training/optim/test_nonfinite.py::test_no_nan_survives_as_good",
        "tests/training/distributed/test_processes.py::test_nan_on_any_rank_is_met_by_all_ranks_alike",
    ),
    "sharded processes": ("tests/training/distributed/test_fsdp.py",),
    "resume at every step": (f"{RESUME}::test_a_run_resumes_to_the_bit_at_every_step",),
    "random kills": (f"{DRILL}::test_a_thousand_kills_at_random_times_are_survived",),
    "every failpoint visit": (f"{DRILL}::test_a_kill_at_every_visit_of_every_failpoint_is_survived",),
    "errors of the disk": (f"{DRILL}::test_an_error_of_the_disk_at_every_failpoint_is_survived",),
    "every system call": (f"{DRILL}::test_a_fault_of_any_call_to_the_system_is_survived",),
    "real out of memory": (
        "tests/training/memory/test_survival.py::test_real_errors_under_a_limit_of_the_system_change_nothing",
    ),
    "hostile folders": (
        "tests/hostile/test_strangers.py::test_no_file_of_a_stranger_runs_code_hangs_or_takes_the_memory[strangers]",
    ),
    "journal kills": (
        "tests/scoring/test_runner.py::test_kills_at_random_moments_leave_the_export_byte_for_byte[20-50]",
    ),
    "http faults": (
        "tests/scoring/backends/http/test_faults.py::test_rounds_of_every_fault_take_no_memory_and_end_at_the_deadline",
    ),
}
WHAT = {
    "corrupted checkpoints": "checkpoints damaged in twelve ways: seen, and the newest good one taken",
    "requests to stop": "SIGTERM at random samples: saved, exit 75, ended bit-equal",
    "signals to commands": "SIGTERM, SIGINT, SIGHUP from the first line to the end of every command: 75, or its own code",
    "nan cells": "sources x policies on one and two processes: no NaN in a good checkpoint",
    "sharded processes": "FSDP2 on two processes: killed, full disk, memory, other numbers of processes",
    "resume at every step": "60 steps x padded, packed x augmentation x workers 0, 2: bit-equal",
    "random kills": "SIGKILL at random moments, keep 1 or 3: went on, ended bit-equal",
    "every failpoint visit": "SIGKILL at every visit of every failpoint, keep 1 or 3: went on; the exported model, best.json, "
    "metrics.jsonl, the newest checkpoint and the state of every generator are those of the run that was never stopped",
    "errors of the disk": "exit and four errors of the disk at one visit of every failpoint, keep 1 or 3: the same",
    "every system call": "kill and four errors at every call to the system of a run, by strace",
    "real out of memory": "errors of the allocator under a limit of the system: gradient equal",
    "http faults": "rounds of every fault of a server: a record of its kind each, no score but those given",
    "hostile folders": "each met by a command in a process of its own: no code, 30 s, 1 GB, no traceback, exit code of ours",
    "journal kills": "SIGKILL of a scoring run at random moments: went on, export byte for byte",
}


def run_sweep(nodes: tuple[str, ...]) -> dict[str, Any]:
    """One sweep in a pytest of its own; trials are what its tests counted, else the tests themselves."""
    with tempfile.TemporaryDirectory() as place:
        report, began = Path(place) / "report.xml", time.monotonic()
        options = ["-n", "0", "-o", "addopts=", "-o", "junit_family=xunit1", "--timeout", "3600"]
        command = ["-m", "pytest", *options, f"--junitxml={report}", *nodes]
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "tests": len(cases),
        "failed": len(bad),
        "skipped": skipped,
        "trials": sum(map(trials_of, cases)) - skipped,
        **{name: figure for case in cases for name, figure in figures_of(case).items() if name != "trials"},
        "passed": done.returncode == 0 and not skipped,
        "seconds": round(time.monotonic() - began),
        "command": " ".join(["python", *(part for part in command if not part.startswith("--junit"))]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def trials_of(case: ElementTree.Element) -> int:
    return int(figures_of(case).get("trials", 1))


def figures_of(case: ElementTree.Element) -> dict[str, float]:
    """What a test measured of itself."""
    return {p.attrib["name"]: float(p.attrib["value"]) for p in case.iter("property")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/reliability.json")
    parser.add_argument("--only", choices=list(SWEEPS), action="append", default=[])
    args = parser.parse_args()
    found = json.loads(args.out.read_text())["sweeps"] if args.out.exists() else {}
    kept = {name: sweep for name, sweep in found.items() if sweep["passed"]}
    for name, nodes in SWEEPS.items():
        if name in args.only or (not args.only and name not in kept):
            kept[name] = {"what": WHAT[name], **run_sweep(nodes)}
            write(args.out, {name: kept[name] for name in SWEEPS if name in kept})
    sys.exit(0 if all(sweep["passed"] for sweep in kept.values()) else 1)


def write(out: Path, sweeps: dict[str, Any]) -> None:
    result = {
        "sweeps": sweeps,
        "command": "python -m benchmarks reliability",
        "date": today(),
        "hardware": describe_hardware(),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
