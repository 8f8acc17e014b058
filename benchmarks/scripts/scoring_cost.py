"""What a sample costs around a model: `truebatch score` over very many samples of the scripted judge, CPU time and memory.

python -m benchmarks scoring_cost --out docs/results/scoring_cost.json

Beside it a bare loop that keeps no promise: it parses the lines, asks the same judge and writes the scores into a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NUMBERS = (100_000, 1_000_000)
_BARE = """
import json, sys
from truebatch.scoring.backends.interface import ScoreRequest
from truebatch.scoring.backends.scripted import ScriptedBackend
judge, some = ScriptedBackend().judge, []
with open(sys.argv[1]) as lines, open(sys.argv[2], "w") as out:
    def answer():
        for one, found in zip(some, judge(some)):
            out.write(json.dumps({"id": one.id, "score": found.score, "output": found.output}) + "\\n")
        some.clear()
    for line in lines:
        some.append(ScoreRequest(**json.loads(line)))
        if len(some) == 160:
            answer()
    if some:
        answer()
"""


def write_samples(path: Path, number: int) -> None:
    """Different samples of 18 to 84 letters, each with an id."""
    with path.open("w") as file:
        for at in range(number):
            file.write(json.dumps({"id": f"s{at}", "user": f"sample number {at} " + "x" * (at * 7919 % 60)}) + "\n")


def measured(command: list[str]) -> dict[str, float]:
    """CPU seconds, seconds and the largest memory of a command that must succeed."""
    begun = os.times().elapsed
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "seconds": os.times().elapsed - begun,
        "memory_mib": used.ru_maxrss / 1024,
    }


def row(way: str, command: list[str], number: int) -> dict[str, Any]:
    """One way over so many samples, from the first line of the process to its last."""
    found = measured(command)
    return {"way": way, "samples": number, "cpu_us_a_sample": found["cpu_seconds"] / number * 1e6, **found}


def rows_of(folder: Path, number: int) -> list[dict[str, Any]]:
    """The bare loop and the command."""
    data = folder / f"{number}.jsonl"
    write_samples(data, number)
    bare = [sys.executable, "-c", _BARE, str(data), str(folder / "bare.jsonl")]
    score = [sys.executable, "-m", "truebatch", "score", str(data), "--model", "scripted", "--yesno"]
    return [
        row("a bare loop", bare, number),
        row("truebatch score", [*score, "--out", str(folder / f"r{number}")], number),
    ]


def main() -> int:
    """Print and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Keep the result here as JSON.")
    parser.add_argument(
        "--samples", type=int, nargs="*", default=NUMBERS, help="How many; twice, to see memory stay flat."
    )
    args = parser.parse_args()
    given = "" if tuple(args.samples) == NUMBERS else " --samples " + " ".join(map(str, args.samples))
    result: dict[str, Any] = {
        "command": f"python -m benchmarks scoring_cost{given}" + (f" --out {args.out}" if args.out else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as place:
        for number in args.samples:
            for found in rows_of(Path(place), number):
                result["rows"].append(found)
                sys.stdout.write(f"{found}\n")
                sys.stdout.flush()
                if args.out is not None:
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
