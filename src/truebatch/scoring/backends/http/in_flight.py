"""Requests in flight: new ones are sent as slots free up, and each result is returned as soon as it is done."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from truebatch.scoring.backends.http.client import HttpClient, PendingRequest, Reply, RequestError
from truebatch.scoring.backends.interface import SampleError

GRACE_SECONDS = 20.0
"""Seconds to wait for responses in flight after a request to stop."""
_LOOK_SECONDS = 0.2
Tag = TypeVar("Tag")


class InFlight(Generic[Tag]):
    """Keeps `most` requests in flight until there are no more, or until it is asked to stop."""

    def __init__(self, client: HttpClient, most: int, is_stopped: Callable[[], bool]) -> None:
        self._client, self._most, self._is_stopped = client, most, is_stopped
        self._tags: dict[PendingRequest, Tag] = {}
        self._done: queue.SimpleQueue[PendingRequest] = queue.SimpleQueue()
        self._ends: float | None = None

    def run(self, bodies: Iterable[tuple[Tag, bytes | SampleError]]) -> Iterator[tuple[Tag, Reply | SampleError]]:
        """The result of each as it finishes; requests without a response before the end are left out."""
        source, is_open = iter(bodies), True
        while is_open or self._tags:
            if self._is_stopped():
                self.end()
            is_open = is_open and self._ends is None
            has_place = is_open and len(self._tags) < self._most
            if has_place:
                one = next(source, None)
                is_open = one is not None
                if one is not None and isinstance(one[1], SampleError):
                    yield one[0], one[1]
                elif one is not None:
                    self._send(one[0], one[1])
            yield from self._finished(is_patient=not has_place)

    def end(self) -> None:
        """Send nothing more, and wait a while for what was sent."""
        self._ends = time.monotonic() + GRACE_SECONDS if self._ends is None else self._ends

    def cancel(self) -> None:
        """Drop everything."""
        for asking in list(self._tags):
            asking.future.cancel()

    def _send(self, tag: Tag, body: Any) -> None:
        asking = self._client.submit(body)
        self._tags[asking] = tag
        asking.future.add_done_callback(lambda _: self._done.put(asking))

    def _finished(self, *, is_patient: bool) -> Iterator[tuple[Tag, Reply | SampleError]]:
        """A finished request, if there is one now or soon."""
        if self._ends is not None:
            is_late = time.monotonic() > self._ends
            for asking in [one for one in self._tags if is_late or not one.is_sent]:
                asking.future.cancel()
        try:
            asking = self._done.get(timeout=_LOOK_SECONDS) if is_patient and self._tags else self._done.get_nowait()
        except queue.Empty:
            return
        tag = self._tags.pop(asking)
        try:
            found: Reply | SampleError = asking.future.result()
        except CancelledError:
            return
        except RequestError as error:
            found = error
        yield tag, found
