"""The command that a user types, without settings, beside the Hugging Face Trainer: tokens per second by the clock.

A model folder and a file of texts are made once for a case. Every method is a process of its own that gets no more than its
time; the clock is read when a step's line appears in its log, so loading, logging and checkpoints count. A process that
was ended when its time was over keeps the steps it has made. "of steps" is by the run's own seconds of each step, without
what is between them, such as checkpoints. "first step" is the time from the start of the process to the
end of its first step; the first method of ours has an empty cache, the last one what that left behind.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Row, option
from benchmarks.training.command_case import CASES, CommandCase, write_case

DEFAULT, WARM, OFF = "truebatch", "truebatch again", "truebatch off"
PEERS = {
    "HF Trainer 8 padded": "padded",
    "HF Trainer 8 grouped": "grouped",
    "HF Trainer 8 flattened": "flattened",
}
"""Method -> how `benchmarks.training.hf_trainer` collates. Flattened is what TRL's padding-free does without flash-attn."""
ROW = "benchmark row"
METHODS = (DEFAULT, WARM, *PEERS, ROW, OFF)
POLL_SECONDS = 0.05
GRACE_SECONDS = 20.0
"""For a process that was asked to end, before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOptions:
    """How long each method may take."""

    device: str = option("cpu", "cpu (tiny models) or cuda (full sizes).")
    samples: int = option(3000, "Texts in the file.")
    samples_per_step: int = option(256, "Of every method.")
    max_steps: int = option(400, "What every method is asked for.")
    steady_from: int = option(50, "Steps before this one do not count, if the run got further; else its first half.")
    seconds: float = option(150.0, "Of our command, from its start.")
    peer_seconds: float = option(60.0, "Of every other method, from its start.")


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """What the methods of a case share."""

    options: CommandOptions
    case: CommandCase
    folder: Path


def cases(options: CommandOptions) -> Sequence[str]:
    """Names of the cases of this device."""
    return [name for name, case in CASES.items() if case.is_tiny == (options.device == "cpu")]


def prepare(options: CommandOptions, name: str) -> PreparedCase:
    """The model folder and the texts, in a temporary folder that stays until the machine clears it."""
    folder = Path(tempfile.mkdtemp(prefix="train-command-"))
    write_case(CASES[name], folder, samples=options.samples, device=options.device)
    return PreparedCase(options, CASES[name], folder)


def measure(prepared: PreparedCase, method: str) -> Row | None:
    """One process, from its start to its end or to the end of its time."""
    if method == ROW:
        return _benchmark_row(prepared)
    command = _peer_command(prepared, method) if method in PEERS else _our_command(prepared, method)
    log = _log_of(prepared, method)
    is_ours = method not in PEERS
    seconds = prepared.options.seconds if is_ours else prepared.options.peer_seconds
    environment = _environment(prepared.folder)
    with (prepared.folder / f"{_slug(method)}.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        times = _watch(process, log, seconds)
    words = Path(said.name).read_text(errors="replace")
    steps = _records(log)
    return _figures(prepared.options, times, steps) | _said(words, process.returncode, is_ours=is_ours)


def _slug(method: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in method)


def _log_of(prepared: PreparedCase, method: str) -> Path:
    if method in PEERS:
        return prepared.folder / f"{_slug(method)}.jsonl"
    return prepared.folder / f"run-{_slug(method)}" / "metrics.jsonl"


def _environment(folder: Path) -> dict[str, str]:
    """Caches of this case alone: what it begins without is seen, and what it leaves is found by the next method."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(Path(root, "src")), root, *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {"TRUEBATCH_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return {**os.environ, **caches, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _our_command(prepared: PreparedCase, method: str) -> list[str]:
    options, case, folder = prepared.options, prepared.case, prepared.folder
    out = _log_of(prepared, method).parent
    settings = [
        f"train.samples_per_step={options.samples_per_step}", f"train.max_steps={options.max_steps}",
        f"train.epochs={_epochs(options)}", *(["train.true_batch=off"] if method == OFF else []),
    ]  # fmt: skip
    return [
        sys.executable, "-m", "truebatch", "train", "hf", "--model", str(folder / "model"), "--data",
        str(folder / "texts.jsonl"), "--task", case.task, *(["--lora"] if case.lora else []), "--out", str(out),
        "--log-format", "plain", *(word for one in settings for word in ("--set", one)),
    ]  # fmt: skip


def _epochs(options: CommandOptions) -> int:
    return 1 + options.max_steps * options.samples_per_step // options.samples


def _peer_command(prepared: PreparedCase, method: str) -> list[str]:
    options, case = prepared.options, prepared.case
    return [
        sys.executable, "-m", "benchmarks.training.hf_trainer", str(prepared.folder), "--collate", PEERS[method],
        "--task", case.task, "--samples-per-step", str(options.samples_per_step), "--max-steps", str(options.max_steps),
        "--log", str(_log_of(prepared, method)), *(["--lora"] if case.lora else []),
    ]  # fmt: skip


def _watch(process: subprocess.Popen[bytes], log: Path, seconds: float) -> list[float]:
    """When each line of the log was seen, in seconds from the start; the process is ended when its time is over."""
    began, times = time.monotonic(), []
    while process.poll() is None:
        elapsed = time.monotonic() - began
        times += [elapsed] * (_num_lines(log) - len(times))
        if elapsed > seconds:
            _end(process)
            break
        time.sleep(POLL_SECONDS)
    times += [time.monotonic() - began] * (_num_lines(log) - len(times)) if process.returncode == 0 else []
    return times


def _num_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _records(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def _figures(options: CommandOptions, times: Sequence[float], records: Sequence[Mapping[str, Any]]) -> Row:
    """Tokens per second of the steps that count; none of them where too few steps were made."""
    steps = [(at, record) for at, record in zip(times, records, strict=False) if "tokens" in record]
    if len(steps) < 3:
        return {"steps": len(steps), "tokens_per_second": 0.0}
    first = options.steady_from if len(steps) > options.steady_from + 2 else len(steps) // 2
    counted = steps[first:]
    tokens = sum(record["tokens"] for _, record in counted[1:])
    fills = [record["fill"] for _, record in counted if "fill" in record]
    own_seconds = sum(record.get("seconds", 0.0) for _, record in counted[1:])
    return {
        "steps": len(steps),
        "counted_steps": len(counted) - 1,
        "tokens_per_second": tokens / max(counted[-1][0] - counted[0][0], 1e-9),
        **({"tokens_per_second_of_steps": tokens / own_seconds} if own_seconds else {}),
        "first_step_seconds": steps[0][0],
        **({"fill": statistics.fmean(fills)} if fills else {}),
        "peak_gib": max((record.get("peak_gib", 0.0) for _, record in steps), default=0.0),
    }


def _said(words: str, code: int | None, *, is_ours: bool) -> Row:
    """The lines in which a run says what it chose and found; the end of what was printed where it failed."""
    lines = words.splitlines()
    wanted = ("precision:", "packed", "cells:", "compile:", "workers:", "equality:", "compiled rows:", "out of memory")
    kept = [line.strip() for line in lines if is_ours and any(word in line for word in wanted)][:14]
    is_ended = code in (0, 75, -signal.SIGTERM)
    return {
        "exit_code": code,
        "out_of_memory": sum("out of memory" in line.lower() for line in lines),
        **({"said": kept} if kept else {}),
        **({} if is_ended else {"end": lines[-25:]}),
    }


def _benchmark_row(prepared: PreparedCase) -> Row | None:
    """The compiled packed row of the `training` benchmark, on lengths of the same kind: the bound for the command."""
    if prepared.case.bench is None or prepared.options.device == "cpu":
        return None
    out = prepared.folder / "bench.json"
    command = [
        sys.executable, "-m", "benchmarks.training.run", "--device", prepared.options.device, "--only",
        prepared.case.bench, "--ways", "ours packed compiled,uniform compiled", "--out", str(out),
        "--seconds", str(3 * prepared.options.peer_seconds),
    ]  # fmt: skip
    environment = _environment(prepared.folder)
    subprocess.run(
        command, env=environment, capture_output=True, timeout=4 * prepared.options.peer_seconds, check=False
    )
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    speeds = {row["way"]: row["tokens_per_second"] for row in rows}
    return {"tokens_per_second": speeds.get("ours packed compiled", 0.0), "ways": speeds}


def summarize(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Our command over every other method of the same case."""
    speed = {(row["case"], row["method"]): row["tokens_per_second"] for row in rows}
    ratios: dict[str, dict[str, float]] = {}
    for (case, method), value in speed.items():
        ours = max(speed.get((case, DEFAULT), 0.0), speed.get((case, WARM), 0.0))
        if method not in (DEFAULT, WARM) and value and ours:
            ratios.setdefault(case, {})[method] = ours / value
    return {"ratios": ratios} if ratios else {}


BENCHMARK = Benchmark(
    name="train_command",
    about=__doc__,
    options=CommandOptions,
    cases=cases,
    methods=lambda options: METHODS,
    prepare=prepare,
    measure=measure,
    summary=summarize,
    libraries=("transformers",),
)
