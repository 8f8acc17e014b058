"""Results as they complete: a run in a thread of its own, its rows handed over as soon as they are on the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

Give = Callable[[Sequence[Any]], None]
_BATCHES = 8
"""Batches buffered for the reader; beyond these the run waits."""
_LOOK_SECONDS = 0.1


class _NobodyReads(Exception):  # noqa: N818 (not an error: the reader has what it wanted)
    """Ends a run whose reader has gone."""


def stream(work: Callable[[Give], None]) -> Iterator[Any]:
    """What `work` gives, one by one, while it runs. Its error is raised here; a reader that stops ends it.

    `work` runs in a thread and calls what it is given with lists of values; it waits when the reader is slow.
    """
    waiting: queue.Queue[Sequence[Any] | None] = queue.Queue(_BATCHES)
    gone = threading.Event()
    errors: list[BaseException] = []

    def give(values: Sequence[Any] | None) -> None:
        while not gone.is_set():
            with suppress(queue.Full):
                return waiting.put(values, timeout=_LOOK_SECONDS)
        raise _NobodyReads

    def run() -> None:
        try:
            try:
                work(give)
            except Exception as error:  # raised again where it is waited for
                errors.append(error)
            give(None)
        except _NobodyReads:
            pass

    thread = threading.Thread(target=run, name="stream", daemon=True)
    thread.start()
    try:
        while (values := waiting.get()) is not None:
            yield from values
    finally:
        gone.set()
        thread.join()
    if errors:
        raise errors[0]
