"""One line typed in a process of its own: how it ended, how long it took, what it said; stopped on the way where asked."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.commands.lines import Line

REPOSITORY = Path(__file__).parents[2]
POLL_SECONDS = 0.02
CLOSE = 2e-3
"""A run that was resumed ends at the loss of one that was not, up to the noise of a GPU's kernels."""
SIGNALS = {"kill": (signal.SIGKILL, -signal.SIGKILL), "term": (signal.SIGTERM, 75)}
"""How a run is stopped, and the exit code that follows."""
Verdict = Literal["right", "WRONG", "skipped", "not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of a line."""

    name: str
    command: str
    verdict: Verdict
    code: int | None
    seconds: float
    said: str
    """One line of its output, or why it was not run."""

    def values(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**asdict(self), "seconds": round(self.seconds, 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where lines are typed."""

    work: Path
    """The folder of the models; runs go below it."""
    log: Path
    """All that commands say, command by command."""
    words: Mapping[str, str]
    environment: Mapping[str, str]

    def typed(self, line: Line) -> str:
        """The line with its words in braces filled in."""
        text = line.command
        for word, value in self.words.items():
            text = text.replace(word, value)
        return text


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    code: int
    output: str
    seconds: float


def run_line(line: Line, place: Place, *, limit: float) -> Row:
    """Type a line and judge how it ended; its output is added to the log."""
    began, output, wrong, before = time.monotonic(), "", "", ""
    if line.stop:
        stopped, expected = _run(line, place, limit=limit, is_to_stop=True), SIGNALS[line.stop][1]
        output, before = stopped.output, f"ended with {stopped.code}, then: "
        wrong = "" if stopped.code == expected else f"stopped, it ended with {stopped.code}, not {expected}"
    last = _run(line, place, limit=max(1.0, limit - (time.monotonic() - began)))
    output += last.output
    wrong = wrong or _wrong(line, last, place)
    with place.log.open("a", encoding="utf-8") as file:
        file.write(f"\n$ {_shown(line, place)}\n{output}\n[{line.name}: exit {last.code}, {last.seconds:.1f} s]\n")
    return Row(
        name=line.name, command=_shown(line, place), verdict="WRONG" if wrong else "right", code=last.code,
        seconds=time.monotonic() - began, said=wrong or before + _said(line, last.output, place),
    )  # fmt: skip


def skipped(line: Line, place: Place, why: str, *, verdict: Verdict = "skipped") -> Row:
    """A line that is not typed, and why."""
    return Row(name=line.name, command=_shown(line, place), verdict=verdict, code=None, seconds=0.0, said=why)


def _shown(line: Line, place: Place) -> str:
    return f"{'python -m pytest' if line.is_pytest else 'truebatch'} {place.typed(line)}"


def _program(line: Line, place: Place) -> list[str]:
    words = shlex.split(place.typed(line))
    files = [str(file) for file in sorted(REPOSITORY.glob("tests/**/test_*.py")) if "mark.gpu" in file.read_text()]
    return [sys.executable, "-m", *(["pytest", *words, *files] if line.is_pytest else ["truebatch", *words])]


def _run(line: Line, place: Place, *, limit: float, is_to_stop: bool = False) -> Ended:
    """Run a line to its end, its limit, or until there is something to resume where it is to be stopped."""
    began, program = time.monotonic(), _program(line, place)
    output = place.work / "logs" / f"{time.monotonic_ns()}.txt"
    output.parent.mkdir(exist_ok=True)
    with output.open("wb") as file:
        process = subprocess.Popen(
            program, cwd=REPOSITORY if line.is_pytest else place.work, env=dict(place.environment),
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        if is_to_stop:
            _stop_when_begun(process, line, place, until=began + limit)
        process.wait(timeout=max(0.1, limit - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end_session(process)
    return Ended(process.wait(), output.read_text(encoding="utf-8", errors="replace"), time.monotonic() - began)


def _stop_when_begun(process: subprocess.Popen[bytes], line: Line, place: Place, *, until: float) -> None:
    """Send the signal once there is something to resume; a run that ends before that is left alone."""
    while process.poll() is None and time.monotonic() < until:
        if any((place.work / _out(line)).glob(line.begun)):
            process.send_signal(SIGNALS[line.stop][0])
            return
        time.sleep(POLL_SECONDS)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started: they share its session, so that nobody else's is met."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wrong(line: Line, last: Ended, place: Place) -> str:
    """What is wrong about how a line ended; empty where nothing is."""
    tail = _said(line, last.output, place)
    if last.code != line.code:
        return f"exit {last.code} instead of {line.code}: {tail}"
    missing = [text for text in _looked_for(line, place) if text not in last.output]
    if missing:
        return f"it does not say {missing[0]!r}: {tail}"
    if line.like:
        found, expected = (_last_loss(place.work / run) for run in (_out(line), line.like))
        if found is None or expected is None or abs(found - expected) > CLOSE * abs(expected):
            return f"its last loss is {found}, without a stop {expected}"
    return ""


def _out(line: Line) -> str:
    words = shlex.split(line.command)
    return words[words.index("--out") + 1]


def _last_loss(run: Path) -> float | None:
    """Of a training run's log."""
    rows = list(_rows(run / "metrics.jsonl"))
    return rows[-1] if rows else None


def _rows(file: Path) -> Iterator[float]:
    if file.is_file():
        for text in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            if "loss" in row:
                yield float(row["loss"])


def _looked_for(line: Line, place: Place) -> list[str]:
    return [text.replace("{device}", place.words["{device}"]) for text in line.says]


def _said(line: Line, output: str, place: Place) -> str:
    """The line of the output that says most: the one looked for, an error, or else the last."""
    lines = [one.strip() for one in output.replace("\r", "\n").splitlines() if one.strip()]
    errors = [one for one in lines if one.startswith("error:")]
    looked_for = [one for one in lines if line.says and _looked_for(line, place)[-1] in one]
    return (errors or looked_for or lines or ["nothing"])[-1][:200]
