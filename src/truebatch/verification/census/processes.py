"""Run each task in a process of its own, so that one that hangs or crashes is a result and not the end.

tasks -> workers (a few at a time) -> Ended: the result, or what became of the process
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

START_LIMIT_S = 180.0
"""How long a worker may take to import what it needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """How the processes are made."""

    jobs: int = 2
    """How many run at once."""
    time_limit_s: float = 120.0
    """A task that takes longer is killed with its process."""
    method: Literal["forkserver", "spawn"] = "forkserver"
    """forkserver: copies of one process that has imported everything. spawn: fresh ones, as CUDA needs them."""
    one_task_each: bool = True
    """False: a process serves one task after the other until it crashes or is killed."""
    preload: tuple[str, ...] = ()
    """Modules the process that is copied imports first."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one task."""

    task: Any
    result: Any
    seconds: float
    problem: str = ""
    """Why there is no result: killed after the time limit, or died."""


class _Worker:
    """One process and the task it has in hand."""

    def __init__(self, work: Callable[[Any], Any], how: Workers, context: Any) -> None:
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work), daemon=True)
        self.process.start()
        other.close()  # then the end of the process is the end of the pipe
        self.how = how
        self.task: Any = None
        self.is_ready = False
        self.begun = time.monotonic()

    @property
    def deadline(self) -> float:
        return self.begun + (self.how.time_limit_s if self.is_ready else START_LIMIT_S)

    def give(self, task: Any) -> None:
        self.task, self.begun = task, time.monotonic()
        self.connection.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_each(tasks: Iterable[Any], work: Callable[[Any], Any], how: Workers) -> Iterator[Ended]:
    """Yield every task with its result as soon as it is there, in the order they end.

    `work` is a function of a module, so that another process can import it. Processes still at work when the
    iteration is left are killed.
    """
    waiting = deque(tasks)
    context = multiprocessing.get_context(how.method)
    if how.preload and how.method == "forkserver":
        context.set_forkserver_preload(list(how.preload))
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.task is not None for worker in workers):
            wanted = min(how.jobs, len(waiting) + sum(worker.task is not None for worker in workers))
            workers += [_Worker(work, how, context) for _ in range(wanted - len(workers))]
            for worker in _awake(workers):
                ended = _hear(worker, waiting)
                if ended is not None and (ended.problem or how.one_task_each):
                    workers.remove(worker)
                    worker.end()
                if ended is not None and ended.task is not None:
                    yield ended
    finally:
        for worker in workers:
            worker.end()


def _awake(workers: Sequence[_Worker]) -> list[_Worker]:
    """Workers that said something, died, or are past their time."""
    remaining = min(worker.deadline for worker in workers) - time.monotonic()
    heard = wait([worker.connection for worker in workers], timeout=max(0.0, remaining))
    return [w for w in workers if w.connection in heard or time.monotonic() >= w.deadline]


def _hear(worker: _Worker, waiting: deque[Any]) -> Ended | None:
    """Take one message; a worker that just started or just finished gets the next task."""
    seconds = time.monotonic() - worker.begun
    if not worker.connection.poll():
        return Ended(_in_hand(worker, waiting), None, seconds, f"killed after {seconds:.0f} s")
    try:
        result = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return Ended(_in_hand(worker, waiting), None, seconds, f"died with exit code {worker.process.exitcode}")
    task, is_first = worker.task, not worker.is_ready
    worker.is_ready, worker.task = True, None
    if waiting and (is_first or not worker.how.one_task_each):
        worker.give(waiting.popleft())
    else:
        worker.begun = float("inf")  # nothing left to do: it never runs out of time
    return None if is_first else Ended(task, result, seconds)


def _in_hand(worker: _Worker, waiting: deque[Any]) -> Any:
    """The task a broken worker had, or would have had: one that cannot even start must not be tried for ever."""
    if worker.task is not None:
        return worker.task
    return waiting.popleft() if waiting else None


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """The life of a worker: say that it is there, then one task after the other."""
    _be_quiet()
    connection.send("ready")
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(work(task))


def _be_quiet() -> None:
    # What libraries print would tear the progress bar apart; what matters comes back as a result.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
