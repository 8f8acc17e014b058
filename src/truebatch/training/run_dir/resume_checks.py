"""Open a run folder for all processes of a run: rank 0 owns it, the others read its checkpoints and write nothing."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from truebatch.errors import RunError, TruebatchError, exit_code_of
from truebatch.interrupts import EXIT_INTERRUPTED, holding
from truebatch.io.atomic_files import read_json, storage_error, write_bytes, write_json
from truebatch.planning.lengths.measured_values import Measured
from truebatch.training.checkpoint.retention import list_checkpoints
from truebatch.training.config import TrainConfig
from truebatch.training.distributed.collectives import num_ranks, rank
from truebatch.training.run_dir.run_dir import RunFolder, RunState, open_run, read_status, write_status

MAY_CHANGE = (
    "devices",
    "shard",
    "workers",
    "keep",
    "epochs",
    "max_steps",
    "track",
    "save_every",
    "stuck_seconds",
    "check_samples",
    "choose",
    "digest_every",
)
"""Settings of `TrainConfig` that another start of the same run may have: none of them changes the samples of a step.

Learning rates of a schedule follow the number of steps; the run says so when that has changed.
"""
BITS_MAY_CHANGE = ("cells", "batch_size", "gradient_accumulation_steps")
"""With `exactness: bits` also these: a step has the same bits however it is cut."""
DATA, LENGTHS = "data.json", "lengths.npy"
MOST_LENGTHS = 50_000
"""That are kept of a dataset, evenly chosen, for pictures of it."""


@contextmanager
def opened_run(
    out: str | Path | RunFolder | None, config: object, *, fresh: bool = False
) -> Iterator[RunFolder | None]:
    """The run in `out`, created or resumed; a run that is open already is passed on, None stays None.

    `config` is a `TrainConfig`, or the settings of a system with one under `train`.
    """
    if out is None or isinstance(out, RunFolder):
        yield out
        return
    own = getattr(config, "train", config)
    free = (*MAY_CHANGE, *(BITS_MAY_CHANGE if getattr(own, "exactness", "") == "bits" else ()))
    names = (*free, *(f"train.{name}" for name in free))
    if rank() > 0:
        yield _wait_for_owner(Path(out))
        return
    with ExitStack() as stack:
        stack.enter_context(holding())
        try:
            run = stack.enter_context(open_run(Path(out), _settled(config), fresh=fresh, may_change=names))
        except TruebatchError as error:
            _tell(error.wrong)
            raise
        _tell("")
        try:
            yield run
        except BaseException as error:
            _correct_status(run, error)
            raise


def _correct_status(run: RunFolder, error: BaseException) -> None:
    """What ends a run before its steps, or after them, is in its status too; a start that was refused changes nothing."""
    code = exit_code_of(error)
    with suppress(TruebatchError):  # a status that cannot be read or written does not hide what has happened
        status = read_status(run.folder)
        is_ours = status.get("pid") == os.getpid()
        if status["exit_code"] != code and (is_ours or code == EXIT_INTERRUPTED):
            state: RunState = "interrupted" if code == EXIT_INTERRUPTED else "failed"
            message = f"{type(error).__name__}: {error}"
            write_status(run, state, step=int(status.get("step", 0)), exit_code=code, message=message)


def _settled(config: object) -> object:
    """With `samples_per_step` as a number: its default follows `devices`, which another start may change."""
    if isinstance(config, TrainConfig):
        return replace(config, samples_per_step=config.num_samples_per_step())
    inner = getattr(config, "train", None)
    return replace(cast(Any, config), train=_settled(inner)) if isinstance(inner, TrainConfig) else config


def check_data(
    run: RunFolder, measured: Measured, *, content: str = "", say: Callable[[str], None] = lambda _line: None
) -> None:
    """A run resumes with the samples it began with: steps of other samples would be another run.

    `content` is a hash of what samples hold; where there was or is none, it is not compared. `say` gets a line where a
    run that has steps no longer knows its data.
    """
    lengths = hashlib.sha256(np.ascontiguousarray(measured.lengths, dtype=np.int64).tobytes()).hexdigest()
    now = {
        "fingerprint": measured.fingerprint,
        "samples": len(measured.lengths),
        "lengths": lengths,
        "content": content,
    }
    file = run.plan / DATA
    if not file.exists():
        if list_checkpoints(run.checkpoints):
            say(
                f"warning: {file} is missing: the run resumes with the present data, which was not compared with anything"
            )
        _keep_data(run, measured, now)
        return
    then = _read_data(file)
    same = {name: now.get(name) == value for name, value in then.items()}
    if not content or not then.get("content"):
        same["content"] = True
    if not all(same.values()):
        raise RunError(
            "the data is not what this run began with",
            seen=f"{now['samples']:,} samples now, {then['samples']:,} then, or other content or lengths",
            do="bring the data (and its tokenizer) back, give another folder (--out), or start again (--fresh)",
        )


def _keep_data(run: RunFolder, measured: Measured, now: Mapping[str, Any]) -> None:
    try:
        run.plan.mkdir(exist_ok=True)
        _keep_lengths(run.plan / LENGTHS, measured)
        write_json(run.plan / DATA, now)
    except OSError as error:
        raise storage_error(RunError, error, what=DATA, folder=run.plan) from error


def _read_data(file: Path) -> dict[str, Any]:
    """What the run began with; a file that is empty or damaged is named, for it would let any data pass."""
    try:
        then = read_json(file, max_bytes=1 << 20)
        wrong = "" if isinstance(then, dict) else f"a {type(then).__name__}"
    except TruebatchError as error:
        then, wrong = {}, error.seen
    if not wrong and not isinstance(then.get("samples"), int):
        wrong = "'samples' is missing"
    elif not wrong and not any(isinstance(then.get(name), str) and then[name] for name in ("lengths", "fingerprint")):
        wrong = "'lengths' is missing"
    if wrong:
        raise RunError(
            "the run no longer says which data it began with",
            seen=f"{file}: {wrong}" if file.stat().st_size else f"{file} is empty",
            do="bring that file back from a copy; only if you know that the data is the same, delete it: it is then "
            "written anew from the data of now",
        )
    return dict(then)


def _keep_lengths(path: Path, measured: Measured) -> None:
    """What the run's report draws: lengths alone, without what samples hold."""
    number = len(measured.lengths)
    chosen = np.linspace(0, max(number - 1, 0), min(number, MOST_LENGTHS)).astype(np.int64)
    held = io.BytesIO()
    np.save(held, measured.lengths[chosen], allow_pickle=False)
    write_bytes(path, held.getvalue())


def _tell(problem: str) -> None:
    """Let the other ranks go on, or stop with the same reason."""
    if num_ranks() > 1:
        dist.broadcast_object_list([problem], 0)


def _wait_for_owner(folder: Path) -> RunFolder:
    problem: list[Any] = [None]
    dist.broadcast_object_list(problem, 0)
    if problem[0]:
        raise RunError("the run cannot be opened", seen=f"rank 0 says: {problem[0]}", do="see the error of rank 0")
    return RunFolder(folder, {})
