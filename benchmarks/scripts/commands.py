"""Every command of truebatch on a device, typed as a user types it: what it ended with, how long it took, what it said.

    python -m benchmarks commands --device cuda --out docs/results     (8 minutes on one GPU; `make gpu`)
    python -m benchmarks commands --device cpu --tiny --out /tmp/out   (a dry run of every line)
    python3 -m benchmarks.scripts.commands --only "train hf, default,fit"

Models have random weights and are made first. Lines that wait for no other run side by side, so the seconds are of a busy
machine. `commands_DEVICE.json` and `.md` are written anew after every line, the log of all output grows beside the models.
Exits with 1 where a line ended wrongly or was not reached, with 0 where lines were only skipped for want of a package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.commands.folders import MIDDLE, TINY, make_folders
from benchmarks.commands.lines import WORDS, Line, make_lines
from benchmarks.commands.process import Place, Row, run_line, skipped
from benchmarks.harness.choices import read_names
from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import check_can_keep, keep_result, origin
from truebatch.errors import ConfigError
from truebatch.io.atomic_files import write_text
from truebatch.verification.census.tables import markdown_table

SOURCES = Path(__file__).parents[2] / "src"
COLUMNS = ("name", "command", "verdict", "code", "seconds", "said")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandsConfig:
    """What is typed and for how long."""

    device: str = "cuda"
    tiny: bool = False
    seconds: float = 480.0
    """For all lines; what has not begun by then is not run, what runs is ended."""
    together: int = 6
    """Lines at a time."""
    only: tuple[str, ...] = ()


def run_all(lines: Sequence[Line], place: Place, config: CommandsConfig, *, until: float) -> Iterator[Row]:
    """Every line once, as soon as those before it have ended rightly; rows as they come."""
    left, ended = list(lines), dict[str, bool]()
    running: dict[Future[Row], Line] = {}
    known = {line.name for line in lines}
    with ThreadPoolExecutor(config.together) as pool:
        while left or running:
            for line in list(left):
                why = _why_not(line, ended, known, until)
                if why is not None:
                    left.remove(line)
                    row = skipped(line, place, why[0], verdict=why[1])  # type: ignore[arg-type]
                    ended[line.name] = False
                    yield row
                elif len(running) < config.together and all(name in ended for name in line.after if name in known):
                    left.remove(line)
                    limit = min(line.limit, until - time.monotonic())
                    running[pool.submit(run_line, line, place, limit=limit)] = line
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                row = _judged(one.result(), is_over=time.monotonic() > until - 1.0)
                ended[running.pop(one).name] = row.verdict == "right"
                yield row


def _judged(row: Row, *, is_over: bool) -> Row:
    """A line that was ended because the time for all was up has said nothing of itself."""
    if row.verdict != "WRONG" or row.code != -signal.SIGKILL or not is_over:
        return row
    return replace(row, verdict="not run", said="ended, because the time for all lines was up")


def _why_not(line: Line, ended: Mapping[str, bool], known: set[str], until: float) -> tuple[str, str] | None:
    """Why a line is not typed, with the word for it; None where it is, or where it waits."""
    missing = [name for name in line.needs if find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}", "skipped"
    wrong = [name for name in line.after if ended.get(name) is False]
    if wrong:
        return f"after {wrong[0]}, which did not end rightly", "not run"
    return ("the time is up", "not run") if time.monotonic() > until - 1.0 else None


def main(words: Sequence[str] | None = None) -> int:
    """Make the folders, type the lines, keep the table."""
    options = _parse(words)
    config = CommandsConfig(
        device=options.device, tiny=options.tiny, seconds=options.seconds, together=options.together,
        only=_only(options),
    )  # fmt: skip
    out = options.out / f"commands_{config.device}{'_tiny' if config.tiny else ''}.json"
    check_can_keep(out)
    work = options.work or Path(tempfile.mkdtemp(prefix="commands-"))
    began = time.monotonic()
    shutil.rmtree(work / "runs", ignore_errors=True)
    make_folders(work, TINY if config.tiny else MIDDLE)
    print(f"models and samples: {work}, {time.monotonic() - began:.0f} s", flush=True)
    place = Place(
        work=work.resolve(), log=options.log or out.with_suffix(".log"), words=_words(config),
        environment=_environment(config, work.resolve()),
    )  # fmt: skip
    place.log.write_text("", encoding="utf-8")
    lines = [line for line in make_lines(is_gpu=config.device == "cuda") if not config.only or line.name in config.only]
    rows: list[Row] = []
    about = origin(config, "transformers", command=command_line("benchmarks.scripts.commands"))
    for row in run_all(lines, place, config, until=began + config.seconds):
        rows.append(row)
        print(f"{row.verdict:8} {row.seconds:6.1f} s  {row.name}: {row.said}", flush=True)
        _keep(lines, rows, about, out, seconds=time.monotonic() - began)
    bad = [row.name for row in rows if row.verdict in ("WRONG", "not run")]
    print(f"{len(rows) - len(bad)} of {len(rows)} lines are right or skipped; {out}", flush=True)
    return 1 if bad else 0


def _keep(lines: Sequence[Line], rows: Sequence[Row], about: Mapping[str, Any], out: Path, *, seconds: float) -> None:
    """The table so far, as JSON and as Markdown, in the order of the lines."""
    order = [line.name for line in lines]
    values = [row.values() for row in sorted(rows, key=lambda row: order.index(row.name))]
    count = {word: sum(row.verdict == word for row in rows) for word in ("right", "WRONG", "skipped", "not run")}
    missing = len(lines) - len(rows)
    keep_result(
        {**about, "lines": len(lines), "missing": missing, **count, "seconds": round(seconds), "rows": values}, out
    )
    head = (
        f"# Every command on {about['hardware']}\n\n`{about['command']}`, {about['date']}, torch {about['torch']}, "
        f"transformers {about['transformers']}, Python {about['python']}; {seconds:.0f} s for {len(lines)} lines, several "
        f"side by side: {', '.join(f'{number} {word}' for word, number in count.items())}"
        f"{f', {missing} not reached' if missing else ''}.\n\n"
    )
    rows_of_table = [[_cell(row[name]) for name in COLUMNS] for row in values]
    write_text(out.with_suffix(".md"), head + markdown_table(list(COLUMNS), rows_of_table) + "\n")


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("`", "'")


def _words(config: CommandsConfig) -> dict[str, str]:
    return {**WORDS["tiny" if config.tiny else "full"], "{device}": config.device}


def _environment(config: CommandsConfig, work: Path) -> dict[str, str]:
    """This tree's package first, a cache of its own, and no GPU where none is asked for."""
    path = os.pathsep.join([str(SOURCES), str(SOURCES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.device == "cpu" else {}
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 6))}
    return {
        **os.environ, "PYTHONPATH": path, "TRUEBATCH_CACHE": str(work / "cache"), "TRUEBATCH_LANG": "en",
        "PYTHONUNBUFFERED": "1", **hidden, **threads,
    }  # fmt: skip


def _only(options: argparse.Namespace) -> tuple[str, ...]:
    known = [line.name for line in make_lines(is_gpu=options.device == "cuda")]
    try:
        return read_names(options.only, known, kind="line")
    except ConfigError as error:
        sys.exit(str(error))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Type every command on a device and table how each ended.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps: a dry run of every line")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all lines (default 480)")
    parser.add_argument("--together", type=int, default=6, help="lines at a time (default 6)")
    parser.add_argument("--only", default="", help="only these lines, with commas")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the table")
    parser.add_argument("--work", type=Path, help="folder of models and runs (default: a new one)")
    parser.add_argument("--log", type=Path, help="all output (default: beside the table)")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
