"""The worker side of `subprocess`: reads a call and requests from stdin, writes results and heartbeats to stdout."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from truebatch.interrupts import leave_signals_to_parent
from truebatch.scoring.backends.interface import Backend
from truebatch.scoring.backends.protocol import decode, encode
from truebatch.scoring.backends.worker import BackendService
from truebatch.scoring.spec import ScoreCall, open_one

BEAT_SECONDS = 1.0


class _Voice:
    """The only writer to the real stdout; whatever models print goes to stderr."""

    def __init__(self) -> None:
        self._file: BinaryIO = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def say(self, value: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(encode(value))
            self._file.flush()

    def beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.say({"beat": 1})
            except OSError:  # the run is gone, so stop whatever this process is doing
                os._exit(1)


def main() -> int:
    """Serve the backend of a `ScoreCall` until stdin ends."""
    return serve(lambda call: open_one(ScoreCall(**call)))


def serve(open_call: Callable[[dict[str, Any]], Backend]) -> int:
    """Serve the backend described by the first line of stdin, until stdin ends."""
    leave_signals_to_parent()
    voice = _Voice()
    threading.Thread(target=voice.beat, daemon=True).start()
    service = BackendService(lambda: open_call(decode(sys.stdin.buffer.readline())))
    first = service.greet()
    voice.say(first)
    if "refused" in first:
        return 2
    for line in sys.stdin.buffer:
        request = decode(line)
        voice.say({**service.answer(request), "number": request["number"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
