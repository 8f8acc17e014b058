"""Worker processes that make micro-batches, and their supervision.

task -> socket -> worker: samples, collate -> shared block -> socket -> the main process, in the order of the tasks

Every worker has its own socket and publishes the sample it is on, so a worker that dies or hangs affects no other, and
the sample can be named.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from truebatch.batch.microbatch import MicroBatch
from truebatch.data.fetch import LoadTask, Recipe
from truebatch.data.shared_memory import receive_object, send_object
from truebatch.data.worker import IDLE, STARTING, Status, WorkerFailure, new_status, run_worker
from truebatch.errors import LoaderError

logger = logging.getLogger("truebatch")

START_SECONDS = 120.0
"""A new process imports torch and the dataset's module first; until then no shorter timeout applies."""
_LOOK_SECONDS = 0.5
"""How often workers are checked while nothing arrives; a death wakes the main process at once."""
_LEAVE_SECONDS = 1.0
"""How long an idle worker may take to exit before it is killed."""
_DEADLY = 2
"""A sample on which this many workers died is the cause, however many restarts are left."""


class WorkerTraceback(Exception):  # noqa: N818 - it is shown as a traceback
    """The traceback of a worker, shown as the cause of the error that names its sample."""


@dataclass(slots=True, eq=False)
class _LoaderWorker:
    index: int
    process: BaseProcess
    sock: socket.socket
    status: Status
    tasks: dict[int, LoadTask] = field(default_factory=dict)
    """Sent but not yet answered, oldest first."""
    sent: float = 0.0


class WorkerPool:
    """A pool of workers and their results. Always `close` it: it then leaves no process behind."""

    def __init__(
        self, recipe: Recipe, *, workers: int, timeout_seconds: float, restarts: int, start_method: str | None
    ) -> None:
        self._recipe = recipe
        self._timeout = timeout_seconds
        self._restarts = restarts
        self._context = multiprocessing.get_context(start_method)
        self._owner = os.getpid()
        self._deaths: Counter[int] = Counter()
        self._made: dict[int, MicroBatch] = {}
        self._failed: dict[int, WorkerFailure] = {}
        self._workers: list[_LoaderWorker] = []
        try:
            for index in range(workers):
                self._workers.append(_start(index, recipe, self._context))
        except BaseException:
            self.close()
            raise

    def submit(self, task: LoadTask) -> None:
        """Give the task to the least busy worker; returns at once."""
        _give(min(self._workers, key=lambda worker: len(worker.tasks)), task)

    def take(self, number: int, *, last: int) -> MicroBatch:
        """Wait for the micro-batch of task `number`; raises if a task up to `last` failed or a worker was lost.

        `last` is the last task of the same step: when one of them failed, the step cannot be completed.
        """
        while True:
            failed = min((n for n in self._failed if n <= last), default=None)
            if failed is not None:
                failure = self._failed[failed]
                raise failure.error from WorkerTraceback(f"\n\n{failure.text}")
            if number in self._made:
                return self._made.pop(number)
            self._look()

    def close(self) -> None:
        """Stop all workers: idle ones exit, busy ones are killed."""
        if os.getpid() != self._owner:
            return  # a forked copy of this object must not stop the original's processes
        for worker in self._workers:
            _dismiss(worker)
        for worker in self._workers:
            _end(worker)
        self._workers.clear()

    def _look(self) -> None:
        handles: list[Any] = [w.sock for w in self._workers]
        wait([*handles, *(w.process.sentinel for w in self._workers)], _LOOK_SECONDS)
        for worker in list(self._workers):
            is_alive = (
                worker.process.is_alive()
            )  # checked first, so that what it sent before it died is read completely
            self._receive(worker)
            if not is_alive:
                self._replace(worker, _death(worker))
            elif _is_hung(worker, self._timeout):
                self._replace(worker, _hang(worker, self._timeout))

    def _receive(self, worker: _LoaderWorker) -> None:
        while True:
            try:
                number, made = receive_object(worker.sock, wait=False)
            except (BlockingIOError, EOFError, ConnectionError):
                return  # nothing yet, or nothing ever again: `is_alive` tells which
            worker.tasks.pop(number)
            if isinstance(made, WorkerFailure):
                self._failed[number] = made
            else:
                self._made[number] = made

    def _replace(self, worker: _LoaderWorker, error: LoaderError) -> None:
        sample_id = worker.status[0]
        self._deaths[sample_id] += sample_id >= 0
        if self._deaths[sample_id] >= _DEADLY:
            raise LoaderError(
                f"sample {sample_id} killed {self._deaths[sample_id]} workers: {error.wrong}",
                seen=error.seen,
                do=error.do,
            )
        if self._restarts < 1:
            raise error
        self._restarts -= 1
        logger.warning("%s\n  (a new worker replaces it; %d restarts left)", error, self._restarts)
        worker.process.kill()
        _end(worker)
        fresh = self._workers[self._workers.index(worker)] = _start(worker.index, self._recipe, self._context)
        for task in worker.tasks.values():
            _give(fresh, task)


def _start(index: int, recipe: Recipe, context: BaseContext) -> _LoaderWorker:
    ours, theirs = socket.socketpair()
    status = new_status(context)
    process = context.Process(  # type: ignore[attr-defined]
        target=run_worker, args=(theirs, status, recipe), name=f"truebatch-loader-{index}", daemon=True
    )
    try:
        process.start()
    except Exception as error:  # pickling a dataset may raise anything
        ours.close()
        raise LoaderError(
            f"loader worker {index} could not be started",
            seen=f"{type(error).__name__}: {error}, start method {context.get_start_method()!r}",
            do="make the dataset and the transform picklable (defined at the top of a module), or set workers=0",
        ) from error
    finally:
        theirs.close()
    return _LoaderWorker(index, process, ours, status)


def _give(worker: _LoaderWorker, task: LoadTask) -> None:
    worker.tasks[task.number] = task
    worker.sent = time.monotonic()
    try:
        send_object(worker.sock, task)
    except (BrokenPipeError, ConnectionResetError):
        return  # it died; the next check finds that, and the task is still in its list


def _dismiss(worker: _LoaderWorker) -> None:
    if worker.tasks or not worker.process.is_alive():
        worker.process.kill()
        return
    try:
        send_object(worker.sock, None)
    except (BrokenPipeError, ConnectionResetError):
        worker.process.kill()


def _end(worker: _LoaderWorker) -> None:
    worker.process.join(_LEAVE_SECONDS)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.sock.close()
    worker.process.close()


def _is_hung(worker: _LoaderWorker, timeout: float) -> bool:
    if not worker.tasks:
        return False
    sample_id, since_ns = worker.status[0], worker.status[2]
    # An idle worker's timeout starts when it gets a task.
    since = max(since_ns / 1e9, worker.sent) if sample_id == IDLE else since_ns / 1e9
    return time.monotonic() - since > (max(timeout, START_SECONDS) if sample_id == STARTING else timeout)


def _death(worker: _LoaderWorker) -> LoaderError:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return LoaderError(
        f"loader worker {worker.index} died while {_doing(worker)}",
        seen=f"{how}, process {worker.process.pid}, {_task(worker)}",
        do=_advice(code, worker.status[0]),
    )


def _hang(worker: _LoaderWorker, timeout: float) -> LoaderError:
    return LoaderError(
        f"loader worker {worker.index} hangs while {_doing(worker)}",
        seen=f"no progress for timeout_seconds={timeout:g}, process {worker.process.pid}, {_task(worker)}",
        do="look for a lock, a network read or a file that blocks forever; raise timeout_seconds if it is only slow",
    )


def _doing(worker: _LoaderWorker) -> str:
    sample_id = worker.status[0]
    if sample_id >= 0:
        return f"loading sample {sample_id}"
    return {STARTING: "starting, before its first sample", IDLE: "waiting, between micro-batches"}.get(
        sample_id, f"collating samples {_ids(worker.tasks.get(worker.status[1]))}"
    )


def _task(worker: _LoaderWorker) -> str:
    task = worker.tasks.get(worker.status[1])
    if task is None:
        waiting = [task.step for task in worker.tasks.values()]
        return f"next in line: step {waiting[0]}" if waiting else "nothing to do"
    return f"step {task.step}, micro-batch {task.index} with samples {_ids(task)}"


def _ids(task: LoadTask | None) -> str:
    ids = [] if task is None else task.rows.ids.tolist()
    return f"[{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}]"


def _advice(code: int, sample_id: int) -> str:
    alone = f"call dataset[{sample_id}] alone to see whether it is the cause" if sample_id >= 0 else "see its output"
    if code == -signal.SIGKILL:
        return f"if nobody killed it, memory ran out: use fewer workers or a smaller prefetch; {alone}"
    return f"{alone}; set workers=0 to debug in this process, or restarts=N to replace workers that die"
