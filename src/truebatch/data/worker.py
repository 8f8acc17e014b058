"""A worker process: take a task, publish which sample is being loaded, send the micro-batch back."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
import traceback
from ctypes import Array, c_longlong
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext

import torch

from truebatch.batch.microbatch import MicroBatch
from truebatch.data.fetch import LoadTask, Recipe, read_microbatch
from truebatch.data.shared_memory import receive_object, send_object
from truebatch.errors import LoaderError, TruebatchError
from truebatch.interrupts import leave_signals_to_parent

Status = Array[c_longlong]
"""Shared with the main process: [sample id or one of the states below, task number, start time in ns]."""

COLLATING = -1
IDLE = -2
STARTING = -3


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Sent back instead of a micro-batch: an error that names the sample, and the traceback as text."""

    error: TruebatchError
    text: str


def new_status(context: BaseContext) -> Status:
    """The status of a worker that is about to start."""
    return context.RawArray(c_longlong, [STARTING, -1, time.monotonic_ns()])


def run_worker(sock: socket.socket, status: Status, recipe: Recipe) -> None:
    """Make micro-batches until asked to stop, or until the main process is gone."""
    _settle_in()
    while True:
        _publish(status, IDLE)
        try:
            task = receive_object(sock, wait=True)
        except (EOFError, ConnectionError):
            return  # the main process is gone
        if task is None:
            return
        status[1] = task.number
        _answer(sock, task, _attempt(recipe, task, status))


def _answer(sock: socket.socket, task: LoadTask, made: MicroBatch | WorkerFailure) -> None:
    try:
        send_object(sock, (task.number, made))
    except ConnectionError:
        return  # the main process is gone; the next receive says so
    except Exception as error:  # pickling a value of the user's may raise anything
        known = LoaderError(
            f"step {task.step}, micro-batch {task.index} could not be sent to the main process",
            seen=f"{type(error).__name__}: {error}, samples {task.rows.ids[:8].tolist()}",
            do="if memory ran out, use fewer workers, a smaller prefetch or smaller micro-batches; workers=0 needs none of it",
        )
        send_object(sock, (task.number, WorkerFailure(known, traceback.format_exc())))


def _attempt(recipe: Recipe, task: LoadTask, status: Status) -> MicroBatch | WorkerFailure:
    try:
        return read_microbatch(recipe, task, report=lambda sample_id: _publish(status, sample_id))
    except TruebatchError as error:
        return WorkerFailure(error, traceback.format_exc())
    except Exception as error:  # a dataset, a transform or a collate may raise anything
        ids = task.rows.ids[:8].tolist()
        wrong = f"step {task.step}, micro-batch {task.index} with samples {ids} could not be collated"
        known = LoaderError(wrong, seen=f"{type(error).__name__}: {error}", do="see the traceback")
        return WorkerFailure(known, traceback.format_exc())


def _publish(status: Status, state: int) -> None:
    # Write the time first: a read in between makes an old sample look new, never a new one old.
    status[2] = time.monotonic_ns()
    status[0] = state


def _settle_in() -> None:
    leave_signals_to_parent()
    torch.set_num_threads(1)  # a fork does not have the parent's threads, and workers share the cores
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent, first = multiprocessing.parent_process(), os.getppid()
    assert parent is not None
    while not wait([parent.sentinel], timeout=1.0):
        if os.getppid() != first:
            break
    os._exit(1)
