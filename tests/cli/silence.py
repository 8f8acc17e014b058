"""How long a command says nothing: run it in a terminal of its own, or with its errors into a file, and time what comes.

python -m tests.cli.silence [--file] [--slow package.module:name=SECONDS]... -- verify ./my-model
"""

from __future__ import annotations

import argparse
import itertools
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLOWED = """
import sys, time
from importlib import import_module
import json
from truebatch import __main__ as program

def slowed(function, seconds):
    def call(*given, **named):
        time.sleep(seconds)
        return function(*given, **named)
    return call

def slow(places):
    for place, seconds in places.items():
        module, _, names = place.partition(":")
        *owners, name = names.split(".")
        owner = import_module(module)
        for one in owners:
            owner = getattr(owner, one)
        setattr(owner, name, slowed(getattr(owner, name), seconds))

places = json.loads(sys.argv.pop(1))
if places:
    from truebatch.progress import showing
    with showing():
        slow(places)
        from truebatch.interrupts import catch_interruptions
        catch_interruptions()
        import_module("truebatch.cli.app").main()
else:
    program.main()
"""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a command wrote, with the seconds at which each piece came."""

    code: int
    pieces: tuple[tuple[float, bytes], ...]
    seconds: float

    @property
    def text(self) -> str:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces).decode(errors="replace")

    @property
    def silences(self) -> list[tuple[float, str]]:
        """Every pause: how long, and the last that was said before it; the longest first."""
        times = [0.0, *(at for at, _ in self.pieces), self.seconds]
        before = ["(start)", *(piece.decode(errors="replace")[-100:] for _, piece in self.pieces)]
        pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
        return sorted(zip(pauses, before, strict=True), key=lambda one: -one[0])


def listen(
    arguments: Sequence[str], *, slow: Mapping[str, float] | None = None, is_file: bool = False,
    environment: Mapping[str, str] | None = None, cwd: Path | None = None,
) -> Heard:  # fmt: skip
    """Run `truebatch ARGUMENTS`, with what is named in `slow` made slower by that many seconds a call."""
    import json

    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    settings = {**os.environ, "PYTHONPATH": paths, "TRUEBATCH_PROGRESS": "on", "COLUMNS": "100", **(environment or {})}
    command = [sys.executable, "-c", SLOWED, json.dumps(dict(slow or {})), *arguments]
    reading, writing = os.pipe() if is_file else pty.openpty()
    out = subprocess.DEVNULL if is_file else writing
    began = time.monotonic()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=writing, env=settings, cwd=cwd, close_fds=True
    )
    os.close(writing)
    pieces = []
    while True:
        ready, _, _ = select.select([reading], [], [], 0.1)
        try:
            piece = os.read(reading, 1 << 16) if ready else None
        except OSError:  # a terminal whose other end is closed
            break
        if piece == b"":
            break
        if piece:
            pieces.append((time.monotonic() - began, piece))
    os.close(reading)
    code = child.wait()
    return Heard(code, tuple(pieces), time.monotonic() - began)


def main() -> int:
    """Print the longest silences of a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", action="store_true", help="standard error into a file, not a terminal")
    parser.add_argument("--slow", action="append", default=[], metavar="PLACE=SECONDS")
    parser.add_argument("--show", action="store_true", help="print what the command wrote")
    parser.add_argument("arguments", nargs="+")
    given = parser.parse_args()
    slow = {place: float(seconds) for place, _, seconds in (one.rpartition("=") for one in given.slow)}
    heard = listen(given.arguments, slow=slow, is_file=given.file)
    if given.show:
        sys.stdout.write(heard.text.replace("\r\033[K", "\n~ ") + "\n")
    for pause, before in heard.silences[:4]:
        sys.stdout.write(f"{pause:5.1f} s silent after {before!r}\n")
    sys.stdout.write(f"exit code {heard.code}, {heard.seconds:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
